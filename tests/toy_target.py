# SPDX-License-Identifier: Apache-2.0
"""A target and a drafter that are tables: any function of the tokens so far; a test of their samples."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nemo_build.runtime.params import SamplingParams
from nemo_build.runtime.sampling import TokenCounts, target_distribution
from nemo_build.runtime.speculation.verify import Verdict, verify

Tokens = tuple[int, ...]

EOS = (0,)
PROMPT = (1, 2, 2)


@cache
def target_logits(prefix: Tokens, width: int, spread: float = 1.2) -> NDArray[np.float32]:
    """The target's row after ``prefix``."""
    return (np.random.default_rng([1, *prefix]).normal(size=width) * spread).astype(np.float32)


@cache
def drafter(prefix: Tokens, width: int) -> NDArray[np.float64]:
    """A drafter that is roughly right."""
    noise = np.random.default_rng([2, *prefix]).normal(size=width)
    weights = np.exp(0.7 * target_logits(prefix, width) + 0.7 * noise)
    return weights / weights.sum()


def ends(tokens: Tokens, params: SamplingParams, eos_ids: Tokens = EOS) -> bool:
    enders = {*params.stop_token_ids, *(() if params.ignore_eos else eos_ids)}
    return bool(tokens) and tokens[-1] in enders and len(tokens) > params.min_tokens


def distribution(tokens: Tokens, params: SamplingParams, width: int) -> NDArray[np.float64]:
    """What plain decoding draws from after ``tokens``."""
    counts = TokenCounts(PROMPT)
    for token in tokens:
        counts.push(token)
    return target_distribution(
        target_logits(tokens, width), params, counts, eos_ids=EOS, num_output=len(tokens)
    )


def step(
    tokens: Tokens, draft: Sequence[int], params: SamplingParams, width: int, seed: int, **how: Any
) -> Verdict:
    """Verify drafts after ``tokens``, and see that the counts are left alone."""
    counts = TokenCounts(PROMPT)
    for token in tokens:
        counts.push(token)
    draft = tuple(draft)
    rows = np.stack([target_logits(tokens + draft[:i], width) for i in range(len(draft) + 1)])
    verdict = verify(
        rows,
        draft,
        params,
        counts,
        seed=seed,
        position=len(PROMPT) + len(tokens),
        eos_ids=EOS,
        num_output=len(tokens),
        **how,
    )
    assert len(counts) == len(tokens)
    assert [counts.pop() for _ in tokens] == list(reversed(tokens))
    assert verdict.tokens[: verdict.accepted] == draft[: verdict.accepted]
    assert verdict.ended == ends(tokens + verdict.tokens, params)
    return verdict


def chi_square_rejects(counts: dict[Tokens, int], probs: dict[Tokens, float]) -> bool:
    """Pearson's test at about one in a million (Wilson-Hilferty approximation of the critical value).

    Outcomes expected fewer than five times are counted together.
    """
    if any(probs.get(t, 0.0) == 0 for t in counts):
        return True
    total = sum(counts.values())
    cells: dict[Tokens, list[float]] = defaultdict(lambda: [0.0, 0.0])
    for tokens, p in probs.items():
        cell = cells[tokens if p * total >= 5 else ()]
        cell[0] += counts.get(tokens, 0)
        cell[1] += p * total
    statistic = sum((seen - wanted) ** 2 / wanted for seen, wanted in cells.values())
    degrees = len(cells) - 1
    spread = 2 / (9 * degrees)
    return statistic > degrees * (1 - spread + 4.75 * math.sqrt(spread)) ** 3
