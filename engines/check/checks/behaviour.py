# SPDX-License-Identifier: Apache-2.0
"""``behaviour``: what must not change a text does not, and texts end as they did.

Speculation on and off, prefix cache on and off, one request and many at a time, prompts in chunks of any size, and the
state after a rollback: all must give the same tokens. The kernels' results do not depend on the batch on a CPU; for
engines where they may, ``near_tie`` excuses a token whose two likeliest candidates are nearly as likely.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from nemo_build.engines.check.checks import Judgement
from nemo_build.engines.check.checks import Settings as Base
from nemo_build.engines.check.prompts import logits_of, token_sequences
from nemo_build.engines.check.subject import Subject
from nemo_build.engines.check.verdict import Figure, Status
from nemo_build.engines.session import StepBatch

NAME = "behaviour"
NEEDS_BASELINE = False


@dataclass(frozen=True)
class Settings(Base):
    """What texts are compared.

    Attributes:
        sequences: Prompts.
        tokens: Tokens of each.
        output: Tokens after each.
        drafts: Drafts of a step.
        near_tie: Difference of the two largest logits below which another token is excused.
        state_error: Largest relative difference of logits after a rollback.
    """

    sequences: int = 6
    tokens: int = 80
    output: int = 32
    drafts: int = 5
    near_tie: float = 0.0
    state_error: float = 1e-3


def measure(subject: Subject, settings: Settings) -> dict[str, Any]:
    """How many texts differ between ways of computing them, and how they end."""
    from nemo_build.runtime.params import SamplingParams

    engine = subject.engine()
    prompts = token_sequences(engine, settings.sequences, settings.tokens)
    greedy = SamplingParams(max_tokens=settings.output, temperature=0)
    ways = [greedy, SamplingParams(max_tokens=settings.output, temperature=0.8, top_p=0.95, seed=7)]
    cases = [(p, w) for p in prompts for w in ways]
    alone = [engine.generate([p], w)[0] for p, w in cases]
    want = [a.token_ids for a in alone]

    def texts(**options: Any) -> list[Sequence[int]]:
        other = subject.engine(**options)
        return [c.token_ids for c in other.generate([p for p, _ in cases], [w for _, w in cases])]

    found: dict[str, Any] = {"batch": _differences(want, texts())}
    found["chunks"] = _differences(want, texts(token_budget=7))
    if subject.speculator != "none":
        speculating = {"speculate": subject.speculator, "draft_length": settings.drafts}
        found["speculation"] = _differences(want, texts(**speculating))
        found["rollback"] = _rollback_error(subject, prompts[0], settings)
    cached = texts(prefix_cache=64 << 20), texts(prefix_cache=64 << 20)
    found["prefix cache"] = max(_differences(want, c) for c in cached)
    endings = [
        engine.generate([p], SamplingParams(max_tokens=4 * settings.output, temperature=0))[0]
        for p in prompts
    ]
    found["endings"] = [f"{c.finish_reason}:{len(c.token_ids)}" for c in endings]
    found["stops"] = sorted(engine.eos_ids)
    return found


def judge(now: Mapping[str, Any], before: Mapping[str, Any] | None, settings: Settings) -> Judgement:
    """Nothing may differ; endings are compared with what was recorded, if anything was."""
    figures = [
        Figure(
            name,
            Status.PASS if now[name] == 0 else Status.REGRESS,
            now[name],
            limit="no text may differ",
        )
        for name in ("batch", "chunks", "speculation", "prefix cache")
        if name in now
    ]
    if "rollback" in now:
        status = Status.PASS if now["rollback"] <= settings.state_error else Status.REGRESS
        figures.append(Figure("rollback", status, now["rollback"], limit=f"at most {settings.state_error:g}"))
    causes = _causes(figures)
    if before is not None:
        same = now["stops"] == before["stops"]
        figures.append(
            Figure(
                "stop tokens",
                Status.PASS if same else Status.REGRESS,
                now["stops"],
                before["stops"],
                "as recorded",
            )
        )
        if not same:
            causes.append("the generation defaults have other end tokens")
        kept = [
            a.split(":")[0] == b.split(":")[0]
            for a, b in zip(now["endings"], before["endings"], strict=False)
        ]
        figures.append(
            Figure(
                "endings",
                Status.PASS if np.mean(kept) > 0.5 else Status.REGRESS,
                now["endings"],
                before["endings"],
                "most texts end for the same reason",
            )
        )
    bad = [f.name for f in figures if f.status is not Status.PASS]
    return Judgement(
        f"texts depend on {', '.join(bad)}" if bad else "texts depend on nothing they must not",
        figures,
        causes,
    )


_CAUSES = {
    "batch": "a result depends on what else is in a step",
    "chunks": "the state after a chunk is not that after its tokens",
    "speculation": "drafts change the text: the state of rejected tokens is not undone, or verification is wrong",
    "rollback": "the state of rejected tokens is not undone",
    "prefix cache": "a restored state is not the one that was kept",
}


def _causes(figures: Sequence[Figure]) -> list[str]:
    return [_CAUSES[f.name] for f in figures if f.status is not Status.PASS and f.name in _CAUSES]


def _differences(want: Sequence[Sequence[int]], found: Sequence[Sequence[int]]) -> int:
    return sum(tuple(a) != tuple(b) for a, b in zip(want, found, strict=True))


def _rollback_error(subject: Subject, tokens: Sequence[int], settings: Settings) -> float:
    """Largest relative difference of the logits after some tokens that follow a rejection, to those without one."""
    engine = subject.speculating(draft_length=settings.drafts)
    session: Any = engine.session
    want = logits_of(session, tokens)[-1]
    worst = 0.0
    wide = session.pending
    for accepted in range(1, wide + 1):
        head, rest = list(tokens[: -wide - 1]), list(tokens[-wide - 1 :])
        logits_of(session, head, chunk=max(len(head), wide + 1))
        right = rest[:accepted]
        wrong = [(t + 1) % engine.spec.vocab_size for t in rest[accepted:wide]]
        past = len(head)
        session.step(StepBatch.of_rows([right + wrong], past=[past], slots=[0], logits="none"))
        left = rest[accepted:]
        batch = StepBatch.of_rows([left], past=[past + accepted], slots=[0], accepted=[accepted])
        found = session.step(batch).logits[-1]
        worst = max(worst, float(np.abs(found - want).max() / np.abs(want).max()))
    return worst
