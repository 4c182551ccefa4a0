# SPDX-License-Identifier: Apache-2.0
"""What the GPU kernels take: compiles every kernel for every architecture, on any machine.

Nothing is run and nothing is timed; the figures are the compiler's and do not depend on the machine. It takes minutes
the first time; then the build cache has the kernels.

    python scripts/bench/kernels.py [--op SelectiveScan] [--out docs/results/kernels.json]

With `--op`, which may be repeated, the records of other ops stay as they are. It needs the extra `gpu`.
"""

from __future__ import annotations

import argparse
import json
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

from nemo_build.plugins.gpu import all_kernels
from nemo_build.plugins.gpu.compile import PTX_VERSIONS, compile_kernel
from nemo_build.plugins.gpu.kernel import Kernel

ROOT = Path(__file__).resolve().parent.parent.parent


def figures(kernel: Kernel, sm: int) -> dict[str, int]:
    """What a compiled kernel takes: registers of a thread, bytes of shared and local memory, bytes of code."""
    binary = compile_kernel(kernel, sm)
    taken = {"registers": binary.registers, "shared": binary.shared, "stack": binary.stack}
    return {**taken, "cubin": len(binary.cubin)}


def record(kernel: Kernel) -> dict[str, Any]:
    """One kernel on every architecture that it is for."""
    print(kernel.label, file=sys.stderr, flush=True)
    architectures = {str(sm): figures(kernel, sm) for sm in PTX_VERSIONS if sm >= kernel.least_sm}
    facts = {"op": kernel.op, "name": kernel.name, "types": dict(kernel.types), "per_token": kernel.per_token}
    return {**facts, "threads": 32 * kernel.num_warps, "architectures": architectures}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "results" / "kernels.json")
    parser.add_argument("--op", action="append", help="only kernels of this op")
    options = parser.parse_args()
    there = (
        json.loads(options.out.read_text(encoding="utf-8"))["kernels"]
        if options.op and options.out.is_file()
        else []
    )
    kept = [entry for entry in there if entry["op"] not in options.op]
    made = [record(kernel) for kernel in all_kernels() if not options.op or kernel.op in options.op]
    result = {
        "command": "python scripts/bench/kernels.py",
        "triton": version("triton"),
        "ptx_versions": {str(sm): v for sm, v in PTX_VERSIONS.items()},
        "kernels": sorted(kept + made, key=lambda entry: str(entry["op"])),
    }
    options.out.write_text(json.dumps(result, indent=1) + "\n")
    print(f"written to {options.out}")


if __name__ == "__main__":
    main()
