# SPDX-License-Identifier: Apache-2.0
"""Verification beside plain decoding: the same text for a seed, ends, unusable rows, misuse."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from nemo_build.runtime.params import SamplingParams
from nemo_build.runtime.sampling import (
    NonFiniteLogitsError,
    TokenCounts,
    draw,
    sample,
    target_distribution,
    uniform,
)
from nemo_build.runtime.speculation import verify as module
from nemo_build.runtime.speculation.verify import Verdict, draft_uniform, verify

from .toy_target import EOS, PROMPT, Tokens, distribution, drafter, ends, step, target_logits

# --- the text of plain decoding ----------------------------------------------------------------------------

sampling = st.fixed_dictionaries(
    {},
    optional={
        "temperature": st.sampled_from([0.0, 0.6, 1.5]),
        "top_p": st.sampled_from([0.5, 0.9]),
        "top_k": st.integers(1, 4),
        "min_p": st.sampled_from([0.05, 0.5]),
        "repetition_penalty": st.sampled_from([0.7, 1.5]),
        "presence_penalty": st.sampled_from([-1.0, 1.0]),
        "frequency_penalty": st.sampled_from([-0.5, 0.5]),
        "logit_bias": st.dictionaries(st.integers(0, 5), st.floats(-3, 3), max_size=2),
        "min_tokens": st.integers(0, 6),
        "stop_token_ids": st.just((5,)),
        "ignore_eos": st.booleans(),
    },
)


def plain_text(length: int, params: SamplingParams, width: int, seed: int) -> Tokens:
    counts, tokens = TokenCounts(PROMPT), ()
    while len(tokens) < length and not ends(tokens, params):
        position = len(PROMPT) + len(tokens)
        row = target_logits(tokens, width)
        keys: dict[str, Any] = {"seed": seed, "position": position, "num_output": len(tokens)}
        token = sample(row, params, counts, eos_ids=EOS, **keys)
        counts.push(token)
        tokens += (token,)
    return tokens


@given(sampling, st.integers(0, 2**64 - 1), st.data())
def test_a_seed_gives_the_same_text_whatever_is_drafted(
    chosen: dict[str, Any], seed: int, data: st.DataObject
) -> None:
    params, width = SamplingParams(**chosen), 6
    expected = plain_text(8, params, width, seed)
    tokens: Tokens = ()
    while len(tokens) < len(expected):
        # Right for a while, then anything.
        right = expected[len(tokens) : len(tokens) + data.draw(st.integers(0, 4))]
        draft = [*right, *data.draw(st.lists(st.integers(0, width - 1), max_size=3))]
        verdict = step(tokens, draft, params, width, seed)
        assert verdict.accepted >= len(right)
        tokens += verdict.tokens
    assert tokens[: len(expected)] == expected
    assert ends(expected, params) == (verdict.ended and tokens == expected)


@given(st.sampled_from([0.0, 1.0]), st.integers(0, 99), st.sampled_from(["token", "block"]))
def test_no_drafts_is_plain_decoding(temperature: float, seed: int, method: str) -> None:
    params = SamplingParams(temperature=temperature, ignore_eos=True)
    for options in ({}, {"probabilities": np.empty((0, 6)), "method": method}):
        assert step((), (), params, 6, seed, **options).tokens == plain_text(1, params, 6, seed)


def test_drafts_with_the_targets_own_number_are_often_right() -> None:
    params, hits = SamplingParams(ignore_eos=True), {"same number": 0, "most likely": 0}
    for seed in range(300):
        q = drafter((), 6)
        hits["same number"] += step((), [draw(q, uniform(seed, len(PROMPT)))], params, 6, seed).accepted
        hits["most likely"] += step((), [int(np.argmax(q))], params, 6, seed).accepted
    assert hits["same number"] > hits["most likely"]


# --- ends --------------------------------------------------------------------------------------------------


def certain(*tokens: int, width: int = 4) -> NDArray[np.float32]:
    """Rows that leave no choice; the last is unusable unless it has a token."""
    rows = np.full((len(tokens), width), -np.inf, dtype=np.float32)
    for row, token in zip(rows, tokens, strict=True):
        row[token if token >= 0 else slice(None)] = 0 if token >= 0 else np.nan
    return rows


def check(rows: Any, draft: Sequence[int], how: str = "match", num_output: int = 0, **params: Any) -> Verdict:
    """Verify with a drafter that was certain, or nearly."""
    options: dict[str, Any] = {}
    if how in ("token", "block"):
        q = np.full((len(draft), np.shape(rows)[1]), 1e-3)
        q[np.arange(len(draft)), list(draft)] = 1
        options = {"probabilities": q, "method": how}
    if how == "greedy":
        params["temperature"] = 0
    keys: dict[str, Any] = {"seed": 5, "position": 9, "eos_ids": (0,), "num_output": num_output}
    return verify(rows, draft, SamplingParams(**params), None, **keys, **options)


HOWS = ["greedy", "match", "token", "block"]


@pytest.mark.parametrize("how", HOWS)
def test_an_accepted_end_is_the_last_token(how: str) -> None:
    rows = certain(1, 0, -1, -1)  # nothing after the end is looked at
    assert check(rows, [1, 0, 2], how) == Verdict((1, 0), 2, True)
    assert check(rows[:3], [1, 0], how) == Verdict((1, 0), 2, True)
    assert check(certain(1, 3, -1), [1, 3], how, stop_token_ids=(3,)) == Verdict((1, 3), 2, True)


@pytest.mark.parametrize("how", HOWS)
def test_the_targets_own_token_may_end(how: str) -> None:
    assert check(certain(1, 0, -1), [1, 2], how) == Verdict((1, 0), 1, True)
    assert check(certain(1, 2, 0), [1, 2], how) == Verdict((1, 2, 0), 2, True)
    assert check(certain(1, 2, -1), [1, 0], how) == Verdict((1, 2), 1, False)


@pytest.mark.parametrize("how", HOWS)
def test_ends_that_do_not_end(how: str) -> None:
    rows = certain(1, 0, 2)
    assert check(rows, [1, 0], how, ignore_eos=True) == Verdict((1, 0, 2), 2, False)
    # An end that nothing can replace does not end the text before min_tokens.
    assert check(rows, [1, 0], how, min_tokens=2) == Verdict((1, 0, 2), 2, False)
    assert check(rows, [1, 0], how, min_tokens=2, num_output=1) == Verdict((1, 0), 2, True)


# --- rows that are not needed, or unusable -----------------------------------------------------------------


@pytest.mark.parametrize("how", HOWS)
def test_rows_after_a_rejection_are_not_looked_at(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = certain(1, 2, -1, -1)
    seen = 0

    def count(function: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*args: Any, **kwargs: Any) -> Any:
            nonlocal seen
            seen += 1
            return function(*args, **kwargs)

        return counted

    monkeypatch.setattr(module, "sample", count(sample))
    monkeypatch.setattr(module, "target_distribution", count(target_distribution))
    assert check(rows, [1, 3, 1], how) == Verdict((1, 2), 1, False)  # the mask forbids 3
    assert seen == 2


@pytest.mark.parametrize("how", HOWS)
@pytest.mark.parametrize("place", [0, 1, 2])
def test_an_unusable_row_that_is_needed(how: str, place: int) -> None:
    rows = certain(1, 2, 3)
    rows[place] = np.nan
    counts = TokenCounts(PROMPT)
    q = np.eye(4)[[1, 2]]
    options: dict[str, Any] = {"probabilities": q, "method": how} if how in ("token", "block") else {}
    params = SamplingParams(temperature=0 if how == "greedy" else 1, presence_penalty=1)
    keys: dict[str, Any] = {"seed": 0, "position": 0, "eos_ids": (), "num_output": 0}
    with pytest.raises(NonFiniteLogitsError):
        verify(rows, [1, 2], params, counts, **keys, **options)
    assert len(counts) == 0


@pytest.mark.parametrize("how", HOWS)
def test_forbidden_drafts_are_never_emitted(how: str) -> None:
    for seed_like in range(40):
        rows = np.zeros((3, 4), dtype=np.float32)
        rows[:, 3] = -np.inf
        rows[0, 1] += seed_like / 10
        assert 3 not in check(rows, [3, 3], how, ignore_eos=True).tokens


def test_a_perfect_drafter_is_always_accepted() -> None:
    """Where p equals q, nothing is left to correct, and rounding must not make anything of it."""
    params, rows = SamplingParams(ignore_eos=True), np.stack([target_logits((), 50)] * 3)
    p = distribution((), params, 50)
    for seed in range(200):
        draft = [draw(p, draft_uniform(seed, 0, i)) for i in (0, 1)]
        keys: dict[str, Any] = {"seed": seed, "position": 0, "eos_ids": EOS, "num_output": 0}
        for method in ("token", "block"):
            # Unnormalised: drawing does not mind, so verification must not.
            found = verify(
                rows, draft, params, None, probabilities=np.stack([p, p]) * 3, method=method, **keys
            )
            assert found.accepted == 2


def test_a_residual_of_rounding_errors_is_not_drawn_from() -> None:
    p = np.array([0.25, 0.75])
    assert module._residual(1.0, p, p).tolist() == p.tolist()
    assert module._residual(1.0, p, np.array([0.25 - 1e-14, 0.75])).tolist() == p.tolist()
    assert module._residual(1.0, p, np.array([0.5, 0.5])).tolist() == [0, 0.25]


# --- misuse ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("draft", "options", "message"),
    [
        ([1], {}, "logits"),
        ([1, 4], {}, "below 4"),
        ([1, -1], {}, "below 4"),
        ([1, 2], {"probabilities": np.ones((1, 4))}, "probabilities"),
        ([1, 2], {"probabilities": np.ones((2, 3))}, "probabilities"),
        ([1, 2], {"probabilities": np.eye(4)[[1, 3]]}, "draft 1 is token 2"),
        ([1, 2], {"probabilities": np.full((2, 4), np.nan)}, "draft 0 is token 1"),
        ([1, 2], {"method": "tree"}, "tree"),
    ],
)
def test_misuse(draft: list[int], options: dict[str, Any], message: str) -> None:
    keys: dict[str, Any] = {"seed": 0, "position": 0, "eos_ids": (), "num_output": 0}
    with pytest.raises(ValueError, match=message):
        verify(certain(1, 2, 3), draft, SamplingParams(), None, **keys, **options)


def test_penalties_need_counts() -> None:
    with pytest.raises(ValueError, match="counts"):
        check(certain(1, 2), [1], presence_penalty=1.0)
