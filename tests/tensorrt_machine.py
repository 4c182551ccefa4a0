# SPDX-License-Identifier: Apache-2.0
"""A machine with a GPU and a stand-in for TensorRT, for tests; see ``tensorrt_native.py``."""

from __future__ import annotations

import importlib.util
import json
import shutil
from pathlib import Path
from typing import Any

import onnx
import pytest

from nemo_build.engines import provenance, tensorrt_rtx
from nemo_build.engines.build import BuildOptions
from nemo_build.engines.gpu.kernel_nodes import KernelTable
from nemo_build.engines.gpu.lowering import lower_kernels
from nemo_build.engines.gpu.weights import KernelWeights
from nemo_build.engines.tensorrt import build, gpu
from nemo_build.engines.tensorrt.gpu import Driver, Gpu
from nemo_build.engines.trt import Library
from nemo_build.engines.trt.phases import phases_of
from nemo_build.engines.weights import stored_tensors
from nemo_build.export.exporter import export_bundle

from .tensorrt_stub import vendor_package
from .tiny import reference_model, save_checkpoint

OPTIONS = BuildOptions(max_sequences=2, max_context=64, phases="decode")
H100 = Gpu(0, "NVIDIA H100 80GB HBM3", 90)
needs_packages = pytest.mark.skipif(
    vendor_package() is None
    or importlib.util.find_spec("tensorrt_rtx") is None
    or tensorrt_rtx.LIBRARY.installed_version() != tensorrt_rtx.LIBRARY.version,
    reason="needs tensorrt-rtx and tensorrt-cu13-bindings: pip install 'nemo-build[test]'",
)
PACKAGE = """\
import importlib.util
__path__.append(importlib.util.find_spec("tensorrt_bindings").submodule_search_locations[0])
from tensorrt_native import *
"""


class Stub:
    """A machine with an H100 and the stand-in for TensorRT."""

    def __init__(self, patch: pytest.MonkeyPatch, folder: Path) -> None:
        self.patch, self._journal = patch, folder / "journal"
        (folder / "site" / "tensorrt").mkdir(parents=True)
        (folder / "site" / "tensorrt" / "__init__.py").write_text(PACKAGE)
        self._journal.mkdir()
        for name in ("tensorrt_native.py", "tensorrt_stub.py"):
            shutil.copy(Path(__file__).parent / name, folder / "site" / name)
        patch.setenv("PYTHONPATH", str(folder / "site"))
        patch.setenv("TENSORRT_STUB_JOURNAL", str(self._journal))
        # Timings alone are private; compiled kernels may be those of other tests.
        patch.setattr(build, "cache_directory", lambda: folder / "cache")
        patch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        patch.setattr(Library, "installed_version", lambda library: library.version)
        self.set_gpus(H100)

    def set_gpus(self, *gpus: Gpu) -> None:
        self.patch.setattr(gpu, "find_driver", lambda: Driver("13.0", gpus))
        self.patch.setattr(provenance, "gpu_capabilities", lambda: [g.sm for g in gpus])

    def builds(self) -> list[dict[str, Any]]:
        """What was asked of the library for each plan since the last time."""
        found = sorted(self._journal.iterdir(), key=lambda p: int(p.stem))
        texts = [path.read_text() for path in found]
        for path in found:
            path.unlink()
        return [json.loads(text) for text in texts]


def lowered(bundle: Path, graph: str, phase: str, compute: int | None = None) -> tuple[Any, KernelTable, Any]:
    """The lowered graph of a phase as the engine has it, with its kernels and weights."""
    model = onnx.load(bundle / f"{graph}.onnx", load_external_data=False)
    kinds = {} if compute is None else {"compute": compute}
    weights, table = KernelWeights(stored_tensors([model]), **kinds), KernelTable()
    (sizes,) = phases_of(2, 64, (phase,))
    return lower_kernels(model, sizes, weights, table), table, weights


def export_small(folder: Path) -> Path:
    """A bundle of a model with one graph of three blocks."""
    save_checkpoint(reference_model(hybrid_override_pattern="M*E"), folder / "checkpoint")
    export_bundle(folder / "checkpoint", folder / "bundle")
    return folder / "bundle"
