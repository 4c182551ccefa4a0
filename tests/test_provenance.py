# SPDX-License-Identifier: Apache-2.0
"""Engines that were made with something else than what is here are refused, with all that differs."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from nemo_build.bundle import ENGINE_BUNDLE, FORMAT_VERSION, read_manifest
from nemo_build.engines import provenance
from nemo_build.engines.build import BuildOptions, build_engine
from nemo_build.engines.inspect import inspect
from nemo_build.engines.provenance import (
    check_compiled,
    check_engine,
    kernel_interface,
    mismatches,
    rebuild_command,
)
from nemo_build.errors import BundleError
from nemo_build.plugins.registry import plugins_by_name
from nemo_build.runtime import Engine


@pytest.fixture
def engine(demo_engine_directory, tmp_path) -> Path:
    """A copy of an engine, for a test to change."""
    shutil.copytree(demo_engine_directory, tmp_path / "engine")
    return tmp_path / "engine"


def change(directory: Path, **sections) -> None:
    """Write an engine's manifest with other sections."""
    path = directory / ENGINE_BUNDLE
    manifest = json.loads(path.read_text())
    path.chmod(0o644)
    path.write_text(json.dumps({**manifest, **sections}))


def test_an_engine_of_this_version_is_accepted(demo_engine_directory):
    manifest = read_manifest(demo_engine_directory, ENGINE_BUNDLE)
    assert manifest["kernels"] == kernel_interface()
    assert mismatches(manifest) == []
    check_engine(demo_engine_directory, manifest)


def test_all_that_differs_is_named_with_the_command_that_mends_it(engine):
    backend = {"name": "onnxruntime", "version": "1.2.3"}
    kernels = {**kernel_interface(), "opset": 99, "panels_sha256": "0" * 64}
    change(engine, backend=backend, kernels=kernels)
    with pytest.raises(BundleError) as caught:
        Engine.load(engine)
    said = "\n".join(caught.value.problems)
    assert len(caught.value.problems) == 3
    assert "onnxruntime: made for 1.2.3, here is" in said
    assert "version of the ops: made for 99, here is 1" in said
    assert "layout of packed weights" in said
    assert f"nemo-build build BUNDLE -o {engine} --force --target cpu" in caught.value.hint
    assert "--max-sequences 4 --max-context 1024 --weights" in caught.value.hint


def test_an_engine_that_does_not_say_is_refused(engine):
    change(engine, kernels={})
    with pytest.raises(BundleError, match="made for an unknown"):
        Engine.load(engine)


def test_inspect_tells_what_differs(engine):
    said = inspect(engine).engine
    assert said is not None
    assert said["mismatches"] == []
    change(engine, backend={"name": "onnxruntime", "version": "1.2.3"})
    said = inspect(engine).engine
    assert said is not None
    assert said["mismatches"][0].startswith("onnxruntime: made for 1.2.3")


def test_other_patch_releases_are_accepted(engine):
    manifest = read_manifest(engine, ENGINE_BUNDLE)
    major, minor = manifest["backend"]["version"].split(".")[:2]
    assert (
        mismatches({**manifest, "backend": {"name": "onnxruntime", "version": f"{major}.{minor}.99"}}) == []
    )


def test_another_format_version_is_refused(engine):
    change(engine, format_version=FORMAT_VERSION - 1)
    with pytest.raises(BundleError, match="nemo-build build"):
        Engine.load(engine)


def test_damage_is_told_before_versions(engine):
    change(engine, kernels={})
    (engine / "target.onnx").unlink()
    with pytest.raises(BundleError, match="is damaged"):
        Engine.load(engine)


def test_the_interface_is_what_kernels_depend_on():
    """Prose does not matter; types, order and attributes do."""
    op = plugins_by_name()["BlockLinear"].op
    signature = provenance._signature
    assert signature(op) == signature(replace(op, doc="in other words"))
    assert signature(op) != signature(replace(op, inputs=op.inputs[:-1]))
    assert signature(op) != signature(replace(op, attributes=()))


def test_the_interface_is_part_of_the_cache_key(tiny_bundle, tmp_path, monkeypatch):
    options = BuildOptions(max_sequences=2, max_context=32)
    first = build_engine(tiny_bundle, tmp_path / "a", options=options)
    monkeypatch.setattr(provenance, "OPSET_VERSION", 2)
    second = build_engine(tiny_bundle, tmp_path / "b", options=options)
    assert first.key != second.key
    assert not second.cached


def test_compiled_backends_need_their_version_and_their_gpu(monkeypatch):
    backend = {"name": "tensorrt-rtx", "version": "1.7.1", "sms": [89, 120]}
    monkeypatch.setattr(provenance, "gpu_capabilities", lambda: [120])
    assert check_compiled(backend, "1.7.1") == []
    assert check_compiled(backend, "1.8.0") == ["tensorrt-rtx: made for 1.7.1, here is 1.8.0"]
    monkeypatch.setattr(provenance, "gpu_capabilities", lambda: [90])
    assert check_compiled(backend, "1.7.1") == ["GPU: made for SM 89, SM 120, here is SM 90"]
    assert len(check_compiled(backend, None)) == 2
    monkeypatch.setattr(provenance, "gpu_capabilities", list)
    assert check_compiled(backend, None) == ["tensorrt-rtx: made for 1.7.1, here is none"]
    said = mismatches({"backend": {**backend, "version": "0.0"}, "kernels": kernel_interface()})
    assert said[0].startswith("tensorrt-rtx: made for 0.0, here is")


def test_capabilities_of_gpus(tmp_path, monkeypatch):
    program = tmp_path / "nvidia-smi"
    program.write_text("#!/bin/sh\necho 8.9\necho 12.0\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin:/usr/bin")
    assert provenance.gpu_capabilities() == [89, 120]
    program.write_text("#!/bin/sh\necho No devices were found\nexit 6\n")
    assert provenance.gpu_capabilities() == []


def test_the_command_names_every_option(demo_engine_directory):
    manifest = read_manifest(demo_engine_directory, ENGINE_BUNDLE)
    command = rebuild_command(Path("there"), manifest)
    assert all(
        f"--{name.replace('_', '-')} {value}" in command for name, value in manifest["options"].items()
    )
