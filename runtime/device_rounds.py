# SPDX-License-Identifier: Apache-2.0
"""Rounds that a device takes by itself: greedy requests with drafts of the MTP module.

Where each of the requests that decode takes the likeliest token, the host has no part in a round but to plan how many
drafts each gets. The target's hidden states stay on the device, where the module takes them in the next round. The
other steps, with prompts or a request that is sampled, are the host's as ever. Rows may change between the two from
step to step: what the host lacks it fetches when it first needs it.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nemo_build.engines.gpu.round import RoundRow, Rounds, Verified
from nemo_build.engines.gpu.session import GpuSession
from nemo_build.engines.session import Session
from nemo_build.runtime.planned import Chosen, are_planned, plan_drafts
from nemo_build.runtime.request import Request
from nemo_build.runtime.speculation.base import Committed, DraftRequest, Proposal, Waiting
from nemo_build.runtime.speculation.mtp import MtpSpeculator
from nemo_build.runtime.speculation.rounds import Drafts, Speculation
from nemo_build.runtime.steps import Computed, Row, StepRunner


@dataclass(frozen=True)
class _Tail:
    """The last positions of a sequence, whose hidden states are those of the last round.

    Attributes:
        row: What was committed.
        before: How many positions the round before gave, which are on the device too; 0: the host has them.
    """

    row: Committed
    before: int

    @property
    def count(self) -> int:
        """How many positions."""
        return len(self.row.tokens) - 1


class DeviceMtpSpeculator(MtpSpeculator):
    """Drafts of the MTP module by rounds of the device, or by steps of its own, as of the base class.

    Args:
        session: The open ``mtp`` graph.
        rounds: Takes rounds with it.
    """

    def __init__(self, session: Session, rounds: Rounds) -> None:
        super().__init__(session)
        self._rounds = rounds
        self._tails: dict[int, _Tail] = {}

    def start(self, slot: int, tokens: Sequence[int], extra: Mapping[str, NDArray[Any]]) -> None:
        """As of the base class."""
        self._tails.pop(slot, None)
        super().start(slot, tokens, extra)

    def observe(self, rows: Sequence[Committed]) -> None:
        """Keep the committed positions; those without features are of the last round."""
        on_host = []
        for row in rows:
            if row.features is None:
                fed = self._tails.get(row.slot)
                self._tails[row.slot] = _Tail(row, fed.count if fed is not None else 0)
            else:
                self._fetch(row.slot)
                on_host.append(row)
        super().observe(on_host)

    def propose(self, requests: Sequence[DraftRequest]) -> list[Proposal]:
        """As of the base class."""
        for request in requests:
            self._fetch(request.slot)
        return super().propose(requests)

    def save(self, slot: int, committed: int) -> Mapping[str, NDArray[Any]]:
        """As of the base class."""
        self._fetch(slot)
        return super().save(slot, committed)

    def release(self, slot: int) -> None:
        """As of the base class."""
        self._tails.pop(slot, None)
        super().release(slot)

    def take_round(self, rows: Sequence[Row]) -> list[Verified]:
        """Draft and verify; the drafts of the rows are counts of those to be made."""
        self._feed_long([slot for row in rows if (slot := row.request.slot) is not None])
        return self._rounds.run([self._round_row(row) for row in rows])

    def _feed_long(self, slots: Sequence[int]) -> None:
        """Feed the module what waits of prompts, but for the last positions, where that is more than a round takes."""
        waiting = self._waiting
        long = [slot for slot in slots if waiting[slot].end - waiting[slot].taken > self._rounds.most]
        if long:
            self._feed(long, [waiting[slot].take(waiting[slot].end - 1) for slot in long], logits="none")

    def _round_row(self, row: Row) -> RoundRow:
        request, slot = row.request, row.request.slot
        assert slot is not None, "a row has a slot"
        tail = self._tails.get(slot)
        hidden: NDArray[np.float32] | None = None
        if tail is not None:
            fed, following = tail.row.past, tail.row.tokens[1:]
        else:
            waiting = self._waiting[slot]
            # The last position is fed again where nothing was committed since.
            waiting.taken = min(waiting.taken, waiting.end - 1)
            fed, following, hidden = waiting.take(waiting.end)
        return RoundRow(
            slot=slot,
            token=row.tokens[0],
            past=request.fed,
            accepted=request.uncommitted,
            drafts=len(row.drafts.tokens),
            fed=fed,
            following=following,
            hidden=hidden,
        )

    def _fetch(self, slot: int) -> None:
        """Bring to the host what the last round left on the device, if it did, as positions that wait."""
        tail = self._tails.pop(slot, None)
        if tail is None:
            return
        if tail.before:  # what the host has is older
            last = self._rounds.hidden(slot, tail.before - 1, 1, before=True)
            self._waiting[slot] = waiting = Waiting(tail.row.past - 1, last)
            waiting.taken = waiting.end
        features = self._rounds.hidden(slot, 0, tail.count)
        self._waiting[slot].add(Committed(slot, tail.row.past, tail.row.tokens, features))


class DeviceSpeculation(Speculation):
    """Plans how many drafts each request gets, where the device is to make them; arguments as those of
    :class:`~nemo_build.runtime.speculation.rounds.Speculation`.
    """

    def _propose(self, requests: Sequence[Request], length: int) -> list[Drafts]:
        if all(r.watched and r.followed and _needs_no_logits(r) for r in requests):
            return plan_drafts(self._lengths(requests, length))
        return super()._propose(requests, length)


class DeviceRunner(StepRunner):
    """Computes rows with a session of a GPU, in rounds of the device where their drafts were planned for that.

    Args:
        session: The target.
        speculation: Plans drafts.
        speculator: Takes rounds.
        keep_all: As of the base class.
    """

    def __init__(
        self,
        session: Session,
        speculation: DeviceSpeculation,
        speculator: DeviceMtpSpeculator,
        *,
        keep_all: bool,
    ) -> None:
        super().__init__(session, speculation, keep_all=keep_all)
        self._speculator = speculator

    def run(self, rows: Sequence[Row]) -> Computed:
        """As of the base class."""
        if not any(are_planned(row.drafts) for row in rows):
            return super().run(rows)
        start = time.perf_counter()
        found = self._speculator.take_round(rows)
        seconds = time.perf_counter() - start
        tokens = [_accept(v) for v in found]
        accepted = [0 if t is None else len(t) - 1 for t in tokens]
        return Chosen.of(rows, [v.drafts for v in found], tokens, accepted, seconds)

    def choose(self, computed: Computed) -> Iterator[tuple[int, NDArray[np.float32] | None]]:
        """As of the base class."""
        return computed.take() if isinstance(computed, Chosen) else super().choose(computed)


def open_rounds(
    session: Session, module: Session, draft_length: int, *, keep_all: bool, **settings: Any
) -> tuple[DeviceSpeculation, DeviceRunner] | None:
    """What plans drafts and what computes rows on a GPU; ``None`` if the engine's graphs cannot take rounds.

    Args:
        session: The target.
        module: The MTP module.
        draft_length: Most drafts of a request in a step.
        keep_all: As of :class:`DeviceRunner`.
        **settings: As of :class:`DeviceSpeculation`.
    """
    if not (
        isinstance(session, GpuSession)
        and isinstance(module, GpuSession)
        and Rounds.possible(session, module)
    ):
        return None
    speculator = DeviceMtpSpeculator(module, Rounds(session, module))
    speculation = DeviceSpeculation(speculator, draft_length, session.slots, **settings)
    return speculation, DeviceRunner(session, speculation, speculator, keep_all=keep_all)


def _needs_no_logits(request: Request) -> bool:
    """Whether the host can do without the logits of a request."""
    return request.chooser.takes_likeliest and request.params.logprobs is None


def _accept(found: Verified) -> list[int] | None:
    """The tokens up to the first that is no draft; ``None`` if the logits of one of them are unusable."""
    tokens: list[int] = []
    for token, usable, draft in zip(found.tokens, found.usable, [*found.drafts, None], strict=True):
        if not usable:
            return None
        tokens.append(token)
        if token != draft:
            break
    return tokens
