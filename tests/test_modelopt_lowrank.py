# SPDX-License-Identifier: Apache-2.0
"""ModelOpt's SVDQuant: which projections it gives low-rank terms, and how they are written."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from nemo_build.demo import CHECKPOINT
from nemo_build.engines.compare import compare_checkpoints
from nemo_build.errors import UserError
from nemo_build.export.exporter import export_bundle
from nemo_build.export.quantize import layout, modelopt_lowrank
from nemo_build.export.quantize.calibration import DEFAULT_TEXT, read_texts
from nemo_build.export.quantize.quantizer import quantize_checkpoint
from nemo_build.export.quantize.recipe import Assignment, Recipe, Rule, load_recipe
from nemo_build.export.quantize.report import build_report
from nemo_build.plugins.formats import LOW_RANK, SMOOTHING
from nemo_build.runtime.tokenizer import Tokenizer

from . import modelopt_jobs
from .quantized import make_mtp_source, run, tensors

pytestmark = pytest.mark.slow  # importing ModelOpt alone takes seconds

SVDQUANT = load_recipe("svdquant")


@pytest.fixture(scope="module", autouse=True)
def jobs():
    with modelopt_jobs.forked():
        yield


@pytest.fixture(scope="module")
def source(tmp_path_factory) -> Path:
    """A checkpoint in BF16, with an MTP module."""
    return make_mtp_source(tmp_path_factory.mktemp("modelopt") / "checkpoint", torch.bfloat16)


def same_bytes(a: np.ndarray, b: np.ndarray) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()


def test_what_the_recipe_stores(source, tmp_path):
    """Low-rank terms beside all but routed experts, which are those of the plain recipe; the rest untouched."""
    result = run(source, tmp_path / "out", SVDQUANT)
    run(source, tmp_path / "plain", "nvfp4")
    before, after, plain = (tensors(d) for d in (source, tmp_path / "out", tmp_path / "plain"))
    routed = {m for m in result.assignments if ".experts." in m}
    assert routed
    assert {m: a.rank for m, a in result.assignments.items()} == {
        m: 0 if m in routed else 32 for m in result.assignments
    }
    beside = {f"{m}.{n}" for m in set(result.assignments) - routed for n in (SMOOTHING, *LOW_RANK)}
    assert set(after) == set(plain) | beside
    stored = {n for n in plain if n.rsplit(".", 1)[0] in routed and not n.endswith("input_scale")}
    kept = {n for n in before if n.removesuffix(".weight") not in result.assignments}
    assert all(same_bytes(after[n], plain[n]) for n in stored | kept)
    attention = "backbone.layers.3.mixer"
    for name in (SMOOTHING, LOW_RANK[0]):  # runtimes that fuse query, key and value have one of each
        q, *others = (after[f"{attention}.{p}_proj.{name}"] for p in "qkv")
        assert all(same_bytes(q, other) for other in others)
    assert all(after[n].dtype == before["lm_head.weight"].dtype and np.any(after[n]) for n in beside)


def test_what_the_report_and_the_configuration_say(source, tmp_path):
    result = run(source, tmp_path / "out", SVDQUANT)
    report = build_report(result, None)
    factors = sum(t.nbytes for n, t in tensors(tmp_path / "out").items() if n.endswith(LOW_RANK))
    counted = {role: b for role, b in report["bytes"].items() if role.endswith(".low_rank")}
    assert sum(b["after"] for b in counted.values()) == factors
    assert not any(b["before"] for b in counted.values())
    assert report["weights"]["backbone.layers.0.mixer.in_proj"]["low_rank"] == 32
    quant = json.loads((tmp_path / "out" / "hf_quant_config.json").read_text())["quantization"]
    layers = quant["quantized_layers"]
    assert layers["backbone.layers.0.mixer.in_proj"] == {
        "quant_algo": "NVFP4_SVD",
        "group_size": 16,
        "has_zero_point": False,
        "pre_quant_scale": True,
        "lora_rank": 32,
    }
    assert layers["backbone.layers.1.mixer.experts.0.up_proj"] == {"quant_algo": "NVFP4", "group_size": 16}


def test_configuration_is_modelopts():
    """For one format in all modules, which is where ModelOpt says the rank."""
    from modelopt.torch.export.convert_hf_config import convert_hf_quant_config_format

    config = layout.hf_quant_config({"lm_head": Assignment("nvfp4", False, True, 8)}, ["norm"], "none")
    assert config["quantization"]["quant_algo"] == "NVFP4_SVD"
    assert layout.quantization_config(config) == convert_hf_quant_config_format(config)


def test_options_of_the_algorithm(source, tmp_path):
    """A rank above a projection's sizes, where ModelOpt fills the factors up with zeros; and layers to leave out."""
    options = {"method": "svdquant", "lowrank": 64, "skip_layers": ["model.layers.0.*"]}
    result = run(source, tmp_path / "out", replace(SVDQUANT, algorithm=options))
    stored = tensors(tmp_path / "out")
    k_proj = "backbone.layers.3.mixer.k_proj"
    assert [stored[f"{k_proj}.{n}"].shape for n in LOW_RANK] == [(64, 48), (32, 64)]
    left_out = {m for m, a in result.assignments.items() if m.startswith("backbone.layers.0.") and not a.rank}
    assert left_out == {f"backbone.layers.0.mixer.{n}_proj" for n in ("in", "out")}
    assert not any(f"{m}.{n}" in stored for m in left_out for n in (SMOOTHING, *LOW_RANK))
    export_bundle(tmp_path / "out", tmp_path / "bundle")


def test_other_formats_are_stored_as_without(source, tmp_path):
    rules = (
        Rule(("backbone.layers.*.mixer.in_proj", "backbone.layers.*.mixer.out_proj"), "fp8", True),
        Rule(("backbone.layers.*.mixer.?_proj", "lm_head"), "nvfp4", False),
    )
    plain = Recipe("plain", "", rules, "fp8")
    result = run(source, tmp_path / "out", replace(plain, algorithm="svdquant"))
    run(source, tmp_path / "plain", plain)
    assert {a.format for a in result.assignments.values() if a.rank} == {"nvfp4"}
    assert result.assignments["lm_head"].rank == 32
    a, b = tensors(tmp_path / "out"), tensors(tmp_path / "plain")
    mamba = {n for n in b if ".mixer.in_proj." in n or ".mixer.out_proj." in n}
    assert mamba == {n for n in a if ".mixer.in_proj." in n or ".mixer.out_proj." in n}
    assert all(same_bytes(a[n], b[n]) for n in mamba if not n.endswith("input_scale"))
    assert {n for n in a if n.endswith(("k_scale", "v_scale"))} == {
        n for n in b if n.endswith(("k_scale", "v_scale"))
    }
    export_bundle(tmp_path / "out", tmp_path / "bundle")


EXPERTS = (Rule(("backbone.layers.*.mixer.experts.*",), "nvfp4", True),)
REFUSED = {
    "experts only": (replace(SVDQUANT, rules=EXPERTS), "no projection a low-rank term"),
    "all left out": (
        replace(SVDQUANT, algorithm={"method": "svdquant", "skip_layers": ["model.*"]}),
        "no projection a low-rank term",
    ),
    "no rank": (replace(SVDQUANT, algorithm={"method": "svdquant", "lowrank": 0}), r"\(lowrank\) is 0"),
    "four-over-six": (
        replace(SVDQUANT, rules=(Rule(("backbone.layers.*",), "nvfp4-four-over-six", True),)),
        "svdquant has no four-over-six",
    ),
}


@pytest.mark.parametrize(("recipe", "words"), REFUSED.values(), ids=REFUSED)
def test_recipes_that_are_refused(source, tmp_path, recipe, words):
    with pytest.raises(UserError, match=words):
        run(source, tmp_path / "out", recipe)
    assert not (tmp_path / "out").exists()


def test_modelopt_is_left_as_it_was():
    import modelopt.torch.export.unified_export_hf as modelopt_export

    original = modelopt_export.get_experts_list

    def fail() -> None:
        with modelopt_lowrank.exportable(torch.nn.Linear(2, 2)):
            assert modelopt_export.get_experts_list(None, "") == []
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fail()
    assert modelopt_export.get_experts_list is original


def test_low_rank_terms_pay(tmp_path):
    """On the demo checkpoint: nearer to the original than the same format without, the nearer the higher the rank."""
    tokenizer = Tokenizer.load(CHECKPOINT)
    sequences = [tokenizer.encode(t)[:128] for t in read_texts(DEFAULT_TEXT)[:16]]
    found = {}
    for rank in (0, 4, 64):
        recipe = replace(SVDQUANT, algorithm={"method": "svdquant", "lowrank": rank}) if rank else "nvfp4"
        recipe = load_recipe(recipe) if isinstance(recipe, str) else recipe
        out = tmp_path / f"{rank}"
        quantize_checkpoint(CHECKPOINT, out, recipe, sequences=sequences[:8], sequences_source="t")
        found[rank], _ = compare_checkpoints(CHECKPOINT, out, sequences[8:])
    assert found[0].kl_mean > found[4].kl_mean > found[64].kl_mean, found
