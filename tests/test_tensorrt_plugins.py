# SPDX-License-Identifier: Apache-2.0
"""Kernels as TensorRT plugins: the vendor's package for plugins, driven as TensorRT does on a stand-in for it."""

from __future__ import annotations

import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import ml_dtypes  # noqa: F401  (makes its types known to NumPy by name)
import numpy as np
import pytest

pytest.importorskip("triton")

from triton.backends.nvidia.compiler import get_ptxas

from nemo_build.errors import UserError
from nemo_build.plugins import gpu
from nemo_build.plugins.gpu import tensorrt
from nemo_build.plugins.gpu.compile import PTX_VERSIONS, Binary, Hidden, _resources, compile_kernel
from nemo_build.plugins.gpu.kernel import POINTERS, Kernel, resolve
from nemo_build.plugins.gpu.node import Node, nodes
from nemo_build.plugins.gpu.tensorrt import plain_ptx, register
from nemo_build.plugins.registry import plugins_by_name

from .tensorrt_stub import Build, DataType, vendor_package, vendor_plugins
from .test_gpu_conv import Convolution
from .test_gpu_experts import Experts
from .test_gpu_linear import FORMATS, LAUNCHES, Linear
from .test_gpu_scan import CHUNKED, CONTROL, Scan

KERNELS = gpu.all_kernels()
NODES = nodes(KERNELS)
ARCHITECTURES = list(PTX_VERSIONS)
TYPES = {
    "float32": DataType.FLOAT,
    "float16": DataType.HALF,
    "bfloat16": DataType.BF16,
    "int32": DataType.INT32,
    "int64": DataType.INT64,
}
STEPS = (
    {"batch": 1, "steps": 1, "slots": 1, "chunks": 1},
    {"batch": 3, "steps": 5, "slots": 7, "chunks": 2},
    {"batch": 2, "steps": 1000, "slots": 64, "chunks": 8},
)


@pytest.fixture(scope="module")
def trt():
    """The vendor's package on the stand-in, with the kernels of all ops registered."""
    location = vendor_package()
    if location is None:
        pytest.skip("TensorRT's bindings are not installed: pip install tensorrt-cu13-bindings")
    with vendor_plugins(location) as module:
        register(NODES)
        yield module


@pytest.fixture
def uncompiled(monkeypatch):
    """Kernels whose code is their parameters, so that everything else is checked without a compiler."""

    def compile_kernel(kernel, sm):
        hidden = (Hidden("global_scratch", 0, 1), Hidden("profile_scratch", 0, 1))
        count = len(kernel.inputs) + len(kernel.sizes) + len(kernel.outputs) + len(hidden)
        parameters = ",".join(f"\n\t.param .u64 parameter_{i}" for i in range(count))
        ptx = f".target sm_{sm}\n.visible .entry {kernel.name}({parameters}\n)\n{{ }}"
        return Binary(sm, b"", ptx, kernel.name, kernel.num_warps, 1000 + sm, 0, 0, hidden)

    monkeypatch.setattr(tensorrt, "compile_kernel", compile_kernel)


def build(trt, node: Node, sm: int, **known: int) -> Build:
    """A node with its inputs as described; sizes that are not given are dynamic."""
    given = [(TYPES[t.dtype], [known.get(d, d) for d in t.shape]) for t in node.inputs]
    return Build(trt, node.name, given, sm=sm)


def numbers(dims, sizes) -> tuple[int, ...]:
    return tuple(d.evaluate(sizes) for d in dims)


def check_launch(launch, kernel, sizes) -> None:
    """Grid and integers are the description's."""
    grid = (launch.grid_x, launch.grid_y, launch.grid_z)
    assert numbers((g.expr for g in grid), sizes) == kernel.grid(sizes)
    assert numbers((e.expr for e in launch.extra), sizes) == tuple(sizes[n] for n in kernel.sizes)
    assert {e.dtype.name for e in launch.extra} <= {"INT32"}
    block = (launch.block_x, launch.block_y, launch.block_z)
    assert numbers((b.expr for b in block), {}) == (32 * kernel.num_warps, 1, 1)


@pytest.mark.parametrize("node", NODES, ids=[n.name.rpartition("_")[0] for n in NODES])
def test_a_node_is_what_its_kernels_describe(trt, uncompiled, node):
    """On every architecture and with every tactic: types, shapes, shared buffers, formats and launches."""
    for sm in ARCHITECTURES:
        possible = [i for i, k in enumerate(node.kernels, 1) if k.least_sm <= sm]
        if not possible:
            with pytest.raises(UserError, match=f"no kernel for sm_{sm}"):
                build(trt, node, sm)
            continue
        made = build(trt, node, sm)
        assert made.tactics == possible
        tensors = (*node.inputs, *node.outputs)
        assert made.formats == [[(TYPES[t.dtype], trt.TensorFormat.LINEAR) for t in tensors]]
        assert made.types == [TYPES[t.dtype] for t in node.outputs]
        names = [t.name for t in node.inputs]
        aliases = [-1 if t.alias is None else names.index(t.alias) for t in node.outputs]
        assert [made.plugin.get_aliased_input(i) for i in range(len(aliases))] == aliases
        launches = {i: made.launch(i) for i in possible}
        for sizes in STEPS:
            for tensor, shape in zip(node.outputs, made.shapes, strict=True):
                assert numbers(shape, sizes) == tuple(resolve(d, sizes) for d in tensor.shape)
            for tactic, launch in launches.items():
                kernel = node.kernels[tactic - 1]
                check_launch(launch, kernel, sizes)
                assert launch.shared_mem.expr.evaluate({}) == 1000 + sm
                assert (launch.entry, f"sm_{sm}\n".encode() in launch.code) == (kernel.name, True)
                count = len(tensors) + len(kernel.sizes)
                assert re.findall(rb"parameter_\d+", launch.code) == [
                    f"parameter_{i}".encode() for i in range(count)
                ]


def test_every_type_of_kernels_has_a_name():
    assert list(tensorrt.TYPES) == list(POINTERS)


def test_every_kernel_is_a_tactic_of_one_node():
    tactics = [k.label for node in NODES for k in node.kernels]
    assert sorted(tactics) == sorted(k.label for k in KERNELS)
    assert len({n.name for n in NODES}) == len(NODES)
    assert all(re.fullmatch(r"[A-Z]\w+", n.name) for n in NODES)


@pytest.mark.parametrize(
    ("name", "tactics"),
    [
        ("SelectiveScanStep_bfloat16", ["step"]),
        ("SelectiveScanKeep_bfloat16", ["keep"]),
        ("CausalConv1d_bfloat16", ["step", "prompt"]),
        (
            "BlockLinearMultiply_bfloat16_plain_4096x2688",
            ["vector_1", "vector_4", "tile_16", "tile_64", "tile_128"],
        ),
        ("BlockLinearRound_bfloat16_fp8_fp8_10304x2688", ["round"]),
        (
            "BlockLinearMultiply_bfloat16_fp8_fp8_10304x2688",
            [
                *("vector_1", "vector_4", "tile_16", "tile_64", "tile_128"),
                *("codes_16", "codes_64", "codes_128"),
            ],
        ),
        ("RoutedExpertsUp_bfloat16_nvfp4_128x1856x2688", ["up_16", "up_64"]),
        (
            "RoutedExpertsDown_bfloat16_nvfp4_nvfp4_128x1856x2688",
            ["down_16", "down_64", "down_codes_16", "down_codes_64"],
        ),
    ],
)
def test_variants_for_any_shape_share_a_node(name, tactics):
    (node,) = [n for n in NODES if n.name.rpartition("_")[0] == name]
    assert [k.name for k in node.kernels] == tactics


def test_kernels_that_need_too_much_shared_memory_are_no_tactics(trt, monkeypatch):
    (node,) = [n for n in NODES if n.name.startswith("BlockLinearMultiply_bfloat16_plain")]
    needs = dict(zip((k.name for k in node.kernels), (0, 49153, 49152, 1 << 16, 49153), strict=True))
    monkeypatch.setattr(tensorrt, "compile_kernel", lambda k, sm: SimpleNamespace(shared=needs[k.name]))
    assert build(trt, node, 90).tactics == [1, 3]
    needs |= dict.fromkeys(needs, 1 << 16)
    with pytest.raises(UserError, match=r"every kernel of BlockLinearMultiply\w+ needs more than 48 KiB"):
        build(trt, node, 90)


def test_kernels_of_a_stage_have_the_same_tensors():
    other = replace(KERNELS[0], name="other", inputs=KERNELS[0].inputs[1:])
    with pytest.raises(ValueError, match="other tensors"):
        nodes([KERNELS[0], other])


def test_kernels_that_only_constants_tell_apart_are_not_variants():
    other = replace(KERNELS[0], constexprs={**KERNELS[0].constexprs, "FACTOR": 2.0})
    with pytest.raises(ValueError, match="two kernels"):
        nodes([KERNELS[0], other])


def test_a_name_changes_with_the_kernel():
    kernel = KERNELS[0]
    name = Node((kernel,)).name
    assert Node((replace(kernel),)).name == name
    others = (
        replace(kernel, num_warps=8),
        replace(kernel, constexprs={**kernel.constexprs, "K": 16}),
        replace(kernel, grid=lambda sizes: (sizes["batch"], 1, 1)),
    )
    assert len({name, *(Node((other,)).name for other in others)}) == 4


class Graph:
    """Nodes one after the other, at widths that the references are quick for; tensors by name, as types and shapes."""

    def __init__(self, trt, kernels, arrays) -> None:
        made = nodes(kernels.values())
        register(made)
        self._trt, self._nodes = trt, {k.name: node for node in made for k in node.kernels}
        self.tensors = {n: (TYPES[a.dtype.name], a.shape) for n, a in arrays.items()}

    def add(self, name: str, **tensors: str) -> dict[str, tuple]:
        """The outputs of the node with this kernel; ``tensors`` are inputs that have another name in the graph."""
        node = self._nodes[name]
        inputs = [self.tensors[tensors.get(t.name, t.name)] for t in node.inputs]
        made = Build(self._trt, node.name, inputs, sm=90)
        shapes = [numbers(shape, {}) for shape in made.shapes]
        names = [t.name for t in node.outputs]
        outputs = dict(zip(names, zip(made.types, shapes, strict=True), strict=True))
        self.tensors |= outputs
        return outputs


def described(array: np.ndarray) -> tuple:
    return TYPES[array.dtype.name], array.shape


def test_outputs_of_the_convolution(trt):
    conv = Convolution(np.random.default_rng(0), 24, 4, ring=3)
    given = conv.random_step(2, 3) | conv.weights
    want = reference("CausalConv1d", given, ("x", "weight", "bias", "state", *CONTROL))
    graph = Graph(trt, conv.kernels, given)
    assert list(graph.add("step").values()) == [described(a) for a in want]


@pytest.mark.parametrize("chunked", [False, True])
def test_outputs_of_the_scan(trt, chunked):
    scan = Scan(np.random.default_rng(0), (4, 16, 2, 21), ring=3)
    given = scan.random_step(2, 37) | scan.parameters
    names = ("x", "dt", "b", "c", "a_log", "d_skip", "dt_bias", "state", "pending", *CONTROL)
    want = [described(a) for a in reference("SelectiveScan", given, names)]
    graph = Graph(trt, scan.kernels, given)
    for name in CHUNKED if chunked else ("step",):
        graph.add(name)
    graph.add("keep", after="y")
    assert [graph.tensors[n] for n in ("y", "state_out", "pending_out")] == want


@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize("launch", LAUNCHES)
def test_outputs_of_a_projection(trt, kind, launch):
    linear = Linear(np.random.default_rng(0), 19, 112, kind)
    x = linear.tokens(2, 3)
    arrays = {"x": x, "lengths": np.array([3, 2]), "input_scale": linear.input_scale, **linear.given}
    graph = Graph(trt, linear.kernels, arrays)
    rounded = {}
    if "round" in linear.kernels:
        graph.add("round")
        rounded = {"x": "codes", "x_scale": "scales"}
    assert graph.add(launch, **rounded)["y"] == described(linear.want(x))


@pytest.mark.parametrize(
    ("form", "rounded"),
    [("plain", "none"), ("fp8", "none"), ("nvfp4", "none"), ("fp8", "fp8"), ("nvfp4", "nvfp4")],
)
@pytest.mark.parametrize("way", ["step", "16", "64"])
def test_outputs_of_experts(trt, form, rounded, way):
    experts = Experts(np.random.default_rng(0), 5, 48, 32, 2, form, rounded=rounded)
    given = experts.step(2, 3, [3, 1])
    inputs = [given[n] for n in ("x", "indices", "weights", "lengths")]
    want = plugins_by_name()["RoutedExperts"].reference(*inputs, *experts.inputs, **experts.attributes)
    stacked = {"up": experts.up, "down": experts.down}
    weights = {f"{part}.{n}": a for part, tensors in stacked.items() for n, a in tensors.items()}
    up, down = ({n: f"{part}.{n}" for n in tensors} for part, tensors in stacked.items())
    graph = Graph(trt, experts.kernels, given | weights)

    def rounds(part, x, names):
        """The name of what a projection multiplies by; codes have that of the output they are."""
        if rounded == "none":
            return {"x": x, "hidden": x}
        graph.add(f"round_{part}", x=x, **names)
        return {"x": "codes", "hidden": "codes", "x_scale": "scales"}

    if way == "step":
        graph.add("step_up", **rounds("up", "x", up), **up)
        graph.add("step_down", **rounds("down", "hidden", down), **down)
    else:
        graph.add("route")
        graph.add(f"up_{way}", **rounds("up", "x", up), **up)
        graph.add(f"down_{way}", **rounds("down", "y", down), **down)
        graph.add("combine", outputs="y")
    assert graph.tensors["y"] == described(want)


def reference(op: str, given, names):
    return plugins_by_name()[op].reference(*(given[n] for n in names))


def assembled(code: bytes, sm: int, directory: Path) -> tuple[int, int]:
    """Registers and local memory after Triton's assembler has read PTX, free to fuse what does not forbid it."""
    target = re.search(rb"\.target (\w+)", code)[1].decode()
    source, cubin = directory / "kernel.ptx", directory / "kernel.cubin"
    source.write_bytes(code)
    subprocess.run(
        [get_ptxas(sm).path, "--regAllocOptLevel=2", f"--gpu-name={target}", source, "-o", cubin], check=True
    )
    return _resources(cubin.read_bytes(), cubin)


def check_code(trt, node: Node, kernel: Kernel, sm: int, directory: Path) -> None:
    """A launch has code of the architecture that takes what TensorRT passes, and that can be assembled."""
    launch = build(trt, node, sm).launch(node.kernels.index(kernel) + 1)
    for sizes in STEPS:
        check_launch(launch, kernel, sizes)
    binary, code = compile_kernel(kernel, sm), launch.code.decode()
    assert launch.shared_mem.expr.evaluate({}) == binary.shared
    assert re.search(r"\.target (\w+)", code)[1] == f"sm_{sm}{'a' if sm >= 90 else ''}"
    parameters = re.search(rf"\.entry {launch.entry}\((.*?)\)", code, re.DOTALL)[1]
    kinds = ["u64"] * len(kernel.inputs) + ["u32"] * len(kernel.sizes) + ["u64"] * len(kernel.outputs)
    assert re.findall(r"\.param \.(\w+)", parameters) == kinds
    assert f".reqntid {launch.block_x.expr.evaluate({})}\n" in code
    assert not re.search(r"^\s*(?:@\S+ )?(?:add|sub|mul)\.(?!rn\.)\S*f(?:16|32|64)", code, re.MULTILINE)
    assert assembled(launch.code, sm, directory) == (binary.registers, binary.stack)


@pytest.mark.parametrize("sm", [80, 90, 120])
@pytest.mark.parametrize("name", ["CausalConv1d_bfloat16", "SelectiveScanStep_bfloat16"])
def test_code_of_kernels(trt, tmp_path, name, sm):
    (node,) = [n for n in NODES if n.name.rpartition("_")[0] == name]
    check_code(trt, node, node.kernels[0], sm, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("number", range(len(KERNELS)), ids=[k.label for k in KERNELS])
def test_code_of_every_kernel(trt, tmp_path, number):
    """On two architectures each, all in turn, those of test_gpu_compile.py, so that the cache may have them."""
    kernel = KERNELS[number]
    (node,) = [n for n in NODES if any(k is kernel for k in n.kernels)]
    possible = [sm for sm in ARCHITECTURES if sm >= kernel.least_sm]
    for sm in {possible[(2 * number + i) % len(possible)] for i in range(2)}:
        check_code(trt, node, kernel, sm, tmp_path)


def test_hidden_parameters_that_are_used():
    kernel = KERNELS[0]
    binary = compile_kernel(kernel, 80)
    last = f"{binary.entry}_param_{binary.ptx.count('.param .u') - 1}"
    assert last in binary.ptx
    assert last not in plain_ptx(kernel, binary)
    with pytest.raises(ValueError, match="uses profile_scratch"):
        plain_ptx(kernel, replace(binary, ptx=f"{binary.ptx}ld.param.u64 %rd1, [{last}];"))
    hidden = tuple(replace(h, bytes_per_program=128) for h in binary.hidden)
    with pytest.raises(ValueError, match="uses global_scratch"):
        plain_ptx(kernel, replace(binary, hidden=hidden))
    with pytest.raises(ValueError, match="parameters"):
        plain_ptx(replace(kernel, inputs=kernel.inputs[1:]), binary)


def test_inputs_that_do_not_fit(trt):
    node = NODES[0]
    (x, *rest) = [(TYPES[t.dtype], list(t.shape)) for t in node.inputs]
    for wrong in (
        (DataType.HALF, x[1]),
        (x[0], x[1][1:]),
        (x[0], [*x[1][:-1], 8]),
    ):
        with pytest.raises(ValueError, match="`x` is"):
            Build(trt, node.name, [wrong, *rest], sm=90)


def test_widths_may_be_dynamic_and_batches_known(trt, uncompiled):
    """An engine's profile may leave any dimension open; what is known is a number in the expressions too."""
    node = NODES[0]
    known = build(trt, node, 90, batch=4, steps=2)
    assert numbers(known.shapes[0], {}) == (4, 2, node.outputs[0].shape[-1])
    inputs = [(TYPES[t.dtype], [f"{t.name}_{i}" for i in range(len(t.shape))]) for t in node.inputs]
    made = Build(trt, node.name, inputs, sm=90)
    assert numbers(made.shapes[0], {"x_0": 3, "x_1": 4}) == (3, 4, node.outputs[0].shape[-1])


def test_registering_again_changes_nothing(trt):
    before = getattr(trt.plugin.op.nemo, NODES[0].name)
    register(NODES)
    assert getattr(trt.plugin.op.nemo, NODES[0].name) is before


def test_an_unknown_architecture(trt):
    with pytest.raises(UserError, match="no kernel for sm_75"):
        build(trt, NODES[0], 75)


def test_without_tensorrt(monkeypatch):
    monkeypatch.setitem(sys.modules, "tensorrt", None)
    monkeypatch.setitem(sys.modules, "tensorrt.plugin", None)
    with pytest.raises(UserError, match="cannot be imported"):
        register(NODES)
    monkeypatch.setitem(sys.modules, "tensorrt.plugin", SimpleNamespace())
    with pytest.raises(UserError, match="ahead of time"):
        register(NODES)
