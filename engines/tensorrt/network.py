# SPDX-License-Identifier: Apache-2.0
"""A network of TensorRT with kernels as plugins. Runs in the process that builds it; see :mod:`..trt.worker`."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO, TextIO

import onnx

from nemo_build.engines.gpu.kernel_nodes import KernelUse
from nemo_build.engines.tensorrt.kernels import chosen_node
from nemo_build.engines.tensorrt.places import Place, fill, with_places
from nemo_build.engines.trt.network import Network
from nemo_build.errors import UserError
from nemo_build.plugins.gpu.tensorrt import ATTRIBUTE, register
from nemo_build.plugins.schema import DOMAIN


class PluginNetwork(Network):
    """A parsed network whose kernel nodes are plugins.

    Args:
        module: As of :class:`~nemo_build.engines.trt.network.Network`, and so on.
        title: Likewise.
        model: Likewise.
        log: Likewise.
        kernels: The graph's kernels, as manifests have them.
        sm: The GPU, compute capability times ten.
        timing_cache: File of the timing cache, which is read if it is there, and brought up to date.
        optimization_level: How hard the builder tries, 0 to 5; None is the library's default.

    Raises:
        UserError: Likewise; also if a kernel is not for the GPU, or plugins cannot be registered.
    """

    NOISE = ()

    def __init__(
        self,
        module: str,
        title: str,
        model: str,
        log: TextIO,
        *,
        kernels: Sequence[Mapping[str, Any]],
        sm: int,
        timing_cache: str,
        optimization_level: int | None,
    ) -> None:
        # Compiles, so that what the library calls finds code in the cache.
        self._nodes = {use.node: chosen_node(use, sm) for use in map(KernelUse.from_json, kernels)}
        self._sm, self._level = sm, optimization_level
        self._timings = Path(timing_cache)
        super().__init__(module, title, model, log)

    def _flags(self) -> int:
        return 1 << int(self.trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED)

    def _read(self, model: Path) -> None:
        register(self._nodes.values())
        graph, places, own = with_places(onnx.load(model), self._nodes)
        parser = self.trt.OnnxParser(self.network, self.logger)
        self._require_parsed(parser, parser.parse(graph.SerializeToString()))
        fill(self.trt, self.network, places, own, self._add)

    def _add(self, place: Place, inputs: list[Any]) -> Any:
        plugin = getattr(getattr(self.trt.plugin.op, DOMAIN), place.node.name)
        layer = self.network.add_plugin(plugin(*inputs, **{ATTRIBUTE: self._sm}), aot=True)
        if layer is None:
            raise UserError(f"{self._title} does not take the kernel of {place.name}:", self.logger.errors)
        return layer

    def _configure(self, config: Any, sms: Sequence[int]) -> None:
        """A plan is for the GPU that it is built on, so `sms` says nothing to the library."""
        trt = self.trt
        # Outputs of kernels that update state share the buffer of their input.
        config.set_preview_feature(trt.PreviewFeature.ALIASED_PLUGIN_IO_10_03, True)
        # What the graph multiplies in float32, such as routers, is not to be rounded to TF32's 10 bits.
        config.clear_flag(trt.BuilderFlag.TF32)
        config.profiling_verbosity = trt.ProfilingVerbosity.DETAILED
        if self._level is not None:
            config.builder_optimization_level = self._level
        data = self._timings.read_bytes() if self._timings.exists() else b""
        # The library reads it until the plan is built.
        self._cache = config.create_timing_cache(data)
        if self._cache is None or not config.set_timing_cache(self._cache, False):
            raise UserError(
                f"{self._timings} is no timing cache that {self._title} takes on this machine:",
                self.logger.errors or ["it is for another GPU or version, or damaged"],
            )

    def _examine(self, config: Any, plan: BinaryIO) -> dict[str, Any]:
        """Keep the timings, and open the plan as a session will."""
        self._keep_timings(config)
        plan.seek(0)
        engine = self.trt.Runtime(self.logger).deserialize_cuda_engine(plan.read())
        if engine is None:
            raise UserError(
                f"{self._title} does not open the plan that it has built of {self._name}:",
                self.logger.errors[:5],
            )
        return {"scratch": int(engine.device_memory_size_v2), "layers": int(engine.num_layers)}

    def _keep_timings(self, config: Any) -> None:
        """Add this build's timings to the file, and those that another build has put there meanwhile."""
        self._timings.parent.mkdir(parents=True, exist_ok=True)
        with open(f"{self._timings}.lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            made = config.get_timing_cache()
            if self._timings.exists():
                others = config.create_timing_cache(self._timings.read_bytes())
                if others is not None:
                    made.combine(others, False)
            partial = Path(f"{self._timings}.partial")
            partial.write_bytes(bytes(made.serialize()))
            os.replace(partial, self._timings)
