# SPDX-License-Identifier: Apache-2.0
"""The texts that checks run an engine on: the same ones each time, cut to the same lengths."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from nemo_build.engines.session import Session, StepBatch

if TYPE_CHECKING:
    from nemo_build.runtime.engine import Engine


def token_sequences(engine: Engine, count: int, length: int) -> list[list[int]]:
    """Beginnings of the texts that ship with the benchmark, by turns of each category.

    Args:
        engine: Whose tokenizer is used.
        count: How many; fewer if there are not so many texts.
        length: Tokens of each, at most, and at most the engine's context.
    """
    from nemo_build.runtime.bench.prompts import DEFAULT_PROMPTS, read_prompts

    texts = [p.content for p in read_prompts(DEFAULT_PROMPTS) if p.kind == "text"]
    most = min(length, engine.session.context)
    return [engine.tokenizer.encode(text, add_special_tokens=True)[:most] for text in texts[:count]]


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
        pending = len(part) if 1 < len(part) <= session.pending else 0
    return np.concatenate(found)


def log_softmax(logits: NDArray[np.float32]) -> NDArray[np.float64]:
    """Natural log-probabilities of rows."""
    shifted = logits.astype(np.float64) - logits.max(axis=-1, keepdims=True)
    return np.asarray(shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True)))
