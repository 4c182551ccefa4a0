# SPDX-License-Identifier: Apache-2.0
"""Plans of TensorRT-RTX and TensorRT on a GPU. The two libraries have one interface. None of this ran on a GPU yet."""

from __future__ import annotations

import importlib
import mmap
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from nemo_build.engines.gpu.device import ALIGNMENT, Device, Memory, require_space
from nemo_build.engines.gpu.executor import Binding, Opener
from nemo_build.engines.trt import Library
from nemo_build.engines.trt.kept_kernels import KeptKernels
from nemo_build.errors import BundleError
from nemo_build.state import RECURRENT


def opener(library: Library) -> Opener:
    """What opens graphs that a library compiled: all phases of a graph, which share scratch memory."""

    def open_plans(
        directory: Path,
        entries: Mapping[str, Mapping[str, Any]],
        device: Device,
        constants: Mapping[str, Binding],
    ) -> dict[str, PlanExecutor]:
        trt = importlib.import_module(library.module)
        logger = _make_logger(trt)
        runtime = trt.Runtime(logger)
        plans = {n: _read(runtime, logger, directory / e["file"], device) for n, e in entries.items()}
        size = max(plan.device_memory_size_v2 for plan in plans.values())
        require_space(device, [("scratch memory of a step", size)])
        scratch = device.allocate(size)
        return {
            name: PlanExecutor(trt, plan, logger, scratch, constants, entries[name], device)
            for name, plan in plans.items()
        }

    return open_plans


class PlanExecutor:
    """A plan; see :class:`~nemo_build.engines.gpu.executor.Executor`.

    TensorRT-RTX captures its own graphs, because only it knows when the kernels of a shape are final; it is given a
    context for each of the two sides of a state, in each of which an address is always the same. TensorRT's work is
    captured by the session.

    Args:
        trt: The library.
        plan: Its engine.
        logger: Where the library's errors go.
        scratch: Device memory that nothing else uses while the plan runs.
        constants: Inputs that stay what they are.
        entry: What the manifest says of the plan.
        device: Where it runs.
    """

    def __init__(
        self,
        trt: Any,
        plan: Any,
        logger: Any,
        scratch: Memory,
        constants: Mapping[str, Binding],
        entry: Mapping[str, Any],
        device: Device,
    ) -> None:
        self._plan, self._logger, self._scratch = plan, logger, scratch
        self._captures_itself = hasattr(trt, "CudaGraphStrategy")
        self._recurrent = _recurrent(entry)
        names = [plan.get_tensor_name(i) for i in range(plan.num_io_tensors)]
        self._constants = {name: constants[name].address for name in names if name in constants}
        unaligned = [name for name, address in self._constants.items() if address % ALIGNMENT]
        if unaligned:
            raise BundleError(
                f"Weights of the engine do not lie at multiples of {ALIGNMENT} bytes:",
                unaligned[:5],
                "Build the engine again.",
            )
        self._names = [name for name in names if name not in self._constants]
        self._inputs = {n for n in self._names if plan.get_tensor_mode(n) == trt.TensorIOMode.INPUT}
        self._contexts: dict[int, _Context] = {}
        self._how = trt.ExecutionContextAllocationStrategy.USER_MANAGED
        if self._captures_itself:
            config = plan.create_runtime_config()
            config.set_execution_context_allocation_strategy(self._how)
            config.cuda_graph_strategy = trt.CudaGraphStrategy.WHOLE_GRAPH_CAPTURE
            self._kept = KeptKernels(config, entry["sha256"], device)
            self._how = config

    @property
    def capturable(self) -> bool:
        """Whether the session is to capture runs."""
        return not self._captures_itself

    def run(self, bindings: Mapping[str, Binding], stream: int) -> None:
        """See :class:`~nemo_build.engines.gpu.executor.Executor`."""
        side = bindings[self._recurrent].address if self._recurrent else 0
        if side not in self._contexts:
            self._contexts[side] = _Context(self._make_context())
        context = self._contexts[side]
        refused = context.bind(bindings, self._names, self._inputs)
        if refused or not context.context.execute_async_v3(stream):
            said = "; ".join(self._logger.take()) or "it does not say why"
            raise RuntimeError(f"the library refuses {refused or 'to run a step'}: {said}")

    def _make_context(self) -> Any:
        context = self._plan.create_execution_context(self._how)
        if context is None:
            raise RuntimeError("the library makes no context: " + "; ".join(self._logger.take()))
        context.set_device_memory(self._scratch.address, self._scratch.nbytes)
        for name, address in self._constants.items():
            context.set_tensor_address(name, address)
        return context


class _Context:
    """An execution context, and what it was told last: each tensor is set when it changes."""

    def __init__(self, context: Any) -> None:
        self.context = context
        self._told: Mapping[str, Binding] = {}

    def bind(self, bindings: Mapping[str, Binding], names: list[str], inputs: set[str]) -> str:
        """Set addresses and shapes; returns the first tensor that the library refuses, else nothing."""
        told, self._told = self._told, {}
        for name in names if bindings is not told else ():
            new, old = bindings[name], told.get(name)
            moved, reshaped = old is None or old.address != new.address, old is None or old.shape != new.shape
            if moved and not self.context.set_tensor_address(name, new.address):
                return name
            if name in inputs and reshaped and not self.context.set_input_shape(name, new.shape):
                return name
        self._told = bindings
        return ""


def _recurrent(entry: Mapping[str, Any]) -> str | None:
    """The first state of a graph that is not a cache."""
    return next((s["name"] for s in entry["state"] if s["kind"] in RECURRENT), None)


def _read(runtime: Any, logger: Any, path: Path, device: Device) -> Any:
    """A plan from its file, which is mapped and not read into memory of this process."""
    size = path.stat().st_size
    require_space(device, [(f"the weights in {path.name}", size)])
    with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        plan = runtime.deserialize_cuda_engine(data)
    if plan is None:
        raise BundleError(
            f"{path} cannot be loaded on {device.name}:", logger.take()[:5], "Build the engine again."
        )
    return plan


def _make_logger(trt: Any) -> Any:
    """A logger that keeps errors until somebody asks for them."""

    class Logger(trt.ILogger):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self._errors: list[str] = []

        def log(self, severity: Any, message: str) -> None:
            if "ERROR" in str(severity):
                self._errors.append(message.strip())

        def take(self) -> list[str]:
            errors, self._errors = self._errors, []
            return errors

    return Logger()
