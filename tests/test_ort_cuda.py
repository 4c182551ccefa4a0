# SPDX-License-Identifier: Apache-2.0
"""The backend of ONNX Runtime with CUDA: engines, the op that launches kernels, and sessions, all without a GPU."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnx
import pytest
from click.testing import CliRunner

pytest.importorskip("triton")

from nemo_build.bundle import ENGINE_BUNDLE, read_manifest
from nemo_build.cli import cli
from nemo_build.demo import CHECKPOINT, DRAFTERS
from nemo_build.engines import provenance
from nemo_build.engines.backends import require_runnable
from nemo_build.engines.build import build_engine
from nemo_build.engines.gpu import kernel_nodes
from nemo_build.engines.gpu.executor import Binding, Executor
from nemo_build.engines.gpu.kernel_nodes import KernelTable, KernelUse
from nemo_build.engines.gpu.session import GpuSession, Place
from nemo_build.engines.gpu.weights import ALIGNMENT
from nemo_build.engines.inspect import verify_weights
from nemo_build.engines.ort import OrtSession
from nemo_build.engines.ort_cuda import NAME, executor, launches, library, placement
from nemo_build.engines.ort_cuda.launches import Postfix, compile_nodes, require_order
from nemo_build.engines.session import StepBatch
from nemo_build.engines.targets import TARGETS, require_backend
from nemo_build.engines.trt.phases import PENDING
from nemo_build.errors import BundleError, UserError
from nemo_build.export.exporter import export_bundle
from nemo_build.plugins.gpu.compile import SHARED_LIMITS
from nemo_build.plugins.gpu.kernel import ceil_div
from nemo_build.plugins.gpu.node import Node

from . import fake_provider
from .fake_cuda import HostDevice
from .kernel_runner import LIGHTNING, bundle_of
from .launching import OPTIONS, Made, interpreting, make_engine, no_code

pytestmark = [
    pytest.mark.skipif(library() is None, reason="the library that launches kernels was not compiled"),
]

CLOSE = {"rtol": 1e-4, "atol": 1e-4}


@pytest.fixture(scope="module")
def bundle(tmp_path_factory) -> Path:
    """The bundle of a random model with blocks of every kind."""
    return bundle_of(tmp_path_factory.mktemp("launches"))


@pytest.fixture(scope="module")
def made(bundle, tmp_path_factory) -> Made:
    return make_engine(bundle, tmp_path_factory.mktemp("engine") / "engine")


# Engines.


def test_an_engine_has_graphs_code_and_one_file_of_weights(made):
    manifest = read_manifest(made.engine, ENGINE_BUNDLE)
    assert manifest["backend"]["name"] == NAME
    assert manifest["backend"]["sms"] == [90]
    assert set(manifest["graphs"]) == {"target.decode", "target.prefill"}
    verify_weights(made.engine)
    provenance.check_engine(made.engine, manifest)
    places = [t["offset"] for t in manifest["weights"]["tensors"].values()]
    assert all(offset % ALIGNMENT == 0 for offset in places)
    weights = set()
    for name, entry in manifest["graphs"].items():
        model = onnx.load(made.engine / entry["file"], load_external_data=False)
        inputs = {i.name for i in model.graph.input}
        assert inputs == {*entry["inputs"], *entry["weights"]}
        weights |= set(entry["weights"])
        assert {n.domain for n in model.graph.node} == {"", "nemo.gpu"}
        assert entry["on_cpu"] == [], name
        assert (made.engine / entry["file"]).stat().st_size < 1 << 20
        for file in entry["kernels"].values():
            assert (made.engine / file).read_bytes()
            assert file in manifest["files"]
    assert weights == set(manifest["weights"]["tensors"])
    assert manifest["plan"]["weights_memory"] == manifest["plan"]["weights_file"]


def test_the_same_inputs_make_the_same_bytes(made, tmp_path):
    again = make_engine(made.bundle, tmp_path / "again").engine
    files = sorted(str(p.relative_to(again)) for p in again.rglob("*") if p.is_file())
    assert files == sorted(str(p.relative_to(made.engine)) for p in made.engine.rglob("*") if p.is_file())
    assert [f for f in files if (again / f).read_bytes() != (made.engine / f).read_bytes()] == []


@pytest.mark.slow
def test_kernels_are_compiled_for_the_target(bundle, tmp_path):
    for target in ("a100", "b200"):
        out = build_engine(bundle, tmp_path / target, target, replace(OPTIONS, activations="auto")).out
        for entry in read_manifest(out, ENGINE_BUNDLE)["graphs"].values():
            model = onnx.load(out / entry["file"], load_external_data=False)
            for node in model.graph.node:
                if node.op_type == launches.LAUNCH:
                    values = {a.name: onnx.helper.get_attribute_value(a) for a in node.attribute}
                    code = (out / node.input[0]).read_bytes()
                    assert code.startswith(b"\x7fELF")
                    assert values["entry"] in code
                    assert f"sm{TARGETS[target].sm}." in node.input[0]


@pytest.mark.slow
def test_drafters_are_built(tmp_path):
    bundle = export_bundle(CHECKPOINT, tmp_path / "bundle", drafts=list(DRAFTERS.values())).out
    out = build_engine(bundle, tmp_path / "engine", "h100", OPTIONS).out
    graphs = read_manifest(out, ENGINE_BUNDLE)["graphs"]
    assert {"dflash.decode", "dspark.decode", "dspark_context.prefill", "dspark_markov.decode"} <= set(graphs)
    assert [name for name, entry in graphs.items() if entry["on_cpu"]] == []


def test_what_cannot_be_built_is_refused(made, tmp_path, monkeypatch):
    wrong = replace(
        OPTIONS,
        weights="int4",
        activations="int8",
        phases="prefill",
        gpus="all",
        optimization_level=5,
    )
    with pytest.raises(UserError) as caught:
        build_engine(made.bundle, tmp_path / "engine", "h100", wrong)
    assert [p.split(" ")[0] for p in caught.value.problems] == [
        "--weights",
        "--activations",
        "--phases",
        "--gpus",
        "--optimization-level",
    ]
    monkeypatch.setitem(TARGETS, "h100", replace(TARGETS["h100"], sm=75))
    with pytest.raises(UserError, match=r"not compiled for SM 75 \(h100\).*SM 80.*SM 121"):
        build_engine(made.bundle, tmp_path / "engine", "h100", OPTIONS)
    assert not (tmp_path / "engine").exists()


def test_every_kernel_that_an_architecture_lacks_is_named(made, monkeypatch):
    kernels = {c.kernel.name: c.kernel for c in made.compiled.values()}
    table = KernelTable()
    table.uses.update({name: KernelUse("op", {}, {}, name, (name,)) for name in ("step", "keep")})
    monkeypatch.setattr(kernel_nodes, "load_node", lambda use: Node((kernels[use.node],)))
    assert [c.binary.sm for c in compile_nodes(table, 80).values()] == [80, 80]
    with pytest.raises(UserError, match="no kernels for SM 70") as caught:
        compile_nodes(table, 70)
    assert caught.value.problems == ("step", "keep")
    monkeypatch.setitem(SHARED_LIMITS, 80, 0)  # no memory for any of them
    with pytest.raises(UserError, match="no kernels for SM 80"):
        compile_nodes(table, 80)


def test_a_backend_may_be_chosen():
    assert require_backend("a100").name == "tensorrt-rtx"
    assert require_backend("a100", NAME).name == NAME
    for target in TARGETS.values():
        if target.sm is not None:
            assert require_backend(target.name, NAME).name == NAME
            assert target.sm in SHARED_LIMITS
    with pytest.raises(UserError, match="no backend 'abacus' for h100") as caught:
        require_backend("h100", "abacus")
    assert NAME in caught.value.problems
    with pytest.raises(UserError, match="no backend"):
        require_backend("cpu", NAME)


def test_the_command_takes_a_backend(made, tmp_path, monkeypatch):
    monkeypatch.setattr(launches, "compile_kernel", no_code)
    command = ["build", str(made.bundle), "-o", str(tmp_path / "engine"), "--target", "a100", "--json"]
    done = CliRunner().invoke(cli, [*command, "--backend", NAME])
    assert json.loads(done.stdout)["plan"]["weights_memory"] > 0
    assert read_manifest(tmp_path / "engine", ENGINE_BUNDLE)["backend"]["sms"] == [80]
    done = CliRunner().invoke(cli, [*command, "--force", "--backend", "abacus"])
    assert isinstance(done.exception, UserError)


def test_an_engine_says_how_it_is_made_again(made):
    manifest = read_manifest(made.engine, ENGINE_BUNDLE)
    command = provenance.rebuild_command(made.engine, manifest)
    assert "--target h100 --backend onnxruntime-cuda" in command
    assert "--activations float32" in command


def test_what_differs_from_what_an_engine_was_made_with_is_named(made, monkeypatch):
    manifest = read_manifest(made.engine, ENGINE_BUNDLE)
    assert provenance.mismatches(manifest) == []
    monkeypatch.setattr(provenance, "gpu_capabilities", lambda: [120])
    found = provenance.mismatches({**manifest, "backend": {**manifest["backend"], "version": "1.2.3"}})
    assert len(found) == 2
    assert "made for 1.2.3" in found[0]
    assert found[1] == "GPU: made for SM 90, here is SM 120"


# Graphs.


def test_state_is_read_before_it_is_overwritten(made):
    model = onnx.load(made.engine / "target.decode.onnx", load_external_data=False)
    require_order(model)
    step = next(n for n in model.graph.node if n.op_type == launches.LAUNCH)
    state = next(i for i in step.input if i.startswith("conv."))
    model.graph.node.append(onnx.helper.make_node("Identity", [state], ["late"], name="late reader"))
    with pytest.raises(ValueError, match=f"writes to {state} while late reader may still read it"):
        require_order(model)


def test_nodes_without_a_cuda_kernel_are_named():
    def placed(op: str, kind: int, **attributes: Any) -> list[str]:
        node = onnx.helper.make_node(op, ["x"], ["y"], name="node", **attributes)
        values = [onnx.helper.make_tensor_value_info(n, kind, [2, 2]) for n in ("x", "y")]
        graph = onnx.helper.make_graph([node], "g", values[:1], values[1:])
        return placement.nodes_on_cpu(
            onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 24)])
        )

    assert placed("Sigmoid", onnx.TensorProto.BFLOAT16) == []
    assert placed("Einsum", onnx.TensorProto.FLOAT, equation="ij->ji") == []
    assert placed("Einsum", onnx.TensorProto.BFLOAT16, equation="ij->ji") == ["Einsum on bfloat16 (node)"]
    assert placed("Det", onnx.TensorProto.FLOAT) == ["Det on float (node)"]


def test_expressions_are_what_numbers_are():
    b = Postfix("b")
    assert str((3 - b) * 2 + 1) == "3 b - 2 * 1 +"
    assert str(2 * (1 + b)) == "2 1 b + *"
    assert str(ceil_div(b - 1, 16)) == "b 1 - 15 + 16 //"


# Sessions.


class Queued:
    """An executor whose work waits for the device, as a GPU's does."""

    capturable = False

    def __init__(self, device: HostDevice, inner: Executor) -> None:
        self._device, self._inner = device, inner

    def run(self, bindings: Mapping[str, Binding], stream: int) -> None:
        self._device.enqueue("run", lambda: self._inner.run(bindings, stream))


def open_on_interpreter(directory, entries, device, constants) -> dict[str, Executor]:
    found = executor.open_on_host(directory, entries, device, constants)
    return {phase: Queued(device, inner) for phase, inner in found.items()}


def check_session(made: Made) -> None:
    """A session on the interpreter computes what the portable graph computes, with every kernel of both phases."""
    manifest = read_manifest(made.engine, ENGINE_BUNDLE)
    place = Place(made.engine, manifest, HostDevice(), open_on_interpreter, ())
    sizes = {"slots": 3, "context": 128, "pending": PENDING, "hidden": True}
    session = GpuSession(place, "target", **sizes)
    portable = OrtSession(made.bundle / "target.onnx", **sizes)
    random = np.random.default_rng(0)
    kernels = {label: c.kernel for label, c in made.compiled.items()}
    # Prompts of several chunks, single tokens, verification with rollback, rows without tokens, slots out of order.
    steps = [
        ([18, 9], [2, 0], [0, 0], [0, 0]),
        ([1, 3], [0, 2], [9, 18], [0, 0]),
        ([2, 8], [2, 0], [19, 10], [1, 0]),
        ([1, 1, 4], [0, 2, 1], [15, 21, 0], [5, 2, 0]),
    ]
    with interpreting(kernels) as ran:
        for lengths, slots, past, accepted in steps:
            wanted = "all" if max(lengths) <= PENDING else "last"  # prompts give few logits
            batch = StepBatch.of_rows(
                [random.integers(3, 90, n).tolist() for n in lengths],
                past=past,
                slots=slots,
                accepted=accepted,
                logits=wanted,
            )
            got, want = session.step(batch), portable.step(batch)
            np.testing.assert_allclose(got.logits, want.logits, **CLOSE)
            valid = np.arange(max(lengths)) < np.array(lengths)[:, None]
            np.testing.assert_allclose(got.hidden[valid], want.hidden[valid], **CLOSE)
    assert set(ran) == set(kernels)


def test_a_session_computes_what_the_portable_graph_computes(made):
    check_session(made)


@pytest.mark.slow
def test_a_session_of_a_quantized_model_does_too(tmp_path):
    made = make_engine(bundle_of(tmp_path, LIGHTNING), tmp_path / "engine")
    manifest = read_manifest(made.engine, ENGINE_BUNDLE)
    assert {"F32", "I32"} <= {t["dtype"] for t in manifest["weights"]["tensors"].values()}
    check_session(made)


def test_an_engine_is_refused_here_with_reasons(made, monkeypatch):
    manifest = read_manifest(made.engine, ENGINE_BUNDLE)
    monkeypatch.setattr(executor, "_loads", lambda name: False)
    monkeypatch.setattr(executor, "library", lambda: None)
    with pytest.raises(BundleError, match="ONNX Runtime on CUDA and cannot be run here") as caught:
        require_runnable(made.engine, manifest)
    text = "\n".join(caught.value.problems)
    assert "not compiled when nemo-build was installed" in text
    assert "libcudart.so.13, libcublas.so.13" in text
    assert "no NVIDIA GPU" in text
    assert "--target cpu" in caught.value.hint
    monkeypatch.setattr(executor.ort, "get_available_providers", lambda: ["CPUExecutionProvider"])
    assert "pip install onnxruntime-gpu" in executor.missing()[-1]


@pytest.mark.skipif(bool(provenance.gpu_capabilities()), reason="there is a GPU")
def test_without_the_provider_a_session_says_what_is_missing(made, monkeypatch):
    manifest = read_manifest(made.engine, ENGINE_BUNDLE)
    monkeypatch.setattr(executor, "_ordinal", lambda device: 0)
    for missing in ([], ["libcudart.so.13 cannot be loaded"]):
        monkeypatch.setattr(executor, "missing", lambda found=missing: found)
        with pytest.raises(BundleError, match="cannot start its CUDA provider") as caught:
            executor.open_graphs(
                made.engine, {"decode": manifest["graphs"]["target.decode"]}, HostDevice(), {}
            )
        assert list(caught.value.problems) == (missing or ["it is left out"])
        assert "--target cpu" in caught.value.hint


def test_a_missing_kernel_or_a_changed_one_is_found(made, tmp_path):
    engine = tmp_path / "engine"
    shutil.copytree(made.engine, engine)
    manifest = read_manifest(engine, ENGINE_BUNDLE)
    first, second, *_ = manifest["graphs"]["target.decode"]["kernels"].values()
    (engine / first).unlink()
    (engine / second).write_bytes(b"something else")
    with pytest.raises(BundleError) as caught:
        provenance.check_engine(engine, manifest)
    assert sorted(p.split(" is ")[0] for p in caught.value.problems) == sorted([first, second])
    with pytest.raises(BundleError, match="cannot load"):
        executor.open_on_host(engine, {"decode": manifest["graphs"]["target.decode"]}, HostDevice(), {})


def test_a_library_that_was_not_compiled_is_missed(made, monkeypatch):
    manifest = read_manifest(made.engine, ENGINE_BUNDLE)
    monkeypatch.setattr(executor, "library", lambda: None)
    with pytest.raises(BundleError, match="not there") as caught:
        executor.open_on_host(made.engine, {"decode": manifest["graphs"]["target.decode"]}, HostDevice(), {})
    assert "C++ compiler" in caught.value.problems[0]


class NotingSession:
    """A session that notes what is bound; see ONNX Runtime's ``InferenceSession`` and ``IOBinding``."""

    def __init__(self) -> None:
        self.bound: list[list[tuple]] = []
        self.fails = False

    def get_inputs(self) -> list[Any]:
        return [SimpleNamespace(name=n) for n in ("x", "weight")]

    get_outputs = get_inputs

    def io_binding(self) -> Any:
        noted: list[tuple] = []
        self.bound.append(noted)
        return SimpleNamespace(bind_input=lambda *a: noted.append(a), bind_output=lambda *_: None)

    def run_with_iobinding(self, binding: Any, options: Any) -> None:
        if self.fails:
            raise ValueError("it refuses")


def test_bindings_are_kept_and_forgotten():
    session, place = NotingSession(), Binding(256, (2,), "bfloat16")
    graph = executor.OrtExecutor(session, ("cuda", 1), {"weight": place, "of another graph": place})
    sets = [{"x": place._replace(address=i)} for i in range(executor._KEPT + 1)]
    for bindings in (sets[0], sets[0], *sets[1:], sets[0]):
        graph.run(bindings, 7)
    assert len(session.bound) == len(sets) + 1
    assert session.bound[0] == [
        ("weight", "cuda", 1, onnx.TensorProto.BFLOAT16, [2], 256),
        ("x", "cuda", 1, onnx.TensorProto.BFLOAT16, [2], 0),
    ]
    session.fails = True
    with pytest.raises(RuntimeError, match="ONNX Runtime: it refuses"):
        graph.run(sets[0], 7)


# The real provider, with nothing behind it.

RUN = """
import json, sys
from pathlib import Path
import numpy as np
from nemo_build.engines.gpu.session import GpuSession, Place
from nemo_build.engines.ort_cuda import executor
from nemo_build.engines.session import StepBatch
from tests.fake_cuda import HostDevice

executor._ordinal = lambda device: 0
opened, inner = [], executor.ort.InferenceSession
def recording(path, options, providers):
    options.add_session_config_entry("session.record_ep_graph_assignment_info", "1")
    opened.append(inner(path, options, providers=providers))
    return opened[-1]
executor.ort.InferenceSession = recording
class Eager(HostDevice):
    stream = 0x7700
    def _enqueue(self, name, work):
        work()
directory = Path(sys.argv[1])
manifest = json.loads((directory / "engine.json").read_text())
place = Place(directory, manifest, Eager(), executor.open_graphs, ())
session = GpuSession(place, "target", slots=2, context=64, pending=8)
tokens = [[5] * 20, [6] * 9]
session.step(StepBatch.of_rows(tokens, past=[0, 0], slots=[0, 1]))
print("MARK", flush=True)
open(__import__("os").environ["FAKE_CUDA_LOG"], "w").close()
session.step(StepBatch.of_rows([[5], [6]], past=[20, 9], slots=[0, 1]))
nodes = [[s.ep_name, n.op_type] for o in opened for s in o.get_provider_graph_assignment_info() for n in s.get_nodes()]
print(json.dumps(nodes))
"""


@pytest.mark.skipif(bool(fake_provider.unavailable()), reason=fake_provider.unavailable() or "none")
def test_the_cuda_provider_takes_the_graphs(bundle, tmp_path, monkeypatch):
    """In bfloat16: the provider runs every op but those on shapes, copies no state, and waits for nothing."""
    monkeypatch.setattr(launches, "compile_kernel", no_code)
    options = replace(OPTIONS, activations="auto", max_sequences=2, max_context=64)
    engine = build_engine(bundle, tmp_path / "engine", "h100", options, use_cache=False).out
    libraries = tmp_path / "libraries"
    libraries.mkdir()
    fake_provider.make_libraries(libraries)
    output, log = fake_provider.run(libraries, RUN, engine)
    placed = Counter((provider, op) for provider, op in json.loads(output.splitlines()[-1]))
    on_cpu = {op for provider, op in placed if provider != "CUDAExecutionProvider"}
    assert on_cpu <= {"Shape", "Squeeze", "Concat", "Slice", "Gather"}, "what is computed from shapes alone"
    ran = Counter(line.split()[0] for line in log)
    model = onnx.load(engine / "target.decode.onnx", load_external_data=False)
    assert ran["launch"] == sum(node.op_type == launches.LAUNCH for node in model.graph.node)
    assert {line.split()[2] for line in log if line.startswith("launch")} == {"0x7700"}
    copies = Counter(line.split()[1] for line in log if line.startswith("copy"))
    assert copies["device-host"] == ran["wait"] == 0
    assert not [line for line in log if "of a launch" in line], "states are bound in place"
    manifest = read_manifest(engine, ENGINE_BUNDLE)
    caches = [s for s in manifest["graphs"]["target.decode"]["state"] if s["kind"] == "key"]
    size = 2 * 2 * int(np.prod(caches[0]["shape"][1:]))
    assert max(int(line.split()[2]) for line in log if line.startswith("copy device-device")) < size


@pytest.mark.slow
@pytest.mark.skipif(bool(fake_provider.unavailable()), reason=fake_provider.unavailable() or "none")
def test_the_table_of_cuda_kernels_is_the_providers(tmp_path):
    """If ONNX Runtime has others now, `fake_provider.write_table` writes it anew."""
    table = json.loads(placement.TABLE.read_text(encoding="utf-8"))
    fake_provider.make_libraries(tmp_path)
    assert fake_provider.kernel_table(tmp_path, table["opset"]) == table["kernels"]
