# SPDX-License-Identifier: Apache-2.0
"""Model bundles: what export writes, and what it leaves behind when it cannot."""

from __future__ import annotations

import errno
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx
import pytest

from nemo_build.bundle import MODEL_BUNDLE, read_manifest
from nemo_build.engines.ort import OrtSession
from nemo_build.errors import CheckpointError, UserError
from nemo_build.export import exporter
from nemo_build.export.exporter import export_bundle
from nemo_build.plugins.registry import STANDARD_OPSET
from nemo_build.plugins.schema import DOMAIN, OPSET_VERSION
from nemo_build.spec import ModelSpec, load_spec

from .tiny import feed

ROOT = Path(__file__).parent.parent


def contents(directory: Path) -> list[str]:
    return sorted(p.name for p in directory.iterdir())


def test_manifest_and_metadata(tiny_checkpoint, tiny_bundle):
    manifest = read_manifest(tiny_bundle, MODEL_BUNDLE)
    spec = load_spec(tiny_checkpoint)
    assert ModelSpec.from_json(manifest["spec"]) == spec
    assert set(manifest["graphs"]) == {"target", "mtp"}
    for name, graph in manifest["graphs"].items():
        model = onnx.load(tiny_bundle / graph["file"], load_external_data=False)
        metadata = {p.key: p.value for p in model.metadata_props}
        assert metadata["nemo_build.graph"] == name
        assert metadata["nemo_build.checkpoint_digest"] == manifest["checkpoint"]["digest"]
        assert ModelSpec.from_json(json.loads(metadata["nemo_build.spec"])) == spec
        assert json.loads(metadata["nemo_build.state"]) == graph["state"]
        imports = {o.domain: o.version for o in model.opset_import}
        assert imports == {"": STANDARD_OPSET, DOMAIN: OPSET_VERSION}
        used = {(n.op_type, n.overload) for n in model.graph.node if n.domain == DOMAIN}
        assert used == {(f.name, f.overload) for f in model.functions}
        for function in model.functions:
            assert {o.domain: o.version for o in function.opset_import} == {"": STANDARD_OPSET}
            schema = onnx.defs.get_schema(function.name, OPSET_VERSION, DOMAIN)
            assert schema.since_version == imports[DOMAIN]


def test_weights_are_the_checkpoints_own_bytes(tiny_checkpoint, tiny_bundle):
    shard, linked = tiny_checkpoint / "model.safetensors", tiny_bundle / "weights" / "model.safetensors"
    assert os.path.samefile(shard, linked)
    written = sum(p.stat().st_size for p in tiny_bundle.iterdir() if p.is_file())
    inside = [
        t
        for name in ("target", "mtp")
        for t in onnx.load(tiny_bundle / f"{name}.onnx", load_external_data=False).graph.initializer
        if t.data_location != onnx.TensorProto.EXTERNAL
    ]
    assert all(len(t.raw_data) <= 64 for t in inside)
    assert written < 400_000


def test_plain_onnxruntime_runs_the_bundle_without_this_package(tiny_bundle):
    """A process that never imports nemo_build opens the graph and computes the same logits."""
    code = f"""
import sys, numpy as np, onnxruntime as ort, json
session = ort.InferenceSession({str(tiny_bundle / "target.onnx")!r}, providers=["CPUExecutionProvider"])
sizes = {{"slots": 1, "context": 16}}
def dim(d):
    return d if isinstance(d, int) else sum(int(t) if t.isdigit() else sizes.get(t, 0) for t in d.split("+"))
feeds = {{i.name: np.zeros([dim(d) for d in i.shape], np.float32)
         for i in session.get_inputs() if i.type == "tensor(float)"}}
feeds |= {{"input_ids": np.array([[5, 6, 7]]), "lengths": np.array([3]), "past": np.array([0]),
          "accepted": np.array([0]), "slots": np.array([0]), "logit_rows": np.array([2])}}
assert not any(m.startswith("nemo_build") for m in sys.modules)
print(json.dumps(session.run(["logits"], feeds)[0][0].tolist()))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    session = OrtSession(tiny_bundle / "target.onnx", slots=1, context=16)
    np.testing.assert_allclose(json.loads(done.stdout), feed(session, {0: [5, 6, 7]}, {})[0][-1], atol=1e-5)


@pytest.fixture
def hub_snapshot(tiny_checkpoint, tmp_path) -> Path:
    """The checkpoint as the hub's cache stores it: links to blobs named by digest."""
    blobs, snapshot = tmp_path / "models--x" / "blobs", tmp_path / "models--x" / "snapshots" / "abc"
    blobs.mkdir(parents=True)
    snapshot.mkdir(parents=True)
    for i, path in enumerate(sorted(tiny_checkpoint.iterdir())):
        shutil.copyfile(path, blobs / f"{i:064x}")
        (snapshot / path.name).symlink_to(f"../../blobs/{i:064x}")
    return snapshot


@pytest.mark.parametrize("mode", ["link", "reference"])
def test_hub_snapshot(hub_snapshot, tmp_path, mode, tiny_bundle):
    result = export_bundle(hub_snapshot, tmp_path / "bundle", weights=mode)
    assert result.weights == mode
    folder = read_manifest(tmp_path / "bundle", MODEL_BUNDLE)["weights"]["folder"]
    assert (folder is None) == (mode == "link")
    session = OrtSession(tmp_path / "bundle" / "target.onnx", slots=1, context=16, weights_folder=folder)
    direct = OrtSession(tiny_bundle / "target.onnx", slots=1, context=16)
    np.testing.assert_array_equal(feed(session, {0: [1, 2]}, {})[0], feed(direct, {0: [1, 2]}, {})[0])


def test_other_file_system_falls_back_to_a_reference(tiny_checkpoint, tmp_path, monkeypatch):
    def refuse(*_):
        raise OSError(errno.EXDEV, "Invalid cross-device link")

    monkeypatch.setattr(os, "link", refuse)
    assert export_bundle(tiny_checkpoint, tmp_path / "a").weights == "reference"
    assert not (tmp_path / "a" / "weights").exists()
    with pytest.raises(UserError, match="Cannot hard-link"):
        export_bundle(tiny_checkpoint, tmp_path / "b", weights="link")
    assert contents(tmp_path) == ["a"]


def test_nothing_is_written_for_a_bad_checkpoint(tiny_checkpoint, tmp_path):
    bad = tmp_path / "bad"
    shutil.copytree(tiny_checkpoint, bad)
    config = json.loads((bad / "config.json").read_text())
    config["moe_intermediate_size"] += 8
    (bad / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=r"experts\.\{0\.\.7\}\.up_proj"):
        export_bundle(bad, tmp_path / "out")
    assert contents(tmp_path) == ["bad"]


@pytest.mark.parametrize("interruption", [KeyboardInterrupt, SystemExit, OSError])
def test_interrupted_export_leaves_nothing(tiny_checkpoint, tmp_path, monkeypatch, interruption):
    def interrupt(*_):
        raise interruption

    monkeypatch.setattr(exporter, "copy_files", interrupt)
    with pytest.raises(interruption):
        export_bundle(tiny_checkpoint, tmp_path / "out")
    assert contents(tmp_path) == []


def test_existing_output_is_kept_unless_forced(tiny_checkpoint, tmp_path):
    out = tmp_path / "out"
    export_bundle(tiny_checkpoint, out)
    (out / "note").write_text("old")
    with pytest.raises(UserError, match="exists already"):
        export_bundle(tiny_checkpoint, out)
    assert "note" in contents(out)
    export_bundle(tiny_checkpoint, out, force=True)
    assert "note" not in contents(out)
    assert contents(tmp_path) == ["out"]


def test_force_replaces_nothing_but_bundles(tiny_checkpoint, tmp_path):
    checkpoint, precious = tmp_path / "in" / "checkpoint", tmp_path / "precious"
    shutil.copytree(tiny_checkpoint, checkpoint)
    precious.mkdir()
    (precious / "thesis").write_text("mine")
    (tmp_path / "file").write_text("mine")
    (tmp_path / "link").symlink_to(precious)
    before = sorted(tmp_path.rglob("*"))
    for out in (checkpoint, tmp_path / "in", precious, tmp_path / "file", tmp_path / "link"):
        with pytest.raises(UserError, match=r"cannot be the output|does not replace it"):
            export_bundle(checkpoint, out, force=True)
    assert sorted(tmp_path.rglob("*")) == before


def test_a_swap_that_fails_restores_the_old_bundle(tiny_checkpoint, tmp_path, monkeypatch):
    out = tmp_path / "out"
    export_bundle(tiny_checkpoint, out)
    (out / "note").write_text("old")
    rename = Path.rename

    def refuse(self, target):
        if self.name.endswith(".partial"):
            raise OSError(errno.EIO, "Input/output error")
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", refuse)
    with pytest.raises(OSError, match="Input/output"):
        export_bundle(tiny_checkpoint, out, force=True)
    assert "note" in contents(out)
    assert contents(tmp_path) == ["out"]


def test_stray_files_and_further_templates(tiny_checkpoint, tmp_path):
    source = tmp_path / "checkpoint"
    shutil.copytree(tiny_checkpoint, source)
    shutil.copyfile(source / "model.safetensors", source / "adapter.safetensors")
    (source / "additional_chat_templates").mkdir()
    (source / "additional_chat_templates" / "tool_use.jinja").write_text("x")
    assert export_bundle(source, tmp_path / "bundle").unused == ("adapter.safetensors",)
    assert (tmp_path / "bundle" / "additional_chat_templates" / "tool_use.jinja").read_text() == "x"


def test_export_is_reproducible(tiny_checkpoint, tiny_bundle, tmp_path):
    export_bundle(tiny_checkpoint, tmp_path / "again")
    for name in contents(tiny_bundle):
        if name != "weights":
            assert (tiny_bundle / name).read_bytes() == (tmp_path / "again" / name).read_bytes(), name


@pytest.mark.parametrize(
    ("stored", "tensors", "nbytes"), [("bf16", 6513, 65_842_365_568), ("nvfp4", 18_487, 21_559_589_596)]
)
def test_full_size_releases_export_without_copying(tmp_path, stored, tensors, nbytes):
    """The 30B releases' tensors: all accounted for, little written, valid graphs."""
    script = ROOT / "scripts" / "synthetic_checkpoint.py"
    command = [sys.executable, script, "--format", stored, tmp_path / "checkpoint"]
    subprocess.run(command, check=True, capture_output=True)
    result = export_bundle(tmp_path / "checkpoint", tmp_path / "bundle")
    assert len(result.ledger.entries) == tensors
    assert result.ledger.nbytes == nbytes
    written = sum(p.stat().st_size for p in (tmp_path / "bundle").iterdir() if p.is_file())
    assert written < 50_000_000
    graph = onnx.load(tmp_path / "bundle" / "target.onnx", load_external_data=False)
    locations = {e.value for t in graph.graph.initializer for e in t.external_data if e.key == "location"}
    assert all((tmp_path / "bundle" / name).stat().st_nlink == 2 for name in locations)
