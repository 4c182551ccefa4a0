# SPDX-License-Identifier: Apache-2.0
"""How often `nemo-build check` raises an alarm where there is nothing to find: the demo engine, built again and again.

    python scripts/bench/check.py [--rebuilds 50] [--suite FILE]

Each rebuild is checked against the first build's baseline, its speed beside the first build. What a machine at work on
other things makes of that is part of the result, so the load is printed with it.

At the end it says how often an engine that is slower by so much would have been found. Times that were taken of
rebuilds are made longer by that; those of the next rebuild stand for what is timed again, of which the check takes more
values.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from collections import Counter
from pathlib import Path

from nemo_build.demo import CHECKPOINT, DRAFTERS
from nemo_build.engines.build import BuildOptions, build_engine
from nemo_build.engines.check.checks import check_kinds
from nemo_build.engines.check.run import check, measure, open_baseline
from nemo_build.engines.check.subject import Subject
from nemo_build.engines.check.suite import DEFAULT, Suite
from nemo_build.engines.check.verdict import Status
from nemo_build.export.exporter import export_bundle

SLOWER = (1.05, 1.07, 1.1, 1.15, 1.2)
"""How many times as long the steps of an engine take that should be found."""

Times = dict[str, dict[str, list[float]]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rebuilds", type=int, default=50)
    parser.add_argument("--suite", type=Path, default=DEFAULT)
    options = parser.parse_args()
    suite = Suite.load(options.suite)
    with tempfile.TemporaryDirectory(prefix="nemo-build-") as name:
        run(Path(name), suite, options.rebuilds)


def run(folder: Path, suite: Suite, rebuilds: int) -> None:
    export_bundle(CHECKPOINT, folder / "bundle", drafts=list(DRAFTERS.values()))
    first = build(folder, "first")
    subject = Subject(first)
    open_baseline(folder / "baselines", subject).write(measure(subject, suite).data, subject.facts, "first")
    alarms: Counter[str] = Counter()
    verdicts: Counter[str] = Counter()
    seconds: list[float] = []
    timed: list[Times] = []
    for i in range(rebuilds):
        again = Subject(build(folder, "again"), before=first)
        start = time.perf_counter()
        verdict = check(again, suite, open_baseline(folder / "baselines", again))
        seconds.append(time.perf_counter() - start)
        verdicts[verdict.status] += 1
        bad = [(r.check, f) for r in verdict.results for f in r.figures if f.status is not Status.PASS]
        alarms.update(f"{name}.{f.name}" for name, f in bad)
        timed += [r.details for r in verdict.results if r.kind == "speed" and r.details]
        print(f"{i + 1}: {verdict.status} in {seconds[-1]:.1f} s, load {os.getloadavg()[0]:.1f}", flush=True)
        for name, f in bad:
            print(f"    {name}.{f.name} is {f.value}, recorded {f.baseline}; {f.note}", flush=True)
        again = [f.name for r in verdict.results for f in r.figures if "timed again" in f.note]
        if again:
            print(f"    timed again: {', '.join(again)}", flush=True)
    wrong = rebuilds - verdicts[Status.PASS]
    print(f"false alarms: {wrong} of {rebuilds} rebuilds ({wrong / rebuilds:.1%}); {dict(alarms)}")
    print(
        f"seconds of a check: {sorted(seconds)[rebuilds // 2]:.1f} in the median, {max(seconds):.1f} at most"
    )
    for factor in SLOWER:
        print(f"slower by {factor - 1:.0%}: {power(timed, factor, suite)}")


def power(timed: list[Times], factor: float, suite: Suite) -> str:
    """In how many rebuilds an engine would be found whose first tokens and steps take `factor` times as long."""
    kind = check_kinds()["speed"]
    settings = next((p.settings for p in suite.checks if p.kind == "speed"), kind.Settings())
    found: Counter[str] = Counter()
    for first, second in zip(timed, [*timed[1:], *timed[:1]], strict=True):
        slow = {**slowed(first, factor), "again": slowed(second, factor)}
        names = [f.name for f in kind.judge(slow, None, settings).figures if f.status is not Status.PASS]
        for what in ("first token s", "between tokens s"):
            found[what] += sum(n.startswith(what) for n in names)
            found[f"{what} of"] += sum(n.startswith(what) for n in first["now"])
        found["rebuilds"] += bool(names)
    shares = ", ".join(
        f"{what} {found[what] / max(found[f'{what} of'], 1):.0%}"
        for what in ("first token s", "between tokens s")
    )
    return f"found in {found['rebuilds']} of {len(timed)} rebuilds; of its figures: {shares}"


def slowed(times: Times, factor: float) -> Times:
    """Both sides as they were timed, the newer made slower."""
    now = {
        name: [v / factor if name.startswith("tokens/s") else v * factor for v in values]
        for name, values in times["now"].items()
        if not name.startswith(("load", "build"))
    }
    return {"now": now, "before": {name: times["before"][name] for name in now}}


def build(folder: Path, name: str) -> Path:
    options = BuildOptions(max_sequences=4, max_context=2048)
    return build_engine(folder / "bundle", folder / name, options=options, use_cache=False, force=True).out


if __name__ == "__main__":
    main()
