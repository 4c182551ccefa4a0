# SPDX-License-Identifier: Apache-2.0
"""Graphs lowered for TensorRT-RTX compute what the portable graph computes; run in ONNX Runtime, without TensorRT."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import onnx
import pytest
from safetensors.numpy import load_file, save_file

from nemo_build.demo import CHECKPOINT
from nemo_build.engines.trt.forms import WeightTable, int4
from nemo_build.engines.trt.lowering import lower
from nemo_build.engines.trt.phases import PENDING, phases_of
from nemo_build.engines.weights import stored_tensors
from nemo_build.errors import UserError
from nemo_build.export.exporter import export_bundle

from .lowered_pair import CLOSE, LoweredPair
from .quantized import make_source, run
from .tensorrt_rtx_runner import LoweredModel
from .tiny import KINDS, reference_model, save_checkpoint

SLOTS, CONTEXT = 3, 256


class Pair(LoweredPair):
    """Lowered graphs of a bundle beside the portable one; options are those of :class:`LoweredModel`."""

    def __init__(self, bundle: Path, graph: str = "target", *, slots: int = SLOTS, **options) -> None:
        lowered = LoweredModel(bundle, graph, slots=slots, context=CONTEXT, **options)
        super().__init__(lowered, bundle, slots=slots, context=CONTEXT)


@pytest.fixture(scope="module")
def demo_bundle(tmp_path_factory) -> Path:
    return export_bundle(CHECKPOINT, tmp_path_factory.mktemp("rtx") / "bundle").out


def tiny_bundle_of(directory: Path, **config) -> Path:
    save_checkpoint(reference_model(**config), directory / "checkpoint")
    return export_bundle(directory / "checkpoint", directory / "bundle").out


def check_sequence(pair: Pair) -> None:
    """Prompts, single tokens, verification with and without rollback, idle rows, rows of all kinds in one step."""
    pair.check("prefill", [20, 100, 3])
    pair.check("decode", [1, 8, 3], [0, 0, 2])
    pair.check("decode", [2, 1, 0], [0, 5, 0])
    pair.check("prefill", [8, 9, 1], [2, 0, 1])
    pair.check("decode", [1, 1, 1], [8, 0, 0])
    pair.check("prefill", [0, 70, 2])
    pair.check("decode", [5, 0, 1], [0, 0, 2])


def test_demo_checkpoint(demo_bundle):
    check_sequence(Pair(demo_bundle))


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_model(kind, tmp_path):
    check_sequence(Pair(tiny_bundle_of(tmp_path, **KINDS[kind])))


def test_mtp_module(tiny_bundle):
    check_sequence(Pair(tiny_bundle, "mtp"))


def test_rollback_to_every_number_of_accepted_tokens(demo_bundle):
    pair = Pair(demo_bundle, slots=1)
    for drafted in range(2, PENDING + 1):
        for accepted in range(drafted + 1):
            pair.check("decode", [drafted])
            pair.check("decode", [1], [accepted])
    assert pair.past[0] < CONTEXT


def test_a_slot_needs_no_reset(tiny_bundle):
    pair = Pair(tiny_bundle)
    for state in pair.lowered.state.values():
        state[:] = 1e3
    got, want = pair.step("prefill", [5, 40, 2])
    np.testing.assert_allclose(got, want, **CLOSE)


def test_too_many_tokens_of_an_expert_are_told_and_fewer_are_exact(tiny_bundle):
    pair = Pair(tiny_bundle)
    pair.step("prefill", [200, 200, 200])  # 8 experts, 3 of them a token: 225 tokens each on average
    assert pair.lowered.overflow > 0
    pair = Pair(tiny_bundle)
    pair.check("prefill", [40, 40, 40])
    assert pair.lowered.overflow == 0
    pair = Pair(tiny_bundle)
    pair.check("prefill", [127, 0, 0])  # what fits a buffer whatever is chosen; padding takes no room
    assert pair.lowered.overflow == 0


def test_nvfp4_weights(tmp_path):
    run(make_source(tmp_path / "source"), tmp_path / "quantized", "w4a16")
    bundle = export_bundle(tmp_path / "quantized", tmp_path / "bundle").out
    pair = Pair(bundle)
    assert {w.dtype for w in pair.lowered.table.weights.values()} >= {"F4_E2M1", "F8_E4M3"}
    check_sequence(pair)


def test_rounded_inputs(tmp_path):
    """Rounding to 4 bits makes small differences large, so after some layers only what is exact is compared."""
    run(make_source(tmp_path / "source"), tmp_path / "quantized", "nvfp4")
    bundle = export_bundle(tmp_path / "quantized", tmp_path / "bundle").out
    rounded = Pair(bundle)
    rounded.step("prefill", [20, 100, 3])
    first = "conv.backbone.layers.0"
    np.testing.assert_allclose(rounded.lowered.state[first], rounded.portable.state()[first], **CLOSE)
    exact = Pair(bundle, rounds=False)
    exact.step("prefill", [20, 100, 3])
    assert np.abs(exact.lowered.state[first] - exact.portable.state()[first]).max() > 0.01


def test_int4_weights(tmp_path):
    """Weights that INT4 holds exactly give the same results in it."""
    wide = {"hidden_size": 64, "moe_intermediate_size": 32, "moe_shared_expert_intermediate_size": 96}
    save_checkpoint(reference_model(hybrid_override_pattern="M*E", **wide), tmp_path / "checkpoint")
    path = tmp_path / "checkpoint" / "model.safetensors"
    tensors = load_file(path)
    for name, tensor in tensors.items():
        if name.endswith("proj.weight") or name == "lm_head.weight":
            tensors[name] = rounded_to_int4(tensor)
    save_file(tensors, path, metadata={"format": "pt"})
    pair = Pair(export_bundle(tmp_path / "checkpoint", tmp_path / "bundle").out, sms=(80,), convert="int4")
    assert any(w.dtype == "I4" for w in pair.lowered.table.weights.values())
    check_sequence(pair)


def rounded_to_int4(weight: np.ndarray) -> np.ndarray:
    """The values of a weight's INT4 codes."""
    if not int4.fits(weight.shape[1]):
        return weight
    block = int4.block_of(weight.shape[1])
    packed, scales = int4.encode(weight, block, np.float32)
    nibbles = np.stack([packed & 15, packed >> 4], axis=-1).reshape(weight.shape).astype(np.int8)
    codes = np.where(nibbles > 7, nibbles - 16, nibbles)
    return codes.astype(np.float32) * np.repeat(scales, block, axis=1)


def test_int4_codes_are_the_nearest():
    weight = np.random.default_rng(0).standard_normal((5, 192)).astype(np.float32)
    weight[1] = 0
    error = np.abs(rounded_to_int4(weight) - weight)
    assert (error <= np.abs(weight).reshape(5, 3, 64).max(-1).repeat(64, -1) / 14 * 1.0001).all()
    assert (int4.encode(weight, 64, np.float32)[1] > 0).all()
    with pytest.raises(ValueError, match="1 values are NaN"):
        int4.encode(np.full((1, 64), [np.nan] + [0] * 63, np.float32), 64, np.float32)


@pytest.mark.parametrize(
    ("sms", "experts", "mamba"),
    [
        ((120,), "F4_E2M1", "F8_E4M3"),
        ((89,), "I4", "F8_E4M3"),
        ((86,), "I4", "BF16"),
        ((80, 121), "I4", "BF16"),
    ],
)
def test_forms_by_gpu(sms, experts, mamba, tmp_path_factory, quantized_demo):
    model = onnx.load(quantized_demo / "target.onnx", load_external_data=False)
    table = WeightTable(stored_tensors([model]), sms)
    lower(model, phases_of(2, 64)[0], table)
    found = {w.name: w.dtype for w in table.weights.values()}
    assert {t for n, t in found.items() if "experts.up_proj" in n and "shared" not in n} >= {experts}
    assert {t for n, t in found.items() if "layers.0.mixer.in_proj" in n} >= {mamba}


@pytest.fixture(scope="module")
def quantized_demo(tmp_path_factory) -> Path:
    from nemo_build.export.quantize.quantizer import quantize_checkpoint
    from nemo_build.export.quantize.recipe import load_recipe

    directory = tmp_path_factory.mktemp("rtx-quantized")
    sequences = [list(range(3, 60))]
    quantize_checkpoint(
        CHECKPOINT, directory / "q", load_recipe("lightning"), sequences=sequences, sequences_source="test"
    )
    return export_bundle(directory / "q", directory / "bundle").out


def test_lowering_names_what_it_cannot_do(tiny_bundle):
    model = onnx.load(tiny_bundle / "target.onnx", load_external_data=False)
    (attention,) = (n for n in model.graph.node if n.op_type == "CachedAttention")
    attention.op_type = "Unheard"
    table = WeightTable(stored_tensors([model]), (120,))
    with pytest.raises(UserError, match=r"Unheard at .* not known"):
        lower(model, phases_of(2, 64)[0], table)


def test_lowering_leaves_the_portable_graph_alone_and_is_deterministic(tiny_bundle, tmp_path):
    shutil.copy(tiny_bundle / "target.onnx", tmp_path)
    model = onnx.load(tmp_path / "target.onnx", load_external_data=False)
    before = model.SerializeToString(deterministic=True)
    made = [
        lower(model, phase, WeightTable(stored_tensors([model]), (120,))).SerializeToString(
            deterministic=True
        )
        for _ in range(2)
        for phase in phases_of(2, 64)
    ]
    assert model.SerializeToString(deterministic=True) == before
    assert made[:2] == made[2:]
