# SPDX-License-Identifier: Apache-2.0
"""Timing of models of one op that are written in ONNX text: weights in mapped files, states in place, turns taken.

A model is the contender's text, once for each copy of the op with ``{i}`` replaced. Of the names in it, those that
:class:`Weights` has are initializers, the others that nothing computes are inputs. Results are called ``y...``; a
state is an input ``NAME_{i}`` that the model returns as ``NAME_{i}_out``, and both are bound to one buffer.
"""

from __future__ import annotations

import itertools
import json
import math
import statistics
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
from numpy.typing import NDArray
from onnx import helper, parser

from nemo_build.plugins import native

Array = NDArray[Any]
Arrays = Mapping[str, Array]

SETTLE = 0.03
"""Seconds between contenders, in which the threads of the one before stop waiting for work."""

SAMPLES, BUDGET = 15, 0.25
"""Runs of a contender in a turn: so many, or as fit in some seconds; at least one."""

EVICTED = 96 << 20
"""Bytes that are read before a run that is to find nothing of its weights in the caches."""

TURNS, LONG = 2, 0.4
"""Turns of each contender; one only where a run takes more seconds than that."""

SMALL = 256
"""Bytes of a tensor that is part of the model, such as a shape."""

_FOLDER = "session.model_external_initializers_file_folder_path"
_OPSETS = '"": 23, "com.microsoft": 1, "nemo": 1, "nemo.cpu": 1'


class Weights:
    """Tensors in files of their own in a folder, from which sessions map them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._index = folder / "weights.json"
        self.tensors: dict[str, dict[str, Any]] = {}
        if self._index.exists():
            self.tensors = json.loads(self._index.read_text())

    def add(self, name: str, *parts: Array, stack: Iterable[Array] = ()) -> None:
        """Write a tensor: an array, or a stack of equal ones that are made one at a time."""
        count, first = 0, None
        with (self.folder / name).open("wb") as file:
            for part in itertools.chain(parts, stack):
                first = part if first is None else first
                file.write(np.ascontiguousarray(part).tobytes())
                count += 1
        assert first is not None, "a tensor has values"
        shape = list(first.shape) if parts else [count, *first.shape]
        kind = int(helper.np_dtype_to_tensor_dtype(first.dtype))
        self.tensors[name] = {"type": kind, "shape": shape, "nbytes": count * first.nbytes}
        self._index.write_text(json.dumps(self.tensors))

    def initializer(self, name: str) -> onnx.TensorProto:
        """The tensor as an initializer; its data stay in the file unless they are few."""
        about = self.tensors[name]
        tensor = onnx.TensorProto(name=name, data_type=about["type"], dims=about["shape"])
        if about["nbytes"] <= SMALL:
            tensor.raw_data = (self.folder / name).read_bytes()
            return tensor
        tensor.data_location = onnx.TensorProto.EXTERNAL
        tensor.external_data.add(key="location", value=name)
        return tensor


@dataclass(frozen=True)
class Contender:
    """A way to compute an op.

    Attributes:
        name: How it is called in tables.
        text: Its nodes in ONNX text.
        beside: Name of the contender that ratios are taken to: what ours takes for the same.
        tolerance: Largest difference of results to it, of their norm; None where it computes something else.
        note: What it is, or what it cannot do.
    """

    name: str
    text: str
    beside: str = ""
    tolerance: float | None = None
    note: str = ""


@dataclass(frozen=True)
class Case:
    """Inputs that contenders are timed with.

    Attributes:
        label: How it is called.
        tokens: New tokens.
        copies: Copies of the op in a model, each with weights and states of its own.
        feeds: Inputs by name; a run takes all of them, one after the other.
        states: First values of states, the same for all copies.
        flops: Operations that an op's weights take part in.
        used: Share of the weights that a run reads.
    """

    label: str
    tokens: int
    copies: int
    feeds: Sequence[Arrays]
    states: Arrays = field(default_factory=dict)
    flops: float = 0
    used: float = 1


class Model:
    """A session of a contender's text, its inputs open in size."""

    def __init__(self, text: str, case: Case, weights: Weights, threads: int) -> None:
        body = "\n".join(text.replace("{i}", str(i)) for i in range(case.copies))
        model = parser.parse_model(f"<ir_version: 10, opset_import: [{_OPSETS}]> g () => () {{ {body} }}")
        made = [name for node in model.graph.node for name in node.output if name]
        used = {name: None for node in model.graph.node for name in node.input if name and name not in made}
        names = [name for name in used if name in weights.tensors]
        model.graph.initializer.extend(weights.initializer(name) for name in names)
        self.weight_bytes = sum(int(weights.tensors[name]["nbytes"]) for name in names)
        self.inputs = [name for name in used if name not in weights.tensors]
        for name in self.inputs:
            value = _value(case, name)
            kind = helper.np_dtype_to_tensor_dtype(value.dtype)
            model.graph.input.append(helper.make_tensor_value_info(name, kind, [None] * value.ndim))
        self.outputs = [name for name in made if name.startswith("y") or name.endswith("_out")]
        model.graph.output.extend(onnx.ValueInfoProto(name=name) for name in self.outputs)
        options = ort.SessionOptions()
        options.log_severity_level = 3
        options.intra_op_num_threads = threads
        options.register_custom_ops_library(str(native.library()))
        options.add_session_config_entry(_FOLDER, str(weights.folder))
        self.session = ort.InferenceSession(
            model.SerializeToString(), options, providers=["CPUExecutionProvider"]
        )


def _value(case: Case, name: str) -> Array:
    """What an input is fed, or is at first where it is a state; copies of an op may have inputs of their own."""
    base = name.rpartition("_")[0]
    return next(
        v[n] for v, n in ((case.feeds[0], name), (case.feeds[0], base), (case.states, base)) if n in v
    )


class Bound:
    """A model with buffers for a case; results have fixed places, so that no run allocates any."""

    def __init__(self, model: Model, case: Case) -> None:
        self._session = model.session
        self._model = model
        names = [name for name in model.inputs if f"{name}_out" in model.outputs]
        self._states = {n: ort.OrtValue.ortvalue_from_numpy(_value(case, n).copy()) for n in names}
        self._results = [name for name in model.outputs if name.startswith("y")]
        self._places: list[Any] = []
        first = self._bind(case.feeds[0])
        self._session.run_with_iobinding(first)
        self._places = first.get_outputs()[len(self._states) :]
        self._bindings = [self._bind(feeds) for feeds in case.feeds]

    def _bind(self, feeds: Arrays) -> Any:
        """All inputs and outputs; results where those of the first run were placed."""
        binding = self._session.io_binding()
        for name in self._model.inputs:
            state = self._states.get(name)
            if state is None:
                fed = feeds[name] if name in feeds else feeds[name.rpartition("_")[0]]
                state = ort.OrtValue.ortvalue_from_numpy(fed)
            binding.bind_ortvalue_input(name, state)
        for name, value in self._states.items():
            binding.bind_ortvalue_output(f"{name}_out", value)
        for i, name in enumerate(self._results):
            if self._places:
                binding.bind_ortvalue_output(name, self._places[i])
            else:
                binding.bind_output(name, "cpu")
        return binding

    def run(self) -> float:
        """Seconds that a run takes: of all feeds, one after the other."""
        start = time.perf_counter()
        for binding in self._bindings:
            self._session.run_with_iobinding(binding)
        return time.perf_counter() - start

    def values(self) -> list[Array]:
        """Copies of the results of the last feed."""
        return [place.numpy().copy() for place in self._places]


def check(name: str, got: Sequence[Array], want: Sequence[Array], tolerance: float) -> float:
    """The difference of results relative to their norm; ends the process if it is too large."""
    worst = 0.0
    for mine, theirs in zip(got, want, strict=True):
        a, b = mine.reshape(-1).astype(np.float64), theirs.reshape(-1).astype(np.float64)
        difference = float(np.linalg.norm(a - b) / np.linalg.norm(b))
        worst = max(worst, difference if math.isfinite(difference) else math.inf)
    if worst > tolerance:
        raise SystemExit(f"{name} computes something else: a difference of {worst:.2g}")
    return worst


def time_in_turn(bounds: Mapping[str, Bound], cold: bool) -> dict[str, float]:
    """Median seconds of a run of each; if `cold`, without anything in the caches."""
    samples: dict[str, list[float]] = {name: [] for name in bounds}
    long: set[str] = set()
    others = np.ones(EVICTED // 4 if cold else 0, np.float32)
    for turn in range(TURNS):
        for name, bound in bounds.items():
            if name in long and turn:
                continue
            time.sleep(SETTLE)
            if bound.run() > LONG:  # not counted: the one before was another contender's
                long.add(name)
            spent, count = 0.0, 0
            while count == 0 or (spent < BUDGET and count < SAMPLES):
                others.sum()
                seconds = bound.run()
                samples[name].append(seconds)
                spent, count = spent + seconds, count + 1
    return {name: statistics.median(values) for name, values in samples.items()}


def measure(
    contenders: Sequence[Contender], cases: Iterable[Case], weights: Weights, threads: int
) -> dict[str, dict[str, dict[str, float]]]:
    """Times by case and contender: milliseconds of an op, and what that is in GB/s of weights and in GFLOP/s."""
    found: dict[str, dict[str, dict[str, float]]] = {}
    models: dict[tuple[str, int], Model] = {}
    for case in cases:
        for contender in contenders:
            key = contender.name, case.copies
            if key not in models:
                models[key] = Model(contender.text, case, weights, threads)
        own = {c.name: models[c.name, case.copies] for c in contenders}
        bounds = {name: Bound(model, case) for name, model in own.items()}
        for bound in bounds.values():
            bound.run()
        results = {name: bound.values() for name, bound in bounds.items()}
        different = {
            c.name: check(f"{case.label}: {c.name}", results[c.name], results[c.beside], c.tolerance)
            for c in contenders
            if c.tolerance is not None
        }
        del results
        found[case.label] = {}
        for name, seconds in time_in_turn(bounds, cold=case.flops > 0).items():
            each = seconds / case.copies / len(case.feeds)
            row = {"ms": each * 1e3}
            if case.flops:
                row["weights_mb"] = own[name].weight_bytes * case.used / case.copies / 1e6
                row["gbs"] = row["weights_mb"] / 1e3 / each
                row["gflops"] = case.flops / each / 1e9
            if name in different:
                row["difference"] = different[name]
            found[case.label][name] = row
    return found
