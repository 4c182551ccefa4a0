# SPDX-License-Identifier: Apache-2.0
"""Log-probabilities of the tokens that come out."""

from __future__ import annotations

import numpy as np
import pytest
from scipy.special import log_softmax

from nemo_build.runtime import Engine, Grammar, SamplingParams
from nemo_build.runtime import choice as choice_module
from nemo_build.runtime.request import Request
from nemo_build.runtime.sampling import NonFiniteLogitsError
from nemo_build.runtime.tokenizer import Tokenizer

WAYS = {
    "greedy": {"temperature": 0},
    "sampled": {"temperature": 1.1, "top_p": 0.9, "seed": 4},
    "penalties": {"temperature": 0, "frequency_penalty": 1.0, "logit_bias": {40: 5.0}},
    "grammar": {"temperature": 0, "grammar": Grammar("json_object")},
}


@pytest.fixture(scope="module")
def plain(demo_engine_directory) -> Engine:
    return Engine.load(demo_engine_directory, max_sequences=4)


@pytest.mark.parametrize("speculate", ["mtp", "dflash", "dspark", "ngram"])
def test_drafts_do_not_change_them(plain, demo_engine_directory, speculate):
    prompts = ["The list type", "def add(a, b):\n    return a"] * 2
    params = [SamplingParams(max_tokens=24, logprobs=i, **way) for i, way in enumerate(WAYS.values())]
    drafting = Engine.load(demo_engine_directory, max_sequences=4, speculate=speculate, draft_length=3)
    found = drafting.generate(prompts, params)
    assert [c.logprobs for c in found] == [c.logprobs for c in plain.generate(prompts, params)]
    assert sum(drafting.acceptance.accepted) > 0


@pytest.mark.parametrize("way", WAYS)
def test_each_token_has_one(plain, way):
    params = SamplingParams(max_tokens=12, logprobs=4, **WAYS[way])
    chunks = list(plain.stream("The list type", params))
    [completion] = plain.generate("The list type", params)
    assert completion.logprobs == tuple(c.logprobs for c in chunks)
    assert tuple(found.token for found in completion.logprobs) == completion.token_ids
    for found in completion.logprobs:
        values = [value for _, value in found.top]
        assert len(values) == 4
        assert values == sorted(values, reverse=True)
        assert found.logprob <= values[0] <= 0
        assert dict(found.top).get(found.token, found.logprob) == found.logprob
    if way == "greedy":
        assert all(found.top[0][0] == found.token for found in completion.logprobs)


def test_without_alternatives_and_without_any(plain):
    [none] = plain.generate("The list type", SamplingParams(max_tokens=3, temperature=0, logprobs=0))
    assert [found.top for found in none.logprobs] == [()] * 3
    [off] = plain.generate("The list type", SamplingParams(max_tokens=3, temperature=0))
    assert off.logprobs is None
    assert off.token_ids == none.token_ids


def request(**params) -> Request:
    from nemo_build.demo import CHECKPOINT

    table = Tokenizer.load(CHECKPOINT)
    return Request([1, 2], SamplingParams(**params), eos_ids=(2,), table=table, context=100)


def test_they_are_of_the_raw_logits():
    logits = np.random.default_rng(0).normal(size=(3, 3072), scale=3).astype(np.float32)
    asked = request(temperature=0.6, top_k=3, logit_bias={7: 9.0}, seed=1, logprobs=2)
    asked.choose(logits, None, [7, 7])
    expected = log_softmax(logits.astype(np.float64), axis=-1)
    assert asked.events
    for row, event in zip(expected, asked.events, strict=False):
        assert event.logprobs.logprob == pytest.approx(row[event.token], abs=1e-5)
        assert [token for token, _ in event.logprobs.top] == np.argsort(-row)[:2].tolist()


def test_the_short_way_stays_short(plain, monkeypatch):
    """Greedy requests compute nothing from logits but what they asked for."""

    def fail(*args, **options):
        raise AssertionError("not to be called")

    monkeypatch.setattr(choice_module, "verify", fail)
    assert plain.generate("a", SamplingParams(max_tokens=3, temperature=0, logprobs=1))[0].logprobs
    monkeypatch.setattr(choice_module, "logprobs", fail)
    assert plain.generate("a", SamplingParams(max_tokens=3, temperature=0))[0].logprobs is None


def test_unusable_logits_are_an_error_of_the_request():
    asked = request(temperature=0, logprobs=1)
    logits = np.zeros((1, 3072), np.float32)
    logits[0, 5] = np.nan
    asked.choose(logits, None)
    assert isinstance(asked.error, NonFiniteLogitsError)
    assert not asked.events
