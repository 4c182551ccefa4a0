# SPDX-License-Identifier: Apache-2.0
"""GPU kernels of ``SelectiveScan`` against the reference, in Triton's interpreter."""

from __future__ import annotations

import numpy as np
import pytest

from nemo_build.plugins import gpu
from nemo_build.plugins.gpu.interpret import run
from nemo_build.plugins.selective_scan.reference import reference

from .op_models import normal, step_control

pytest.importorskip("triton")

CHUNKED = ("chunk_decays", "chunk_states", "pass_states", "chunk_outputs")
CONTROL = ("slots", "past", "accepted", "lengths")
CLAMP = {"dt_min": 0.3, "dt_max": 0.9}
ROUNDING = {"float32": 3e-5, "float16": 1e-3, "bfloat16": 8e-3}
SHAPES = ((2, 3, 1, 5), (4, 16, 2, 21), (3, 20, 3, 128), (2, 64, 1, 64), (6, 5, 2, 100))
"""Heads, head width, groups, state size."""


class Scan:
    """A node of given widths and types, with random parameters."""

    def __init__(self, rng, shape, dtype="float32", *, ring=0, chunk=16, attributes=None):
        heads, head_dim, groups, width = shape
        self.rng, self.dtype, self.ring, self.attributes = rng, dtype, ring, attributes or {}
        self.shape = (heads, head_dim, width)
        self.sizes = {"x": heads * head_dim, "dt": heads, "b": groups * width, "c": groups * width}
        dims = {"heads": heads, "head_dim": head_dim, "groups": groups, "width": width}
        made = gpu.kernels("SelectiveScan", self.attributes, {**dims, "pending": ring, "chunk": chunk})
        self.kernels = {k.name: k for k in made if k.types["T"] == dtype}
        self.parameters = {name: normal(rng, heads) for name in ("a_log", "d_skip", "dt_bias")}

    def tokens(self, batch: int, steps: int) -> dict[str, np.ndarray]:
        return {n: normal(self.rng, batch, steps, size).astype(self.dtype) for n, size in self.sizes.items()}

    def state(self, slots: int) -> dict[str, np.ndarray]:
        """A state, and pending tokens with time steps that are not negative."""
        ring = normal(self.rng, slots, self.ring, sum(self.sizes.values()) - self.sizes["c"])
        ring[..., -self.shape[0] :] = np.abs(ring[..., -self.shape[0] :])
        return {"state": normal(self.rng, slots, *self.shape), "pending": ring}

    def random_step(self, batch: int, steps: int) -> dict[str, np.ndarray]:
        """All inputs of a step over one slot more than there are rows."""
        control = step_control(self.rng, batch, batch + 1, steps, self.ring, 80)
        return self.tokens(batch, steps) | self.state(batch + 1) | dict(zip(CONTROL, control, strict=True))

    def run(self, given: dict[str, np.ndarray], *, chunked: bool) -> dict[str, np.ndarray]:
        """All inputs, outputs and what is between them; the state afterwards is ``state_out`` and ``pending_out``."""
        values = {**given, **self.parameters}
        for name in CHUNKED if chunked else ("step",):
            values |= self._launch(name, values)
        values["after"], values["pending_out"] = values["y"], values["pending"]
        return values | (self._launch("keep", values) if self.ring else {})

    def _launch(self, name: str, values: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        kernel = self.kernels[name]
        return run(kernel, {t.name: values[t.name] for t in kernel.inputs})

    def check(self, given: dict[str, np.ndarray], *, chunked: bool) -> None:
        """Compare with the reference in float32: y on valid tokens, the rest everywhere."""
        names = ("x", "dt", "b", "c", "a_log", "d_skip", "dt_bias", "state", "pending", *CONTROL)
        inputs = [({**given, **self.parameters})[n] for n in names]
        inputs = [a if n in CONTROL else a.astype(np.float32) for n, a in zip(names, inputs, strict=True)]
        want = dict(
            zip(("y", "state_out", "pending_out"), reference(*inputs, **self.attributes), strict=True)
        )
        got = self.run(given, chunked=chunked)
        valid = np.arange(given["x"].shape[1]) < given["lengths"][:, None]
        tf32 = 1e-3 if chunked and self.dtype != "float32" else 0
        close(got["y"].astype(np.float32)[valid], want["y"][valid], max(ROUNDING[self.dtype], tf32))
        close(got["state_out"], want["state_out"], max(ROUNDING["float32"], tf32))
        close(got["pending_out"], want["pending_out"], 1e-6)


def close(got: np.ndarray, want: np.ndarray, tolerance: float) -> None:
    size = max(np.nan_to_num(np.abs(want)).max(initial=0), 1)
    np.testing.assert_allclose(got, want, atol=tolerance * size, rtol=tolerance)


@pytest.mark.parametrize("dtype", ROUNDING)
@pytest.mark.parametrize(("ring", "steps"), [(0, 1), (0, 4), (3, 1), (3, 3), (5, 7)])
def test_step(dtype, ring, steps):
    rng = np.random.default_rng([ring, steps])
    scan = Scan(
        rng, SHAPES[(ring + steps) % len(SHAPES)], dtype, ring=ring, attributes=CLAMP if steps == 3 else {}
    )
    scan.check(scan.random_step(3, steps), chunked=False)


@pytest.mark.parametrize("dtype", ROUNDING)
@pytest.mark.parametrize(("ring", "steps"), [(0, 33), (3, 50), (5, 16), (4, 4)])
def test_chunks(dtype, ring, steps):
    rng = np.random.default_rng([ring, steps])
    scan = Scan(
        rng, SHAPES[(ring + steps) % len(SHAPES)], dtype, ring=ring, attributes=CLAMP if ring == 5 else {}
    )
    scan.check(scan.random_step(3, steps), chunked=True)


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_chunks_with_less_shared_memory(dtype):
    scan = Scan(np.random.default_rng(1), (4, 16, 2, 21), dtype, ring=3, chunk=64)
    small = {n.removesuffix("_small"): k for n, k in scan.kernels.items() if n.endswith("_small")}
    assert list(small) == (["chunk_states"] if dtype == "float32" else ["chunk_states", "chunk_outputs"])
    scan.kernels |= small
    scan.check(scan.random_step(2, 90), chunked=True)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(30))
@pytest.mark.parametrize("chunked", [False, True])
def test_random_steps(seed, chunked):
    rng = np.random.default_rng(seed)
    groups, per = (int(v) for v in rng.integers(1, 4, 2))
    shape = (groups * per, int(rng.integers(3, 65)), groups, int(rng.integers(5, 129)))
    how = {"ring": int(rng.integers(0, 6)), "chunk": int(rng.choice([16, 32]))}
    scan = Scan(rng, shape, str(rng.choice(list(ROUNDING))), attributes=[{}, CLAMP][rng.integers(2)], **how)
    steps = int(rng.integers(1, 70 if chunked else 8))
    scan.check(scan.random_step(int(rng.integers(1, 4)), steps), chunked=chunked)


@pytest.mark.slow
@pytest.mark.parametrize("chunk", [128, 256])
@pytest.mark.parametrize("dtype", ROUNDING)
def test_real_widths(chunk, dtype):
    """Two heads of the 30B release's, over two chunks of a prompt that follows another chunk."""
    scan = Scan(np.random.default_rng(0), (2, 64, 1, 128), dtype, ring=4, chunk=chunk)
    given = scan.random_step(1, chunk + 70)
    given |= {"past": np.array([9]), "accepted": np.array([2]), "lengths": np.array([chunk + 37])}
    scan.check(given, chunked=True)


def test_factors_are_rounded_and_not_cut_off():
    """Of positive numbers, cutting off would make a state smaller by 2e-4 of its size."""
    scan = Scan(np.random.default_rng(3), (2, 16, 1, 16), "float16")
    given = {name: np.abs(a) for name, a in scan.tokens(1, 64).items()}
    given |= {"slots": np.zeros(1, int), "past": np.zeros(1, int), "accepted": np.zeros(1, int)}
    given |= {"lengths": np.full(1, 64)} | scan.state(1)
    ratio = scan.run(given, chunked=True)["state_out"] / scan.run(given, chunked=False)["state_out"]
    assert abs(ratio.mean() - 1) < 3e-5


@pytest.mark.parametrize("chunked", [False, True])
@pytest.mark.parametrize("before", [0, 7])
def test_committing_part_of_a_step_equals_sequential_steps(before, chunked):
    """After accepting k of n tokens a step gives what it gives after k single ones, to the bit, for every k."""
    rng, n = np.random.default_rng(2), 3
    batch, ring = n + 1, 4
    scan = Scan(rng, (4, 3, 2, 21), "float16", ring=ring)
    slots, past, every = rng.permutation(batch), np.full(batch, before), np.arange(batch)
    none, full = np.zeros(batch, np.int64), np.full(batch, n)
    tokens, probe = scan.tokens(batch, n), scan.tokens(batch, 2)
    control = {"slots": slots, "past": past, "accepted": none}
    start = scan.state(batch)

    drafted = scan.run({**tokens, **start, **control, "lengths": full}, chunked=False)
    state = {"state": drafted["state_out"], "pending": drafted["pending_out"]}
    control |= {"past": past + every, "accepted": every, "lengths": np.full(batch, 2)}
    got = scan.run({**probe, **state, **control}, chunked=chunked)

    state = start
    for t in range(n):  # a row takes part until it has k tokens
        one = {name: a[:, t : t + 1] for name, a in tokens.items()}
        control |= {"past": past + t, "accepted": none, "lengths": (every > t).astype(np.int64)}
        done = scan.run({**one, **state, **control}, chunked=False)
        state = {"state": done["state_out"], "pending": done["pending_out"]}
    control |= {"past": past + every, "lengths": np.full(batch, 2)}
    want = scan.run({**probe, **state, **control}, chunked=chunked)
    np.testing.assert_array_equal(got["y"], want["y"])
    np.testing.assert_array_equal(got["state_out"], want["state_out"])


@pytest.mark.filterwarnings("ignore:invalid value")
@pytest.mark.parametrize("chunked", [False, True])
def test_others_never_reach_a_row(chunked):
    """NaN in padding tokens, in padding rows, in other slots and in a new sequence's slot stays where it is."""
    rng = np.random.default_rng(1)
    scan = Scan(rng, (4, 3, 2, 21), ring=3)
    given = scan.random_step(3, 20)
    given |= {"slots": np.array([2, 0, 1]), "past": np.array([1, 9, 9]), "accepted": np.array([1, 2, 1])}
    given["lengths"] = np.array([18, 3, 0])
    padding = np.arange(20) >= given["lengths"][:, None]
    for name in ("x", "dt", "b", "c"):
        given[name][padding] = np.nan
    given["state"][[2, 1, 3]] = np.nan
    given["pending"][[1, 3]] = np.nan
    given["pending"][2, 1:] = np.nan
    given["pending"][0, 2:] = np.nan
    before = {name: a.copy() for name, a in given.items()}
    got = scan.run(given, chunked=chunked)
    for name, array in before.items():
        np.testing.assert_array_equal(given[name], array)
    assert np.isfinite(got["y"][~padding]).all()
    assert np.isfinite(got["state_out"][[0, 2]]).all()
    assert np.isfinite(got["pending_out"][0]).all()
    for name in ("state", "pending"):
        np.testing.assert_array_equal(got[f"{name}_out"][[1, 3]], before[name][[1, 3]])
    scan.check(given, chunked=chunked)


def test_time_steps_keep_their_digits():
    """softplus of very negative and of large time steps, through a state that it alone makes."""
    scan = Scan(np.random.default_rng(0), (1, 1, 1, 1), attributes={"dt_max": 1e9})
    raw = np.array([-80, -30, -12, -7, -1, 0, 3, 16, 17, 25, 300], np.float32)
    batch = len(raw)
    scan.parameters = {"a_log": np.full(1, -np.inf, np.float32)} | dict.fromkeys(
        ("d_skip", "dt_bias"), np.zeros(1, np.float32)
    )
    ones, at = np.ones((batch, 1, 1), np.float32), np.arange(batch)
    given = {"x": ones, "b": ones, "c": ones, "dt": raw[:, None, None], "slots": at, "past": at * 0}
    given |= {"accepted": at * 0, "lengths": at * 0 + 1, "pending": np.zeros((batch, 0, 3), np.float32)}
    given["state"] = np.zeros((batch, 1, 1, 1), np.float32)
    got = scan.run(given, chunked=False)["y"].ravel()
    np.testing.assert_allclose(got, np.logaddexp(0, raw.astype(np.float64)), rtol=5e-7)
