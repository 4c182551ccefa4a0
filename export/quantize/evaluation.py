# SPDX-License-Identifier: Apache-2.0
"""What a quantization cost: the quantized model against its original on a text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray


class Logits(Protocol):
    """Gives the logits ``[L, V]`` of a token sequence."""

    def __call__(self, tokens: Sequence[int]) -> NDArray[np.float32]: ...


@dataclass(frozen=True)
class Evaluation:
    """The quantized model against the original, over all positions of a text.

    Attributes:
        tokens: Positions compared.
        kl_mean: Mean of KL(original ‖ quantized), in nats.
        kl_p99: Its 99th percentile.
        top1: Share of positions at which both think the same token most likely.
        perplexity: Of the quantized model.
        perplexity_original: Of the original.
    """

    tokens: int
    kl_mean: float
    kl_p99: float
    top1: float
    perplexity: float
    perplexity_original: float

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        return asdict(self)


def evaluate(original: Logits, quantized: Logits, sequences: Sequence[Sequence[int]]) -> Evaluation:
    """Compare two models on token sequences of at least two tokens each."""
    divergence, agree, losses, losses_original = [], [], [], []
    for tokens in sequences:
        p, q = (log_softmax(model(tokens)) for model in (original, quantized))
        divergence.append((np.exp(p) * (p - q)).sum(axis=-1))
        agree.append(p.argmax(axis=-1) == q.argmax(axis=-1))
        following = np.asarray(tokens[1:])
        at = np.arange(len(following))
        losses.append(-q[at, following])
        losses_original.append(-p[at, following])
    kl = np.concatenate(divergence)
    return Evaluation(
        tokens=len(kl),
        kl_mean=float(kl.mean()),
        kl_p99=float(np.quantile(kl, 0.99)),
        top1=float(np.concatenate(agree).mean()),
        perplexity=float(np.exp(np.concatenate(losses).mean())),
        perplexity_original=float(np.exp(np.concatenate(losses_original).mean())),
    )


def log_softmax(logits: NDArray[np.float32]) -> NDArray[np.float64]:
    """Natural log-probabilities of rows ``[..., V]``."""
    x = logits.astype(np.float64)
    x -= x.max(axis=-1, keepdims=True)
    normalised: NDArray[np.float64] = x - np.log(np.exp(x).sum(axis=-1, keepdims=True))
    return normalised
