# SPDX-License-Identifier: Apache-2.0
"""Engines: reproducible, cached by content, published whole, refused when they cannot fit."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import pytest

from nemo_build.bundle import ENGINE_BUNDLE, read_manifest
from nemo_build.engines import build as build_module
from nemo_build.engines import plan as plan_module
from nemo_build.engines.build import BuildOptions, build_engine
from nemo_build.engines.inspect import inspect, verify_weights
from nemo_build.engines.ort import OrtSession
from nemo_build.engines.plan import host_memory
from nemo_build.engines.weights import stored_tensors
from nemo_build.errors import BundleError, PlanError, UserError
from nemo_build.export.exporter import export_bundle

from .tiny import feed, reference_model

OPTIONS = BuildOptions(max_sequences=2, max_context=64)


@pytest.fixture
def own_bundle(tiny_checkpoint, tmp_path) -> Path:
    """A bundle of a private copy of the checkpoint, which a test may damage."""
    shutil.copytree(tiny_checkpoint, tmp_path / "checkpoint")
    export_bundle(tmp_path / "checkpoint", tmp_path / "bundle")
    return tmp_path / "bundle"


def files(directory: Path) -> dict[str, bytes]:
    return {str(p.relative_to(directory)): p.read_bytes() for p in directory.rglob("*") if p.is_file()}


def test_two_builds_are_byte_identical(tiny_bundle, tmp_path):
    for name in "ab":
        result = build_engine(tiny_bundle, tmp_path / name, options=OPTIONS, use_cache=False)
        assert not result.cached
    assert files(tmp_path / "a") == files(tmp_path / "b")


def test_second_build_comes_from_the_cache(own_bundle, tmp_path, monkeypatch):
    first = build_engine(own_bundle, tmp_path / "a", options=OPTIONS)

    def fail(*_):
        raise AssertionError("a cached build must not pack weights")

    monkeypatch.setattr(build_module, "write_packed", fail)
    second = build_engine(own_bundle, tmp_path / "b", options=OPTIONS)
    assert (first.cached, second.cached) == (False, True)
    assert files(tmp_path / "a") == files(tmp_path / "b")
    with pytest.raises(AssertionError, match="must not pack"):
        build_engine(own_bundle, tmp_path / "c", options=BuildOptions(max_sequences=3, max_context=64))


def test_other_weights_of_the_same_shape_are_another_engine(own_bundle, tmp_path):
    first = build_engine(own_bundle, tmp_path / "a", options=OPTIONS)
    shard = tmp_path / "checkpoint" / "model.safetensors"
    with open(shard, "r+b") as file:
        file.seek(-1, os.SEEK_END)
        last = file.read(1)[0]
        file.seek(-1, os.SEEK_END)
        file.write(bytes([last ^ 1]))
    second = build_engine(own_bundle, tmp_path / "b", options=OPTIONS)
    assert not second.cached
    assert first.key != second.key


@pytest.mark.parametrize("damage", ["removed", "written to through an engine"])
def test_damaged_cache_entry_is_built_again(own_bundle, tmp_path, damage):
    first = build_engine(own_bundle, tmp_path / "a", options=OPTIONS)
    good = files(tmp_path / "a")
    if damage == "removed":
        (Path(os.environ["NEMO_BUILD_CACHE"]) / "engines" / first.key / "weights.bin").unlink()
    else:
        (tmp_path / "a" / "weights.bin").chmod(0o644)
        with open(tmp_path / "a" / "weights.bin", "r+b") as file:
            file.write(b"damage")
    result = build_engine(own_bundle, tmp_path / "b", options=OPTIONS)
    assert not result.cached
    assert files(tmp_path / "b") == good


def test_concurrent_builds_of_one_engine(own_bundle, tmp_path):
    """Processes that build the same engine at the same time all succeed, and one of them did the work."""
    code = (
        "import sys; from pathlib import Path; from nemo_build.engines.build import BuildOptions, build_engine;"
        "r = build_engine(Path(sys.argv[1]), Path(sys.argv[2]), options=BuildOptions(2, 61)); print(r.cached)"
    )
    command = [sys.executable, "-c", code, str(own_bundle)]
    running = [
        subprocess.Popen([*command, str(tmp_path / f"e{i}")], stdout=subprocess.PIPE, text=True)
        for i in range(4)
    ]
    said = [process.communicate(timeout=120)[0].strip() for process in running]
    assert [process.returncode for process in running] == [0] * 4
    assert sorted(said) == ["False", "True", "True", "True"]
    assert all(files(tmp_path / f"e{i}") == files(tmp_path / "e0") for i in range(4))


def test_only_what_the_bundle_declares_is_taken(own_bundle, tmp_path):
    (own_bundle / "chat_template.jinja").write_text("added by hand")
    build_engine(own_bundle, tmp_path / "engine", options=OPTIONS, use_cache=False)
    assert "chat_template.jinja" not in files(tmp_path / "engine")


def test_cache_that_cannot_be_written(own_bundle, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("NEMO_BUILD_CACHE", str(tmp_path / "file" / "cache"))
    build_engine(own_bundle, tmp_path / "a", options=OPTIONS, use_cache=False)
    with pytest.raises(OSError, match="Not a directory"):
        build_engine(own_bundle, tmp_path / "b", options=OPTIONS)


def test_a_weight_of_two_meanings_is_refused(tiny_bundle):
    models = [onnx.load(tiny_bundle / f"{n}.onnx", load_external_data=False) for n in ("target", "mtp")]
    for entry in models[1].graph.initializer[0].external_data:
        if entry.key == "offset":
            entry.value = "8"
    with pytest.raises(ValueError, match="two different weights"):
        stored_tensors(models)


def test_engine_computes_what_the_bundle_computes(tiny_bundle, tmp_path):
    build_engine(tiny_bundle, tmp_path / "engine", options=OPTIONS)
    sizes = {"slots": 2, "context": 64}
    got = feed(OrtSession(tmp_path / "engine" / "target.onnx", **sizes), {1: [3, 1, 4]}, {})
    want = feed(OrtSession(tiny_bundle / "target.onnx", **sizes), {1: [3, 1, 4]}, {})
    np.testing.assert_array_equal(got[1], want[1])


def test_manifest_says_where_it_came_from(tiny_checkpoint, tiny_bundle, tmp_path):
    build_engine(tiny_bundle, tmp_path / "engine", options=replace(OPTIONS, weights="plain"))
    manifest = read_manifest(tmp_path / "engine", ENGINE_BUNDLE)
    tensors = manifest["weights"]["tensors"]
    assert manifest["options"] == {
        "max_sequences": 2,
        "max_context": 64,
        "weights": "plain",
        "activations": "float32",
    }
    assert tensors["backbone.embeddings.weight"]["dtype"] == "F32"
    assert all(t["offset"] % 64 == 0 for t in tensors.values())
    report = inspect(tiny_checkpoint)
    assert len(tensors) == report.tensors
    assert (
        inspect(tmp_path / "engine").weight_bytes == report.weight_bytes == inspect(tiny_bundle).weight_bytes
    )
    assert str(tmp_path) not in json.dumps(manifest)


@pytest.mark.parametrize("interruption", [KeyboardInterrupt, SystemExit, OSError])
@pytest.mark.parametrize("use_cache", [True, False])
def test_interrupted_build_leaves_nothing(own_bundle, tmp_path, monkeypatch, interruption, use_cache):
    def interrupt(*_):
        raise interruption

    monkeypatch.setattr(build_module, "point_at", interrupt)
    before = sorted(p for p in Path(os.environ["NEMO_BUILD_CACHE"]).rglob("*.partial"))
    options = BuildOptions(max_sequences=5, max_context=64)
    with pytest.raises(interruption):
        build_engine(own_bundle, tmp_path / "engine", options=options, use_cache=use_cache)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["bundle", "checkpoint"]
    assert sorted(p for p in Path(os.environ["NEMO_BUILD_CACHE"]).rglob("*.partial")) == before


def test_plan_refuses_with_the_arithmetic(tiny_bundle, tmp_path):
    options = BuildOptions(max_sequences=2000, max_context=1024, memory=1 << 28)
    with pytest.raises(PlanError) as caught:
        build_engine(tiny_bundle, tmp_path / "engine", options=options)
    text = str(caught.value)
    assert "does not fit the memory allowed: it needs" in text
    assert "key/value cache 0.98 GiB = 2000 sequences x 1024 positions" in text
    assert "sequences of 1024 positions would fit (--max-sequences)" in text
    assert list(tmp_path.iterdir()) == []


def test_wrong_sizes_are_all_named(tiny_bundle, tmp_path):
    with pytest.raises(UserError) as caught:
        build_engine(tiny_bundle, tmp_path / "engine", options=BuildOptions(0, 5000))
    assert len(caught.value.problems) == 2


def test_target_that_cannot_be_built(tiny_bundle, tmp_path):
    with pytest.raises(UserError, match="abacus"):
        build_engine(tiny_bundle, tmp_path / "engine", "abacus")


def test_changed_inputs_are_refused(own_bundle, tmp_path):
    (own_bundle / "target.onnx").write_bytes(b"x")
    (own_bundle / "mtp.onnx").unlink()
    with pytest.raises(BundleError) as caught:
        build_engine(own_bundle, tmp_path / "engine")
    assert len(caught.value.problems) == 2


def test_truncated_shard_is_refused(own_bundle, tmp_path):
    with open(tmp_path / "checkpoint" / "model.safetensors", "r+b") as file:
        file.truncate(10_000)
    with pytest.raises(BundleError, match="has changed"):
        build_engine(own_bundle, tmp_path / "engine")


def test_verify_finds_a_flipped_bit(own_bundle, tmp_path):
    build_engine(own_bundle, tmp_path / "engine", options=OPTIONS, use_cache=False)
    verify_weights(tmp_path / "engine")
    data = bytearray((tmp_path / "engine" / "weights.bin").read_bytes())
    data[1000] ^= 4
    (tmp_path / "engine" / "weights.bin").write_bytes(data)
    with pytest.raises(BundleError, match="sha256"):
        verify_weights(tmp_path / "engine")


@pytest.mark.parametrize("damage", ["{", '{"format_version": 99}', "[]", '{"format_version": 1}', "\ud800"])
def test_damaged_manifest(own_bundle, tmp_path, damage):
    (own_bundle / "bundle.json").write_bytes(damage.encode("utf-8", "surrogatepass"))
    with pytest.raises(BundleError, match=r"bundle\.json"):
        build_engine(own_bundle, tmp_path / "engine")


def test_not_a_bundle(tmp_path):
    with pytest.raises(BundleError, match="nemo-build export"):
        build_engine(tmp_path, tmp_path / "engine")


def test_host_memory_heeds_control_groups(tmp_path, monkeypatch):
    (tmp_path / "max").write_text("max\n")
    (tmp_path / "limit").write_text("123456789\n")
    for limits, expected in (
        ((tmp_path / "limit",), 123456789),
        ((tmp_path / "max", tmp_path / "none"), None),
    ):
        monkeypatch.setattr(plan_module, "_CGROUP_LIMITS", [str(p) for p in limits])
        assert host_memory() == expected or (expected is None and host_memory() > 123456789)


def test_inspect_of_a_model_without_state(tmp_path):
    reference_model(hybrid_override_pattern="-E").save_pretrained(tmp_path / "checkpoint")
    report = inspect(tmp_path / "checkpoint")
    assert report.state_per_sequence == report.cache_per_token == 0
    assert all(f.context == report.max_positions for f in report.fits)
