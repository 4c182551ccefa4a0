# SPDX-License-Identifier: Apache-2.0
"""Graphs and sessions on a GPU, whatever compiled the graphs; ``docs/runtime.md`` has the whole of it.

A step is one run of a graph, or several where it has more tokens than a run takes. A run waits for the device once, at
its end: its inputs are copied in one piece, its outputs come back behind it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from nemo_build.engines.gpu.constants import Constants
from nemo_build.engines.gpu.contract import INPUTS, OUTPUTS, Contract, phase_entries, shapes_of, widths
from nemo_build.engines.gpu.device import Device, require_space
from nemo_build.engines.gpu.executor import Binding, Executor, Opener
from nemo_build.engines.gpu.replay import Frame, Frames, HostBlocks, Shapes, Staging, bind, padded
from nemo_build.engines.gpu.rows import Rows, Run, arrange, split, wanted, whole
from nemo_build.engines.gpu.state import BufferView, States
from nemo_build.engines.gpu.taken import Found, Taken
from nemo_build.engines.session import Index, StepBatch, StepOutput, check_batch
from nemo_build.engines.trt.lowering import OVERFLOW
from nemo_build.engines.trt.phases import DECODE, EXPERT_ROWS, PREFILL
from nemo_build.errors import BundleError

_ROW_INPUTS = ("lengths", "past", "accepted", "slots", "logit_rows")


@dataclass(frozen=True)
class Place:
    """Where and how an engine's graphs run.

    Attributes:
        directory: The engine.
        manifest: Its manifest.
        device: The GPU.
        open: What opens its graphs.
        doubled: Kinds of state that its graphs read and write in different buffers.
    """

    directory: Path
    manifest: Mapping[str, Any]
    device: Device
    open: Opener
    doubled: tuple[str, ...]


@dataclass(frozen=True)
class _Phase:
    """One phase of a graph, open: its name, what is known of it, and what runs it."""

    name: str
    contract: Contract
    executor: Executor


class GpuGraph:
    """A graph of an engine on a GPU; see :class:`~nemo_build.engines.session.Graph`.

    Slots that are not in a step may be read and written while it is computed: that waits for its end.

    Args:
        place: The engine and where it runs.
        graph: The graph's name, for example ``target``.
        slots: State slots.
        context: Positions per slot.
        pending: Of no use here: the attribute is what the graph was built for.
        state: Buffers of another graph that this one shares, by name; the others are its own.
        outputs: Outputs that :meth:`run` returns.
        threads: Of no use here.
        yields: Likewise.

    Attributes:
        device: Where it runs.
        widths: Sizes that are the engine's own.
        contract: What the graph for few tokens is.

    Raises:
        BundleError: The graph has inputs that nothing is known of.
        PlanError: It does not fit the device.
    """

    def __init__(
        self,
        place: Place,
        graph: str,
        *,
        slots: int,
        context: int,
        pending: int = 0,
        state: Mapping[str, Any] | None = None,
        outputs: Sequence[str] = (),
        threads: int = 0,
        yields: bool = False,
    ) -> None:
        entries = phase_entries(place.manifest, graph)
        contracts = {name: Contract.of(entry) for name, entry in entries.items()}
        known = self.contract = contracts[DECODE]
        if not place.doubled and any(OVERFLOW in c.outputs for c in contracts.values()):
            raise ValueError(f"{graph} has {OVERFLOW}, and no second buffer to go back to")
        self.device, self.widths = place.device, widths(place.manifest)
        self.slots, self.context, self.pending = slots, context, known.pending
        self.isolated = True
        self.hidden_size = self.widths["hidden"]
        self.states = known.portable_states()
        self._outputs = tuple(outputs)
        with self.device.lock:
            self.device.activate()
            self._constants = Constants.open(place.directory, place.manifest, self.device)
            _require_known(graph, entries, self._constants)
            executors = place.open(place.directory, entries, self.device, self._constants.bindings)
            self._phases = {n: _Phase(n, contracts[n], executors[n]) for n in contracts}
            self._allocate(place.doubled, state or {})
            self.device.synchronize()

    def run(self, inputs: Mapping[str, NDArray[Any]]) -> Found:
        """See :class:`~nemo_build.engines.session.Graph`."""
        if "slots" not in inputs:
            return self._alone(inputs)
        lengths = inputs["lengths"]
        rows = Rows(
            {name: a for name, a in inputs.items() if name not in _ROW_INPUTS},
            lengths,
            inputs["past"],
            inputs.get("accepted", np.zeros_like(lengths)),
            inputs["slots"],
            inputs.get("logit_rows", np.zeros(0, np.int64)),
        )
        return self._step(rows, self._outputs)

    def enqueue(self, sizes: Mapping[str, int], placed: Mapping[str, Binding]) -> Mapping[str, Binding]:
        """Enqueue a run of the graph for few tokens, and wait for nothing; whoever calls has the device's lock.

        Args:
            sizes: ``batch``, the first slots, which are its rows; ``steps``, and ``rows`` of logits.
            placed: Where all its inputs lie, states apart, and those outputs that are to lie somewhere. The same for
                the same sizes.

        Returns:
            Where outputs lie; those that were not placed stay until the graph runs again.
        """
        phase, batch = self._phases[DECODE], sizes["batch"]
        side = self._states.gather(batch)

        def make() -> Frame:
            results = bind(self._outputs_of(phase, {**self.widths, **sizes}), self._results.address)
            outputs = {name: placed.get(name, found) for name, found in results.items()}
            return Frame(outputs, {**self._states.bindings(batch, side), **placed, **outputs})

        frame = self._frames.get(("placed", *sizes.values(), side), make)
        self._frames.launch(phase.executor, frame)
        self._states.advance(batch)
        return frame.outputs

    def state(self) -> Mapping[str, NDArray[Any]]:
        """The state buffers by name; see :class:`~nemo_build.engines.gpu.state.BufferView` for what they can do."""
        views = {
            name: BufferView(buffer, self._states.side_of, self.device)
            for name, buffer in self._states.buffers.items()
        }
        return cast(Mapping[str, NDArray[Any]], views)

    def _allocate(self, doubled: tuple[str, ...], shared: Mapping[str, Any]) -> None:
        """States, and room for the inputs and outputs of the largest run."""
        specs = self._phases[DECODE].contract.states
        largest = [(p, self._largest(p)) for p in self._phases.values()]
        staged = max(_bytes(self._inputs_of(p, sizes)) for p, sizes in largest)
        given = max(_bytes(self._outputs_of(p, sizes)) for p, sizes in largest)
        fetched = max(_bytes(shapes_of([OVERFLOW, *self._outputs], OUTPUTS, sizes)) for _, sizes in largest)
        own = [s for s in specs if s.name not in shared]
        state = sum((1 + (s.kind in doubled)) * s.nbytes({"slots": self.slots}) for s in own)
        require_space(
            self.device,
            [(f"states of {self.slots} sequences", state), ("inputs and outputs", staged + given)],
        )
        buffers = {name: view.buffer for name, view in shared.items()}
        self._states = States(specs, self.slots, doubled, self.device, buffers)
        self._staging = Staging(self.device, staged)
        self._results = self.device.allocate(given)
        self._frames = Frames(self.device, HostBlocks(self.device, fetched))

    # --- steps -----------------------------------------------------------------------------------------------

    def _step(self, rows: Rows, outputs: Sequence[str]) -> Found:
        """Take all rows, in as many runs as it needs; returns some of the outputs that the graph was opened for."""
        taken = Taken(rows, outputs, self.widths)
        with self.device.lock:
            self.device.activate()
            for run, phase in self._plan(rows):
                self._take(rows, run, phase, taken)
        return taken.finished()

    def _plan(self, rows: Rows) -> Iterator[tuple[Run, _Phase]]:
        """The runs of a step. The graph for prompts takes what is too wide for the other, but for too many logits."""
        few, many = self._phases[DECODE], self._phases.get(PREFILL)
        if many is None or rows.lengths.max() <= few.contract.steps:
            many = few
        for run in split(whole(rows), many.contract.steps, self.pending):
            if len(wanted(rows, run)) <= many.contract.logit_rows:
                yield run, many
            else:
                for part in split(run, few.contract.steps, self.pending):
                    yield part, few

    def _take(self, rows: Rows, run: Run, phase: _Phase, taken: Taken) -> None:
        """One run. Where experts were given too many tokens it counts as not done, and smaller ones take its place."""
        placed = arrange(rows, run)
        batch, steps = placed.inputs[next(iter(rows.tokens))].shape[:2]
        count = len(placed.logits)
        lines = min(-(-max(count, 1) // batch) * batch, phase.contract.logit_rows)
        side = self._states.gather(batch)
        frame = self._fill(phase, placed.inputs, {"batch": batch, "steps": steps, "rows": lines}, side)
        wanted = {name: count if name == "logits" else batch for name in taken.outputs}
        if OVERFLOW in frame.outputs:
            wanted[OVERFLOW] = 1
        given = self._frames.run(phase.executor, frame, wanted)
        if OVERFLOW in given and given[OVERFLOW][0] > 0:
            if run.take.sum() < EXPERT_ROWS:
                raise RuntimeError(f"experts have no room for {run.take.sum()} tokens")
            for part in split(run, phase.contract.steps, self.pending, EXPERT_ROWS - 1):
                self._take(rows, part, phase, taken)
            return
        self._states.advance(batch)
        taken.add(given, placed, run)

    def _alone(self, inputs: Mapping[str, NDArray[Any]]) -> Found:
        """Run a graph without states, whose inputs have a value for each row of logits."""
        phase, count = self._phases[DECODE], len(next(iter(inputs.values())))
        with self.device.lock:
            self.device.activate()
            frame = self._fill(phase, inputs, {"batch": 1, "steps": 1, "rows": count}, 0)
            return self._frames.run(phase.executor, frame, dict.fromkeys(self._outputs, count))

    def _fill(
        self, phase: _Phase, inputs: Mapping[str, NDArray[Any]], sizes: Mapping[str, int], side: int
    ) -> Frame:
        """The frame of a run with its inputs in their places."""
        key = (phase.name, *sizes.values(), side)
        frame = self._frames.get(key, lambda: self._frame(phase, {**self.widths, **sizes}, side))
        for name, target in frame.inputs.items():
            source = inputs[name]
            target[: len(source)] = source
            target[len(source) :] = 0  # logits that nobody wants
        return frame

    def _frame(self, phase: _Phase, sizes: Mapping[str, int], side: int) -> Frame:
        inputs, arrays, staged = self._staging.place(self._inputs_of(phase, sizes))
        outputs = bind(self._outputs_of(phase, sizes), self._results.address)
        states = self._states.bindings(sizes["batch"], side)
        return Frame(outputs, {**states, **inputs, **outputs}, arrays, staged)

    def _largest(self, phase: _Phase) -> dict[str, int]:
        """The sizes of the largest run."""
        rows = min(phase.contract.logit_rows, self.slots * phase.contract.steps)
        return {**self.widths, "batch": self.slots, "steps": phase.contract.steps, "rows": rows}

    def _inputs_of(self, phase: _Phase, sizes: Mapping[str, int]) -> Shapes:
        return shapes_of(phase.contract.inputs, INPUTS, sizes)

    def _outputs_of(self, phase: _Phase, sizes: Mapping[str, int]) -> Shapes:
        return shapes_of(phase.contract.outputs, OUTPUTS, sizes)


class GpuSession(GpuGraph):
    """A step graph on a GPU; see :class:`~nemo_build.engines.session.Session`.

    Args:
        place: The engine and where it runs.
        graph: The graph's name.
        hidden: Whether steps return the hidden states.
        taps: Whether steps return the taps.
        **options: As of :class:`GpuGraph`.
    """

    def __init__(
        self, place: Place, graph: str, *, hidden: bool = False, taps: bool = False, **options: Any
    ) -> None:
        outputs = ["logits", *["hidden"] * hidden, *["taps"] * taps]
        super().__init__(place, graph, outputs=outputs, **options)

    def step(self, batch: StepBatch) -> StepOutput:
        """Run one step; see :class:`~nemo_build.engines.session.Session`."""
        sizes = {"slots": self.slots, "context": self.context, "pending": self.pending}
        check_batch(batch, **sizes, vocabulary=self.widths["vocabulary"])
        tokens: dict[str, NDArray[Any]] = {"input_ids": batch.input_ids}
        if batch.hidden_in is not None:
            tokens["hidden_in"] = batch.hidden_in
        lines, places = _distinct(batch.logit_rows)
        rows = Rows(tokens, batch.lengths, batch.past, batch.accepted, batch.slots, lines)
        found = self._step(rows, self._outputs[:1] if batch.lean else self._outputs)
        logits = found["logits"] if places is None else found["logits"][places]
        return StepOutput(logits, found.get("hidden"), found.get("taps"))


def _require_known(graph: str, entries: Mapping[str, Mapping[str, Any]], constants: Constants) -> None:
    """Raise BundleError for inputs that are neither a step's, nor states, nor weights."""
    known = {*INPUTS, *constants.bindings, *(s["name"] for entry in entries.values() for s in entry["state"])}
    unknown = sorted({name for entry in entries.values() for name in entry["inputs"]} - known)
    if unknown:
        raise BundleError(
            f"The graph {graph} has inputs that this version does not know:",
            unknown[:5],
            "Build the engine again.",
        )


def _distinct(lines: Index) -> tuple[Index, Index | None]:
    """Rows of logits without those that are asked for twice, which no graph gives; and which of them is which."""
    if (lines[1:] > lines[:-1]).all():
        return lines, None
    return np.unique(lines, return_inverse=True)


def _bytes(tensors: Shapes) -> int:
    return sum(padded(math.prod(shape) * np.dtype(dtype).itemsize) for _, shape, dtype in tensors)
