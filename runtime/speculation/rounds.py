# SPDX-License-Identifier: Apache-2.0
"""Rounds of drafting: how many drafts each request gets, how they are chosen, and what is learnt from them.

The number of drafts of a step is fixed or the controller's, which knows what steps of each width cost. Within it each
request gets those drafts that are worth being fed: a draft costs what a step grows by, and brings a token with the
probability that it and those before it are accepted. That probability comes from the request's own past and, after
drafting, from the drafter itself where it tells (DSpark, arXiv:2607.05147, section 3: survival is the running product
of the confidences, drafts are cut at the first whose survival does not pay). A decision to verify a draft never depends
on that draft, so the output's distribution is that of the target with any way of verifying.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nemo_build.runtime.request import Request
from nemo_build.runtime.speculation.acceptance import Acceptance, RequestRates
from nemo_build.runtime.speculation.base import Chooser, Committed, DraftRequest, Proposal, Speculator
from nemo_build.runtime.speculation.drafting import DistributionChooser, Drafting, was_asked
from nemo_build.runtime.speculation.lengths import DraftLengthController
from nemo_build.runtime.speculation.verify import Method

__all__ = ["Drafts", "Speculation", "worth_verifying"]


@dataclass(frozen=True, slots=True)
class Drafts:
    """Drafts of one request.

    Attributes:
        tokens: Token ids.
        probabilities: ``[len(tokens), V]``: the distributions they were drawn from, for rejection sampling;
            ``None`` where drafts are compared with the target's own choice.
    """

    tokens: list[int]
    probabilities: NDArray[np.float64] | None = None


NO_DRAFTS = Drafts([])

_WATCHED_SHARE = 8
"""While drafts are known not to pay, the speculator is told of one request in so many, which is enough to find out when
they begin to."""

_REST = 3
"""Steps that go by unwatched after each that was, while drafts do not pay: watching costs as well."""


class Speculation:
    """Where the drafts of a scheduler come from.

    Args:
        speculator: What proposes them.
        draft_length: Most drafts of a request in a step; the session keeps at least one more pending.
        slots: State slots.
        controller: What chooses a length up to that from step to step, or ``None`` to draft as many always.
        drafting: How drafts of sampled requests are chosen and verified; see
            :mod:`~nemo_build.runtime.speculation.drafting`.
        watch_all: Tell the speculator of every request, drafts or not, because its state is to be saved.

    Attributes:
        speculator: As given.
        acceptance: What came of the drafts.
        method: How drafts with distributions are verified.
    """

    def __init__(
        self,
        speculator: Speculator,
        draft_length: int,
        slots: int,
        *,
        controller: DraftLengthController | None = None,
        drafting: Drafting = "coupled",
        watch_all: bool = False,
    ) -> None:
        self.speculator = speculator
        self.acceptance = Acceptance()
        self.method: Method = "block" if drafting == "block" else "token"
        self._drafting = drafting
        self._watch_all = watch_all
        self._started = 0
        self._most = draft_length
        self._controller = controller
        self._rates = RequestRates(slots, draft_length)
        self._seconds = 0.0
        self._asked = False  # whether the last step was one to learn from
        self._rest = 0  # steps for which nothing is drafted or learnt

    def start(self, request: Request, extra: Mapping[str, NDArray[Any]]) -> None:
        """A request has got a slot, whose state is that after ``request.fed`` of its tokens."""
        assert request.slot is not None, "a running request has a slot"
        self._started += 1
        hopeless = self._controller is not None and self._controller.is_hopeless
        request.watched = self._watch_all or not hopeless or self._started % _WATCHED_SHARE == 0
        if request.watched:
            self._rates.start(request.slot)
            self.speculator.start(request.slot, request.tokens[: request.fed], extra)

    def release(self, request: Request) -> None:
        """A request leaves its slot."""
        if request.watched and request.slot is not None:
            self.speculator.release(request.slot)

    def propose(self, requests: Sequence[Request], most: int) -> list[Drafts]:
        """At most so many drafts for each of some requests that decode together.

        There is one :meth:`learn` for each call.
        """
        self._asked = not self._rest and any(r.watched for r in requests)
        if not self._asked:
            self._rest = max(self._rest - 1, 0)
            return [NO_DRAFTS] * len(requests)
        start = time.perf_counter()
        length = self._most if self._controller is None else self._controller.choose(len(requests))
        length = min(length, most)
        drafts = self._propose(requests, length) if length > 0 else [NO_DRAFTS] * len(requests)
        self._seconds = time.perf_counter() - start
        return drafts

    def observe(self, rows: Sequence[Committed]) -> None:
        """Tell the speculator what a step has committed."""
        if rows:
            self.speculator.observe(rows)

    def learn(self, slots: Sequence[int], results: Sequence[tuple[int, int]], seconds: float) -> None:
        """Learn from the step that the last proposals went into.

        Args:
            slots: Of its requests.
            results: How many drafts of each were judged, and how many of these accepted.
            seconds: What the target took.
        """
        for judged, accepted in results:
            if judged:
                self.acceptance.add(judged, accepted)
        if self._controller is None or not self._asked:
            return
        if any(judged for judged, _ in results):
            self._rates.observe(slots, results)
        self._controller.observe(results, seconds, self._seconds)
        if self._controller.is_off:
            self._rest = _REST

    def _propose(self, requests: Sequence[Request], length: int) -> list[Drafts]:
        drafts = [NO_DRAFTS] * len(requests)
        lengths = self._lengths(requests, length)
        rows = [i for i, n in enumerate(lengths) if n]
        if not rows:
            return drafts
        asked = [self._ask(requests[i], lengths[i]) for i in rows]
        for i, request, proposal in zip(rows, asked, self.speculator.propose(asked), strict=True):
            tokens = proposal.tokens
            if self._controller is not None:
                tokens = worth_verifying(proposal, self._controller.price(len(requests)))
            if not was_asked(request.choose):
                tokens = requests[i].chooser.corrected(tokens, request.length)
            drafts[i] = Drafts(tokens, _drawn_from(request.choose, len(tokens)))
        return drafts

    def _ask(self, request: Request, length: int) -> DraftRequest:
        assert request.slot is not None, "a running request has a slot"
        return DraftRequest(request.slot, length, request.chooser.for_drafts(self._drafting))

    def _lengths(self, requests: Sequence[Request], length: int) -> list[int]:
        """How many drafts to ask for, by request."""
        most = [min(length, r.most_drafts) if r.followed else 0 for r in requests]
        if self._controller is None or self._controller.probing:
            return most
        slots = [r.slot for r in requests if r.slot is not None]
        survival = self._rates.survival(slots, self._controller.acceptance.rates())[:, :length]
        paying = _paying(survival, self._controller.price(len(requests)))
        return [min(n, int(p)) for n, p in zip(most, paying, strict=True)]


def worth_verifying(proposal: Proposal, price: float) -> list[int]:
    """The drafts before the first that is expected to bring fewer tokens than the price, by the drafter's own word."""
    if proposal.confidence is None:
        return proposal.tokens
    return proposal.tokens[: _paying(np.cumprod(proposal.confidence)[None], price)[0]]


def _drawn_from(chooser: Chooser, count: int) -> NDArray[np.float64] | None:
    """The distributions of the first so many drafts; ``None`` if there are none, or the speculator did not ask."""
    if not isinstance(chooser, DistributionChooser) or not len(chooser.probabilities):
        return None
    return chooser.probabilities[:count]


def _paying(survival: NDArray[np.floating], price: float) -> NDArray[np.int64]:
    """``[rows]``: how many drafts of each row come before the first that brings fewer tokens than the price."""
    count: NDArray[np.int64] = np.logical_and.accumulate(survival >= price, axis=1).sum(axis=1)
    return count
