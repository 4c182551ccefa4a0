# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from nemo_build.errors import RequestError
from nemo_build.runtime.params import SamplingParams
from nemo_build.runtime.sampling import (
    NonFiniteLogitsError,
    TokenCounts,
    adjust_logits,
    draw,
    logprobs,
    sample,
    target_distribution,
    uniform,
)

Row = NDArray[np.float32]


def adjust(
    logits: Any, params: SamplingParams, counts: TokenCounts | None = None, num_output: int = 0
) -> Row:
    return adjust_logits(logits, params, counts, eos_ids=(0,), num_output=num_output)


def target(logits: Any, counts: TokenCounts | None = None, **params: Any) -> NDArray[np.float64]:
    return target_distribution(logits, SamplingParams(**params), counts, eos_ids=(0,), num_output=0)


def pick(logits: Any, *, seed: int = 0, position: int = 0, **params: Any) -> int:
    return sample(
        logits, SamplingParams(**params), None, seed=seed, position=position, eos_ids=(0,), num_output=0
    )


def kept(logits: Any, **params: Any) -> list[int]:
    return np.flatnonzero(target(logits, **params)).tolist()


@pytest.fixture(scope="module")
def warpers() -> Any:
    return pytest.importorskip("transformers.generation.logits_process")


# --- parameters --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("max_tokens", [0, -1, 1.5, "3", None, True]),
        ("temperature", [-0.1, math.nan, math.inf, 101, "1", None, True]),
        ("top_p", [0, 1.1, math.nan, None]),
        ("top_k", [-2, 1.5, math.nan, True]),
        ("min_p", [-0.1, 1.1, math.nan]),
        ("repetition_penalty", [0, -1, math.nan, math.inf]),
        ("presence_penalty", [-2.1, 2.1, math.nan]),
        ("frequency_penalty", [-2.1, 2.1, math.nan]),
        ("logit_bias", [{1: 101}, {1: math.nan}, {-1: 0}, {"1": 0}, {1: None}, [1], None]),
        ("seed", [1.0, 2**64, -(2**63) - 1, True, "1"]),
        ("stop", ["", ("a", ""), (1,), 1, None]),
        ("stop_token_ids", [(-1,), (1.0,), ("1",), 1, None]),
        ("include_stop", [1, None]),
        ("ignore_eos", ["true"]),
        ("min_tokens", [-1, 257, 0.5]),
    ],
)
def test_bad_values_are_refused(name: str, values: list[object]) -> None:
    for value in values:
        with pytest.raises(RequestError) as caught:
            SamplingParams(**{name: value})  # type: ignore[arg-type]
        assert len(caught.value.problems) == 1
        assert name in caught.value.problems[0]


def test_all_problems_at_once() -> None:
    with pytest.raises(RequestError) as caught:
        SamplingParams(max_tokens=0, top_p=2, stop=("",), logit_bias={-1: 200}, seed=2**70)
    assert len(caught.value.problems) == 6


def test_values_are_owned_and_normalised() -> None:
    stop, bias = ["a"], {np.int64(3): 1}
    params = SamplingParams(stop=stop, logit_bias=bias, top_k=-1, stop_token_ids=[np.int32(2)])  # type: ignore[arg-type]
    stop.append("b")
    bias.clear()
    assert (params.stop, params.logit_bias, params.top_k) == (("a",), {3: 1.0}, 0)
    assert SamplingParams(stop="ab").stop == ("ab",)  # type: ignore[arg-type]
    assert hash(params) == hash(SamplingParams(stop=("a",), stop_token_ids=(2,)))


def test_ids_beyond_the_vocabulary() -> None:
    params = SamplingParams(logit_bias={9: 1, 10: 1}, stop_token_ids=(12,))
    params.check_vocabulary(13)
    with pytest.raises(RequestError) as caught:
        params.check_vocabulary(10)
    assert caught.value.problems == ("logit_bias: token id 10", "stop_token_ids: token id 12")


# --- counts ------------------------------------------------------------------------------------------------


@given(st.lists(st.integers(0, 9)), st.lists(st.integers(0, 300) | st.none(), max_size=300))
def test_counts_follow_any_pushes_and_pops(prompt: list[int], actions: list[int | None]) -> None:
    counts, output = TokenCounts(prompt), []
    for action in actions:
        if action is not None:
            counts.push(action)
            output.append(action)
        elif output:
            assert counts.pop() == output.pop()
    ids, times = counts.output()
    assert dict(zip(ids.tolist(), times.tolist(), strict=True)) == Counter(output)
    seen = counts.seen().tolist()
    assert len(seen) == len(set(seen))
    assert set(seen) == {*prompt, *output}
    assert len(counts) == len(output)


def test_pop_of_nothing() -> None:
    with pytest.raises(IndexError):
        TokenCounts([1]).pop()


# --- penalties, bias, min_tokens ---------------------------------------------------------------------------


def test_penalties_by_hand() -> None:
    counts = TokenCounts([0, 1, 1])
    for token in (1, 2, 2):
        counts.push(token)
    logits = [2.0, -2.0, 4.0, 1.0]
    repetition = adjust(logits, SamplingParams(repetition_penalty=2.0), counts)
    assert repetition.tolist() == [1.0, -4.0, 2.0, 1.0]
    presence = adjust(logits, SamplingParams(presence_penalty=0.5), counts)
    assert presence.tolist() == [2.0, -2.5, 3.5, 1.0]
    frequency = adjust(logits, SamplingParams(frequency_penalty=0.5), counts)
    assert frequency.tolist() == [2.0, -2.5, 3.0, 1.0]
    # Bias comes after the penalties: it is not divided.
    both = adjust(logits, SamplingParams(repetition_penalty=2.0, logit_bias={2: 8.0, 3: -1.0}), counts)
    assert both.tolist() == [1.0, -4.0, 10.0, 0.0]


def test_a_draft_taken_back_leaves_no_penalty() -> None:
    counts, params = TokenCounts([0]), SamplingParams(repetition_penalty=2.0, frequency_penalty=1.0)
    before = adjust([1, 1, 1], params, counts)
    counts.push(1)
    assert adjust([1, 1, 1], params, counts).tolist() != before.tolist()
    counts.pop()
    assert adjust([1, 1, 1], params, counts).tolist() == before.tolist()


def test_penalties_need_counts() -> None:
    with pytest.raises(ValueError, match="counts"):
        adjust([1, 2], SamplingParams(presence_penalty=1.0))


def test_min_tokens_masks_every_end() -> None:
    params = SamplingParams(min_tokens=2, stop_token_ids=(2,))
    assert adjust([1, 1, 1], params, num_output=1).tolist() == [-np.inf, 1, -np.inf]
    assert adjust([1, 1, 1], params, num_output=2).tolist() == [1, 1, 1]


def test_min_tokens_gives_way_if_only_the_end_is_allowed() -> None:
    assert adjust([1, -np.inf], SamplingParams(min_tokens=2)).tolist() == [1, -np.inf]


def test_the_callers_logits_stay_as_they_are() -> None:
    logits = np.array([1, 2, 3], dtype=np.float32)
    for params in (SamplingParams(), SamplingParams(logit_bias={0: 1}, min_tokens=1, top_k=1, top_p=0.5)):
        adjust(logits, params)[:] = 7
        target_distribution(logits, params, None, eos_ids=(0,), num_output=0)
        assert logits.tolist() == [1, 2, 3]


@settings(deadline=None)
@given(
    logits=st.lists(st.floats(-20, 20, width=32), min_size=12, max_size=12),
    prompt=st.lists(st.integers(0, 11), min_size=1),
    penalty=st.sampled_from([0.5, 0.9, 1.1, 2.0]),
)
def test_repetition_penalty_as_in_transformers(
    warpers: Any, logits: list[float], prompt: list[int], penalty: float
) -> None:
    torch = warpers.torch
    theirs = warpers.RepetitionPenaltyLogitsProcessor(penalty)(
        torch.tensor([prompt]), torch.tensor([logits], dtype=torch.float32)
    )
    ours = adjust(logits, SamplingParams(repetition_penalty=penalty), TokenCounts(prompt))
    np.testing.assert_allclose(ours, theirs[0].numpy(), rtol=1e-6)


# --- truncation --------------------------------------------------------------------------------------------


def test_top_k_keeps_exactly_k_lowest_ids_among_equals() -> None:
    assert kept([1, 3, 2, 2, 2, 0], top_k=3) == [1, 2, 3]
    assert kept([0, 0, 0, 0], top_k=2) == [0, 1]
    assert kept([0, 1, 2], top_k=5) == [0, 1, 2]
    assert kept([0, -np.inf, 1, -np.inf], top_k=3) == [0, 2]


def test_top_p_keeps_the_smallest_set_lowest_ids_among_equals() -> None:
    logits = np.log([0.1, 0.4, 0.2, 0.2, 0.1])
    assert kept(logits, top_p=0.39) == [1]
    assert kept(logits, top_p=0.41) == [1, 2]
    assert kept(logits, top_p=0.79) == [1, 2, 3]
    assert kept(logits, top_p=0.89) == [0, 1, 2, 3]
    assert kept(logits, top_p=1e-9) == [1]
    assert kept(np.zeros(8), top_p=0.5) == [0, 1, 2, 3]


def test_top_p_counts_only_what_top_k_left() -> None:
    logits = np.log([0.5, 0.3, 0.1, 0.1])
    assert kept(logits, top_p=0.6) == [0, 1]
    assert kept(logits, top_k=2, top_p=0.6) == [0]


def test_min_p_is_a_share_of_the_most_likely() -> None:
    assert kept(np.log([0.5, 0.26, 0.14, 0.1]), min_p=0.5) == [0, 1]
    assert kept(np.log([0.5, 0.26, 0.14, 0.1]), min_p=1.0) == [0]


def test_temperature() -> None:
    assert target([0, 1], temperature=0.5)[1] == pytest.approx(1 / (1 + math.exp(-2)), rel=1e-6)
    assert target([1, 3, 3], temperature=0).tolist() == [0, 1, 0]
    assert target([1, 3, 2.99], temperature=1e-50).tolist() == [0, 1, 0]
    assert target([-3e38, 3e38, 0], temperature=1e-3).tolist() == [0, 1, 0]


# On a grid, so that two logits are either equal or different enough for float32 probabilities to differ.
rows = st.lists(st.integers(-800, 800), min_size=2, max_size=60).map(
    lambda values: np.array(values, dtype=np.float32) / 64
)


def plain_top_p(logits: Row, p: float) -> tuple[set[int], float]:
    """The definition (sort, add up, cut), and how far from its border the cut is."""
    order = np.argsort(-logits, kind="stable")
    probs = np.exp(logits.astype(np.float64) - logits.max())
    mass = np.cumsum(probs[order]) / probs.sum()
    return set(order[: int(np.searchsorted(mass, p)) + 1].tolist()), float(np.abs(mass - p).min())


@given(rows, st.floats(0.01, 0.999))
def test_top_p_by_definition(logits: Row, p: float) -> None:
    expected, margin = plain_top_p(logits, p)
    assume(margin > 1e-6)  # closer, rounding decides
    assert set(kept(logits, top_p=p)) == expected


@pytest.mark.parametrize("spread", [0.0, 0.01, 1.0, 4.0, 30.0])
@pytest.mark.parametrize("p", [0.05, 0.5001, 0.95, 0.9999])
def test_top_p_of_a_large_row_by_definition(spread: float, p: float) -> None:
    logits = (np.random.default_rng(1).normal(size=4096) * spread).astype(np.float32)
    # So many tokens lie close together that rounding may let one in, or swap two at the border.
    assert len(set(kept(logits, top_p=p)) ^ plain_top_p(logits, p)[0]) <= 2


@settings(deadline=None)
@given(
    logits=rows,
    heat=st.sampled_from([0.3, 1.0, 1.7]),
    k=st.integers(0, 12),
    p=st.sampled_from([0.2, 0.7, 0.95, 1.0]),
    min_p=st.sampled_from([0.0, 0.03, 0.4]),
)
def test_distribution_as_in_transformers(
    warpers: Any, logits: Row, heat: float, k: int, p: float, min_p: float
) -> None:
    torch = warpers.torch
    chain: list[Callable[..., Any]] = [warpers.TemperatureLogitsWarper(heat)]
    # Theirs keeps all ties at the border of top-k and cuts ties at the border of top-p in no stated order.
    assume(len(set(logits.tolist())) == len(logits) or (k == 0 and p == 1.0))
    if k:
        chain.append(warpers.TopKLogitsWarper(k))
    if p < 1:
        chain.append(warpers.TopPLogitsWarper(p))
    if min_p:
        chain.append(warpers.MinPLogitsWarper(min_p))
    scores = torch.tensor(logits[None], dtype=torch.float32)
    for warper in chain:
        before = torch.softmax(scores, -1)[0].double()
        if isinstance(warper, warpers.TopPLogitsWarper):
            mass = torch.cumsum(torch.sort(before, descending=True)[0], 0)
            assume((mass - p).abs().min() > 1e-5)
        if isinstance(warper, warpers.MinPLogitsWarper):
            assume((before - min_p * before.max()).abs().min() > 1e-7)
        scores = warper(None, scores)
    theirs = torch.softmax(scores, -1)[0].numpy()
    ours = target(logits, temperature=heat, top_k=k, top_p=p, min_p=min_p)
    assert np.flatnonzero(ours).tolist() == np.flatnonzero(theirs).tolist()
    np.testing.assert_allclose(ours, theirs, atol=1e-6)


@given(rows, st.integers(0, 5), st.floats(0.01, 1), st.floats(0, 1), st.sampled_from([0.0, 0.1, 1.0, 10.0]))
def test_always_a_distribution(logits: Row, k: int, p: float, min_p: float, heat: float) -> None:
    probs = target(logits, top_k=k, top_p=p, min_p=min_p, temperature=heat)
    assert probs.shape == logits.shape
    assert probs.min() >= 0
    assert probs.sum() == pytest.approx(1, abs=1e-12)
    assert probs[np.argmax(logits)] == probs.max()


# --- randomness --------------------------------------------------------------------------------------------


def test_uniform_depends_on_its_arguments_only() -> None:
    numbers = {(s, p, t): uniform(s, p, t) for s in (0, 1, -1, 2**63) for p in range(8) for t in (0, 1)}
    assert len(set(numbers.values())) == len(numbers)
    assert all(0 <= u < 1 for u in numbers.values())
    np.random.default_rng(3).random(5)
    assert numbers == {key: uniform(*key) for key in reversed(numbers)}
    assert uniform(-1, 0) == uniform(2**64 - 1, 0)


def test_uniform_is_as_documented() -> None:
    """Fixed values: a seed keeps its meaning across versions."""
    assert [uniform(0, 0), uniform(1, 2, 3)] == [0.011546754286331562, 0.4134895763207881]


def test_uniform_is_uniform() -> None:
    numbers = np.sort([uniform(5, position) for position in range(4000)])
    distance = np.abs(numbers - (np.arange(4000) + 0.5) / 4000).max()
    assert distance < 1.95 / math.sqrt(4000)  # Kolmogorov-Smirnov at 0.1 %


@given(st.lists(st.floats(0, 1), min_size=1, max_size=600), st.floats(0, 1, exclude_max=True))
@example([0.0, 0.1, 0.0], 1 - 2**-53)
@example([0.1] * 10, 1 - 2**-53)
def test_draw_inverts_the_cumulative_sum(mass: list[float], u: float) -> None:
    probs = np.array(mass)
    assume(probs.sum() > 1e-300)
    token = draw(probs, u)
    assert probs[token] > 0
    wanted, slack = u * probs.sum(), 1e-9 * probs.sum()
    assert probs[:token].sum() <= wanted + slack
    assert wanted <= probs[: token + 1].sum() + slack


def test_draw_from_a_row_of_many_blocks() -> None:
    probs = np.random.default_rng(0).random(5000) ** 8
    cumulative = np.cumsum(probs)
    for u in np.random.default_rng(1).random(300).tolist():
        assert draw(probs, u) == int(np.searchsorted(cumulative, u * cumulative[-1], side="right"))


def test_draw_at_the_borders_of_tokens() -> None:
    probs = np.array([0.25, 0, 0.25, 0.5])
    assert [draw(probs, u) for u in (0, 0.24, 0.25, 0.49, 0.5, 0.99)] == [0, 0, 2, 2, 3, 3]
    assert draw(np.array([0, 2.0, 2.0]), 0.5) == 2


@given(rows, st.integers(0, 2**32), st.integers(0, 10**6))
def test_sample_is_draw_of_target_and_uniform(logits: Row, seed: int, position: int) -> None:
    params: dict[str, Any] = {"top_k": 7, "top_p": 0.9, "temperature": 1.3}
    expected = draw(target(logits, **params), uniform(seed, position))
    assert pick(logits, seed=seed, position=position, **params) == expected


def test_greedy_takes_the_lowest_id_among_equals() -> None:
    assert pick([0, 5, 5, 1], temperature=0) == 1
    assert pick([0, 5, 5, 1], temperature=0, logit_bias={2: 0.5}) == 2


# --- statistics --------------------------------------------------------------------------------------------


def chi_square_rejects(counts: NDArray[np.int64], probs: NDArray[np.float64]) -> bool:
    """Pearson's test at about one in a million (Wilson-Hilferty approximation of the critical value)."""
    if counts[probs == 0].any():
        return True
    wanted = probs[probs > 0] * counts.sum()
    statistic = float(((counts[probs > 0] - wanted) ** 2 / wanted).sum())
    degrees = len(wanted) - 1
    spread = 2 / (9 * degrees)
    return statistic > degrees * (1 - spread + 4.75 * math.sqrt(spread)) ** 3


LOGITS = np.array([0.3, -1.0, 2.0, 0.9, -0.4, 1.1, 0.0, -2.0], dtype=np.float32)
SETTINGS: list[dict[str, Any]] = [{}, {"temperature": 1.5, "top_p": 0.8}, {"top_k": 4}, {"min_p": 0.2}]


def histogram(settings: dict[str, Any], *, across_seeds: bool) -> NDArray[np.int64]:
    tokens = [
        pick(LOGITS, seed=i if across_seeds else 11, position=7 if across_seeds else i, **settings)
        for i in range(8000)
    ]
    return np.bincount(tokens, minlength=len(LOGITS))


@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize("across_seeds", [True, False])
def test_samples_follow_the_target(settings: dict[str, Any], across_seeds: bool) -> None:
    assert not chi_square_rejects(histogram(settings, across_seeds=across_seeds), target(LOGITS, **settings))


@pytest.mark.parametrize(
    ("settings", "mistaken"),
    [
        ({"temperature": 1.2}, {}),
        ({}, {"top_k": 7}),
        ({"top_p": 0.8}, {"top_p": 0.9}),
        ({"logit_bias": {5: 0.3}}, {}),
    ],
)
def test_a_wrong_sampler_is_rejected(settings: dict[str, Any], mistaken: dict[str, Any]) -> None:
    assert chi_square_rejects(histogram(settings, across_seeds=False), target(LOGITS, **mistaken))


# --- defects of the engine ---------------------------------------------------------------------------------


@pytest.mark.parametrize("bad", [[np.nan, 1, 2], [1, np.nan, 2], [1, np.inf, 2], [-np.inf] * 3, [np.nan] * 3])
@pytest.mark.parametrize("params", [{}, {"temperature": 0}, {"top_k": 1, "top_p": 0.5, "min_p": 0.1}])
def test_unusable_logits_are_not_sampled(bad: list[float], params: dict[str, Any]) -> None:
    for call in (pick, target):
        with pytest.raises(NonFiniteLogitsError):
            call(bad, **params)
    with pytest.raises(NonFiniteLogitsError):
        logprobs(bad, 0, 2)


@pytest.mark.parametrize("bad", [[0, 0], [np.nan, 1], [np.inf, 1]])
def test_unusable_masses_are_not_drawn_from(bad: list[float]) -> None:
    with pytest.raises(NonFiniteLogitsError):
        draw(np.array(bad, dtype=np.float64), 0.5)


# --- log-probabilities -------------------------------------------------------------------------------------


@given(rows, st.data())
def test_logprobs_are_those_of_a_softmax(logits: Row, data: st.DataObject) -> None:
    token = data.draw(st.integers(0, len(logits) - 1))
    top_n = data.draw(st.integers(0, len(logits) + 2))
    wide = logits.astype(np.float64)
    expected = wide - wide.max() - np.log(np.exp(wide - wide.max()).sum())
    result = logprobs(logits, token, top_n)
    assert result.logprob == pytest.approx(expected[token], abs=2e-6)
    order = np.argsort(-logits, kind="stable")[:top_n]
    assert [i for i, _ in result.top] == order.tolist()
    np.testing.assert_allclose([p for _, p in result.top], expected[order], atol=2e-6)


def test_logprob_of_a_forbidden_token() -> None:
    assert logprobs([0.0, -np.inf], 1).logprob == -math.inf
