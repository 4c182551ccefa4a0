# SPDX-License-Identifier: Apache-2.0
"""Building of an engine for TensorRT: plans that hold code, and one file of weights that they share."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any

from nemo_build.engines.build import BuildOptions, BuildProgress, Inputs, Written
from nemo_build.engines.gpu.making import KernelGraphs, kernel_settings
from nemo_build.engines.targets import Target, allowed_bytes
from nemo_build.engines.tensorrt import LIBRARY
from nemo_build.engines.tensorrt.gpu import only, require_gpu
from nemo_build.engines.tensorrt.kernels import require_kernels
from nemo_build.engines.trt.builder import Job, profile_of
from nemo_build.engines.trt.compiling import (
    FOLDER,
    Lowered,
    compile_graph,
    log_of,
    require_space,
)
from nemo_build.errors import UserError
from nemo_build.settings import cache_directory

OPTIMIZATION_LEVELS = range(6)
DEFAULT_LEVEL = 3  # the library's own

_NETWORK = "nemo_build.engines.tensorrt.network:PluginNetwork"
_PLAN_BYTES = 256 << 20  # room for one; it holds code and no weights


class Compiling:
    """An engine for TensorRT; see :class:`~nemo_build.engines.build.Maker`."""

    def __init__(self, inputs: Inputs, target: Target, options: BuildOptions) -> None:
        assert target.sm is not None, "the backend is for GPUs"
        version = LIBRARY.require()
        self.settings = _settings(inputs.manifest, options)
        self._gpu, driver = require_gpu(target)
        self._target, self._sm = target, target.sm
        self._made = KernelGraphs(inputs, self.settings)
        uses = {name: use for table in self._made.tables.values() for name, use in table.uses.items()}
        require_kernels(uses.values(), target)
        self.backend: dict[str, Any] = {
            "name": LIBRARY.name,
            "version": version,
            "sms": [target.sm],
            "gpu": self._gpu.name,
            "cuda": driver.cuda,
            "kernels": [use.to_json() for _, use in sorted(uses.items())],
        }
        self._timings = (
            Path(options.timing_cache).absolute()
            if options.timing_cache
            else timing_cache(self._gpu.name, version)
        )
        self.plan = self._made.plan()

    def available(self, options: BuildOptions) -> tuple[int, str]:
        """The target's memory, less what it keeps free, unless asked otherwise."""
        return allowed_bytes(self._target, options.memory)

    def write(
        self, directory: Path, out: Path, digests: list[str], progress: BuildProgress | None
    ) -> Written:
        """Compile the graphs and write the weights. Logs of failed ones stay beside `out`."""
        require_space(out.parent, self._made.weight_bytes + _PLAN_BYTES * len(self._made.graphs))
        (directory / FOLDER).mkdir()
        # First what may be refused, then what takes long.
        graphs = {g.name: self._compile(g, directory, out, progress) for g in self._made.graphs}
        shutil.rmtree(directory / FOLDER)
        return Written(graphs, *self._made.write_weights(directory, progress))

    def _compile(
        self, graph: Lowered, directory: Path, out: Path, progress: BuildProgress | None
    ) -> dict[str, Any]:
        """Compile one graph; returns what the manifest says of it."""
        table = self._made.tables[graph.name]
        job = Job(
            LIBRARY,
            directory / FOLDER / f"{graph.name}.onnx",
            directory / f"{graph.name}.engine",
            log_of(out, graph),
            (self._sm,),
            profile_of(graph.shapes(), graph.phase),
            network=_NETWORK,
            options={
                "kernels": table.to_json(),
                "sm": self._sm,
                "timing_cache": str(self._timings),
                "optimization_level": self.settings["optimization_level"],
            },
            environment=only(self._gpu),
        )
        report = progress.start(f"compiling {graph.name}", _PLAN_BYTES) if progress else None
        entry, built = compile_graph(graph, job)
        if report:
            report(_PLAN_BYTES)  # how large a plan becomes is not known before; writing it takes no time
        return {**entry, **self._made.describe(graph), "kernels": sorted(table.uses), **built.facts}


def timing_cache(gpu: str, version: str) -> Path:
    """Where timings of kernels are kept for a GPU by name, and a version of the library."""
    name = re.sub(r"\W+", "-", gpu).strip("-").lower()
    return cache_directory() / "timings" / f"{name}-tensorrt-{version}.cache"


def _settings(manifest: dict[str, Any], options: BuildOptions) -> dict[str, Any]:
    """The options with defaults filled in; what makes no sense is refused."""
    settings, problems = kernel_settings(manifest, options)
    if options.gpus != "target":
        problems.append(f"--gpus is {options.gpus}; a TensorRT engine is for the GPU that it is built on")
    level = DEFAULT_LEVEL if options.optimization_level is None else options.optimization_level
    if level not in OPTIMIZATION_LEVELS:
        last = OPTIMIZATION_LEVELS[-1]
        problems.append(f"--optimization-level is {level}; there are 0 to {last}")
    if problems:
        raise UserError("The engine cannot be built as asked:", problems)
    return {**settings, "optimization_level": level}
