# SPDX-License-Identifier: Apache-2.0
"""Models to measure: engines of random weights at the widths of Nemotron 3.5 Lightning, and GGUF files of their shape.

They lie in a directory of the caller's, and are made if they are not there.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

from nemo_build.demo import CHECKPOINT
from nemo_build.engines.build import BuildOptions, build_engine
from nemo_build.export.exporter import export_bundle

PATTERNS = {"few": "MEM*E", "full": "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME"}
"""Layers by name: a few of each kind, or those of the release."""

DRAFTERS = ("dflash", "dspark")

_HERE = Path(__file__).parent


def call(*command: object) -> None:
    """Run a program that must succeed."""
    subprocess.run([str(c) for c in command], check=True)


def engine(work: Path, shape: str, *, sequences: int, context: int, drafters: bool = False) -> Path:
    """The directory of an engine with such layers, in NVFP4; its checkpoint goes when it is built.

    Args:
        work: Where it lies.
        shape: A name of :data:`PATTERNS`.
        sequences: What it is built for.
        context: Likewise.
        drafters: With the MTP module, both block drafters, and a tokenizer, so that it can be loaded.
    """
    name = f"{shape}-drafters" if drafters else shape
    checkpoint, bundle, built = (work / f"{name}-{kind}" for kind in ("checkpoint", "bundle", "engine"))
    if built.exists():
        return built
    drafts = {kind: work / f"{name}-{kind}" for kind in DRAFTERS if drafters}
    synthetic = [sys.executable, _HERE.parent / "synthetic_checkpoint.py"]
    common = ["--random", "--pattern", PATTERNS[shape]]
    if not checkpoint.exists():
        options = ["--tokenizer"] if drafters else ["--no-mtp"]
        call(*synthetic, checkpoint, "--format", "nvfp4-all", *common, *options)
    for kind, path in drafts.items():
        if not path.exists():
            call(*synthetic, path, "--drafter", kind, *common)
    wanted = [word for path in drafts.values() for word in ("--draft", path)]
    call("nemo-build", "export", checkpoint, "-o", bundle, "--force", *wanted)
    sizes = ["--max-sequences", sequences, "--max-context", context, "--activations", "bfloat16"]
    call("nemo-build", "build", bundle, "-o", built, "--no-cache", "--weights", "packed", *sizes)
    for path in (bundle, checkpoint, *drafts.values()):
        shutil.rmtree(path)
    return built


def demo_engine(work: Path, *, sequences: int, context: int) -> Path:
    """The directory of an engine of the demo checkpoint; arguments as for :func:`engine`."""
    built = work / "demo-engine"
    if not built.exists():
        bundle = export_bundle(CHECKPOINT, work / "demo-bundle").out
        build_engine(bundle, built, options=BuildOptions(sequences, context))
        shutil.rmtree(bundle)
    return built


def gguf(work: Path, name: str, model: Path, kind: str) -> Path:
    """A GGUF file with random weights.

    Args:
        work: Where it lies.
        name: Of the model, for the file's name.
        model: Directory with the configuration.
        kind: Type of its matrices.
    """
    path = work / f"{name}-{kind}.gguf"
    if not path.exists():
        call(sys.executable, _HERE / "_gguf.py", model, path, "--type", kind)
    return path
