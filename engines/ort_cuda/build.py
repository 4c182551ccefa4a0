# SPDX-License-Identifier: Apache-2.0
"""Building of an engine for ONNX Runtime's CUDA provider: graphs, machine code of kernels, one file of weights.

It needs neither a GPU nor CUDA: kernels are compiled by what is in Triton's wheel.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import onnxruntime

from nemo_build.bundle import sha256_file
from nemo_build.engines.build import (
    BuildOptions,
    BuildProgress,
    Inputs,
    Written,
    tensorrt_problems,
)
from nemo_build.engines.gpu.making import KernelGraphs, kernel_settings
from nemo_build.engines.ort_cuda import NAME
from nemo_build.engines.ort_cuda.launches import (
    FOLDER,
    Compiled,
    compile_nodes,
    require_order,
    with_launches,
)
from nemo_build.engines.ort_cuda.placement import adapt, nodes_on_cpu
from nemo_build.engines.targets import Target, allowed_bytes
from nemo_build.engines.trt.compiling import Lowered, require_space
from nemo_build.errors import UserError
from nemo_build.plugins.gpu.compile import SHARED_LIMITS


class Launching:
    """An engine of launches; see :class:`~nemo_build.engines.build.Maker`."""

    def __init__(self, inputs: Inputs, target: Target, options: BuildOptions) -> None:
        assert target.sm is not None, "the backend is for GPUs"
        if target.sm not in SHARED_LIMITS:
            known = ", ".join(f"SM {sm}" for sm in SHARED_LIMITS)
            raise UserError(
                f"Kernels are not compiled for SM {target.sm} ({target.name}); they are for {known}."
            )
        self.settings = _settings(inputs.manifest, options)
        self.backend: dict[str, Any] = {
            "name": NAME,
            "version": onnxruntime.__version__,
            "sms": [target.sm],
        }
        self._target, self._sm = target, target.sm
        self._made = KernelGraphs(inputs, self.settings)
        self.plan = self._made.plan()

    def available(self, options: BuildOptions) -> tuple[int, str]:
        """The target's memory, less what it keeps free, unless asked otherwise."""
        return allowed_bytes(self._target, options.memory)

    def write(
        self, directory: Path, out: Path, digests: list[str], progress: BuildProgress | None
    ) -> Written:
        """Compile the kernels, and write them, the graphs and the weights."""
        require_space(out.parent, self._made.weight_bytes)
        (directory / FOLDER).mkdir()
        code: dict[str, str] = {}
        # First what may be refused, then what takes long.
        graphs = {g.name: self._write_graph(g, directory, code, progress) for g in self._made.graphs}
        files, tensors = self._made.write_weights(directory, progress)
        return Written(graphs, files, tensors, dict(sorted(code.items())))

    def _write_graph(
        self, graph: Lowered, directory: Path, code: dict[str, str], progress: BuildProgress | None
    ) -> dict[str, Any]:
        """Write a graph and the kernels it is the first to use, whose digests go to `code`."""
        table = self._made.tables[graph.name]
        report = progress.start(f"compiling kernels of {graph.name}", len(table.uses)) if progress else None
        compiled = compile_nodes(table, self._sm, report)
        code |= _write_code(compiled, directory)
        model = with_launches(graph.model, compiled)
        adapt(model)
        require_order(model)
        path = directory / f"{graph.name}.onnx"
        path.write_bytes(model.SerializeToString(deterministic=True))
        return {
            "file": path.name,
            "sha256": sha256_file(path),
            **self._made.describe(graph),
            "kernels": {name: kernel.file for name, kernel in sorted(compiled.items())},
            "on_cpu": nodes_on_cpu(model),
        }


def _write_code(compiled: Mapping[str, Compiled], directory: Path) -> dict[str, str]:
    """Write machine code, each piece once; returns the files' digests."""
    found = {}
    for kernel in compiled.values():
        path = directory / kernel.file
        path.write_bytes(kernel.binary.cubin)
        found[kernel.file] = sha256_file(path)
    return found


def _settings(manifest: dict[str, Any], options: BuildOptions) -> dict[str, Any]:
    """The options with defaults filled in; what makes no sense is refused."""
    settings, problems = kernel_settings(manifest, options)
    if options.gpus != BuildOptions.gpus:
        problems.append(f"--gpus is {options.gpus}; kernels are machine code for the target's GPU")
    problems += tensorrt_problems(options)
    if problems:
        raise UserError("The engine cannot be built as asked:", problems)
    return settings
