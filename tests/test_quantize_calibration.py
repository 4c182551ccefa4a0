# SPDX-License-Identifier: Apache-2.0
"""Calibration: what is measured, on which texts, and which experts they reach."""

from __future__ import annotations

import shutil
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from nemo_build.errors import CheckpointError, UserError
from nemo_build.export.checkpoint import Checkpoint
from nemo_build.export.models import expected_tensors
from nemo_build.export.quantize.calibration import calibrate
from nemo_build.export.quantize.recipe import assign, load_recipe
from nemo_build.spec import BlockKind, load_spec

from .quantized import TOKENS, make_source, run, tensors


@pytest.fixture(scope="module")
def source(tmp_path_factory) -> Path:
    """A random checkpoint to quantize. Treat as read-only."""
    return make_source(tmp_path_factory.mktemp("quantize") / "checkpoint")


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
