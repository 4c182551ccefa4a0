# SPDX-License-Identifier: Apache-2.0
"""Engines for the native kernels: how they hold weights, what they compute, and what is refused."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import pytest

from nemo_build.bundle import ENGINE_BUNDLE, read_manifest
from nemo_build.demo import CHECKPOINT
from nemo_build.engines.build import BuildOptions, build_engine
from nemo_build.engines.inspect import inspect, verify_weights
from nemo_build.engines.options import CONVERSIONS
from nemo_build.engines.ort import OrtSession
from nemo_build.engines.session import StepBatch
from nemo_build.errors import BundleError, CheckpointError, UserError
from nemo_build.export.exporter import export_bundle
from nemo_build.export.quantize.quantizer import quantize_checkpoint
from nemo_build.export.quantize.recipe import load_recipe
from nemo_build.plugins import native
from nemo_build.runtime.engine import Engine
from nemo_build.runtime.params import SamplingParams

from .tiny import feed

OPTIONS = BuildOptions(max_sequences=2, max_context=256)
SIZES = {"slots": 2, "context": 256}


@pytest.fixture(scope="module")
def demo_bundle(tmp_path_factory) -> Path:
    """The demo checkpoint's bundle."""
    return export_bundle(CHECKPOINT, tmp_path_factory.mktemp("demo") / "bundle").out


def build(bundle: Path, out: Path, **changes) -> Path:
    return build_engine(bundle, out, options=replace(OPTIONS, **changes)).out


def logits(engine: Path, tokens: list[int]) -> np.ndarray:
    session = OrtSession(engine / "target.onnx", **SIZES)
    batch = StepBatch.of_rows([tokens], past=[0], slots=[0], logits="all")
    return session.step(batch).logits.astype(np.float64)


def divergence(p: np.ndarray, q: np.ndarray) -> np.ndarray:
    """KL of each row, in nats."""
    p, q = p - p.max(-1, keepdims=True), q - q.max(-1, keepdims=True)
    p, q = (x - np.log(np.exp(x).sum(-1, keepdims=True)) for x in (p, q))
    return (np.exp(p) * (p - q)).sum(-1)


@pytest.fixture(scope="module")
def text() -> list[int]:
    from nemo_build.runtime.tokenizer import Tokenizer

    return Tokenizer.load(CHECKPOINT).encode(Path(__file__).read_text())[:256]


def test_weights_in_place_and_packed_give_the_same_bits(demo_bundle, tmp_path, text):
    for activations in ("float32", "bfloat16", "int8"):
        packed = build(demo_bundle, tmp_path / f"p-{activations}", weights="packed", activations=activations)
        there = build(demo_bundle, tmp_path / f"i-{activations}", weights="in-place", activations=activations)
        np.testing.assert_array_equal(logits(packed, text), logits(there, text))


def test_every_kind_of_weights_is_near_the_reference(demo_bundle, tmp_path, text):
    plain = build(demo_bundle, tmp_path / "plain", weights="plain")
    with native.forced("reference"):
        want = logits(plain, text)
    bounds = {
        ("packed", "float32"): 1e-9,
        ("packed", "bfloat16"): 1e-3,
        ("bf16", "float32"): 1e-9,
        ("int8", "bfloat16"): 2e-3,
        ("int8", "int8"): 4e-3,
        ("int4", "bfloat16"): 0.1,
        ("int4", "int8"): 0.1,
        ("nvfp4", "float32"): 0.1,
    }
    for (weights, activations), bound in bounds.items():
        name = f"{weights}-{activations}"
        engine = build(demo_bundle, tmp_path / name, weights=weights, activations=activations)
        assert divergence(want, logits(engine, text)).mean() < bound, name


def test_a_graph_that_is_lowered_has_nothing_left_of_the_reference(demo_bundle, tmp_path):
    engine = build(demo_bundle, tmp_path / "engine", weights="int4")
    for name in ("target", "mtp"):
        model = onnx.load(engine / f"{name}.onnx", load_external_data=False)
        assert not model.functions
        linear = [n for n in model.graph.node if n.op_type in ("BlockLinear", "RoutedExperts")]
        assert linear
        assert {n.domain for n in linear} == {"nemo.cpu"}
    manifest = read_manifest(engine, ENGINE_BUNDLE)
    tensors = manifest["weights"]["tensors"]
    assert tensors["lm_head.weight.panels"]["format"] == "int4"
    assert tensors["backbone.embeddings.weight"]["dtype"] == "BF16"
    assert "lm_head.weight" not in tensors
    assert all(t["offset"] % 64 == 0 for t in tensors.values())
    assert manifest["options"]["activations"] == "bfloat16"
    assert inspect(engine).bytes_by_dtype["int4"] == sum(
        t["nbytes"] for t in tensors.values() if t.get("format") == "int4"
    )


@pytest.mark.parametrize("recipe", ["nvfp4", "lightning", "fp8"])
def test_quantized_checkpoints_are_run_as_they_are(recipe, tmp_path, text):
    sequences = [text[i : i + 64] for i in range(0, 256, 64)]
    quantize_checkpoint(
        CHECKPOINT, tmp_path / "quantized", load_recipe(recipe), sequences=sequences, sequences_source="test"
    )
    bundle = export_bundle(tmp_path / "quantized", tmp_path / "bundle").out
    plain = build(bundle, tmp_path / "plain", weights="plain")
    with native.forced("reference"):
        want = logits(plain, text[:64])
    for weights in ("packed", "in-place", "plain"):
        engine = build(bundle, tmp_path / f"native-{weights}", weights=weights, activations="float32")
        # Rounded inputs that lie between two numbers may go to the other one.
        assert divergence(want, logits(engine, text[:64])).mean() < 2e-4, weights
    # Only what is stored unquantized is converted.
    engine = build(bundle, tmp_path / "int8", weights="int8")
    formats = {t.get("format") for t in read_manifest(engine, ENGINE_BUNDLE)["weights"]["tensors"].values()}
    assert formats >= {"int8", "fp8" if recipe == "fp8" else "nvfp4"}


def test_in_place_engines_share_the_checkpoints_files(tiny_bundle, tmp_path):
    engine = build(tiny_bundle, tmp_path / "engine", weights="in-place")
    shards = [p for p in engine.iterdir() if p.name.startswith("shard-")]
    assert shards
    assert all(p.stat().st_nlink >= 3 for p in shards)  # checkpoint, bundle, engine
    assert all(os.access(p, os.W_OK) for p in shards)
    assert not (engine / "weights.bin").exists()
    verify_weights(engine)
    assert read_manifest(engine, ENGINE_BUNDLE)["plan"]["weights_memory"] == inspect(engine).weight_bytes


def test_plain_engines_run_without_native_kernels_and_packed_ones_do_not(tiny_bundle, tmp_path, monkeypatch):
    packed = build(tiny_bundle, tmp_path / "packed", weights="packed")
    want = feed(OrtSession(packed / "target.onnx", **SIZES), {1: [3, 1, 4]}, {})[1]
    monkeypatch.setenv("NEMO_BUILD_ISA", "reference")
    plain = build(tiny_bundle, tmp_path / "plain")
    assert read_manifest(plain, ENGINE_BUNDLE)["options"]["weights"] == "plain"
    np.testing.assert_allclose(
        feed(OrtSession(plain / "target.onnx", **SIZES), {1: [3, 1, 4]}, {})[1], want, atol=1e-4
    )
    with pytest.raises(BundleError, match="native kernels"):
        open_target(packed)
    for kind in CONVERSIONS:
        with pytest.raises(UserError, match="cannot be built") as error:
            build(tiny_bundle, tmp_path / kind, weights=kind)
        assert "native kernels" in str(error.value)


def open_target(engine: Path):
    from nemo_build.engines.backends import open_session

    return open_session(engine, read_manifest(engine, ENGINE_BUNDLE), "target", **SIZES)


def test_all_wrong_options_are_listed(tiny_bundle, tmp_path):
    with pytest.raises(UserError) as error:
        build(tiny_bundle, tmp_path / "e", weights="int3", activations="int7", max_sequences=0)
    assert all(word in str(error.value) for word in ("int3", "int7", "--max-sequences"))
    with pytest.raises(UserError, match="cannot be built") as error:
        build(tiny_bundle, tmp_path / "e", weights="plain", activations="int8")
    assert "float32" in str(error.value)
    assert not (tmp_path / "e").exists()


def test_a_weight_that_is_no_number_is_named(tiny_checkpoint, tmp_path):
    import shutil

    from safetensors.numpy import load_file, save_file

    shutil.copytree(tiny_checkpoint, tmp_path / "checkpoint")
    (tmp_path / "checkpoint" / "model.safetensors").chmod(0o644)
    tensors = load_file(tmp_path / "checkpoint" / "model.safetensors")
    tensors["lm_head.weight"][3, 2] = np.nan
    save_file(tensors, tmp_path / "checkpoint" / "model.safetensors", {"format": "pt"})
    bundle = export_bundle(tmp_path / "checkpoint", tmp_path / "bundle").out
    for kind in ("int8", "int4"):
        with pytest.raises(CheckpointError, match=r"lm_head.weight cannot be converted"):
            build(bundle, tmp_path / kind, weights=kind)
        assert not (tmp_path / kind).exists()


def test_two_builds_are_byte_identical(demo_bundle, tmp_path):
    digests = []
    for name in "ab":
        options = replace(OPTIONS, weights="nvfp4")
        build_engine(demo_bundle, tmp_path / name, options=options, use_cache=False)
        digests.append(json.loads((tmp_path / name / ENGINE_BUNDLE).read_text()))
    assert digests[0] == digests[1]


@pytest.mark.parametrize("kind", native.instruction_sets())
def test_every_instruction_set_generates_the_same_text(demo_engine_directory, kind):
    params = SamplingParams(temperature=0, max_tokens=24)
    want = Engine.load(demo_engine_directory).generate("import os\n", params)
    with native.forced(kind):
        assert Engine.load(demo_engine_directory).generate("import os\n", params) == want
