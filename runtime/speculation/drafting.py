# SPDX-License-Identifier: Apache-2.0
"""How drafts are chosen from a drafter's predictions, to go with a way of verifying them.

``coupled`` is the default: a draft is drawn from the drafter's distribution as the target draws its token, after the
request's own transforms and with the same uniform number. Where the two distributions are alike the draws agree, more
often than the target's draw agrees with the drafter's most likely token. Verification takes the drafts for what they
are, so the text is that of plain decoding for the same seed.

``token`` and ``block`` draw with numbers that the target does not use, and keep the distributions for rejection
sampling; see :mod:`nemo_build.runtime.speculation.verify`. The text is another one of the same distribution.

A greedy request has no choice: its drafts are the most likely tokens after its transforms, however they are verified.

The transforms count the drafts before as if they were accepted: penalties see their tokens, ``min_tokens`` their
positions. A prediction that is unusable (NaN) yields some token, for drafts never change a text. What the text has to
obey goes for drafts as well.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import KW_ONLY, dataclass, field
from typing import Literal, get_args

import numpy as np
from numpy.typing import NDArray

from nemo_build.errors import RequestError
from nemo_build.runtime.constraints.base import Guide
from nemo_build.runtime.params import SamplingParams
from nemo_build.runtime.sampling import (
    NonFiniteLogitsError,
    TokenCounts,
    draw,
    sample,
    target_distribution,
)
from nemo_build.runtime.speculation.base import Chooser
from nemo_build.runtime.speculation.verify import draft_uniform

__all__ = ["CoupledChooser", "DistributionChooser", "Drafting", "chooser_for", "greedy", "was_asked"]

Drafting = Literal["coupled", "token", "block"]


def greedy(logits: NDArray[np.float32]) -> int:
    """The most likely token of ``[V]``, the lowest id among equals."""
    return int(logits.argmax())


def chooser_for(
    params: SamplingParams,
    counts: TokenCounts | None,
    *,
    seed: int,
    position: int,
    eos_ids: Collection[int],
    num_output: int,
    method: Drafting = "coupled",
    guide: Guide | None = None,
) -> Chooser:
    """What chooses the drafts of one step of a request.

    Args:
        params: The request's parameters.
        counts: Tokens so far, without the drafts; may be ``None`` unless :attr:`SamplingParams.uses_counts`. They
            are as they were found whenever no choice is under way.
        seed: The request's seed.
        position: Position of the first draft in the sequence.
        eos_ids: The model's own end ids.
        num_output: Output tokens so far.
        method: How the drafts will be verified. Only with ``token`` and ``block``, and only for requests that are
            not greedy, the result is a :class:`DistributionChooser`, whose distributions verification needs.
        guide: Says which tokens are allowed as drafts; ``None``: all of them.

    Raises:
        ValueError: There is no such method.
    """
    if method not in get_args(Drafting):
        raise ValueError(f"there is no way of drafting {method!r}")
    is_greedy = params.temperature == 0
    is_plain = not (params.uses_counts or params.logit_bias or num_output < params.min_tokens)
    if is_greedy and is_plain and guide is None:
        return greedy
    kind = CoupledChooser if is_greedy or method == "coupled" else DistributionChooser
    return kind(
        params, counts, seed=seed, position=position, eos_ids=eos_ids, num_output=num_output, guide=guide
    )


@dataclass(eq=False)
class _Drafts(ABC):
    """The drafts of one step so far, and the request they are for; arguments as :func:`chooser_for`'s."""

    params: SamplingParams
    counts: TokenCounts | None
    _: KW_ONLY
    seed: int
    position: int
    eos_ids: Collection[int]
    num_output: int
    guide: Guide | None
    _drafts: list[int] = field(default_factory=list, init=False)

    def __call__(self, logits: NDArray[np.float32]) -> int:
        """Choose the next draft from a prediction ``[V]``."""
        logits = self._allowed(logits)
        counts = self.counts if self.params.uses_counts else None
        if counts is None:
            token = self._choose(logits, len(self._drafts))
        else:
            # Pushed for each choice anew, because no later moment is certain to come at which to take them out again.
            with _pushed(counts, self._drafts):
                token = self._choose(logits, len(self._drafts))
        self._drafts.append(token)
        return token

    def _allowed(self, logits: NDArray[np.float32]) -> NDArray[np.float32]:
        """The prediction, as far as its tokens are allowed behind the drafts so far."""
        if self.guide is None:
            return logits
        try:
            return self.guide.masked(logits, self._drafts)
        except RequestError:  # the target will say so if it comes here
            return logits

    @abstractmethod
    def _choose(self, logits: NDArray[np.float32], index: int) -> int:
        """Choose draft number `index`."""


@contextmanager
def _pushed(counts: TokenCounts, tokens: Sequence[int]) -> Iterator[None]:
    """Count tokens for a while."""
    for token in tokens:
        counts.push(token)
    try:
        yield
    finally:
        for _ in tokens:
            counts.pop()


def was_asked(chooser: Chooser) -> bool:
    """Whether a speculator chose drafts with this, and not by itself."""
    return not isinstance(chooser, _Drafts) or bool(chooser._drafts)


class CoupledChooser(_Drafts):
    """Chooses each draft as the target will choose the token there; arguments as :func:`chooser_for`'s."""

    def _choose(self, logits: NDArray[np.float32], index: int) -> int:
        try:
            return sample(
                logits,
                self.params,
                self.counts,
                seed=self.seed,
                position=self.position + index,
                eos_ids=self.eos_ids,
                num_output=self.num_output + index,
            )
        except NonFiniteLogitsError:
            return greedy(logits)


@dataclass(eq=False)
class DistributionChooser(_Drafts):
    """Draws drafts independently of the target, and keeps their distributions; arguments as :func:`chooser_for`'s."""

    _rows: NDArray[np.float64] = field(default_factory=lambda: np.empty((0, 0)), init=False)

    @property
    def probabilities(self) -> NDArray[np.float64]:
        """``[k, V]``: row i is what draft i was drawn from. Without a draft ``[0, 0]``.

        The first n rows go with the first n drafts, if whether to verify a draft does not depend on it.
        """
        return self._rows[: len(self._drafts)]

    def _choose(self, logits: NDArray[np.float32], index: int) -> int:
        try:
            row = target_distribution(
                logits,
                self.params,
                self.counts,
                eos_ids=self.eos_ids,
                num_output=self.num_output + index,
            )
        except NonFiniteLogitsError:
            row = np.zeros(len(logits))
            row[greedy(logits)] = 1
        if index == len(self._rows):  # one array that grows: new memory is dear at a large vocabulary
            rows = np.empty((2 * index or 8, len(row)))
            if index:
                rows[:index] = self._rows
            self._rows = rows
        self._rows[index] = row
        return draw(row, draft_uniform(self.seed, self.position, index))
