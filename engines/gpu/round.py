# SPDX-License-Identifier: Apache-2.0
"""Rounds of drafting and verification that a device takes by itself; the host waits once, at the end.

What one run gives and the next takes stays on the device: drafts go from the MTP module to its own next step and to the
target, hidden states from the target to the module's first step of the next round. All runs of a graph find their
inputs at the addresses at which the last ones of the same shape did, so captured graphs stay valid.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nemo_build.engines.gpu.contract import INPUTS, OUTPUTS, shapes_of
from nemo_build.engines.gpu.device import Region, require_space
from nemo_build.engines.gpu.executor import Binding
from nemo_build.engines.gpu.replay import Shapes, bind
from nemo_build.engines.gpu.session import GpuGraph
from nemo_build.engines.session import Index
from nemo_build.engines.trt.lowering import HIDDEN_ROWS, LOGITS_SUM, TOKENS

_ID = np.dtype(np.int64).itemsize
_FLOAT = np.dtype(np.float32).itemsize


@dataclass(frozen=True)
class RoundRow:
    """What a sequence feeds in a round.

    Attributes:
        slot: Its state slot.
        token: Its last token.
        past: Positions before that.
        accepted: Pending tokens of the slot that the target commits first.
        drafts: How many drafts it gets.
        fed: First position that the module is fed.
        following: For each of the positions that it is fed, the token that follows; at least one.
        hidden: The target's hidden states at these ``[n, H]``; ``None``: they are those of the last round.
    """

    slot: int
    token: int
    past: int
    accepted: int
    drafts: int
    fed: int
    following: Sequence[int]
    hidden: NDArray[np.float32] | None


@dataclass(frozen=True)
class Verified:
    """What a round gives for a sequence.

    Attributes:
        drafts: Its drafts.
        tokens: The target's likeliest token behind its last token and behind each draft.
        usable: Whether the logits of each of these are finite.
    """

    drafts: list[int]
    tokens: list[int]
    usable: list[bool]


class Rounds:
    """Takes rounds of a target and its MTP module, on one device.

    Args:
        target: The target's graph.
        module: The MTP module's, with as many slots.

    Attributes:
        most: Most positions that the module is fed at the beginning of a round, by sequence.

    Raises:
        PlanError: There is no memory for it on the device.
    """

    def __init__(self, target: GpuGraph, module: GpuGraph) -> None:
        self._target, self._module, self._device = target, module, target.device
        self.most = min(target.contract.steps, module.contract.steps)
        self._width = target.hidden_size
        slots, steps = target.slots, self.most
        nbytes = slots * steps * self._width * _FLOAT
        with self._device.lock:
            self._device.activate()
            require_space(self._device, [("hidden states between rounds of drafts", 3 * nbytes)])
            self._kept = [self._device.allocate(nbytes) for _ in range(2)]
            self._hidden_in = self._device.allocate(nbytes)
            self._verify = _Numbers(target, steps, times=1, outputs=(TOKENS, LOGITS_SUM))
            self._draft = _Numbers(module, steps, times=steps)
            self._device.synchronize()
        self._side = 0

    @staticmethod
    def possible(target: GpuGraph, module: GpuGraph) -> bool:
        """Whether the graphs have the outputs that it takes; those of engines that were built earlier have not."""
        given, drafted = set(target.contract.outputs), set(module.contract.outputs)
        return given >= {TOKENS, LOGITS_SUM, "hidden"} and drafted >= {TOKENS, HIDDEN_ROWS}

    def run(self, rows: Sequence[RoundRow]) -> list[Verified]:
        """Draft and verify; the state of the rows' slots advances, that of the target and that of the module.

        Args:
            rows: At least one, and at least one draft among them.
        """
        batch, width = 1 + max(r.slot for r in rows), 1 + max(r.drafts for r in rows)
        with self._device.lock:
            self._device.activate()
            places = self._begin(rows, batch, width)
            given = self._feed(rows, batch)
            for number in range(1, width):
                column = Region(places["input_ids"].address + number * _ID, _ID, batch, width * _ID)
                self._device.move(column, Region(given[TOKENS].address, _ID, batch, _ID))
                if number + 1 < width:
                    given = self._chain(rows, batch, number, given)
            self._finish(batch, width, places)
            report = self._verify.fetch(places)
            self._device.synchronize()
            self._side = 1 - self._side
        return _read(rows, *report)

    def hidden(self, slot: int, first: int, count: int, *, before: bool = False) -> NDArray[np.float32]:
        """Copy the target's hidden states ``[count, H]`` of a slot from the device.

        Args:
            slot: Which one; it was in the last round.
            first: The first of its tokens in that round.
            count: How many.
            before: Take those of the round before the last, in which the slot was too.
        """
        found = np.empty((count, self._width), np.float32)
        kept = self._kept[self._side if before else 1 - self._side]
        offset = (slot * self.most + first) * self._width * _FLOAT
        with self._device.lock:
            self._device.activate()
            self._device.read(found, Region(kept.address + offset, found.nbytes))
            self._device.synchronize()
        return found

    def _begin(self, rows: Sequence[RoundRow], batch: int, width: int) -> Mapping[str, Binding]:
        """Send the numbers of the verification; the drafts among its tokens are still to come."""
        lengths, past, accepted = np.zeros((3, batch), np.int64)
        ids = np.zeros((batch, width), np.int64)
        for row in rows:
            lengths[row.slot], past[row.slot] = 1 + row.drafts, row.past
            accepted[row.slot], ids[row.slot, 0] = row.accepted, row.token
        lines = np.arange(batch * width)
        return self._verify.put(0, ids, lengths=lengths, past=past, accepted=accepted, logit_rows=lines)

    def _feed(self, rows: Sequence[RoundRow], batch: int) -> Mapping[str, Binding]:
        """The module's run over committed positions; it gives the first drafts."""
        steps = max(len(r.following) for r in rows)
        lengths, past = np.zeros((2, batch), np.int64)
        ids = np.zeros((batch, steps), np.int64)
        for row in rows:
            lengths[row.slot], past[row.slot] = len(row.following), row.fed
            ids[row.slot, : len(row.following)] = row.following
        last = np.arange(batch) * steps + np.maximum(lengths - 1, 0)
        places = self._put_draft(0, ids, lengths, past, last)
        row_bytes = self._width * _FLOAT
        if any(r.hidden is None for r in rows):
            target = Region(self._hidden_in.address, steps * row_bytes, batch, steps * row_bytes)
            kept = self._kept[1 - self._side].address
            self._device.move(target, Region(kept, steps * row_bytes, batch, self.most * row_bytes))
        for row in rows:
            if row.hidden is not None:
                start = self._hidden_in.address + row.slot * steps * row_bytes
                self._device.write(Region(start, row.hidden.nbytes), row.hidden)
        return self._run_module(batch, steps, places)

    def _chain(
        self, rows: Sequence[RoundRow], batch: int, number: int, given: Mapping[str, Binding]
    ) -> Mapping[str, Binding]:
        """The module's run over draft `number`, counted from 1, which it gave itself; it gives the next ones."""
        lengths, past = np.zeros((2, batch), np.int64)
        for row in rows:
            # One that has its drafts writes nothing more, which could be beyond the context.
            lengths[row.slot], past[row.slot] = row.drafts > number, row.past + number - 1
        places = self._put_draft(number, np.zeros((batch, 1), np.int64), lengths, past, np.arange(batch))
        ids, hidden = batch * _ID, batch * self._width * _FLOAT
        self._device.move(Region(places["input_ids"].address, ids), Region(given[TOKENS].address, ids))
        self._device.move(Region(self._hidden_in.address, hidden), Region(given[HIDDEN_ROWS].address, hidden))
        return self._run_module(batch, 1, places)

    def _put_draft(
        self, time: int, ids: Index, lengths: Index, past: Index, lines: Index
    ) -> Mapping[str, Binding]:
        accepted = np.zeros_like(lengths)  # the module has nothing pending: it writes by position
        return self._draft.put(time, ids, lengths=lengths, past=past, accepted=accepted, logit_rows=lines)

    def _run_module(self, batch: int, steps: int, places: Mapping[str, Binding]) -> Mapping[str, Binding]:
        hidden = Binding(self._hidden_in.address, (batch, steps, self._width), "float32")
        sizes = {"batch": batch, "steps": steps, "rows": batch}
        return self._module.enqueue(sizes, {**places, "hidden_in": hidden})

    def _finish(self, batch: int, width: int, places: Mapping[str, Binding]) -> None:
        """Verify, and keep the target's hidden states for the next round."""
        sizes = {"batch": batch, "steps": width, "rows": batch * width}
        given = self._target.enqueue(sizes, places)
        row_bytes = self._width * _FLOAT
        source = Region(given["hidden"].address, width * row_bytes, batch, width * row_bytes)
        self._device.move(
            source._replace(address=self._kept[self._side].address, pitch=self.most * row_bytes), source
        )


class _Numbers:
    """Places of the integers that a graph takes, on the device and, for each of its runs in a round, on the host.

    Args:
        graph: The graph.
        steps: Most tokens of a row.
        times: Runs in a round.
        outputs: Outputs that lie behind the tokens, to be fetched with them.
    """

    def __init__(self, graph: GpuGraph, steps: int, *, times: int, outputs: Sequence[str] = ()) -> None:
        self._device, self._widths = graph.device, graph.widths
        self._inputs = [n for n in graph.contract.inputs if INPUTS[n][1] is np.int64 and n != "input_ids"]
        self._outputs = outputs
        self._places: dict[tuple[int, int, int], dict[str, Binding]] = {}
        largest = bind(self._shapes(graph.slots, steps, graph.slots * steps), 0)
        nbytes = max(map(_end, largest.values()))
        self._memory = self._device.allocate(nbytes)
        self._host = [self._device.host_array(nbytes) for _ in range(times)]
        self._fetched = self._device.host_array(nbytes)

    def put(self, time: int, ids: Index, **others: Index) -> dict[str, Binding]:
        """Enqueue the copy of a run's integers to their places, which are returned, with those of outputs.

        Args:
            time: Which run of the round it is; the memory of each is the host's again when the device was waited for.
            ids: ``[B, L]`` tokens; those that come from elsewhere are to be moved there behind this copy.
            **others: The other inputs, by name.
        """
        batch, steps = ids.shape
        places = self._find(batch, steps, len(others["logit_rows"]))
        host, start = self._host[time], self._memory.address
        for name in self._inputs:
            _view(host, places[name], start)[...] = others[name]
        _view(host, places["input_ids"], start)[...] = ids
        nbytes = _end(places["input_ids"]) - start
        self._device.write(Region(start, nbytes), host[:nbytes])
        return places

    def fetch(self, places: Mapping[str, Binding]) -> list[NDArray[Any]]:
        """Enqueue the copy of the tokens and the outputs to the host; the next round overwrites what is returned."""
        names = ("input_ids", *self._outputs)
        start = places["input_ids"].address
        nbytes = max(_end(places[name]) for name in names) - start
        self._device.read(self._fetched[:nbytes], Region(start, nbytes))
        return [_view(self._fetched, places[name], start) for name in names]

    def _find(self, batch: int, steps: int, rows: int) -> dict[str, Binding]:
        key = batch, steps, rows
        if key not in self._places:
            self._places[key] = bind(self._shapes(*key), self._memory.address)
        return self._places[key]

    def _shapes(self, batch: int, steps: int, rows: int) -> Shapes:
        sizes = {**self._widths, "batch": batch, "steps": steps, "rows": rows}
        inputs = shapes_of([*self._inputs, "input_ids"], INPUTS, sizes)
        return [*inputs, *shapes_of(self._outputs, OUTPUTS, sizes)]


def _view(host: NDArray[np.uint8], place: Binding, start: int) -> NDArray[Any]:
    """The tensor in memory of the host that is as the device's memory from `start` on."""
    begin, end = place.address - start, _end(place) - start
    return host[begin:end].view(place.dtype).reshape(place.shape)


def _end(place: Binding) -> int:
    return place.address + math.prod(place.shape) * np.dtype(place.dtype).itemsize


def _read(
    rows: Sequence[RoundRow], ids: NDArray[Any], tokens: NDArray[Any], sums: NDArray[Any]
) -> list[Verified]:
    """What came of each row, from ``[B, L]`` tokens that were fed, and ``[B * L]`` that were chosen and their check."""
    fed, chosen = ids.tolist(), tokens.reshape(ids.shape).tolist()
    usable = np.isfinite(sums).reshape(ids.shape).tolist()
    found = []
    for row in rows:
        end = 1 + row.drafts
        found.append(Verified(fed[row.slot][1:end], chosen[row.slot][:end], usable[row.slot][:end]))
    return found
