# SPDX-License-Identifier: Apache-2.0
"""How long TensorRT-RTX takes to build an engine of the full size, and how much memory.

    python scripts/bench/rtx_build.py [--target NAME[,NAME]] [--format nvfp4|nvfp4-all] [--phases decode,prefill]
    python scripts/bench/rtx_build.py --pattern 'M*' [--out FILE]     # few layers, printed only unless a file is named

Several targets are one plan for all their GPUs. The model is Nemotron 3.5 Lightning's shape with random weights: a
sparse checkpoint gives the names and shapes, the weights' file that the compiler reads is filled with random numbers.
It takes about twice the weights' size on disk, below --work, and for the whole model some 20 GB of memory; it refuses
to begin without. Results are added to docs/results/rtx_build.json.
"""

from __future__ import annotations

import argparse
import datetime
import json
import platform
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import ml_dtypes
import numpy as np
import onnx

from nemo_build.engines.targets import TARGETS
from nemo_build.engines.tensorrt_rtx import LIBRARY
from nemo_build.engines.tensorrt_rtx.addresses import environment
from nemo_build.engines.tensorrt_rtx.plan_file import summarize
from nemo_build.engines.trt.builder import Job, build_plan, profile_of
from nemo_build.engines.trt.forms import WeightTable
from nemo_build.engines.trt.lowering import lower
from nemo_build.engines.trt.phases import DECODE, PREFILL, Phase, phases_of
from nemo_build.engines.weights import PlacedWeight, place, point_at, stored_tensors
from nemo_build.export.exporter import export_bundle

SYNTHETIC = Path(__file__).resolve().parent.parent / "synthetic_checkpoint.py"
RESULTS = Path(__file__).resolve().parents[2] / "docs" / "results" / "rtx_build.json"
PIECE = 1 << 24
MEMORY_SHARE, MEMORY_BESIDES = 1.1, 1 << 30  # of the weights' size


def main() -> None:
    """Lower, fill, compile, report."""
    arguments = parse()
    work = Path(tempfile.mkdtemp(prefix="rtx_build.", dir=arguments.work))
    out = arguments.out or (None if arguments.pattern else RESULTS)
    try:
        for phase, model, placed, seconds in prepare(arguments, work):
            result = measure(arguments, work, phase, model, placed)
            result["preparing_seconds"] = seconds
            name = f"{arguments.target}, {arguments.format}, {phase.name}"
            report(name, result)
            if out:
                merge(out, name, result)
    finally:
        shutil.rmtree(work)


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--target", default="rtx-pro-6000")
    parser.add_argument("--format", default="nvfp4-all", choices=("bf16", "nvfp4", "nvfp4-all"))
    parser.add_argument("--pattern", help="layers, if not the model's own 52")
    parser.add_argument("--phases", default=f"{DECODE},{PREFILL}")
    parser.add_argument("--sequences", type=int, default=8)
    parser.add_argument("--context", type=int, default=4096)
    parser.add_argument("--work", type=Path, default=Path(tempfile.gettempdir()))
    parser.add_argument("--out", type=Path)
    return parser.parse_args()


def gpus(arguments: argparse.Namespace) -> tuple[int, ...]:
    """The targets' GPUs, compute capability times ten."""
    found = {TARGETS[name].sm for name in arguments.target.split(",")}
    if None in found:
        sys.exit(f"{arguments.target} names a target that is no GPU")
    return tuple(sorted(sm for sm in found if sm is not None))


def prepare(
    arguments: argparse.Namespace, work: Path
) -> Iterator[tuple[Phase, onnx.ModelProto, list[PlacedWeight], dict[str, float]]]:
    """Each phase's graph with its weights, which lie below `work` until the next; and how long that took."""
    checkpoint, bundle = work / "checkpoint", work / "bundle"
    pattern = ["--pattern", arguments.pattern] if arguments.pattern else []
    command = [sys.executable, str(SYNTHETIC), "--format", arguments.format, *pattern, str(checkpoint)]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    export_bundle(checkpoint, bundle)
    model = onnx.load(bundle / "target.onnx", load_external_data=False)
    tensors = stored_tensors([model])
    for phase in phases_of(arguments.sequences, arguments.context, tuple(arguments.phases.split(","))):
        begin = time.monotonic()
        table = WeightTable(tensors, gpus(arguments))
        lowered = lower(model, phase, table)
        placed = place(table.weights.values())
        point_at(lowered, placed, "weights.bin")
        lowering = time.monotonic() - begin
        require_room(work, sum(p.weight.nbytes for p in placed))
        begin = time.monotonic()
        fill(placed, work / "weights.bin")
        writing = time.monotonic() - begin
        yield phase, lowered, placed, {"lowering": round(lowering, 1), "random weights": round(writing, 1)}


def measure(
    arguments: argparse.Namespace,
    work: Path,
    phase: Phase,
    model: onnx.ModelProto,
    placed: list[PlacedWeight],
) -> dict[str, object]:
    """Build one plan below `work`, which is deleted again; returns what it took."""
    path, plan = work / f"target.{phase.name}.onnx", work / f"target.{phase.name}.engine"
    path.write_bytes(model.SerializeToString(deterministic=True))
    inputs = {
        i.name: [d.dim_param or d.dim_value for d in i.type.tensor_type.shape.dim] for i in model.graph.input
    }
    profile, sms = profile_of(inputs, phase), gpus(arguments)
    begin = time.monotonic()
    with Sampler() as sampler:
        built = build_plan(Job(LIBRARY, path, plan, work / "log", sms, profile, environment=environment()))
    seconds = time.monotonic() - begin
    summary = summarize(plan)
    plan.unlink()
    used = {t.name for t in model.graph.initializer}
    return {
        "sms": sms,
        "pattern": arguments.pattern or "the model's own",
        "sequences": arguments.sequences,
        "context": arguments.context,
        "nodes": len(model.graph.node),
        "weights_bytes": sum(p.weight.nbytes for p in placed if p.weight.name in used),
        "seconds": round(seconds, 1),
        "peak_anonymous_bytes": sampler.peak,
        "peak_resident_bytes": built.peak,
        "plan_bytes": summary.header.nbytes,
        "plan_weight_bytes": summary.header.weight_bytes,
        "scratch_bytes": summary.scratch,
        "constants": summary.constants,
        "kernels": summary.kernels,
        "products": summary.products,
        "fusions": summary.fusions,
    }


def report(name: str, result: dict[str, object]) -> None:
    """Print what a build took."""
    figures = ("peak_anonymous_bytes", "plan_bytes", "scratch_bytes")
    sizes = ", ".join(f"{f.removesuffix('_bytes')} {int(str(result[f])) / 1e9:.2f} GB" for f in figures)
    print(f"{name}: {result['seconds']} s, {sizes}", flush=True)


def merge(out: Path, name: str, result: dict[str, object]) -> None:
    """Add a result to the file, in place of an older one of its name."""
    results = json.loads(out.read_text())["results"] if out.exists() else {}
    content = {
        "date": datetime.datetime.now(tz=datetime.UTC).date().isoformat(),
        "command": "python scripts/bench/rtx_build.py",
        "python": platform.python_version(),
        "tensorrt_rtx": LIBRARY.version,
        "results": results | {name: result},
    }
    out.write_text(json.dumps(content, indent=1) + "\n")


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
