# SPDX-License-Identifier: Apache-2.0
"""ONNX Runtime's CUDA provider on a machine without a GPU: CUDA's libraries with nothing behind them.

``native/fake_cuda.c`` says what they do. A program that is started with them (``LD_LIBRARY_PATH``) gets the real
provider: it registers kernels, places nodes, plans memory, binds addresses and launches. Nothing is computed.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import onnxruntime

from nemo_build.engines.ort_cuda.executor import CUDA_LIBRARIES

SOURCE = Path(__file__).parent / "native" / "fake_cuda.c"
PROVIDER = Path(onnxruntime.__file__).parent / "capi" / "libonnxruntime_providers_cuda.so"
TENSORRT = PROVIDER.with_name("libonnxruntime_providers_tensorrt.so")
DRIVER = "libcuda.so.1"
OTHERS = {"libcudnn.so.9": "cudnn", "libnvonnxparser.so.10": "createNvOnnx", "libnvinfer.so.10": ""}
"""What the TensorRT provider is linked to besides, and how the names in it begin. Listing kernels starts it as well."""


def unavailable() -> str:
    """Why it cannot be had here; empty if it can."""
    tools = [tool for tool in ("gcc", "nm") if shutil.which(tool) is None]
    if tools:
        return f"{' and '.join(tools)} not installed"
    return "" if PROVIDER.is_file() else "this onnxruntime has no CUDA provider"


def make_libraries(folder: Path) -> None:
    """Compile the libraries, each with all the names that the provider asks of it."""
    names = [name for provider in (PROVIDER, TENSORRT) if provider.is_file() for name in _asked(provider)]
    for library in CUDA_LIBRARIES:
        _compile(folder, library, [n.partition("@")[0] for n in names if n.endswith(f"@{library}")])
    _compile(folder, DRIVER, [n for n in names if n.startswith("cu") and "@" not in n])
    left = {
        n.partition("@")[0] for n in names if n.startswith(("cudnn", "createNv", "createInfer", "getInfer"))
    }
    left |= {n for n in names if n.startswith("getPlugin")}
    for library, prefix in OTHERS.items():
        wanted = {n for n in left if n.startswith(prefix)}
        left -= wanted
        _compile(folder, library, sorted(wanted))


def _asked(library: Path) -> list[str]:
    """Names that a library wants from others, with their versions."""
    listed = subprocess.run(
        ["nm", "-D", "--undefined-only", library], check=True, capture_output=True, text=True
    )
    return [line.split()[-1] for line in listed.stdout.splitlines()]


def _compile(folder: Path, library: str, names: list[str]) -> None:
    stem = library.removeprefix("lib").partition(".")[0]
    text = SOURCE.read_text(encoding="utf-8")
    source, versions = folder / f"{stem}.c", folder / f"{stem}.map"
    missing = [n for n in dict.fromkeys(names) if not re.search(rf"[ *]{n}\(", text)]
    stubs = "".join(f"void* {n}(void) {{ return 0; }}\n" for n in missing)
    source.write_text(f'#include "{SOURCE}"\n{stubs}', encoding="utf-8")
    versions.write_text(f"{library} {{ global: *; }};\n", encoding="utf-8")
    command = ["gcc", "-shared", "-fPIC", "-O1", "-w", f"-DLIBRARY_{stem}", source, "-o", folder / library]
    command += [f"-Wl,-soname,{library}"]
    if library != DRIVER:  # the real one has no versions
        command += [f"-Wl,--version-script,{versions}"]
    subprocess.run(command, check=True, capture_output=True)


def run(folder: Path, script: str, *arguments: object, sm: int = 90) -> tuple[str, list[str]]:
    """Run a script with the libraries of a folder; returns its output, and what it copied, launched and waited for."""
    log = folder / "log"
    log.write_text("", encoding="utf-8")
    environment = {
        **os.environ,
        "LD_LIBRARY_PATH": str(folder),
        "FAKE_CUDA_LOG": str(log),
        "FAKE_CUDA_SM": str(sm),
    }
    done = subprocess.run(
        [sys.executable, "-c", script, *map(str, arguments)],
        env=environment,
        cwd=Path(__file__).parent.parent,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout, log.read_text(encoding="utf-8").splitlines()


TYPES = ("float", "float16", "bfloat16", "int32", "int64", "bool", "uint8")
"""Types that the table has; others are left out."""

_LIST = """
import json
import onnxruntime.capi.onnxruntime_pybind11_state as state
found = [k for k in state.get_all_opkernel_def() if k.provider == "CUDAExecutionProvider" and k.domain == ""]
print(json.dumps([[k.op_name, k.version_range, k.type_constraints] for k in found]))
"""


def kernel_table(folder: Path, opset: int) -> dict[str, list[dict[str, str]]]:
    """The CUDA provider's kernels for standard ops of an opset, as ``engines/ort_cuda/cuda_kernels.json`` has them."""
    output, _ = run(folder, _LIST)
    table: dict[str, list[dict[str, str]]] = {}
    for op, (first, last), constraints in json.loads(output.splitlines()[-1]):
        if first <= opset <= last:
            allowed = {
                name: [t for t in TYPES if f"tensor({t})" in types] for name, types in constraints.items()
            }
            if all(allowed.values()):
                table.setdefault(op, []).append({name: " ".join(types) for name, types in allowed.items()})
    return {op: _merged(kernels) for op, kernels in sorted(table.items())}


def _merged(kernels: list[dict[str, str]]) -> list[dict[str, str]]:
    """The same with kernels that differ in one parameter alone made one."""
    merged: list[dict[str, str]] = []
    for kernel in sorted(kernels, key=lambda k: sorted(k.items())):
        for known in merged:
            differing = [n for n in kernel if known.get(n) != kernel[n]]
            if known.keys() == kernel.keys() and len(differing) <= 1:
                for name in differing:
                    both = {*known[name].split(), *kernel[name].split()}
                    known[name] = " ".join(t for t in TYPES if t in both)
                break
        else:
            merged.append(dict(kernel))
    return merged


def write_table(path: Path, folder: Path, opset: int) -> None:
    """Write the table anew, for another version of ONNX Runtime."""
    rows = [f"{json.dumps(op)}: {json.dumps(kernels)}" for op, kernels in kernel_table(folder, opset).items()]
    head = f'"onnxruntime": "{onnxruntime.__version__}",\n"opset": {opset},\n"kernels": '
    path.write_text("{\n" + head + "{\n" + ",\n".join(rows) + "\n}\n}\n", encoding="utf-8")
