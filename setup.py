# SPDX-License-Identifier: Apache-2.0
"""The part of the build that pyproject.toml cannot say: top-level folders are packages of ``nemo_build``, and
the native libraries."""

import platform
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

FOLDERS = {
    "nemo_build": "nemo_build",
    **{
        f"nemo_build.{name}": name
        for name in ("export", "plugins", "engines", "runtime", "triton_repo", "deploy")
    },
}
PACKAGES = [
    ".".join([package, *path.parent.relative_to(folder).parts])
    for package, folder in FOLDERS.items()
    for path in sorted(Path(folder).rglob("__init__.py"))
]
COMMON = [
    *("-std=c++17", "-O3", "-g0", "-fvisibility=hidden"),
    *("-Wno-psabi", "-Wno-maybe-uninitialized", "-Wno-uninitialized"),
]

# The codecs' kernels: a plain shared library that ctypes loads. Without it the codecs use NumPy.
PACK = Extension(
    "nemo_build.plugins.codecs._pack",
    ["plugins/codecs/pack.cc"],
    depends=["plugins/native/lanes.h"],
    language="c++",
    optional=True,
    # Results must be rounded as written: no contraction to fused operations.
    extra_compile_args=[*COMMON, "-ffp-contract=off"],
)

# The ops' CPU kernels: one library for each instruction set, of the same sources; plugins/native/__init__.py
# chooses at run time. Without them engines run the reference functions.
AVX2 = ["-mavx2", "-mfma", "-mf16c"]
AVX512 = [*AVX2, *(f"-mavx512{part}" for part in ("f", "bw", "dq", "vl"))]
INSTRUCTION_SETS = {
    "plain": [],
    "avx2": AVX2,
    "avx512": AVX512,
    "avx512vnni": [*AVX512, "-mavx512vnni"],
    "avx512bf16": [*AVX512, "-mavx512vnni", "-mavx512bf16"],
}
IS_X86 = platform.machine().lower() in ("x86_64", "amd64")
SOURCES = sorted(str(p) for p in [*Path("plugins").glob("*/cpu.cc"), *Path("plugins/native").glob("*.cc")])
HEADERS = sorted(str(p) for p in Path("plugins").glob("*/*.h"))
KERNELS = [
    Extension(
        f"nemo_build.plugins.native._{name}",
        SOURCES,
        depends=HEADERS,
        include_dirs=["plugins/native"],
        language="c++",
        optional=True,
        # The kernels say where operations are fused, so that results depend on the instruction set alone.
        extra_compile_args=[*COMMON, "-fno-math-errno", "-ffp-contract=off", *flags],
    )
    for name, flags in INSTRUCTION_SETS.items()
    if IS_X86 or not flags
]

# The op that launches GPU kernels in ONNX Runtime. It needs nothing of CUDA to be compiled or loaded.
LAUNCH = Extension(
    "nemo_build.plugins.gpu._launch",
    [*sorted(str(p) for p in Path("plugins/gpu/ort").glob("*.cc")), "plugins/native/library.cc"],
    depends=HEADERS + sorted(str(p) for p in Path("plugins/gpu/ort").glob("*.h")),
    include_dirs=["plugins/native", "plugins/gpu/ort"],
    libraries=["dl"],
    language="c++",
    optional=True,
    extra_compile_args=COMMON,
)

# The allocator of processes that build TensorRT-RTX plans. Without it plans are not the same to the byte each time.
ADDRESSES = Extension(
    "nemo_build.engines.tensorrt_rtx._addresses",
    ["engines/tensorrt_rtx/addresses.cc"],
    libraries=["dl"],
    language="c++",
    optional=True,
    # What is an allocator must not be taken for a use of one.
    extra_compile_args=[*COMMON, "-fno-builtin"],
)


class BuildLibraries(build_ext):
    """Compiles the same sources once for each library, so each needs a folder of its own for the objects."""

    def build_extension(self, ext: Extension) -> None:
        shared, self.build_temp = self.build_temp, f"{self.build_temp}/{ext.name}"
        try:
            super().build_extension(ext)
        finally:
            self.build_temp = shared


setup(
    packages=PACKAGES,
    package_dir=FOLDERS,
    ext_modules=[PACK, *KERNELS, LAUNCH, *([ADDRESSES] if IS_X86 else [])],
    cmdclass={"build_ext": BuildLibraries},
)
