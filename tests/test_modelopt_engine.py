# SPDX-License-Identifier: Apache-2.0
"""The ModelOpt engine: the same bytes as the streaming engine, and what only it can do."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from nemo_build.engines.ort import OrtSession
from nemo_build.errors import UserError
from nemo_build.export.checkpoint import Checkpoint
from nemo_build.export.exporter import export_bundle
from nemo_build.export.ledger import reconcile
from nemo_build.export.models import expected_tensors
from nemo_build.export.quantize import modelopt_cpu
from nemo_build.export.quantize.modelopt_engine import quant_config
from nemo_build.export.quantize.quantizer import quantize_checkpoint
from nemo_build.export.quantize.recipe import Recipe, assign, load_recipe
from nemo_build.spec import load_spec

from .mtp_reference import save_with_mtp
from .test_quantize import TOKENS, tensors
from .tiny import feed

pytestmark = pytest.mark.slow  # importing ModelOpt alone takes seconds, and each job is a process of its own

WIDE = {"moe_intermediate_size": 32, "moe_shared_expert_intermediate_size": 48}


def make_source(directory: Path, dtype: torch.dtype) -> Path:
    """A random checkpoint with an MTP module; routers in F32, as transformers keeps them."""
    save_with_mtp(directory, dtype=dtype, hybrid_override_pattern="MEM*E", **WIDE)
    path = directory / "model.safetensors"
    stored = load_file(path)
    routers = {n: t.float() for n, t in stored.items() if ".gate." in n and not n.startswith("mtp.")}
    save_file({**stored, **routers}, path, metadata={"format": "pt"})
    return directory


@pytest.fixture(scope="module")
def source(tmp_path_factory) -> Path:
    """A checkpoint in BF16."""
    return make_source(tmp_path_factory.mktemp("modelopt") / "checkpoint", torch.bfloat16)


def run(source: Path, out: Path, recipe: Recipe, engine: str | None = None):
    return quantize_checkpoint(source, out, recipe, sequences=TOKENS, sequences_source="t", engine=engine)


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
            assert value.dtype == b[tensor].dtype, tensor
            assert np.array_equal(value.reshape(-1).view(np.uint8), b[tensor].reshape(-1).view(np.uint8)), (
                tensor
            )
    for file in ("hf_quant_config.json", "config.json"):
        assert json.loads((tmp_path / "s" / file).read_text()) == json.loads(
            (tmp_path / "m" / file).read_text()
        )


FAKE_QUANT = """
import json, sys
import numpy as np, torch
from transformers import NemotronHForCausalLM
from nemo_build.export.quantize import modelopt_cpu, modelopt_engine
modelopt_cpu.enable()
source, config, tokens, out = json.load(open(sys.argv[1]))
model = NemotronHForCausalLM.from_pretrained(source, dtype=torch.float32).eval()
for layer in model.model.layers:
    if hasattr(layer.mixer, "time_step_limit"):
        layer.mixer.time_step_limit = (0.0, float("inf"))
batches = [torch.tensor([t]) for t in tokens]
modelopt_engine._quantize(model, {"config": config}, batches)
from modelopt.torch.export.unified_export_hf import requantize_resmooth_fused_llm_layers
requantize_resmooth_fused_llm_layers(model)  # query, key and value share scales, as in the export
with torch.no_grad():
    np.savez(out, *[model(b, use_cache=False).logits[0].numpy() for b in batches])
"""


@pytest.mark.parametrize("name", ["lightning", "nvfp4", "w4a16", "fp8"])
def test_quantized_forward_equals_fake_quantization(tmp_path, name):
    """The exported graph of a quantized checkpoint against ModelOpt's own quantized forward pass.

    The checkpoint is in F32: ModelOpt's export divides in the weight's own type, its fake quantization in float32.
    Where inputs are rounded too, a value at a rounding edge may go either way; so the median is judged.
    """
    source = make_source(tmp_path / "source", torch.float32)
    recipe = load_recipe(name)
    run(source, tmp_path / "q", recipe)
    export_bundle(tmp_path / "q", tmp_path / "bundle")
    session = OrtSession(tmp_path / "bundle" / "target.onnx", slots=1, context=64)
    config = quant_config(assign(recipe, expected_tensors(load_spec(source))), recipe.kv_cache, None)
    job = [str(source), config, TOKENS, str(tmp_path / "logits.npz")]
    (tmp_path / "job.json").write_text(json.dumps(job))
    subprocess.run([sys.executable, "-c", FAKE_QUANT, tmp_path / "job.json"], check=True, capture_output=True)
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


def test_recipe_files_of_modelopt(source, tmp_path):
    """NVIDIA's own recipe file, as it is, gives what ours gives."""
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


@pytest.mark.parametrize("algorithm", ["gptq", {"method": "mse"}], ids=str)
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
