# SPDX-License-Identifier: Apache-2.0
"""``behaviour``: what must not change a text does not, and texts end as they did.

Speculation on and off, prefix cache on and off, one request and many at a time, prompts in chunks of any size, and the
state after a rollback: all must give the same tokens. The kernels' results do not depend on the batch on a CPU; for
engines where they may, ``near_tie`` excuses a text whose first different token was nearly as likely as the other.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from nemo_build.engines.check.checks import Judgement
from nemo_build.engines.check.checks import Settings as Base
from nemo_build.engines.check.prompts import logits_of, token_sequences
from nemo_build.engines.check.subject import Subject
from nemo_build.engines.check.verdict import Figure, Status
from nemo_build.engines.session import StepBatch

NAME = "behaviour"
MEASURED = ("sequences", "tokens", "output")
NEEDS_BASELINE = False
HARDWARE = False


@dataclass(frozen=True)
class Settings(Base):
    """What texts are compared.

    Attributes:
        sequences: Prompts.
        tokens: Tokens of each.
        output: Tokens after each.
        drafts: Drafts of a step.
        near_tie: Difference of logits up to which another token is excused; above 0, greedy texts only are compared, as
            with random numbers a near tie cannot be told.
        chunk: Positions of a step where prompts are computed in small chunks.
        state_error: Largest relative difference of logits after a rollback.
        endings: Smallest share of texts that end for the reason that was recorded.
    """

    sequences: int = 6
    tokens: int = 80
    output: int = 32
    drafts: int = 5
    near_tie: float = 0.0
    chunk: int = 7
    state_error: float = 1e-3
    endings: float = 0.5


def measure(subject: Subject, settings: Settings) -> dict[str, Any]:
    """How many texts differ between ways of computing them, and how they end."""
    from nemo_build.runtime.params import SamplingParams

    engine = subject.engine()
    prompts = token_sequences(engine, settings.sequences, settings.tokens)
    ways = [SamplingParams(max_tokens=settings.output, temperature=0)]
    if settings.near_tie == 0:
        ways.append(SamplingParams(max_tokens=settings.output, temperature=0.8, top_p=0.95, seed=7))
    cases = [(p, w) for p in prompts for w in ways]
    want = [engine.generate([p], w)[0].token_ids for p, w in cases]

    def differences(**options: Any) -> int:
        found = subject.engine(**options).generate([p for p, _ in cases], [w for _, w in cases])
        pairs = zip(cases, want, (c.token_ids for c in found), strict=True)
        return sum(a != b and not _is_tie(subject, p, a, b, settings.near_tie) for (p, _), a, b in pairs)

    found: dict[str, Any] = {"batch": differences(), "chunks": differences(token_budget=settings.chunk)}
    if subject.speculator != "none":
        found["speculation"] = differences(speculate=subject.speculator, draft_length=settings.drafts)
        found["rollback"] = _rollback_error(subject, prompts[0], settings)
    cache = {"prefix_cache": 64 << 20}
    cached = subject.engine(**cache)
    cached.generate([p[: -len(p) // 3] for p in prompts], replace(ways[0], max_tokens=1))
    before = cached.cache_statistics().hits
    found["prefix cache"] = differences(**cache)
    found["prefixes found"] = cached.cache_statistics().hits - before
    longer = SamplingParams(max_tokens=4 * settings.output, temperature=0)
    endings = [engine.generate([p], longer)[0] for p in prompts]
    found["endings"] = [str(c.finish_reason) for c in endings]
    found["stops"] = sorted(engine.eos_ids)
    return found


def summary(found: Mapping[str, Any]) -> dict[str, float]:
    """Nothing is more or less: a text differs, or it does not."""
    return {}


def judge(now: Mapping[str, Any], before: Mapping[str, Any] | None, settings: Settings) -> Judgement:
    """Nothing may differ; endings are compared with what was recorded, if anything was."""
    figures = [
        Figure(name, Status.REGRESS if now[name] else Status.PASS, now[name], limit="no text may differ")
        for name in ("batch", "chunks", "speculation", "prefix cache")
        if name in now
    ]
    if "rollback" in now:
        status = Status.PASS if now["rollback"] <= settings.state_error else Status.REGRESS
        figures.append(Figure("rollback", status, now["rollback"], limit=f"at most {settings.state_error:g}"))
    few = now["prefixes found"] == 0
    figures.append(
        Figure("prefixes found", Status.REGRESS if few else Status.PASS, now["prefixes found"], limit="some")
    )
    if before is not None:
        figures += _endings(now, before, settings)
    bad = [f.name for f in figures if f.status is not Status.PASS]
    headline = f"not as it must be: {', '.join(bad)}" if bad else "texts depend on nothing that they must not"
    return Judgement(headline, figures, [_CAUSES[name] for name in bad])


def _endings(now: Mapping[str, Any], before: Mapping[str, Any], settings: Settings) -> list[Figure]:
    same = now["stops"] == before["stops"]
    kept = [a == b for a, b in zip(now["endings"], before["endings"], strict=False)]
    share = float(np.mean(kept)) if kept else 1.0
    return [
        Figure(
            "stop tokens",
            Status.PASS if same else Status.REGRESS,
            now["stops"],
            before["stops"],
            "as recorded",
        ),
        Figure(
            "endings",
            Status.PASS if share >= settings.endings else Status.REGRESS,
            now["endings"],
            before["endings"],
            f"at least {settings.endings:.0%} end for the reason that was recorded",
        ),
    ]


_CAUSES = {
    "batch": "a result depends on what else is in a step",
    "chunks": "the state after a chunk is not that after its tokens",
    "speculation": "drafts change the text: the state of rejected tokens is not undone, or verification is wrong",
    "rollback": "the state of rejected tokens is not undone",
    "prefix cache": "a restored state is not the one that was kept",
    "prefixes found": "the prefix cache does not find what it was given before",
    "stop tokens": "the generation defaults have other end tokens",
    "endings": "texts end for other reasons: the model, its end tokens or the stopping changed",
}


def _is_tie(
    subject: Subject, prompt: Sequence[int], want: Sequence[int], found: Sequence[int], near: float
) -> bool:
    """Whether the first tokens in which two texts differ have logits that are as good as equal."""
    if near == 0:
        return False
    place = next((i for i, (a, b) in enumerate(zip(want, found, strict=False)) if a != b), None)
    if place is None:
        return False
    session: Any = subject.engine().session
    logits = logits_of(session, [*prompt, *want[:place]])[-1]
    return bool(abs(logits[want[place]] - logits[found[place]]) <= near)


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
