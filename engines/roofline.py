# SPDX-License-Identifier: Apache-2.0
"""How fast a device could decode if nothing but its memory mattered: a bound that is computed, not measured.

A step that gives each of B sequences one token reads every weight of the trunk but the routed experts once, the
experts that its tokens chose, one embedding row a token, and for each sequence its caches and its recurrent state,
which is written back as well. Bytes over bandwidth are the least time the step can take. What the bound leaves out:
arithmetic (it binds for large B), launches (they bind for B = 1 on fast devices), drafts, and that tokens of one text
choose experts alike, which reads fewer of them.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from nemo_build.engines.footprint import Footprint
from nemo_build.state import StateSpec, state_bytes


@dataclass(frozen=True)
class StepBytes:
    """Bytes that a step of decoding moves.

    Attributes:
        dense: Weights that every step reads.
        experts: Routed experts that the step's tokens chose.
        embeddings: Rows of the embedding table.
        state: Recurrent state, read and written.
        cache: Keys and values, read.
    """

    dense: float
    experts: float
    embeddings: float
    state: float
    cache: float

    @property
    def total(self) -> float:
        """Bytes in all."""
        return self.dense + self.experts + self.embeddings + self.state + self.cache

    @property
    def weights(self) -> float:
        """Bytes of weights in all, without embedding rows."""
        return self.dense + self.experts


def distinct_experts(experts: int, chosen: int, tokens: int) -> float:
    """Experts of a layer that at least one of some tokens chooses, if all choose independently and uniformly.

    Args:
        experts: Experts of the layer.
        chosen: Experts that each token chooses.
        tokens: Tokens of the step.
    """
    untouched: float = (1 - chosen / experts) ** tokens
    return experts * (1 - untouched)


def step_bytes(
    model: Footprint, states: Iterable[StateSpec], *, sequences: int, context: int, tokens: int = 1
) -> StepBytes:
    """Work out what a step moves.

    Args:
        model: The weights as the device holds them.
        states: State buffers of the model itself, in the types that the device holds them in.
        sequences: Sequences of the step.
        context: Positions in each sequence's caches.
        tokens: New tokens of each sequence; more than one where drafts are verified.
    """
    states = list(states)
    cache = [s for s in states if "context" in s.shape]
    rest = [s for s in states if "context" not in s.shape]
    moe = model.spec.moe
    share = distinct_experts(moe.num_experts, moe.top_k, sequences * tokens) / moe.num_experts if moe else 0.0
    return StepBytes(
        dense=model.dense_bytes,
        experts=model.routed_bytes * share,
        embeddings=model.embedding_row_bytes * sequences * tokens,
        state=2 * state_bytes(rest, slots=sequences),
        cache=state_bytes(cache, slots=sequences, context=context),
    )
