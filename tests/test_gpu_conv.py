# SPDX-License-Identifier: Apache-2.0
"""GPU kernels of ``CausalConv1d`` against the reference, in Triton's interpreter."""

from __future__ import annotations

import numpy as np
import pytest

from nemo_build.plugins import gpu
from nemo_build.plugins.causal_conv1d.reference import reference
from nemo_build.plugins.gpu.interpret import run

from .op_models import normal, step_control

pytest.importorskip("triton")

LAUNCHES = ("step", "prompt")
CONTROL = ("slots", "past", "accepted", "lengths")
ROUNDING = {"float32": 1e-6, "float16": 1e-3, "bfloat16": 8e-3}


class Convolution:
    """A node of given widths and types, with random weights."""

    def __init__(self, rng, channels, width, dtype="float32", *, ring=0, bias=True):
        self.rng, self.dtype, self.channels, self.rows = rng, dtype, channels, width - 1 + ring
        self.ring = ring
        dims = {"channels": channels, "width": width, "pending": ring, "bias": int(bias)}
        made = gpu.kernels("CausalConv1d", {}, dims)
        self.kernels = {k.name: k for k in made if k.types["T"] == dtype}
        self.weights = {"weight": normal(rng, channels, 1, width)}
        self.weights |= {"bias": normal(rng, channels)} if bias else {}

    def tokens(self, batch: int, steps: int) -> np.ndarray:
        return normal(self.rng, batch, steps, self.channels).astype(self.dtype)

    def state(self, slots: int) -> np.ndarray:
        return normal(self.rng, slots, self.rows, self.channels).astype(self.dtype)

    def random_step(self, batch: int, steps: int) -> dict[str, np.ndarray]:
        """All inputs of a step over one slot more than there are rows."""
        control = step_control(self.rng, batch, batch + 1, steps, self.ring, 80)
        return {"x": self.tokens(batch, steps), "state": self.state(batch + 1)} | dict(
            zip(CONTROL, control, strict=True)
        )

    def run(self, given: dict[str, np.ndarray], launch: str) -> dict[str, np.ndarray]:
        return run(self.kernels[launch], {**given, **self.weights})

    def check(self, given: dict[str, np.ndarray], launch: str) -> None:
        """Compare with the reference in float32: y on valid tokens, the state everywhere and exactly."""
        x, state = (given[n].astype(np.float32) for n in ("x", "state"))
        weight, bias = self.weights["weight"], self.weights.get("bias")
        y, state_out = reference(x, weight, bias, state, *(given[n] for n in CONTROL))
        got = self.run(given, launch)
        valid = np.arange(x.shape[1]) < given["lengths"][:, None]
        close = ROUNDING[self.dtype]
        size = max(np.abs(y[valid]).max(initial=0), 1)
        np.testing.assert_allclose(
            got["y"].astype(np.float32)[valid], y[valid], atol=close * size, rtol=close
        )
        np.testing.assert_array_equal(got["state_out"].astype(np.float32), state_out)


@pytest.mark.parametrize("launch", LAUNCHES)
@pytest.mark.parametrize("dtype", ROUNDING)
@pytest.mark.parametrize(
    ("channels", "width", "ring", "steps"),
    [(7, 4, 0, 1), (300, 4, 0, 5), (20, 2, 3, 3), (33, 3, 5, 40), (5, 4, 1, 2), (64, 4, 8, 8)],
)
def test_against_the_reference(launch, dtype, channels, width, ring, steps):
    rng = np.random.default_rng([channels, steps])
    convolution = Convolution(rng, channels, width, dtype, ring=ring, bias=bool(channels % 2))
    for batch in (1, 3):
        convolution.check(convolution.random_step(batch, steps), launch)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(60))
def test_random_steps(seed):
    rng = np.random.default_rng(seed)
    how = {"ring": int(rng.integers(0, 9)), "bias": bool(rng.integers(2))}
    channels, width, dtype = int(rng.integers(1, 400)), int(rng.integers(2, 6)), rng.choice(list(ROUNDING))
    convolution = Convolution(rng, channels, width, str(dtype), **how)
    step = convolution.random_step(int(rng.integers(1, 5)), int(rng.integers(1, 90)))
    convolution.check(step, LAUNCHES[seed % 2])


@pytest.mark.parametrize("launch", LAUNCHES)
@pytest.mark.parametrize("before", [0, 7])
def test_committing_part_of_a_step_equals_sequential_steps(before, launch):
    """After accepting k of n tokens a step gives what it gives after k single ones, to the bit, for every k."""
    rng, n, ring, width = np.random.default_rng(4), 3, 4, 4
    batch = n + 1
    convolution = Convolution(rng, 5, width, "float16", ring=ring)
    slots, past, every = rng.permutation(batch), np.full(batch, before), np.arange(batch)
    tokens, probe, start = (
        convolution.tokens(batch, n),
        convolution.tokens(batch, 2),
        convolution.state(batch),
    )

    def step(x, state, past, accepted, lengths):
        control = {"slots": slots, "past": past, "accepted": accepted, "lengths": lengths}
        return convolution.run({"x": x, "state": state, **control}, launch)

    none, two = np.zeros(batch, np.int64), np.full(batch, 2)
    drafted = step(tokens, start, past, none, np.full(batch, n))["state_out"]
    got = step(probe, drafted, past + every, every, two)
    state = start
    for t in range(n):  # a row takes part until it has k tokens
        state = step(tokens[:, t : t + 1], state, past + t, none, (every > t).astype(np.int64))["state_out"]
    want = step(probe, state, past + every, none, two)
    np.testing.assert_array_equal(got["y"], want["y"])
    kept = width - 1 + 2  # the window and the two tokens that are pending now
    np.testing.assert_array_equal(got["state_out"][:, :kept], want["state_out"][:, :kept])


@pytest.mark.parametrize("launch", LAUNCHES)
def test_others_never_reach_a_row(launch):
    """NaN in padding tokens, in padding rows, in other slots and in a new sequence's window stays where it is."""
    rng = np.random.default_rng(1)
    convolution = Convolution(rng, 20, 4, ring=3)
    given = convolution.random_step(3, 9)
    given |= {"slots": np.array([2, 0, 1]), "past": np.array([1, 9, 9]), "accepted": np.array([1, 2, 1])}
    given["lengths"] = np.array([9, 3, 0])
    padding = np.arange(9) >= given["lengths"][:, None]
    given["x"][padding] = np.nan
    given["state"][[1, 3]] = np.nan
    given["state"][2, :3] = np.nan
    given["state"][2, 4:] = np.nan
    given["state"][0, 5:] = np.nan
    before = {name: a.copy() for name, a in given.items()}
    got = convolution.run(given, launch)
    for name, array in before.items():
        np.testing.assert_array_equal(given[name], array)
    assert np.isfinite(got["y"][~padding]).all()
    assert np.isfinite(got["state_out"][0]).all()
    assert np.isfinite(got["state_out"][2, :3]).all()
    np.testing.assert_array_equal(got["state_out"][[1, 3]], before["state"][[1, 3]])
    convolution.check(given, launch)
