# SPDX-License-Identifier: Apache-2.0
"""The scheduler's side of steps that other models take: one request a step, for all rows.

The scheduler is the runtime's own. It plans how many drafts each request gets; which tokens these are, and which are
accepted, comes back with the step.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from nemo_build.errors import RequestError, UserError
from nemo_build.runtime.planned import Chosen, plan_drafts
from nemo_build.runtime.request import Request
from nemo_build.runtime.speculation.base import Committed, DraftRequest, Proposal
from nemo_build.runtime.speculation.rounds import Drafts, Speculation
from nemo_build.runtime.steps import Computed, Row, RowRunner, StateLostError
from nemo_build.state import StateSpec
from nemo_build.triton_repo.arrays import Tensors, from_logprobs, from_rows, pack, to_rows, unpack
from nemo_build.triton_repo.stages import describe
from nemo_build.triton_repo.tensors import REFUSED, UNUSABLE, ensemble

_MOST_REPAIRS = 3
"""Times in a row that models are started again before their failure is an error of the requests."""


class StepsFailedError(Exception):
    """A model of the step does not answer any more."""


class Models(Protocol):
    """Reaches the models of a step."""

    def call(self, model: str, inputs: Tensors, outputs: Sequence[str]) -> dict[str, NDArray[Any]]:
        """Run a model.

        Args:
            model: Its name as in :mod:`~nemo_build.triton_repo.tensors`.
            inputs: By name.
            outputs: Names of those that are wanted.

        Raises:
            StepsFailedError: It does not answer.
        """
        ...

    def repair(self) -> None:
        """Start again what does not answer; all state is lost. Raises an error if that does not help."""
        ...


class Steps:
    """Models that are started again when one does not answer.

    Args:
        models: Reaches them.

    Attributes:
        starts: How often they were started again; what they kept before that is lost.
    """

    def __init__(self, models: Models) -> None:
        self._models = models
        self._lock = threading.Lock()
        self._in_vain = 0  # times that they were started since a step was taken
        self.starts = 0

    def call(self, model: str, inputs: Tensors, outputs: Sequence[str]) -> dict[str, NDArray[Any]]:
        """As of :class:`Models`.

        Raises:
            StateLostError: A model did not answer; it does again.
            UserError: They do not answer however often they are started.
        """
        starts = self.starts
        try:
            found = self._models.call(model, inputs, outputs)
        except StepsFailedError as error:
            with self._lock:
                if starts == self.starts:  # nobody else has seen to it
                    self._start_again(error)
            raise StateLostError(str(error)) from error
        if "CONTROL" not in inputs:
            self._in_vain = 0
        return found

    def tell(self, model: str, order: Mapping[str, Any]) -> dict[str, Any]:
        """Have a model do something beside the steps, from another thread than theirs; returns its reply.

        Raises:
            StepsFailedError: It does not answer; the next step will see to it.
        """
        reply, _ = _reply(self._models.call(model, _order(order), ("REPLY", "EXTRA")))
        return reply

    def _start_again(self, error: StepsFailedError) -> None:
        if self._in_vain == _MOST_REPAIRS:
            self._in_vain = 0  # the next request may try again
            raise UserError(
                f"The models of the step fail, though they were loaded {_MOST_REPAIRS} times: {error}",
                hint="The server's log says why.",
            ) from error
        self._models.repair()
        self._in_vain += 1
        self.starts += 1

    def control(
        self, model: str, order: Mapping[str, Any], extra: Tensors | None = None
    ) -> tuple[dict[str, Any], Tensors]:
        """Have a model do something that is no step; returns its reply and what arrays come with that."""
        return _reply(self.call(model, _order(order, extra), ("REPLY", "EXTRA")))


def _order(order: Mapping[str, Any], extra: Tensors | None = None) -> dict[str, NDArray[Any]]:
    """A control request."""
    inputs: dict[str, NDArray[Any]] = {"CONTROL": np.array([json.dumps(order).encode()], np.object_)}
    return inputs | ({"EXTRA": pack(extra)} if extra else {})


def _reply(found: Tensors) -> tuple[dict[str, Any], Tensors]:
    """The answer to a control request."""
    reply: dict[str, Any] = json.loads(found["REPLY"].ravel()[0])
    return reply, unpack(found["EXTRA"])


@dataclass
class RemoteSlots:
    """Slots whose state buffers other processes advance, seen through shared memory."""

    slots: int
    context: int
    pending: int
    buffers: Mapping[str, NDArray[Any]]
    isolated: bool = True

    def state(self) -> Mapping[str, NDArray[Any]]:
        """The state buffers by name, as views."""
        return self.buffers


class RemoteSpeculator:
    """A speculator in another process; it implements the scheduler's side of
    :class:`~nemo_build.runtime.speculation.base.Speculator`.

    Args:
        steps: Reaches it.
        name: Of the speculator.
        states: State buffers of its graphs.
        buffers: These, in shared memory.
    """

    features: str | None = None

    def __init__(
        self, steps: Steps, name: str, states: Sequence[StateSpec], buffers: Mapping[str, NDArray[Any]]
    ) -> None:
        self._steps, self._model = steps, f"draft_{name}"
        self.states, self._buffers = states, buffers
        self.requests: dict[int, Request] = {}
        self._known: dict[int, Committed] = {}  # what it has not been told of
        reply, _ = steps.control(self._model, {"do": "describe"})
        self.lookahead: Mapping[str, int] = reply["lookahead"]

    def state(self) -> Mapping[str, NDArray[Any]]:
        """The state buffers by name."""
        return self._buffers

    def start(self, slot: int, tokens: Sequence[int], extra: Tensors) -> None:
        """Begin the request that was put into :attr:`requests`."""
        self._known.pop(slot, None)
        order = {
            "do": "start",
            "slot": slot,
            "request": describe(self.requests[slot]),
            "fed": len(tokens),
        }
        self._steps.control(self._model, order, extra)

    def observe(self, rows: Sequence[Committed]) -> None:
        """Remember what was committed, until there is something to tell it anyway."""
        for row in rows:
            self._known[row.slot] = row

    def take_known(self, slot: int) -> Committed | None:
        """What the speculator is to be told of a slot with the next step."""
        return self._known.pop(slot, None)

    def propose(self, requests: Sequence[DraftRequest]) -> list[Proposal]:
        """Drafts are proposed within a step, so this is not called."""
        raise RuntimeError("drafts of another process come with a step")

    def save(self, slot: int, committed: int) -> Tensors:
        """As of the speculator itself."""
        known = self.take_known(slot)
        told = None if known is None else {"past": known.past, "tokens": list(known.tokens)}
        order = {"do": "save", "slot": slot, "committed": committed, "known": told}
        return self._steps.control(self._model, order)[1]

    def release(self, slot: int) -> None:
        """Forget what waits; the other process forgets the rest when the slot is taken again."""
        self._known.pop(slot, None)
        self.requests.pop(slot, None)


class RemoteSpeculation(Speculation):
    """Plans how many drafts each request gets; arguments as those of
    :class:`~nemo_build.runtime.speculation.rounds.Speculation`.
    """

    def __init__(self, speculator: RemoteSpeculator, draft_length: int, slots: int, **options: Any) -> None:
        super().__init__(speculator, draft_length, slots, **options)
        self.remote = speculator
        self.price = 0.0

    def start(self, request: Request, extra: Mapping[str, NDArray[Any]]) -> None:
        """As of the base class."""
        assert request.slot is not None, "a running request has a slot"
        self.remote.requests[request.slot] = request
        super().start(request, extra)

    def _propose(self, requests: Sequence[Request], length: int) -> list[Drafts]:
        self.price = 0.0 if self._controller is None else self._controller.price(len(requests))
        return plan_drafts(self._lengths(requests, length))


class RemoteRunner(RowRunner):
    """Computes rows by requests to a step's ensemble.

    Args:
        steps: Reaches it.
        slots: Where the state is.
        speculation: Plans drafts, or ``None``.
        drafter: Name of the speculator, or ``None``.
        keep_all: As of the base class.
    """

    def __init__(
        self,
        steps: Steps,
        slots: RemoteSlots,
        speculation: RemoteSpeculation | None,
        drafter: str | None,
        *,
        keep_all: bool,
    ) -> None:
        super().__init__(slots, speculation, keep_all=keep_all)
        self._steps, self._drafting, self._drafter = steps, speculation, drafter
        self._choosing: dict[int, Request] = {}  # whose tokens the target's process can choose, by slot
        self._starts = steps.starts

    def run(self, rows: Sequence[Row]) -> Computed:
        """As of the base class; raises StateLostError if a model did not answer."""
        if self._starts != self._steps.starts:
            self._choosing.clear()
            self._starts = self._steps.starts
        start = time.perf_counter()
        found = self._step(rows)
        seconds = time.perf_counter() - start
        drafts = from_rows(found["DRAFT"]) if "DRAFT" in found else [[] for _ in rows]
        chosen = from_rows(found["CHOSEN"][:, 1:])
        accepted = found["CHOSEN"][:, 0].tolist()
        logprobs = from_logprobs(found["LOGPROBS"], chosen) if "LOGPROBS" in found else None
        return Chosen.of(rows, drafts, [_taken(row) for row in chosen], accepted, seconds, logprobs)

    def choose(self, computed: Computed) -> Iterator[tuple[int, NDArray[np.float32] | None]]:
        """As of the base class."""
        assert isinstance(computed, Chosen), "it comes from `run`"
        return computed.take()

    def _step(self, rows: Sequence[Row]) -> dict[str, NDArray[Any]]:
        for row in rows:
            self._let_choose(row.request)
        fed = [row.tokens[: len(row.tokens) - len(row.drafts.tokens)] for row in rows]
        inputs = {
            "ROWS": np.array(
                [
                    (r.request.slot, r.request.fed, r.request.uncommitted, r.wanted > 0, r.request.watched)
                    for r in rows
                ],
                np.int32,
            ),
            "TOKENS": to_rows(fed),
        }
        drafter = self._drafter if any(row.request.watched for row in rows) else None
        if drafter is None:
            inputs["DRAFT"] = to_rows([[]] * len(rows))
        else:
            inputs |= self._drafting_inputs(rows)
        spec = ensemble(drafter)
        is_asked = any(row.wanted and row.request.params.logprobs is not None for row in rows)
        return self._steps.call(spec.name, inputs, spec.outputs + (spec.optional if is_asked else ()))

    def _drafting_inputs(self, rows: Sequence[Row]) -> Tensors:
        assert self._drafting is not None, "there is a drafter"
        known = [
            self._drafting.remote.take_known(row.request.slot)
            if row.request.watched and row.request.slot is not None
            else None
            for row in rows
        ]
        asked = [
            (row.request.slot, 0 if k is None else k.past, len(row.drafts.tokens))
            for row, k in zip(rows, known, strict=True)
        ]
        return {
            "ASKED": np.array(asked, np.int32),
            "KNOWN": to_rows([[] if k is None else k.tokens for k in known]),
            "PRICE": np.array([self._drafting.price], np.float32),
        }

    def _let_choose(self, request: Request) -> None:
        """Make sure that the target's process can choose the tokens of a request."""
        assert request.slot is not None, "a row has a slot"
        if self._choosing.get(request.slot) is not request:
            order = {"do": "start", "slot": request.slot, "request": describe(request)}
            self._steps.control("verify", order)
            self._choosing[request.slot] = request


def _taken(row: list[int]) -> list[int] | Exception | None:
    """What was chosen in a row, or what kept the target's process from it."""
    if row == [UNUSABLE]:
        return None
    if row == [REFUSED]:
        return RequestError("What the text has to obey is too complex to go on with.")
    return row
