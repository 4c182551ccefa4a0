# SPDX-License-Identifier: Apache-2.0
"""What changed from one engine, bundle or checkpoint to another."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from click.testing import CliRunner

from nemo_build.bundle import MODEL_BUNDLE, read_manifest
from nemo_build.cli import cli
from nemo_build.engines.build import BuildOptions, build_engine
from nemo_build.engines.diff import diff
from nemo_build.engines.diff_report import diff_page, diff_text
from nemo_build.errors import BundleError, UserError
from nemo_build.export.exporter import export_bundle
from nemo_build.export.models import GraphOptions

from .mtp_reference import save_with_mtp
from .tiny import KINDS

SIZES = BuildOptions(max_sequences=2, max_context=64)


@pytest.fixture(scope="module")
def engines(tiny_bundle, tmp_path_factory) -> dict[str, Path]:
    """The same bundle built twice, and with other options."""
    folder = tmp_path_factory.mktemp("engines")
    options = {"a": SIZES, "again": SIZES, "int4": BuildOptions(2, 128, weights="int4")}
    return {
        name: build_engine(tiny_bundle, folder / name, options=o, use_cache=False).out
        for name, o in options.items()
    }


def test_equal_engines(engines):
    found = diff(engines["a"], engines["again"])
    assert found.equal
    assert "are equal" in diff_text(found)
    assert found.to_json()["equal"] is True


def test_other_options(engines):
    found = diff(engines["a"], engines["int4"])
    assert {c.name: (c.before, c.after) for c in found.facts["options"]} == {
        "max_context": (64, 128),
        "weights": ("packed", "int4"),
    }
    assert "provenance" not in found.facts
    assert "spec" not in found.facts
    assert [c.name for c in found.facts["contents"]] == ["weights.bin"]
    assert all(t.before.startswith("f32") and t.after.startswith("int4") for t in found.tensors)
    formats = {c.name: (c.before, c.after) for c in found.formats}
    assert formats["int4"][0] is None
    assert formats["int4"][1] > 0
    text = diff_text(found)
    assert "~ max_context: 64 -> 128" in text
    assert "bytes by format" in text


def test_other_weights_of_the_same_shape(tmp_path):
    """Weights that differ in value alone show in the digests of what holds them."""
    for seed in (0, 1):
        save_with_mtp(tmp_path / f"c{seed}", seed=seed, **KINDS["hybrid"])
        export_bundle(tmp_path / f"c{seed}", tmp_path / f"b{seed}")
        build_engine(tmp_path / f"b{seed}", tmp_path / f"e{seed}", options=SIZES, use_cache=False)
    found = diff(tmp_path / "e0", tmp_path / "e1")
    assert set(found.facts) == {"contents", "provenance"}
    assert not found.tensors


def test_other_graphs_and_layers(tiny_checkpoint, tiny_bundle, tmp_path):
    other = export_bundle(tiny_checkpoint, tmp_path / "norm", options=GraphOptions(mtp_norm="layer")).out
    found = diff(tiny_bundle, other)
    assert [c.name for c in found.facts["graph options"]] == ["mtp_norm"]
    assert {c.name: (c.before or 0, c.after or 0) for c in found.nodes["mtp"]}["LayerNormalization"] == (0, 1)
    assert "target" not in found.nodes
    save_with_mtp(tmp_path / "short", **{**KINDS["hybrid"], "hybrid_override_pattern": "MEM*E"})
    shorter = export_bundle(tmp_path / "short", tmp_path / "b").out
    found = diff(tiny_bundle, shorter)
    assert ("layers.5", "mlp", None) in [(c.name, c.before, c.after) for c in found.facts["spec"]]
    assert any(t.names.startswith("backbone.layers.5.") and not t.after for t in found.tensors)


def test_checkpoints(tiny_checkpoint, tmp_path):
    copy = tmp_path / "copy"
    shutil.copytree(tiny_checkpoint, copy)
    assert diff(tiny_checkpoint, copy).equal
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps({**config, "routed_scaling_factor": 3.5}))
    found = diff(tiny_checkpoint, copy)
    assert ("moe.scaling_factor", 2.5, 3.5) in [(c.name, c.before, c.after) for c in found.facts["spec"]]


def test_a_page_needs_nothing_else(engines):
    page = diff_page(diff(engines["a"], engines["int4"]))
    assert page.startswith("<!doctype html>")
    assert "max_context" in page
    assert "http" not in page
    assert "<script" not in page


def test_what_cannot_be_compared(engines, tiny_bundle, tmp_path):
    with pytest.raises(UserError, match="Only two of a kind") as caught:
        diff(engines["a"], tiny_bundle)
    assert [p.split(": ")[1] for p in caught.value.problems] == ["engine", "model bundle"]
    with pytest.raises(UserError, match="neither an engine"):
        diff(engines["a"], tmp_path)
    shutil.copytree(tiny_bundle, tmp_path / "damaged")
    (tmp_path / "damaged" / MODEL_BUNDLE).write_text("{")
    with pytest.raises(BundleError):
        diff(tiny_bundle, tmp_path / "damaged")


def test_exit_status(engines, tiny_bundle, tmp_path):
    def run(*arguments: object):
        return CliRunner().invoke(cli, ["diff", *map(str, arguments)])

    page = tmp_path / "page.html"
    same = run(engines["a"], engines["again"])
    other = run(engines["a"], engines["int4"], "--json", "--html", page)
    assert (same.exit_code, other.exit_code) == (0, 1)
    assert json.loads(other.stdout)["equal"] is False
    assert page.read_text(encoding="utf-8") == diff_page(diff(engines["a"], engines["int4"]))
    wrong = run(engines["a"], tiny_bundle)
    assert wrong.exit_code == 2
    assert wrong.stderr.startswith("error: ")
    assert run(engines["a"], engines["again"], "--html", tmp_path / "no" / "page.html").exit_code == 2
    assert run("/nowhere", engines["a"]).exit_code == 2


def test_older_manifests_can_be_compared(tiny_bundle, tmp_path):
    """What a manifest of the same format did not have yet is a difference, not an error."""
    shutil.copytree(tiny_bundle, tmp_path / "older")
    manifest = read_manifest(tiny_bundle, MODEL_BUNDLE)
    del manifest["opsets"]
    (tmp_path / "older" / MODEL_BUNDLE).write_text(json.dumps(manifest))
    found = diff(tmp_path / "older", tiny_bundle)
    assert {c.before for c in found.facts["versions"]} == {None}
