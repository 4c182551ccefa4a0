# SPDX-License-Identifier: Apache-2.0
"""TensorRT-RTX engines: built here, the same bytes twice, read without a GPU; and everything that is refused."""

from __future__ import annotations

import importlib.util
import json
import os
import random
import stat
import struct
import subprocess
import sys
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import onnx
import onnx.parser
import pytest

from nemo_build.bundle import ENGINE_BUNDLE, read_manifest
from nemo_build.demo import CHECKPOINT
from nemo_build.engines.backends import open_session
from nemo_build.engines.build import BuildOptions, build_engine
from nemo_build.engines.diff import diff
from nemo_build.engines.diff_report import diff_page, diff_text
from nemo_build.engines.inspect import inspect, verify_weights
from nemo_build.engines.targets import TARGETS
from nemo_build.engines.tensorrt_rtx import LIBRARY, plan_file
from nemo_build.engines.tensorrt_rtx.addresses import environment
from nemo_build.engines.tensorrt_rtx.build import GPUS
from nemo_build.engines.trt import Library, builder
from nemo_build.engines.trt.builder import Job, build_plan, profile_of
from nemo_build.engines.trt.forms import WeightTable
from nemo_build.engines.trt.lowering import lower
from nemo_build.engines.trt.phases import phases_of
from nemo_build.engines.weights import place, point_at, stored_tensors, write_packed
from nemo_build.errors import BundleError, PlanError, UserError
from nemo_build.export.exporter import export_bundle

needs_package = pytest.mark.skipif(
    importlib.util.find_spec("tensorrt_rtx") is None or LIBRARY.installed_version() != LIBRARY.version,
    reason=f"tensorrt-rtx {LIBRARY.version} is not installed: pip install 'nemo-build[rtx]'",
)

needs_allocator = pytest.mark.skipif(
    not environment(), reason="the allocator of building processes was not built"
)

OPTIONS = BuildOptions(max_sequences=2, max_context=64, phases="decode")


def plans(directory: Path) -> dict[str, bytes]:
    return {p.name: p.read_bytes() for p in sorted(directory.glob("*.engine"))}


@pytest.fixture(scope="module")
def engine(tiny_bundle, tmp_path_factory) -> Path:
    """An engine of the random checkpoint for one GPU. Treat as read-only."""
    out = tmp_path_factory.mktemp("rtx") / "engine"
    return build_engine(tiny_bundle, out, "rtx-pro-6000", OPTIONS, use_cache=False).out


@pytest.fixture
def plan(engine, tmp_path) -> Path:
    """A private copy of a plan, which a test may damage."""
    path = tmp_path / "plan.engine"
    path.write_bytes((engine / "target.decode.engine").read_bytes())
    return path


@needs_package
def test_engine_says_what_it_is(engine, tmp_path):
    manifest = read_manifest(engine, ENGINE_BUNDLE)
    assert manifest["backend"] == {"name": "tensorrt-rtx", "version": LIBRARY.version, "sms": [120]}
    assert set(manifest["graphs"]) == {"target.decode", "mtp.decode"}
    graph = manifest["graphs"]["target.decode"]
    assert graph["steps"] == graph["pending"] == 8
    assert "slots" not in graph["inputs"]
    assert {s["dtype"] for s in graph["state"]} == {"float32", "bfloat16"}
    assert sorted(p.name for p in engine.parent.iterdir()) == ["engine"], "no logs, no temporary files"
    assert not list(engine.glob("*.onnx")) + list(engine.glob(".*"))
    verify_weights(engine)
    report = inspect(engine)
    assert report.engine is not None
    summary = report.engine["compiled"]["target.decode"]
    assert summary["header"]["sms"] == (120,)
    assert summary["constants"]["bf16"] > 0
    assert summary["kernels"] == sum(summary["launches"].values()) > 0
    assert summary["precisions"]["lm_head/lm_head"] == "bf16"
    assert summary["scratch"] == graph["scratch"]


@needs_package
@needs_allocator
def test_two_builds_are_the_same_to_the_byte(engine, tiny_bundle, tmp_path, monkeypatch):
    """Also with another environment and other paths, which move what is in memory."""
    monkeypatch.setenv("A_VARIABLE", "x" * 5000)
    build_engine(tiny_bundle, tmp_path / "in a longer place", "rtx-pro-6000", OPTIONS, use_cache=False)
    require_same(engine, tmp_path / "in a longer place")


def require_same(a: Path, b: Path) -> None:
    """Engines with the same files, the manifest among them."""
    names = sorted(p.relative_to(a) for p in a.rglob("*") if p.is_file())
    assert names == sorted(p.relative_to(b) for p in b.rglob("*") if p.is_file())
    assert [n for n in names if (a / n).read_bytes() != (b / n).read_bytes()] == []


@needs_package
def test_difference_of_two_engines(engine, tiny_bundle, tmp_path):
    other = tmp_path / "float32"
    options = replace(OPTIONS, activations="float32")
    build_engine(tiny_bundle, other, "rtx-pro-6000", options, use_cache=False)
    assert diff(engine, engine).equal
    found = diff(engine, other)
    names = {c.name: (c.before, c.after) for c in found.operations["target.decode"]}
    assert any(name.startswith(("kernel ", "fused product ", "product")) for name in names)
    assert all(before != after for before, after in names.values())
    layers = found.precisions["target.decode"]
    assert any((layer.before, layer.after) == ("bf16", "float") for layer in layers)
    text, page = diff_text(found), diff_page(found)
    for title in ("launches of target.decode", "types multiplied in target.decode"):
        assert title in text
        assert title.capitalize() in page
    assert json.loads(json.dumps(found.to_json()))["operations"]["target.decode"]


@needs_package
def test_second_build_comes_from_the_cache(tiny_bundle, tmp_path):
    options = replace(OPTIONS, max_context=48)
    first = build_engine(tiny_bundle, tmp_path / "a", "rtx-50", options)
    second = build_engine(tiny_bundle, tmp_path / "b", "rtx-50", options)
    other = build_engine(tiny_bundle, tmp_path / "c", "dgx-spark", options)
    assert (first.cached, second.cached, other.cached) == (False, True, False)


@pytest.fixture(scope="module")
def demo_bundle(tmp_path_factory) -> Path:
    return export_bundle(CHECKPOINT, tmp_path_factory.mktemp("rtx-demo") / "bundle").out


def require_demo(bundle: Path, out: Path, target: str, weights: str, phases: str) -> None:
    """Build the demo checkpoint's engine, and look into its plans."""
    options = BuildOptions(max_sequences=4, max_context=1024, weights=weights, phases=phases)
    result = build_engine(bundle, out, target, options, use_cache=False)
    assert set(read_manifest(result.out, ENGINE_BUNDLE)["graphs"]) == {
        f"{name}.{phase}" for name in ("target", "mtp") for phase in phases.split(",")
    }
    summary = plan_file.summarize(result.out / "target.decode.engine")
    assert summary.header.sms == (TARGETS[target].sm,)
    assert ("int4" in summary.constants) == (weights == "int4")


@needs_package
@pytest.mark.parametrize(
    "target", ["a100", "rtx-30", "l40s", "rtx-40", "rtx-pro-6000", "rtx-50", "dgx-spark"]
)
def test_demo_checkpoint_for_every_target(target, demo_bundle, tmp_path):
    require_demo(demo_bundle, tmp_path / "engine", target, "auto", "decode")


@pytest.mark.slow
@needs_package
@pytest.mark.parametrize(
    ("target", "weights"), [("a100", "auto"), ("l40s", "auto"), ("dgx-spark", "auto"), ("rtx-50", "int4")]
)
def test_demo_checkpoint_with_all_phases(target, weights, demo_bundle, tmp_path):
    require_demo(demo_bundle, tmp_path / "engine", target, weights, "decode,prefill")


@pytest.mark.slow
@needs_package
@needs_allocator
@pytest.mark.parametrize("target", ["rtx-30", "dgx-spark"])
def test_builds_are_the_same_while_the_machine_is_busy(target, demo_bundle, tmp_path):
    busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(2)]
    try:
        for i in range(3):
            options = BuildOptions(max_sequences=4, max_context=1024, phases="decode")
            build_engine(demo_bundle, tmp_path / str(i), target, options, use_cache=False)
            require_same(tmp_path / "0", tmp_path / str(i))
    finally:
        for process in busy:
            process.kill()
            process.wait()


@pytest.mark.slow
@needs_package
def test_demo_checkpoint_for_all_gpus(demo_bundle, tmp_path):
    options = BuildOptions(max_sequences=4, max_context=1024, gpus="all")
    build_engine(demo_bundle, tmp_path / "a", "rtx-50", options, use_cache=False)
    assert plan_file.read_header(tmp_path / "a" / "target.prefill.engine").sms == GPUS


@needs_package
def test_running_is_refused_with_the_reason(engine, monkeypatch):
    manifest = read_manifest(engine, ENGINE_BUNDLE)
    monkeypatch.setenv("PATH", "/nowhere")  # no nvidia-smi, whatever machine this is
    with pytest.raises(BundleError, match="cannot be run here") as caught:
        open_session(engine, manifest, "target.decode", slots=1, context=64)
    assert any("no NVIDIA GPU" in p for p in caught.value.problems)


def test_missing_and_wrong_package(tiny_bundle, tmp_path, monkeypatch):
    for found, message in ((None, "not installed: tensorrt-rtx"), ("1.6.0.1", r"tensorrt-rtx 1\.6\.0\.1 is")):
        monkeypatch.setattr(Library, "installed_version", lambda _, found=found: found)
        with pytest.raises(UserError, match=message) as caught:
            build_engine(tiny_bundle, tmp_path / "engine", "rtx-50", OPTIONS)
        assert f"pip install tensorrt-rtx=={LIBRARY.version}" in caught.value.hint


@needs_package
def test_all_that_makes_no_sense_is_named(tiny_bundle, tmp_path):
    options = BuildOptions(0, 5000, None, "plain", "int8", "prefill", "some")
    with pytest.raises(UserError) as caught:
        build_engine(tiny_bundle, tmp_path / "engine", "a100", options)
    assert len(caught.value.problems) == 6
    with pytest.raises(UserError, match="nvfp4 needs a type that SM 80 lacks"):
        build_engine(tiny_bundle, tmp_path / "engine", "a100", replace(OPTIONS, weights="nvfp4"))
    with pytest.raises(UserError, match="SM 80, SM 86, SM 89 lacks"):
        build_engine(tiny_bundle, tmp_path / "e", "rtx-50", replace(OPTIONS, weights="nvfp4", gpus="all"))
    with pytest.raises(UserError, match="cpu has one graph"):
        build_engine(tiny_bundle, tmp_path / "engine", "cpu", OPTIONS)
    assert not list(tmp_path.iterdir())


@needs_package
def test_context_that_does_not_fit(tiny_bundle, tmp_path):
    options = BuildOptions(max_sequences=4000, max_context=1024, memory=1 << 30)
    with pytest.raises(PlanError, match="key/value cache"):
        build_engine(tiny_bundle, tmp_path / "engine", "rtx-50", options)


def small_job(directory: Path, body: str, sms: tuple[int, ...] = (120,)) -> Job:
    """A job for a graph given as text."""
    text = f'<ir_version: 10, opset_import: ["" : 20]> small (float[4, 4] x) => (float[a, b] y) {{ {body} }}'
    path = directory / "small.onnx"
    path.write_bytes(onnx.parser.parse_model(text).SerializeToString())
    return Job(LIBRARY, path, directory / "small.engine", directory / "small.log", sms, {})


@needs_package
def test_unsupported_nodes_are_named_and_the_log_stays(tmp_path):
    job = small_job(tmp_path, "n = NonZero (x) y = Cast <to = 1> (n)")
    with pytest.raises(UserError, match="cannot read small") as caught:
        build_plan(job)
    assert any(p.startswith("NonZero at ") for p in caught.value.problems)
    assert "small.log" in caught.value.hint
    assert sorted(p.name for p in tmp_path.iterdir()) == ["small.log", "small.onnx"]


@needs_package
def test_types_that_a_gpu_lacks_are_named(tiny_bundle, tmp_path):
    """Past our own check, the compiler's is passed on."""
    model = onnx.load(tiny_bundle / "mtp.onnx", load_external_data=False)
    table = WeightTable(stored_tensors([model]), (120,), convert="nvfp4")
    (phase,) = phases_of(1, 64, ("decode",))
    lowered = lower(model, phase, table)
    placed = place(table.weights.values())
    write_packed(placed, tiny_bundle, tmp_path / "weights.bin")
    point_at(lowered, placed, "weights.bin")
    (tmp_path / "mtp.onnx").write_bytes(lowered.SerializeToString())
    shapes = {
        i.name: [d.dim_param or d.dim_value for d in i.type.tensor_type.shape.dim]
        for i in lowered.graph.input
    }
    job = Job(
        LIBRARY,
        tmp_path / "mtp.onnx",
        tmp_path / "mtp.engine",
        tmp_path / "log",
        (80,),
        profile_of(shapes, phase),
    )
    with pytest.raises(UserError, match="cannot compile mtp") as caught:
        build_plan(job)
    assert any("fp4_e2m1" in p for p in caught.value.problems)
    assert "--weights int4" in caught.value.hint


@pytest.mark.parametrize(
    ("script", "message"),
    [
        ("kill -SEGV $$", "signal 11"),
        ("kill -KILL $$", "as when memory runs out"),
        ("echo broken >&2; exit 3", "exit code 3"),
        ("exit 0", "exit code 0"),
    ],
)
def test_a_process_that_ends_in_any_way_is_one_error(script, message, tmp_path, monkeypatch):
    fake = tmp_path / "python"
    fake.write_text(f"#!/bin/sh\n{script}\n")
    fake.chmod(fake.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setattr(sys, "executable", str(fake))
    job = small_job(tmp_path, "y = Identity (x)")
    with pytest.raises(UserError, match=message) as caught:
        build_plan(job)
    assert str(job.log) in caught.value.hint
    assert job.log.is_file()
    assert not job.out.exists()


def test_interruption_ends_the_process_and_leaves_nothing(tmp_path, monkeypatch):
    fake = tmp_path / "python"
    fake.write_text(f"#!/bin/sh\necho $$ > {tmp_path}/pid\ntouch {tmp_path}/ready\nexec sleep 600\n")
    fake.chmod(fake.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setattr(sys, "executable", str(fake))

    def interrupt(*_):
        while not (tmp_path / "ready").exists():
            pass
        raise KeyboardInterrupt

    monkeypatch.setattr(builder, "_follow", interrupt)
    with pytest.raises(KeyboardInterrupt):
        build_plan(small_job(tmp_path, "y = Identity (x)"))
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "pid").read_text()), 0)
    assert not (tmp_path / "small.partial").exists()


@needs_package
def test_damaged_plans(plan):
    good = plan.read_bytes()
    plan_file.require_sms(plan, (120,))
    with pytest.raises(BundleError, match="is for SM 120, and should be for SM 80"):
        plan_file.require_sms(plan, (80,))
    for damage, message in (
        (b"", "it has 0 bytes"),
        (good[:-1], "and should have"),
        (good + b"\0", "and should have"),
        (b"PK" + good[2:], "it begins with"),
        (good[:8] + b"\3" + good[9:], "layout is version 3"),
        (good[:0x18] + b"\2" + good[0x19:], r"TensorRT-RTX 2\.7\.1\.116"),
        (good[:0x20] + bytes(4) + good[0x24:], "GPUs are given as 0x0"),
        (good[:0x38] + struct.pack("<Q", 1 << 60) + good[0x40:], "bytes of weights"),
    ):
        plan.write_bytes(damage)
        with pytest.raises(BundleError, match=message):
            plan_file.summarize(plan)
    plan.unlink()
    with pytest.raises(BundleError, match="cannot be read"):
        plan_file.summarize(plan)


@needs_package
def test_random_damage_is_an_error_or_a_summary_and_nothing_else(plan):
    good = plan.read_bytes()
    dice = random.Random(0)
    text = len(good) - plan_file.read_header(plan).weight_bytes
    for _ in range(150):
        data = bytearray(good)
        for _ in range(dice.choice((1, 4, 64))):
            data[dice.randrange(plan_file.HEADER_BYTES if dice.random() < 0.5 else text)] = dice.randrange(
                256
            )
        plan.write_bytes(data[: dice.choice((len(data), dice.randrange(len(data))))])
        with suppress(BundleError):
            json.dumps(plan_file.summarize(plan).to_json())


@needs_package
def test_inspect_refuses_a_plan_for_another_gpu(engine, tmp_path):
    subprocess.run(["cp", "-r", engine, tmp_path / "engine"], check=True)
    path = tmp_path / "engine" / "target.decode.engine"
    data = bytearray(path.read_bytes())
    data[0x20] = 2
    path.write_bytes(data)
    with pytest.raises(BundleError, match="it is for SM 80, and should be for SM 120"):
        inspect(tmp_path / "engine")
