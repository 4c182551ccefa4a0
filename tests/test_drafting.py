# SPDX-License-Identifier: Apache-2.0
"""How drafts are chosen: what is verified after it is the target's, and wrong ways are found out."""

from __future__ import annotations

from collections import defaultdict
from functools import cache
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from nemo_build.runtime.params import SamplingParams
from nemo_build.runtime.sampling import TokenCounts, sample, uniform
from nemo_build.runtime.speculation import drafting, verify
from nemo_build.runtime.speculation.drafting import (
    CoupledChooser,
    DistributionChooser,
    Drafting,
    chooser_for,
    greedy,
)

from .toy_target import (
    EOS,
    PROMPT,
    Tokens,
    chi_square_rejects,
    distribution,
    drafter,
    ends,
    step,
    target_logits,
)

PARAMS: dict[str, dict[str, Any]] = {
    "plain": {"ignore_eos": True},
    "penalties": {"repetition_penalty": 1.8, "presence_penalty": 0.7, "frequency_penalty": 0.9},
    "truncation": {"temperature": 1.4, "top_k": 3, "top_p": 0.9, "min_p": 0.15},
    "everything": {"min_tokens": 2, "logit_bias": {1: 0.8}, "frequency_penalty": 1.0, "top_p": 0.95},
    "greedy": {"temperature": 0, "frequency_penalty": 0.5, "min_tokens": 3},
}


def counts_of(tokens: Tokens) -> TokenCounts:
    counts = TokenCounts(PROMPT)
    for token in tokens:
        counts.push(token)
    return counts


@cache
def draft_logits(prefix: Tokens, width: int) -> NDArray[np.float32]:
    """What the drafter predicts; it knows of no request."""
    return np.log(drafter(prefix, width)).astype(np.float32)


def chooser_after(tokens: Tokens, params: SamplingParams, seed: int, method: Drafting) -> Any:
    return chooser_for(
        params,
        counts_of(tokens),
        seed=seed,
        position=len(PROMPT) + len(tokens),
        eos_ids=EOS,
        num_output=len(tokens),
        method=method,
    )


def speculate(
    seed: int, length: int, k: int, params: SamplingParams, width: int, choose: Drafting | None
) -> tuple[Tokens, int]:
    """A text made by steps of k drafts, and how many were accepted; without a method, drafts are the most likely."""
    tokens: Tokens = ()
    accepted = 0
    while len(tokens) < length and not ends(tokens, params):
        chooser = greedy if choose is None else chooser_after(tokens, params, seed, choose)
        draft: Tokens = ()
        for _ in range(k):
            draft += (chooser(draft_logits(tokens + draft, width)),)
        how: dict[str, Any] = {}
        if isinstance(chooser, DistributionChooser):
            how = {"probabilities": chooser.probabilities, "method": choose}
        verdict = step(tokens, draft, params, width, seed, **how)
        tokens += verdict.tokens
        accepted += verdict.accepted
    return tokens[:length], accepted


def plain_text(seed: int, length: int, params: SamplingParams, width: int) -> Tokens:
    tokens: Tokens = ()
    while len(tokens) < length and not ends(tokens, params):
        keys: dict[str, Any] = {"seed": seed, "position": len(PROMPT) + len(tokens), "eos_ids": EOS}
        row = target_logits(tokens, width)
        tokens += (sample(row, params, counts_of(tokens), num_output=len(tokens), **keys),)
    return tokens


# --- coupled drafts ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", PARAMS)
def test_with_coupled_drafts_a_text_is_that_of_plain_decoding(name: str) -> None:
    params = SamplingParams(**PARAMS[name])
    for seed in range(60):
        for k in (1, 4):
            text, _ = speculate(seed, 12, k, params, 8, "coupled")
            assert text == plain_text(seed, 12, params, 8)


@pytest.mark.parametrize("name", ["plain", "penalties", "truncation", "everything"])
def test_coupled_drafts_are_accepted_more_often_than_the_most_likely_tokens(name: str) -> None:
    params = SamplingParams(**PARAMS[name])
    accepted = {
        how: sum(speculate(seed, 10, 3, params, 8, how)[1] for seed in range(250))
        for how in ("coupled", None)
    }
    assert accepted["coupled"] > 1.15 * accepted[None]


def test_after_its_transforms_a_greedy_request_is_drafted_better() -> None:
    params = SamplingParams(temperature=0, frequency_penalty=2.0)
    assert speculate(0, 40, 3, params, 8, "coupled")[1] > speculate(0, 40, 3, params, 8, None)[1]


# --- drafts with their distributions -----------------------------------------------------------------------


def plain_texts(length: int, params: SamplingParams, width: int) -> dict[Tokens, float]:
    """The exact distribution of texts of plain decoding."""
    found: dict[Tokens, float] = {}
    waiting: list[tuple[Tokens, float]] = [((), 1.0)]
    while waiting:
        tokens, weight = waiting.pop()
        if len(tokens) == length or ends(tokens, params):
            found[tokens] = weight
            continue
        probs = distribution(tokens, params, width)
        waiting += [((*tokens, t), weight * float(p)) for t, p in enumerate(probs) if p > 0]
    return found


def samples_are_rejected(
    method: Drafting, name: str, *, samples: int, length: int = 2, width: int = 12
) -> bool:
    """Whether texts of several steps of two drafts deviate from plain decoding."""
    params = SamplingParams(**PARAMS[name])
    seen: dict[Tokens, int] = defaultdict(int)
    for seed in range(samples):
        seen[speculate(seed, length, 2, params, width, method)[0]] += 1
    return chi_square_rejects(seen, plain_texts(length, params, width))


@pytest.mark.parametrize("method", ["token", "block"])
@pytest.mark.parametrize("name", ["plain", "everything"])
def test_texts_follow_the_target(name: str, method: Drafting) -> None:
    assert not samples_are_rejected(method, name, samples=3000)


@pytest.mark.slow
@pytest.mark.parametrize("method", ["token", "block"])
@pytest.mark.parametrize("name", ["plain", "penalties", "truncation", "everything"])
def test_many_texts_follow_the_target(name: str, method: Drafting) -> None:
    """With coupled drafts they are those of plain decoding, see above."""
    assert not samples_are_rejected(method, name, samples=12000)


def with_the_targets_number(seed: int, position: int, index: int) -> float:
    return uniform(seed, position + index)


class WithoutTransforms(DistributionChooser):
    """Says that its drafts were drawn from what the drafter predicts, before the transforms."""

    def _choose(self, logits: NDArray[np.float32], index: int) -> int:
        token = super()._choose(logits, index)
        self._rows[index] = np.exp(logits.astype(np.float64))
        return token


WRONG: dict[str, tuple[str, Any, str, Any]] = {
    "the residual is not subtracted": ("plain", verify, "_residual", lambda weight, p, q: p),
    "drafts are drawn with the target's number": (
        "plain",
        drafting,
        "draft_uniform",
        with_the_targets_number,
    ),
    "the distribution is another one": ("truncation", drafting, "DistributionChooser", WithoutTransforms),
}


@pytest.mark.parametrize("method", ["token", "block"])
@pytest.mark.parametrize("mistake", WRONG)
def test_mistakes_are_found_out(mistake: str, method: Drafting, monkeypatch: pytest.MonkeyPatch) -> None:
    name, module, attribute, replacement = WRONG[mistake]
    monkeypatch.setattr(module, attribute, replacement)
    assert samples_are_rejected(method, name, samples=3000)


def test_distributions_are_those_after_the_transforms() -> None:
    params = SamplingParams(**PARAMS["everything"])
    chooser = chooser_after((1, 2), params, 7, "token")
    rows, draft = [], ()
    for _ in range(20):
        rows.append(draft_logits((1, 2, *draft), 8))
        draft += (chooser(rows[-1]),)
    assert chooser.probabilities.shape == (20, 8)
    for i, row in enumerate(rows):
        keys: dict[str, Any] = {"eos_ids": EOS, "num_output": 2 + i}
        want = drafting.target_distribution(row, params, counts_of((1, 2, *draft[:i])), **keys)
        np.testing.assert_array_equal(chooser.probabilities[i], want)
    assert chooser_after((), params, 7, "block").probabilities.shape == (0, 0)


# --- what drafts count -------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["coupled", "token"])
def test_penalties_count_the_prompt_the_output_and_earlier_drafts(method: Drafting) -> None:
    """A penalty that forbids repetition: drafts are all different, and none is in the prompt or output."""
    params = SamplingParams(repetition_penalty=100, ignore_eos=True)
    row = np.full(10, -9.0, np.float32)
    for seed in range(50):
        chooser = chooser_after((3, 4), params, seed, method)
        drafts = [chooser(row) for _ in range(6)]
        assert sorted(drafts) == [0, 5, 6, 7, 8, 9]


def test_min_tokens_counts_earlier_drafts() -> None:
    params = SamplingParams(temperature=0, min_tokens=4)
    row = np.array([5, 1, 0], np.float32)  # the end is the most likely
    chooser = chooser_after((1, 2), params, 0, "coupled")
    assert [chooser(row) for _ in range(4)] == [1, 1, 0, 0]


@pytest.mark.parametrize("method", ["coupled", "token", "block"])
def test_counts_are_left_as_they_were(method: Drafting, monkeypatch: pytest.MonkeyPatch) -> None:
    params, counts = SamplingParams(frequency_penalty=1), counts_of((1, 2))
    keys: dict[str, Any] = {"seed": 0, "position": 5, "eos_ids": EOS, "num_output": 2, "method": method}
    chooser = chooser_for(params, counts, **keys)
    for _ in range(3):
        chooser(draft_logits((), 6))
        assert len(counts) == 2

    def interrupted(*_: Any, **__: Any) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr(drafting, "sample", interrupted)
    monkeypatch.setattr(drafting, "target_distribution", interrupted)
    with pytest.raises(KeyboardInterrupt):
        chooser(draft_logits((), 6))
    assert [counts.pop(), counts.pop()] == [2, 1]


# --- which chooser -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["coupled", "token", "block"])
def test_greedy_requests_have_no_distributions(method: Drafting) -> None:
    assert chooser_after((), SamplingParams(temperature=0), 0, method) is greedy
    assert chooser_after((1, 1), SamplingParams(temperature=0, min_tokens=2), 0, method) is greedy
    for more in ({"min_tokens": 2}, {"logit_bias": {1: 1}}, {"presence_penalty": 1}):
        chooser = chooser_after((), SamplingParams(temperature=0, **more), 0, method)
        assert isinstance(chooser, CoupledChooser)


def test_each_method_has_its_chooser() -> None:
    assert isinstance(chooser_after((), SamplingParams(), 0, "coupled"), CoupledChooser)
    assert isinstance(chooser_after((), SamplingParams(), 0, "token"), DistributionChooser)
    assert isinstance(chooser_after((), SamplingParams(), 0, "block"), DistributionChooser)
    with pytest.raises(ValueError, match="tree"):
        chooser_after((), SamplingParams(), 0, "tree")  # type: ignore[arg-type]


@pytest.mark.parametrize("method", ["coupled", "token", "block"])
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_a_drafter_that_is_broken_changes_no_text(method: Drafting, value: float) -> None:
    params, row = SamplingParams(), np.full(6, value, np.float32)
    chooser = chooser_after((), params, 0, method)
    draft = [chooser(row), chooser(draft_logits((), 6)), chooser(row)]
    assert all(0 <= token < 6 for token in draft)
    how: dict[str, Any] = {}
    if method != "coupled":
        how = {"probabilities": chooser.probabilities, "method": method}
    assert step((), draft, params, 6, 0, **how).tokens
