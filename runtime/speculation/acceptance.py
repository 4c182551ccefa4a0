# SPDX-License-Identifier: Apache-2.0
"""What comes of drafts: counted for people, and by request for the choice of draft lengths."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

__all__ = ["Acceptance", "RequestRates"]

_DECAY = 0.95
"""What a step leaves of a request's earlier observations."""

_POOLED_WEIGHT = 4.0
"""How many observations of a request its neighbours' rates count for."""


@dataclass
class Acceptance:
    """What came of the drafts so far.

    Attributes:
        steps: Verifications, of one sequence each.
        drafted: Drafts by position; ``drafted[0]`` counts first drafts.
        accepted: Accepted ones likewise.
    """

    steps: int = 0
    drafted: list[int] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)

    def add(self, drafts: int, accepted: int) -> None:
        """Count one verification."""
        self.steps += 1
        while len(self.drafted) < drafts:
            self.drafted.append(0)
            self.accepted.append(0)
        for i in range(drafts):
            self.drafted[i] += 1
            self.accepted[i] += i < accepted

    @property
    def length(self) -> float:
        """Acceptance length: tokens that a verification yields on average, the one without a draft included."""
        return 1 + sum(self.accepted) / self.steps if self.steps else 1.0


class RequestRates:
    """The probability of each draft of each request to be accepted after those before it were.

    Counts that decay, drawn towards the rates of all requests together as long as they are few.

    Args:
        slots: State slots; a request is known by its own.
        max_length: Most drafts of a step.
    """

    def __init__(self, slots: int, max_length: int) -> None:
        self._tried = np.zeros((slots, max_length))
        self._accepted = np.zeros((slots, max_length))

    def start(self, slot: int) -> None:
        """Another request has the slot."""
        self._tried[slot] = self._accepted[slot] = 0

    def observe(self, slots: Sequence[int], results: Sequence[tuple[int, int]]) -> None:
        """Learn from a step: for each slot how many tokens were drafted, and how many of them accepted."""
        rows = np.asarray(slots)
        drafted, accepted = np.array(results).T[:, :, None]
        depth = np.arange(self._tried.shape[1])
        self._tried[rows] = _DECAY * self._tried[rows] + (depth < np.minimum(drafted, accepted + 1))
        self._accepted[rows] = _DECAY * self._accepted[rows] + (depth < accepted)

    def survival(self, slots: Sequence[int], pooled: NDArray[np.float64]) -> NDArray[np.float64]:
        """``[len(slots), max_length]``: the probability of each draft that it and all before it are accepted.

        Args:
            slots: The requests' slots.
            pooled: ``[max_length]``: the rates of all requests together.
        """
        rows = np.asarray(slots)
        rates = (self._accepted[rows] + _POOLED_WEIGHT * pooled) / (self._tried[rows] + _POOLED_WEIGHT)
        survival: NDArray[np.float64] = np.cumprod(rates, axis=1)
        return survival
