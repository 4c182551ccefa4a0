# SPDX-License-Identifier: Apache-2.0
"""The exported step graph, in plain ONNX Runtime, against transformers."""

from __future__ import annotations

import numpy as np
import pytest

from .tiny import KINDS, feed, open_exported, reference_logits, reference_model, save_checkpoint

TOLERANCE = 1e-4


@pytest.fixture(scope="module", params=KINDS)
def pair(request, tmp_path_factory):
    """A reference model and the session of its exported checkpoint."""
    model = reference_model(**KINDS[request.param])
    directory = tmp_path_factory.mktemp("tiny")
    save_checkpoint(model, directory / "checkpoint")
    return model, open_exported(directory / "checkpoint", directory / "bundle")


def tokens_of(n: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(0, 96, n).tolist()


def test_one_shot_prefill(pair):
    model, session = pair
    tokens = tokens_of(129)
    got = feed(session, {2: tokens}, {})[2]
    np.testing.assert_allclose(got, reference_logits(model, tokens), atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("chunk", [1, 127, 128, 129, 300])
def test_chunked_prefill(pair, chunk):
    model, session = pair
    tokens = tokens_of(40 if chunk == 1 else 310)
    past: dict[int, int] = {}
    got = np.concatenate(
        [feed(session, {1: tokens[i : i + chunk]}, past)[1] for i in range(0, len(tokens), chunk)]
    )
    np.testing.assert_allclose(got, reference_logits(model, tokens), atol=TOLERANCE, rtol=0)


def test_batch_of_unequal_lengths_then_mixed_decode(pair):
    """Prompts of unequal lengths, then steps in which some rows prefill, some decode and some pause."""
    model, session = pair
    rng = np.random.default_rng(3)
    texts = {0: tokens_of(60, 1), 3: tokens_of(45, 2), 1: tokens_of(33, 3)}
    got: dict[int, list[np.ndarray]] = {slot: [] for slot in texts}
    past: dict[int, int] = {}
    first = {0: 17, 3: 1, 1: 30}
    while any(past.get(s, 0) < len(t) for s, t in texts.items()):
        rows = {}
        for slot in rng.permutation(list(texts)):
            done = past.get(slot, 0)
            n = first[slot] if not done else int(rng.integers(0, 4))
            rows[int(slot)] = texts[slot][done : done + n]
        if not any(rows.values()):
            continue
        for slot, logits in feed(session, rows, past).items():
            got[slot].append(logits)
    for slot, tokens in texts.items():
        np.testing.assert_allclose(
            np.concatenate(got[slot]), reference_logits(model, tokens), atol=TOLERANCE, rtol=0
        )


def test_reused_slot_starts_afresh(pair):
    model, session = pair
    tokens = tokens_of(20, 5)
    feed(session, {0: tokens_of(50, 6)}, {})
    np.testing.assert_allclose(
        feed(session, {0: tokens}, {})[0], reference_logits(model, tokens), atol=TOLERANCE, rtol=0
    )
