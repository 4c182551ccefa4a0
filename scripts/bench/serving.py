# SPDX-License-Identifier: Apache-2.0
"""Requests at a time: nemo-build, llama.cpp's server and transformers side by side.

    python scripts/bench/serving.py WORK [--shape few|demo] [--peers DIRECTORY] [--rounds N] [--out FILE.json]

WORK holds engines and model files, which are made if they are not there: with `few`, random weights at the widths of
Nemotron 3.5 Lightning in five layers (MEM*E); `demo` is the demo checkpoint. All contenders answer the same requests,
prompts and answers of mixed lengths, in a closed loop with so many at a time, greedily and to their full length.
They take turns, each in a process of its own, when the machine is idle; figures are medians over the rounds. What
they mean is in docs/bench.md.

--peers is where `python scripts/bench/_llama_cpp.py build DIRECTORY` built llama.cpp. Peers that are not there are
named and left out.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import _models
import numpy as np
from _process import run_file
from _quiet import Announcement, machine, measure
from _serving import Job

from nemo_build.demo import CHECKPOINT
from nemo_build.export.quantize.calibration import DEFAULT_TEXT, read_texts
from nemo_build.runtime.bench.measure import medians
from nemo_build.runtime.tokenizer import Tokenizer

HERE = Path(__file__).parent
CONTEXT, MOST_STREAMS = 512, 16
VOCABULARY = 131072
PROMPTS, OUTPUTS = (32, 256), (16, 96)
"""Fewest and most tokens; lengths between them are equally likely on a logarithmic scale."""

REQUESTS = {1: 8, 4: 16, 16: 32}
"""Requests by how many run at a time; twice as many where it is not said."""

SPECULATORS = {"few": ("mtp",), "demo": ("mtp", "ngram")}
FAR_BEHIND = ("transformers bf16",)
"""Contenders that one round is enough for."""


def requests(shape: str, streams: int) -> tuple[list[list[int]], list[int]]:
    """Prompts and lengths of answers; of random tokens, or with `demo` from text."""
    rng = np.random.default_rng(streams)
    count = REQUESTS.get(streams, 2 * streams)
    lengths, outputs = (
        np.exp(rng.uniform(*np.log(limits), count)).round().astype(int).tolist()
        for limits in (PROMPTS, OUTPUTS)
    )
    if shape != "demo":
        return [rng.integers(0, VOCABULARY, n).tolist() for n in lengths], outputs
    tokenizer = Tokenizer.load(CHECKPOINT)
    text = [t for part in read_texts(DEFAULT_TEXT) for t in tokenizer.encode(part)]
    starts = rng.integers(0, len(text) - PROMPTS[1], count).tolist()
    return [text[start : start + n] for start, n in zip(starts, lengths, strict=True)], outputs


def engine(work: Path, shape: str) -> Path:
    """The engine to measure."""
    if shape != "demo":
        return _models.engine(work, shape, sequences=MOST_STREAMS, context=2 * CONTEXT, drafters=True)
    return _models.demo_engine(work, sequences=MOST_STREAMS, context=2 * CONTEXT)


def contenders(
    options: argparse.Namespace, job: Job, missing: dict[str, str]
) -> dict[str, Callable[[], dict[str, Any]]]:
    """What is measured, by name; peers that are not there are added to `missing`, with the reason."""
    directory = Path(job.model)
    weights = "bf16" if options.shape == "demo" else "nvfp4"
    ours = {f"nemo-build {weights}": job}
    for name in SPECULATORS[options.shape]:
        ours[f"nemo-build {weights}, {name}"] = replace(job, options={"speculate": name})
    found = {name: partial(_run, "nemo", j) for name, j in ours.items()}
    programs = options.peers and options.peers / "build" / "bin"
    if programs is None or not (programs / "llama-server").exists():
        missing["llama.cpp"] = "--peers names no directory that has its server"
    else:
        file = _models.gguf(options.work, options.shape, directory, "q4_0")
        theirs = replace(job, model=str(file), options={"programs": str(programs)})
        found["llama.cpp q4_0"] = partial(_run, "llama_cpp", theirs)
    if all(map(importlib.util.find_spec, ("torch", "transformers"))):
        theirs = replace(job, model=str(CHECKPOINT)) if options.shape == "demo" else job
        found["transformers bf16"] = partial(_run, "transformers", theirs)
    else:
        missing["transformers"] = "not installed"
    return found


def _run(name: str, job: Job) -> dict[str, Any]:
    return run_file(HERE / f"_serving_{name}.py", job.to_json())


def print_table(streams: int, results: dict[str, dict[str, Any]]) -> None:
    """Figures of all contenders with so many requests at a time, the first of which is ours."""
    own = next(iter(results.values()))["output_tokens_per_s"]
    print(
        f"\n{streams} at a time{'':10}{'output tok/s':>18}{'prompt tok/s':>14}{'TTFT ms':>16}{'ms/token':>16}"
    )
    for name, r in results.items():
        speed = r["output_tokens_per_s"]
        first, each = (
            "{mean:.1f} / {p99:.1f}".format(**{k: 1e3 * v for k, v in r[key].items()})
            for key in ("ttft_s", "time_per_token_s")
        )
        ratio = f"{speed:.1f} ({own / speed:.2f}x)"
        print(f"{name:24}{ratio:>18}{r['prompt_tokens_per_s']:>14.1f}{first:>16}{each:>16}")


def measure_all(options: argparse.Namespace, jobs: dict[int, Job], missing: dict[str, str]) -> dict[str, Any]:
    """All rounds; results by requests at a time."""
    samples: dict[int, dict[str, list[dict[str, Any]]]] = {n: defaultdict(list) for n in jobs}
    others: dict[int, dict[str, list[float]]] = {n: defaultdict(list) for n in jobs}
    with Announcement(options.announce) as announcement:
        for number in range(options.rounds):
            for streams, job in jobs.items():
                for name, work in contenders(options, job, missing).items():
                    if number and name in FAR_BEHIND:
                        continue
                    announcement.begin()
                    result, share = measure(work, wait_s=options.wait, tries=options.tries)
                    samples[streams][name].append(result)
                    others[streams][name].append(round(share, 3))
    found = {}
    for streams, by_name in samples.items():
        results = {name: medians(rounds) for name, rounds in by_name.items()}
        print_table(streams, results)
        speeds = {name: [r["output_tokens_per_s"] for r in rounds] for name, rounds in by_name.items()}
        found[str(streams)] = {"results": results, "speeds": speeds, "others": others[streams]}
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("work", type=Path)
    parser.add_argument("--shape", choices=sorted(SPECULATORS), default="few")
    parser.add_argument("--peers", type=Path)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--concurrency", default="1,4,16")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--wait", type=float, default=120, help="seconds to wait for an idle machine")
    parser.add_argument("--tries", type=int, default=3, help="measurements at most, if others keep it busy")
    parser.add_argument("--announce", type=Path, metavar="FILE", help="is there while something is measured")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    options.work.mkdir(parents=True, exist_ok=True)
    directory = str(engine(options.work, options.shape))
    jobs, missing = {}, {}
    for streams in map(int, options.concurrency.split(",")):
        prompts, outputs = requests(options.shape, streams)
        jobs[streams] = Job(directory, options.threads, streams, CONTEXT, prompts, outputs)
        contenders(options, jobs[streams], missing)  # makes the files
    for name, reason in missing.items():
        print(f"without {name}: {reason}")
    results = measure_all(options, jobs, missing)
    if options.out:
        record = {
            "bench": "serving",
            "command": f"python scripts/bench/serving.py WORK --shape {options.shape} --peers DIRECTORY",
            **machine(),
            "shape": options.shape,
            "rounds": options.rounds,
            "threads": options.threads,
            "prompts": PROMPTS,
            "outputs": OUTPUTS,
            "missing": missing,
            "streams": results,
        }
        options.out.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
