# SPDX-License-Identifier: Apache-2.0
"""Batches of steps: how they are made and checked, and how a session takes their arrays."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nemo_build.engines.ort import OrtSession
from nemo_build.engines.session import StepBatch, check_batch

SIZES = {"slots": 6, "context": 40, "pending": 4, "vocabulary": 96}

rows = st.lists(st.lists(st.integers(0, 95), max_size=30), min_size=1, max_size=6)


@given(rows, st.sampled_from(["last", "all", "none"]))
def test_rows_are_padded(tokens, logits):
    batch = StepBatch.of_rows(tokens, past=range(len(tokens)), slots=range(len(tokens)), logits=logits)
    width = max(1, *map(len, tokens))
    assert batch.input_ids.tolist() == [t + [0] * (width - len(t)) for t in tokens]
    assert batch.lengths.tolist() == [len(t) for t in tokens]
    first = {"last": lambda t: max(len(t) - 1, 0), "all": lambda t: 0, "none": len}[logits]
    wanted = [i * width + n for i, t in enumerate(tokens) for n in range(first(t), len(t))]
    assert batch.logit_rows.tolist() == wanted
    for name in ("input_ids", "lengths", "past", "accepted", "slots", "logit_rows"):
        assert getattr(batch, name).dtype == np.int64
    check_batch(batch, **SIZES)


@st.composite
def batches(draw: Any) -> StepBatch:
    """Batches of few and of many tokens, right but for at most some numbers."""
    count = draw(st.integers(1, 6))
    width = draw(st.sampled_from([1, 2, 30]))
    lengths = draw(st.lists(st.integers(0, width), min_size=count, max_size=count))
    past = draw(st.lists(st.integers(0, 40 - width), min_size=count, max_size=count))
    arrays = {
        "input_ids": np.full((count, width), 5),
        "lengths": lengths,
        "past": past,
        "accepted": [min(p, 4) for p in past],
        "slots": draw(st.permutations(range(6)))[:count],
        "logit_rows": draw(st.lists(st.integers(0, count * width - 1), max_size=100)),
    }
    made = {n: np.array(v, np.int64) for n, v in arrays.items()}
    for name in draw(st.lists(st.sampled_from(sorted(made)), max_size=2)):
        if made[name].size:
            at = draw(st.integers(0, made[name].size - 1))
            made[name].flat[at] = draw(st.sampled_from([-1, 0, 1, 5, 6, 31, 40, 95, 96, 180, 2**40]))
    return StepBatch(**made)


def is_right(batch: StepBatch) -> bool:
    """The rules, one number at a time."""
    seen = set()
    for n, past, accepted, slot in zip(batch.lengths, batch.past, batch.accepted, batch.slots, strict=True):
        if not (0 <= n <= batch.input_ids.shape[1] and past >= 0 and past + n <= 40 and 0 <= slot < 6):
            return False
        if not 0 <= accepted <= min(past, 4) or (n and slot in seen):
            return False
        seen |= {slot} if n else set()
    ids, wanted = batch.input_ids.ravel(), batch.logit_rows
    return all(0 <= i < 96 for i in ids) and all(0 <= r < len(ids) for r in wanted)


@given(batches())
def test_checks_are_the_rules(batch):
    if is_right(batch):
        check_batch(batch, **SIZES)
    else:
        with pytest.raises(ValueError, match=r"\w"):
            check_batch(batch, **SIZES)


@pytest.fixture(scope="module")
def session(tiny_bundle) -> OrtSession:
    return OrtSession(tiny_bundle / "target.onnx", slots=4, context=512, threads=1, hidden=True)


def test_outputs_stay_as_they_are(session):
    """Later steps do not write to what earlier ones returned."""
    batch = StepBatch.of_rows([[1, 2], [3]], past=[0, 0], slots=[0, 1], logits="all")
    first = session.step(batch)
    copies = first.logits.copy(), first.hidden.copy()
    second = session.step(batch.replace(input_ids=np.array([[7, 8], [9, 0]])))
    assert not np.shares_memory(first.logits, second.logits)
    np.testing.assert_array_equal(first.logits, copies[0])
    np.testing.assert_array_equal(first.hidden, copies[1])
    assert (second.logits != copies[0]).any()


def test_arrays_may_be_written_to_between_steps(session):
    """An array is bound once; what counts is what it holds when the step runs."""
    batch = StepBatch.of_rows([[1], [2]], past=[0, 0], slots=[0, 1])
    found = []
    for _ in range(4):
        found.append(session.step(batch).logits)
        batch.input_ids[:] += 3
        batch.past[:] += 1
    for i in range(4):
        ids = [[1 + 3 * i], [2 + 3 * i]]
        want = session.step(StepBatch.of_rows(ids, past=[i, i], slots=[2, 3])).logits
        np.testing.assert_array_equal(found[i], want)


def test_arrays_of_any_layout(session):
    batch = StepBatch.of_rows([[1, 2, 3], [4, 5, 6]], past=[0, 0], slots=[0, 1], logits="all")
    want = session.step(batch).logits
    ids = np.asfortranarray(batch.input_ids)
    np.testing.assert_array_equal(session.step(batch.replace(input_ids=ids)).logits, want)
    ids[:] = 9
    assert (session.step(batch.replace(input_ids=ids)).logits != want).any()
    ids[:] = batch.input_ids
    lengths = np.array([3, 0, 3, 0])[::2]
    np.testing.assert_array_equal(session.step(batch.replace(input_ids=ids, lengths=lengths)).logits, want)


def test_a_step_without_logits(session):
    batch = StepBatch.of_rows([[1, 2]], past=[0], slots=[0], logits="none")
    output = session.step(batch)
    assert output.logits.shape == (0, 96)
    assert output.hidden.shape == (1, 2, session.hidden_size)
