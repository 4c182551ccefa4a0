# SPDX-License-Identifier: Apache-2.0
"""Low-rank terms and smoothing beside quantized weights: accounted for, exported, built, measured."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from safetensors.torch import load_file, save_file

from nemo_build.bundle import ENGINE_BUNDLE, read_manifest
from nemo_build.engines.build import BuildOptions, build_engine
from nemo_build.engines.inspect import inspect
from nemo_build.engines.ort import OrtSession
from nemo_build.export.checkpoint import Checkpoint
from nemo_build.export.exporter import export_bundle
from nemo_build.export.ledger import LedgerError, reconcile
from nemo_build.export.models import expected_tensors
from nemo_build.export.quantize.errors import weight_errors
from nemo_build.export.quantize.recipe import Assignment
from nemo_build.plugins import native
from nemo_build.plugins.formats import INPUT_SCALE, LOW_RANK, SMOOTHING, formats
from nemo_build.spec import load_spec

from .quantized import EVERY_KIND, TOKENS, make_mtp_source, run, tensors
from .tiny import feed

RANK = 4
OPTIONS = BuildOptions(max_sequences=1, max_context=64, activations="float32")


def low_rank_modules(directory: Path) -> list[str]:
    """What can have a low-rank term: quantized projections other than routed experts."""
    names = tensors(directory)
    return [
        n.removesuffix(".weight_scale_2") for n in names if n.endswith("_scale_2") and ".experts." not in n
    ]


def add_low_rank(directory: Path) -> None:
    """Give every projection that can have them smoothing and a low-rank term, of a size that shows."""
    torch.manual_seed(0)
    path = directory / "model.safetensors"
    stored = load_file(path)
    for module in low_rank_modules(directory):
        rows, half = stored[f"{module}.weight"].shape
        a, b = (f"{module}.{name}" for name in LOW_RANK)
        stored[f"{module}.{SMOOTHING}"] = 0.5 + torch.rand(2 * half)
        stored[a], stored[b] = torch.randn(RANK, 2 * half) / 8, torch.randn(rows, RANK) / 4
    save_file(stored, path, metadata={"format": "pt"})


def effective_weights(directory: Path) -> Iterator[tuple[str, np.ndarray]]:
    """Every quantized projection as one matrix: ``(W + B A) * s``."""
    stored = tensors(directory)
    for name in stored:
        if name.endswith(".weight_scale_2"):
            module = name.removesuffix(".weight_scale_2")
            parts = [stored[f"{module}.{p}"] for p in formats()["nvfp4"].parts((0, 0))]
            weight = formats()["nvfp4"].decode(*parts)
            a, b = (stored.get(f"{module}.{n}") for n in LOW_RANK)
            if a is not None:
                weight = (weight + b @ a) * stored[f"{module}.{SMOOTHING}"]
            yield module, weight


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory) -> tuple[Path, Path]:
    """A quantized checkpoint with low-rank terms, and the same with each of its weights as one matrix in F32."""
    folder = tmp_path_factory.mktemp("low-rank")
    source = make_mtp_source(folder / "source", torch.float32, **EVERY_KIND)
    run(source, folder / "quantized", "w4a16")
    add_low_rank(folder / "quantized")
    path = source / "model.safetensors"
    whole = {f"{m}.weight": torch.from_numpy(w) for m, w in effective_weights(folder / "quantized")}
    save_file({**load_file(path), **whole}, path, metadata={"format": "pt"})
    return folder / "quantized", source


@pytest.fixture(scope="module")
def bundle(checkpoints, tmp_path_factory) -> Path:
    """The quantized one's bundle."""
    return export_bundle(checkpoints[0], tmp_path_factory.mktemp("bundle") / "bundle").out


def logits(directory: Path) -> np.ndarray:
    session = OrtSession(directory / "target.onnx", slots=1, context=64)
    return feed(session, {0: TOKENS[0]}, {})[0]


def test_exported_graph_is_the_whole_matrix(checkpoints, bundle, tmp_path):
    """Every kind of projection, with biases, against the model with the sums as its weights."""
    want = logits(export_bundle(checkpoints[1], tmp_path / "whole").out)
    np.testing.assert_allclose(logits(bundle), want, rtol=1e-3, atol=1e-4)
    graph = onnx.load(bundle / "target.onnx", load_external_data=False).graph
    modules = low_rank_modules(checkpoints[0])
    assert {m.rsplit(".", 1)[1] for m in modules} >= {"in_proj", "o_proj", "fc1_latent_proj", "up_proj"}
    assert sum(n.op_type == "BlockLinear" and n.input[1].endswith(LOW_RANK) for n in graph.node) == 2 * len(
        modules
    )


def test_rounding_of_the_input_leaves_the_low_rank_term_alone(checkpoints, tmp_path):
    """With an input that rounds to nothing, what is left is the low-rank term."""
    path = tmp_path / "q" / "model.safetensors"
    path.parent.mkdir()
    for file in checkpoints[0].glob("*.json"):
        (path.parent / file.name).write_bytes(file.read_bytes())
    stored = load_file(checkpoints[0] / "model.safetensors")
    module = "backbone.layers.0.mixer.in_proj"
    save_file({**stored, f"{module}.{INPUT_SCALE}": torch.tensor(1e30)}, path, metadata={"format": "pt"})
    rounded = logits(export_bundle(path.parent, tmp_path / "rounded").out)
    nothing = {f"{module}.weight": torch.zeros_like(stored[f"{module}.weight"])}
    save_file({**stored, **nothing}, path, metadata={"format": "pt"})
    np.testing.assert_array_equal(rounded, logits(export_bundle(path.parent, tmp_path / "alone").out))


def test_ledger_counts_low_rank_terms_apart(checkpoints):
    directory = checkpoints[0]
    ledger = reconcile(Checkpoint.open(directory), expected_tensors(load_spec(directory)))
    stored = tensors(directory)
    assert set(ledger.entries) == set(stored)
    factors = sum(t.nbytes for n, t in stored.items() if n.endswith(LOW_RANK))
    assert sum(n for role, n in ledger.bytes_by_role.items() if role.endswith(".low_rank")) == factors > 0


def test_every_mistake_in_low_rank_terms_is_in_one_error(checkpoints):
    checkpoint = Checkpoint.open(checkpoints[0])
    found = dict(checkpoint.tensors)
    layer = "backbone.layers.0.mixer.in_proj"
    attention = "backbone.layers.1.mixer"
    del found[f"{layer}.svdquant_lora_b"]
    del found[f"{attention}.q_proj.svdquant_lora_a"]
    shapes = {
        f"{attention}.k_proj.svdquant_lora_b": (32, RANK + 1),
        f"{attention}.v_proj.svdquant_lora_a": (RANK, 47),
        f"{attention}.o_proj.pre_quant_scale": (1,),
        "backbone.layers.2.mixer.experts.3.up_proj.svdquant_lora_a": (RANK, 32),
        "lm_head.pre_quant_scale": (48,),
    }
    some = found[f"{layer}.pre_quant_scale"]
    found |= {name: replace(found.get(name, some), name=name, shape=shape) for name, shape in shapes.items()}
    found[f"{layer}.svdquant_lora_a"] = replace(found[f"{layer}.svdquant_lora_a"], dtype="U8")
    with pytest.raises(LedgerError) as caught:
        reconcile(replace(checkpoint, tensors=found), expected_tensors(load_spec(checkpoints[0])))
    assert [str(d) for d in sorted(caught.value.details, key=lambda d: d.name)] == [
        "wrong dtype: backbone.layers.0.mixer.in_proj.svdquant_lora_a: expected BF16 or F16 or F32, found U8",
        "missing: backbone.layers.0.mixer.in_proj.svdquant_lora_b [166, 4] BF16 or F16 or F32",
        "wrong shape: backbone.layers.1.mixer.k_proj.svdquant_lora_b: expected [32, 4], found [32, 5]",
        "wrong shape: backbone.layers.1.mixer.o_proj.pre_quant_scale: expected [64], found [1]",
        "missing: backbone.layers.1.mixer.q_proj.svdquant_lora_a [4, 48] BF16 or F16 or F32",
        "wrong shape: backbone.layers.1.mixer.v_proj.svdquant_lora_a: expected [4, 48], found [4, 47]",
        "unexpected: backbone.layers.2.mixer.experts.3.up_proj.svdquant_lora_a [4, 32] F32",
        "unexpected: lm_head.pre_quant_scale [48] F32",
    ]
    assert "Routed experts have neither" in caught.value.hint


@pytest.mark.skipif(not native.chosen(), reason="needs the native kernels")
@pytest.mark.parametrize("weights", ["packed", "in-place", "plain"])
def test_engines_compute_low_rank_terms(bundle, tmp_path, weights):
    with native.forced("reference"):
        want = logits(bundle)
    engine = build_engine(bundle, tmp_path / "engine", options=replace(OPTIONS, weights=weights)).out
    np.testing.assert_allclose(logits(engine), want, rtol=1e-3, atol=1e-4)


@pytest.mark.skipif(not native.chosen(), reason="needs the native kernels")
def test_a_build_that_converts_leaves_low_rank_terms_alone(bundle, tmp_path):
    engine = build_engine(bundle, tmp_path / "engine", options=replace(OPTIONS, weights="int4")).out
    held = read_manifest(engine, ENGINE_BUNDLE)["weights"]["tensors"]
    factors = {n: t["format"] for n, t in held.items() if n.removesuffix(".panels").endswith(LOW_RANK)}
    assert set(factors.values()) == {"f32"}
    assert held["lm_head.weight.panels"]["format"] == "int4"
    assert inspect(engine).weight_bytes == sum(t["nbytes"] for t in held.values())


def test_error_of_a_weight_is_that_of_the_sum(checkpoints):
    """Against the sums themselves there is none."""
    modules = low_rank_modules(checkpoints[0])
    assignments = {m: Assignment("nvfp4", False, False, RANK) for m in modules}
    quantized, whole = map(Checkpoint.open, checkpoints)
    assert all(e.rmse < 1e-6 for e in weight_errors(whole, quantized, assignments).values())
    without = {m: replace(a, rank=0) for m, a in assignments.items()}
    assert all(e.rmse > 1e-2 for e in weight_errors(whole, quantized, without).values())
