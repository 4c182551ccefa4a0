# SPDX-License-Identifier: Apache-2.0
"""The ModelOpt engine: the same bytes as the streaming engine, and what only it can do."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import CliRunner

from nemo_build.cli import cli
from nemo_build.demo import CHECKPOINT
from nemo_build.engines.ort import OrtSession
from nemo_build.errors import UserError
from nemo_build.export.checkpoint import Checkpoint
from nemo_build.export.exporter import export_bundle
from nemo_build.export.ledger import reconcile
from nemo_build.export.models import expected_tensors
from nemo_build.export.quantize import modelopt_cpu, modelopt_engine
from nemo_build.export.quantize.modelopt_engine import quant_config
from nemo_build.export.quantize.quantizer import QuantizeResult, quantize_checkpoint
from nemo_build.export.quantize.recipe import Assignment, Recipe, assign, load_recipe
from nemo_build.spec import load_spec

from . import modelopt_jobs
from .quantized import EVERY_KIND, TOKENS, make_mtp_source, tensors
from .tiny import feed

pytestmark = pytest.mark.slow  # importing ModelOpt alone takes seconds


@pytest.fixture(scope="module", autouse=True)
def jobs():
    with modelopt_jobs.forked():
        yield


@pytest.fixture(scope="module")
def source(tmp_path_factory) -> Path:
    """A checkpoint in BF16."""
    return make_mtp_source(tmp_path_factory.mktemp("modelopt") / "checkpoint", torch.bfloat16)


def run(source: Path, out: Path, recipe: Recipe, engine: str | None = None, **kwargs: Any) -> QuantizeResult:
    options = {"sequences": TOKENS, "sequences_source": "t", "engine": engine, **kwargs}
    return quantize_checkpoint(source, out, recipe, **options)


def same_bytes(a: np.ndarray, b: np.ndarray) -> bool:
    return a.dtype == b.dtype and a.tobytes() == b.tobytes()


@pytest.mark.parametrize("name", ["lightning", "nvfp4", "nvfp4-experts", "w4a16", "fp8"])
def test_engines_agree(source, tmp_path, name):
    """Weights and their scales to the byte, measured scales as far as the arithmetic of two runtimes agrees."""
    recipe = load_recipe(name)
    streaming = run(source, tmp_path / "s", recipe)
    modelopt = run(source, tmp_path / "m", recipe, "modelopt")
    assert streaming.assignments == modelopt.assignments
    a, b = tensors(tmp_path / "s"), tensors(tmp_path / "m")
    assert set(a) == set(b)
    for tensor, value in a.items():
        if tensor.endswith(("input_scale", "k_scale", "v_scale")):
            np.testing.assert_allclose(value, b[tensor], rtol=0.03, err_msg=tensor)
        else:
            assert same_bytes(value, b[tensor]), tensor
    for file in ("hf_quant_config.json", "config.json"):
        assert json.loads((tmp_path / "s" / file).read_text()) == json.loads(
            (tmp_path / "m" / file).read_text()
        )


FAKE_QUANT = """
import json, sys
import numpy as np, torch
from transformers import NemotronHForCausalLM
from nemo_build.export.quantize import modelopt_cpu, modelopt_engine, modelopt_lowrank, modelopt_smoothing
modelopt_cpu.enable()
source, config, tokens, out = json.load(open(sys.argv[1]))
model = NemotronHForCausalLM.from_pretrained(source, dtype=torch.float32).eval()
original = {name: tensor.clone() for name, tensor in model.state_dict().items()}
for layer in model.model.layers:
    if hasattr(layer.mixer, "time_step_limit"):
        layer.mixer.time_step_limit = (0.0, float("inf"))
batches = [torch.tensor([t]) for t in tokens]
modelopt_engine._quantize(model, {"config": config}, batches)
modelopt_smoothing.fold(model, original.__getitem__)
from modelopt.torch.export.unified_export_hf import requantize_resmooth_fused_llm_layers
with modelopt_lowrank.exportable(model):
    requantize_resmooth_fused_llm_layers(model)  # query, key and value share scales, as in the export
with torch.no_grad():
    np.savez(out, *[model(b, use_cache=False).logits[0].numpy() for b in batches])
"""


@pytest.mark.parametrize(
    ("name", "algorithm", "config"),
    [
        ("lightning", None, {}),
        ("nvfp4", None, {}),
        ("w4a16", None, {}),
        ("fp8", None, {}),
        ("nvfp4", "awq_lite", {}),
        ("nvfp4", "svdquant", {}),
        ("nvfp4", {"method": "svdquant", "lowrank": 8}, EVERY_KIND),
        ("w4a16", {"method": "svdquant", "lowrank": 8}, EVERY_KIND),
    ],
    ids=str,
)
def test_quantized_forward_equals_fake_quantization(tmp_path, name, algorithm, config):
    """The exported graph of a quantized checkpoint against ModelOpt's own quantized forward pass.

    The checkpoint is in F32: ModelOpt's export divides in the weight's own type, its fake quantization in float32.
    Where inputs are rounded too, a value at a rounding edge may go either way; so the median is judged.
    """
    source = make_mtp_source(tmp_path / "source", torch.float32, **config)
    recipe = replace(load_recipe(name), algorithm=algorithm)
    run(source, tmp_path / "q", recipe)
    export_bundle(tmp_path / "q", tmp_path / "bundle")
    session = OrtSession(tmp_path / "bundle" / "target.onnx", slots=1, context=64)
    config = quant_config(assign(recipe, expected_tensors(load_spec(source))), recipe.kv_cache, algorithm)
    job = [str(source), config, TOKENS, str(tmp_path / "logits.npz")]
    (tmp_path / "job.json").write_text(json.dumps(job))
    modelopt_jobs.run([sys.executable, "-c", FAKE_QUANT, tmp_path / "job.json"], check=True)
    wanted = np.load(tmp_path / "logits.npz")
    errors = []
    for tokens, key in zip(TOKENS, wanted.files, strict=True):
        got, want = feed(session, {0: tokens}, {})[0], wanted[key]
        errors.append(np.linalg.norm(got - want, axis=-1) / np.linalg.norm(want, axis=-1))
    error = np.concatenate(errors)
    assert np.quantile(error, 0.5) < 1e-4, np.quantile(error, [0.5, 0.9, 1])


def test_automatic_choice_keeps_to_its_budget(source, tmp_path):
    result = run(source, tmp_path / "out", load_recipe("auto"))
    formats = {a.format for a in result.assignments.values()}
    assert formats <= {"nvfp4", "fp8"}
    assert formats
    expected = expected_tensors(load_spec(source))
    ledger = reconcile(Checkpoint.open(tmp_path / "out"), expected)
    export_bundle(tmp_path / "out", tmp_path / "bundle")
    assert any(info.dtype == "U8" for _, info in ledger.entries.values())
    weights = {n for n, r in expected.items() if r.projection and n.startswith("backbone.")}
    bits = {"U8": 4.5, "F8_E4M3": 8, "BF16": 16}
    count = {n: math.prod(expected[n].shape) for n in weights}
    spent = sum(bits[ledger.entries[n][1].dtype] * count[n] for n in weights)
    assert spent / sum(count.values()) < 8, "6.5 by ModelOpt's own count, which weighs layers otherwise"


def test_recipe_files_of_modelopt(source, tmp_path, monkeypatch):
    """NVIDIA's own recipe file, as it is, gives what ours gives; its job is an ordinary process."""
    monkeypatch.setattr(modelopt_engine, "subprocess", subprocess)
    from modelopt import recipe as package

    shipped = "models/nvidia/NVIDIA-Nemotron-3.5-Lightning-30B-A3B-BF16/ptq/w4a16_nvfp4_4o6.yaml"
    path = Path(package.__file__).parent.parent.parent / "modelopt_recipes" / shipped
    recipe = load_recipe(str(path))
    assert recipe.needs_modelopt
    theirs, ours = (
        run(source, tmp_path / "theirs", recipe),
        run(source, tmp_path / "ours", load_recipe("lightning")),
    )
    assert {m: (a.format, a.activations) for m, a in theirs.assignments.items()} == {
        m: (a.format, a.activations) for m, a in ours.assignments.items()
    }


def test_failure_of_modelopt_is_told(source, tmp_path):
    recipe = load_recipe("fp8")
    broken = Recipe("broken", "", recipe.rules, "none", algorithm="no-such-algorithm")
    with pytest.raises(UserError, match="ModelOpt failed") as caught:
        run(source, tmp_path / "out", broken)
    assert any("no-such-algorithm" in line or "algorithm" in line for line in caught.value.problems)
    with pytest.raises(UserError, match="needs the modelopt engine"):
        run(source, tmp_path / "out", broken, "streaming")


def test_untested_versions_are_refused(monkeypatch):
    monkeypatch.setattr(modelopt_cpu, "TESTED_VERSIONS", ("0.0.0",))
    with pytest.raises(UserError, match=r"tested with 0\.0\.0"):
        modelopt_cpu.enable.__wrapped__()


@pytest.mark.parametrize("algorithm", ["gptq", {"method": "mse"}, "awq_clip"], ids=str)
def test_calibration_algorithms(source, tmp_path, algorithm):
    """Algorithms of ModelOpt's that need the model: the same layout, other codes than plain rounding."""
    plain = load_recipe("w4a16")
    searched = run(source, tmp_path / "searched", replace(plain, algorithm=algorithm))
    assert searched.assignments.keys() == run(source, tmp_path / "plain", plain).assignments.keys()
    a, b = tensors(tmp_path / "searched"), tensors(tmp_path / "plain")
    assert set(a) == set(b)
    if algorithm == "gptq":
        assert any(not np.array_equal(a[n], b[n]) for n in a if n.endswith("up_proj.weight"))
    export_bundle(tmp_path / "searched", tmp_path / "bundle")


def test_experts_that_the_text_does_not_reach(source, tmp_path):
    """They are told as the streaming engine tells them, and are stored with the scales of their weights."""
    recipe, short = load_recipe("nvfp4-experts"), {"sequences": [TOKENS[0][:3]]}
    streaming = run(source, tmp_path / "s", recipe, **short)
    modelopt = run(source, tmp_path / "m", recipe, "modelopt", **short)
    assert modelopt.calibration.tokens_per_expert == streaming.calibration.tokens_per_expert
    unreached = modelopt.calibration.unreached()
    assert unreached["backbone.layers.1"]
    a, b = tensors(tmp_path / "s"), tensors(tmp_path / "m")
    assert all(same_bytes(a[n], b[n]) for n in a if not n.endswith("input_scale"))
    with pytest.raises(UserError, match="Fewer than 2 of the 3 tokens") as caught:
        run(source, tmp_path / "refused", recipe, "modelopt", min_coverage=2, **short)
    assert [problem.split(":")[0] for problem in caught.value.problems] == list(unreached)
    assert not (tmp_path / "refused").exists()


def test_smoothing_is_folded(source, tmp_path):
    """AWQ-lite changes the norms that it is folded into; where it cannot be folded, nothing differs from without."""
    plain = load_recipe("nvfp4")
    run(source, tmp_path / "smoothed", replace(plain, algorithm="awq_lite"))
    run(source, tmp_path / "plain", plain)
    original, a, b = (tensors(d) for d in (source, tmp_path / "smoothed", tmp_path / "plain"))
    assert set(a) == set(b)
    changed = {
        n for n, value in original.items() if n.endswith("norm.weight") and not same_bytes(value, a[n])
    }
    mamba = {f"backbone.layers.{i}.{norm}.weight" for i in (0, 2) for norm in ("norm", "mixer.norm")}
    assert changed == mamba | {"backbone.layers.3.norm.weight"}
    stored = {
        n for n in a if n.endswith((".weight", ".weight_scale", ".weight_scale_2")) and n not in changed
    }
    different = {n.rsplit(".", 1)[0] for n in stored if not same_bytes(a[n], b[n])}
    folded = [f"layers.{i}.mixer.{n}_proj" for i in (0, 2) for n in ("in", "out")]
    folded += [f"layers.3.mixer.{n}_proj" for n in "qkv"]
    folded += [f"layers.{i}.mixer.shared_experts.{n}_proj" for i in (1, 4) for n in ("up", "down")]
    assert different == {f"backbone.{name}" for name in folded}


SMOOTHED = """
import json, sys
import modelopt.torch.quantization as mtq
import torch
from transformers import NemotronHForCausalLM
from nemo_build.export.quantize import modelopt_cpu, modelopt_engine, modelopt_smoothing
modelopt_cpu.enable()
source, config, tokens = json.load(open(sys.argv[1]))
model = NemotronHForCausalLM.from_pretrained(source, dtype=torch.float32).eval()
batches = [torch.tensor([t]) for t in tokens]
before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
def logits():
    with torch.no_grad():
        return torch.cat([model(b, use_cache=False).logits[0] for b in batches])
want = logits()
modelopt_engine._quantize(model, {"config": config}, batches)
modelopt_smoothing.fold(model, before.__getitem__)
mtq.disable_quantizer(model, "*")
changed = [n for n, tensor in model.state_dict().items() if n in before and not torch.equal(tensor, before[n])]
print(json.dumps([((logits() - want).norm() / want.norm()).item(), changed]))
"""


def test_folded_smoothing_changes_no_function(tmp_path):
    """With rounding switched off, the smoothed model with every kind of layer, and biases, is the original."""
    source = make_mtp_source(tmp_path / "source", torch.float32, **EVERY_KIND)
    rules = assign(load_recipe("w4a16"), expected_tensors(load_spec(source)))
    job = [str(source), quant_config(rules, "none", "awq_lite"), TOKENS[:2]]
    (tmp_path / "job.json").write_text(json.dumps(job))
    done = modelopt_jobs.run([sys.executable, "-c", SMOOTHED, tmp_path / "job.json"], check=True)
    error, changed = json.loads(done.stdout.splitlines()[-1])
    assert error < 1e-5
    assert {"model.layers.3.norm.weight", "model.layers.3.mixer.up_proj.bias"} <= set(changed)
    assert "model.layers.2.norm.weight" not in changed, "the router reads it too"


MODELOPT_RECIPE = """
imports:
  base_disable_all: configs/ptq/units/base_disable_all
  w4a4_nvfp4_nvfp4: configs/ptq/units/w4a4_nvfp4_nvfp4
  default_disabled_quantizers: configs/ptq/units/default_disabled_quantizers
metadata: {recipe_type: ptq, description: one of ModelOpt's own}
quantize:
  algorithm: ALGORITHM
  quant_cfg:
    - $import: base_disable_all
    - $import: w4a4_nvfp4_nvfp4
    - $import: default_disabled_quantizers
"""


def test_algorithms_whose_result_has_no_place(source, tmp_path):
    (tmp_path / "theirs.yaml").write_text(MODELOPT_RECIPE.replace("ALGORITHM", "awq_full"))
    ours = replace(load_recipe("w4a16"), algorithm={"method": "awq_full"})
    for recipe in (ours, load_recipe(str(tmp_path / "theirs.yaml"))):
        with pytest.raises(UserError, match="cannot be stored") as caught:
            run(source, tmp_path / "out", recipe)
        assert caught.value.problems[0].startswith("awq_full")


def test_smoothing_goes_with_no_other_algorithm():
    modelopt_engine._require_storable("awq_lite")
    modelopt_engine._require_storable([{"method": "max"}, None])
    with pytest.raises(UserError) as caught:
        modelopt_engine._require_storable([{"method": "awq_lite"}, "awq_full", "svdquant"])
    assert [problem.split()[0] for problem in caught.value.problems] == ["awq_full", "awq_lite", "svdquant"]
    four_over_six = {"lm_head": Assignment("nvfp4", True, False)}
    quant_config(four_over_six, "none", "gptq")
    with pytest.raises(UserError, match="awq_lite has no four-over-six"):
        quant_config(four_over_six, "none", {"method": "awq_lite"})


@pytest.mark.parametrize("algorithm", ["awq_lite", "gptq", "mse", "svdquant"])
def test_algorithms_on_the_demo_checkpoint(tmp_path, algorithm):
    """A recipe file of ModelOpt's, the whole way to generated text."""
    (tmp_path / "recipe.yaml").write_text(MODELOPT_RECIPE.replace("ALGORITHM", algorithm))
    options = ["--recipe", tmp_path / "recipe.yaml", "--calib-samples", "2", "--calib-length", "16"]
    for command in (
        ["quantize", CHECKPOINT, "-o", tmp_path / "q", *options],
        ["export", tmp_path / "q", "-o", tmp_path / "bundle"],
        ["build", tmp_path / "bundle", "-o", tmp_path / "engine", "--max-context", "128"],
        ["generate", tmp_path / "engine", "import os", "--max-tokens", "4", "--temperature", "0"],
    ):
        done = CliRunner().invoke(cli, [str(c) for c in command], catch_exceptions=False)
        assert done.exit_code == 0
    assert done.stdout.startswith("import os")
    report = json.loads((tmp_path / "q" / "quant_report.json").read_text())
    assert report["evaluation"]["kl_mean"] < 0.2
    assert report["calibration"]["unreached_experts"]
