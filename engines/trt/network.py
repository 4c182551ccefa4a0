# SPDX-License-Identifier: Apache-2.0
"""A lowered graph as a network, and its build. Runs in a process of its own: see :mod:`.worker`.

Everything that touches the library is here. It may end the process where others raise an error.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO, TextIO

from nemo_build.engines.trt.ops.cached_attention import KEY_LENGTHS
from nemo_build.errors import UserError

Report = Callable[..., None]
"""``report(event, **what)``: tells the parent process."""


class Network:
    """A parsed network of TensorRT-RTX with what must stay alive beside it; TensorRT's is derived from it.

    Args:
        module: The library's Python module.
        title: What people call the library.
        model: File of the lowered graph in the working directory, where its weights are too.
        log: Where the library's messages go.

    Raises:
        UserError: The library cannot be loaded, or its parser refuses the graph; every node it names is listed.
    """

    NOISE: tuple[str, ...] = ("cudaError", "CUDA error 35", "CUDA initialization failure")
    """What the library logs as errors where there is no GPU, and which means nothing here."""

    def __init__(self, module: str, title: str, model: str, log: TextIO) -> None:
        self._title, self._name = title, model.removesuffix(".onnx")
        try:
            self.trt = trt = importlib.import_module(module)
        except ImportError as error:
            raise UserError(f"{title} cannot be loaded: {error}.") from error
        self.logger = _make_logger(trt, log, self.NOISE)
        try:
            self.builder = trt.Builder(self.logger)
        except TypeError as error:  # what the bindings make of a library that gives none
            raise UserError(f"{title} cannot start:", self.logger.errors or [str(error)]) from error
        self.network = self.builder.create_network(self._flags())
        self._read(Path(model))
        self._align_attention()

    def _flags(self) -> int:
        """Bits that the network is created with. Types are always those that the graph declares."""
        return 0

    def _read(self, model: Path) -> None:
        """Fill the network."""
        parser = self.trt.OnnxParser(self.network, self.logger)
        self._require_parsed(parser, parser.parse_from_file(str(model)))

    def _require_parsed(self, parser: Any, is_parsed: bool) -> None:
        if not is_parsed:
            problems = [_describe(parser.get_error(i)) for i in range(parser.num_errors)]
            raise UserError(f"{self._title} cannot read {self._name}:", problems or self.logger.errors)

    def _configure(self, config: Any, sms: Sequence[int]) -> None:
        """Say what the plan is for."""
        # Without a list the library claims every GPU it knows, also those that lack a type which the network uses.
        config.num_compute_capabilities = len(sms)
        for i, sm in enumerate(sms):
            config.set_compute_capability(getattr(self.trt.ComputeCapability, f"SM{sm}"), i)

    def _examine(self, config: Any, plan: BinaryIO) -> dict[str, Any]:
        """What the library says of the plan that it has just built."""
        return {}

    def build(
        self,
        out: int,
        sms: Sequence[int],
        profile: Mapping[str, Sequence[Sequence[int]]],
        report: Report,
    ) -> dict[str, Any]:
        """Write the plan, and return facts about it.

        Args:
            out: The plan's file, open for writing and reading.
            sms: GPUs, compute capability times ten.
            profile: Smallest, usual and largest shape of each input that varies.
            report: Told of ``phase`` (name) and ``bytes`` (written since the last time).

        Raises:
            UserError: The compiler refuses the network.
        """
        trt = self.trt
        config = self.builder.create_builder_config()
        self._configure(config, sms)
        shapes = self.builder.create_optimization_profile()
        for name, (smallest, usual, largest) in profile.items():
            shapes.set_shape(name, tuple(smallest), tuple(usual), tuple(largest))
        config.add_optimization_profile(shapes)
        monitor = _make_monitor(trt, report)
        config.progress_monitor = monitor
        with os.fdopen(out, "w+b", buffering=0) as file:
            writer = _make_writer(trt, file, report)
            if not self.builder.build_serialized_network_to_stream(self.network, config, writer):
                raise UserError(f"{self._title} cannot compile {self._name}:", self.logger.errors[:5])
            return self._examine(config, file)

    def _align_attention(self) -> None:
        """Give every attention its number of keys and the cache itself as keys, and causal ones a mask that ends there.

        The parser takes the input with that number and drops it, without a word. Of the scale it multiplies the root
        with the keys, even if it is one, which makes a product of the whole cache.
        """
        trt, network = self.trt, self.network
        attention, made = [], {}
        for i in range(network.num_layers):
            layer = network.get_layer(i)
            if layer.type == trt.LayerType.ATTENTION_OUTPUT:
                layer.__class__ = trt.IAttentionOutputLayer
                attention.append(layer.attention)
            for j in range(layer.num_outputs):
                made[layer.get_output(j).name] = layer
        if not attention:
            return
        if KEY_LENGTHS not in made:
            raise RuntimeError(f"the network has attention and no {KEY_LENGTHS}")
        lengths = network.add_cast(made[KEY_LENGTHS].get_output(0), trt.int32).get_output(0)
        for item in attention:
            item.key_value_lengths = lengths
            if item.causal_kind != trt.CausalMaskKind.NONE:
                item.causal_kind = trt.CausalMaskKind.LOWER_RIGHT
            product = made[item.get_input(1).name]
            if product.type == trt.LayerType.ELEMENTWISE:
                item.set_input(1, product.get_input(0))


def _describe(error: Any) -> str:
    """One of the parser's errors: which node, and what of it."""
    where = error.node_name() or f"node {error.node()}"
    return f"{error.node_operator() or 'graph'} at {where}: {error.desc().strip()}"


def _make_logger(trt: Any, file: TextIO, noise: Sequence[str]) -> Any:
    """A logger that writes to a file and remembers errors. (An error recorder of Python's ends the process.)"""

    class Logger(trt.ILogger):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.errors: list[str] = []

        def log(self, severity: Any, message: str) -> None:
            name = str(severity).rsplit(".", 1)[-1]
            if name != "VERBOSE":
                print(f"{name}: {message}", file=file, flush=True)
            if "ERROR" in name and not any(words in message for words in noise):
                self.errors.append(message.strip())

    return Logger()


def _make_monitor(trt: Any, report: Report) -> Any:
    """Tells of the phases; ends the build when the parent process is gone."""
    parent = os.getppid()

    class Monitor(trt.IProgressMonitor):  # type: ignore[misc]
        def phase_start(self, name: str, parent_phase: str | None, steps: int) -> None:
            report("phase", name=name)

        def phase_finish(self, name: str) -> None:
            pass

        def step_complete(self, name: str, step: int) -> bool:
            return os.getppid() == parent

    return Monitor()


def _make_writer(trt: Any, file: BinaryIO, report: Report) -> Any:
    """Takes the plan piece by piece, so that it is not in memory whole besides its weights."""

    class Writer(trt.IStreamWriter):  # type: ignore[misc]
        def write(self, data: bytes) -> int:
            view = memoryview(data)
            for start in range(0, len(view), 1 << 24):
                piece = view[start : start + (1 << 24)]
                while piece:
                    piece = piece[file.write(piece) :]
            report("bytes", count=len(view))
            return len(view)

    return Writer()
