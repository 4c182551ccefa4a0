# SPDX-License-Identifier: Apache-2.0
"""A lowered graph as a network, and its build. Runs in a process of its own: see :mod:`.worker`.

Everything that touches the library is here. It may end the process where others raise an error.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, BinaryIO, TextIO

from nemo_build.engines.trt.ops.cached_attention import KEY_LENGTHS
from nemo_build.errors import UserError

Report = Callable[..., None]
"""``report(event, **what)``: tells the parent process."""

_NOISE = ("cudaError", "CUDA error 35", "CUDA initialization failure")
"""What the library logs as errors where there is no GPU, and which means nothing here."""


class Network:
    """A parsed network with what must stay alive beside it.

    Args:
        module: The library's Python module.
        title: What people call the library.
        model: File of the lowered graph in the working directory, where its weights are too.
        log: Where the library's messages go.

    Raises:
        UserError: The parser refuses the graph; every node it names is listed.
    """

    def __init__(self, module: str, title: str, model: str, log: TextIO) -> None:
        trt = importlib.import_module(module)
        self.trt, self._title, self._name = trt, title, model.removesuffix(".onnx")
        self.logger = _make_logger(trt, log)
        self.builder = trt.Builder(self.logger)
        self.network = self.builder.create_network(0)
        parser = trt.OnnxParser(self.network, self.logger)
        if not parser.parse_from_file(model):
            problems = [_describe(parser.get_error(i)) for i in range(parser.num_errors)]
            raise UserError(f"{title} cannot read {self._name}:", problems or self.logger.errors)
        self._align_attention()

    def build(
        self,
        out: int,
        sms: Sequence[int],
        profile: Mapping[str, Sequence[Sequence[int]]],
        report: Report,
    ) -> None:
        """Write the plan. Of a fresh process it is the same again, but for the order of some entries.

        Args:
            out: The plan's file, open for writing.
            sms: GPUs, compute capability times ten.
            profile: Smallest, usual and largest shape of each input that varies.
            report: Told of ``phase`` (name) and ``bytes`` (written since the last time).

        Raises:
            UserError: The compiler refuses the network.
        """
        trt = self.trt
        config = self.builder.create_builder_config()
        # Without a list the library claims every GPU it knows, also those that lack a type which the network uses.
        config.num_compute_capabilities = len(sms)
        for i, sm in enumerate(sms):
            config.set_compute_capability(getattr(trt.ComputeCapability, f"SM{sm}"), i)
        shapes = self.builder.create_optimization_profile()
        for name, (smallest, usual, largest) in profile.items():
            shapes.set_shape(name, tuple(smallest), tuple(usual), tuple(largest))
        config.add_optimization_profile(shapes)
        monitor = _make_monitor(trt, report)
        config.progress_monitor = monitor
        with os.fdopen(out, "wb", buffering=0) as file:
            writer = _make_writer(trt, file, report)
            done = self.builder.build_serialized_network_to_stream(self.network, config, writer)
        if not done:
            raise UserError(f"{self._title} cannot compile {self._name}:", self.logger.errors[:5])

    def _align_attention(self) -> None:
        """Give every attention its number of keys, a causal mask that ends with them, and the cache itself as keys.

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
            item.causal_kind = trt.CausalMaskKind.LOWER_RIGHT
            product = made[item.get_input(1).name]
            if product.type == trt.LayerType.ELEMENTWISE:
                item.set_input(1, product.get_input(0))


def _describe(error: Any) -> str:
    """One of the parser's errors: which node, and what of it."""
    where = error.node_name() or f"node {error.node()}"
    return f"{error.node_operator() or 'graph'} at {where}: {error.desc().strip()}"


def _make_logger(trt: Any, file: TextIO) -> Any:
    """A logger that writes to a file and remembers errors. (An error recorder of Python's ends the process.)"""

    class Logger(trt.ILogger):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.errors: list[str] = []

        def log(self, severity: Any, message: str) -> None:
            name = str(severity).rsplit(".", 1)[-1]
            if name != "VERBOSE":
                print(f"{name}: {message}", file=file, flush=True)
            if "ERROR" in name and not any(noise in message for noise in _NOISE):
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
