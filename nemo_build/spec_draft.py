# SPDX-License-Identifier: Apache-2.0
"""What a block drafter (DFlash, DSpark) is made of, as every stage sees it.

A :class:`DraftSpec` is plain data like :class:`nemo_build.spec.ModelSpec`. It is read from the ``config.json`` of
the drafter's checkpoint by :func:`load_draft`, against the spec of the model that it drafts for; the rules are in
:mod:`nemo_build.spec_draft_config`. This module imports the standard library only.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from nemo_build.spec import ModelSpec, decode, encode


class DraftKind(StrEnum):
    """The two families of block drafters; also the first part of their graphs' names."""

    DFLASH = "dflash"  # arXiv:2602.06036
    DSPARK = "dspark"  # arXiv:2607.05147


@dataclass(frozen=True)
class YarnSpec:
    """YaRN (arXiv:2309.00071): slow frequencies are divided by ``factor``, fast ones kept, in between a ramp.

    The ramp is between the components that turn ``beta_fast`` and ``beta_slow`` times in ``original_positions``;
    with ``truncate`` its ends are whole components. Cosines and sines are multiplied by ``attention_factor``.
    """

    factor: float
    original_positions: int
    beta_fast: float
    beta_slow: float
    attention_factor: float
    truncate: bool


@dataclass(frozen=True)
class RotarySpec:
    """Rotary positions of whole heads of width ``dim``; components i and i + dim/2 are a pair."""

    theta: float
    dim: int
    yarn: YarnSpec | None

    @property
    def attention_factor(self) -> float:
        """What cosines and sines are multiplied by."""
        return 1.0 if self.yarn is None else self.yarn.attention_factor

    def frequencies(self) -> tuple[float, ...]:
        """Radians a position of each of the dim/2 pairs."""
        plain = [self.theta ** (-2 * i / self.dim) for i in range(self.dim // 2)]
        if self.yarn is None:
            return tuple(plain)
        low, high = self._ramp(self.yarn)
        slowed = [min(max((i - low) / (high - low), 0.0), 1.0) for i in range(self.dim // 2)]
        return tuple(f * (1 - s + s / self.yarn.factor) for f, s in zip(plain, slowed, strict=True))

    def _ramp(self, yarn: YarnSpec) -> tuple[float, float]:
        """Where the ramp from kept to slowed frequencies begins and ends, in pairs."""

        def pair_turning(turns: float) -> float:
            positions = yarn.original_positions / (turns * 2 * math.pi)
            return self.dim * math.log(positions) / (2 * math.log(self.theta))

        low, high = pair_turning(yarn.beta_fast), pair_turning(yarn.beta_slow)
        if yarn.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, self.dim - 1)
        return low, high if high != low else high + 0.001


@dataclass(frozen=True)
class DraftSpec:
    """A drafter: a few attention layers over a context made of the target's hidden states.

    Attributes:
        kind: Its family.
        architecture: As its configuration names it.
        vocab_size: The target's.
        hidden_size: The target's.
        taps: Layers of the target whose outputs it is fed, in the order in which they are concatenated.
        windows: For each of its layers, how many positions up to its own a token sees; 0 for all.
        num_heads: Query heads.
        num_kv_heads: Key/value heads.
        head_dim: Width of a head.
        intermediate_size: Inner width of the gated feed-forward blocks.
        norm_eps: Of all its norms.
        rotary: Its positions.
        causal: Whether a token of a block sees the block's later tokens not.
        sinks: Whether each head has a learned logit that takes part in the softmax without a value.
        mask_token_id: What stands for a token that is to be drafted.
        block_size: Tokens of a block in training, the anchor included; None if the configuration does not say.
        sample_from_anchor: Whether every token of a block predicts the token after it, the anchor too. Otherwise a
            mask predicts the token at its own position and the anchor's output is not used.
        markov_rank: Width of the Markov head, 0 without one.
        confidence: Whether there is a head that predicts whether a token will be accepted.
        own_embeddings: Whether its checkpoint has embeddings; None for "look".
        own_head: Whether its checkpoint has an output head; None for "look".
        max_positions: Longest context.
        dtype: A torch dtype name.
    """

    kind: DraftKind
    architecture: str
    vocab_size: int
    hidden_size: int
    taps: tuple[int, ...]
    windows: tuple[int, ...]
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    norm_eps: float
    rotary: RotarySpec
    causal: bool
    sinks: bool
    mask_token_id: int
    block_size: int | None
    sample_from_anchor: bool
    markov_rank: int
    confidence: bool
    own_embeddings: bool | None
    own_head: bool | None
    max_positions: int
    dtype: str

    @property
    def scale(self) -> float:
        """Factor on the logits of attention before the softmax."""
        scale: float = self.head_dim**-0.5
        return scale

    @property
    def max_drafted(self) -> int | None:
        """Tokens that a block of the trained size drafts; None if that size is not known."""
        return self.block_size and self.block_size - (not self.sample_from_anchor)

    def to_json(self) -> dict[str, Any]:
        """The spec as standard JSON data."""
        encoded: dict[str, Any] = encode(self)
        return encoded

    @classmethod
    def from_json(cls, data: object) -> DraftSpec:
        """The inverse of :meth:`to_json`. Raises ConfigError if `data` is anything else."""
        spec: DraftSpec = decode(cls, data, "draft")
        return spec


def load_draft(directory: Path, target: ModelSpec) -> DraftSpec:
    """Read the ``config.json`` of a drafter's checkpoint.

    Raises ConfigError, naming every problem, if the file is missing or damaged, if a field cannot be honoured, or
    if the drafter is not for `target`.
    """
    from nemo_build import spec_config, spec_draft_config

    config, _ = spec_config.read_files(directory)
    return spec_draft_config.build_draft(config, target, source=str(directory))
