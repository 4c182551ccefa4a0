# SPDX-License-Identifier: Apache-2.0
"""What each way to hold weights and to round activations costs in a CPU engine of the demo checkpoint.

Compares with the reference functions in float32 on the second half of the default text.

    python scripts/bench/formats.py [--out docs/results/formats.json]
"""

from __future__ import annotations

import argparse
import datetime
import json
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from nemo_build.bundle import ENGINE_BUNDLE, read_manifest
from nemo_build.demo import CHECKPOINT
from nemo_build.engines.build import BuildOptions, build_engine
from nemo_build.engines.ort import OrtSession
from nemo_build.engines.session import StepBatch
from nemo_build.export.exporter import export_bundle
from nemo_build.export.quantize.calibration import DEFAULT_TEXT, read_texts
from nemo_build.export.quantize.evaluation import Logits, evaluate
from nemo_build.plugins import native
from nemo_build.runtime.tokenizer import Tokenizer

ROOT = Path(__file__).resolve().parent.parent.parent
SEQUENCES, LENGTH = 48, 256
CASES = (
    ("packed", "float32"),
    ("packed", "bfloat16"),
    ("int8", "bfloat16"),
    ("int8", "int8"),
    ("nvfp4", "bfloat16"),
    ("nvfp4", "int8"),
    ("int4", "bfloat16"),
    ("int4", "int8"),
)


def logits_of(engine: Path) -> Logits:
    """A function from tokens to logits."""
    session = OrtSession(engine / "target.onnx", slots=1, context=LENGTH)

    def logits(tokens: Sequence[int]) -> np.ndarray[Any, np.dtype[np.float32]]:
        return session.step(StepBatch.of_rows([list(tokens)], past=[0], slots=[0], logits="all")).logits

    return logits


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "results" / "formats.json")
    options = parser.parse_args()
    tokenizer = Tokenizer.load(CHECKPOINT)
    sequences = [tokenizer.encode(t)[:LENGTH] for t in read_texts(DEFAULT_TEXT)[SEQUENCES // 2 : SEQUENCES]]
    cases = []
    with tempfile.TemporaryDirectory() as folder:
        bundle = export_bundle(CHECKPOINT, Path(folder) / "bundle").out
        build_engine(bundle, Path(folder) / "plain", options=BuildOptions(1, LENGTH, weights="plain"))
        with native.forced("reference"):
            reference = logits_of(Path(folder) / "plain")
        for weights, activations in CASES:
            out = Path(folder) / f"{weights}-{activations}"
            build_engine(bundle, out, options=BuildOptions(1, LENGTH, None, weights, activations))
            tensors = read_manifest(out, ENGINE_BUNDLE)["weights"]["tensors"]
            result = evaluate(reference, logits_of(out), sequences)
            nbytes = sum(t["nbytes"] for t in tensors.values())
            cases.append(
                {
                    "weights": weights,
                    "activations": activations,
                    "bytes": nbytes,
                    "evaluation": result.to_json(),
                }
            )
            print(
                f"{weights}, {activations}: KL {result.kl_mean:.6f}, p99 {result.kl_p99:.4f}, {result.top1:.4f}"
            )
    record = {
        "date": datetime.date.today().isoformat(),
        "command": "python scripts/bench/formats.py",
        "instruction_set": native.chosen(),
        "cases": cases,
    }
    options.out.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
