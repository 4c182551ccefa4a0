# SPDX-License-Identifier: Apache-2.0
"""What graphs with kernel nodes are made of: nodes, types, weights, and what is beside them. Nothing is run."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import pytest

pytest.importorskip("triton")

from nemo_build.demo import CHECKPOINT, DRAFTERS
from nemo_build.engines.gpu import weights as gpu_weights
from nemo_build.engines.gpu.kernel_nodes import KERNEL_DOMAIN, KernelTable, KernelUse, load_node, suited
from nemo_build.engines.gpu.lowering import kernel_states, lower_kernels, weight_inputs
from nemo_build.engines.gpu.ops import ONNX_TYPES, routed_experts
from nemo_build.engines.gpu.weights import ALIGNMENT, KernelWeights
from nemo_build.engines.trt.emitter import BFLOAT16, FLOAT
from nemo_build.engines.trt.lowering import LOGITS_SUM, TOKENS
from nemo_build.engines.trt.phases import DECODE, Phase, phases_of
from nemo_build.engines.weights import external_entries, place, stored_tensors, write_packed
from nemo_build.errors import BundleError, UserError
from nemo_build.export.exporter import export_bundle
from nemo_build.plugins.gpu.stored import as_words

from .kernel_runner import LIGHTNING, SMALL, bundle_of, contents, types_of
from .quantized import tensors
from .tiny import reference_model, save_checkpoint

CONTEXT = 160


@pytest.fixture(scope="module")
def quantized(tmp_path_factory) -> Path:
    return bundle_of(tmp_path_factory.mktemp("lightning"), LIGHTNING)


def test_which_way_through_the_experts():
    phases = {n: Phase("decode", n, 64, 8, 8, 72) for n in (1, 2, 3)}
    ways = [routed_experts.is_token_by_token(p, 128, 6) for p in phases.values()]
    assert ways == [True, True, False]
    assert not routed_experts.is_token_by_token(replace(phases[1], name="prefill"), 128, 6)


def test_graphs_of_drafters(tmp_path):
    """They have no state but caches, and need no kernels where they are not quantized; types fit throughout."""
    bundle = export_bundle(CHECKPOINT, tmp_path / "bundle", drafts=list(DRAFTERS.values())).out
    for name in ("dflash", "dflash_context", "dspark_markov"):
        model = onnx.load(bundle / f"{name}.onnx", load_external_data=False)
        for phase in phases_of(2, CONTEXT):
            kernels = KernelTable()
            types = types_of(lower_kernels(model, phase, KernelWeights(stored_tensors([model])), kernels))
            assert not kernels.uses
            assert all(types[o.name][0] for o in model.graph.output)


def lowered_of(bundle: Path, phase: str, compute: int = BFLOAT16, slots: int = 4):
    model = onnx.load(bundle / "target.onnx", load_external_data=False)
    table, kernels = KernelWeights(stored_tensors([model]), compute=compute), KernelTable()
    phases = {p.name: p for p in phases_of(slots, CONTEXT)}
    return model, lower_kernels(model, phases[phase], table, kernels), table, kernels, phases[phase]


@pytest.mark.parametrize("phase", ["decode", "prefill"])
@pytest.mark.parametrize("compute", [BFLOAT16, FLOAT])
def test_kernel_nodes_get_what_their_kernels_take(phase, compute, quantized):
    """Types and known dimensions of every value that a kernel node reads, and every weight's."""
    _, lowered, table, kernels, _ = lowered_of(quantized, phase, compute)
    types = types_of(lowered)
    found = [n for n in lowered.graph.node if n.domain == KERNEL_DOMAIN]
    assert {n.op_type for n in found} == set(kernels.uses)
    for node in found:
        made = load_node(kernels.uses[node.op_type])
        assert not node.attribute
        for names, described in ((node.input, made.inputs), (node.output, made.outputs)):
            for name, tensor in zip(names, described, strict=True):
                dtype, shape = types[name]
                assert dtype == ONNX_TYPES[tensor.dtype], (node.name, tensor.name)
                assert len(shape) == len(tensor.shape), (node.name, tensor.name)
                pairs = [(a, b) for a, b in zip(shape, tensor.shape, strict=True) if a and isinstance(b, int)]
                assert all(a == b for a, b in pairs), (node.name, tensor.name, shape, tensor.shape)
                if name in table.weights:
                    assert tensor.shape == table.weights[name].shape


@pytest.mark.parametrize("phase", ["decode", "prefill"])
def test_the_contract_of_a_graph(phase, quantized):
    model, lowered, table, kernels, sizes = lowered_of(quantized, phase)
    states = kernel_states(model, sizes)
    inputs = [i.name for i in lowered.graph.input]
    own = [i.name for i in model.graph.input if i.name != "slots"]
    assert inputs[: len(own)] == own
    assert inputs[len(own) :] == weight_inputs(lowered, table)
    choices = [TOKENS, LOGITS_SUM] if phase == "decode" else []
    assert [o.name for o in lowered.graph.output] == [*(o.name for o in model.graph.output), *choices]
    assert not any(map(external_entries, lowered.graph.initializer))
    assert all(np.prod(t.dims) < 1000 for t in lowered.graph.initializer)
    types, dtypes = types_of(lowered), {BFLOAT16: "bfloat16", FLOAT: "float32"}
    for state in states:
        for name in (state.name, state.output):
            dtype, shape = types[name]
            assert (dtypes[dtype], shape[1:]) == (state.dtype, state.shape[1:])
    assert {s.kind: s.dtype for s in states} == {
        **{"conv": "bfloat16", "key": "bfloat16", "value": "bfloat16"},
        **{"ssm": "float32", "ssm_pending": "float32"},
    }
    in_place = {
        out: node.input[[t.name for t in made.inputs].index(tensor.alias)]
        for node in lowered.graph.node
        if node.domain == KERNEL_DOMAIN
        for made in [load_node(kernels.uses[node.op_type])]
        for out, tensor in zip(node.output, made.outputs, strict=True)
        if tensor.alias
    }
    assert in_place == {s.output: s.name for s in states if s.kind not in ("key", "value")}


def test_state_is_overwritten_after_it_is_read(quantized):
    """In the order of the nodes, and because the one that writes the ring reads what the others make of it."""
    for phase in ("decode", "prefill"):
        _, lowered, _, _, _ = lowered_of(quantized, phase)
        ring = "ssm_pending.backbone.layers.0"
        readers = [i for i, n in enumerate(lowered.graph.node) if ring in n.input]
        (writer,) = (i for i, n in enumerate(lowered.graph.node) if f"{ring}.out" in n.output)
        assert len(readers) == 2
        assert readers[-1] == writer
        after = lowered.graph.node[writer].input[-1]
        assert after.endswith(".y")


def test_graphs_of_an_engine_share_weights_and_the_portable_one_stays(quantized):
    model = onnx.load(quantized / "target.onnx", load_external_data=False)
    before = model.SerializeToString(deterministic=True)
    table, made = KernelWeights(stored_tensors([model])), []
    for _ in range(2):
        for phase in phases_of(4, CONTEXT):
            kernels = KernelTable()
            lowered = lower_kernels(model, phase, table, kernels)
            made.append((lowered.SerializeToString(deterministic=True), kernels.to_json()))
            assert set(weight_inputs(lowered, table)) == set(table.weights)
    assert made[:2] == made[2:]
    assert model.SerializeToString(deterministic=True) == before


def test_uses_of_kernels_come_back_from_json(quantized):
    _, _, _, kernels, _ = lowered_of(quantized, DECODE)
    found = [KernelUse.from_json(u) for u in json.loads(json.dumps(kernels.to_json(), allow_nan=False))]
    assert found == list(kernels.uses.values())
    assert [load_node(use).name for use in found] == [n.name for n in kernels.nodes()] == list(kernels.uses)
    rounded = next(use for use in found if use.launches[0] == "codes_16")
    assert suited(rounded, 120)[0].name == "codes_16"
    assert suited(rounded, 80)[0].name == "tile_16"
    with pytest.raises(BundleError, match="other kernels of BlockLinear"):
        load_node(replace(rounded, node="BlockLinear_of_before"))


def test_words_are_the_checkpoints_bytes(quantized, tmp_path):
    _, _, table, _, _ = lowered_of(quantized, DECODE)
    stored = tensors(quantized.parent / "quantized")
    prefix = "backbone.layers.2.mixer.experts"
    for suffix, kind in (("weight", "codes"), ("weight_scale", "scales")):
        each = [stored[f"{prefix}.{e}.up_proj.{suffix}"].view(np.uint8) for e in range(4)]
        got = contents(table.weights[f"{prefix}.up_proj.weight.nvfp4.{kind}"], quantized)
        np.testing.assert_array_equal(got, as_words(np.stack(each)))
    got = contents(table.weights[f"{prefix}.up_proj.weight.nvfp4.factor"], quantized)
    want = [stored[f"{prefix}.{e}.up_proj.weight_scale_2"] for e in range(4)]
    np.testing.assert_array_equal(got, np.array(want, np.float32).reshape(-1))

    placed = place(table.weights.values(), ALIGNMENT)
    write_packed(placed, quantized, tmp_path / "weights.bin")
    data = (tmp_path / "weights.bin").read_bytes()
    for entry in placed:
        assert entry.offset % ALIGNMENT == 0
        held = contents(entry.weight, quantized).tobytes()
        assert data[entry.offset : entry.offset + len(held)] == held


def test_weights_stream(quantized, monkeypatch):
    """Contents do not depend on the size of a piece, and no piece is larger than asked for."""
    _, _, table, _, _ = lowered_of(quantized, DECODE)
    whole = {n: contents(w, quantized).tobytes() for n, w in table.weights.items()}
    monkeypatch.setattr(gpu_weights, "_CHUNK", 64)
    for name, weight in table.weights.items():
        pieces = [bytes(p) for p in weight.chunks(quantized)]
        assert b"".join(pieces) == whole[name]
        if weight.dtype == "I32":
            assert max(map(len, pieces)) <= 64


def test_bytes_that_do_not_fill_the_last_word(tmp_path):
    """Three rows of 48 columns have 9 block scales, hence three words."""
    source = tmp_path / "stored"
    source.write_bytes(bytes(range(81)))
    stored = gpu_weights.StoredTensor
    projection = gpu_weights.StoredProjection(
        (stored("w", "U8", (3, 24), "stored", 0, 72), stored("s", "F8_E4M3", (3, 3), "stored", 72, 9)),
        "nvfp4",
        3,
        48,
    )
    weight = gpu_weights.WordsWeight("scales", (projection, projection), 1)
    assert (weight.shape, weight.nbytes) == ((5,), 20)
    got = contents(weight, tmp_path)
    np.testing.assert_array_equal(got, as_words(np.array([*range(72, 81)] * 2, np.uint8)))


def test_parameters_are_float32(tmp_path):
    """What the portable graph casts on the way is cast at build."""
    import torch

    model = reference_model(dtype=torch.bfloat16, **{**SMALL, "hybrid_override_pattern": "ME"})
    save_checkpoint(model, tmp_path / "checkpoint")
    bundle = export_bundle(tmp_path / "checkpoint", tmp_path / "bundle").out
    _, lowered, table, _, _ = lowered_of(bundle, DECODE)
    inputs = {i.name for i in lowered.graph.input}
    casts = {n.input[0] for n in lowered.graph.node if n.op_type == "Cast"}
    assert not casts & set(table.weights)
    stored = tensors(tmp_path / "checkpoint")
    for name in ("backbone.layers.0.norm.weight", "backbone.layers.0.mixer.conv1d.weight"):
        assert f"{name}.float32" in inputs
        assert name not in inputs
        got = contents(table.weights[f"{name}.float32"], bundle)
        np.testing.assert_array_equal(got, stored[name].astype(np.float32))


def test_what_no_kernel_does_is_told_at_once(tmp_path):
    """Widths that do not divide into blocks are a hand-made checkpoint's; each kind of problem is named once."""
    bundle = bundle_of(tmp_path, "w4a16")
    model = onnx.load(bundle / "target.onnx", load_external_data=False)
    (choice,) = (n for n in model.graph.node if n.op_type == "TopK")
    choice.input[1] = "computed"
    table = KernelWeights(stored_tensors([model]))
    for name, tensor in table.tensors.items():
        if name.endswith(("in_proj.weight", "shared_experts.up_proj.weight")):
            table.tensors[name] = replace(tensor, shape=(tensor.shape[0], tensor.shape[1] - 1))
    with pytest.raises(UserError) as caught:
        lower_kernels(model, phases_of(2, 64)[0], table, KernelTable())
    linear, experts = caught.value.problems
    assert "multiple of 16" in linear
    assert "and 1 more" in linear
    assert "no constant of the graph" in experts
