# SPDX-License-Identifier: Apache-2.0
"""Verification is exact: by enumeration of every path, and by samples.

Each check is also shown to reject verifiers that are wrong in the ways verifiers are.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from nemo_build.runtime.params import SamplingParams
from nemo_build.runtime.sampling import draw, target_distribution, uniform
from nemo_build.runtime.speculation import verify as module
from nemo_build.runtime.speculation.verify import draft_uniform, verify

from .toy_target import PROMPT, Tokens, chi_square_rejects, distribution, drafter, ends, step

# --- every path, exactly -----------------------------------------------------------------------------------


class Chooser:
    """Takes given choices, then the first possible one each time; remembers what else was possible."""

    def __init__(self, prefix: Tokens) -> None:
        self._prefix = prefix
        self.path: Tokens = ()
        self.options: list[list[int]] = []
        self.weight = 1.0

    def choose(self, probs: Any) -> int:
        options = [i for i, p in enumerate(probs) if p > 0]
        place = len(self.path)
        option = self._prefix[place] if place < len(self._prefix) else options[0]
        self.path += (option,)
        self.options.append(options)
        self.weight *= float(probs[option])
        return option


def enumerate_outcomes(run: Callable[[Chooser], Any]) -> dict[Any, float]:
    """The exact distribution of ``run``'s result over all choices."""
    outcomes: dict[Any, float] = defaultdict(float)
    waiting: list[Tokens] = [()]
    while waiting:
        prefix = waiting.pop()
        chooser = Chooser(prefix)
        outcomes[run(chooser)] += chooser.weight
        for place in range(len(prefix), len(chooser.path)):
            others = [o for o in chooser.options[place] if o != chooser.path[place]]
            waiting += [(*chooser.path[:place], other) for other in others]
    return outcomes


class Undecided:
    """A uniform number that is not drawn: a comparison with it is a choice."""

    def __init__(self, chooser: Chooser) -> None:
        self._chooser = chooser

    def __lt__(self, threshold: float) -> bool:
        below = min(max(threshold, 0.0), 1.0)
        return self._chooser.choose([below, 1 - below]) == 0


@contextmanager
def all_choices_by(chooser: Chooser) -> Iterator[None]:
    """Let ``chooser`` make every random choice of the module."""

    def choose_sample(logits: Any, params: Any, counts: Any, *, seed: int, position: int, **rest: Any) -> int:
        return chooser.choose(target_distribution(logits, params, counts, **rest))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "uniform", lambda *key: Undecided(chooser))
        patch.setattr(module, "draw", lambda probs, u: chooser.choose(probs / probs.sum()))
        patch.setattr(module, "sample", choose_sample)
        yield


def finish(tokens: Tokens, length: int, params: SamplingParams, width: int, chooser: Chooser) -> Tokens:
    """Go on with plain decoding up to ``length`` tokens."""
    while len(tokens) < length and not ends(tokens, params):
        tokens += (chooser.choose(distribution(tokens, params, width)),)
    return tokens[:length]


def make_draft(
    tokens: Tokens, k: int, width: int, pick: Callable[[int, NDArray[np.float64]], int]
) -> tuple[Tokens, NDArray[np.float64]]:
    draft: Tokens = ()
    rows = []
    for i in range(k):
        rows.append(drafter(tokens + draft, width))
        draft += (pick(i, rows[-1]),)
    return draft, np.array(rows)


def one_step_error(params: SamplingParams, how: str, k: int, width: int) -> float:
    """How far the texts of one speculative step, finished plainly, are from plain decoding at most."""

    def speculative(chooser: Chooser) -> Tokens:
        draft, probs = make_draft((), k, width, lambda _, q: chooser.choose(q))
        with all_choices_by(chooser):
            options = {} if how == "match" else {"probabilities": probs, "method": how}
            verdict = step((), draft, params, width, 0, **options)
        return finish(verdict.tokens, k + 1, params, width, chooser)

    plain = enumerate_outcomes(lambda chooser: finish((), k + 1, params, width, chooser))
    ours = enumerate_outcomes(speculative)
    assert sum(plain.values()) == pytest.approx(1, abs=1e-9)
    return max(abs(ours.get(t, 0.0) - plain.get(t, 0.0)) for t in {*ours, *plain})


PARAMS: dict[str, dict[str, Any]] = {
    "plain": {"ignore_eos": True},
    "end tokens": {"stop_token_ids": (2,)},
    "penalties": {"repetition_penalty": 1.8, "presence_penalty": 0.7, "frequency_penalty": 0.9},
    "truncation": {"temperature": 1.4, "top_k": 3, "top_p": 0.9, "min_p": 0.15},
    "everything": {"min_tokens": 2, "logit_bias": {1: 0.8}, "frequency_penalty": 1.0, "top_p": 0.95},
    "greedy": {"temperature": 0},
}


@pytest.mark.parametrize("how", ["match", "token", "block"])
@pytest.mark.parametrize("name", PARAMS)
def test_every_path_of_a_step(name: str, how: str) -> None:
    assert one_step_error(SamplingParams(**PARAMS[name]), how, k=2, width=4) < 1e-9


@pytest.mark.parametrize("how", ["match", "token", "block"])
def test_every_path_of_a_longer_draft(how: str) -> None:
    assert one_step_error(SamplingParams(ignore_eos=True, frequency_penalty=0.5), how, k=4, width=2) < 1e-9


@pytest.mark.slow
@pytest.mark.parametrize("how", ["match", "token", "block"])
@pytest.mark.parametrize("name", PARAMS)
def test_every_path_of_a_large_step(name: str, how: str) -> None:
    assert one_step_error(SamplingParams(**PARAMS[name]), how, k=3, width=3) < 1e-9


def accepted_of_the_papers_example(method: str) -> float:
    """Expected drafts accepted with p = (1/3, 2/3), q = (2/3, 1/3) at both positions."""
    rows = np.log(np.array([[1, 2]] * 3, dtype=np.float32))
    q = np.array([[2, 1]] * 2) / 3

    def run(chooser: Chooser) -> int:
        draft = [chooser.choose(row) for row in q]
        with all_choices_by(chooser):
            keys: dict[str, Any] = {"seed": 0, "position": 0, "eos_ids": (), "num_output": 0}
            return verify(
                rows, draft, SamplingParams(), None, probabilities=q, method=method, **keys
            ).accepted  # type: ignore[arg-type]

    return sum(n * weight for n, weight in enumerate_outcomes(run).items())


def test_accepted_drafts_as_published() -> None:
    """The example of arXiv 2403.10444, section 2: 10/9 token by token, 11/9 for the block."""
    assert accepted_of_the_papers_example("token") == pytest.approx(10 / 9, abs=1e-6)
    assert accepted_of_the_papers_example("block") == pytest.approx(11 / 9, abs=1e-6)


# --- samples -----------------------------------------------------------------------------------------------


def speculate(seed: int, length: int, k: int, params: SamplingParams, width: int, how: str) -> Tokens:
    """A text made by steps of k drafts."""
    tokens: Tokens = ()
    while len(tokens) < length:
        position = len(PROMPT) + len(tokens)
        draft, probs = make_draft(
            tokens, k, width, lambda i, q, at=position: draw(q, draft_uniform(seed, at, i))
        )
        options = {} if how == "match" else {"probabilities": probs, "method": how}
        verdict = step(tokens, draft, params, width, seed, **options)
        tokens += verdict.tokens
        if verdict.ended:
            break
    return tokens[:length]


def samples_are_rejected(how: str, name: str, *, samples: int, length: int = 3, width: int = 3) -> bool:
    """Whether texts of several steps of two drafts deviate from plain decoding."""
    params = SamplingParams(**PARAMS[name])
    plain = enumerate_outcomes(lambda chooser: finish((), length, params, width, chooser))
    counts: dict[Tokens, int] = defaultdict(int)
    for seed in range(samples):
        counts[speculate(seed, length, 2, params, width, how)] += 1
    return chi_square_rejects(counts, plain)


@pytest.mark.parametrize("how", ["match", "token", "block"])
@pytest.mark.parametrize("name", ["plain", "everything"])
def test_texts_follow_the_target(name: str, how: str) -> None:
    assert not samples_are_rejected(how, name, samples=2500)


@pytest.mark.slow
@pytest.mark.parametrize("how", ["match", "token", "block"])
@pytest.mark.parametrize("name", ["plain", "penalties", "truncation", "everything"])
def test_many_texts_follow_the_target(name: str, how: str) -> None:
    assert not samples_are_rejected(how, name, samples=12000)


# --- wrong verifiers ---------------------------------------------------------------------------------------


def block_that_stops_at_the_first_failure(
    target: Any, draft: list[int], proposals: Any, number: Callable[[int], float]
) -> Any:
    accepted, rest, weight = 0, None, 1.0
    for index, token in enumerate(draft):
        p, q = target.distribution(), proposals[index]
        excess = float(np.maximum(weight * p - q, 0).sum())
        if index and not number(index) < (excess / (excess + 1 - weight) if excess + 1 - weight > 0 else 1):
            return accepted, module._residual(*rest)  # type: ignore[misc]
        accepted, rest = index, (weight, p, q)
        weight = min(1.0, weight * p[token] / q[token])
        target.advance(token)
    if number(len(draft)) < weight:
        return len(draft), None
    return accepted, module._residual(*rest)  # type: ignore[misc]


WRONG: dict[str, tuple[str, str, Any]] = {
    "draws from p, not from the residual": ("token", "_residual", lambda weight, p, q: p),
    "stops at the first failure": ("block", "_accept_block", block_that_stops_at_the_first_failure),
    "takes drafts for uniformly drawn": (
        "token",
        "_proposal",
        lambda q, i, token: np.full(q.shape[1], 1 / q.shape[1]),
    ),
}


@pytest.mark.parametrize("mistake", WRONG)
def test_a_wrong_verifier_is_found_out(mistake: str, monkeypatch: pytest.MonkeyPatch) -> None:
    how, attribute, replacement = WRONG[mistake]
    monkeypatch.setattr(module, attribute, replacement)
    assert one_step_error(SamplingParams(ignore_eos=True), how, k=2, width=4) > 1e-3
    assert samples_are_rejected(how, "plain", samples=3000)


def test_a_residual_without_its_weight_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Too small a mistake for samples, not for enumeration."""
    monkeypatch.setattr(module, "_residual", lambda weight, p, q: np.maximum(p - q, 0) + 1e-12)
    assert one_step_error(SamplingParams(ignore_eos=True), "block", k=2, width=4) > 1e-3


@pytest.mark.parametrize("how", ["match", "token", "block"])
def test_penalties_without_the_drafts_are_found_out(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def advance(target: Any, token: int) -> None:
        target.row += 1

    monkeypatch.setattr(module._Target, "advance", advance)
    assert one_step_error(SamplingParams(**PARAMS["penalties"]), how, k=2, width=4) > 1e-3
    assert samples_are_rejected(how, "penalties", samples=2000)


# --- randomness --------------------------------------------------------------------------------------------


def number_by_position(seed: int, position: int, stream: int = 0) -> float:
    """Acceptance keyed by the token's position instead of by the step."""
    if 2**32 < stream < 2**33:
        position, stream = position + stream - 2**32 - 1, 2**32
    return uniform(seed, position, stream)


def has_repeated_numbers(how: str, number: Callable[..., float], monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether some uniform number is used twice in a text, by verification or by drafting."""
    numbers: list[float] = []

    def record(*key: int) -> float:
        numbers.append(number(*key))
        return numbers[-1]

    monkeypatch.setattr(module, "uniform", record)
    for seed in range(30):
        numbers.clear()
        speculate(seed, 20, 3, SamplingParams(ignore_eos=True), 3, how)
        if len(set(numbers)) < len(numbers):
            return True
    return False


@pytest.mark.parametrize("how", ["token", "block"])
def test_no_number_is_used_twice(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert not has_repeated_numbers(how, uniform, monkeypatch)


def test_numbers_keyed_by_token_are_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    assert has_repeated_numbers("block", number_by_position, monkeypatch)


@pytest.mark.slow
def test_numbers_keyed_by_token_give_another_distribution(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "uniform", number_by_position)
    assert samples_are_rejected("block", "plain", samples=30000)
