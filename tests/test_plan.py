# SPDX-License-Identifier: Apache-2.0
"""Plans before a build: memory batch by context, and the bound that bandwidth sets."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner

from nemo_build.bundle import MODEL_BUNDLE, read_manifest
from nemo_build.cli import cli
from nemo_build.demo import CHECKPOINT
from nemo_build.engines.build import BuildOptions, build_engine
from nemo_build.engines.footprint import Footprint, bits, elements
from nemo_build.engines.forecast import PlanOptions, forecast, forecast_model, require_all
from nemo_build.engines.inspect import inspect
from nemo_build.engines.roofline import distinct_experts, step_bytes
from nemo_build.engines.targets import TARGETS, usable_bytes
from nemo_build.errors import BundleError, PlanError, UserError
from nemo_build.export.exporter import export_bundle
from nemo_build.plugins.panels import FORMATS

SCRIPT = Path(__file__).parent.parent / "scripts" / "synthetic_checkpoint.py"
PUBLISHED = {"state_type": "float16", "cache_type": "fp8"}
"""How servers hold the states of the published NVFP4 checkpoint."""


@pytest.fixture(scope="module")
def released(tmp_path_factory) -> Path:
    """A bundle's manifest alone, of the NVFP4 release's names, shapes and dtypes."""
    folder = tmp_path_factory.mktemp("released")
    command = [sys.executable, str(SCRIPT), str(folder / "checkpoint"), "--format", "nvfp4"]
    subprocess.run(command, check=True, capture_output=True)
    bundle = export_bundle(folder / "checkpoint", folder / "whole").out
    (folder / "bundle").mkdir()
    (bundle / MODEL_BUNDLE).rename(folder / "bundle" / MODEL_BUNDLE)
    return folder / "bundle"


def test_experts_that_a_batch_touches():
    """Against the figures that follow from uniform routing over 128 experts of which 6 are chosen."""
    for tokens, count in ((1, 6), (4, 22.4), (8, 40.8), (16, 68.6), (32, 100.5)):
        assert distinct_experts(128, 6, tokens) == pytest.approx(count, abs=0.06)


def test_active_bytes_of_the_release(released):
    """2.42 GB a token: Mamba in FP8, attention in BF16, experts and head in NVFP4."""
    model = Footprint.of_manifest(read_manifest(released, MODEL_BUNDLE))
    step = step_bytes(model, [], sequences=1, context=8192)
    assert step.weights == pytest.approx(2.42e9, rel=0.01)
    assert step.experts == pytest.approx(1376.9e6 * 4.5 / 8, rel=0.01)
    assert model.nbytes == pytest.approx(21.56e9, rel=0.001)
    wider = step_bytes(model, [], sequences=1, context=8192, tokens=4)
    assert wider.experts / step.experts == pytest.approx(22.4 / 6, rel=0.01)


@pytest.mark.parametrize(
    ("target", "bounds"),
    [
        (
            "h100",
            {(1, 8192): 1344, (32, 8192): 6301, (256, 8192): 22.9e3, (1, 262144): 1024, (1, 1048576): 589},
        ),
        (
            "h200",
            {(1, 8192): 1926, (32, 8192): 9028, (256, 8192): 32.9e3, (1, 262144): 1467, (1, 1048576): 844},
        ),
        ("b200", {(1, 8192): 3209, (32, 8192): 15046, (256, 8192): 54.8e3, (1, 1048576): 1406}),
        ("rtx-pro-6000", {(1, 8192): 719, (32, 8192): 3370, (256, 8192): 12.3e3, (1, 1048576): 315}),
        ("l40s", {(1, 8192): 347, (32, 8192): 1625, (1, 1048576): 152}),
        ("dgx-spark", {(1, 8192): 110, (32, 8192): 513, (1, 262144): 83, (1, 1048576): 48}),
    ],
)
def test_bounds_of_the_release(released, target, bounds):
    """Tokens per second at a bandwidth, against figures worked out by hand from the release's shapes."""
    plan = forecast(released, TARGETS[target], PlanOptions(sequences=(1, 32, 256), **PUBLISHED))
    found = {(c.sequences, c.context): c.bound for c in plan.cells}
    for cell, bound in bounds.items():
        assert found[cell] == pytest.approx(bound, rel=0.02), cell


def test_memory_of_the_release(released):
    """State 24.1 MB + 0.85 MB in float16 and 3,072 + 512 bytes of FP8 cache a position (the module's own included)."""
    options = PlanOptions(sequences=(1, 4), contexts=(8192, 1 << 20), **PUBLISHED)
    plan = forecast(released, TARGETS["h100"], options)
    one = plan.cells[0]
    assert one.state == pytest.approx(24.1e6 + 0.85e6, rel=0.01)
    assert one.cache == 8192 * (3072 + 512)
    assert plan.sizing.pending == 4
    per_layer = 4096 + 1024 + 64 + 6144  # inputs of the scan and of the convolution, a token
    assert one.pending == 4 * 23 * per_layer * 2
    assert all(
        c.total == plan.model.nbytes + c.state + c.pending + c.cache + c.activations for c in plan.cells
    )
    for cell in plan.cells:
        assert cell.fits == (cell.sequences <= plan.at_most()[cell.context])
    assert plan.sizing.longest_context() == 1 << 20


def test_conversion_changes_unquantized_projections_only(released):
    model = Footprint.of_manifest(read_manifest(released, MODEL_BUNDLE))
    small = model.held("int4")
    before, after = (dict(m.parts["target"].groups()) for m in (model, small))
    assert after["routed experts", "nvfp4"] == before["routed experts", "nvfp4"]
    assert after["embeddings", "bf16"] == before["embeddings", "bf16"]
    assert after["attention", "int4"] == pytest.approx(before["attention", "bf16"] * 4.5 / 16, rel=1e-6)
    assert model.held("plain").parts["target"].nbytes > 4 * 31e9


@pytest.mark.parametrize("form", list(FORMATS))
def test_bits_of_formats_are_those_of_packed_weights(form):
    rows, columns = 64, 1024
    assert FORMATS[form].nbytes(rows, columns) * 8 == rows * columns * bits(form)
    assert elements(rows * columns * int(bits(form) * 2) // 16, form) == rows * columns


def test_what_cannot_fit_is_refused_with_the_arithmetic(released):
    plan = forecast(released, TARGETS["rtx-40"], PlanOptions(sequences=(4, 64), contexts=(1 << 20,)))
    with pytest.raises(PlanError) as caught:
        plan.require()
    text = str(caught.value)
    assert "does not fit GeForce RTX 4090" in text
    assert "(20.08 GiB on disk)" in text
    assert "key/value cache" in text
    forecast(released, TARGETS["h100"], PlanOptions(sequences=(1,), contexts=(8192,))).require()
    tight = forecast(released, TARGETS["h100"], PlanOptions(memory=1 << 30))
    assert tight.sizing.longest_context() == 0
    with pytest.raises(PlanError, match="the memory allowed") as caught:
        require_all([plan, tight])
    assert "GeForce RTX 4090" in str(caught.value)


def test_compiled_graphs_share_nothing(released):
    """Decoding and prompts have graphs of their own, and the MTP module's have embeddings and head again."""
    model = Footprint.of_manifest(read_manifest(released, MODEL_BUNDLE))
    again = 131072 * 2688 * (2 + 9 / 16)
    assert model.nbytes_apart - model.nbytes == pytest.approx(again, rel=1e-6)
    for phases in (1, 2):
        options = PlanOptions(sequences=(1,), contexts=(8192,), phases=phases)
        plan = forecast(released, TARGETS["rtx-pro-6000"], options)
        assert plan.sizing.weights_memory == phases * model.nbytes_apart
        assert plan.cells[0].state == 2 * forecast(released, TARGETS["h100"], options).cells[0].state


def test_formats_that_a_gpu_lacks(released):
    """A compiled engine has the nearest format: INT4 for NVFP4, BF16 for FP8; what kernels decode stays."""
    one = PlanOptions(sequences=(1,), contexts=(8192,))
    found = {
        name: {
            form
            for part in forecast(released, TARGETS[name], one).model.parts.values()
            for _, form in part.groups()
        }
        for name in ("a100", "l40s", "rtx-50", "h100", "cpu")
    }
    assert found["a100"] == {"bf16", "f32", "int4"}
    assert found["l40s"] == {"bf16", "f32", "int4", "fp8"}
    assert found["rtx-50"] == found["h100"] == found["cpu"] == {"bf16", "f32", "nvfp4", "fp8"}
    mamba = [forecast(released, TARGETS[n], one).model.parts["target"].groups() for n in ("a100", "h100")]
    assert mamba[0]["mamba", "bf16"] == pytest.approx(2 * mamba[1]["mamba", "fp8"], rel=0.01)


def test_mistakes_are_all_named(released):
    with pytest.raises(UserError) as caught:
        forecast(
            released,
            TARGETS["h100"],
            PlanOptions((0,), (1 << 30,), weights="plain", state_type="fp8", cache_type="int2"),
        )
    assert len(caught.value.problems) == 5


def test_a_manifest_without_roles(released):
    manifest = read_manifest(released, MODEL_BUNDLE)
    manifest["weights"] = {k: v for k, v in manifest["weights"].items() if k != "bytes_by_role"}
    with pytest.raises(BundleError, match="nemo-build export"):
        Footprint.of_manifest(manifest)


@pytest.mark.parametrize("weights", ["auto", "int8", "plain"])
def test_plan_is_what_the_build_plans(tmp_path, weights):
    """Weights to within the padding of panels, states and caches to the byte."""
    bundle = export_bundle(CHECKPOINT, tmp_path / "bundle").out
    asked = BuildOptions(2, 128, weights=weights)
    built = build_engine(bundle, tmp_path / "engine", options=asked, use_cache=False).plan
    options = PlanOptions(sequences=(2,), contexts=(128,), weights=weights)
    plan = forecast(bundle, TARGETS["cpu"], options)
    cell = plan.cells[0]
    assert (cell.state, cell.cache, cell.activations) == (built.state, built.cache, built.activations)
    assert plan.model.nbytes == pytest.approx(built.weights_memory, rel=0.01)


def test_speculation_and_tied_heads(tiny_bundle):
    model = Footprint.of_manifest(read_manifest(tiny_bundle, MODEL_BUNDLE))
    assert forecast_model(model, TARGETS["rtx-40"]).sizing.pending == 2
    alone = replace(model, parts={"target": model.parts["target"]})
    assert forecast_model(alone, TARGETS["rtx-40"]).sizing.pending == 0
    assert forecast_model(alone, TARGETS["cpu"]).sizing.pending == 0
    tied = replace(model, spec=replace(model.spec, tie_word_embeddings=True))
    table = model.spec.vocab_size * model.spec.hidden_size * 4
    assert tied.dense_bytes - model.dense_bytes == table
    assert model.embedding_row_bytes == model.spec.hidden_size * 4


def test_inspect_says_the_same(tiny_bundle):
    fits = {f.target: f for f in inspect(tiny_bundle).fits}
    plan = forecast(tiny_bundle, TARGETS["h100"], PlanOptions(sequences=(1,), contexts=(1024,)))
    assert fits["h100"].context == plan.sizing.longest_context() == 1024
    assert fits["h100"].sequences >= plan.at_most()[1024] > 0  # which also has pending tokens
    assert usable_bytes(TARGETS["h100"]) == plan.sizing.available


def test_the_command_writes_nothing(released, tmp_path):
    def run(*arguments: object):
        return CliRunner().invoke(cli, ["build", str(released), "--plan", *map(str, arguments)])

    before = sorted(released.rglob("*"))
    text = run("--target", "h100,rtx-40", "--sequences", "1,8", "--context", "8192").stdout
    assert "computed, not measured" in text
    assert "GeForce RTX 4090" in text
    data = json.loads(run("--target", "h100", "--cache-type", "fp8", "--json").stdout)["plans"]
    assert data[0]["cells"][0]["bound"] > 1000
    assert data[0]["most_sequences"]["8192"] > 100
    assert sorted(released.rglob("*")) == before
    assert CliRunner().invoke(cli, ["build", str(released)]).exit_code == 2
    assert run("--sequences", "1,x").exit_code == 2
    asked = json.loads(run("--max-sequences", 3, "--max-context", 999, "--json").stdout)["plans"][0]["cells"]
    assert [(c["sequences"], c["context"]) for c in asked] == [(3, 999)]
    assert isinstance(run("--memory", "1").exception, PlanError)
    assert CliRunner().invoke(cli, ["build", "b", "-o", str(tmp_path / "x"), "--context", "1"]).exit_code == 2
