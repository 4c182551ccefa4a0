# SPDX-License-Identifier: Apache-2.0
"""Engines: reproducible, cached by content, published whole, refused when they cannot fit."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import numpy as np
import pytest

from nemo_build.bundle import ENGINE_BUNDLE, read_manifest
from nemo_build.engines import build as build_module
from nemo_build.engines.build import BuildOptions, build_engine
from nemo_build.engines.inspect import inspect, verify_weights
from nemo_build.engines.ort import OrtSession
from nemo_build.errors import BundleError, PlanError, UserError
from nemo_build.export.exporter import export_bundle

from .tiny import feed

OPTIONS = BuildOptions(max_sequences=2, max_context=64)


@pytest.fixture
def own_bundle(tiny_checkpoint, tmp_path) -> Path:
    """A bundle of a private copy of the checkpoint, which a test may damage."""
    shutil.copytree(tiny_checkpoint, tmp_path / "checkpoint")
    export_bundle(tmp_path / "checkpoint", tmp_path / "bundle")
    return tmp_path / "bundle"


def files(directory: Path) -> dict[str, bytes]:
    return {p.name: p.read_bytes() for p in directory.iterdir()}


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


def test_damaged_cache_entry_is_built_again(own_bundle, tmp_path):
    key = build_engine(own_bundle, tmp_path / "a", options=OPTIONS).key
    entry = Path(os.environ["NEMO_BUILD_CACHE"]) / "engines" / key
    (entry / "weights.bin").unlink()
    result = build_engine(own_bundle, tmp_path / "b", options=OPTIONS)
    assert not result.cached
    assert files(tmp_path / "a") == files(tmp_path / "b")


def test_engine_computes_what_the_bundle_computes(tiny_bundle, tmp_path):
    build_engine(tiny_bundle, tmp_path / "engine", options=OPTIONS)
    sizes = {"slots": 2, "context": 64}
    got = feed(OrtSession(tmp_path / "engine" / "target.onnx", **sizes), {1: [3, 1, 4]}, {})
    want = feed(OrtSession(tiny_bundle / "target.onnx", **sizes), {1: [3, 1, 4]}, {})
    np.testing.assert_array_equal(got[1], want[1])


def test_manifest_says_where_it_came_from(tiny_checkpoint, tiny_bundle, tmp_path):
    build_engine(tiny_bundle, tmp_path / "engine", options=OPTIONS)
    manifest = read_manifest(tmp_path / "engine", ENGINE_BUNDLE)
    tensors = manifest["weights"]["tensors"]
    assert manifest["options"] == {"max_sequences": 2, "max_context": 64, "max_pending": 0}
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
        build_engine(tiny_bundle, tmp_path / "engine", options=BuildOptions(0, 5000, -1))
    assert len(caught.value.problems) == 3


@pytest.mark.parametrize("target", ["h100", "abacus"])
def test_target_that_cannot_be_built(tiny_bundle, tmp_path, target):
    with pytest.raises(UserError, match=target):
        build_engine(tiny_bundle, tmp_path / "engine", target)


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


@pytest.mark.parametrize("damage", ["{", '{"format_version": 99}', "[]"])
def test_damaged_manifest(own_bundle, tmp_path, damage):
    (own_bundle / "bundle.json").write_text(damage)
    with pytest.raises(BundleError, match=r"bundle\.json"):
        build_engine(own_bundle, tmp_path / "engine")


def test_not_a_bundle(tmp_path):
    with pytest.raises(BundleError, match="nemo-build export"):
        build_engine(tmp_path, tmp_path / "engine")
