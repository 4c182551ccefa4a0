# SPDX-License-Identifier: Apache-2.0
"""Engines of bundles that have drafters."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import onnxruntime as ort
import pytest

from nemo_build.bundle import ENGINE_BUNDLE, read_manifest
from nemo_build.engines.build import BuildOptions, build_engine
from nemo_build.engines.inspect import verify_weights
from nemo_build.engines.ort import OrtSession
from nemo_build.engines.session import StepBatch
from nemo_build.errors import BundleError
from nemo_build.export.exporter import export_bundle
from nemo_build.plugins import native

from .draft_reference import save_drafters

OPTIONS = BuildOptions(max_sequences=2, max_context=64, activations="float32")
SIZES = {"slots": 2, "context": 64}


@pytest.fixture(scope="module")
def drafts(tmp_path_factory) -> list[Path]:
    return list(save_drafters(tmp_path_factory.mktemp("drafts")).values())


@pytest.fixture(scope="module")
def bundle(tiny_checkpoint, drafts, tmp_path_factory) -> Path:
    return export_bundle(tiny_checkpoint, tmp_path_factory.mktemp("draft") / "bundle", drafts=drafts).out


def block_logits(directory: Path, kind: str) -> np.ndarray:
    """Of a block at the beginning of a context."""
    session = OrtSession(directory / f"{kind}.onnx", **SIZES)
    return session.step(StepBatch.of_rows([[5, 6, 7]], past=[0], slots=[1], logits="all")).logits


@pytest.mark.parametrize("weights", ["packed", "plain", "in-place"])
def test_drafters_are_part_of_an_engine(bundle, tmp_path, weights):
    engine = build_engine(bundle, tmp_path / "engine", options=replace(OPTIONS, weights=weights)).out
    manifest = read_manifest(engine, ENGINE_BUNDLE)
    assert set(manifest["drafters"]) == {"dflash", "dspark"}
    assert manifest["graph_options"]["taps"]
    verify_weights(engine)
    for kind, drafter in manifest["drafters"].items():
        np.testing.assert_array_equal(block_logits(engine, kind), block_logits(bundle, kind))
        for graph in drafter["graphs"]:
            options = ort.SessionOptions()
            options.register_custom_ops_library(str(native.library()))
            assert ort.InferenceSession(str(engine / f"{graph}.onnx"), options).get_outputs()
    # The two graphs of a drafter share their caches, which are counted once.
    names = {s["name"] for g in manifest["graphs"].values() for s in g["state"] if "context" in s["shape"]}
    by_name = {s["name"]: s["shape"] for g in manifest["graphs"].values() for s in g["state"]}
    sizes = [by_name[n] for n in names]
    assert manifest["plan"]["cache"] == sum(4 * 2 * heads * 64 * width for _, heads, _, width in sizes)


def test_a_drafter_that_changed_since_the_export_is_refused(tiny_checkpoint, tmp_path):
    drafts = list(save_drafters(tmp_path / "drafts").values())
    export_bundle(tiny_checkpoint, tmp_path / "bundle", drafts=drafts)
    shard = next(drafts[0].glob("*.safetensors"))
    with open(shard, "r+b") as file:
        file.truncate(shard.stat().st_size - 1)
    with pytest.raises(BundleError, match="has changed"):
        build_engine(tmp_path / "bundle", tmp_path / "engine", options=OPTIONS)
