# SPDX-License-Identifier: Apache-2.0
"""How often `nemo-build check` raises an alarm where there is nothing to find: the demo engine, built again and again.

    python scripts/bench/check.py [--rebuilds 50] [--suite FILE]

Each rebuild is checked against the first build's baseline, its speed beside the first build. What a machine at work on
other things makes of that is part of the result, so the load is printed with it.
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
from nemo_build.engines.check.run import check, measure, open_baseline
from nemo_build.engines.check.subject import Subject
from nemo_build.engines.check.suite import DEFAULT, Suite
from nemo_build.engines.check.verdict import Status
from nemo_build.export.exporter import export_bundle


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
    for i in range(rebuilds):
        again = Subject(build(folder, "again"), before=first)
        start = time.perf_counter()
        verdict = check(again, suite, open_baseline(folder / "baselines", again))
        seconds.append(time.perf_counter() - start)
        verdicts[verdict.status] += 1
        bad = [(r.check, f) for r in verdict.results for f in r.figures if f.status is not Status.PASS]
        alarms.update(f"{name}.{f.name}" for name, f in bad)
        print(f"{i + 1}: {verdict.status} in {seconds[-1]:.1f} s, load {os.getloadavg()[0]:.1f}", flush=True)
        for name, f in bad:
            print(f"    {name}.{f.name} is {f.value}, recorded {f.baseline}; {f.note}", flush=True)
    wrong = rebuilds - verdicts[Status.PASS]
    print(f"false alarms: {wrong} of {rebuilds} rebuilds ({wrong / rebuilds:.1%}); {dict(alarms)}")
    print(
        f"seconds of a check: {sorted(seconds)[rebuilds // 2]:.1f} in the median, {max(seconds):.1f} at most"
    )


def build(folder: Path, name: str) -> Path:
    options = BuildOptions(max_sequences=4, max_context=2048)
    return build_engine(folder / "bundle", folder / name, options=options, use_cache=False, force=True).out


if __name__ == "__main__":
    main()
