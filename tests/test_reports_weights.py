# SPDX-License-Identifier: Apache-2.0
"""Public bug reports of other runtimes about weights, their formats and their names, as behaviours of this one.

Reports whose behaviour is tested elsewhere:

- vllm#52308, kernels on experts of every format, op by op: ``test_plugins.test_routed_expert_formats``
- mlx-node#120, every code at every scale: ``test_codecs.test_kernels_decode_every_code_at_every_scale``
- Automodel#1512 and NeMo-RL#4211, other misspelt names: ``test_ledger.test_golden_errors``
- vmlx-swift#234, hidden states before the final norm: ``test_draft_export.test_choices_of_the_mtp_module``
- vmlx-swift#234, hidden states after it: ``test_parity.test_mtp_module``
- sglang#21138 and vllm#52107, acceptance of trained weights: ``test_speculation.test_mtp_is_worth_it``
- vllm#43342, the MTP module quantized on request: ``test_quantize.test_quantized_mtp_module``

Not applicable, since this engine runs on a CPU, in one process and without tensor parallelism:

- omlx#2844: which widths divide among ranks; here a projection is never split
- vllm#34476 as reported: scales split among ranks unlike the weight; that they stay with their rows is tested below
- flashinfer#4486: NaN of a CUDA kernel of a GPU generation
- vllm#55406: replay of CUDA graphs
- recipes#836 and dgx-spark-playbooks#107: attention backends of a GPU for FP8 caches
- ollama#17692: stalls of a GPU driver
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto
from safetensors.torch import load_file, save_file

from nemo_build.demo import CHECKPOINT
from nemo_build.engines.build import BuildOptions, build_engine
from nemo_build.engines.ort import OrtSession
from nemo_build.engines.session import StepBatch
from nemo_build.errors import CheckpointError
from nemo_build.export.checkpoint import Checkpoint
from nemo_build.export.exporter import export_bundle
from nemo_build.export.models import GraphOptions
from nemo_build.plugins import native
from nemo_build.plugins.codecs import fp8, nvfp4
from nemo_build.runtime import Engine, SamplingParams

from .draft_reference import CONFIGS, DraftReference, save_draft
from .quantized import TOKENS, make_mtp_source, run, tensors
from .tiny import feed, reference_logits, reference_model, save_checkpoint

OPTIONS = BuildOptions(max_sequences=1, max_context=64, activations="float32")
SIZES = {"slots": 1, "context": 64, "threads": 1}
LAYOUTS = ["bundle", "plain", *(["packed", "in-place"] if native.library() is not None else [])]
"""How a graph gets its weights: from the checkpoint, or from an engine of each kind."""


def laid_out(bundle: Path, layout: str, out: Path, **options: Any) -> Path:
    """The bundle, or an engine of it."""
    if layout == "bundle":
        return bundle
    return build_engine(bundle, out, options=replace(OPTIONS, weights=layout, **options)).out


def logits(directory: Path, tokens: list[int] = TOKENS[0]) -> np.ndarray:
    """Of all tokens of a sequence."""
    return feed(OrtSession(directory / "target.onnx", **SIZES), {0: tokens}, {})[0]


def change(checkpoint: Path, edit: Callable[[dict[str, torch.Tensor]], Any]) -> None:
    """Edit the tensors of a checkpoint in one file."""
    path = checkpoint / "model.safetensors"
    stored = load_file(path)
    edit(stored)
    save_file(stored, path, metadata={"format": "pt"})


def quantize(stored: dict[str, torch.Tensor], module: str, form: str) -> np.ndarray:
    """Store a projection in a format; the values that this stands for."""
    weight = stored[f"{module}.weight"].float().numpy()
    if form == "fp8":
        coded = fp8.encode(weight)
        stored[f"{module}.weight"] = torch.from_numpy(coded.codes).view(torch.float8_e4m3fn)
        stored[f"{module}.weight_scale"] = torch.tensor(float(coded.scale))
        return coded.decode()
    packed = nvfp4.encode(weight)
    stored[f"{module}.weight"] = torch.from_numpy(packed.codes)
    stored[f"{module}.weight_scale"] = torch.from_numpy(packed.scales).view(torch.float8_e4m3fn)
    stored[f"{module}.weight_scale_2"] = torch.tensor(float(packed.scale_2))
    return packed.decode()


def nodes_of(directory: Path, graph: str) -> list[onnx.NodeProto]:
    """The nodes of a graph."""
    return list(onnx.load(directory / f"{graph}.onnx", load_external_data=False).graph.node)


def attribute(node: onnx.NodeProto, name: str) -> str:
    """A text attribute of a node."""
    return next(a.s.decode() for a in node.attribute if a.name == name)


# --- formats ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("form", ["nvfp4", "fp8"])
def test_scales_of_a_fused_input_projection_stay_with_their_rows(tmp_path, form, layout):
    """vllm#34476: z, x, B, C and dt differ in size by orders, and their boundaries lie within panels of rows."""
    model = reference_model(hybrid_override_pattern="M*", mamba_num_heads=5, n_groups=1)
    save_checkpoint(model, tmp_path / "checkpoint")
    sizes = [40, 40, 16, 16, 5]
    factor = torch.repeat_interleave(torch.tensor([1.0, 30.0, 0.02, 4.0, 0.3]), torch.tensor(sizes))[:, None]
    mixer = model.model.layers[0].mixer
    assert mixer.in_proj.weight.shape == (sum(sizes), 48)

    def edit(stored: dict[str, torch.Tensor]) -> None:
        name = "backbone.layers.0.mixer.in_proj"
        stored[f"{name}.weight"] *= factor
        with torch.no_grad():
            mixer.in_proj.weight.copy_(torch.from_numpy(quantize(stored, name, form)))

    change(tmp_path / "checkpoint", edit)
    bundle = export_bundle(tmp_path / "checkpoint", tmp_path / "bundle").out
    got = logits(laid_out(bundle, layout, tmp_path / "engine"))
    np.testing.assert_allclose(got, reference_logits(model, TOKENS[0]), atol=1e-4, rtol=0)


def test_experts_that_a_recipe_leaves_out_are_loaded_unquantized(tmp_path):
    """vllm#43342, vllm#53790: beside quantized experts those of the MTP module keep their dtype and their shapes."""
    source = make_mtp_source(tmp_path / "source", torch.bfloat16)
    run(source, tmp_path / "quantized", "lightning")
    excluded = json.loads((tmp_path / "quantized" / "hf_quant_config.json").read_text())["quantization"]
    assert any(name.startswith("mtp") for name in excluded["exclude_modules"])
    stored, before = Checkpoint.open(tmp_path / "quantized").tensors, Checkpoint.open(source).tensors
    mtp = {n for n in before if n.startswith("mtp.")}
    assert mtp == {n for n in stored if n.startswith("mtp.")}
    assert all((stored[n].dtype, stored[n].shape) == (before[n].dtype, before[n].shape) for n in mtp)

    hidden = np.random.default_rng(0).standard_normal((1, 20, 48)).astype(np.float32)
    batch = StepBatch.of_rows([TOKENS[0][:20]], past=[0], slots=[0], hidden_in=hidden)
    outputs = []
    for name in ("source", "quantized"):
        bundle = export_bundle(tmp_path / name, tmp_path / f"{name}.bundle").out
        engine = build_engine(bundle, tmp_path / f"{name}.engine", options=OPTIONS).out
        outputs.append(OrtSession(engine / "mtp.onnx", hidden=True, **SIZES).step(batch).hidden)
    np.testing.assert_array_equal(*outputs)
    for graph, form in (("target", "nvfp4"), ("mtp", "plain")):
        experts = [n for n in nodes_of(bundle, graph) if n.op_type == "RoutedExperts"]
        assert experts
        assert {attribute(n, "weight_format") for n in experts} == {form}


@pytest.mark.parametrize("activations", ["float32", *["bfloat16"] * (native.library() is not None)])
def test_the_router_is_computed_in_float32(tmp_path, activations):
    """vllm#32875: scores and biases that bfloat16 cannot tell apart, in checkpoints and engines of any precision."""
    model = reference_model(hybrid_override_pattern="ME*E")
    rng = np.random.default_rng(1)
    gates = [layer.mixer.gate for layer in model.model.layers if hasattr(layer.mixer, "gate")]
    for gate in gates:
        gate.weight.data *= 1e-3
        steps = torch.from_numpy(rng.permutation(8).astype(np.float32))
        gate.e_score_correction_bias.copy_(8 + 1e-3 * steps)  # bfloat16 has 1/16 between them
    save_checkpoint(model, tmp_path / "checkpoint")
    bundle = export_bundle(tmp_path / "checkpoint", tmp_path / "bundle").out
    want = reference_logits(model, TOKENS[0])
    for gate in gates:
        gate.e_score_correction_bias.copy_(gate.e_score_correction_bias.bfloat16())
    coarse = np.linalg.norm(reference_logits(model, TOKENS[0]) - want, axis=-1)
    engine = build_engine(bundle, tmp_path / "engine", options=replace(OPTIONS, activations=activations)).out
    error = np.linalg.norm(logits(engine) - want, axis=-1)
    assert np.median(coarse) > 0.2 * np.median(np.linalg.norm(want, axis=-1)), "it would show"
    assert np.quantile(error, 0.9) < (0.1 if activations == "bfloat16" else 1e-3) * np.median(coarse)
    for directory in (bundle, engine):
        graph = onnx.load(directory / "target.onnx", load_external_data=False).graph
        router = [n for n in graph.node if "/router/" in n.name]
        assert sum(n.op_type == "MatMul" for n in router) == 2
        assert {n.domain for n in router} == {""}
        to = [a.i for n in router if n.op_type == "Cast" for a in n.attribute if a.name == "to"]
        assert not {TensorProto.BFLOAT16, TensorProto.FLOAT16}.intersection(to)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_experts_without_a_gate_are_not_taken_for_gated_ones(tmp_path, layout):
    """vllm#52308: down(relu(up(x))^2) with NVFP4 weights, against transformers with the values they stand for."""
    wide = {"moe_intermediate_size": 32, "moe_shared_expert_intermediate_size": 48}
    model = reference_model(hybrid_override_pattern="EM*E", **wide)
    save_checkpoint(model, tmp_path / "checkpoint")

    def edit(stored: dict[str, torch.Tensor]) -> None:
        for i in (0, 3):
            experts = model.model.layers[i].mixer.experts
            for projection in ("up_proj", "down_proj"):
                for e in range(8):
                    name = f"backbone.layers.{i}.mixer.experts.{e}.{projection}"
                    values = torch.from_numpy(quantize(stored, name, "nvfp4"))
                    getattr(experts, projection).data[e] = values

    change(tmp_path / "checkpoint", edit)
    bundle = export_bundle(tmp_path / "checkpoint", tmp_path / "bundle").out
    got = logits(laid_out(bundle, layout, tmp_path / "engine"))
    np.testing.assert_allclose(got, reference_logits(model, TOKENS[0]), atol=1e-4, rtol=0)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_scale_of_a_tensor_is_not_folded_into_those_of_its_blocks(tmp_path, layout):
    """mlx-node#120: block scales times the tensor's scale lie below the smallest number of E4M3."""
    model = reference_model(hybrid_override_pattern="M*")
    model.lm_head.weight.data *= 1e-4 * torch.rand(96, 48).exp2()
    save_checkpoint(model, tmp_path / "checkpoint")

    def edit(stored: dict[str, torch.Tensor]) -> None:
        model.lm_head.weight.data = torch.from_numpy(quantize(stored, "lm_head", "nvfp4"))
        product = stored["lm_head.weight_scale"].float() * stored["lm_head.weight_scale_2"]
        assert product.max() < 2.0**-9

    change(tmp_path / "checkpoint", edit)
    bundle = export_bundle(tmp_path / "checkpoint", tmp_path / "bundle").out
    want = reference_logits(model, TOKENS[0])
    got = logits(laid_out(bundle, layout, tmp_path / "engine"))
    np.testing.assert_allclose(got, want, atol=1e-5 * np.abs(want).max(), rtol=0)
    (node,) = [n for n in nodes_of(bundle, "target") if n.op_type == "BlockLinear" and "lm_head" in n.name]
    assert [n for n in node.input if n.startswith("lm_head")] == [
        "lm_head.weight",
        "lm_head.weight_scale",
        "lm_head.weight_scale_2",
    ]


# --- drafters ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def target(tmp_path_factory) -> tuple[Path, torch.Tensor, torch.Tensor]:
    """A target whose head is stored in NVFP4: its checkpoint, embeddings and the head's values."""
    model = reference_model(hybrid_override_pattern="MEM*E*")
    directory = tmp_path_factory.mktemp("target") / "checkpoint"
    save_checkpoint(model, directory)
    values: list[np.ndarray] = []
    change(directory, lambda stored: values.append(quantize(stored, "lm_head", "nvfp4")))
    return directory, model.model.embeddings.weight.detach(), torch.from_numpy(values[0])


BLOCK = [7, 90, 90, 90]


def block_logits(directory: Path, kind: str) -> np.ndarray:
    """Of a drafter's block without context."""
    session = OrtSession(directory / f"{kind}.onnx", **SIZES)
    return session.step(StepBatch.of_rows([BLOCK], past=[0], slots=[0], logits="all")).logits


def expected_block(reference: DraftReference) -> np.ndarray:
    """The same in PyTorch."""
    return reference.block(torch.zeros(0, 48 * len(reference.taps)), torch.tensor(BLOCK))[0].numpy()


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kind", ["dflash", "dspark"])
def test_a_drafter_without_a_head_uses_the_quantized_one_of_the_target(target, tmp_path, kind, layout):
    """sglang#35354: DSpark and DFlash on a target whose head is stored in NVFP4."""
    checkpoint, *tables = target
    reference = DraftReference(CONFIGS[kind], *tables)
    save_draft(reference, tmp_path / "draft", dtype=torch.bfloat16)
    assert "lm_head.weight" not in reference.w
    bundle = export_bundle(checkpoint, tmp_path / "bundle", drafts=[tmp_path / "draft"]).out
    got = block_logits(laid_out(bundle, layout, tmp_path / "engine"), kind)
    np.testing.assert_allclose(got, expected_block(reference), atol=1e-4, rtol=0)


def test_a_drafter_rounds_inputs_only_where_its_checkpoint_has_a_scale_for_them(target, tmp_path):
    """ggml-org/convert#16: quantized weights alone (W4A16) are computed with inputs as they are."""
    checkpoint, *tables = target
    reference = DraftReference(CONFIGS["dflash"], *tables)
    save_draft(reference, tmp_path / "draft", packed=("fc", "mlp"))
    want, found = expected_block(reference), {}
    for name in ("w4a16", "w4a4"):
        bundle = export_bundle(checkpoint, tmp_path / name, drafts=[tmp_path / "draft"]).out
        found[name] = block_logits(laid_out(bundle, LAYOUTS[-1], tmp_path / f"{name}.engine"), "dflash")
        rounding = [
            node.input[1]
            for graph in ("dflash", "dflash_context")
            for node in nodes_of(bundle, graph)
            if node.op_type == "BlockLinear" and attribute(node, "activation_format") != "none"
        ]
        assert rounding == ([] if name == "w4a16" else ["dflash.layers.1.mlp.up_proj.weight"])
        scale = {"layers.1.mlp.up_proj.input_scale": torch.tensor(2e-3)}
        change(tmp_path / "draft", lambda stored, scale=scale: stored.update(scale))
    np.testing.assert_allclose(found["w4a16"], want, atol=1e-4, rtol=0)
    assert np.abs(found["w4a4"] - want).max() > 1e-2, "rounding would show"


# --- names ------------------------------------------------------------------------------------------------------


def renamed(old: str, new: str) -> Callable[[dict[str, torch.Tensor]], None]:
    """An edit that renames."""

    def edit(stored: dict[str, torch.Tensor]) -> None:
        for name in [n for n in stored if n.startswith(old)]:
            stored[name.replace(old, new, 1)] = stored.pop(name)

    return edit


def gated(stored: dict[str, torch.Tensor]) -> None:
    """Give every expert, the shared ones too, and the feed-forward layer a gate projection."""
    for name in [n for n in stored if n.endswith("up_proj.weight")]:
        stored[name.replace("up_proj", "gate_proj")] = stored[name].clone()


def fused(stored: dict[str, torch.Tensor]) -> None:
    """Store gate and up projections of experts as one."""
    for name in [n for n in stored if ".experts." in n and n.endswith("up_proj.weight")]:
        stored[name] = torch.cat([stored[name], stored[name]])


NAMES: dict[str, tuple[Callable[[dict[str, torch.Tensor]], None], tuple[str, ...]]] = {
    "norm": (
        renamed("backbone.norm_f.", "backbone.norm."),
        ("missing: backbone.norm_f.weight", "unexpected: backbone.norm.weight"),
    ),
    "embedding": (
        renamed("backbone.embeddings.", "backbone.embedding."),
        (
            "missing: backbone.embeddings.weight",
            "unexpected: backbone.embedding.weight",
            "Misspelt? backbone.embedding.weight for backbone.embeddings.weight.",
        ),
    ),
    "names in memory": (
        renamed("backbone.", "model."),
        ("missing: backbone.embeddings.weight", "names transformers uses in memory"),
    ),
    "gates": (
        gated,
        (
            "unexpected: backbone.layers.{1,4}.mixer.experts.{0..7}.gate_proj.weight",
            "unexpected: backbone.layers.{1,4}.mixer.shared_experts.gate_proj.weight",
            "unexpected: backbone.layers.5.mixer.gate_proj.weight",
        ),
    ),
    "fused gates": (
        fused,
        ("wrong shape: ", "experts.{0..7}.up_proj.weight: expected [24, 48], found [48, 48]"),
    ),
}


@pytest.mark.parametrize("name", NAMES)
def test_names_of_other_exporters_are_refused_and_told(tiny_checkpoint, tmp_path, name):
    """Automodel#1512, NeMo-RL#4211, trl#6866, vllm#52308: norm_f, embeddings, and experts that have no gate."""
    edit, told = NAMES[name]
    shutil.copytree(tiny_checkpoint, tmp_path / "checkpoint")
    change(tmp_path / "checkpoint", edit)
    with pytest.raises(CheckpointError) as caught:
        export_bundle(tmp_path / "checkpoint", tmp_path / "bundle")
    assert [words for words in told if words not in str(caught.value)] == []
    assert not (tmp_path / "bundle").exists()


# --- MTP --------------------------------------------------------------------------------------------------------


def without(*parts: str) -> Callable[[dict[str, torch.Tensor]], None]:
    """An edit that removes what has all these parts in its name."""

    def edit(stored: dict[str, torch.Tensor]) -> None:
        for name in [n for n in stored if all(part in n for part in parts)]:
            del stored[name]

    return edit


MISSING = {
    "all of it": (without("mtp."), "missing: mtp.layers.1.mixer.experts.{0..7}.down_proj.weight"),
    "the projection": (without("mtp.", "eh_proj"), "missing: mtp.layers.0.eh_proj.weight [48, 96]"),
    "an expert": (without("mtp.", "experts.3.up"), "missing: mtp.layers.1.mixer.experts.3.up_proj.weight"),
    "the final norm": (without("mtp.", "final"), "missing: mtp.layers.1.final_layernorm.weight [48]"),
    "another place": (renamed("mtp.", "model.mtp."), 'Names begin with "model.", which must go.'),
}


@pytest.mark.parametrize("what", MISSING)
def test_a_module_without_its_weights_is_refused(tiny_checkpoint, tmp_path, what):
    """sglang#21138: an MTP module that the configuration promises has all its weights, or there is no engine."""
    edit, told = MISSING[what]
    shutil.copytree(tiny_checkpoint, tmp_path / "checkpoint")
    change(tmp_path / "checkpoint", edit)
    with pytest.raises(CheckpointError) as caught:
        export_bundle(tmp_path / "checkpoint", tmp_path / "bundle")
    assert told in str(caught.value)
    assert not (tmp_path / "bundle").exists()


def test_weights_of_a_module_that_is_not_configured_are_refused(tiny_checkpoint, tmp_path):
    """sglang#21138: weights that nothing would read are not dropped in silence."""
    shutil.copytree(tiny_checkpoint, tmp_path / "checkpoint")
    path = tmp_path / "checkpoint" / "config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps({n: v for n, v in config.items() if n != "num_nextn_predict_layers"}))
    with pytest.raises(CheckpointError, match=r"unexpected: mtp\.layers\.0\.eh_proj\.weight"):
        export_bundle(tmp_path / "checkpoint", tmp_path / "bundle")


def test_every_weight_of_the_module_has_a_say_in_what_it_drafts(tiny_checkpoint, tmp_path):
    """sglang#21138: whichever tensor of the MTP module is another one, its logits are others."""
    shutil.copytree(tiny_checkpoint, tmp_path / "checkpoint")
    bundle = export_bundle(tmp_path / "checkpoint", tmp_path / "bundle", weights="reference").out
    hidden = np.random.default_rng(0).standard_normal((1, 40, 48)).astype(np.float32)
    batch = StepBatch.of_rows([TOKENS[0]], past=[0], slots=[0], logits="all", hidden_in=hidden)

    def drafted() -> np.ndarray:
        folder = str(tmp_path / "checkpoint")
        return OrtSession(bundle / "mtp.onnx", weights_folder=folder, **SIZES).step(batch).logits

    checkpoint = Checkpoint.open(tmp_path / "checkpoint")
    names = [n for n in checkpoint.tensors if n.startswith("mtp.")]
    assert len(names) == 30
    before, stored = drafted(), tensors(tmp_path / "checkpoint")
    silent = []
    for name in [*names, "lm_head.weight", "backbone.embeddings.weight"]:
        info = checkpoint.tensors[name]
        with open(tmp_path / "checkpoint" / info.file, "r+b") as file:
            file.seek(info.offset)
            file.write(np.ascontiguousarray(stored[name][::-1] * 1.5).tobytes())
            file.flush()
            if np.array_equal(drafted(), before):
                silent.append(name)
            file.seek(info.offset)
            file.write(stored[name].tobytes())
    assert silent == []
    np.testing.assert_array_equal(drafted(), before)


def test_every_stored_tensor_is_read_by_a_graph(tmp_path):
    """sglang#21138: in a quantized checkpoint too, nothing that the ledger counts is left unwired."""
    source = make_mtp_source(tmp_path / "source", torch.bfloat16)
    for name in ("lightning", "w4a16"):
        run(source, tmp_path / name, name)
        result = export_bundle(tmp_path / name, tmp_path / f"{name}.bundle")
        read = {i for graph in ("target", "mtp") for n in nodes_of(result.out, graph) for i in n.input}
        assert set(result.ledger.entries) - read == set()


def test_the_module_is_fed_the_hidden_states_it_was_trained_with(tmp_path):
    """vmlx-swift#234: before or after the final norm is the export's choice; the wrong one costs drafts, no text."""
    shutil.copytree(CHECKPOINT, tmp_path / "checkpoint")

    def edit(stored: dict[str, torch.Tensor]) -> None:
        """What the final norm weighs more, the head weighs less: only who sees what is between can tell."""
        size = 2.0 ** torch.from_numpy(np.random.default_rng(0).integers(-6, 7, 192)).to(torch.bfloat16)
        stored["lm_head.weight"] /= size
        for name in ("backbone.norm_f.weight", "mtp.layers.1.final_layernorm.weight"):
            stored[name] *= size

    change(tmp_path / "checkpoint", edit)
    built = BuildOptions(max_sequences=4, max_context=256, activations="float32")
    prompts = ["import os\n", "The :mod:`json` module", "class A:\n    def __init__(self"]
    params, texts, lengths = SamplingParams(max_tokens=40, temperature=0, ignore_eos=True), [], []
    for hidden in ("raw", "normed"):
        options = GraphOptions(mtp_hidden=hidden)
        bundle = export_bundle(tmp_path / "checkpoint", tmp_path / f"{hidden}.bundle", options=options).out
        directory = build_engine(bundle, tmp_path / hidden, options=built).out
        engine = Engine.load(directory, threads=1, speculate="mtp", draft_length=4)
        texts.append(engine.generate(prompts, params))
        lengths.append(engine.acceptance.length)
    assert texts[0] == texts[1] == Engine.load(directory, threads=1).generate(prompts, params)
    assert lengths[0] > 1.3 * lengths[1], lengths
