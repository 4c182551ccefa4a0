# SPDX-License-Identifier: Apache-2.0
"""What a backend for GPUs implements: running one compiled graph on memory of the device."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from nemo_build.engines.gpu.device import Device


class Binding(NamedTuple):
    """A tensor in the device's memory.

    Attributes:
        address: Its first byte.
        shape: Its dimensions.
        dtype: ``float32``, ``bfloat16``, ``int64`` or ``int32``.
    """

    address: int
    shape: tuple[int, ...]
    dtype: str


class Executor(Protocol):
    """One graph of one phase."""

    @property
    def capturable(self) -> bool:
        """Whether what :meth:`run` enqueues may be captured once and replayed."""
        ...

    def run(self, bindings: Mapping[str, Binding], stream: int) -> None:
        """Enqueue one run, and return without waiting for it.

        An input and an output may have one address. The first run with new shapes may do work on the host and may wait
        for the device.

        Args:
            bindings: All inputs and outputs of the graph by name, but the constants it was opened with. An executor
                may keep the mapping, which is not changed any more, and set nothing anew when it gets it again.
            stream: The stream's handle.

        Raises:
            RuntimeError: The library refuses; what it says is in the message.
        """
        ...


class Opener(Protocol):
    """Opens the executors of a graph; one function a backend."""

    def __call__(
        self,
        directory: Path,
        entries: Mapping[str, Mapping[str, Any]],
        device: Device,
        constants: Mapping[str, Binding],
    ) -> Mapping[str, Executor]:
        """Open all phases of one graph, of which one at a time runs.

        Args:
            directory: The engine.
            entries: What its manifest says of the graph (``file`` and so on), by phase.
            device: Where it is to run.
            constants: Inputs that stay what they are: the weights that are not in the files. Names of other graphs'
                weights are among them.

        Raises:
            BundleError: A file is damaged, or the device does not take it.
        """
        ...
