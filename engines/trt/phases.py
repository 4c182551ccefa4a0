# SPDX-License-Identifier: Apache-2.0
"""The graphs an engine has: one for few tokens of each sequence, one for prompts."""

from __future__ import annotations

from dataclasses import dataclass

DECODE, PREFILL = "decode", "prefill"

EXPERT_ROWS = 128
"""Rows of an expert's buffer in a prefill graph. The last takes what is dropped: padding, and what does not fit."""

PENDING = 8
"""Tokens per sequence that a step may leave uncommitted; the step is at least so wide for the compiler as well, which
for a single token would merge the look-ups of experts and hold them all unpacked."""

CHUNK = 256
"""Most prompt tokens of a sequence in one step."""

SCAN_CHUNK = 64
"""Tokens in a chunk of the chunked scan; at least twice :data:`PENDING`."""


@dataclass(frozen=True)
class Phase:
    """The sizes of one graph.

    Attributes:
        name: ``decode``, which also verifies drafts, or ``prefill``.
        slots: Most sequences, hence rows.
        context: Positions per sequence.
        steps: Most new tokens of a row.
        pending: Tokens of a row that a step may leave uncommitted.
        cache_rows: Positions of a cache: `context`, and room for the padding behind a row's tokens.
    """

    name: str
    slots: int
    context: int
    steps: int
    pending: int
    cache_rows: int

    @property
    def scan_chunk(self) -> int:
        """Tokens in a chunk of the scan; when decoding, all pending and new ones."""
        return 2 * self.pending if self.name == DECODE else SCAN_CHUNK

    @property
    def logit_rows(self) -> int:
        """Most rows whose logits one step gives: of all tokens that are verified, or of each prompt's last."""
        return self.slots * (self.steps if self.name == DECODE else 1)


def phases_of(slots: int, context: int, names: tuple[str, ...] = (DECODE, PREFILL)) -> list[Phase]:
    """The phases of an engine with `slots` sequences of `context` positions."""
    steps = {DECODE: PENDING, PREFILL: max(min(CHUNK, context), PENDING)}
    rows = context + max(steps.values())
    return [Phase(name, slots, context, steps[name], PENDING, rows) for name in names]
