# SPDX-License-Identifier: Apache-2.0
"""Quantization: recipes, streaming, resumption, calibration, and what the result says of itself."""

from __future__ import annotations

import json
import math
import random
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import ml_dtypes
import numpy as np
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
from nemo_build.export.quantize.calibration import DEFAULT_TEXT, calibrate, read_texts
from nemo_build.export.quantize.quantizer import quantize_checkpoint
from nemo_build.export.quantize.recipe import Recipe, Rule, assign, load_recipe, shipped_recipes
from nemo_build.export.quantize.streaming import DTYPES
from nemo_build.plugins.codecs import fp8, nvfp4
from nemo_build.runtime import Engine, SamplingParams
from nemo_build.runtime.tokenizer import Tokenizer
from nemo_build.spec import BlockKind, load_spec

from .mtp_reference import save_with_mtp
from .tiny import feed, reference_model

STREAMED = [name for name in shipped_recipes() if not load_recipe(name).needs_modelopt]
TOKENS = [np.random.default_rng(i).integers(0, 96, 40).tolist() for i in range(6)]


@pytest.fixture(scope="module")
def source(tmp_path_factory) -> Path:
    """A random checkpoint whose widths divide into blocks, in two shards, in BF16."""
    import torch

    directory = tmp_path_factory.mktemp("quantize") / "checkpoint"
    wide = {"moe_intermediate_size": 32, "moe_shared_expert_intermediate_size": 48}
    model = reference_model(dtype=torch.bfloat16, hybrid_override_pattern="MEM*EME", **wide)
    model.save_pretrained(directory, max_shard_size="150KB")
    (directory / "notes.txt").write_text("carried over")
    return directory


def run(source: Path, out: Path, recipe: str | Recipe, **kwargs):
    recipe = load_recipe(recipe) if isinstance(recipe, str) else recipe
    return quantize_checkpoint(source, out, recipe, sequences=TOKENS, sequences_source="test", **kwargs)


def tensors(directory: Path) -> dict[str, np.ndarray]:
    """All tensors of a checkpoint."""
    types = {**DTYPES, "F8_E4M3": ml_dtypes.float8_e4m3fn, "U8": np.uint8}
    checkpoint = Checkpoint.open(directory)
    return {
        name: np.fromfile(directory / t.file, types[t.dtype], math.prod(t.shape), offset=t.offset).reshape(
            t.shape
        )
        for name, t in checkpoint.tensors.items()
    }


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


@pytest.mark.parametrize("workers", [1, 3])
def test_workers_change_nothing(source, tmp_path, workers):
    run(source, tmp_path / "a", "lightning")
    run(source, tmp_path / "b", "lightning", workers=workers)
    for path in sorted((tmp_path / "a").iterdir()):
        assert path.read_bytes() == (tmp_path / "b" / path.name).read_bytes(), path.name


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


def test_calibration_measures_what_the_model_sees(source):
    """Largest inputs and expert choices equal those of hooks in transformers, layer by layer."""
    import torch
    from transformers import NemotronHForCausalLM

    from .tiny import fix_time_step_clamp

    spec = load_spec(source)
    assignments = assign(load_recipe("nvfp4"), expected_tensors(spec))
    got = calibrate(Checkpoint.open(source), spec, TOKENS, assignments, source="test", kv_cache=True)
    model = NemotronHForCausalLM.from_pretrained(source, dtype=torch.float32).eval()
    model.set_experts_implementation("eager")
    fix_time_step_clamp(model)
    want: dict[str, float] = {}
    counts: dict[str, np.ndarray] = {}

    def note(name: str, value: torch.Tensor) -> None:
        want[name] = max(want.get(name, 0.0), value.abs().max().item())

    for name, module in model.named_modules():
        stored = name.replace("model.", "backbone.", 1)
        if isinstance(module, torch.nn.Linear) and stored in assignments:
            module.register_forward_pre_hook(lambda m, a, n=stored: note(n, a[0]))
        if stored.endswith(("k_proj", "v_proj")):
            module.register_forward_hook(lambda m, a, o, n=stored: note(f"{n}.output", o))
        if stored.endswith("mixer.gate"):
            layer = stored.removesuffix(".mixer.gate")
            counts[layer] = np.zeros(8, np.int64)

            def count(m, a, out, layer=layer):
                counts[layer] += np.bincount(out[2].reshape(-1).numpy(), minlength=8)

            module.register_forward_hook(count)
        if stored.endswith("mixer.experts"):
            module.register_forward_pre_hook(lambda m, a, n=stored: note(f"{n}.up_proj", a[0]))
    with torch.no_grad():
        for tokens in TOKENS:
            model(torch.tensor([tokens]), use_cache=False)
    for name, value in want.items():
        assert got.amax[name] == pytest.approx(value, rel=1e-4), name
    assert {layer: c.tolist() for layer, c in counts.items()} == got.tokens_per_expert
    down = {n for n in got.amax if n.endswith("mixer.experts.down_proj")}
    assert len(down) == len(spec.indices(BlockKind.MOE))
    assert set(got.amax) == set(want) | down


def test_coverage_can_be_demanded(source, tmp_path):
    with pytest.raises(UserError, match="Fewer than 1000"):
        run(source, tmp_path / "out", "nvfp4-experts", min_coverage=1000)
    result = run(source, tmp_path / "out", "nvfp4-experts", min_coverage=1)
    assert sum(result.calibration.tokens_per_expert["backbone.layers.1"]) == 6 * 40 * 3


BAD_RECIPES = {
    "pattern that matches nothing": ([("backbone.layers.*.mixer.no_proj", "fp8")], "matches no projection"),
    "pattern over what cannot be quantized": ([("*.gate", "fp8")], "matches no projection"),
    "two rules for one projection": (
        [("*.in_proj", "fp8"), ("backbone.layers.0.*", "nvfp4")],
        r"backbone\.layers\.0\.mixer\.in_proj is matched by '\*\.in_proj' and 'backbone\.layers\.0\.\*'",
    ),
}


@pytest.mark.parametrize(("rules", "words"), BAD_RECIPES.values(), ids=BAD_RECIPES)
def test_recipes_that_do_not_fit(source, tmp_path, rules, words):
    recipe = Recipe("bad", "", tuple(Rule((pattern,), weights, False) for pattern, weights in rules), "none")
    with pytest.raises(UserError, match=words):
        run(source, tmp_path / "out", recipe)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("text", "problems"),
    [
        ("rules: []", 1),
        ("rules: [{match: 3, weights: int2, activations: maybe, extra: 1}]\nkv_cache: fp4\nmore: 1", 6),
        ("- 1", 1),
        ("a: [", 0),
    ],
)
def test_recipe_files_with_mistakes(tmp_path, text, problems):
    (tmp_path / "r.yaml").write_text(text)
    with pytest.raises(UserError) as caught:
        load_recipe(str(tmp_path / "r.yaml"))
    assert len(caught.value.problems) == problems
    with pytest.raises(UserError, match="There is no recipe"):
        load_recipe("nothing")


def test_width_that_does_not_divide(tiny_checkpoint, tmp_path):
    """The small checkpoint's experts are 24 wide."""
    with pytest.raises(UserError, match=r"experts\.\{0\.\.7\}\.down_proj: the width does not divide"):
        run(tiny_checkpoint, tmp_path / "out", "w4a16")


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


def test_quantized_checkpoint_is_not_quantized_again(source, tmp_path):
    run(source, tmp_path / "once", "w4a16")
    with pytest.raises(CheckpointError, match="quantized already"):
        run(tmp_path / "once", tmp_path / "twice", "fp8")
    with pytest.raises(UserError, match="exists already"):
        run(source, tmp_path / "once", "fp8")
    run(source, tmp_path / "once", "fp8", force=True)
    with pytest.raises(UserError, match="cannot be the output"):
        run(source, source, "fp8", force=True)


def test_stopped_job_goes_on(source, tmp_path, monkeypatch):
    """After a failure in the second shard the first is kept, not written again, and the bytes are the same."""
    from nemo_build.export.quantize import streaming

    run(source, tmp_path / "whole", "lightning")
    original, done = streaming.run_job, []

    def fail_later(job, threads=1):
        if len(done) == 1:
            raise KeyboardInterrupt
        done.append(job.target.name)
        return original(job, threads)

    monkeypatch.setattr(streaming, "run_job", fail_later)
    with pytest.raises(KeyboardInterrupt):
        run(source, tmp_path / "out", "lightning")
    first = tmp_path / ".out.quantize" / done[0]
    stamp = first.stat().st_mtime_ns
    monkeypatch.setattr(streaming, "run_job", original)
    monkeypatch.setattr("nemo_build.export.quantize.quantizer.calibrate", None)  # measured already
    run(source, tmp_path / "out", "lightning")
    assert (tmp_path / "out" / done[0]).stat().st_mtime_ns == stamp
    for path in sorted((tmp_path / "whole").iterdir()):
        assert path.read_bytes() == (tmp_path / "out" / path.name).read_bytes(), path.name


def test_another_job_does_not_take_over(source, tmp_path, monkeypatch):
    from nemo_build.export.quantize import quantizer

    def stop(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(quantizer, "_write_metadata", stop)
        with pytest.raises(KeyboardInterrupt):
            run(source, tmp_path / "out", "fp8")
    run(source, tmp_path / "out", "w4a16")
    run(source, tmp_path / "fresh", "w4a16")
    for path in sorted((tmp_path / "fresh").iterdir()):
        assert path.read_bytes() == (tmp_path / "out" / path.name).read_bytes(), path.name


@pytest.mark.slow
def test_killed_at_random_moments(source, tmp_path):
    """Killed again and again while it works, and started again, a job ends with the same bytes."""
    code = f"""
import sys, time
from pathlib import Path
from nemo_build.export.quantize import streaming
from nemo_build.export.quantize.quantizer import quantize_checkpoint
from nemo_build.export.quantize.recipe import load_recipe
write = streaming._quantize
def slow(*a):
    time.sleep(0.03)
    return write(*a)
streaming._quantize = slow
quantize_checkpoint(Path({str(source)!r}), Path(sys.argv[1]), load_recipe("lightning"),
                    sequences={TOKENS!r}, sequences_source="test")
"""
    run(source, tmp_path / "whole", "lightning")
    rng = random.Random(0)
    work, kills = tmp_path / ".out.quantize", 0
    for _ in range(40):
        process = subprocess.Popen(
            [sys.executable, "-c", code, str(tmp_path / "out")], stderr=subprocess.PIPE
        )
        while process.poll() is None and not any(work.glob("*.partial")):
            time.sleep(0.01)
        time.sleep(rng.uniform(0, 0.5))
        if kills < 6:
            process.kill()
        process.communicate(timeout=120)
        if process.returncode == 0:
            break
        assert process.returncode == -signal.SIGKILL
        kills += 1
    assert kills >= 2
    for path in sorted((tmp_path / "whole").iterdir()):
        assert path.read_bytes() == (tmp_path / "out" / path.name).read_bytes(), path.name
    assert sorted(p.name for p in tmp_path.iterdir()) == ["out", "whole"]


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


def test_experts_in_several_formats_are_refused(source, tmp_path):
    rules = (Rule(("backbone.layers.1.mixer.experts.[0-3].*",), "fp8", False),)
    with pytest.raises(
        UserError, match=r"layers\.1\.mixer\.experts: the experts of a layer must all be stored"
    ):
        run(source, tmp_path / "out", Recipe("r", "", rules, "none"))
    assert list(tmp_path.iterdir()) == []


def test_input_that_is_always_zero(source, tmp_path):
    """A projection whose input never is anything but zero gets a scale all the same, and is listed."""
    dead = tmp_path / "dead"
    shutil.copytree(source, dead)
    checkpoint = Checkpoint.open(dead)
    for e in range(8):
        info = checkpoint.tensors[f"backbone.layers.1.mixer.experts.{e}.up_proj.weight"]
        with open(dead / info.file, "r+b") as file:
            file.seek(info.offset)
            file.write(bytes(info.nbytes))
    result = run(dead, tmp_path / "out", "nvfp4-experts")
    assert result.calibration.unmeasured == [
        f"backbone.layers.1.mixer.experts.{e}.down_proj" for e in range(8)
    ]
    stored = tensors(tmp_path / "out")
    assert np.isfinite(stored["backbone.layers.1.mixer.experts.0.down_proj.input_scale"])
    assert not stored["backbone.layers.1.mixer.experts.0.up_proj.weight"].any()


def test_one_job_at_a_time(source, tmp_path):
    from nemo_build.export.quantize import quantizer

    with quantizer._exclusive(tmp_path / ".out.quantize"), pytest.raises(UserError, match="Another process"):
        run(source, tmp_path / "out", "w4a16")


def test_model_that_computes_nan(source, tmp_path):
    """A weight that is not quantized, but not finite, is found where the model is run."""
    bad = tmp_path / "bad"
    shutil.copytree(source, bad)
    info = Checkpoint.open(bad).tensors["backbone.layers.2.norm.weight"]
    with open(bad / info.file, "r+b") as file:
        file.seek(info.offset)
        file.write(np.array([np.nan]).astype(ml_dtypes.bfloat16).tobytes())
    with pytest.raises(CheckpointError, match=r"not finite in backbone\.layers\.2"):
        run(bad, tmp_path / "out", "lightning")


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


def test_calibration_texts(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": "one"}\n\n{"text": "two"}\n')
    assert read_texts(tmp_path / "a.jsonl") == ["one", "two"]
    (tmp_path / "u.jsonl").write_text('{"text": "a\u2028b\u0085c"}\n', encoding="utf-8")
    assert read_texts(tmp_path / "u.jsonl") == ["a\u2028b\u0085c"]
    (tmp_path / "empty.txt").write_text("\n\n")
    with pytest.raises(UserError, match="cannot be used"):
        read_texts(tmp_path / "empty.txt")
    (tmp_path / "b.txt").write_text("one\nline\n\ntwo\n\n\n")
    assert [t.strip() for t in read_texts(tmp_path / "b.txt")] == ["one\nline", "two"]
    (tmp_path / "c.jsonl").write_text('{"text": "one"}\n[]\n{"x": 1}\n')
    with pytest.raises(UserError) as caught:
        read_texts(tmp_path / "c.jsonl")
    assert len(caught.value.problems) == 2
    with pytest.raises(UserError, match="cannot be read"):
        read_texts(tmp_path / "none")


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
