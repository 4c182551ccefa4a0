# SPDX-License-Identifier: Apache-2.0
"""What speculation costs and brings at the 30B release's widths, by how many drafts are accepted.

    python scripts/bench/speculation_cost.py WORK [--rounds N] [--batches 1,4] [--out FILE.json]

WORK holds the engine, which is made if it is not there: five layers (MEM*E) with the MTP module, and a DFlash and a
DSpark drafter of the released shapes, all with random weights, of whose drafts none would be accepted. So drafters and
target run as always, and then the target is made to accept each draft with a given probability. Settings take turns
over the rounds; figures are medians.

With few layers, drafter and output head weigh more than in the whole model. `full` in the result is an extrapolation to
its 52 layers from these measurements: the layers' part of a step times 52/5, drafter and head as they are. The head's
part of a plain step is its part of the bytes that are read.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path
from time import perf_counter
from typing import Any

import _models
import numpy as np
from _forced import ForcedSession, RandomDrafts, break_even, expected
from _quiet import Announcement, machine, wait_until_idle

from nemo_build.bundle import ENGINE_BUNDLE, read_manifest
from nemo_build.engines.session import StepBatch
from nemo_build.runtime.bench.measure import processor_wait, thread_seconds
from nemo_build.runtime.opening import Opened, Options, open_engine
from nemo_build.runtime.params import SamplingParams
from nemo_build.runtime.request import Request
from nemo_build.runtime.scheduler import Scheduler
from nemo_build.runtime.speculation.kinds import ADAPTIVE_DRAFTS
from nemo_build.runtime.tokenizer import Tokenizer

SHAPE = "few"
DRAFTERS = ("mtp", "dflash", "dspark")
LENGTHS: tuple[int | None, ...] = (1, 2, 3, 5, 7, None)
RATES = (0.6, 0.8, 0.9)
CONTEXT, PROMPT, WARM_UP = 1024, 64, 24
TOKENS, AUTO_TOKENS = 64, 128
DEPTH = len(_models.PATTERNS["full"]) / len(_models.PATTERNS[SHAPE])


@dataclass(frozen=True)
class Setting:
    """What is measured.

    Attributes:
        drafter: A speculator, or ``none``.
        length: Drafts of a step; ``None``: chosen from step to step.
        rate: How likely each is accepted.
        batch: Sequences at a time.
    """

    drafter: str
    length: int | None
    rate: float
    batch: int

    @property
    def tokens(self) -> int:
        """How many each sequence generates; one that learns a draft length needs more."""
        return TOKENS if self.length or self.drafter == "none" else AUTO_TOKENS


class Bench:
    """An engine whose sessions are opened anew for every setting, as :meth:`Engine.load` does.

    Args:
        directory: The engine.
        threads: CPU threads.
    """

    def __init__(self, directory: Path, threads: int) -> None:
        self._directory = directory
        self._threads = threads
        self._table = Tokenizer.load(directory)
        manifest = read_manifest(directory, ENGINE_BUNDLE)
        self.vocabulary: int = manifest["spec"]["vocab_size"]
        self.head_share = head_share(manifest)
        rng = np.random.default_rng(0)
        self._prompts: list[list[int]] = rng.integers(0, self.vocabulary, (16, PROMPT)).tolist()

    def open(self, batch: int, drafter: str = "none", length: int | None = None) -> Opened:
        """The engine, with so many slots."""
        options = Options(max_sequences=batch, threads=self._threads, speculate=drafter, draft_length=length)
        return open_engine(self._directory, options)

    def measure(self, setting: Setting, seed: int) -> dict[str, Any]:
        """Decode, and note speeds, costs and what became of the drafts."""
        opened = self.open(setting.batch, setting.drafter, setting.length)
        session = ForcedSession(opened.session, setting.rate, seed)
        speculation = opened.scheduler._speculation
        if speculation is None:
            return self._decode(Scheduler(session), session, setting)
        drafts = speculation.speculator = RandomDrafts(speculation.speculator, self.vocabulary, seed)
        scheduler = Scheduler(session, speculation)
        most = setting.length or ADAPTIVE_DRAFTS
        found = self._decode(scheduler, session, setting, drafts)
        rounds = [s for n, s in drafts.rounds if n == most]
        verify = [s for width, s in session.steps if width == most + 1]
        return {
            **found,
            "drafts_per_step": sum(n for n, _ in drafts.rounds) / len(session.steps),
            "draft_s": statistics.median(rounds) if rounds else None,
            "verify_s": statistics.median(verify) if verify else None,
        }

    def head(self, widths: Sequence[int], runs: int = 15) -> dict[int, float]:
        """Seconds that the logits of so many tokens of one sequence take: steps with them less steps without.

        That is too much for what they take in a step, because a few layers whose weights no head pushes out of the
        caches take less; how it grows with the tokens is right.
        """
        session = self.open(1).session
        rng, found = np.random.default_rng(1), {}

        def step(width: int, logits: str) -> float:
            tokens = rng.integers(0, self.vocabulary, (1, width)).tolist()
            batch = StepBatch.of_rows(tokens, past=[0], slots=[0], logits=logits)
            start = perf_counter()
            session.step(batch)
            return perf_counter() - start

        for _ in range(runs):  # until all weights have been touched
            step(PROMPT, "all")
        for width in widths:
            times: dict[str, list[float]] = {"all": [], "none": []}
            for _ in range(runs):
                for logits, seconds in times.items():
                    seconds.append(step(width, logits))
            found[width] = statistics.median(times["all"]) - statistics.median(times["none"])
        return found

    def _decode(
        self,
        scheduler: Scheduler,
        session: ForcedSession,
        setting: Setting,
        drafts: RandomDrafts | None = None,
    ) -> dict[str, Any]:
        """A warm-up, in which draft lengths are learnt, and then what is measured."""
        learns = drafts is not None and setting.length is None
        self._run(scheduler, session, setting.batch, setting.tokens if learns else WARM_UP)
        if drafts is not None:
            drafts.rounds.clear()
        before = thread_seconds()
        tokens, seconds = self._run(scheduler, session, setting.batch, setting.tokens)
        return {
            "processor_wait": processor_wait(before, thread_seconds()),
            "tokens_per_s": tokens / seconds,
            "tokens_per_step": tokens / len(session.steps) / setting.batch,
            "step_s": statistics.median(s for _, s in session.steps),
            "other_s": (seconds - sum(s for _, s in session.steps)) / len(session.steps),
        }

    def _run(
        self, scheduler: Scheduler, session: ForcedSession, batch: int, tokens: int
    ) -> tuple[int, float]:
        """Requests that all decode together: tokens and seconds from when all prompts are done, whose steps go."""
        params = SamplingParams(max_tokens=tokens, temperature=0, ignore_eos=True)
        make = partial(Request, params=params, eos_ids=(), table=self._table, context=CONTEXT)
        requests = [make(p) for p in self._prompts[:batch]]
        for r in requests:
            scheduler.add(r)
        while not all(r.decoding for r in requests):
            scheduler.step()
        session.steps.clear()
        before, start = sum(len(r.tokens) for r in requests), perf_counter()
        while scheduler.unfinished:
            scheduler.step()
        seconds = perf_counter() - start
        return sum(len(r.tokens) for r in requests) - before, seconds


def head_share(manifest: Mapping[str, Any]) -> float:
    """The head's part of the bytes that a token's step reads, and so of a plain step, which memory limits."""
    moe, sizes = manifest["spec"]["moe"], {"head": 0.0, "layers": 0.0}
    for name, tensor in manifest["weights"]["tensors"].items():
        if name.startswith("lm_head."):
            sizes["head"] += tensor["nbytes"]
        elif name.startswith("backbone.layers."):
            routed = ".experts." in name
            sizes["layers"] += tensor["nbytes"] * (moe["top_k"] / moe["num_experts"] if routed else 1)
    return sizes["head"] / sum(sizes.values())


def deeper(step_s: float, head_s: float) -> float:
    """A step of the whole model, from one with few layers and the head's part of it."""
    return DEPTH * (step_s - head_s) + head_s


def costs(cases: Sequence[dict[str, Any]], plain_s: float, head: dict[int, float]) -> dict[str, Any]:
    """Costs of a step with drafts in plain steps, and where it breaks even: measured, and for the full depth.

    Costs are the least that were measured, since disturbances only add.

    Args:
        cases: Measured ones that differ in the rate alone, on which the costs do not depend.
        plain_s: A plain step.
        head: Of :meth:`Bench.head`.
    """
    length = cases[0]["draft_length"]
    draft_s, verify_s = (min(c[name] for c in cases) for name in ("draft_s", "verify_s"))
    found = {}
    for name, plain, verify in (
        ("measured", plain_s, verify_s),
        ("full", deeper(plain_s, head[1]), deeper(verify_s, head[length + 1])),
    ):
        cost = (draft_s + verify) / plain
        found[name] = {
            "draft": draft_s / plain,
            "verify": verify / plain,
            "break_even_rate": break_even(cost, length),
            "ratios": {str(r): expected(r, length) / cost for r in RATES},
        }
    return found


def plain_step(samples: dict[Setting, list[dict[str, Any]]]) -> float:
    """Seconds of a step of plain decoding, one sequence at a time."""
    least: float = min(r["step_s"] for r in samples[Setting("none", None, 0.0, 1)])
    return least


def summarize(samples: dict[Setting, list[dict[str, Any]]], head: dict[int, float]) -> list[dict[str, Any]]:
    """Medians over the rounds, compared with plain decoding."""
    cases = []
    for setting, rounds in samples.items():
        merged = {
            name: statistics.median(v) if (v := [r[name] for r in rounds if r[name] is not None]) else None
            for name in rounds[0]
        }
        plain = samples[Setting("none", None, 0.0, setting.batch)]
        speed = statistics.median(r["tokens_per_s"] for r in plain)
        case = {
            "speculator": setting.drafter,
            "draft_length": setting.length,
            "rate": setting.rate,
            "batch": setting.batch,
            **merged,
            "ratio": merged["tokens_per_s"] / speed,
            "speeds": [r["tokens_per_s"] for r in rounds],
        }
        cases.append(case)
    plain_s = plain_step(samples)
    for drafter, length in product(DRAFTERS, filter(None, LENGTHS)):
        same = [c for c in cases if (c["speculator"], c["draft_length"], c["batch"]) == (drafter, length, 1)]
        for c in same:
            c["costs"] = costs(same, plain_s, head)
    return cases


def print_table(cases: Sequence[dict[str, Any]]) -> None:
    """Speeds of all settings."""
    for c in cases:
        print(
            f"{c['speculator']:7} {c['draft_length'] or 'auto':>5} {c['rate']:4} x{c['batch']}: "
            f"{c['tokens_per_s']:7.1f} tok/s {c['ratio']:5.2f}x, {c['tokens_per_step']:.2f} tokens a step"
        )


def make_record(
    options: argparse.Namespace,
    samples: dict[Setting, list[dict[str, Any]]],
    heads: list[dict[int, float]],
    head_share: float,
) -> dict[str, Any]:
    """All that was measured so far."""
    plain_s = plain_step(samples)
    growth = {width: statistics.median(h[width] / h[1] for h in heads) for width in heads[0]}
    head = {width: head_share * plain_s * g for width, g in growth.items()}
    cases = summarize(samples, head)
    return {
        "bench": "speculation_cost",
        "command": "python scripts/bench/speculation_cost.py WORK",
        **machine(),
        "rounds": len(heads),
        "threads": options.threads,
        "depth": DEPTH,
        "head_s": head,
        "plain_s": plain_s,
        "full_plain_s": deeper(plain_s, head[1]),
        "cases": cases,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("work", type=Path)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--batches", default="1", help="sequences at a time; one is always measured")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--wait", type=float, default=120, help="seconds to wait for an idle machine")
    parser.add_argument("--announce", type=Path, metavar="FILE", help="is there while something is measured")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    options.work.mkdir(parents=True, exist_ok=True)
    bench = Bench(
        _models.engine(options.work, SHAPE, sequences=16, context=CONTEXT, drafters=True), options.threads
    )
    settings = []  # plain decoding before each drafter, since everything is compared with it
    for batch, drafter in product(sorted({1, *map(int, options.batches.split(","))}), DRAFTERS):
        settings.append(Setting("none", None, 0.0, batch))
        settings += [Setting(drafter, n, rate, batch) for n in LENGTHS for rate in RATES]
    samples: dict[Setting, list[dict[str, Any]]] = defaultdict(list)
    heads = []
    with Announcement(options.announce) as announcement:
        for number in range(options.rounds):
            announcement.begin()
            wait_until_idle(options.wait)
            for setting in settings:
                announcement.begin()
                samples[setting].append(bench.measure(setting, number))
            heads.append(bench.head([1, *(n + 1 for n in LENGTHS if n)]))
            record = make_record(options, samples, heads, bench.head_share)
            if options.out:  # also before the last round, since a run takes long
                options.out.write_text(json.dumps(record, indent=1) + "\n")
    print_table(record["cases"])


if __name__ == "__main__":
    main()
