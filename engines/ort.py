# SPDX-License-Identifier: Apache-2.0
"""The ONNX Runtime backend."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort
from numpy.typing import NDArray

from nemo_build.engines.session import StepBatch, StepOutput, check_batch
from nemo_build.errors import BundleError
from nemo_build.plugins import native
from nemo_build.state import StateSpec

_FOLDER_OPTION = "session.model_external_initializers_file_folder_path"

_Dimension = int | tuple[str, int]
"""A dimension of an output: a number, or that of an input's axis."""


class OrtGraph:
    """A graph in ONNX Runtime on the CPU, its state updated in place.

    The ops run in the native kernels where those are to be had, else in the reference functions of the graph.

    State buffers are NumPy arrays that are bound as input and as output of the graph. That is sound because
    of how the ops are defined: each state input has one reader, and what is written depends on what was read.

    Args:
        model: Path of the graph.
        slots: State slots.
        context: Positions per slot.
        pending: Tokens per slot that a step may leave uncommitted.
        threads: Threads within an op; 0 lets ONNX Runtime choose.
        yields: Whether the threads stop looking for work when a run is over, so that another graph's find the cores
            free.
        weights_folder: Directory of the external data, if it is not beside the graph.
        state: Buffers of another graph that this one shares, by name; the others are its own.
        outputs: Outputs that :meth:`run` returns.
    """

    def __init__(
        self,
        model: Path,
        *,
        slots: int,
        context: int,
        pending: int = 0,
        threads: int = 0,
        yields: bool = False,
        weights_folder: str | None = None,
        state: Mapping[str, NDArray[Any]] | None = None,
        outputs: Sequence[str] = (),
    ) -> None:
        self.slots, self.context, self.pending = slots, context, pending
        options = ort.SessionOptions()
        options.log_severity_level = 3
        options.intra_op_num_threads = threads
        options.add_session_config_entry("session.force_spinning_stop", str(int(yields)))
        library = native.library()
        self.isolated = library is not None  # ONNX Runtime's own scatters may copy whole buffers
        if library is not None:
            options.register_custom_ops_library(str(library))
        if weights_folder is not None:
            options.add_session_config_entry(_FOLDER_OPTION, weights_folder)
        try:
            self._session = ort.InferenceSession(str(model), options, providers=["CPUExecutionProvider"])
        except Exception as error:  # ONNX Runtime's own exception types share no base class
            raise BundleError(f"ONNX Runtime cannot load {model}: {error}") from error
        metadata = self._session.get_modelmeta().custom_metadata_map
        self.states = [StateSpec.from_json(s) for s in json.loads(metadata["nemo_build.state"])]
        spec = json.loads(metadata["nemo_build.spec"])
        self._vocabulary, self.hidden_size = int(spec["vocab_size"]), int(spec["hidden_size"])
        sizes = {"slots": slots, "context": context, "pending": pending}
        shared = state or {}
        self._state = {
            s.name: shared[s.name] if s.name in shared else np.zeros(s.resolve(sizes), s.dtype)
            for s in self.states
        }
        self._outputs = self._find_shapes(outputs)
        self._bindings: dict[int, tuple[Any, dict[str, NDArray[Any]]]] = {}  # by the number of outputs

    def _binding(self, outputs: int) -> tuple[Any, dict[str, NDArray[Any]]]:
        """What is bound to run for so many of the outputs: ONNX Runtime's object, and the inputs by name."""
        if outputs not in self._bindings:
            binding = self._session.io_binding()
            for spec in self.states:
                value = ort.OrtValue.ortvalue_from_numpy(self._state[spec.name])
                binding.bind_ortvalue_input(spec.name, value)
                binding.bind_ortvalue_output(spec.output, value)
            self._bindings[outputs] = binding, {}
        return self._bindings[outputs]

    def run(
        self, inputs: Mapping[str, NDArray[Any]], outputs: int | None = None
    ) -> dict[str, NDArray[np.float32]]:
        """Run the graph on host arrays, all inputs but the state buffers; the state advances.

        An array that was an input of the last run too is not bound again, and may hold other values now.

        Args:
            inputs: By name.
            outputs: How many of the outputs are wanted, from the first; ``None``: all.
        """
        outputs = len(self._outputs) if outputs is None else outputs
        binding, bound = self._binding(outputs)
        for name, array in inputs.items():
            array = np.ascontiguousarray(array)  # itself, if it is
            if bound.get(name) is not array:
                binding.bind_cpu_input(name, array)
                bound[name] = array
        found = {}
        for name, shape in islice(self._outputs.items(), outputs):
            # Ours, as asking the binding for what ONNX Runtime allocated wraps all states and copies what is large.
            found[name] = np.empty(
                [d if isinstance(d, int) else inputs[d[0]].shape[d[1]] for d in shape], np.float32
            )
            binding.bind_ortvalue_output(name, ort.OrtValue.ortvalue_from_numpy(found[name]))
        self._session.run_with_iobinding(binding)
        return found

    def _find_shapes(self, outputs: Sequence[str]) -> dict[str, list[_Dimension]]:
        """The shapes of outputs, in terms of the inputs that share a symbol with them."""
        states = {s.name for s in self.states}
        symbols: dict[str, _Dimension] = {
            symbol: (i.name, axis)
            for i in self._session.get_inputs()
            for axis, symbol in enumerate(i.shape)
            if i.name not in states
        }
        shapes = {o.name: o.shape for o in self._session.get_outputs()}
        return {n: [d if isinstance(d, int) else symbols[d] for d in shapes[n]] for n in outputs}

    def state(self) -> Mapping[str, NDArray[Any]]:
        """The state buffers by name, as views."""
        return self._state


class OrtSession(OrtGraph):
    """A step graph; see :class:`~nemo_build.engines.session.Session`.

    Args:
        model: Path of the graph.
        hidden: Whether steps return the hidden states.
        taps: Whether steps return the taps.
        **options: As of :class:`OrtGraph`.
    """

    def __init__(self, model: Path, *, hidden: bool = False, taps: bool = False, **options: Any) -> None:
        outputs = ["logits", *["hidden"] * hidden, *["taps"] * taps]
        super().__init__(model, outputs=outputs, **options)

    def step(self, batch: StepBatch) -> StepOutput:
        """Run one step; see :class:`~nemo_build.engines.session.Session`."""
        sizes = {"slots": self.slots, "context": self.context, "pending": self.pending}
        check_batch(batch, **sizes, vocabulary=self._vocabulary)
        inputs: dict[str, NDArray[Any]] = {
            "input_ids": batch.input_ids,
            "lengths": batch.lengths,
            "past": batch.past,
            "accepted": batch.accepted,
            "slots": batch.slots,
            "logit_rows": batch.logit_rows,
        }
        if batch.hidden_in is not None:
            inputs["hidden_in"] = batch.hidden_in
        found = self.run(inputs, 1 if batch.lean else None)
        return StepOutput(found["logits"], found.get("hidden"), found.get("taps"))
