# SPDX-License-Identifier: Apache-2.0
"""``SelectiveScan``: function and kernels against the reference, and what a division into steps must not change."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import onnxruntime as ort
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nemo_build.plugins import native

from .op_models import EVERY_KERNEL, check, many, normal, one_node_model, run_function, seeds, step_control


class Scan:
    """Sizes with random parameters, and random tokens for them."""

    def __init__(self, rng: np.random.Generator, heads: int, head_dim: int, groups: int, width: int) -> None:
        self.rng, self.heads, self.head_dim, self.groups, self.width = rng, heads, head_dim, groups, width
        self.parameters = [normal(rng, heads) for _ in range(3)]
        self.inner, self.group_width = heads * head_dim, groups * width

    def tokens(self, batch: int, steps: int) -> list[np.ndarray]:
        widths = (self.inner, self.heads, self.group_width, self.group_width)
        return [normal(self.rng, batch, steps, w) for w in widths]

    def state(self, slots: int) -> np.ndarray:
        return normal(self.rng, slots, self.heads, self.head_dim, self.width)

    def ring(self, slots: int, size: int) -> np.ndarray:
        """Pending tokens of a former step, with time steps that are not negative."""
        ring = normal(self.rng, slots, size, self.inner + self.group_width + self.heads)
        ring[..., self.inner + self.group_width :] = np.abs(ring[..., self.inner + self.group_width :])
        return ring

    def step(self, tokens, state, ring, slots, past, accepted=None, lengths=None, **how) -> list[np.ndarray]:
        none, full = np.zeros(len(slots), np.int64), np.full(len(slots), tokens[0].shape[1])
        control = [slots, past, none if accepted is None else accepted, full if lengths is None else lengths]
        inputs = [*tokens, *self.parameters, state, ring, *control]
        return run_function("SelectiveScan", inputs, {}, **how)


@many
@given(
    seed=seeds,
    batch=st.integers(1, 4),
    steps=st.sampled_from([1, 2, 5, 9, 40]),
    ring=st.sampled_from([0, 1, 3, 5, 35]),
    width=st.sampled_from([1, 3, 4, 16, 21, 64, 150]),
    clamp=st.booleans(),
)
def test_against_the_reference(seed, batch, steps, ring, width, clamp):
    rng = np.random.default_rng(seed)
    groups, per, head_dim = int(rng.integers(1, 4)), int(rng.integers(1, 7)), int(rng.integers(1, 5))
    scan = Scan(rng, groups * per, head_dim, groups, width)
    control = step_control(rng, batch, batch + 1, steps, ring, 80)
    state = [scan.state(batch + 1), scan.ring(batch + 1, ring)]
    inputs = [*scan.tokens(batch, steps), *scan.parameters, *state, *control]
    check("SelectiveScan", inputs, {"dt_min": 0.3, "dt_max": 0.9} if clamp else {}, control[3])


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
def test_parameters_as_they_are_stored(dtype):
    rng = np.random.default_rng(0)
    scan = Scan(rng, 4, 3, 2, 5)
    scan.parameters = [p.astype(dtype) for p in scan.parameters]
    control = [np.array([1, 0]), np.array([3, 0]), np.array([0, 0]), np.array([3, 2])]
    inputs = [*scan.tokens(2, 3), *scan.parameters, scan.state(2), scan.ring(2, 2), *control]
    check("SelectiveScan", inputs, {}, control[3])


@pytest.mark.parametrize("kind", EVERY_KERNEL)
@pytest.mark.parametrize("before", [0, 7])
@pytest.mark.parametrize("ring", [3, 5])
def test_committing_part_of_a_step_equals_sequential_steps(kind, ring, before):
    """After accepting k of n tokens the state equals k sequential steps, for every k, rows mixed."""
    rng = np.random.default_rng(2)
    n = 3
    batch = n + 1
    scan = Scan(rng, 4, 3, 2, 21)
    slots, past = rng.permutation(batch), np.full(batch, before)
    tokens, probe = scan.tokens(batch, n), scan.tokens(batch, 2)
    state = scan.state(batch) * (before > 0)
    how = {"instruction_set": kind, "threads": 2}

    _, drafted, pending = scan.step(tokens, state, scan.ring(batch, ring), slots, past, **how)
    np.testing.assert_array_equal(drafted, state)
    accepted = np.arange(batch)
    y, after, _ = scan.step(probe, drafted, pending, slots, past + accepted, accepted, **how)

    no_ring = scan.ring(batch, 0)
    expected, h = state.copy(), state
    for k in range(batch):
        expected[slots[k]] = h[slots[k]]
        if k < n:
            _, h, _ = scan.step([a[:, k : k + 1] for a in tokens], h, no_ring, slots, past + k, **how)
    y_expected, _, _ = scan.step(probe, expected, no_ring, slots, past + accepted, **how)
    if kind == "reference":
        np.testing.assert_allclose(after, expected, atol=1e-5)
        np.testing.assert_allclose(y, y_expected, atol=1e-5)
    else:
        np.testing.assert_array_equal(after, expected)
        np.testing.assert_array_equal(y, y_expected)


@pytest.mark.parametrize("kind", EVERY_KERNEL)
def test_a_single_token_is_committed_at_once(kind):
    """There is no draft behind it that could be rejected."""
    scan = Scan(np.random.default_rng(4), 4, 3, 2, 21)
    token, state, ring = scan.tokens(2, 1), scan.state(2), scan.ring(2, 3)
    slots, past, how = np.array([1, 0]), np.array([5, 9]), {"instruction_set": kind, "threads": 2}
    y, after, pending = scan.step(token, state, ring, slots, past, np.array([0, 0]), **how)
    y_expected, expected, _ = scan.step(token, state, scan.ring(2, 0), slots, past, **how)
    np.testing.assert_allclose(y, y_expected, atol=1e-6)
    np.testing.assert_allclose(after, expected, atol=1e-6)
    np.testing.assert_array_equal(pending, ring)


@pytest.mark.parametrize("kind", native.instruction_sets())
@pytest.mark.parametrize(("head_dim", "width"), [(3, 21), (2, 128)])
def test_division_into_steps_changes_no_bit(kind, head_dim, width):
    rng = np.random.default_rng(3)
    scan, total = Scan(rng, 6, head_dim, 2, width), 53
    tokens, state, ring = scan.tokens(1, total), scan.state(3), scan.ring(3, 0)
    y, h, _ = scan.step(tokens, state, ring, np.array([1]), np.array([2]), instruction_set=kind, threads=3)

    pieces, running, at = [], state, 0
    for length in (1, 1, 2, 17, 1, 31):
        part = [a[:, at : at + length] for a in tokens]
        beside = [np.concatenate([b, a]) for a, b in zip(part, scan.tokens(1, length), strict=True)]
        slots, past = np.array([2, 1]), np.array([0, 2 + at])
        y_part, running, _ = scan.step(beside, running, ring, slots, past, instruction_set=kind, threads=2)
        pieces.append(y_part[1:])
        at += length
    assert at == total
    np.testing.assert_array_equal(np.concatenate(pieces, axis=1), y)
    np.testing.assert_array_equal(running[1], h[1])


@pytest.mark.parametrize("kind", native.instruction_sets())
def test_state_in_place(kind):
    """Bound to one buffer, state and ring end up as they do apart; other slots and idle states are not touched."""
    rng = np.random.default_rng(4)
    scan, ring_size = Scan(rng, 4, 3, 2, 5), 3
    state, ring = scan.state(6), scan.ring(6, ring_size)
    # Pending; pending after accepting; committing; beginning anew, in a slot that holds NaN; padding.
    slots, past = np.array([4, 0, 2, 5, 1]), np.array([9, 9, 9, 0, 9])
    accepted, lengths = np.array([0, 2, 3, 0, 1]), np.array([3, 1, 5, 2, 0])
    state[5] = np.nan
    inputs = [*scan.tokens(5, 5), *scan.parameters, state, ring, slots, past, accepted, lengths]
    apart = run_function("SelectiveScan", inputs, {}, instruction_set=kind)

    options = ort.SessionOptions()
    options.register_custom_ops_library(str(native.library_file(kind)))
    session = ort.InferenceSession(one_node_model("SelectiveScan", inputs, {}).SerializeToString(), options)
    binding = session.io_binding()
    names = [i.name for i in session.get_inputs()]
    values = {n: ort.OrtValue.ortvalue_from_numpy(a) for n, a in zip(names, inputs, strict=True)}
    for name, value in values.items():
        binding.bind_ortvalue_input(name, value)
    binding.bind_output("y")
    binding.bind_ortvalue_output("state_out", values["state"])
    binding.bind_ortvalue_output("pending_out", values["pending"])
    session.run_with_iobinding(binding)
    valid = np.arange(5) < lengths[:, None]
    np.testing.assert_array_equal(binding.get_outputs()[0].numpy()[valid], apart[0][valid])
    np.testing.assert_array_equal(values["state"].numpy(), apart[1])
    np.testing.assert_array_equal(values["pending"].numpy(), apart[2])
    np.testing.assert_array_equal(apart[1][[1, 3, 4]], state[[1, 3, 4]])
    np.testing.assert_array_equal(apart[1][5], 0)


@pytest.mark.parametrize("kind", native.instruction_sets())
@pytest.mark.parametrize(
    ("what", "control"),
    [
        ("lengths", ([0], [0], [0], [4])),
        ("slots", ([2], [0], [0], [1])),
        ("accepted", ([0], [9], [3], [1])),
    ],
)
def test_kernels_refuse_what_is_out_of_range(kind, what, control):
    scan = Scan(np.random.default_rng(5), 2, 1, 1, 1)
    slots, past, accepted, lengths = (np.array(c) for c in control)
    with pytest.raises(Exception, match=what):
        scan.step(
            scan.tokens(1, 3),
            scan.state(2),
            scan.ring(2, 2),
            slots,
            past,
            accepted,
            lengths,
            instruction_set=kind,
        )


def test_real_widths():
    rng = np.random.default_rng(6)
    scan = Scan(rng, 64, 64, 8, 128)
    control = [np.array([1, 0]), np.array([5, 3]), np.array([4, 0]), np.array([40, 4])]
    tokens = scan.tokens(2, 40)
    inputs = [*tokens, *scan.parameters, scan.state(2), scan.ring(2, 5), *control]
    check("SelectiveScan", inputs, {}, control[3])
