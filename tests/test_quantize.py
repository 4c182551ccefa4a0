# SPDX-License-Identifier: Apache-2.0
"""Quantization: what is stored, what the exported graph computes of it, and the command line."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import ml_dtypes
import numpy as np
import onnx
import pytest
from click.testing import CliRunner

from nemo_build.cli import cli
from nemo_build.demo import CHECKPOINT
from nemo_build.engines.build import BuildOptions, build_engine
from nemo_build.engines.compare import compare_checkpoints
from nemo_build.engines.ort import OrtSession
from nemo_build.engines.session import StepBatch
from nemo_build.errors import CheckpointError, UserError
from nemo_build.export.checkpoint import Checkpoint
from nemo_build.export.exporter import export_bundle
from nemo_build.export.ledger import reconcile
from nemo_build.export.models import expected_tensors
from nemo_build.export.quantize import layout
from nemo_build.export.quantize.calibration import DEFAULT_TEXT, read_texts
from nemo_build.export.quantize.quantizer import quantize_checkpoint
from nemo_build.export.quantize.recipe import Recipe, Rule, load_recipe, shipped_recipes
from nemo_build.plugins.codecs import fp8, nvfp4
from nemo_build.runtime import Engine, SamplingParams
from nemo_build.runtime.tokenizer import Tokenizer
from nemo_build.spec import load_spec

from .mtp_reference import save_with_mtp
from .quantized import TOKENS, make_source, run, tensors
from .tiny import feed

STREAMED = [name for name in shipped_recipes() if not load_recipe(name).needs_modelopt]


@pytest.fixture(scope="module")
def source(tmp_path_factory) -> Path:
    """A random checkpoint to quantize. Treat as read-only."""
    return make_source(tmp_path_factory.mktemp("quantize") / "checkpoint")


@pytest.mark.parametrize("name", STREAMED)
def test_shipped_recipes(source, tmp_path, name):
    """Every projection of the recipe is stored as it says, to the byte; everything else is untouched."""
    result = run(source, tmp_path / "out", name)
    before, after = tensors(source), tensors(tmp_path / "out")
    spec = load_spec(tmp_path / "out")
    ledger = reconcile(Checkpoint.open(tmp_path / "out"), expected_tensors(spec))
    assert set(ledger.entries) == set(after)
    for module, a in result.assignments.items():
        weight = before[f"{module}.weight"]
        if a.format == "nvfp4":
            amax = None
            if module.endswith(("q_proj", "k_proj", "v_proj")):
                group = [before[f"{module.rsplit('.', 1)[0]}.{n}_proj.weight"] for n in "qkv"]
                amax = max(float(np.abs(w.astype(np.float32)).max()) for w in group)
            want = nvfp4.encode_reference(weight, four_over_six=a.search, amax=amax)
            np.testing.assert_array_equal(after[f"{module}.weight"], want.codes)
            np.testing.assert_array_equal(after[f"{module}.weight_scale"].view(np.uint8), want.scales)
            assert after[f"{module}.weight_scale_2"] == want.scale_2
        else:
            coded = fp8.encode_reference(weight, fp8.least_error_amax(weight) if a.search else None)
            np.testing.assert_array_equal(after[f"{module}.weight"].view(np.uint8), coded.codes)
            assert after[f"{module}.weight_scale"] == coded.scale
        assert (f"{module}.input_scale" in after) == a.activations
    untouched = set(before) - {f"{m}.weight" for m in result.assignments}
    assert all(np.array_equal(before[n].view(np.uint8), after[n].view(np.uint8)) for n in untouched)
    assert ("backbone.layers.3.mixer.k_proj.k_scale" in after) == (result.recipe.kv_cache == "fp8")
    assert (tmp_path / "out" / "notes.txt").read_text() == "carried over"
    _check_metadata(tmp_path / "out", result)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["out"]


def _check_metadata(directory: Path, result) -> None:
    config = json.loads((directory / "config.json").read_text())
    quant = json.loads((directory / "hf_quant_config.json").read_text())
    details = quant["quantization"]
    assert config["quantization_config"]["quant_method"] == "modelopt"
    assert config["quantization_config"]["quant_algo"] == details["quant_algo"]
    assert config["quantization_config"]["ignore"] == details["exclude_modules"]
    names = {"fp8": "FP8", "nvfp4": "NVFP4"}
    if details["quant_algo"] == "MIXED_PRECISION":
        layers = details["quantized_layers"]
        assert set(layers) == set(result.assignments)
        for module, a in result.assignments.items():
            weight_only = a.format == "nvfp4" and not a.activations
            assert layers[module]["quant_algo"] == ("W4A16_NVFP4" if weight_only else names[a.format])
    for module in result.assignments:
        assert not any(
            e == module or (e.endswith(".*") and module.startswith(e[:-1]))
            for e in details["exclude_modules"]
        )
    index = directory / "model.safetensors.index.json"
    assert set(json.loads(index.read_text())["weight_map"]) == set(tensors(directory))


@pytest.mark.parametrize("name", STREAMED)
def test_exported_graph_computes_the_stored_values(source, tmp_path, name):
    """The graph of the quantized checkpoint equals the original's graph with decoded weights, where only weights
    are quantized; with rounded activations it stays close to the original."""
    result = run(source, tmp_path / "out", name)
    export_bundle(tmp_path / "out", tmp_path / "bundle")
    export_bundle(source, tmp_path / "original")
    sizes = {"slots": 1, "context": 64}
    got = feed(OrtSession(tmp_path / "bundle" / "target.onnx", **sizes), {0: TOKENS[0]}, {})[0]
    original = feed(OrtSession(tmp_path / "original" / "target.onnx", **sizes), {0: TOKENS[0]}, {})[0]
    error = np.linalg.norm(got - original, axis=-1) / np.linalg.norm(original, axis=-1)
    assert 0 < np.median(error) < 1  # random weights: rounding also changes which experts are chosen
    if name == "w4a16":
        decoded = tmp_path / "decoded"
        shutil.copytree(source, decoded)
        _replace_weights(decoded, tmp_path / "out", result.assignments)
        export_bundle(decoded, tmp_path / "decoded-bundle")
        want = feed(OrtSession(tmp_path / "decoded-bundle" / "target.onnx", **sizes), {0: TOKENS[0]}, {})[0]
        np.testing.assert_allclose(got, want, atol=1e-4, rtol=0)


def _replace_weights(directory: Path, quantized: Path, assignments) -> None:
    """Rewrite a checkpoint's shards in float32, with the values that the quantized one stores."""
    from safetensors.numpy import save_file

    stored, weights, original = tensors(quantized), tensors(directory), Checkpoint.open(directory).tensors
    for path in directory.glob("*.safetensors"):
        names = [n for n, t in original.items() if t.file == path.name]
        values = {n: weights[n].astype(np.float32) for n in names}
        for module in assignments:
            if f"{module}.weight" in values:
                parts = [stored[f"{module}.{s}"] for s in ("weight", "weight_scale", "weight_scale_2")]
                values[f"{module}.weight"] = nvfp4.decode(*parts)
        save_file(values, path)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_values_that_are_not_finite(source, tmp_path, value):
    bad = tmp_path / "bad"
    shutil.copytree(source, bad)
    info = Checkpoint.open(bad).tensors["backbone.layers.1.mixer.experts.2.up_proj.weight"]
    with open(bad / info.file, "r+b") as file:
        file.seek(info.offset + 2 * (5 * info.shape[1] + 7))
        file.write(np.array([value]).astype(ml_dtypes.bfloat16).tobytes())
    with pytest.raises(CheckpointError, match=r"experts\.2\.up_proj\.weight .* the first at \[5, 7\]"):
        run(bad, tmp_path / "out", "w4a16")
    assert not (tmp_path / "out").exists()


def test_quantized_mtp_module(tmp_path):
    """The MTP module's weights can be quantized too; its inputs cannot be measured, so they cannot be rounded."""
    source = tmp_path / "source"
    wide = {"moe_intermediate_size": 32, "moe_shared_expert_intermediate_size": 48}
    save_with_mtp(source, hybrid_override_pattern="M*E", **wide)
    with pytest.raises(UserError, match=r"mtp\.layers\.1\.mixer\.experts\.\{0\.\.7\}"):
        run(source, tmp_path / "out", Recipe("r", "", (Rule(("mtp.*",), "fp8", True),), "none"))
    result = run(source, tmp_path / "out", Recipe("r", "", (Rule(("mtp.*",), "nvfp4", False),), "none"))
    assert "mtp.layers.0.eh_proj" in result.assignments
    outputs = []
    for name in ("source", "out"):
        export_bundle(tmp_path / name, tmp_path / f"{name}.bundle")
        session = OrtSession(tmp_path / f"{name}.bundle" / "mtp.onnx", slots=1, context=64, hidden=True)
        hidden = np.random.default_rng(0).standard_normal((1, 20, 48)).astype(np.float32)
        batch = StepBatch.of_rows([TOKENS[0][:20]], past=[0], slots=[0], logits="all")
        outputs.append(session.step(replace(batch, hidden_in=hidden)).logits)
    error = np.linalg.norm(outputs[1] - outputs[0]) / np.linalg.norm(outputs[0])
    assert 0 < error < 0.5


def test_cache_and_weights_of_zero(source, tmp_path):
    """A layer that has been zeroed out is quantized like any other."""
    dead = tmp_path / "dead"
    shutil.copytree(source, dead)
    checkpoint = Checkpoint.open(dead)
    for name in ("v_proj", "o_proj"):
        info = checkpoint.tensors[f"backbone.layers.3.mixer.{name}.weight"]
        with open(dead / info.file, "r+b") as file:
            file.seek(info.offset)
            file.write(bytes(info.nbytes))
    for name in ("lightning", "fp8", "nvfp4"):
        run(dead, tmp_path / name, name)
        assert all(
            np.isfinite(v.astype(np.float32)).all()
            for n, v in tensors(tmp_path / name).items()
            if "scale" in n
        )


def test_cache_that_only_the_configuration_asks_for(source, tmp_path):
    """Without stored scales an FP8 cache is not followed: the graph is that of the checkpoint without the wish."""
    asking = tmp_path / "asking"
    shutil.copytree(source, asking)
    quant = layout.hf_quant_config({}, [], "fp8")
    assert quant["quantization"]["kv_cache_quant_algo"] == "FP8"
    config = json.loads((asking / "config.json").read_text())
    scheme = {"dynamic": False, "num_bits": 8, "type": "float"}
    config["quantization_config"] = {"quant_method": "modelopt", "kv_cache_scheme": scheme}
    (asking / "config.json").write_text(json.dumps(config))
    (asking / "hf_quant_config.json").write_text(json.dumps(quant))
    for name, directory in (("plain", source), ("asked", asking)):
        export_bundle(directory, tmp_path / name)
    run(source, tmp_path / "q", "lightning")
    export_bundle(tmp_path / "q", tmp_path / "stored")
    plain, asked, stored = (
        onnx.load(tmp_path / name / "target.onnx", load_external_data=False).graph
        for name in ("plain", "asked", "stored")
    )
    assert asked == plain
    assert [any("k_scale" in i.name for i in g.initializer) for g in (asked, stored)] == [False, True]


def test_scale_of_an_input_is_not_ignored(tiny_checkpoint, tmp_path):
    """Smoothing that ModelOpt did not fold is computed beside a quantized weight, and refused beside another."""
    from safetensors.torch import load_file, save_file

    run(tiny_checkpoint, tmp_path / "q", "fp8")
    path = tmp_path / "q" / "model.safetensors"
    stored = load_file(path)
    norm, scale = stored["backbone.layers.0.norm.weight"], stored["backbone.layers.2.norm.weight"]
    logits = []
    for name, changed in (
        ("stored", {"backbone.layers.0.mixer.in_proj.pre_quant_scale": scale.clone()}),
        ("folded", {"backbone.layers.0.norm.weight": norm * scale}),
    ):
        save_file({**stored, **changed}, path, metadata={"format": "pt"})
        export_bundle(tmp_path / "q", tmp_path / name)
        session = OrtSession(tmp_path / name / "target.onnx", slots=1, context=64)
        logits.append(feed(session, {0: TOKENS[0]}, {})[0])
    error = np.linalg.norm(logits[0] - logits[1], axis=-1) / np.linalg.norm(logits[0], axis=-1)
    assert np.median(error) < 1e-4  # a value at a rounding edge may go either way
    save_file({**stored, "lm_head.pre_quant_scale": scale.clone()}, path, metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=r"unexpected: lm_head\.pre_quant_scale"):
        export_bundle(tmp_path / "q", tmp_path / "bundle")


def test_index_with_other_names(source, tmp_path):
    """Shards of any name, and one numbered shard, keep an index."""
    other = tmp_path / "other"
    shutil.copytree(source, other)
    index = json.loads((other / "model.safetensors.index.json").read_text())
    for file in sorted(set(index["weight_map"].values())):
        (other / file).rename(other / f"weights-{file[6:11]}.safetensors")
    index["weight_map"] = {n: f"weights-{f[6:11]}.safetensors" for n, f in index["weight_map"].items()}
    (other / "model.safetensors.index.json").write_text(json.dumps(index))
    (other / "sub").mkdir()
    (other / "sub" / "note").write_text("carried over")
    (other / "calibration.json").write_text("the user's own")
    (other / "pytorch_model.bin").write_text("left out")
    run(other, tmp_path / "out", "lightning")
    run(source, tmp_path / "plain", "lightning")
    a, b = tensors(tmp_path / "out"), tensors(tmp_path / "plain")
    assert set(a) == set(b)
    assert (tmp_path / "out" / "sub" / "note").is_file()
    assert (tmp_path / "out" / "calibration.json").read_text() == "the user's own"
    assert not (tmp_path / "out" / "pytorch_model.bin").exists()


def test_command_line_on_the_demo_checkpoint(tmp_path):
    """Quantize, compare, export, build, generate; the report is there in both forms."""
    (tmp_path / "eval.txt").write_text("def main():\n    return 1\n\nLists are mutable sequences.\n")
    options = ["--recipe", "lightning", "--calib-samples", "8", "--calib-length", "64"]
    options += ["--eval", str(tmp_path / "eval.txt")]
    done = CliRunner().invoke(
        cli, ["quantize", str(CHECKPOINT), "-o", str(tmp_path / "q"), *options], catch_exceptions=False
    )
    assert "KL mean" in done.stdout
    report = json.loads((tmp_path / "q" / "quant_report.json").read_text())
    tokenizer = Tokenizer.load(CHECKPOINT)
    texts = ("def main():\n    return 1", "Lists are mutable sequences.\n")
    assert report["evaluation"]["tokens"] == sum(len(tokenizer.encode(t)) for t in texts)
    assert 0 < report["evaluation"]["kl_mean"] < 0.5
    assert report["evaluation"]["top1"] > 0.5
    page = (tmp_path / "q" / "quant_report.html").read_text()
    assert "lightning" in page
    assert page.count("<rect") == 16 * len(report["calibration"]["tokens_per_expert"])
    for command in (
        ["export", tmp_path / "q", "-o", tmp_path / "bundle"],
        ["build", tmp_path / "bundle", "-o", tmp_path / "engine", "--max-context", "256"],
        ["generate", tmp_path / "engine", "import os", "--max-tokens", "8", "--temperature", "0"],
    ):
        result = CliRunner().invoke(cli, [str(c) for c in command], catch_exceptions=False)
        assert result.exit_code == 0
    assert result.stdout.startswith("import os")


@pytest.mark.slow
def test_recipes_are_ordered_as_theory_says(tmp_path):
    """On the demo checkpoint: fewer bits or rounded activations cost more; the same is nothing."""
    tokenizer = Tokenizer.load(CHECKPOINT)
    sequences = [tokenizer.encode(t)[:128] for t in read_texts(DEFAULT_TEXT)[:10]]
    found = {}
    for name in ("fp8", "nvfp4-experts", "w4a16", "nvfp4", "lightning"):
        quantize_checkpoint(
            CHECKPOINT, tmp_path / name, load_recipe(name), sequences=sequences, sequences_source="t"
        )
        found[name], _ = compare_checkpoints(CHECKPOINT, tmp_path / name, sequences)
        export_bundle(tmp_path / name, tmp_path / f"{name}.bundle")
        options = BuildOptions(max_sequences=1, max_context=64)
        build_engine(tmp_path / f"{name}.bundle", tmp_path / f"{name}.engine", options=options)
        params = SamplingParams(max_tokens=5, temperature=0, ignore_eos=True)
        engine = Engine.load(tmp_path / f"{name}.engine")
        assert len(engine.generate("import os", params)[0].token_ids) == 5
    same, _ = compare_checkpoints(CHECKPOINT, CHECKPOINT, sequences)
    assert same.kl_mean == pytest.approx(0, abs=1e-9)
    assert same.top1 == 1
    kl = {name: e.kl_mean for name, e in found.items()}
    assert kl["fp8"] < kl["w4a16"] < kl["nvfp4"], kl
    assert kl["nvfp4-experts"] < kl["nvfp4"], kl
    assert all(e.top1 > 0.8 for e in found.values())
