# SPDX-License-Identifier: Apache-2.0
"""The demo checkpoint served in every way at once: texts are those of plain decoding, token by token.

The kernels' results do not depend on the batch, so texts must be equal outright. A difference would be excused where
the target's two most likely tokens are nearly as likely; how many had to be is counted, and none may be.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from nemo_build.bundle import ENGINE_BUNDLE, read_manifest
from nemo_build.engines.build import BuildOptions, build_engine
from nemo_build.runtime import Engine, FinishReason, SamplingParams, Scheduling
from nemo_build.runtime.request import Request
from nemo_build.runtime.speculation.kinds import MOST_DRAFTS

TEXT = Path(__file__).read_text()
NEAR_TIE = 1e-4
"""Difference of the two largest logits below which the order of sums may decide between them."""

LONGEST = 40
"""Tokens of an answer."""

CONTEXT = 512


@dataclass(frozen=True)
class Question:
    """A prompt and what plain decoding answers, at temperature 0 and with a seed."""

    tokens: list[int]
    params: SamplingParams
    answer: tuple[int, ...]


@pytest.fixture(scope="module")
def plain(demo_engine_directory) -> Engine:
    return Engine.load(demo_engine_directory)


@pytest.fixture(scope="module")
def wide_demo_engine_directory(demo_engine_directory, tmp_path_factory) -> Path:
    """The same engine for sixteen sequences."""
    options = BuildOptions(max_sequences=16, max_context=512, activations="float32")
    out = tmp_path_factory.mktemp("wide") / "engine"
    return build_engine(demo_engine_directory.parent / "bundle", out, options=options).out


@pytest.fixture(scope="module")
def questions(plain) -> list[Question]:
    """Many have a beginning in common, as turns of a conversation do."""
    rng = np.random.default_rng(0)
    tokens = plain.tokenizer.encode(TEXT)
    prompts, params = [], []
    for i in range(48):
        start = 0 if i % 2 else int(rng.integers(0, 400))
        prompts.append(tokens[start : start + int(rng.integers(1, 300))])
        sampled = {"temperature": 0.8, "top_p": 0.9, "seed": i} if i % 3 == 0 else {"temperature": 0}
        params.append(SamplingParams(max_tokens=int(rng.integers(1, LONGEST)), **sampled))
    answers = plain.generate(prompts, params)
    return [Question(t, p, a.token_ids) for t, p, a in zip(prompts, params, answers, strict=True)]


def excuse(plain: Engine, question: Question, at: int) -> bool:
    """Whether the answer might as well have another token there."""
    logits: list[np.ndarray] = []
    step = plain.session.step

    def keep(batch: Any) -> Any:
        output = step(batch)
        logits.append(output.logits[-1].copy())
        return output

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plain.session, "step", keep)
        plain.generate(
            [[*question.tokens, *question.answer[:at]]], SamplingParams(max_tokens=1, temperature=0)
        )
    best = np.sort(logits[-1])[-2:]
    return bool(question.params.temperature == 0 and best[1] - best[0] < NEAR_TIE)


def load(directory: Path, speculator: str, rng: np.random.Generator, slots: int) -> Engine:
    """An engine of random options; memory for about three contexts in half of the cases."""
    length = None if rng.random() < 0.3 else int(rng.integers(1, MOST_DRAFTS + 1))
    options: dict[str, Any] = {
        "speculate": speculator,
        "draft_length": length,
        "prefix_cache": int(rng.choice([0, 1 << 20, 32 << 20])),
        "token_budget": int(rng.choice([33, 64, 512])),
    }
    if rng.random() < 0.5:
        plan = read_manifest(directory, ENGINE_BUNDLE)["plan"]
        sequence = (plan["state"] + plan["cache"] * CONTEXT // plan["context"]) // plan["slots"]
        options["memory"] = (
            plan["weights_memory"] + plan["activations"] + options["prefix_cache"] + 3 * sequence
        )
    return Engine.load(directory, max_sequences=slots, max_context=CONTEXT, **options)


def serve(engine: Engine, plain: Engine, questions: list[Question], seed: int, steps: int) -> int:
    """Ask at random and cancel some; returns how many differences were excused."""
    rng = np.random.default_rng(seed)
    live: list[tuple[Request, Question]] = []
    excused = asked = 0
    while asked < steps or live:
        asked += 1
        if asked < steps and rng.random() < 0.4 and len(live) < 2 * engine.session.slots:
            question = questions[int(rng.integers(len(questions)))]
            scheduling = Scheduling(
                priority=int(rng.integers(2)),
                salt=int(rng.integers(2)),
                prefill_chunk=int(rng.integers(1, 130)),
            )
            [request] = engine.requests([question.tokens], question.params, scheduling)
            engine.add([request])
            live.append((request, question))
        if live and rng.random() < 0.05:
            engine.cancel([live[int(rng.integers(len(live)))][0]])
        engine.step()
        for request, question in [x for x in live if x[0].finished]:
            live.remove((request, question))
            assert request.error is None
            want = list(question.answer)
            if request.finish_reason is FinishReason.CANCELLED:
                want = want[: len(request.output)]
            if request.output != want:
                at = next(i for i, (a, b) in enumerate(zip(request.output, want, strict=False)) if a != b)
                assert excuse(plain, question, at), f"token {at}: {request.output} is not {want}"
                excused += 1
    statistics = engine.statistics()
    assert (statistics.running, statistics.waiting) == (0, 0)
    assert statistics.free_slots == engine.session.slots
    return excused


@pytest.mark.parametrize("speculator", ["none", "mtp", "dflash", "dspark", "ngram"])
@pytest.mark.parametrize(
    ("slots", "steps"),
    [(1, 60), (4, 80), *(pytest.param(n, 1000, marks=pytest.mark.slow) for n in (1, 2, 4))],
)
def test_texts_are_those_of_plain_decoding(demo_engine_directory, plain, questions, speculator, slots, steps):
    engine = load(demo_engine_directory, speculator, np.random.default_rng([slots, steps]), slots)
    assert serve(engine, plain, questions, steps + slots, steps) == 0


@pytest.mark.slow
@pytest.mark.parametrize("speculator", ["none", "mtp", "dflash", "dspark", "ngram"])
@pytest.mark.parametrize("seed", range(3))
def test_sixteen_at_a_time(wide_demo_engine_directory, plain, questions, speculator, seed):
    engine = load(wide_demo_engine_directory, speculator, np.random.default_rng(seed), 16)
    assert serve(engine, plain, questions, seed, 400) == 0


@pytest.mark.parametrize("drafting", ["token", "block"])
@pytest.mark.parametrize("speculator", ["mtp", "dspark"])
def test_rejection_sampling_serves_and_stays_greedy_where_asked(
    demo_engine_directory, plain, questions, speculator, drafting
):
    engine = Engine.load(demo_engine_directory, speculate=speculator, draft_length=4, drafting=drafting)
    some = questions[:12]
    found = engine.generate([q.tokens for q in some], [q.params for q in some])
    for question, completion in zip(some, found, strict=True):
        if question.params.temperature == 0:
            assert completion.token_ids == question.answer
    sampled = [replace(q.params, temperature=1.0, top_p=1.0, seed=3) for q in some]
    again = engine.generate([q.tokens for q in some], sampled)
    assert again == engine.generate([q.tokens for q in some], sampled), "a seed gives one text"
    assert engine.acceptance.length > 1.2
