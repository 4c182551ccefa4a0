# SPDX-License-Identifier: Apache-2.0
"""Graphs with kernel nodes compute what the portable graph computes; kernels run in Triton's interpreter."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from safetensors.torch import load_file, save_file

pytest.importorskip("triton")

from nemo_build.engines.gpu.ops import selective_scan
from nemo_build.engines.session import StepBatch
from nemo_build.engines.trt.emitter import BFLOAT16
from nemo_build.engines.trt.phases import PENDING
from nemo_build.export.exporter import export_bundle
from nemo_build.state import stays_pending

from .kernel_runner import LIGHTNING, KernelModel, bundle_of
from .lowered_pair import CLOSE, LoweredPair

CONTEXT = 160
STEPS = (("prefill", [9, 18, 0], None), ("decode", [1, 8, 3], None), ("decode", [0, 1, 2], [0, 5, 2]))
"""Phase, tokens of each row, and how many of those before are accepted."""

KINDS = {
    "groups-and-biases": {
        "mamba_num_heads": 4,
        "n_groups": 2,
        "time_step_limit": (0.05, 0.3),
        "use_bias": True,
        "mlp_bias": True,
        "mamba_proj_bias": True,
    },
    "latent-experts-in-groups": {
        "hybrid_override_pattern": "EM",
        "moe_latent_size": 16,
        "n_routed_experts": 8,
        "n_group": 4,
        "topk_group": 2,
        "norm_topk_prob": False,
    },
    "tied-no-conv-bias": {
        "hybrid_override_pattern": "M*",
        "use_conv_bias": False,
        "tie_word_embeddings": True,
    },
}


@pytest.fixture(autouse=True)
def short_chunks(monkeypatch):
    """So that prompts of a few tokens are of several chunks."""
    monkeypatch.setattr(selective_scan, "SCAN_CHUNK", 16)


@pytest.fixture(scope="module")
def bundle(tmp_path_factory) -> Path:
    return bundle_of(tmp_path_factory.mktemp("kernels"))


@pytest.fixture(scope="module")
def quantized(tmp_path_factory) -> Path:
    return bundle_of(tmp_path_factory.mktemp("lightning"), LIGHTNING)


class Pair(LoweredPair):
    """Lowered graphs of a bundle beside the portable one; options are those of :class:`KernelModel`."""

    def __init__(self, bundle: Path, graph: str = "target", *, slots: int = 3, **options) -> None:
        lowered = KernelModel(bundle, graph, slots=slots, context=CONTEXT, **options)
        super().__init__(lowered, bundle, slots=slots, context=CONTEXT)


def check_sequence(pair: Pair) -> None:
    """Prompts in chunks, single tokens, verification with rollback, rows without tokens, all kinds in one step."""
    pair.check("prefill", [5, 20, 3])
    pair.check("decode", [1, 8, 3], [0, 0, 0])
    pair.check("decode", [2, 1, 0], [0, 5, 0])
    pair.check("prefill", [8, 9, 1], [2, 0, 2])
    pair.check("decode", [1, 0, 1], [8, 0, 0])


def test_every_kind_of_block(bundle):
    check_sequence(Pair(bundle))


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_every_option(kind, tmp_path):
    pair = Pair(bundle_of(tmp_path, **KINDS[kind]))
    check_sequence(pair)
    pair.check("prefill", [0, 37, 2])
    pair.check("decode", [5, 0, 1], [0, 0, 2])


@pytest.mark.slow
@pytest.mark.parametrize("graph", ["target", "mtp"])
def test_a_wider_model_and_its_mtp_module(graph, tiny_bundle):
    check_sequence(Pair(tiny_bundle, graph))


@pytest.mark.parametrize("drafted", [3, *(pytest.param(n, marks=pytest.mark.slow) for n in (2, 5, PENDING))])
def test_rollback_to_every_number_of_accepted_tokens(drafted, tmp_path):
    pair = Pair(bundle_of(tmp_path, hybrid_override_pattern="M*"), slots=1)
    for accepted in range(drafted + 1):
        pair.check("decode", [drafted])
        pair.check("decode", [1], [accepted])
    pair.check("decode", [drafted])
    pair.check("prefill", [20], [drafted])


def test_a_slot_needs_no_reset(bundle):
    pair = Pair(bundle)
    for state in pair.lowered.state.values():
        state[:] = 1e3
    got, want = pair.step("prefill", [5, 20, 2])
    np.testing.assert_allclose(got, want, **CLOSE)


def test_padding_leaves_numbers_in_caches(bundle):
    """Kernels leave what they do not compute as it was; in a cache it would reach other rows through a zero weight."""
    pair = Pair(bundle)
    pair.step("prefill", [3, 17, 0])
    assert np.isnan(pair.hidden[~pair.valid]).any()
    assert all(np.isfinite(state).all() for state in pair.lowered.state.values())


@pytest.mark.parametrize("slots", [1, 3])
def test_both_ways_through_the_experts(slots, tmp_path):
    """With one slot there are no more pairs in a step than experts."""
    pair = Pair(bundle_of(tmp_path, hybrid_override_pattern="E", n_routed_experts=16), slots=slots)
    launches = [use.launches for use in pair.lowered.tables["decode"].uses.values()]
    assert (("step_up",) in launches) == (slots == 1)
    pair.check("decode", [8, 1, 0][:slots])
    pair.check("decode", [1, 3, 2][:slots], [3, 0, 0][:slots])


def test_quantized_weights(quantized):
    """In a model this small, no sum comes so near to another code that it is rounded to that."""
    pair = Pair(quantized)
    formats = {w.describe().get("format") for w in pair.lowered.weights.weights.values()}
    assert formats >= {"nvfp4", "fp8"}
    launches = {use.launches for use in pair.lowered.tables["decode"].uses.values()}
    assert {("round",), ("codes_16", "tile_16"), ("tile_16",), ("up_16",)} <= launches
    for step in STEPS:
        pair.check(*step)


def test_weights_without_rounding_are_exact(tmp_path):
    pair = Pair(bundle_of(tmp_path, "w4a16"))
    for step in STEPS:
        pair.check(*step)


@pytest.mark.parametrize("recipe", ["fp8", pytest.param("nvfp4", marks=pytest.mark.slow)])
@pytest.mark.parametrize("slots", [1, 3])
def test_rounded_inputs_of_experts(recipe, slots, tmp_path):
    """By each expert's own scale, both ways. In one layer, no sum comes so near to another code."""
    bundle_of(tmp_path, recipe, hybrid_override_pattern="E", n_routed_experts=16)
    path = tmp_path / "quantized" / "model.safetensors"
    stored = load_file(path)
    for name in (n for n in stored if ".experts." in n and n.endswith("input_scale")):
        stored[name] = stored[name] * (1 + 0.1 * int(name.split(".experts.")[1].split(".")[0]))
    save_file(stored, path, metadata={"format": "pt"})
    pair = Pair(export_bundle(tmp_path / "quantized", tmp_path / "spread").out, slots=slots)
    launches = {use.launches for use in pair.lowered.tables["decode"].uses.values()}
    assert {("round_up",), ("round_down",)} < launches
    assert (("step_up",) in launches) == (slots == 1)
    for phase, tokens in (("prefill", 9), ("decode", 8), ("decode", 1)):
        got, want = pair.step(phase, [tokens, 2, 0][:slots])
        np.testing.assert_allclose(got, want, **CLOSE)


def test_rounding_can_be_switched_off(quantized):
    pair = Pair(quantized, rounds=False)
    launches = {use.launches for use in pair.lowered.tables["decode"].uses.values()}
    assert ("round",) not in launches
    pair.step("prefill", [5, 0, 2])
    first = "conv.backbone.layers.0"
    assert np.abs(pair.lowered.state[first] - pair.portable.state()[first]).max() > 1e-3


@pytest.mark.parametrize(
    ("recipe", "close"),
    [pytest.param("w4a16", 0.025, marks=pytest.mark.slow), (LIGHTNING, 0.1)],
    ids=["exact", "rounded"],
)
def test_bfloat16(recipe, close, tmp_path):
    """What engines have: the same within the rounding of activations. All experts are chosen, so none by a hair."""
    pair = Pair(bundle_of(tmp_path, recipe, num_experts_per_tok=4), compute=BFLOAT16)
    for phase, lengths, accepted in STEPS:
        got, want = pair.step(phase, lengths, accepted)
        assert np.std(got - want) < close * np.std(want)


@pytest.mark.parametrize("recipe", ["fp8", pytest.param("w4a16", marks=pytest.mark.slow)])
def test_verified_tokens_are_decoded_ones_to_the_bit(recipe, tmp_path):
    """In all that kernels compute: hidden states, and the state once the tokens are committed."""
    bundle = bundle_of(tmp_path, recipe, hybrid_override_pattern="MM")
    tokens = np.random.default_rng(0).integers(3, 90, 6).tolist()

    def decode(widths: list[int]) -> tuple[np.ndarray, dict[str, np.ndarray]]:
        model, past, pending, hidden = KernelModel(bundle, slots=2), 0, 0, []
        for width in widths:
            beside = [7] * (3 if width == 1 else 0)  # another sequence's
            past += pending
            batch = StepBatch.of_rows(
                [beside, tokens[past : past + width]],
                past=[0, past],
                slots=range(2),
                accepted=[0, pending],
                logits="all",
            )
            hidden.append(model.step("decode", batch)[1][1, :width])
            past, pending = (past, width) if stays_pending(width, PENDING) else (past + width, 0)
        return np.concatenate(hidden), {n: s[1] for n, s in model.state.items()}

    want, state = decode([1] * 6)
    got, after = decode([2, 3, 1])
    np.testing.assert_array_equal(got, want)
    for name in (n for n in after if n.startswith("ssm.")):
        np.testing.assert_array_equal(after[name], state[name], err_msg=name)
