# SPDX-License-Identifier: Apache-2.0
"""TensorRT engines, built with a stand-in for TensorRT's native module.

What the stand-in is made of is told in ``tensorrt_native.py``. ``docs/tensorrt.md`` says what that proves.
"""

from __future__ import annotations

import importlib.util
import json
import math
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import onnx
import pytest

from nemo_build.bundle import ENGINE_BUNDLE, MODEL_BUNDLE, read_manifest
from nemo_build.demo import CHECKPOINT, DRAFTERS
from nemo_build.engines import provenance
from nemo_build.engines.build import BuildOptions, Inputs, build_engine
from nemo_build.engines.gpu.kernel_nodes import KERNEL_DOMAIN, KernelUse, load_node
from nemo_build.engines.gpu.lowering import weight_inputs
from nemo_build.engines.gpu.weights import ALIGNMENT
from nemo_build.engines.inspect import inspect, verify_weights
from nemo_build.engines.plan import MemoryPlan
from nemo_build.engines.provenance import mismatches
from nemo_build.engines.targets import TARGETS
from nemo_build.engines.tensorrt import LIBRARY, build, kernels
from nemo_build.engines.tensorrt.kernels import chosen_node
from nemo_build.engines.trt import Library
from nemo_build.engines.trt.compiling import FOLDER
from nemo_build.engines.weights import stored_tensors
from nemo_build.export.exporter import export_bundle

from .quantized import run as quantize
from .tensorrt_stub import vendor_package
from .tiny import KINDS, reference_model, save_checkpoint

pytest.importorskip("triton")

from .tensorrt_machine import H100, OPTIONS, Stub, export_small, lowered, needs_packages

QUANTIZABLE = {
    "hybrid_override_pattern": "M*E-",
    "hidden_size": 32,
    "intermediate_size": 48,
    "mamba_num_heads": 2,
    "n_groups": 1,
    "moe_intermediate_size": 32,
    "moe_shared_expert_intermediate_size": 48,
}
"""Widths that divide into blocks."""


@pytest.fixture
def stub(tmp_path, monkeypatch) -> Stub:
    return Stub(monkeypatch, tmp_path / "machine")


@pytest.fixture(scope="module")
def small_bundle(tmp_path_factory) -> Path:
    """A bundle of a model with one graph of three blocks."""
    return export_small(tmp_path_factory.mktemp("small"))


@pytest.fixture(scope="module")
def built(tiny_bundle, tmp_path_factory) -> tuple[Path, dict[str, dict[str, Any]]]:
    """An engine with all graphs of the random checkpoint, and what was asked of the library for each of them."""
    folder = tmp_path_factory.mktemp("tensorrt")
    options = replace(OPTIONS, phases="decode,prefill")
    with pytest.MonkeyPatch.context() as patch:
        stub = Stub(patch, folder / "machine")
        out = build_engine(tiny_bundle, folder / "engine", "h100", options, use_cache=False).out
        graphs = read_manifest(out, ENGINE_BUNDLE)["graphs"]
        return out, dict(zip(graphs, stub.builds(), strict=True))


@needs_packages
def test_an_engine_says_what_it_is(built, tiny_bundle, monkeypatch):
    out, _ = built
    manifest = read_manifest(out, ENGINE_BUNDLE)
    backend = manifest["backend"]
    assert (backend["name"], backend["version"], backend["sms"]) == ("tensorrt", LIBRARY.version, [90])
    assert (backend["gpu"], backend["cuda"]) == (H100.name, "13.0")
    assert set(manifest["graphs"]) == {f"{g}.{p}" for g in ("target", "mtp") for p in ("decode", "prefill")}
    names = {use["node"] for use in backend["kernels"]}
    assert names == {name for g in manifest["graphs"].values() for name in g["kernels"]}
    assert sorted(p.name for p in out.parent.iterdir()) == ["engine", "machine"], "no logs"
    assert not list(out.glob("*.onnx")) + list(out.glob(".*"))
    verify_weights(out)
    monkeypatch.setattr(Library, "installed_version", lambda library: library.version)
    monkeypatch.setattr(provenance, "gpu_capabilities", lambda: [90])
    assert mismatches(manifest) == []
    report = inspect(out)
    assert report.engine is not None
    assert report.engine["compiled"] == {}


@needs_packages
def test_weights_are_inputs_of_all_graphs_and_lie_in_one_file(built, tiny_bundle):
    out, _ = built
    manifest = read_manifest(out, ENGINE_BUNDLE)
    tensors, size = manifest["weights"]["tensors"], (out / "weights.bin").stat().st_size
    assert list(manifest["weights"]["files"]) == ["weights.bin"]
    ends = [t["offset"] + t["nbytes"] for t in tensors.values()]
    assert max(ends) == size
    assert all(t["offset"] % ALIGNMENT == 0 for t in tensors.values())
    for entry in manifest["graphs"].values():
        model, _, weights = lowered(tiny_bundle, entry["graph"], entry["phase"])
        assert sorted(entry["weights"]) == sorted(weight_inputs(model, weights))
        inputs = [i.name for i in model.graph.input if i.name not in entry["weights"]]
        assert entry["inputs"] == inputs
        assert set(entry["weights"]) <= set(tensors)
        assert entry["scratch"] == 12345
    used = {name for entry in manifest["graphs"].values() for name in entry["weights"]}
    assert used == set(tensors)
    assert manifest["plan"]["weights_memory"] == sum(t["nbytes"] for t in tensors.values())


@needs_packages
@pytest.mark.parametrize("name", ["target.decode", "target.prefill", "mtp.decode", "mtp.prefill"])
def test_every_kernel_node_is_a_plugin(built, tiny_bundle, name):
    """With what the graph says it reads and gives; the network's inputs and outputs are the graph's."""
    journal = built[1][name]
    model, table, _ = lowered(tiny_bundle, *name.split("."))
    nodes = {node.name: node for node in table.nodes()}
    places = [n for n in model.graph.node if n.domain == KERNEL_DOMAIN]
    assert [p["name"] for p in journal["plugins"]] == [n.name for n in places]
    constants = {t.name for t in model.graph.initializer}
    for node, plugin in zip(places, journal["plugins"], strict=True):
        kernel = nodes[node.op_type]
        assert (plugin["namespace"], plugin["plugin"]) == (
            "nemo",
            chosen_node(table.uses[kernel.name], 90).name,
        )
        assert plugin["tactics"] == [1], "nothing is timed on contents that are made up"
        read = [n for n, _, _ in plugin["inputs"]]
        assert [a == b or b in constants for a, b in zip(read, node.input, strict=True)] == [True] * len(read)
        for (_, dtype, dims), tensor in zip(plugin["inputs"], kernel.inputs, strict=True):
            assert dtype == {"float32": "FLOAT", "bfloat16": "BF16"}.get(tensor.dtype, tensor.dtype.upper())
            known = [d if isinstance(d, int) else -1 for d in tensor.shape]
            assert all(a in (b, -1) for a, b in zip(dims, known, strict=True)), (node.name, dims, known)
        assert [n for n, _, _ in plugin["outputs"]] == list(node.output)
        inputs = [t.name for t in kernel.inputs]
        aliases = [-1 if t.alias is None else inputs.index(t.alias) for t in kernel.outputs]
        assert plugin["aliases"] == aliases
        for output, alias in zip(node.output, aliases, strict=True):
            assert alias < 0 or output == f"{node.input[alias]}.out", "a state is written where it was read"
    assert sorted(journal["inputs"]) == sorted(i.name for i in model.graph.input)
    assert sorted(journal["outputs"]) == sorted(o.name for o in model.graph.output)


@needs_packages
def test_how_the_builder_is_set_up(built, stub, small_bundle, tmp_path):
    for journal in built[1].values():
        settings = {n: v for n, v in journal.items() if n not in ("plugins", "inputs", "outputs", "timings")}
        assert settings == {
            "flags": 1 << 3,
            "tf32": False,
            "aliased": True,
            "level": 3,
            "verbosity": "DETAILED",
            "profiles": 1,
            "monitored": True,
            "visible": "0",
        }
    options = replace(OPTIONS, optimization_level=5, activations="float32")
    build_engine(small_bundle, tmp_path / "engine", "h100", options, use_cache=False)
    assert {journal["level"] for journal in stub.builds()} == {5}
    settings = read_manifest(tmp_path / "engine", ENGINE_BUNDLE)["options"]
    assert (settings["optimization_level"], settings["activations"]) == (5, "float32")


@needs_packages
def test_timings_are_kept_by_gpu_and_version(stub, small_bundle, tmp_path):
    """Each plan reads the file and adds to it; where it is does not make another engine."""
    cache = tmp_path / "machine" / "cache" / "timings" / "nvidia-h100-80gb-hbm3-tensorrt-11.4.0.106.cache"
    first = build_engine(small_bundle, tmp_path / "a", "h100", OPTIONS, use_cache=False)
    assert [j["timings"] for j in stub.builds()] == ["timings"]
    assert cache.read_bytes().startswith(b"timings one")
    mine = tmp_path / "mine" / "h100.cache"
    mine.parent.mkdir()
    mine.write_bytes(b"timings of mine")
    options = replace(OPTIONS, timing_cache=str(mine))
    second = build_engine(small_bundle, tmp_path / "b", "h100", options, use_cache=False)
    assert [j["timings"] for j in stub.builds()] == ["timings of mine"]
    assert mine.read_bytes().startswith(b"timings of mine one")
    assert not list(mine.parent.glob("*.partial"))
    assert first.key == second.key


@needs_packages
def test_second_build_comes_from_the_cache(stub, small_bundle, tmp_path):
    first = build_engine(small_bundle, tmp_path / "a", "h100", OPTIONS)
    second = build_engine(small_bundle, tmp_path / "b", "h100", OPTIONS)
    assert (first.cached, second.cached) == (False, True)
    stub.set_gpus(replace(H100, name="NVIDIA H100 PCIe"))
    other = build_engine(small_bundle, tmp_path / "c", "h100", OPTIONS)
    assert not other.cached, "kernels were chosen on another GPU"


@needs_packages
@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["fp8", "nvfp4"])
def test_quantized_checkpoints(stub, tmp_path, recipe):
    """Codes are 32-bit words to the library, on a GPU that has no FP4 too."""
    save_checkpoint(reference_model(**QUANTIZABLE), tmp_path / "checkpoint")
    quantize(tmp_path / "checkpoint", tmp_path / "quantized", recipe)
    export_bundle(tmp_path / "quantized", tmp_path / "bundle")
    result = build_engine(tmp_path / "bundle", tmp_path / "engine", "h100", OPTIONS, use_cache=False)
    tensors = read_manifest(result.out, ENGINE_BUNDLE)["weights"]["tensors"].values()
    words = [t for t in tensors if t["dtype"] == "I32"]
    assert {t["format"] for t in words} == {recipe}
    assert {t["dtype"] for t in tensors} <= {"I32", "BF16", "F32"}
    assert all(t["nbytes"] == 4 * math.prod(t["shape"]) for t in words)
    types = {d for j in stub.builds() for p in j["plugins"] for _, d, _ in (*p["inputs"], *p["outputs"])}
    assert types <= {"FLOAT", "BF16", "INT32", "INT64"}


@needs_packages
@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_model(stub, tmp_path, kind):
    save_checkpoint(reference_model(**KINDS[kind]), tmp_path / "checkpoint")
    export_bundle(tmp_path / "checkpoint", tmp_path / "bundle")
    options = replace(OPTIONS, phases="decode,prefill")
    build_engine(tmp_path / "bundle", tmp_path / "engine", "h100", options, use_cache=False)
    assert len(stub.builds()) == 2


@needs_packages
@pytest.mark.slow
@pytest.mark.parametrize("form", ["nvfp4", "bf16"])
def test_full_width(stub, tmp_path, form):
    """The release's widths and formats, with five of its layers. What weights hold does not matter to plans."""
    script = Path(__file__).parent.parent / "scripts" / "synthetic_checkpoint.py"
    command = [sys.executable, script, "--format", form, "--pattern", "MEM*E", tmp_path / "checkpoint"]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    export_bundle(tmp_path / "checkpoint", tmp_path / "bundle")
    manifest = read_manifest(tmp_path / "bundle", MODEL_BUNDLE)
    names = {name: tmp_path / "bundle" / graph["file"] for name, graph in manifest["graphs"].items()}
    models = {name: onnx.load(path, load_external_data=False) for name, path in names.items()}
    inputs = Inputs(
        tmp_path / "bundle", tmp_path / "checkpoint", manifest, models, stored_tensors(models.values())
    )
    options = BuildOptions(max_sequences=8, max_context=4096)
    maker = build.Compiling(inputs, TARGETS["h100"], options)
    maker.plan.require(*maker.available(options))
    (tmp_path / "engine" / FOLDER).mkdir(parents=True)
    for graph in maker._made.graphs:
        entry = maker._compile(graph, tmp_path / "engine", tmp_path / "engine", None)
        assert set(entry["weights"]) <= set(maker._made.weights.weights)
    assert len(stub.builds()) == 2 * len(models)


@needs_packages
@pytest.mark.slow
def test_drafters(stub, tmp_path):
    """The demo drafters' graphs, which are plain products and attention of their own kinds."""
    bundle = export_bundle(CHECKPOINT, tmp_path / "bundle", drafts=list(DRAFTERS.values())).out
    engine = build_engine(bundle, tmp_path / "engine", "h100", OPTIONS, use_cache=False).out
    graphs = read_manifest(engine, ENGINE_BUNDLE)["graphs"]
    for kind in ("dflash", "dspark"):
        assert f"{kind}.decode" in graphs
        assert graphs[f"{kind}.decode"]["state"] == graphs[f"{kind}_context.decode"]["state"]


def test_the_memory_plan_counts_everything_once(built, tiny_bundle):
    manifest = read_manifest(built[0], ENGINE_BUNDLE)
    said = {name: value for name, value in manifest["plan"].items() if name != "total"}
    plan = MemoryPlan(**said)
    sizes = {"float32": 4, "bfloat16": 2}
    states = {s["name"]: s for g in manifest["graphs"].values() for s in g["state"]}.values()
    nbytes = [2 * sizes[s["dtype"]] * math.prod(s["shape"][1:]) for s in states]
    caches = [n for n, s in zip(nbytes, states, strict=True) if s["kind"] in ("key", "value")]
    assert (plan.state, plan.cache) == (sum(nbytes) - sum(caches), sum(caches))
    assert plan.weights_memory == plan.weights_file
    assert plan.activations > 4 * manifest["spec"]["vocab_size"] * 16


def test_the_kernel_that_a_plan_gets(small_bundle, monkeypatch):
    """The first that suits the graph and needs no shared memory to be asked for; any other where there is none."""
    _, table, _ = lowered(small_bundle, "target", "prefill")
    (use,) = [u for u in table.uses.values() if u.op == "CausalConv1d"]
    node = load_node(use)
    assert [k.name for k in node.kernels] == ["step", "prompt"]
    assert use.launches == ("prompt",)
    assert chosen_node(use, 90).kernels == node.kernels[1:]
    monkeypatch.setattr(kernels, "launchable", lambda node, sm: [1])
    assert chosen_node(use, 90).kernels == node.kernels[:1]


@needs_packages
def test_an_engine_of_something_else_is_refused(built, monkeypatch):
    manifest = read_manifest(built[0], ENGINE_BUNDLE)
    monkeypatch.setattr(Library, "installed_version", lambda library: "11.4.1.20")
    monkeypatch.setattr(provenance, "gpu_capabilities", lambda: [100])
    uses = [dict(use) for use in manifest["backend"]["kernels"]]
    uses[0]["node"] = "Other_00000000"
    said = mismatches({**manifest, "backend": {**manifest["backend"], "kernels": uses}})
    assert said == [
        f"tensorrt: made for {LIBRARY.version}, here is 11.4.1.20",
        "GPU: made for SM 90, here is SM 100",
        f"GPU kernels: made with others than this version has of {uses[0]['op']}",
    ]
    uses[0] |= {"dims": {}}
    said = mismatches({**manifest, "backend": {**manifest["backend"], "kernels": uses}})
    assert len(said) == 3
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "triton" else find(name))
    assert len(mismatches({**manifest, "backend": {**manifest["backend"], "kernels": uses}})) == 2


NATIVE_NAMES = (
    "ALIASED_PLUGIN_IO_10_03",
    "ATTENTION_OUTPUT",
    "Builder",
    "BuilderFlag",
    "CausalMaskKind",
    "DETAILED",
    "ELEMENTWISE",
    "IAttentionOutputLayer",
    "ILogger",
    "IProgressMonitor",
    "IStreamWriter",
    "LOWER_RIGHT",
    "LayerType",
    "NetworkDefinitionCreationFlag",
    "OnnxParser",
    "PreviewFeature",
    "ProfilingVerbosity",
    "Runtime",
    "STRONGLY_TYPED",
    "TF32",
    "add_cast",
    "add_optimization_profile",
    "add_plugin",
    "build_serialized_network_to_stream",
    "builder_optimization_level",
    "causal_kind",
    "clear_flag",
    "combine",
    "create_builder_config",
    "create_network",
    "create_optimization_profile",
    "create_timing_cache",
    "deserialize_cuda_engine",
    "device_memory_size_v2",
    "get_error",
    "get_input",
    "get_layer",
    "get_output",
    "get_timing_cache",
    "key_value_lengths",
    "mark_output",
    "num_errors",
    "num_inputs",
    "num_layers",
    "num_outputs",
    "parse",
    "profiling_verbosity",
    "progress_monitor",
    "serialize",
    "set_input",
    "set_preview_feature",
    "set_shape",
    "set_timing_cache",
    "unmark_output",
)
"""What the process that builds a plan uses of the library."""


@pytest.mark.parametrize("name", NATIVE_NAMES)
def test_the_bindings_have_every_name_that_is_used(name):
    """Their binary is here without the libraries that it needs, and has its names as text."""
    package = vendor_package()
    if package is None:
        pytest.skip("TensorRT's bindings are not installed: pip install tensorrt-cu13-bindings")
    (binary,) = package.parent.glob("tensorrt*.so")
    assert name.encode() + b"\0" in binary.read_bytes()


def test_a_use_survives_a_manifest(tiny_bundle):
    _, table, _ = lowered(tiny_bundle, "mtp", "decode")
    for use in table.uses.values():
        assert KernelUse.from_json(json.loads(json.dumps(use.to_json()))) == use
