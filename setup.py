# SPDX-License-Identifier: Apache-2.0
"""The part of the build that pyproject.toml cannot say: top-level folders are packages of ``nemo_build``."""

from pathlib import Path

from setuptools import Extension, setup

FOLDERS = {
    "nemo_build": "nemo_build",
    **{f"nemo_build.{name}": name for name in ("export", "plugins", "engines", "runtime")},
}
PACKAGES = [
    ".".join([package, *path.parent.relative_to(folder).parts])
    for package, folder in FOLDERS.items()
    for path in sorted(Path(folder).rglob("__init__.py"))
]

# The codecs' kernels: a plain shared library that ctypes loads. Without it the codecs use NumPy.
PACK = Extension(
    "nemo_build.plugins.codecs._pack",
    ["plugins/codecs/pack.cc"],
    depends=["plugins/codecs/lanes.h"],
    language="c++",
    optional=True,
    # Results must be rounded as written: no contraction to fused operations.
    extra_compile_args=["-std=c++17", "-O3", "-g0", "-ffp-contract=off", "-fvisibility=hidden", "-Wno-psabi"],
)

setup(packages=PACKAGES, package_dir=FOLDERS, ext_modules=[PACK])
