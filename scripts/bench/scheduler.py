# SPDX-License-Identifier: Apache-2.0
"""What the scheduler costs without a model: microseconds of a step beside those of a session that computes nothing.

Requests that decode, with the tokenizer of the demo checkpoint, on a session that returns prepared logits at once.
Measured is the whole step (what is committed, drafts asked for and verified, tokens chosen from the logits and turned
into text, and the next batch built) less what the session itself took.

    python scripts/bench/scheduler.py [--rounds N] [--out docs/results/scheduler.json]
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from _quiet import machine
from numpy.typing import NDArray

from nemo_build.demo import CHECKPOINT
from nemo_build.engines.session import StepBatch, StepOutput, check_batch
from nemo_build.runtime.params import SamplingParams
from nemo_build.runtime.request import Request
from nemo_build.runtime.scheduler import Scheduler
from nemo_build.runtime.speculation.base import Committed, DraftRequest, Proposal
from nemo_build.runtime.speculation.lengths import DraftLengthController
from nemo_build.runtime.speculation.rounds import Speculation
from nemo_build.runtime.tokenizer import Tokenizer
from nemo_build.state import StateSpec

ROOT = Path(__file__).resolve().parent.parent.parent
VOCABULARY, STEPS, WARM_UP = 3072, 400, 40


class NoModel:
    """A session that returns the same logits always."""

    hidden_size = 1
    isolated = True

    def __init__(self, slots: int, pending: int) -> None:
        self.slots, self.context, self.pending = slots, 1 << 20, pending
        self.states: list[StateSpec] = []
        self.seconds = 0.0
        rows = slots * max(pending, 1)
        self._logits = np.random.default_rng(0).normal(size=(rows, VOCABULARY)).astype(np.float32)
        self._hidden = np.zeros((slots, max(pending, 256), 1), np.float32)

    def state(self) -> Mapping[str, NDArray[Any]]:
        return {}

    def step(self, batch: StepBatch) -> StepOutput:
        sizes = {"slots": self.slots, "context": self.context, "pending": self.pending}
        check_batch(batch, **sizes, vocabulary=VOCABULARY)
        start = time.perf_counter()
        rows, width = batch.input_ids.shape
        output = StepOutput(self._logits[: len(batch.logit_rows)], self._hidden[:rows, :width])
        self.seconds += time.perf_counter() - start
        return output


class NoDrafter:
    """Proposes the same drafts always."""

    features: str | None = "hidden"
    states: Sequence[StateSpec] = ()
    lookahead: Mapping[str, int] = {}

    def state(self) -> Mapping[str, NDArray[Any]]:
        return {}

    def start(self, slot: int, tokens: Sequence[int], extra: Mapping[str, NDArray[Any]]) -> None:
        pass

    def observe(self, rows: Sequence[Committed]) -> None:
        pass

    def propose(self, requests: Sequence[DraftRequest]) -> list[Proposal]:
        return [Proposal(list(range(r.length))) for r in requests]

    def save(self, slot: int, committed: int) -> Mapping[str, NDArray[Any]]:
        return {}

    def release(self, slot: int) -> None:
        pass


def measure(rows: int, drafts: int | None, *, adaptive: bool, temperature: float) -> float:
    """Median microseconds of a step in which so many requests decode."""
    session = NoModel(rows, 0 if drafts is None else drafts + 1)
    speculation = None
    if drafts is not None:
        controller = DraftLengthController(drafts) if adaptive else None
        speculation = Speculation(NoDrafter(), drafts, rows, controller=controller)
    scheduler = Scheduler(session, speculation)
    table = Tokenizer.load(CHECKPOINT)
    params = SamplingParams(max_tokens=1 << 20, temperature=temperature, ignore_eos=True, seed=1)
    requests = [Request([1, 2, 3], params, eos_ids=(), table=table, context=1 << 20) for _ in range(rows)]
    for r in requests:
        scheduler.add(r)
    times = []
    for _ in range(STEPS):
        session.seconds = 0.0
        start = time.perf_counter()
        scheduler.step()
        times.append(time.perf_counter() - start - session.seconds)
        for r in requests:
            r.events.clear()
    return statistics.median(times[WARM_UP:]) * 1e6


CASES: dict[str, dict[str, Any]] = {
    "plain": {"drafts": None, "adaptive": False, "temperature": 0.0},
    "4 drafts": {"drafts": 4, "adaptive": False, "temperature": 0.0},
    "up to 4 drafts, chosen": {"drafts": 4, "adaptive": True, "temperature": 0.0},
    "plain, sampled": {"drafts": None, "adaptive": False, "temperature": 0.8},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "results" / "scheduler.json")
    options = parser.parse_args()
    found: dict[tuple[str, int], list[float]] = {}
    for _ in range(options.rounds):
        for name, case in CASES.items():
            for rows in (1, 4, 16):
                found.setdefault((name, rows), []).append(measure(rows, **case))
    cases = [
        {"case": n, "requests": rows, "microseconds": statistics.median(t)} for (n, rows), t in found.items()
    ]
    for c in cases:
        print(f"{c['case']}, {c['requests']} requests: {c['microseconds']:.0f} us")
    record = {
        **machine(),
        "command": "python scripts/bench/scheduler.py",
        "rounds": options.rounds,
        "cases": cases,
    }
    options.out.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
