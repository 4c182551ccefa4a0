# SPDX-License-Identifier: Apache-2.0
"""Speculation changes how fast a text comes, never the text; on the demo checkpoint."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from nemo_build.errors import RequestError
from nemo_build.runtime import Engine, SamplingParams, Scheduling
from nemo_build.runtime.speculation.acceptance import Acceptance
from nemo_build.runtime.speculation.kinds import MOST_DRAFTS, speculator_kind

TEXT = Path(__file__).read_text()
GREEDY = SamplingParams(max_tokens=48, temperature=0)


@pytest.fixture(scope="module")
def plain(demo_engine_directory) -> Engine:
    return Engine.load(demo_engine_directory)


def prompts_of(rng: np.random.Generator, count: int) -> list[str]:
    """Pieces of this file, of all lengths."""
    found = []
    for _ in range(count):
        start, length = int(rng.integers(0, len(TEXT) - 400)), int(rng.integers(1, 400))
        found.append(TEXT[start : start + length])
    return found


@pytest.mark.parametrize("name", ["mtp", "ngram"])
@pytest.mark.parametrize("drafts", [None, 1, 2, 4, 7, MOST_DRAFTS])
def test_greedy_text_is_that_of_plain_decoding(demo_engine_directory, plain, name, drafts):
    rng = np.random.default_rng(drafts or 0)
    prompts = prompts_of(rng, 7)
    engine = Engine.load(demo_engine_directory, speculate=name, draft_length=drafts)
    want = plain.generate(prompts, GREEDY)
    for chunk in (int(rng.integers(1, 40)), 256):
        assert engine.generate(prompts, GREEDY, scheduling=Scheduling(prefill_chunk=chunk)) == want
    assert drafts is None or engine.acceptance.steps > 0


@pytest.mark.parametrize("name", ["mtp", "ngram"])
def test_sampled_text_is_that_of_plain_decoding_for_the_same_seed(demo_engine_directory, plain, name):
    prompts = prompts_of(np.random.default_rng(0), 5)
    engine = Engine.load(demo_engine_directory, speculate=name, draft_length=5)
    params = [
        SamplingParams(max_tokens=40, temperature=0.9, seed=i, **more)
        for i, more in enumerate(
            [
                {},
                {"top_p": 0.8, "repetition_penalty": 1.2},
                {"top_k": 5, "frequency_penalty": 0.7},
                {"min_p": 0.1, "presence_penalty": 0.5, "logit_bias": {10: 2.0}},
                {"min_tokens": 30, "stop": ["\n"]},
            ]
        )
    ]
    assert engine.generate(prompts, params) == plain.generate(prompts, params)


def test_stops_and_limits_within_an_accepted_run(demo_engine_directory, plain):
    engine = Engine.load(demo_engine_directory, speculate="mtp", draft_length=7)
    text = plain.generate("import os\nimport", GREEDY)[0].text
    for params in (
        *(replace(GREEDY, max_tokens=n) for n in range(1, 12)),
        *(replace(GREEDY, stop=(text[i : i + 2],)) for i in range(2, 30, 3)),
    ):
        assert engine.generate("import os\nimport", params) == plain.generate("import os\nimport", params)


def test_a_context_that_is_full_ends_a_text_as_in_plain_decoding(demo_engine_directory):
    sizes = {"max_context": 64, "max_sequences": 2}
    plain = Engine.load(demo_engine_directory, **sizes)
    engine = Engine.load(demo_engine_directory, **sizes, speculate="mtp", draft_length=5)
    params = replace(GREEDY, max_tokens=200)
    for length in (1, 40, 58, 60, 62, 63, 64):
        tokens = plain.tokenizer.encode(TEXT)[:length]
        assert engine.generate([tokens], params) == plain.generate([tokens], params)


@pytest.mark.parametrize("rounds", [3, pytest.param(40, marks=pytest.mark.slow)])
def test_streams_that_come_and_go(demo_engine_directory, plain, rounds):
    """Requests are admitted while others run, and clients leave in between; nobody's text changes."""
    rng = np.random.default_rng(rounds)
    engine = Engine.load(demo_engine_directory, speculate="mtp", draft_length=4)
    for _ in range(rounds):
        prompts = prompts_of(rng, int(rng.integers(2, 9)))
        want = plain.generate(prompts, GREEDY)
        streams = {
            i: engine.stream(p, GREEDY, scheduling=Scheduling(prefill_chunk=int(rng.integers(1, 99))))
            for i, p in enumerate(prompts)
        }
        leaves = {i for i in streams if rng.random() < 0.3}
        texts = dict.fromkeys(streams, "")
        while streams:
            i = int(rng.choice(list(streams)))
            try:
                texts[i] += next(streams[i]).text
            except StopIteration:
                assert texts[i] == want[i].text
                del streams[i]
                continue
            if i in leaves and rng.random() < 0.2:
                streams.pop(i).close()
                assert want[i].text.startswith(texts[i])
    assert engine.statistics().free_slots == engine.session.slots


def test_mtp_is_worth_it(demo_engine_directory):
    engine = Engine.load(demo_engine_directory, speculate="mtp", draft_length=4)
    engine.generate(prompts_of(np.random.default_rng(1), 8), GREEDY)
    assert engine.acceptance.length > 2


def test_acceptance_is_counted_by_position():
    acceptance = Acceptance()
    acceptance.add(3, 2)
    acceptance.add(2, 0)
    assert (acceptance.steps, acceptance.drafted, acceptance.accepted) == (2, [2, 2, 1], [1, 1, 0])
    assert acceptance.length == 2.0


def test_what_cannot_be_is_refused(demo_engine_directory):
    with pytest.raises(RequestError, match="no speculator 'eagle'"):
        Engine.load(demo_engine_directory, speculate="eagle")
    with pytest.raises(RequestError, match="1 to 15"):
        Engine.load(demo_engine_directory, speculate="mtp", draft_length=16)
    with pytest.raises(RequestError, match="no graph mtp") as error:
        speculator_kind("mtp", 4, {"target": {}})
    assert "It can speculate with" in str(error.value)
