# SPDX-License-Identifier: Apache-2.0
"""The texts that checks run an engine on: the same ones each time, cut to the same lengths."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain, zip_longest
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from nemo_build.engines.session import Session, StepBatch
from nemo_build.state import stays_pending

if TYPE_CHECKING:
    from nemo_build.runtime.engine import Engine


def texts() -> list[str]:
    """The texts that ship with the benchmark: of each category one, then of each another."""
    from nemo_build.runtime.bench.prompts import DEFAULT_PROMPTS, read_prompts

    by_category: dict[str, list[str]] = {}
    for prompt in read_prompts(DEFAULT_PROMPTS):
        if prompt.kind == "text":
            by_category.setdefault(prompt.category, []).append(str(prompt.content))
    turns = chain.from_iterable(zip_longest(*by_category.values()))
    return [text for text in turns if text is not None]


def token_sequences(engine: Engine, count: int, length: int) -> list[list[int]]:
    """Beginnings of :func:`texts` as tokens.

    Args:
        engine: Whose tokenizer is used.
        count: How many; fewer if there are not so many texts.
        length: Tokens of each, at most, and at most the engine's context.
    """
    most = min(length, engine.session.context)
    return [engine.tokenizer.encode(text, add_special_tokens=True)[:most] for text in texts()[:count]]


def filled(engine: Engine, count: int, length: int) -> list[list[int]]:
    """Sequences of exactly so many tokens each, made of the texts one after another."""
    every = list(chain.from_iterable(engine.tokenizer.encode(text) for text in texts()))
    return [(every[i % len(every) :] + every * (length // len(every) + 1))[:length] for i in range(count)]


def logits_of(
    session: Session, tokens: Sequence[int], *, chunk: int | None = None, slot: int = 0
) -> NDArray[np.float32]:
    """Logits ``[L, V]`` after each token of a sequence, fed in chunks of at most so many tokens."""
    size = chunk or len(tokens)
    found = []
    past = pending = 0
    for start in range(0, len(tokens), size):
        part = list(tokens[start : start + size])
        batch = StepBatch.of_rows([part], past=[past], slots=[slot], accepted=[pending], logits="all")
        found.append(session.step(batch).logits)
        past += len(part)
        pending = len(part) if stays_pending(len(part), session.pending) else 0
    return np.concatenate(found)
