# SPDX-License-Identifier: Apache-2.0
"""Time of each op's native CPU kernel beside ONNX Runtime's own, at the widths of Nemotron 3.5 Lightning.

    python scripts/bench/cpu_ops.py [--ops A,B] [--experts N] [--rounds N] [--threads N,M] [--out FILE.json]

Contenders are models of one op, with copies of it that have weights or states of their own; `_ops_cases.py` has them.
They take turns in one process for each op and number of threads, and a process is repeated for each round, when the
machine is idle; figures are medians over the rounds. Where two compute one function, their results are compared first.
Weights are mapped from files, as those of an engine are; before every run of an op that has weights, the caches are
filled with something else. The files take up to 4 GB in --work.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import _ops_cases
import onnxruntime
from _ops_run import Contender
from _process import run
from _quiet import machine, measure

from nemo_build.plugins import native

FEW = 16
"""Tokens up to which an op with weights is bound by reading them."""

CHILD = """
import json, sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
import _ops_cases, _ops_run
name, folder, threads, experts = sys.argv[2], Path(sys.argv[3]), int(sys.argv[4]), int(sys.argv[5])
op = _ops_cases.ops(experts)[name]
print(json.dumps(_ops_run.measure(op.contenders, op.cases(), _ops_run.Weights(folder), threads)))
"""

Times = dict[str, dict[str, dict[str, float]]]


def medians(rounds: list[Times]) -> Times:
    """Each figure's median over the rounds."""
    return {
        case: {
            name: {key: statistics.median(r[case][name][key] for r in rounds) for key in row}
            for name, row in rows.items()
        }
        for case, rows in rounds[0].items()
    }


def records(
    op: str, times: Times, contenders: tuple[Contender, ...], threads: int, others: list[float]
) -> list[dict[str, Any]]:
    """A record for each case and contender; `ratio` is the time to that of `beside`."""
    found = []
    for case, rows in times.items():
        for c in contenders:
            row: dict[str, Any] = {key: float(f"{value:.4g}") for key, value in rows[c.name].items()}
            if c.beside:
                row |= {"beside": c.beside, "ratio": round(rows[c.name]["ms"] / rows[c.beside]["ms"], 3)}
            found.append(
                {"op": op, "threads": threads, "case": case, "contender": c.name, **row, "others": others}
            )
    return found


def print_table(
    op: str, found: list[dict[str, Any]], contenders: tuple[Contender, ...], threads: int
) -> None:
    """Milliseconds, speeds where there are weights, and ratios of times to those of ours for the same."""
    cases = list(dict.fromkeys(r["case"] for r in found))
    by_key = {(r["contender"], r["case"]): r for r in found}
    units = "ms"
    if "gbs" in found[0]:
        units += f", GB/s of weights (GFLOP/s past {FEW} tokens)"
    print(f"\n{op}, {threads} thread{'s' * (threads > 1)}: {units}, times ours for the same.", end=" ")
    print(f"Others had at most {max(found[0]['others']):.0%} of the CPUs.")
    print(" " * 28 + "".join(f"{case:>24}" for case in cases))
    for c in contenders:
        cells = []
        for case in cases:
            r = by_key[c.name, case]
            texts = [f"{r['ms']:.3g}"]
            if "gbs" in r:
                few = int(case.split()[0]) <= FEW
                texts.append(f"{r['gbs']:.1f}" if few else f"{r['gflops']:.0f}")
            texts.append(f"{r['ratio']:.2f}x" if "ratio" in r else " " * 5)
            cells.append("  ".join(texts))
        print(f"{c.name:28}" + "".join(f"{cell:>24}" for cell in cells))


def print_notes(contenders: tuple[Contender, ...]) -> None:
    """What contenders are compared with, and what they lack."""
    for c in contenders:
        beside = f"beside {c.beside}" if c.beside and c.beside != "ours" else ""
        if c.note or beside:
            print(f"  {c.name}: {'; '.join(text for text in (beside, c.note) if text)}")


def measure_op(
    name: str, folder: Path, threads: list[int], options: argparse.Namespace
) -> list[dict[str, Any]]:
    """Measure an op and print its table."""
    contenders = _ops_cases.ops(options.experts)[name].contenders
    _ops_cases.prepare(name, folder, options.experts)
    found = []
    for count in threads:
        rounds: list[Times] = []
        others = []
        work = partial(run, CHILD, Path(__file__).parent, name, folder, count, options.experts)
        for _ in range(options.rounds):
            result, share = measure(work, wait_s=options.wait, tries=options.tries)
            rounds.append(result)  # type: ignore[arg-type]
            others.append(round(share, 3))
        rows = records(name, medians(rounds), contenders, count, others)
        print_table(name, rows, contenders, count)
        found += rows
    print_notes(contenders)
    sys.stdout.flush()
    return found


def header(options: argparse.Namespace) -> dict[str, Any]:
    """What the figures were taken with."""
    return {
        "bench": "cpu_ops",
        "command": "python scripts/bench/cpu_ops.py",
        **machine(),
        "onnxruntime": onnxruntime.__version__,
        "experts": options.experts,
        "rounds": options.rounds,
    }


def main() -> None:
    names = list(_ops_cases.ops(1))
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ops", default=",".join(names))
    parser.add_argument("--experts", type=int, default=128, help="of RoutedExperts; 128 take 3 GB of files")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", default="1,2")
    parser.add_argument("--wait", type=float, default=120, help="seconds to wait for an idle machine")
    parser.add_argument("--tries", type=int, default=3, help="to measure a round while others are idle")
    parser.add_argument(
        "--work", type=Path, help="where weights are written; a temporary directory if left out"
    )
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    if native.chosen() is None:
        sys.exit("the native kernels were not built")
    threads = [int(n) for n in options.threads.split(",")]
    chosen = options.ops.split(",")
    if unknown := set(chosen) - set(names):
        sys.exit(f"there is no op {', '.join(sorted(unknown))}; there are {', '.join(names)}")
    results: list[dict[str, Any]] = []
    notes: dict[str, dict[str, str]] = {}
    with tempfile.TemporaryDirectory(dir=options.work) as work:
        for name in chosen:
            results += measure_op(name, Path(work) / name, threads, options)
            shutil.rmtree(Path(work) / name)
            contenders = _ops_cases.ops(options.experts)[name].contenders
            notes[name] = {c.name: c.note for c in contenders if c.note}
    if options.out:
        options.out.write_text(
            json.dumps({**header(options), "notes": notes, "results": results}, indent=1) + "\n"
        )


if __name__ == "__main__":
    main()
