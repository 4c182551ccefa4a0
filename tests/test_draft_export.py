# SPDX-License-Identifier: Apache-2.0
"""Bundles with drafters: the manifest, how weights are reached, ledgers, and the command line."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file, save_file

from nemo_build.bundle import MODEL_BUNDLE, read_manifest
from nemo_build.cli import cli
from nemo_build.demo import CHECKPOINT
from nemo_build.errors import CheckpointError, ConfigError, UserError
from nemo_build.export.checkpoint import Checkpoint
from nemo_build.export.exporter import export_bundle
from nemo_build.export.models import GraphOptions
from nemo_build.spec_draft import DraftSpec

from .draft_reference import CONFIGS, DraftReference, save_draft, save_drafters
from .draft_runner import DraftRunner, open_session, states_of
from .mtp_reference import save_with_mtp
from .tiny import KINDS

DEMO = {"hidden_size": 192, "vocab_size": 3072, "mask_token_id": 2990, "pard_token": None}
"""What makes a configuration one of a drafter for the demo checkpoint."""


@pytest.fixture(scope="module")
def drafts(tmp_path_factory) -> dict[str, Path]:
    """Checkpoints of both kinds of drafter for the tiny checkpoint. Treat as read-only."""
    return save_drafters(tmp_path_factory.mktemp("drafts"))


@pytest.fixture(scope="module")
def bundle(tiny_checkpoint, drafts, tmp_path_factory) -> Path:
    """A bundle with both. Treat as read-only."""
    out = tmp_path_factory.mktemp("bundle") / "bundle"
    return export_bundle(tiny_checkpoint, out, drafts=list(drafts.values())).out


def locations(bundle: Path, graph: str) -> dict[str, str]:
    """External-data locations of a graph's weights."""
    model = onnx.load(bundle / f"{graph}.onnx", load_external_data=False)
    return {t.name: e.value for t in model.graph.initializer for e in t.external_data if e.key == "location"}


def test_manifest_and_metadata(tiny_checkpoint, drafts, bundle):
    manifest = read_manifest(bundle, MODEL_BUNDLE)
    assert list(manifest["graphs"]) == [
        *("mtp", "target", "dflash", "dflash_context"),
        *("dspark", "dspark_context", "dspark_markov"),
    ]
    assert manifest["graph_options"]["taps"] == [1, 3, 5]
    assert "taps" in manifest["graphs"]["target"]["outputs"]
    assert manifest["checkpoint"]["digest"] == Checkpoint.open(tiny_checkpoint).digest
    for kind, path in drafts.items():
        entry, checkpoint = manifest["drafters"][kind], Checkpoint.open(path)
        assert entry["checkpoint"]["digest"] == checkpoint.digest
        assert set(entry["checkpoint"]["files"]) == {"model.safetensors"}
        assert entry["weights"]["tensors"] == len(checkpoint.tensors)
        spec = DraftSpec.from_json(entry["spec"])
        for graph in entry["graphs"]:
            model = onnx.load(bundle / f"{graph}.onnx", load_external_data=False)
            metadata = {p.key: p.value for p in model.metadata_props}
            assert DraftSpec.from_json(json.loads(metadata["nemo_build.draft"])) == spec
            assert metadata["nemo_build.draft_digest"] == checkpoint.digest
            assert metadata["nemo_build.checkpoint_digest"] == manifest["checkpoint"]["digest"]


def test_interfaces(bundle):
    graphs = read_manifest(bundle, MODEL_BUNDLE)["graphs"]
    for kind in ("dflash", "dspark"):
        caches = [f"{c}.{kind}.layers.{i}" for i in range(2) for c in ("key", "value")]
        written = [f"{c}.out" for c in caches]
        context, block = graphs[f"{kind}_context"], graphs[kind]
        assert context["inputs"] == ["taps", "lengths", "past", "slots", *caches]
        assert context["outputs"] == written
        steps = ["lengths", "past", "accepted", "slots", "input_ids", "logit_rows"]
        assert block["inputs"] == [*steps, *caches]
        assert block["outputs"] == [*written, "logits", "hidden"]
        assert context["state"] == block["state"]
    assert graphs["dspark_markov"]["inputs"] == ["previous_ids", "base_logits"]
    assert graphs["dspark_markov"]["outputs"] == ["logits"]


def test_without_drafters_the_target_has_no_taps(tiny_bundle):
    manifest = read_manifest(tiny_bundle, MODEL_BUNDLE)
    assert "taps" not in manifest["graphs"]["target"]["outputs"]
    assert manifest["drafters"] == {}


def test_weights_stay_in_their_checkpoints(tiny_checkpoint, drafts, bundle):
    places = locations(bundle, "dspark")
    assert places["dspark.embed_tokens.weight"] == "weights/dspark/model.safetensors"
    assert places["lm_head.weight"] == "weights/model.safetensors"
    assert os.path.samefile(bundle / "weights" / "model.safetensors", tiny_checkpoint / "model.safetensors")
    for kind, path in drafts.items():
        assert os.path.samefile(bundle / "weights" / kind / "model.safetensors", path / "model.safetensors")
    written = sum(p.stat().st_size for p in bundle.iterdir() if p.is_file())
    assert written < 800_000


@pytest.mark.parametrize("mode", ["link", "reference"])
def test_drafters_elsewhere(tiny_checkpoint, drafts, bundle, tmp_path, mode):
    """Checkpoints in several directories, a drafter's as the hub's cache stores it: links to blobs."""
    blobs, snapshot = tmp_path / "hub" / "blobs", tmp_path / "hub" / "snapshots" / "abc"
    blobs.mkdir(parents=True)
    snapshot.mkdir(parents=True)
    for name in ("model.safetensors", "config.json"):
        (blobs / f"blob-{name}").write_bytes((drafts["dflash"] / name).read_bytes())
        (snapshot / name).symlink_to(f"../../blobs/blob-{name}")
    result = export_bundle(
        tiny_checkpoint, tmp_path / "out", drafts=[snapshot, drafts["dspark"]], weights=mode
    )
    assert result.weights == mode
    folder = read_manifest(tmp_path / "out", MODEL_BUNDLE)["weights"]["folder"]
    assert (folder is None) is (mode == "link")
    taps = np.random.default_rng(0).standard_normal((5, 144)).astype(np.float32)
    for kind in drafts:
        found = []
        for directory in (bundle, tmp_path / "out"):
            runner, past = DraftRunner(directory, kind, slots=1), {}
            runner.extend({0: taps}, past)
            found.append(runner.draft({0: [1, 90, 90]}, past)[0][0])
        np.testing.assert_array_equal(*found)


def test_other_file_system_falls_back_to_a_reference(tiny_checkpoint, drafts, tmp_path, monkeypatch):
    link = os.link

    def refuse(source, target):
        if "dflash" in str(target):
            raise OSError(errno.EXDEV, "Invalid cross-device link")
        link(source, target)

    monkeypatch.setattr(os, "link", refuse)
    result = export_bundle(tiny_checkpoint, tmp_path / "a", drafts=[drafts["dflash"]])
    assert result.weights == "reference"
    assert not (tmp_path / "a" / "weights").exists()
    open_session(tmp_path / "a", "dflash")
    with pytest.raises(UserError, match="Cannot hard-link"):
        export_bundle(tiny_checkpoint, tmp_path / "b", drafts=[drafts["dflash"]], weights="link")


def test_plain_onnxruntime_opens_the_graphs(bundle):
    """A process that never imports nemo_build opens every graph of a drafter."""
    code = """
import sys, onnxruntime as ort
for path in sys.argv[1:]:
    ort.InferenceSession(path, providers=["CPUExecutionProvider"])
assert not any(m.startswith("nemo_build") for m in sys.modules)
"""
    paths = [bundle / f"{name}.onnx" for name in ("dflash", "dflash_context", "dspark_markov")]
    subprocess.run([sys.executable, "-c", code, *paths], check=True)


def changed(source: Path, directory: Path, change, config: dict | None = None) -> Path:
    """A copy of a drafter's checkpoint with other tensors or another configuration."""
    directory.mkdir()
    tensors = load_file(source / "model.safetensors")
    change(tensors)
    save_file(tensors, directory / "model.safetensors")
    text = json.loads((source / "config.json").read_text()) | (config or {})
    (directory / "config.json").write_text(json.dumps(text))
    return directory


def test_every_tensor_is_accounted_for(tiny_checkpoint, drafts, tmp_path):
    def spoil(tensors):
        for i in range(2):
            del tensors[f"layers.{i}.self_attn.attention_sink_bias"]
        tensors["confidence_head.proj.weight"] = torch.zeros(1, 80)
        tensors["fc.weight_scale"] = torch.zeros(48, 8).to(torch.float8_e4m3fn)
        tensors["norm.weight"] = torch.zeros(48, dtype=torch.int32)
        del tensors["layers.1.mlp.up_proj.weight_scale_2"]

    bad = changed(drafts["dspark"], tmp_path / "bad", spoil)
    with pytest.raises(CheckpointError) as caught:
        export_bundle(tiny_checkpoint, tmp_path / "out", drafts=[bad])
    assert caught.value.headline == f"{bad}: the tensors are not those of the configured model"
    assert list(caught.value.problems) == [
        "missing: layers.1.mlp.up_proj.weight_scale_2 [] F32",
        "missing: layers.{0,1}.self_attn.attention_sink_bias [4] BF16 or F16 or F32 (2 tensors)",
        "unexpected: confidence_head.proj.weight [1, 80] F32",
        "wrong shape: fc.weight_scale: expected [48, 9], found [48, 8]",
        "wrong dtype: norm.weight: expected BF16 or F16 or F32, found I32",
    ]
    assert [p.name for p in tmp_path.iterdir()] == ["bad"]


def test_tables_that_the_configuration_does_not_mention(tiny_checkpoint, drafts, tmp_path):
    """With no word on embeddings and head, the drafter's own are used where its checkpoint has them."""
    unsaid = {"has_embed_tokens": None, "has_lm_head": None}
    own = changed(drafts["dflash"], tmp_path / "own", lambda _: None, unsaid)
    export_bundle(tiny_checkpoint, tmp_path / "a", drafts=[own])
    assert "dflash.embed_tokens.weight" in locations(tmp_path / "a", "dflash")

    def swap(tensors):
        tensors["lm_head.weight"] = tensors.pop("embed_tokens.weight")

    other = changed(drafts["dflash"], tmp_path / "other", swap, unsaid)
    export_bundle(tiny_checkpoint, tmp_path / "b", drafts=[other])
    places = locations(tmp_path / "b", "dflash")
    assert places["backbone.embeddings.weight"] == "weights/model.safetensors"
    assert places["dflash.lm_head.weight"] == "weights/dflash/model.safetensors"
    assert "lm_head.weight" not in places
    spec = read_manifest(tmp_path / "b", MODEL_BUNDLE)["drafters"]["dflash"]["spec"]
    assert (spec["own_embeddings"], spec["own_head"]) == (False, True)
    said = changed(drafts["dflash"], tmp_path / "said", swap)
    with pytest.raises(
        CheckpointError, match=r"missing: embed_tokens\.weight[^\0]*unexpected: lm_head\.weight"
    ):
        export_bundle(tiny_checkpoint, tmp_path / "c", drafts=[said])


def test_two_of_a_kind(tiny_checkpoint, drafts, tmp_path):
    with pytest.raises(UserError, match="one dflash drafter at most"):
        export_bundle(tiny_checkpoint, tmp_path / "out", drafts=[drafts["dflash"]] * 2)


def test_a_drafter_of_another_target(drafts, tmp_path):
    with pytest.raises(ConfigError, match="hidden_size: 48, but the target's is 192"):
        export_bundle(CHECKPOINT, tmp_path / "out", drafts=[drafts["dflash"]])


def test_the_output_is_not_a_drafter(tiny_checkpoint, drafts):
    with pytest.raises(UserError, match="does not replace it"):
        export_bundle(tiny_checkpoint, drafts["dflash"], drafts=[drafts["dflash"]], force=True)


def test_export_is_reproducible(tiny_checkpoint, drafts, bundle, tmp_path):
    export_bundle(tiny_checkpoint, tmp_path / "again", drafts=list(drafts.values()))
    for path in bundle.iterdir():
        if path.is_file():
            assert path.read_bytes() == (tmp_path / "again" / path.name).read_bytes(), path.name


def test_command_line(tiny_checkpoint, drafts, tmp_path):
    words = ["export", tiny_checkpoint, *(w for p in drafts.values() for w in ("--draft", p))]
    done = CliRunner().invoke(cli, [str(w) for w in [*words, "-o", tmp_path / "a", "--json"]])
    found = json.loads(done.stdout)
    assert set(found["graphs"]) >= {"dflash", "dflash_context", "dspark", "dspark_context", "dspark_markov"}
    assert found["drafters"]["dspark"]["tensors"] == len(Checkpoint.open(drafts["dspark"]).tensors)
    done = CliRunner().invoke(cli, [str(w) for w in [*words, "-o", tmp_path / "b", "--last-tap", "normed"]])
    assert "dspark: " in done.stdout
    assert read_manifest(tmp_path / "b", MODEL_BUNDLE)["graph_options"]["last_tap"] == "normed"


def test_a_drafter_of_the_demo_checkpoint(tmp_path):
    """A drafter in the released format, in BF16 and NVFP4, beside the checkpoint that ships with the package."""
    tables = load_file(CHECKPOINT / "model.safetensors")
    embeddings, head = (tables[n].float() for n in ("backbone.embeddings.weight", "lm_head.weight"))
    reference = DraftReference(
        CONFIGS["dspark-odd"] | DEMO | {"target_layer_ids": [2, 8, 11]}, embeddings, head
    )
    save_draft(reference, tmp_path / "draft", dtype=torch.bfloat16, packed=("fc", "k_proj", "mlp.up"))
    export_bundle(CHECKPOINT, tmp_path / "bundle", drafts=[tmp_path / "draft"])
    runner, past = DraftRunner(tmp_path / "bundle", "dspark"), {}
    taps = np.random.default_rng(1).standard_normal((9, 3 * 192)).astype(np.float32)
    runner.extend({0: taps}, past)
    got = runner.draft({0: [17, 2990, 2990]}, past)[0]
    for g, w in zip(
        got, reference.block(torch.from_numpy(taps), torch.tensor([17, 2990, 2990])), strict=True
    ):
        np.testing.assert_allclose(g, w.numpy(), atol=1e-4, rtol=0)


@pytest.mark.parametrize("norm", ["rms", "layer"])
def test_choices_of_the_mtp_module(tmp_path, norm):
    """Hidden states before the final norm, the target's and the module's own, and the module's final norm."""
    model, mtp = save_with_mtp(tmp_path / "checkpoint", **KINDS["hybrid"])
    options = GraphOptions(mtp_hidden="raw", mtp_norm=norm)
    export_bundle(tmp_path / "checkpoint", tmp_path / "bundle", options=options)
    tokens = torch.from_numpy(np.random.default_rng(2).integers(0, 96, 12))
    kept: list[torch.Tensor] = []
    hook = model.model.norm_f.register_forward_pre_hook(lambda _, inputs: kept.append(inputs[0][0]))
    with torch.no_grad():
        model.model(tokens[None], use_cache=False)
    hook.remove()
    hidden = run_step(tmp_path / "bundle", "target", tokens.numpy())[1]
    np.testing.assert_allclose(hidden, kept[0].numpy(), atol=1e-4, rtol=0)

    final = mtp.final_layernorm
    if norm == "layer":
        mtp.final_layernorm = torch.nn.LayerNorm(48, eps=model.config.layer_norm_epsilon, bias=False)
        mtp.final_layernorm.weight = final.weight
    hook = mtp.final_layernorm.register_forward_pre_hook(lambda _, inputs: kept.append(inputs[0][0]))
    want, _ = mtp(tokens[1:], kept[0][:-1])
    hook.remove()
    logits, raw = run_step(tmp_path / "bundle", "mtp", tokens[1:].numpy(), kept[0][:-1].numpy())
    np.testing.assert_allclose(logits, want.numpy(), atol=1e-4, rtol=0)
    np.testing.assert_allclose(raw, kept[1].numpy(), atol=1e-4, rtol=0)


def run_step(
    bundle: Path, graph: str, tokens: np.ndarray, hidden: np.ndarray | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """Logits and hidden states of one sequence from its beginning."""
    session = open_session(bundle, graph)
    sizes = {"slots": 1, "context": 32, "pending": 0}
    feeds = {s.name: np.zeros(s.resolve(sizes), np.float32) for s in states_of(session)}
    rows = {"lengths": [len(tokens)], "past": [0], "accepted": [0], "slots": [0]}
    feeds |= {n: np.array(v, np.int64) for n, v in rows.items()}
    feeds |= {"input_ids": tokens[None], "logit_rows": np.arange(len(tokens))}
    if hidden is not None:
        feeds["hidden_in"] = hidden[None]
    logits, out = session.run(["logits", "hidden"], feeds)
    return logits, out[0]
