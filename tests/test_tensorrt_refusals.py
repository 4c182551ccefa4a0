# SPDX-License-Identifier: Apache-2.0
"""What is refused when an engine for TensorRT is asked for, and what is said then."""

from __future__ import annotations

import ctypes
import importlib.metadata
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from nemo_build.cli import cli
from nemo_build.engines import doctor, tensorrt_rtx
from nemo_build.engines.build import BuildOptions, build_engine
from nemo_build.engines.targets import TARGETS, backends_of, require_backend
from nemo_build.engines.tensorrt import LIBRARY
from nemo_build.engines.tensorrt.gpu import Driver, Gpu, find_driver, only, require_gpu
from nemo_build.engines.tensorrt.kernels import require_kernels
from nemo_build.engines.trt import Library
from nemo_build.errors import PlanError, UserError

pytest.importorskip("triton")

from .tensorrt_machine import H100, OPTIONS, Stub, export_small, lowered, needs_packages


@pytest.fixture
def stub(tmp_path, monkeypatch) -> Stub:
    return Stub(monkeypatch, tmp_path / "machine")


@pytest.fixture(scope="module")
def small_bundle(tmp_path_factory) -> Path:
    """A bundle of a model with one graph of three blocks."""
    return export_small(tmp_path_factory.mktemp("small"))


@needs_packages
@pytest.mark.parametrize("content", [b"something else", b"timings of another GPU"])
def test_a_timing_cache_that_is_none(stub, small_bundle, tmp_path, content):
    mine = tmp_path / "mine.cache"
    mine.write_bytes(content)
    options = replace(OPTIONS, timing_cache=str(mine))
    with pytest.raises(UserError, match=r"mine\.cache is no timing cache that TensorRT takes") as caught:
        build_engine(small_bundle, tmp_path / "engine", "h100", options, use_cache=False)
    assert caught.value.problems
    assert mine.read_bytes() == content
    assert not (tmp_path / "engine").exists()


@needs_packages
@pytest.mark.parametrize(
    ("failure", "message", "problem"),
    [
        ("start", "TensorRT cannot start", "CUDA initialization failure"),
        ("plugin", "does not take the kernel of backbone", "no such format"),
        ("open", "does not open the plan that it has built of", "out of memory"),
    ],
)
def test_what_the_library_refuses_is_one_error(
    stub, small_bundle, tmp_path, monkeypatch, failure, message, problem
):
    monkeypatch.setenv("TENSORRT_STUB_FAIL", failure)
    bundle = tmp_path / "bundle"
    os.symlink(small_bundle, bundle)
    with pytest.raises(
        UserError, match=message if failure != "plugin" else "does not take the kernel"
    ) as caught:
        build_engine(bundle, tmp_path / "engine", "h100", OPTIONS, use_cache=False)
    assert any(problem in p for p in caught.value.problems)
    (log,) = tmp_path.glob("engine.*.log")
    assert str(log) in caught.value.hint
    assert not (tmp_path / "engine").exists()


@needs_packages
def test_a_library_that_does_not_load(stub, small_bundle, tmp_path):
    (tmp_path / "machine" / "site" / "tensorrt" / "__init__.py").write_text(
        "raise ImportError('libnvinfer.so.11: cannot open shared object file')"
    )
    with pytest.raises(UserError, match=r"TensorRT cannot be loaded: libnvinfer"):
        build_engine(small_bundle, tmp_path / "engine", "h100", OPTIONS, use_cache=False)


def test_missing_and_wrong_package(tiny_bundle, tmp_path, monkeypatch):
    for found, message in (
        (None, "not installed: tensorrt-cu13"),
        ("10.16.1.11", r"tensorrt 10\.16\.1\.11 is"),
    ):
        monkeypatch.setattr(Library, "installed_version", lambda _, found=found: found)
        with pytest.raises(UserError, match=message) as caught:
            build_engine(tiny_bundle, tmp_path / "engine", "h100", OPTIONS)
        assert "pip install 'nemo-build[tensorrt]'" in caught.value.hint


def test_any_distribution_of_a_patch_release_will_do(monkeypatch):
    installed = {"tensorrt": "11.4.1.20"}  # as of the archive, whose wheel is called so

    def version(name: str) -> str:
        if name not in installed:
            raise importlib.metadata.PackageNotFoundError(name)
        return installed[name]

    monkeypatch.setattr(importlib.metadata, "version", version)
    assert LIBRARY.require() == "11.4.1.20"
    installed["tensorrt-cu13"] = "11.5.0.1"
    with pytest.raises(UserError, match=r"knows 11\.4 only"):
        LIBRARY.require()
    assert not tensorrt_rtx.LIBRARY.accepts("1.7.1.117")


class FakeCuda:
    """The driver's functions that are called."""

    def __init__(self, status: int = 0, *gpus: tuple[str, int]) -> None:
        self._status, self._gpus = status, gpus
        for name in ("cuDeviceGetCount", "cuDeviceGet", "cuDeviceGetAttribute", "cuDriverGetVersion"):
            function = getattr(self, f"_{name}")
            setattr(self, name, lambda *a, f=function: f(*a))
            getattr(self, name).__name__ = name

    def cuInit(self, flags: int) -> int:
        return self._status

    def cuDeviceGetName(self, buffer: Any, size: int, device: int) -> int:
        buffer.value = self._gpus[device][0].encode()
        return 0

    @staticmethod
    def _write(reference: Any, value: int) -> int:
        reference._obj.value = value
        return 0

    def _cuDeviceGetCount(self, out: Any) -> int:
        return self._write(out, len(self._gpus))

    def _cuDeviceGet(self, out: Any, number: int) -> int:
        return self._write(out, number) if number < len(self._gpus) else 101

    def _cuDeviceGetAttribute(self, out: Any, attribute: int, device: int) -> int:
        major, minor = divmod(self._gpus[device][1], 10)
        return self._write(out, {75: major, 76: minor}[attribute])

    def _cuDriverGetVersion(self, out: Any) -> int:
        return self._write(out, 13010)


def test_gpus_as_the_driver_tells(monkeypatch):
    fake = FakeCuda(0, ("NVIDIA L40S", 89), ("NVIDIA GB300", 103))
    monkeypatch.setattr(ctypes, "CDLL", lambda name: fake)
    assert find_driver() == Driver("13.1", (Gpu(0, "NVIDIA L40S", 89), Gpu(1, "NVIDIA GB300", 103)))
    found, _ = require_gpu(TARGETS["gb300"])
    assert found.number == 1
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert only(found) == {"CUDA_VISIBLE_DEVICES": "1"}
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5, GPU-8932f937")
    assert only(found) == {"CUDA_VISIBLE_DEVICES": "GPU-8932f937"}
    with pytest.raises(UserError, match="h100 with TensorRT cannot be built here") as caught:
        require_gpu(TARGETS["h100"])
    assert list(caught.value.problems) == [
        "GPU 0 (NVIDIA L40S) is of SM 89, and h100 of SM 90",
        "GPU 1 (NVIDIA GB300) is of SM 103, and h100 of SM 90",
    ]
    assert "H100" in caught.value.hint


@pytest.mark.parametrize(
    ("cuda", "problem"),
    [
        (OSError("libcuda.so.1: cannot open"), "There is no CUDA driver here"),
        (FakeCuda(100), "there is no NVIDIA GPU here"),
        (FakeCuda(803), "error 803 of cuInit"),
    ],
)
def test_without_a_gpu(tiny_bundle, tmp_path, monkeypatch, cuda, problem):
    def load(name: str) -> Any:
        if isinstance(cuda, OSError):
            raise cuda
        return cuda

    monkeypatch.setattr(ctypes, "CDLL", load)
    monkeypatch.setattr(Library, "installed_version", lambda library: library.version)
    with pytest.raises(UserError, match="cannot be built here") as caught:
        build_engine(tiny_bundle, tmp_path / "engine", "h100", OPTIONS)
    assert problem in caught.value.problems[0]
    assert "SM 90" in caught.value.hint
    assert "--backend onnxruntime-cuda" in caught.value.hint
    assert not list(tmp_path.iterdir())


def test_all_that_makes_no_sense_is_named(stub, tiny_bundle, tmp_path):
    options = BuildOptions(0, 5000, None, "int4", "int8", "prefill", "all", optimization_level=6)
    with pytest.raises(UserError) as caught:
        build_engine(tiny_bundle, tmp_path / "engine", "h100", options)
    said = "\n".join(caught.value.problems)
    assert len(caught.value.problems) == 7
    assert all(f"--{name} is" in said for name in ("weights", "activations", "phases", "gpus"))
    assert "--optimization-level is 6; there are 0 to 5" in said
    assert not (tmp_path / "engine").exists()


@pytest.mark.parametrize("target", ["cpu", "rtx-50"])
def test_other_backends_have_no_timings(stub, tiny_bundle, tmp_path, target):
    command = ["build", tiny_bundle, "-o", tmp_path / "e", "--target", target, "--timing-cache", "x"]
    command += ["--optimization-level", "2"]
    result = CliRunner().invoke(cli, list(map(str, command)))
    assert result.exit_code != 0
    assert "--timing-cache is for TensorRT" in str(result.output) + str(result.exception)


def test_what_does_not_fit_is_refused_with_the_arithmetic(stub, tiny_bundle, tmp_path):
    options = BuildOptions(max_sequences=4000, max_context=1024, memory=1 << 30)
    with pytest.raises(PlanError, match="key/value cache"):
        build_engine(tiny_bundle, tmp_path / "engine", "h100", options)


def test_kernels_that_a_gpu_cannot_run_are_all_named(small_bundle):
    _, table, _ = lowered(small_bundle, "target", "decode")
    require_kernels(table.uses.values(), TARGETS["a100"])
    with pytest.raises(UserError, match="that old cannot run") as caught:
        require_kernels(table.uses.values(), replace(TARGETS["a100"], name="old", sm=75))
    assert len(caught.value.problems) == len(table.uses)
    assert "has no kernel for sm_75" in caught.value.problems[0]


def test_targets_and_their_default_backend():
    for target in TARGETS.values():
        if target.sm is not None:
            names = [rule.name for rule in require_all(target.name)]
            assert "tensorrt" in names
            assert (require_backend(target.name).name == "tensorrt-rtx") == ("tensorrt-rtx" in names)


def require_all(name: str) -> list[Any]:
    return [rule for rule in backends_of(TARGETS[name]) if not rule.refusal]


def test_doctor_tells_what_is_missing(monkeypatch):
    monkeypatch.setattr(Library, "installed_version", lambda library: None)
    assert "not installed: tensorrt-cu13" in doctor._tensorrt().detail
    monkeypatch.setattr(
        doctor, "_compiler", lambda library, what: doctor.Backend("tensorrt (build)", True, "11.4 ")
    )
    monkeypatch.setattr(doctor, "find_driver", lambda: Driver("13.0", ()))
    assert "none here" in doctor._tensorrt().detail
    monkeypatch.setattr(doctor, "find_driver", lambda: Driver("13.0", (H100, replace(H100, number=1))))
    found = doctor._tensorrt()
    assert (found.works, found.detail) == (True, "11.4 builds engines for SM 90")
