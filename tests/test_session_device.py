# SPDX-License-Identifier: Apache-2.0
"""What sessions on a GPU are made of: the device, states on it, weights, and how rows are cut into runs."""

from __future__ import annotations

import gc
import os
import shutil
import subprocess
import sys
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nemo_build.engines.gpu import constants, device
from nemo_build.engines.gpu.constants import Constants
from nemo_build.engines.gpu.device import Region, obstacles, require_space
from nemo_build.engines.gpu.replay import HostBlocks
from nemo_build.engines.gpu.rows import Rows, Run, arrange, pieces, split, whole
from nemo_build.engines.gpu.state import BufferView, States, portable
from nemo_build.errors import BundleError, PlanError
from nemo_build.state import RECURRENT, StateSpec, stays_pending

from .fake_cuda import HostDevice

# --- the driver ----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def libcuda(tmp_path_factory) -> Path:
    """A driver on memory of the host."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("there is no C compiler")
    path = tmp_path_factory.mktemp("driver") / "libcuda.so.1"
    source = Path(__file__).with_name("fake_libcuda.c")
    flags = ["-shared", "-fPIC", "-O1", "-Wall", "-Werror", "-Wl,-soname,libcuda.so.1"]
    subprocess.run([compiler, *flags, "-o", str(path), str(source)], check=True)
    return path


def run_check(libcuda: Path, check: str, *arguments: object, **environment: str) -> None:
    command = [sys.executable, "-m", "tests.cuda_on_host", str(libcuda), check, *map(str, arguments)]
    root = Path(__file__).parents[1]
    done = subprocess.run(
        command, cwd=root, env={**os.environ, **environment}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("check", ["memory", "too_much", "capturing", "chosen"])
def test_driver(libcuda, check):
    run_check(libcuda, check)


def test_driver_that_refuses(libcuda):
    run_check(libcuda, "no_capture", FAKE_NO_CAPTURE="1")
    run_check(libcuda, "no_gpu", FAKE_NO_GPU="1")


def test_session_on_the_driver(libcuda, tiny_bundle, tmp_path):
    run_check(libcuda, "session", tiny_bundle, tmp_path / "engine")


def test_all_that_is_missing_is_named(monkeypatch):
    monkeypatch.setattr(device, "_has_driver", lambda: False)
    monkeypatch.setattr(device, "gpu_capabilities", list)
    assert obstacles((120,)) == [
        "there is no CUDA driver here (libcuda)",
        "there is no NVIDIA GPU here that nvidia-smi tells of",
    ]
    monkeypatch.setattr(device, "gpu_capabilities", lambda: [90, 90])
    assert obstacles((120, 121))[1:] == ["the engine is for SM 120, SM 121; here is SM 90"]
    monkeypatch.setattr(device.importlib.util, "find_spec", lambda name: None)
    assert obstacles((90,))[0] == "the package cuda-bindings is not installed: pip install cuda-bindings"


# --- rows ----------------------------------------------------------------------------------------------------


@given(st.integers(0, 900), st.sampled_from([1, 3, 8, 9, 16, 127, 256]), st.integers(0, 8))
def test_pieces(count, most, pending):
    most = max(most, min(pending, 8))
    cut = pieces(count, most, pending)
    assert sum(cut) == count
    assert all(0 < n <= most for n in cut)
    if count:
        assert stays_pending(cut[-1], pending) == stays_pending(count, pending)
    assert len(cut) <= -(-count // most) + 1, "no more runs than needed, but for one"


class Model:
    """Slots that see tokens: what is committed, and what is pending."""

    def __init__(self, slots: int, pending: int) -> None:
        self.committed: list[list[int]] = [[] for _ in range(slots)]
        self.ring: list[list[int]] = [[] for _ in range(slots)]
        self.pending = pending

    def take(self, slot: int, tokens: list[int], past: int, accepted: int) -> None:
        done = [] if past == accepted else self.committed[slot]
        done = done + self.ring[slot][:accepted]
        assert len(done) == past
        stays = stays_pending(len(tokens), self.pending)
        self.committed[slot] = done if stays else done + tokens
        self.ring[slot] = tokens if stays else []


@st.composite
def steps(draw):
    count = draw(st.integers(1, 5))
    lengths = draw(
        st.lists(st.sampled_from([0, 1, 2, 5, 8, 9, 10, 16, 17, 40]), min_size=count, max_size=count)
    )
    slots = draw(st.permutations(range(8)))[:count]
    rings = [draw(st.integers(0, 8)) for _ in range(count)]
    accepted = [draw(st.integers(0, n)) for n in rings]
    before = [draw(st.integers(0, 5)) for _ in range(count)]
    return lengths, slots, rings, accepted, before


@given(steps(), st.sampled_from([8, 9, 12, 16, 256]), st.sampled_from([None, 8, 20, 127]))
def test_runs_do_what_the_step_does(step, most, room):
    lengths, slots, rings, accepted, before = step
    width = max(*lengths, 1)
    whole_step, in_runs = Model(8, 8), Model(8, 8)
    for model in (whole_step, in_runs):
        for slot, ring, done in zip(slots, rings, before, strict=True):
            model.committed[slot], model.ring[slot] = list(range(-done, 0)), list(range(-100, ring - 100))
    ids = np.array([[100 * i + k for k in range(width)] for i in range(len(lengths))])
    past = np.array([b + a for b, a in zip(before, accepted, strict=True)])
    lines = np.array([i * width + k for i, n in enumerate(lengths) for k in range(n)], np.int64)
    rows = Rows({"input_ids": ids}, np.array(lengths), past, np.array(accepted), np.array(slots), lines[::2])
    for i, n in enumerate(lengths):
        if n:
            whole_step.take(slots[i], ids[i, :n].tolist(), int(past[i]), accepted[i])
    logits: dict[int, int] = {}
    for run in split(whole(rows), most, 8, room):
        assert run.take.max() <= most
        assert room is None or run.take.sum() <= room
        placed = arrange(rows, run)
        inputs = placed.inputs
        assert len(inputs["lengths"]) == max(placed.slots) + 1
        for slot, n in enumerate(inputs["lengths"].tolist()):
            tokens = inputs["input_ids"][slot, :n].tolist()
            if n:
                in_runs.take(slot, tokens, int(inputs["past"][slot]), int(inputs["accepted"][slot]))
        flat = inputs["input_ids"].ravel()
        for place, line in zip(placed.logits.tolist(), inputs["logit_rows"].tolist(), strict=True):
            assert place not in logits
            logits[place] = int(flat[line])
    assert in_runs.committed == whole_step.committed
    assert in_runs.ring == whole_step.ring
    assert [logits[i] for i in range(len(rows.logit_rows))] == ids.ravel()[rows.logit_rows].tolist()


def test_rows_are_as_few_as_the_highest_slot_needs():
    one = np.array([1, 1])
    rows = Rows({"input_ids": np.array([[5], [6]])}, one, one, one * 0, np.array([4, 1]), np.array([0, 1]))
    placed = arrange(rows, whole(rows))
    assert placed.inputs["input_ids"].tolist() == [[0], [6], [0], [0], [5]]
    assert placed.inputs["lengths"].tolist() == [0, 1, 0, 0, 1]
    assert placed.inputs["logit_rows"].tolist() == [4, 1]
    first = Run(one * 0, np.array([0, 1]), one * 0)
    assert arrange(rows, first).inputs["lengths"].tolist() == [0, 1]


# --- states --------------------------------------------------------------------------------------------------

SPECS = [
    StateSpec("conv.0", "conv", ("slots", 11, 6), "float32"),
    StateSpec("ssm.0", "ssm", ("slots", 2, 3, 4), "float32"),
    StateSpec("ssm_pending.0", "ssm_pending", ("slots", 8, 5), "float32"),
    StateSpec("key.1", "key", ("slots", 2, 40, 4), "bfloat16"),
]


def views_of(states: States, gpu: HostDevice) -> dict[str, BufferView]:
    return {n: BufferView(b, states.side_of, gpu) for n, b in states.buffers.items()}


def test_states_as_the_portable_graph_declares_them():
    found = [portable(s, 8, 40) for s in SPECS]
    assert [s.shape for s in found] == [
        ("slots", "3+pending", 6),
        ("slots", 2, 3, 4),
        ("slots", "pending", 5),
        ("slots", 2, "context", 4),
    ]
    assert [s.dtype for s in found] == [s.dtype for s in SPECS]
    square = portable(StateSpec("key.1", "key", ("slots", 40, 40, 4), "bfloat16"), 8, 40)
    assert square.shape == ("slots", 40, "context", 4), "as many heads as positions"


@given(st.lists(st.tuples(st.integers(1, 4), st.booleans()), max_size=12))
def test_slots_keep_their_states_whatever_runs(runs):
    """A run over the first rows adds one to each of their states; what others hold stays."""
    gpu = HostDevice()
    states = States(SPECS, 4, RECURRENT, gpu, {})
    views = views_of(states, gpu)
    want = [10.0 * slot for slot in range(4)]
    for slot in range(4):
        views["ssm.0"][slot][...] = np.full((2, 3, 4), want[slot])
    for rows, counts in runs:
        side = states.gather(rows)
        bound = states.bindings(rows, side)
        gpu.synchronize()
        source, target = bound["ssm.0"], bound["ssm.0.out"]
        nbytes = 4 * int(np.prod(source.shape))
        assert source.address != target.address
        read, written = (gpu.at(b.address, nbytes).view(np.float32) for b in (source, target))
        written[:] = read + 1
        if counts:
            states.advance(rows)
            want[:rows] = [v + 1 for v in want[:rows]]
        assert bound["key.1"] == bound["key.1.out"]
        for slot in range(4):
            np.testing.assert_array_equal(views["ssm.0"][slot].copy(), np.full((2, 3, 4), want[slot]))


def test_the_fewest_states_are_moved():
    gpu = HostDevice()
    states = States(SPECS, 4, RECURRENT, gpu, {})
    gpu.log.clear()
    for rows in (4, 3, 3, 4):
        states.gather(rows)
        states.advance(rows)
    assert gpu.log == []
    states.advance(3)
    states.gather(4)
    assert gpu.log == ["move"] * 3, "one slot's three states"


def test_parts_of_a_state():
    gpu = HostDevice()
    views = views_of(States(SPECS, 3, RECURRENT, gpu, {}), gpu)
    key = views["key.1"]
    assert (len(key), key.shape, key.dtype) == (3, (3, 2, 40, 4), ml_dtypes.bfloat16)
    want = np.zeros((3, 2, 40, 4), ml_dtypes.bfloat16)
    rng = np.random.default_rng(0)
    for slot, a, b in ((1, 5, 9), (0, 0, 40), (2, 39, 40), (1, 8, 20), (1, 7, 7)):
        part = rng.standard_normal((2, b - a, 4)).astype(ml_dtypes.bfloat16)
        view = key[slot][:, a:b]
        assert view.shape == part.shape
        view[...] = part
        want[slot][:, a:b] = part
        np.testing.assert_array_equal(np.asarray(key[slot][:, a:b]), part)
    for slot in range(3):
        np.testing.assert_array_equal(key[slot].copy(), want[slot])
    conv = views["conv.0"][2]
    conv[:3, :6] = np.ones((3, 6))
    assert conv.copy().sum(axis=1).tolist() == [6] * 3 + [0] * 8
    assert conv[1:5][1:].copy().sum(axis=1).tolist() == [6, 0, 0]
    for wrong in (3, -1):
        with pytest.raises(IndexError, match="not within 0"):
            key[wrong]
    with pytest.raises(IndexError, match="more than one axis"):
        key[0][:1, :3].copy()
    for index in (np.s_[::2], np.s_[1], np.s_[:, 4]):
        with pytest.raises(IndexError, match="by slices without steps"):
            key[0][index]


# --- results -------------------------------------------------------------------------------------------------


def test_memory_of_results_is_used_again_when_nobody_has_them():
    gpu = HostDevice()
    made: list[int] = []
    original = gpu.host_array
    gpu.host_array = lambda nbytes: made.append(nbytes) or original(nbytes)
    blocks = HostBlocks(gpu, 100)
    for i in range(20):
        part = blocks.take()[10:20].view(np.int16)
        part[:] = i
    assert made == [100] * 2, "one that is filled, and one that is looked at meanwhile"
    kept = []
    for i in range(7):
        kept.append(blocks.take()[:8])
        kept[-1][:] = i
    assert len(made) <= 4, "no more of such memory"
    assert [set(k.tolist()) for k in kept] == [{i} for i in range(7)]


# --- weights -------------------------------------------------------------------------------------------------


def weights_of(directory: Path, size: int = 3000) -> dict:
    data = np.random.default_rng(0).integers(0, 256, size, np.uint8)
    (directory / "weights.bin").write_bytes(data.tobytes())
    tensors = {
        "a": {"dtype": "BF16", "shape": [10, 20], "offset": 0, "nbytes": 400},
        "b": {"dtype": "I32", "shape": [(size - 512) // 4], "offset": 512, "nbytes": size - 512},
    }
    return {"weights": {"files": {"weights.bin": "0"}, "tensors": tensors}}


@pytest.mark.parametrize("piece", [1 << 20, 1000, 7])
def test_weights_are_loaded_once_and_given_back(tmp_path, monkeypatch, piece):
    monkeypatch.setattr(constants, "_PIECE", piece)
    gpu, manifest = HostDevice(), weights_of(tmp_path)
    first = Constants.open(tmp_path, manifest, gpu)
    assert Constants.open(tmp_path, manifest, gpu) is first
    os.utime(tmp_path / "weights.bin", (1, 1))
    assert Constants.open(tmp_path, manifest, gpu) is not first, "it was written to"
    assert len(gpu.live) == 1
    (memory,) = gpu.live.values()
    assert memory.tobytes() == (tmp_path / "weights.bin").read_bytes()
    bound = first.bindings["b"]
    assert bound == (memory.ctypes.data + 512, (622,), "int32")
    assert first.bindings["a"].dtype == "bfloat16"
    del first, memory
    gc.collect()
    assert not gpu.live


def test_weights_that_are_not_whole_or_do_not_fit(tmp_path):
    manifest = weights_of(tmp_path)
    with pytest.raises(PlanError, match=r"and 0\.0 MB are needed") as caught:
        Constants.open(tmp_path, manifest, HostDevice(2999))
    assert caught.value.problems == ("0.0 MB for the weights",)
    (tmp_path / "weights.bin").write_bytes(bytes(2999))
    with pytest.raises(BundleError, match="has less than the 3000 bytes"):
        Constants.open(tmp_path, manifest, HostDevice())
    assert Constants.open(tmp_path, {"weights": {"files": {}, "tensors": {}}}, HostDevice()).bindings == {}


def test_the_device_does_nothing_before_it_is_waited_for():
    """Else the tests would not see what reads too early."""
    gpu = HostDevice()
    memory, out = gpu.allocate(4), np.zeros(4, np.uint8)
    gpu.write(Region(memory.address, 4), np.ones(4, np.uint8))
    gpu.read(out, Region(memory.address, 4))
    assert not out.any()
    gpu.synchronize()
    assert out.all()


def test_memory_of_sessions_that_nobody_refers_to_is_found(tmp_path):
    gpu = HostDevice(1000)
    cycle = [gpu.allocate(800)]
    cycle.append(cycle)
    with pytest.raises(PlanError):
        require_space(gpu, [("more", 500)])
    del cycle
    require_space(gpu, [("more", 500)])
