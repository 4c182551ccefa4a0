# SPDX-License-Identifier: Apache-2.0
"""The op that launches kernels in ONNX Runtime: what it gives to the driver, and what it refuses."""

from __future__ import annotations

import shutil
from dataclasses import replace

import numpy as np
import pytest

pytest.importorskip("triton")

from nemo_build.engines.ort_cuda import library
from nemo_build.engines.ort_cuda.launches import Compiled
from nemo_build.plugins.gpu.kernel import Kernel, bind, resolve

from .kernel_runner import bundle_of
from .launching import FakeDriver, Made, OneLaunch, interpreting, make_engine

pytestmark = [
    pytest.mark.skipif(library() is None, reason="the library that launches kernels was not compiled"),
]
needs_gcc = pytest.mark.skipif(shutil.which("gcc") is None, reason="gcc is not installed")


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> Made:
    """An engine of a random model with blocks of every kind, for its kernels."""
    folder = tmp_path_factory.mktemp("launches")
    return make_engine(bundle_of(folder), folder / "engine")


@pytest.fixture(scope="module")
def driver(tmp_path_factory) -> FakeDriver:
    return FakeDriver(tmp_path_factory.mktemp("driver"))


def arrays_of(kernel: Kernel, **sizes: int) -> dict[str, np.ndarray]:
    """Inputs of a kernel, all different, for some sizes of the dimensions that it leaves open."""
    random = np.random.default_rng(0)
    names = {d for t in kernel.inputs for d in t.shape if isinstance(d, str)}
    known = dict.fromkeys(names, 5) | sizes
    shapes = {t.name: tuple(resolve(d, known) for d in t.shape) for t in kernel.inputs}
    return {t.name: random.integers(0, 2, shapes[t.name]).astype(t.dtype) for t in kernel.inputs}


@needs_gcc
def test_the_driver_is_given_what_a_kernel_is_described_with(made, driver, tmp_path):
    for compiled in made.compiled.values():
        kernel = compiled.kernel
        arrays = arrays_of(kernel, batch=2, steps=3, slots=4)
        sizes = bind(kernel.inputs, {n: a.shape for n, a in arrays.items()})
        one = OneLaunch(tmp_path, compiled)
        own = len(kernel.inputs), len(kernel.sizes), len(kernel.outputs)
        driver.expect([8] * own[0] + [4] * own[1] + [8] * own[2] + [8] * len(compiled.binary.hidden))
        with driver.launching() as got:
            one.run(arrays)
            record = got.record
            assert (record.launches, record.modules) == (1, 1), kernel.label
            assert record.entry.decode() == compiled.binary.entry
            assert tuple(record.grid) == kernel.grid(sizes), kernel.label
            assert tuple(record.block) == (32 * kernel.num_warps, 1, 1)
            assert (record.shared, record.stream) == (compiled.binary.shared, 0)
            assert bytes(record.code) == compiled.binary.cubin[:16]
            addresses = one.addresses[: own[0]], one.addresses[own[0] :]
            wanted = [*addresses[0], *(sizes[n] for n in kernel.sizes), *addresses[1], 0, 0]
            assert list(record.parameters)[: len(wanted)] == wanted, kernel.label


def conv(made: Made) -> Compiled:
    """A kernel with a state that it updates in place."""
    return next(c for label, c in made.compiled.items() if label.startswith("CausalConv1d.step"))


@needs_gcc
def test_code_is_loaded_once_and_large_shared_memory_is_asked_for(made, driver, tmp_path):
    compiled = conv(made)
    big = Compiled(
        compiled.kernel, replace(compiled.binary, shared=64 << 10, cubin=b"of its own for this test")
    )
    one = OneLaunch(tmp_path, big)
    arrays = arrays_of(big.kernel)
    with driver.launching() as got:
        one.run(arrays)
        one.run(arrays)
        assert (got.record.launches, got.record.modules) == (2, 1)
        assert (got.record.shared, got.record.shared_attribute) == (64 << 10, 64 << 10)


@needs_gcc
def test_a_state_that_is_not_bound_in_place_is_copied_first(made, driver, tmp_path):
    compiled = conv(made)
    arrays = arrays_of(compiled.kernel)
    shared = next(t for t in compiled.kernel.outputs if t.alias)
    with driver.launching():
        found = OneLaunch(tmp_path, compiled).run(arrays, in_place=False)
    np.testing.assert_array_equal(found[shared.name], arrays[shared.alias])


@needs_gcc
def test_nothing_is_launched_for_no_rows(made, driver, tmp_path):
    compiled = conv(made)
    with driver.launching() as got:
        OneLaunch(tmp_path, compiled).run(arrays_of(compiled.kernel, batch=0))
        assert got.record.launches == 0


@needs_gcc
@pytest.mark.parametrize(
    ("result", "said"), [(209, "compiled for another GPU"), (1, r"CUDA_ERROR_UNKNOWN \(1\)")]
)
def test_what_the_driver_refuses_is_said(made, driver, tmp_path, result, said):
    compiled = conv(made)
    one = OneLaunch(tmp_path, compiled)
    with driver.launching() as got:
        got.record.result = result
        with pytest.raises(Exception, match=rf"CausalConv1d\.step.* cannot be loaded.*{said}"):
            one.run(arrays_of(compiled.kernel))


def test_without_a_gpu_a_launch_says_so(made, tmp_path):
    compiled = conv(made)
    with pytest.raises(Exception, match="no CUDA provider"):
        OneLaunch(tmp_path, compiled).run(arrays_of(compiled.kernel))


def test_tensors_of_other_shapes_are_refused(made, tmp_path):
    compiled = conv(made)
    arrays = arrays_of(compiled.kernel)
    shapes = compiled.attributes()["input_shapes"]
    _, _, others = shapes.partition(";")
    with interpreting({}), pytest.raises(Exception, match="input 0 has another shape"):
        OneLaunch(tmp_path, compiled, input_shapes=f"batch,steps,7;{others}").run(arrays)
    with interpreting({}), pytest.raises(Exception, match="another number of inputs"):
        OneLaunch(tmp_path, compiled, input_shapes=f"{shapes};1").run(arrays)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"kernel": None}, "kernel is missing"),
        ({"entry": ""}, "entry is missing"),
        ({"grid": "1,2"}, "three numbers"),
        ({"grid": "batch 2 /,1,1"}, "no number, name or operator"),
        ({"grid": "batch +,1,1"}, "lacks operands"),
        ({"grid": "1 2,1,1"}, "not one expression"),
        ({"sizes": "unknown"}, "no input's shape has the size `unknown`"),
        ({"output_shapes": "=99"}, "an input that is not there"),
        ({"threads": 0}, "threads is missing or out of range"),
        ({"shared": -1}, "shared is missing or out of range"),
        ({"hidden": 99}, "hidden is missing or out of range"),
        ({"code": False}, "machine code"),
    ],
)
def test_attributes_that_make_no_sense_are_refused(made, tmp_path, changes, said):
    with pytest.raises(Exception, match=said):
        OneLaunch(tmp_path, conv(made), **changes)
