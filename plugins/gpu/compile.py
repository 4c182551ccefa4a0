# SPDX-License-Identifier: Apache-2.0
"""Compile kernels to machine code (cubin) and PTX for any architecture, without a GPU or a driver.

Everything needed is in Triton's wheel. Results are kept in the build cache by a digest of all that they depend on.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import os
import re
import subprocess
import tempfile
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

from nemo_build import settings
from nemo_build.plugins.gpu.kernel import ALIGNMENT, Kernel
from nemo_build.plugins.gpu.worker import Worker

PTX_VERSIONS = {80: 80, 86: 80, 87: 80, 89: 80, 90: 80, 100: 87, 103: 88, 110: 90, 120: 87, 121: 88}
"""Architectures (compute capability times ten), and the oldest version of PTX that Triton writes for each. PTX is
compiled by the driver where a cubin is not accepted, and an older driver reads an older version."""

SHARED_LIMITS = {80: 163, 86: 99, 87: 163, 89: 99, 90: 227, 100: 227, 103: 227, 110: 227, 120: 99, 121: 99}
"""Shared memory that one program may have, in KiB (CUDA C++ Programming Guide, technical specifications)."""

SHARED_UNASKED = 48
"""As much of it, in KiB, a launch may have without the driver being asked for more (same source, section on shared
memory of compute capabilities 7.x and later)."""

_FORMAT = 1  # of the cache's files


@dataclass(frozen=True)
class Hidden:
    """A pointer that Triton appends to the parameters; null will do where no bytes are asked for."""

    name: str
    bytes_per_program: int
    alignment: int


@dataclass(frozen=True)
class Binary:
    """A compiled kernel.

    Attributes:
        sm: The architecture. From 90 on, code for one runs on no other, not even its PTX.
        cubin: Machine code.
        ptx: The same as PTX, in the version of :data:`PTX_VERSIONS`.
        entry: Name of the function in both.
        num_warps: Warps of a program; 32 threads each.
        shared: Dynamic shared memory to launch it with, in bytes.
        registers: Registers of a thread.
        stack: Bytes of a thread in local memory: spilled registers and arrays that are indexed.
        hidden: Pointers that follow the kernel's own parameters.
    """

    sm: int
    cubin: bytes
    ptx: str
    entry: str
    num_warps: int
    shared: int
    registers: int
    stack: int
    hidden: tuple[Hidden, ...]


@cache
def _worker() -> Worker:
    return Worker({"TRITON_INTERPRET": None})


def compile_kernel(kernel: Kernel, sm: int) -> Binary:
    """Compile a kernel for an architecture, or take it from the cache.

    Raises:
        WorkerDied: LLVM gave up.
        WorkerFailed: Triton or ptxas refused the kernel.
    """
    recipe = {
        # Triton's key of a function covers its source and that of the functions it calls.
        "source": kernel.function.cache_key,
        "signature": kernel.signature,
        "constexprs": dict(kernel.constexprs),
        "sm": sm,
        "options": {
            "num_warps": kernel.num_warps,
            "num_stages": kernel.num_stages,
            "ptx_version": max(PTX_VERSIONS[sm], kernel.least_ptx),
            # Operations are fused where kernels say so (tl.fma), so that results do not depend on the code around.
            "enable_fp_fusion": False,
        },
    }
    function = f"{kernel.function.__module__}:{kernel.function.__name__}"
    entry = settings.cache_directory() / "kernels" / _digest(function, recipe)
    cached = _read(entry)
    if cached is None:
        _write(entry, _worker().call(f"{__name__}:_compile_here", function, recipe))
        cached = _read(entry)
        assert cached is not None
    return cached


def _digest(function: str, recipe: dict[str, Any]) -> str:
    import triton

    facts = [_FORMAT, triton.__version__, function, recipe]
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()


def _read(entry: Path) -> Binary | None:
    try:
        facts = json.loads((entry / "kernel.json").read_text(encoding="utf-8"))
        cubin, ptx = (entry / "kernel.cubin").read_bytes(), (entry / "kernel.ptx").read_text(encoding="utf-8")
    except FileNotFoundError:
        return None
    hidden = tuple(Hidden(**h) for h in facts.pop("hidden"))
    return Binary(cubin=cubin, ptx=ptx, hidden=hidden, **facts)


def _write(entry: Path, binary: Binary) -> None:
    """Store it under a temporary name and rename it; whoever comes second leaves what the first has written."""
    entry.parent.mkdir(parents=True, exist_ok=True)
    facts = asdict(binary)
    with tempfile.TemporaryDirectory(dir=entry.parent, prefix=".new-") as name:
        directory = Path(name) / "kernel"
        directory.mkdir()
        (directory / "kernel.cubin").write_bytes(facts.pop("cubin"))
        (directory / "kernel.ptx").write_text(facts.pop("ptx"), encoding="utf-8")
        (directory / "kernel.json").write_text(json.dumps(facts, sort_keys=True), encoding="utf-8")
        try:
            directory.rename(entry)
        except OSError:
            if not entry.is_dir():
                raise


def _compile_here(function: str, recipe: dict[str, Any]) -> Binary:
    """What the worker does. Triton's own cache goes to a folder that is removed again."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    module, _, name = function.partition(":")
    fn = getattr(importlib.import_module(module), name)
    if fn.cache_key != recipe["source"]:
        raise ValueError(f"The source of {function} has changed since one of two processes read it.")
    signature = recipe["signature"]
    pointers = [i for i, kind in enumerate(signature.values()) if kind.startswith("*")]
    source = ASTSource(
        fn=fn,
        signature=signature,
        constexprs=recipe["constexprs"],
        attrs={(i,): [["tt.divisibility", ALIGNMENT]] for i in pointers},
    )
    with tempfile.TemporaryDirectory() as scratch:
        triton.knobs.cache.dir = scratch
        triton.knobs.compilation.disable_line_info = True  # which would hold paths of this machine
        target = GPUTarget("cuda", recipe["sm"], 32)
        compiled = triton.compile(source, target=target, options=recipe["options"])
        meta, cubin, ptx = compiled.metadata, compiled.asm["cubin"], compiled.asm["ptx"]
        registers, stack = _resources(cubin, Path(scratch) / "kernel.cubin")
    hidden = (
        Hidden("global_scratch", meta.global_scratch_size, meta.global_scratch_align),
        Hidden("profile_scratch", meta.profile_scratch_size, meta.profile_scratch_align),
    )
    shared, warps = meta.shared, meta.num_warps
    return Binary(recipe["sm"], cubin, ptx, meta.name, warps, shared, registers, stack, hidden)


def _resources(cubin: bytes, file: Path) -> tuple[int, int]:
    """Registers and bytes of local memory of a thread, as cuobjdump reads them from machine code."""
    import triton

    file.write_bytes(cubin)
    command = [triton.knobs.nvidia.cuobjdump.path, "--dump-resource-usage", os.fspath(file)]
    text = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+) .*?LOCAL:(\d+)", text)
    if found is None:
        raise ValueError(f"cuobjdump wrote {text!r}.")
    registers, stack, local = (int(n) for n in found.groups())
    return registers, stack + local
