# SPDX-License-Identifier: Apache-2.0
"""Steps that are taken by models with nothing but tensors between them: texts are those of the engine itself."""

from __future__ import annotations

import gc
import itertools
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nemo_build.errors import PlanError, RequestError, UserError
from nemo_build.runtime import Engine, Grammar, SamplingParams, Scheduling, Thinking, TokenLogprobs, opening
from nemo_build.runtime.memory import SlotMemory
from nemo_build.runtime.opening import Options
from nemo_build.runtime.request import Request
from nemo_build.triton_repo import shared
from nemo_build.triton_repo.arrays import from_logprobs, from_rows, pack, to_logprobs, to_rows, unpack
from nemo_build.triton_repo.guides import Guides
from nemo_build.triton_repo.opening import Parts
from nemo_build.triton_repo.shared import leftovers, release, shared_arrays
from nemo_build.triton_repo.stages import chooser_of, describe

from .triton_models import LocalModels, StepsFailedError

SPECULATORS = ("none", "mtp", "dflash", "dspark", "ngram")
TEXT = Path(__file__).read_text()
KEYS = itertools.count()
SCHEMA = json.dumps(
    {
        "type": "object",
        "properties": {"name": {"type": "string", "maxLength": 6}, "n": {"type": "integer"}},
        "required": ["name", "n"],
        "additionalProperties": False,
    }
)


@pytest.fixture
def key():
    name = f"{os.getpid()}-test{next(KEYS)}"
    yield name
    release(name)


@pytest.fixture(scope="module")
def plain(demo_engine_directory) -> Engine:
    return Engine.load(demo_engine_directory)


@pytest.fixture(scope="module")
def questions(plain) -> list[tuple[list[int], SamplingParams]]:
    rng = np.random.default_rng(1)
    tokens = plain.tokenizer.encode(TEXT)
    ways = (
        {"temperature": 0},
        {"temperature": 0.9, "top_p": 0.9, "seed": 3, "logprobs": 3},
        {"temperature": 0, "repetition_penalty": 1.3, "min_tokens": 4, "logprobs": 0},
        {"temperature": 0.7, "seed": 2**64 - 1, "logit_bias": {7: -5.0}, "frequency_penalty": 0.4},
        {"temperature": 0, "grammar": Grammar("json_schema", SCHEMA), "logprobs": 1},
        {"temperature": 0.9, "seed": 4, "grammar": Grammar("regex", "[a-z]{3,9}(, [0-9]+){4}")},
        {
            "temperature": 0,
            "thinking": Thinking(4, grace=2),
            "grammar": Grammar("json_object", after_thinking=True),
        },
    )
    asked = []
    for i in range(14):
        start = 0 if i % 2 else int(rng.integers(0, 300))
        prompt = tokens[start : start + int(rng.integers(1, 600 if i == 5 else 200))]
        asked.append((prompt, SamplingParams(max_tokens=24, stop=["return"], **ways[i % len(ways)])))
    return asked


@pytest.fixture(scope="module")
def answers(plain, questions):
    return plain.generate([p for p, _ in questions], [s for _, s in questions])


def outputs(engine: Engine, questions) -> list[tuple]:
    found = engine.generate([p for p, _ in questions], [s for _, s in questions])
    return [(completion.token_ids, completion.logprobs) for completion in found]


@pytest.mark.parametrize("prefix_cache", [0, 8 << 20])
@pytest.mark.parametrize("length", [None, 3])
@pytest.mark.parametrize("speculator", SPECULATORS)
def test_texts_are_those_of_the_engine(
    demo_engine_directory, questions, answers, speculator, length, prefix_cache, key
):
    if speculator == "none":
        length = None
    options = Options(
        max_context=768,
        threads=1,
        speculate=speculator,
        draft_length=length,
        prefix_cache=prefix_cache,
        token_budget=96,
    )
    parts = Parts(demo_engine_directory, options, key)
    models = LocalModels(parts)
    engine = parts.engine(models)
    want = [(a.token_ids, a.logprobs) for a in answers]
    assert outputs(engine, questions) == want
    assert outputs(engine, questions[::-1]) == want[::-1]
    if prefix_cache:
        assert engine.cache_statistics().hits
    if length:
        assert sum(engine.acceptance.accepted) > 0
        assert f"spec_step_{speculator}" in models.calls
    steps = [c for c in models.calls if c.endswith("_step") or c.startswith("spec_step")]
    assert len(steps) >= engine.statistics().steps, "one request a part of a step"


@pytest.mark.parametrize("speculator", ["none", "mtp", "dspark"])
def test_a_dead_model_loses_no_request(demo_engine_directory, questions, answers, speculator, key):
    calls = itertools.count()

    def die(model: str) -> None:
        if next(calls) in (20, 60, 61):
            raise StepsFailedError(f"{model} is not healthy")

    options = Options(max_context=768, threads=1, speculate=speculator, token_budget=96)
    parts = Parts(demo_engine_directory, options, key)
    models = LocalModels(parts)
    engine = parts.engine(models)
    models._before = die
    assert outputs(engine, questions) == [(a.token_ids, a.logprobs) for a in answers]
    assert models.repairs >= 2
    statistics = engine.statistics()
    assert statistics.preemptions >= 1
    assert (statistics.running, statistics.free_slots) == (0, engine.session.slots)


def test_priorities_and_cancelling(demo_engine_directory, questions, answers, key):
    parts = Parts(
        demo_engine_directory,
        Options(max_sequences=1, max_context=768, threads=1, speculate="mtp", prefix_cache=8 << 20),
        key,
    )
    engine = parts.engine(LocalModels(parts))
    [low] = engine.requests([questions[1][0]], questions[1][1])
    [high] = engine.requests([questions[3][0]], questions[3][1], Scheduling(priority=5))
    [gone] = engine.requests([questions[0][0]], questions[0][1])
    engine.add([low, gone])
    for _ in range(4):
        engine.step()
    engine.add([high])
    engine.cancel([gone])
    while engine.unfinished:
        engine.step()
    assert low.output == list(answers[1].token_ids)
    assert high.output == list(answers[3].token_ids)
    assert gone.finished
    assert not gone.output
    assert engine.statistics().preemptions == 1


def test_unusable_logits_end_their_request_alone(demo_engine_directory, questions, answers, key):
    parts = Parts(demo_engine_directory, Options(max_context=768, threads=1), key)
    models = LocalModels(parts)
    engine = parts.engine(models)
    session = models._stages["verify"]._session
    step = session.step

    def spoil(batch):
        output = step(batch)
        for row, slot in enumerate(batch.slots.tolist()):
            if slot == 1 and len(output.logits) > row:
                output.logits[row] = np.nan
        return output

    session.step = spoil
    first, second = engine.requests(
        [q[0][:8] for q in questions[:2]], SamplingParams(max_tokens=5, temperature=0)
    )
    engine.add([first, second])
    while engine.unfinished:
        engine.step()
    broken, fine = (first, second) if first.error else (second, first)
    assert isinstance(broken.error, RuntimeError)
    assert fine.error is None
    assert len(fine.output) == 5


SHORT = SamplingParams(max_tokens=4, temperature=0, grammar=Grammar("regex", "[ab]{2,}"))


def test_every_process_knows_a_grammar_before_its_request_begins(demo_engine_directory, key):
    parts = Parts(demo_engine_directory, Options(max_context=768, threads=1, speculate="mtp"), key)
    models = LocalModels(parts)
    engine = parts.engine(models)
    models.calls.clear()
    engine.requests("x", SHORT)
    assert {*models.calls} == {"verify", "draft_mtp"}
    assert len(engine.generate("x", SHORT)[0].token_ids) == 4
    models.calls.clear()
    engine.requests("x", SamplingParams(thinking=Thinking(3)))
    assert not models.calls

    def fail(*_) -> None:
        raise RequestError("it takes too long")

    models._stages["draft_mtp"]._guides.guide = fail
    with pytest.raises(RequestError, match="it takes too long"):
        engine.requests("x", SHORT)

    def die(model: str) -> None:
        raise StepsFailedError(f"{model} is not healthy")

    models._before = die
    engine.requests("x", SHORT)
    assert not models.repairs, "the next step sees to it, as it has to begin again"


@pytest.mark.parametrize("speculator", ["mtp", "dflash", "ngram"])
def test_drafts_obey_grammars(demo_engine_directory, key, speculator):
    options = Options(max_context=768, threads=1, speculate=speculator, draft_length=3)
    parts = Parts(demo_engine_directory, options, key)
    engine = parts.engine(LocalModels(parts))
    text = "é漢🎈" * 4  # each byte is a token, so that there is one way to write it
    params = SamplingParams(max_tokens=90, temperature=0, grammar=Grammar("choice", json.dumps([text])))
    assert engine.generate("import", params)[0].text == text
    drafted, accepted = engine.acceptance.drafted, engine.acceptance.accepted
    assert sum(drafted) > 20
    assert accepted == drafted, "there was one choice only"


def test_a_grammar_that_gets_too_complex_ends_its_request_alone(demo_engine_directory, key, monkeypatch):
    parts = Parts(demo_engine_directory, Options(max_context=768, threads=1), key)
    models = LocalModels(parts)
    engine = parts.engine(models)
    [bad, fine] = engine.requests([[5, 6], [5, 6]], [SHORT, SamplingParams(max_tokens=4, temperature=0)])
    engine.add([bad, fine])
    engine.step()
    chooser = models._stages["verify"]._choosers[bad.slot]

    def refuse(*_) -> None:
        raise RequestError("too complex")

    monkeypatch.setattr(chooser, "choose", refuse)
    while engine.unfinished:
        engine.step()
    assert isinstance(bad.error, RequestError)
    assert fine.error is None
    assert len(fine.output) == 4


@given(st.lists(st.none() | st.tuples(st.integers(1, 4), st.integers(0, 3)), max_size=5), st.randoms())
def test_log_probabilities_survive(shapes, random):
    rows = [
        None
        if shape is None
        else [
            TokenLogprobs(
                random.randrange(2**20), -random.random(), tuple((i, -i / 3) for i in range(shape[1]))
            )
            for _ in range(shape[0])
        ]
        for shape in shapes
    ]
    tokens = [[p.token for p in row or ()] for row in rows]
    assert from_logprobs(to_logprobs(rows), tokens) == rows


def test_not_enough_memory_is_said(demo_engine_directory, key, monkeypatch):
    options = Options(memory=1)
    monkeypatch.setattr(opening, "_memory", lambda *_, **__: SlotMemory(1, 1, 1))
    with pytest.raises(PlanError, match="full context"):
        Parts(demo_engine_directory, options, key)
    monkeypatch.undo()
    monkeypatch.setattr(shared.os, "statvfs", lambda _: type("Fs", (), {"f_bavail": 1, "f_frsize": 4096}))
    with pytest.raises(UserError, match=r"has room for 0 MB.*take \d+ MB") as caught:
        Parts(demo_engine_directory, Options(), f"{key}-2")
    assert "--shm-size" in caught.value.hint
    release(f"{key}-2")


@given(st.lists(st.lists(st.integers(0, 2**31 - 1), max_size=5), max_size=5))
def test_rows_survive(rows):
    array = to_rows(rows)
    assert array.dtype == np.int32
    assert array.shape[0] == len(rows)
    assert array.shape[1] == 1 + max([0, *map(len, rows)])
    assert from_rows(array) == rows


def test_named_arrays_survive():
    arrays = {"hidden": np.arange(6, dtype=np.float32).reshape(2, 3), "b": np.zeros((0, 4), np.int64)}
    found = unpack(pack(arrays))
    assert found.keys() == arrays.keys()
    for name, array in arrays.items():
        assert found[name].dtype == array.dtype
        assert np.array_equal(found[name], array)
    assert unpack(pack({})) == {}


def test_a_request_described_elsewhere_chooses_the_same(plain):
    params = SamplingParams(
        temperature=0.8, seed=5, logit_bias={3: 2.0, 9: -1.0}, presence_penalty=0.5, stop=["x"]
    )
    [request] = plain.requests([[1, 2, 3]], params)
    request.take([5, 9], 0)
    assert isinstance(request, Request)
    logits = np.random.default_rng(0).normal(size=(1, plain.spec.vocab_size)).astype(np.float32)
    other = chooser_of(describe(request), Guides(lambda: plain.constraints))
    assert other.choose(logits, None) == request.chooser.choose(logits, None)
    assert other.length == 5


def test_shared_arrays_are_the_same_memory(tmp_path):
    layout = {"a": ((3, 5), "float32"), "b": ((7,), "float16")}
    first, second = (shared_arrays("1-x", layout, tmp_path) for _ in range(2))
    first["a"][1, 2] = 4
    first["b"][:] = 2
    assert second["a"][1, 2] == 4
    assert second["a"].sum() == 4
    assert (second["b"] == 2).all()
    shared_arrays("999999999-x", layout, tmp_path)
    assert [p.name for p in leftovers(tmp_path)] == ["nemo-build-999999999-x"]
    command = (
        "import sys, fcntl; file = open(sys.argv[1]); fcntl.flock(file, fcntl.LOCK_SH); "
        "print(flush=True); sys.stdin.read()"
    )
    path = tmp_path / "nemo-build-1-x"
    with subprocess.Popen(
        [sys.executable, "-c", command, path], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as other:
        other.stdout.readline()
        release("1-x", tmp_path)
        assert path.exists(), "another process uses it"
        other.stdin.close()
    del first, second
    gc.collect()
    shared_arrays("1-x", layout, tmp_path)
    release("1-x", tmp_path)
    assert not path.exists()
    release("1-x", tmp_path)


def test_a_file_of_somebody_else_is_not_taken(tmp_path):
    (tmp_path / "secret").write_text("kept")
    (tmp_path / "nemo-build-1-x").symlink_to(tmp_path / "secret")
    with pytest.raises(UserError, match="cannot be opened"):
        shared_arrays("1-x", {"a": ((3,), "float32")}, tmp_path)
    assert (tmp_path / "secret").read_text() == "kept"
