# SPDX-License-Identifier: Apache-2.0
"""GPU kernels compile for every architecture and take what a program can have; the compiler's process and cache."""

from __future__ import annotations

import json
import re
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("triton")

from nemo_build.engines.targets import TARGETS
from nemo_build.errors import UserError
from nemo_build.plugins import gpu
from nemo_build.plugins.causal_conv1d import gpu as conv
from nemo_build.plugins.gpu import compile as compiler
from nemo_build.plugins.gpu.compile import PTX_VERSIONS, SHARED_LIMITS, SHARED_UNASKED, Binary, compile_kernel
from nemo_build.plugins.gpu.kernel import Ceil, Kernel, Tensor, bind, resolve
from nemo_build.plugins.gpu.node import nodes
from nemo_build.plugins.gpu.worker import Worker, WorkerDied, WorkerFailed
from nemo_build.plugins.registry import plugins_by_name

RESULTS = Path(__file__).parent.parent / "docs" / "results" / "kernels.json"
KERNELS = gpu.all_kernels()
ARCHITECTURES = list(PTX_VERSIONS)
SMALL = conv.kernels({}, {"channels": 8, "width": 2, "pending": 1, "bias": 0})[0]


def recorded(kernel: Kernel) -> dict[str, dict[str, int]]:
    """What docs/results/kernels.json has of a kernel, by architecture."""
    for entry in json.loads(RESULTS.read_text(encoding="utf-8"))["kernels"]:
        if (entry["op"], entry["name"], entry["types"]) == (kernel.op, kernel.name, dict(kernel.types)):
            return entry["architectures"]
    pytest.fail(f"{kernel.label} is not in {RESULTS}; run scripts/bench/kernels.py")


def check(kernel: Kernel, binary: Binary) -> None:
    """What must hold of every compiled kernel."""
    parameters = re.search(r"\.entry \w+\((.*?)\)", binary.ptx, re.DOTALL)[1].count(".param")
    assert parameters == len(kernel.inputs) + len(kernel.sizes) + len(kernel.outputs) + len(binary.hidden)
    assert [h.name for h in binary.hidden] == ["global_scratch", "profile_scratch"]
    assert not any(h.bytes_per_program for h in binary.hidden)
    assert binary.shared <= SHARED_LIMITS[binary.sm] * 1024
    assert f".entry {binary.entry}(" in binary.ptx
    version = max(PTX_VERSIONS[binary.sm], kernel.least_ptx)
    assert f".version {version // 10}.{version % 10}" in binary.ptx
    assert not kernel.per_token or binary.stack == 0


@pytest.mark.parametrize("kernel", KERNELS, ids=[k.label for k in KERNELS])
def test_a_kernel_is_described_and_recorded(kernel):
    """Its parameters fit the function's, and docs/kernels.md has it on every architecture that it is for."""
    assert kernel.op in plugins_by_name()
    assert kernel.signature
    architectures = recorded(kernel)
    assert list(architectures) == [str(sm) for sm in ARCHITECTURES if sm >= kernel.least_sm]
    if kernel.per_token:
        assert not any(figures["stack"] for figures in architectures.values())


@pytest.mark.parametrize("node", nodes(KERNELS), ids=lambda n: n.name.rpartition("_")[0])
def test_a_node_can_be_launched_without_asking_for_shared_memory(node):
    """On every architecture, by one of its kernels at least; not every backend asks."""
    for sm in ARCHITECTURES:
        able = [recorded(k)[str(sm)]["shared"] for k in node.kernels if k.least_sm <= sm]
        assert min(able) <= SHARED_UNASKED * 1024


def test_kernels_have_names_of_their_own():
    assert max(Counter(k.label for k in KERNELS).values()) == 1


@pytest.mark.parametrize("op", ["CausalConv1d", "SelectiveScan"])
@pytest.mark.parametrize("sm", [80, 120])
def test_kernels_in_bfloat16_compile(op, sm):
    for kernel in KERNELS:
        if (kernel.op, kernel.types["T"]) == (op, "bfloat16"):
            check(kernel, compile_kernel(kernel, sm))


@pytest.mark.slow
@pytest.mark.parametrize("number", range(len(KERNELS)), ids=[k.label for k in KERNELS])
def test_every_kernel_compiles_to_what_is_recorded(number):
    """On two architectures each, all in turn; scripts/bench/kernels.py compiles each on all."""
    kernel = KERNELS[number]
    possible = [sm for sm in ARCHITECTURES if sm >= kernel.least_sm]
    for sm in {possible[(2 * number + i) % len(possible)] for i in range(2)}:
        binary = compile_kernel(kernel, sm)
        check(kernel, binary)
        figures = recorded(kernel)[str(sm)]
        assert (binary.registers, binary.shared, binary.stack) == tuple(
            figures[n] for n in ("registers", "shared", "stack")
        )


def test_every_target_has_an_architecture():
    assert {t.sm for t in TARGETS.values() if t.sm is not None} <= set(PTX_VERSIONS)
    assert set(PTX_VERSIONS) == set(SHARED_LIMITS)


def test_code_comes_from_the_cache_and_is_reproducible(tmp_path, monkeypatch):
    monkeypatch.setenv("NEMO_BUILD_CACHE", str(tmp_path / "one"))
    first = compile_kernel(SMALL, 90)
    with monkeypatch.context() as patch:
        patch.setattr(compiler, "_worker", None)
        assert compile_kernel(SMALL, 90) == first
    monkeypatch.setenv("NEMO_BUILD_CACHE", str(tmp_path / "two"))
    assert compile_kernel(SMALL, 90) == first
    assert first.cubin[:4] == b"\x7fELF"


def test_a_different_kernel_is_another_entry(tmp_path, monkeypatch):
    monkeypatch.setenv("NEMO_BUILD_CACHE", str(tmp_path))
    assert compile_kernel(SMALL, 80) != compile_kernel(replace(SMALL, num_warps=8), 80)
    assert compile_kernel(SMALL, 80) != compile_kernel(SMALL, 86)
    assert len(list((tmp_path / "kernels").iterdir())) == 3


def test_the_compiler_may_die(tmp_path, monkeypatch):
    """LLVM aborts on a version of PTX that an architecture does not have; the next kernel compiles all the same."""
    monkeypatch.setenv("NEMO_BUILD_CACHE", str(tmp_path))
    with monkeypatch.context() as patch:
        patch.setitem(PTX_VERSIONS, 120, 80)
        with pytest.raises(WorkerDied, match="LLVM ERROR"):
            compile_kernel(SMALL, 120)
    assert compile_kernel(SMALL, 120).sm == 120


def test_a_kernel_that_is_refused(tmp_path, monkeypatch):
    monkeypatch.setenv("NEMO_BUILD_CACHE", str(tmp_path))
    wrong = replace(SMALL, constexprs={**SMALL.constexprs, "BLOCK_CHANNELS": 3})
    with pytest.raises(WorkerFailed, match="power of 2"):
        compile_kernel(wrong, 80)
    assert not (tmp_path / "kernels").exists()


def test_parameters_must_fit_the_function():
    with pytest.raises(ValueError, match="do not fit"):
        _ = replace(SMALL, sizes=("steps", "chunks")).signature
    with pytest.raises(ValueError, match="do not fit"):
        _ = replace(SMALL, inputs=SMALL.inputs[::-1]).signature


def test_sizes_come_from_shapes():
    tensors = (
        Tensor("x", "float32", ("batch", "steps", 3)),
        Tensor("s", "float32", ("batch", Ceil("steps", 4))),
    )
    assert bind(tensors, {"x": (2, 9, 3), "s": (2, 3)}) == {"batch": 2, "steps": 9}
    assert resolve(Ceil("steps", 4), {"steps": 8}) == 2
    for shapes in (
        {"x": (2, 9, 4), "s": (2, 3)},
        {"x": (2, 9, 3), "s": (1, 3)},
        {"x": (2, 9, 3), "s": (2, 2)},
    ):
        with pytest.raises(ValueError, match="has the shape"):
            bind(tensors, shapes)
    with pytest.raises(ValueError, match="has the shape"):
        bind(tensors, {"x": (2, 9), "s": (2, 3)})


def test_without_triton(monkeypatch):
    monkeypatch.setitem(sys.modules, "triton", None)
    monkeypatch.delitem(sys.modules, conv.__name__)
    gpu._module.cache_clear()
    with pytest.raises(UserError, match="Triton"):
        gpu.kernels("CausalConv1d", {}, {})
    gpu._module.cache_clear()


def test_an_op_without_kernels():
    assert gpu.kernels("CachedAttention", {}, {}) == []


def test_a_worker_survives_what_functions_print():
    worker = Worker({"NEMO_TEST_WORKER": "1"})
    assert worker.call("builtins:print", "to standard error, not into the pipe") is None
    assert worker.call("os:getenv", "NEMO_TEST_WORKER") == "1"
    with pytest.raises(WorkerDied, match="ended with 3"):
        worker.call("os:_exit", 3)
    with pytest.raises(WorkerFailed, match="ZeroDivisionError"):
        worker.call("operator:floordiv", 1, 0)
    assert worker.call("operator:add", 1, 2) == 3
    worker.close()
    worker.close()
