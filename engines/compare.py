# SPDX-License-Identifier: Apache-2.0
"""A quantized checkpoint against its original, both run in ONNX Runtime on the CPU.

What two checkpoints hold is compared in :mod:`nemo_build.engines.diff`; here, what they compute.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from nemo_build.bundle import MODEL_BUNDLE, read_manifest
from nemo_build.engines.inspect import inspect
from nemo_build.engines.ort import OrtSession
from nemo_build.engines.plan import host_memory
from nemo_build.engines.session import StepBatch
from nemo_build.export.exporter import export_bundle
from nemo_build.export.quantize.evaluation import Evaluation, Logits, evaluate

if TYPE_CHECKING:
    from nemo_build.export.quantize.quantizer import QuantizeProgress

_SHARE = 0.7  # of the machine's memory that the two models may take


def compare_checkpoints(
    original: Path,
    quantized: Path,
    sequences: Sequence[Sequence[int]],
    progress: QuantizeProgress | None = None,
) -> tuple[Evaluation | None, str]:
    """Compare two checkpoints on token sequences; returns the comparison, or why it was not made."""
    needed = 2 * 4 * inspect(original).parameters
    if needed > _SHARE * host_memory():
        return None, f"both models in float32 take {needed / 1e9:.0f} GB, more than this machine has to spare"
    context = max(map(len, sequences))
    report = progress.start("comparing with the original", len(sequences)) if progress else None
    with tempfile.TemporaryDirectory(prefix="nemo-build-") as folder:
        models = [_open(c, Path(folder) / f"{i}", context) for i, c in enumerate((original, quantized))]

        def counted(tokens: Sequence[int]) -> NDArray[np.float32]:
            if report:
                report(1)
            return models[1](tokens)

        return evaluate(models[0], counted, sequences), ""


def _open(checkpoint: Path, bundle: Path, context: int) -> Logits:
    """A function from tokens to logits, through a bundle of the checkpoint."""
    export_bundle(checkpoint, bundle)
    folder = read_manifest(bundle, MODEL_BUNDLE)["weights"]["folder"]
    session = OrtSession(bundle / "target.onnx", slots=1, context=context, weights_folder=folder)

    def logits(tokens: Sequence[int]) -> NDArray[np.float32]:
        return session.step(StepBatch.of_rows([list(tokens)], past=[0], slots=[0], logits="all")).logits

    return logits
