# SPDX-License-Identifier: Apache-2.0
"""Which requests run, and what each step computes.

**A step** has two parts. The requests that decode feed their last token and drafts, all together; then those that are
in their prompts feed chunks, as many positions (padding counted) as the token budget leaves, oldest first. So decoding
goes on while prompts come in, for at most a budget's time, and a step's decoding rows tell what drafts cost. While one
part is computed, the other work is done: newcomers get slots and their cached prefixes and the prompts' chunks are cut
during the first, the tokens of the first are chosen during the second.

**Admission** is by :attr:`~nemo_build.runtime.request.Request.order`, and strictly so: nobody overtakes a request that
waits for memory. It takes a free slot, and memory for the tokens so far and some more.

**Preemption.** A request of higher priority takes the slot of a lower one that comes after it in the order; and where
the requests that run outgrow the memory, the last in the order goes. Who goes waits again, at its old place. What it
computed is kept in the prefix cache if there is one and as long as that has room; without, it is computed again. The
text is the same, because no result depends on how tokens are cut into steps.
"""

from __future__ import annotations

import heapq
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

from numpy.typing import NDArray

from nemo_build.engines.session import Session, Slots
from nemo_build.runtime.memory import SlotMemory, give_back
from nemo_build.runtime.prefix_cache import PrefixCache
from nemo_build.runtime.request import Request
from nemo_build.runtime.speculation.acceptance import Acceptance
from nemo_build.runtime.speculation.rounds import NO_DRAFTS, Drafts, Speculation
from nemo_build.runtime.steps import Computed, Row, RowRunner, StateLostError, StepRunner
from nemo_build.runtime.stopping import FinishReason

__all__ = ["TOKEN_BUDGET", "Scheduler", "SchedulerStatistics"]

TOKEN_BUDGET = 512
"""Positions of a step, unless a caller says otherwise."""

_PREFILL_SHARE = 4
"""Prompts get at least one part in so many of the budget, however many requests decode."""

_WHOLE = (FinishReason.STOP, FinishReason.LENGTH)
"""How texts end that somebody may go on from."""

_HEADROOM = 64
"""Positions beyond its tokens that a request must find memory for to get a slot."""


@dataclass(frozen=True)
class SchedulerStatistics:
    """What a scheduler does at the moment, and has done.

    Attributes:
        running: Requests that have a slot.
        waiting: Requests that wait for one.
        steps: Steps so far.
        preemptions: How often a request lost its slot.
        free_slots: Slots that nobody has.
        memory_used: Bytes of state of the requests that run; 0 where memory is not what limits them.
        failed: Requests that ended with a step that failed.
        memory_total: Bytes there are for it; 0 likewise.
        positions: Positions of the caches that hold tokens of the requests that run.
    """

    running: int
    waiting: int
    steps: int
    preemptions: int
    free_slots: int
    memory_used: int
    failed: int
    memory_total: int = 0
    positions: int = 0


class Scheduler:
    """Runs requests on a session.

    :meth:`add` and :meth:`cancel` may be called from any thread at any time; one thread at a time may do the rest.

    Args:
        session: An open target graph, of which this is the only user; with a `runner`, its slots are enough.
        speculation: Where drafts come from, or ``None`` for none.
        cache: Keeps what common prefixes of prompts lead to, or ``None``.
        memory: What the requests that run may take; ``None``: all slots at full context are affordable.
        token_budget: Positions of a step.
        clock: Seconds, for timeouts and ages.
        runner: What computes rows; by default the session, in this process.

    Raises:
        ValueError: The token budget is below 1.
    """

    def __init__(
        self,
        session: Slots,
        speculation: Speculation | None = None,
        *,
        cache: PrefixCache | None = None,
        memory: SlotMemory | None = None,
        token_budget: int = TOKEN_BUDGET,
        clock: Callable[[], float] = time.monotonic,
        runner: RowRunner | None = None,
    ) -> None:
        if token_budget < 1:
            raise ValueError(f"token_budget is {token_budget}; it must be at least 1")
        self._session = session
        self._speculation = speculation
        self._cache = cache
        self._memory = memory
        self._budget = token_budget
        self._growth = 1 + session.pending  # tokens of a request after a step more than before it, at most
        self._clock = clock
        self._runner = runner or StepRunner(cast(Session, session), speculation, keep_all=cache is not None)
        self._free = list(range(session.slots - 1, -1, -1))
        self._inbox: deque[Request] = deque()
        self._cancelled: deque[Request] = deque()
        self._timeouts: list[tuple[float, int, Request]] = []  # a heap
        self._waiting: list[tuple[tuple[float, float], int, Request]] = []  # a heap
        self._running: list[Request] = []
        self._added = self._steps = self._preemptions = self._failed = 0
        drafter = speculation.speculator.state() if speculation is not None else {}
        self._state = {**session.state(), **drafter}

    def add(self, request: Request) -> None:
        """Queue a request."""
        request.arrival = self._clock()
        self._inbox.append(request)

    def cancel(self, request: Request) -> None:
        """End a request before the next step, if it has not ended by then."""
        self._cancelled.append(request)

    @property
    def unfinished(self) -> bool:
        """Whether a request waits or runs."""
        return bool(self._inbox or self._waiting or self._running)

    @property
    def cancelling(self) -> bool:
        """Whether a request was cancelled of late, and :meth:`reap` is still to end it."""
        return bool(self._cancelled)

    @property
    def acceptance(self) -> Acceptance:
        """What came of the drafts."""
        return self._speculation.acceptance if self._speculation is not None else Acceptance()

    @property
    def failed(self) -> int:
        """Requests that ended with a step that failed."""
        return self._failed

    def statistics(self) -> SchedulerStatistics:
        """What it does at the moment, and has done."""
        return SchedulerStatistics(
            len(self._running),
            len(self._waiting) + len(self._inbox),
            self._steps,
            self._preemptions,
            len(self._free),
            self._used(),
            self._failed,
            self._memory.total if self._memory is not None else 0,
            sum(r.fed for r in self._running),
        )

    def step(self) -> None:
        """Run one step; the requests that get tokens have them in their events.

        A step that fails or is interrupted leaves the state of the requests that run unknown, so it ends them all; and
        if none ran, those that wait, which it failed to start. Wherever that happens, no slot is lost, and no request
        is in none of the lists. Where what computes rows says that it lost the state and is well again, they are
        computed once more instead.
        """
        try:
            self._step()
        except StateLostError:
            self._start_over()
        except BaseException as error:
            for request in self._running or [r for _, _, r in self._waiting]:
                if isinstance(error, Exception) and not request.finished:
                    request.error = error
                    self._failed += 1
                self.cancel(request)
            self._retire(keep=False)
            self.reap()
            taken = {r.slot for r in self._running}
            self._free = [s for s in range(self._session.slots - 1, -1, -1) if s not in taken]
            raise

    def _start_over(self) -> None:
        """Let the requests that run wait again, as nothing is left of what was computed."""
        self._retire(keep=False)
        # One that was about to start is in both lists.
        self._waiting = [w for w in self._waiting if w[2] not in self._running]
        heapq.heapify(self._waiting)
        for request in list(self._running):
            self._preempt(request, keep=False)

    def reap(self) -> None:
        """End what was cancelled or is out of time, and free its slots; a step begins with this."""
        self._take_in()
        over = 0
        while self._cancelled:
            self._cancelled.popleft().end(FinishReason.CANCELLED)
            over += 1
        if self._timeouts:
            now = self._clock()
            while self._timeouts and self._timeouts[0][0] <= now:
                heapq.heappop(self._timeouts)[2].end(FinishReason.TIMEOUT)
                over += 1
        if not over:
            return
        if any(r.finished for _, _, r in self._waiting):
            self._waiting = [w for w in self._waiting if not w[2].finished]
            heapq.heapify(self._waiting)
        self._retire()

    def _take_in(self) -> None:
        while self._inbox:
            request = self._inbox[0]
            self._wait(request)
            self._inbox.popleft()
            if request.scheduling.timeout is not None:
                self._forget_timeouts()
                end = request.arrival + request.scheduling.timeout
                heapq.heappush(self._timeouts, (end, self._added, request))

    def _forget_timeouts(self) -> None:
        """Let go of requests that have ended long before their time, once they are more than the others."""
        if len(self._timeouts) > 2 * (len(self._waiting) + len(self._running)) + 64:
            self._timeouts = [t for t in self._timeouts if not t[2].finished]
            heapq.heapify(self._timeouts)

    def _wait(self, request: Request) -> None:
        self._added += 1
        heapq.heappush(self._waiting, (request.order, self._added, request))

    def _step(self) -> None:
        self._steps += 1
        self._runner.settle()
        self.reap()
        self._make_way()
        decoding = [r for r in self._running if r.decoding]
        prefill: list[Row] = []
        rest: Callable[[], None] = _nothing

        def prepare() -> None:
            self._admit()
            used = sum(1 + len(d.tokens) for d in drafts)
            prefill.extend(self._plan_prefill(max(self._budget - used, self._budget // _PREFILL_SHARE, 1)))

        drafts = self._drafts(decoding)
        if decoding:
            rows = [
                Row(r, [r.tokens[-1], *d.tokens], 1 + len(d.tokens), d)
                for r, d in zip(decoding, drafts, strict=True)
            ]
            rest = partial(self._take_decoded, self._runner.compute(rows, prepare))
        else:
            prepare()
        if not prefill:
            rest()
            return
        fed = self._runner.compute(prefill, rest)
        self._runner.take(fed)
        self._store_prefixes(prefill)
        self._retire()

    def _take_decoded(self, computed: Computed) -> None:
        slots = [r.request.slot for r in computed.rows if r.request.slot is not None]
        results = self._runner.take(computed)
        if self._speculation is not None:
            self._speculation.learn(slots, results, computed.seconds)
        self._retire()

    def _drafts(self, decoding: list[Request]) -> list[Drafts]:
        if self._speculation is None or not decoding:
            return [NO_DRAFTS] * len(decoding)
        return self._speculation.propose(decoding, self._budget // len(decoding) - 1)

    # --- prompts ---------------------------------------------------------------------------------------------

    def _plan_prefill(self, budget: int) -> list[Row]:
        """Chunks for a step, oldest request first, of at most so many positions with their padding."""
        rows: list[Row] = []
        width = 0
        for request in sorted((r for r in self._running if not r.decoding), key=_order):
            most = budget // (len(rows) + 1)
            if most < max(width, 1):
                break
            size = min(self._chunk(request), most)
            chunk = request.tokens[request.fed : request.fed + size]
            rows.append(Row(request, chunk, int(request.fed + size == len(request.tokens))))
            width = max(width, size)
        return rows

    def _chunk(self, request: Request) -> int:
        """Tokens of a request's next chunk, if the budget allows."""
        left, most = len(request.tokens) - request.fed, request.scheduling.prefill_chunk
        if self._cache is None:
            return min(left, most)
        salt = request.scheduling.salt
        request.snapshot_at = self._cache.next_snapshot(request.tokens, request.fed, salt)
        left = request.snapshot_at - request.fed
        size, pending = min(left, most), self._session.pending
        short = pending + 1 - (left - size)
        # What a chunk of at most `pending` tokens leaves cannot be stored, so the last one is not to be as short.
        return size - short if 0 < left - size <= pending and size - short > pending else size

    def _store_prefixes(self, rows: list[Row]) -> None:
        """Keep the state behind chunks that end where the cache wants it."""
        if self._cache is None:
            return
        for request in (r.request for r in rows):
            if request.fed == request.snapshot_at and not (request.uncommitted or request.finished):
                self._store(request)  # that of finished ones is kept when they leave their slots

    def _store(self, request: Request) -> None:
        """Keep what the slot of a request holds."""
        assert self._cache is not None, "callers have seen to it"
        assert request.slot is not None, "a running request has a slot"
        if request.committed == 0:
            return
        speculator = self._speculation.speculator if self._speculation is not None else None
        extra = speculator.save(request.slot, request.committed) if speculator is not None else None
        salt = request.scheduling.salt
        self._cache.store(request.tokens, self._state, request.slot, request.committed, salt, extra)

    # --- slots -----------------------------------------------------------------------------------------------

    def _make_way(self) -> None:
        """Preempt whom the first of those that wait comes before, and the last ones while the memory is outgrown."""
        if self._waiting:
            for victim in self._victims(self._waiting[0][2], _yields_to) or ():
                self._preempt(victim)
        while self._memory is not None and len(self._running) > 1 and self._used_next() > self._memory.total:
            self._preempt(max(self._running, key=_order))

    def _admit(self) -> None:
        """Give free slots to requests that wait, in their order."""
        self._take_in()
        while self._waiting and self._victims(self._waiting[0][2]) is not None:
            request = self._waiting[0][2]
            if request not in self._running:  # an interruption may have come between the next two lines
                self._start(request)
            heapq.heappop(self._waiting)

    def _start(self, request: Request) -> None:
        request.evict()
        request.slot = self._free.pop()
        self._running.append(request)
        extra: Mapping[str, NDArray[Any]] = {}
        if self._cache is not None:
            with self._cache.match(request.tokens, request.scheduling.salt) as match:
                extra = self._cache.restore(match, self._state, request.slot)
                request.fed = match.length
        if request.cached_tokens is None:
            request.cached_tokens, request.admitted = request.fed, self._clock()
        if self._speculation is not None:
            self._speculation.start(request, extra)

    def _victims(
        self, request: Request, yields: Callable[[Request, Request], bool] | None = None
    ) -> list[Request] | None:
        """Who must go so that a request can run; ``None`` if it has to wait.

        Args:
            request: It waits.
            yields: Whether one that runs goes for it; ``None``: nobody does.
        """
        slots, used = len(self._free), self._used_next()
        need = self._need(request, _HEADROOM)
        others = [r for r in self._running if yields is not None and yields(r, request)]
        candidates = sorted(others, key=_order)
        victims: list[Request] = []
        # What runs alone may take all the memory.
        while not slots or (
            self._memory is not None
            and len(self._running) > len(victims)
            and used + need > self._memory.total
        ):
            if not candidates:
                return None
            victims.append(candidates.pop())
            slots += 1
            used -= self._need(victims[-1], self._growth)
        return victims

    def _preempt(self, request: Request, *, keep: bool = True) -> None:
        """Take the slot of a request away; it waits again."""
        if keep and self._cache is not None:
            self._store(request)
        self._preemptions += 1
        self._wait(request)
        self._running.remove(request)
        self._release(request)
        request.evict()

    def _retire(self, *, keep: bool = True) -> None:
        """Free the slots of requests that have ended."""
        for request in [r for r in self._running if r.finished]:
            # A text is what the next turn of a conversation begins with.
            if keep and self._cache is not None and request.finish_reason in _WHOLE:
                self._store(request)
            self._release(request)
            self._running.remove(request)
            request.slot = None

    def _release(self, request: Request) -> None:
        assert request.slot is not None, "a running request has a slot"
        if self._speculation is not None:
            self._speculation.release(request)
        if self._memory is not None:
            give_back(a[request.slot] for a in self._state.values())
        self._free.append(request.slot)

    # --- memory ----------------------------------------------------------------------------------------------

    def _used(self, growth: int = 0) -> int:
        """Bytes that the requests that run take, or will when each has grown by so many tokens."""
        return sum(self._need(r, growth) for r in self._running) if self._memory is not None else 0

    def _used_next(self) -> int:
        """Bytes that they may take after the next step."""
        return self._used(self._growth)

    def _need(self, request: Request, growth: int = 0) -> int:
        if self._memory is None:
            return 0
        return self._memory.need(min(len(request.tokens) + growth, self._session.context))


def _yields_to(running: Request, waiting: Request) -> bool:
    """Whether one that runs gives its slot to one that waits."""
    return running.scheduling.priority < waiting.scheduling.priority and running.order > waiting.order


def _order(request: Request) -> tuple[float, float]:
    return request.order


def _nothing() -> None:
    """There is nothing left to do."""
