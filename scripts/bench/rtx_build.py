# SPDX-License-Identifier: Apache-2.0
"""How long TensorRT-RTX takes to build an engine of the full size, and how much memory.

    python scripts/bench/rtx_build.py [--target NAME] [--format nvfp4|nvfp4-all] [--pattern MEM*E] [--phase decode]

The model is Nemotron 3.5 Lightning's shape with random weights: a sparse checkpoint gives the names and shapes, the
weights' file that the compiler reads is filled with random numbers. It takes about twice the weights' size on disk,
below --work, and for the whole model some 20 GB of memory; it refuses to begin without. Prints JSON.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import ml_dtypes
import numpy as np
import onnx

from nemo_build.engines.targets import TARGETS
from nemo_build.engines.tensorrt_rtx import LIBRARY
from nemo_build.engines.tensorrt_rtx.plan_file import summarize
from nemo_build.engines.trt.builder import Job, build_plan, profile_of
from nemo_build.engines.trt.forms import WeightTable
from nemo_build.engines.trt.lowering import lower
from nemo_build.engines.trt.phases import phases_of
from nemo_build.engines.weights import PlacedWeight, place, point_at, stored_tensors
from nemo_build.export.exporter import export_bundle

SYNTHETIC = Path(__file__).resolve().parent.parent / "synthetic_checkpoint.py"
PIECE = 1 << 24
MEMORY_SHARE, MEMORY_BESIDES = 1.1, 1 << 30  # of the weights' size


def main() -> None:
    """Lower, fill, compile, report."""
    arguments = parse()
    work = Path(tempfile.mkdtemp(prefix="rtx_build.", dir=arguments.work))
    try:
        print(json.dumps(measure(arguments, work), indent=1))
    finally:
        shutil.rmtree(work)


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--target", default="rtx-pro-6000")
    parser.add_argument("--format", default="nvfp4-all", choices=("bf16", "nvfp4", "nvfp4-all"))
    parser.add_argument("--pattern", help="layers, if not the model's own 52")
    parser.add_argument("--phase", default="decode", choices=("decode", "prefill"))
    parser.add_argument("--sequences", type=int, default=8)
    parser.add_argument("--context", type=int, default=4096)
    parser.add_argument("--work", type=Path, default=Path(tempfile.gettempdir()))
    return parser.parse_args()


def measure(arguments: argparse.Namespace, work: Path) -> dict[str, object]:
    """Build one plan below `work`; returns what it took."""
    target = TARGETS[arguments.target]
    assert target.sm is not None, "a GPU"
    checkpoint, bundle = work / "checkpoint", work / "bundle"
    pattern = ["--pattern", arguments.pattern] if arguments.pattern else []
    command = [sys.executable, str(SYNTHETIC), "--format", arguments.format, *pattern, str(checkpoint)]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    export_bundle(checkpoint, bundle)

    begin = time.monotonic()
    model = onnx.load(bundle / "target.onnx", load_external_data=False)
    table = WeightTable(stored_tensors([model]), (target.sm,))
    (phase,) = phases_of(arguments.sequences, arguments.context, (arguments.phase,))
    lowered = lower(model, phase, table)
    placed = place(table.weights.values())
    point_at(lowered, placed, "weights.bin")
    path = work / f"target.{phase.name}.onnx"
    path.write_bytes(lowered.SerializeToString(deterministic=True))
    seconds = {"lowering": time.monotonic() - begin}

    total = sum(p.weight.nbytes for p in placed)
    require_room(work, total)
    begin = time.monotonic()
    fill(placed, work / "weights.bin")
    seconds["writing random weights"] = time.monotonic() - begin

    inputs = {
        i.name: [d.dim_param or d.dim_value for d in i.type.tensor_type.shape.dim]
        for i in lowered.graph.input
    }
    plan = work / f"target.{phase.name}.engine"
    begin = time.monotonic()
    with Sampler() as sampler:
        job = Job(LIBRARY, path, plan, work / "log", (target.sm,), profile_of(inputs, phase))
        built = build_plan(job)
    seconds["compiling and writing the plan"] = time.monotonic() - begin
    return {
        "target": target.name,
        "format": arguments.format,
        "phase": phase.name,
        "nodes": len(lowered.graph.node),
        "weights_bytes": total,
        "seconds": {name: round(value, 1) for name, value in seconds.items()},
        "peak_anonymous_bytes": sampler.peak,
        "peak_resident_bytes": built.peak,
        "plan": summarize(plan).to_json(),
    }


def require_room(work: Path, total: int) -> None:
    """Exit if disk or memory are too small for so many bytes of weights."""
    disk, memory = shutil.disk_usage(work).free, available_memory()
    need = int(MEMORY_SHARE * total) + MEMORY_BESIDES
    if disk < 2.2 * total or memory < need:
        sys.exit(
            f"It takes {2.2 * total / 1e9:.1f} GB of disk ({disk / 1e9:.1f} GB are free below {work}) and "
            f"{need / 1e9:.1f} GB of memory ({memory / 1e9:.1f} GB are free)."
        )


def available_memory() -> int:
    """Bytes of memory that are free or can be freed."""
    fields = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
    return int(fields["MemAvailable"].split()[0]) << 10


def fill(placed: list[PlacedWeight], path: Path) -> None:
    """Random contents, different for every weight; scales and plain numbers of a harmless size."""
    with open(path, "wb") as file:
        for seed, item in enumerate(placed):
            file.write(b"\0" * (item.offset - file.tell()))
            random = np.random.default_rng(seed)
            left = item.weight.nbytes
            while left:
                piece = numbers(random, item.weight.dtype, min(left, PIECE))
                file.write(piece)
                left -= len(piece)


def numbers(random: np.random.Generator, dtype: str, nbytes: int) -> bytes:
    """So many bytes of random numbers of a type."""
    if dtype in ("F4_E2M1", "I4"):
        return random.bytes(nbytes)
    if dtype == "F8_E4M3":
        return random.integers(0x20, 0x40, nbytes, np.uint8).tobytes()
    kind = {"BF16": ml_dtypes.bfloat16, "F16": np.float16, "F32": np.float32}[dtype]
    values = random.random(nbytes // np.dtype(kind).itemsize, np.float32) * np.float32(0.02) + np.float32(
        1e-3
    )
    return values.astype(kind).tobytes()


class Sampler:
    """The largest anonymous memory of this process's children while the block runs, in `peak`, bytes."""

    def __init__(self) -> None:
        self.peak = 0
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._sample, daemon=True)

    def __enter__(self) -> Sampler:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._end.set()
        self._thread.join()

    def _sample(self) -> None:
        while not self._end.wait(0.1):
            for task in Path("/proc/self/task").iterdir():
                try:
                    children = (task / "children").read_text().split()
                    for child in children:
                        status = Path(f"/proc/{child}/status").read_text()
                        anonymous = next(line for line in status.splitlines() if line.startswith("RssAnon"))
                        self.peak = max(self.peak, int(anonymous.split()[1]) << 10)
                except (OSError, StopIteration):
                    continue  # it has just ended


if __name__ == "__main__":
    main()
