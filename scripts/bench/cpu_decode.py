# SPDX-License-Identifier: Apache-2.0
"""Decode and prefill speed of the CPU engine, beside llama.cpp, transformers and the memory's bandwidth.

    python scripts/bench/cpu_decode.py WORK [--shape few|full] [--peers DIRECTORY] [--rounds N] [--out FILE.json]

WORK holds checkpoints, engines and model files, which are made if they are not there: random weights at the widths
of Nemotron 3.5 Lightning, with few layers (MEM*E) or all 52. Contenders take turns, each in a process of its own,
when the machine is idle; figures are medians over the rounds.

--peers is where `python scripts/bench/_llama_cpp.py build DIRECTORY` built llama.cpp; without it llama.cpp is left
out. transformers runs with few layers only: all 52 in bfloat16 take 63 GB.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import _llama_cpp
import _models
from _process import run
from _quiet import machine, measure

PROMPTS = (128, 512)
DECODE = 32
BATCHES = (4, 16)
CONTEXT = 1024
FAR_BEHIND = ("llama.cpp nvfp4", "transformers bf16")
"""Contenders that one round is enough for."""

OURS = """
import json, resource, statistics, sys, time
import numpy as np
from pathlib import Path
from nemo_build.engines.ort import OrtSession
from nemo_build.engines.session import StepBatch
model, threads, prompts, decode, batches = Path(sys.argv[1]), int(sys.argv[2]), *map(json.loads, sys.argv[3:])
def anonymous():
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(l.split()[1]) * 1024 for l in lines if l.startswith("RssAnon"))
rng = np.random.default_rng(0)
start = time.perf_counter()
session = OrtSession(model, slots=max([1, *batches]), context=1024, threads=threads)
found = {"load_s": time.perf_counter() - start, "prompt": {}, "batched": {}}
vocabulary = session._vocabulary
past = {}
def step(rows, length):
    tokens = rng.integers(0, vocabulary, (rows, length)).tolist()
    batch = StepBatch.of_rows(tokens, past=[past.get(s, 0) for s in range(rows)], slots=list(range(rows)))
    start = time.perf_counter()
    session.step(batch)
    for s in range(rows):
        past[s] = past.get(s, 0) + length
    return time.perf_counter() - start
for n in prompts:
    times = []
    for _ in range(3):
        past = {}
        times.append(step(1, n))
    found["prompt"][n] = n / statistics.median(times)
past = {}
found["decode"] = 1 / statistics.median(step(1, 1) for _ in range(3 * decode))
found["anonymous_decode"] = anonymous()
for n in batches:
    past = {}
    step(n, 16)
    found["batched"][n] = n / statistics.median(step(n, 1) for _ in range(decode))
found["anonymous_peak"] = anonymous()
print(json.dumps(found))
"""

TRANSFORMERS = """
import json, statistics, sys, time, torch
from transformers import AutoConfig, AutoModelForCausalLM
directory, threads, prompts, decode = sys.argv[1], int(sys.argv[2]), json.loads(sys.argv[3]), int(sys.argv[4])
torch.set_num_threads(threads)
config = AutoConfig.from_pretrained(directory)
with torch.device("cpu"):
    torch.set_default_dtype(torch.bfloat16)
    model = AutoModelForCausalLM.from_config(config).eval()
found = {"prompt": {}}
with torch.inference_mode():
    for n in prompts:
        times = []
        for _ in range(3):
            ids = torch.randint(0, config.vocab_size, (1, n))
            start = time.perf_counter()
            out = model(ids, use_cache=True, logits_to_keep=1)
            times.append(time.perf_counter() - start)
        found["prompt"][n] = n / statistics.median(times)
    cache, times = out.past_key_values, []
    for _ in range(decode):
        start = time.perf_counter()
        out = model(torch.randint(0, config.vocab_size, (1, 1)), past_key_values=cache, use_cache=True)
        times.append(time.perf_counter() - start)
    found["decode"] = 1 / statistics.median(times)
print(json.dumps(found))
"""


def prepare(work: Path, shape: str, peers: Path | None, kinds: list[str]) -> dict[str, Path]:
    """Make the engine and the GGUF files where they are missing."""
    engine = _models.engine(work, shape, sequences=max(BATCHES), context=CONTEXT)
    found = {"engine": engine / "target.onnx"}
    if peers is not None:
        found |= {kind: _models.gguf(work, shape, engine, kind) for kind in kinds}
    return found


def bandwidth(work: Path, threads: list[int]) -> dict[int, float]:
    """Reading speed in GB/s by number of threads."""
    program = work / "bandwidth"
    source = Path(__file__).with_name("bandwidth.cc")
    if not program.exists():
        _models.call("c++", "-O3", "-march=native", "-Wno-psabi", "-pthread", source, "-o", program)
    done = subprocess.run([program, *map(str, threads)], capture_output=True, text=True, check=True)
    return {int(n): float(v) for n, v in (line.split() for line in done.stdout.splitlines())}


def contenders(
    files: dict[str, Path], shape: str, peers: Path | None, threads: int
) -> dict[str, Callable[[], Any]]:
    """What is measured, by name: functions that return speeds in tokens per second."""
    lists = json.dumps(PROMPTS), DECODE, json.dumps(BATCHES)
    found: dict[str, Callable[[], Any]] = {
        "nemo-build nvfp4": lambda: run(OURS, files["engine"], threads, *lists)
    }
    for kind, file in files.items():
        if peers is not None and kind != "engine":
            found[f"llama.cpp {kind}"] = partial(
                _llama_cpp.bench,
                peers / "build" / "bin",
                file,
                threads,
                prompt=PROMPTS,
                decode=DECODE,
                batch=BATCHES,
                runs=3,
                kind=kind,
            )
    if shape == "few":
        found["transformers bf16"] = lambda: run(
            TRANSFORMERS, files["engine"].parent, threads, json.dumps(PROMPTS), DECODE
        )
    return found


def read_per_token(engine: Path) -> int:
    """Bytes of weights that decoding one token of one sequence reads."""
    manifest = json.loads((engine.parent / "engine.json").read_text())
    moe = manifest["spec"]["moe"]
    total = 0
    for name, tensor in manifest["weights"]["tensors"].items():
        if ".experts." in name:
            total += tensor["nbytes"] * moe["top_k"] // moe["num_experts"]
        elif name != "backbone.embeddings.weight":
            total += tensor["nbytes"]
    return total


def summarize(samples: dict[str, list[dict[str, Any]]]) -> dict[str, dict[str, Any]]:
    """Medians over the rounds."""

    def median(values: list[Any]) -> Any:
        if isinstance(values[0], dict):
            return {str(k): median([v[k] for v in values]) for k in values[0]}
        return statistics.median(values)

    keys = ("decode", "prompt", "batched", "load_s", "anonymous_decode", "anonymous_peak")
    return {
        name: {k: median([r[k] for r in rounds]) for k in keys if k in rounds[0]}
        for name, rounds in samples.items()
    }


def print_table(speeds: dict[str, dict[str, Any]], ours: str) -> None:
    """Tokens per second, and how many times the contender's speed ours is."""
    columns = ["decode", *(f"prompt {n}" for n in PROMPTS), *(f"batch {n}" for n in BATCHES)]

    def cells(result: dict[str, Any]) -> list[float | None]:
        prompt, batched = result.get("prompt", {}), result.get("batched", {})
        return [
            result.get("decode"),
            *(prompt.get(str(n)) for n in PROMPTS),
            *(batched.get(str(n)) for n in BATCHES),
        ]

    print(f"{'tokens/s (ours / theirs)':26}" + "".join(f"{c:>19}" for c in columns))
    own = cells(speeds[ours])
    for name, result in speeds.items():
        texts = []
        for mine, theirs in zip(own, cells(result), strict=True):
            if theirs is None:
                texts.append("-")
            else:
                ratio = "" if name == ours or mine is None else f" ({mine / theirs:.2f}x)"
                texts.append(f"{theirs:.1f}{ratio}")
        print(f"{name:26}" + "".join(f"{t:>19}" for t in texts))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("work", type=Path)
    parser.add_argument("--shape", choices=sorted(_models.PATTERNS), default="few")
    parser.add_argument("--peers", type=Path)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", default=f"{len(os.sched_getaffinity(0))},1")
    parser.add_argument("--formats", default="q4_0,nvfp4", help="llama.cpp's")
    parser.add_argument("--wait", type=float, default=120, help="seconds to wait for an idle machine")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    options.work.mkdir(parents=True, exist_ok=True)
    threads = [int(n) for n in options.threads.split(",")]
    files = prepare(options.work, options.shape, options.peers, options.formats.split(","))
    nbytes = read_per_token(files["engine"])
    results: dict[str, Any] = {}
    for count in threads:
        samples: dict[str, list[dict[str, Any]]] = defaultdict(list)
        others: dict[str, list[float]] = defaultdict(list)
        rounds = contenders(files, options.shape, options.peers, count)
        memory_speeds = []
        for number in range(options.rounds):
            memory_speeds.append(bandwidth(options.work, [count])[count])
            for name, work in rounds.items():
                if number and name in FAR_BEHIND:
                    continue
                result, share = measure(work, wait_s=options.wait)
                samples[name].append(result)
                others[name].append(round(share, 3))
        speeds = summarize(samples)
        ours = next(iter(speeds))
        memory = statistics.median(memory_speeds)
        print(
            f"\n{options.shape} layers, {count} threads; memory {memory:.1f} GB/s, {nbytes / 1e6:.0f} MB a token"
        )
        print_table(speeds, ours)
        used = speeds[ours]["decode"] * nbytes / 1e9 if ours.startswith("nemo") else None
        if used is not None:
            print(f"decode reads {used:.1f} GB/s, {used / memory:.0%} of the memory's bandwidth")
        results[str(count)] = {
            "speeds": speeds,
            "others": others,
            "bandwidth_gbs": memory,
            "bandwidths_gbs": memory_speeds,
            "decodes": {name: [r["decode"] for r in results] for name, results in samples.items()},
            "read_gbs": used,
        }
    if options.out:
        record = {
            "bench": "cpu_decode",
            "command": f"python scripts/bench/cpu_decode.py WORK --shape {options.shape} --peers DIRECTORY",
            **machine(),
            "shape": options.shape,
            "rounds": options.rounds,
            "bytes_per_token": nbytes,
            "threads": results,
        }
        options.out.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
