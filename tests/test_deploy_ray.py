# SPDX-License-Identifier: Apache-2.0
"""The parts of the Ray application, each without a cluster."""

from __future__ import annotations

import asyncio
import json
import random
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from nemo_build.errors import RequestError, UserError
from nemo_build.runtime import Engine, SamplingParams

pytest.importorskip("ray.serve", reason="the extra `ray` is not installed")

from ray.exceptions import ActorDiedError, RayActorError

from nemo_build.deploy.ray_serve import batch
from nemo_build.deploy.ray_serve.affinity import BLOCK, Affinity, block_keys
from nemo_build.deploy.ray_serve.application import Settings, application
from nemo_build.deploy.ray_serve.generation import Generation, LostError, gather
from nemo_build.deploy.ray_serve.ingress import parse
from nemo_build.deploy.ray_serve.replica import EngineReplica, with_params

# --- affinity ------------------------------------------------------------------------------------------------


def text(seed: int, length: int = 3 * BLOCK) -> str:
    return "".join(random.Random(seed).choices("abcdefgh ", k=length))


def test_keys_name_beginnings():
    a, b = text(1), text(2)
    assert len(block_keys(a)) == 3
    assert block_keys(a[: BLOCK - 1]) == ()
    assert block_keys(a + b)[:3] == block_keys(a)
    assert block_keys(b + a)[3:] != block_keys(a), "a block is named by all before it too"
    assert not set(block_keys(a)) & set(block_keys(a, "somebody"))
    tokens = list(range(BLOCK))
    assert len(block_keys(tokens)) == 4
    assert block_keys(tokens)[0] == block_keys(tokens[: BLOCK // 4])[0]


def test_routers_agree_and_spread():
    replicas = dict.fromkeys("abcd", 0)
    first = [Affinity(4).rank(block_keys(text(i)), replicas)[0] for i in range(400)]
    assert first == [Affinity(4).rank(block_keys(text(i)), replicas)[0] for i in range(400)]
    assert min(Counter(first).values()) > 60
    # One that goes moves only its own.
    rest = dict.fromkeys("abc", 0)
    after = [Affinity(4).rank(block_keys(text(i)), rest)[0] for i in range(400)]
    assert all(x == y for x, y in zip(first, after, strict=True) if x != "d")


def test_conversations_stay_where_they_are():
    """All begin alike, so the hash alone would send all of them to one replica."""
    affinity, common, places = Affinity(0), text(0), {}
    for i in range(8):
        keys = block_keys(common + text(i + 1))
        loads = Counter(places.values())
        places[i] = affinity.rank(keys, {r: loads[r] for r in "ab"})[0]
        affinity.note(keys, places[i])
    assert Counter(places.values()) == {"a": 4, "b": 4}
    for i in range(8):
        turn = block_keys(common + text(i + 1) + text(100 + i))
        assert affinity.rank(turn, {"a": 0, "b": 0})[0] == places[i]
    affinity.keep(["a"])
    moved = next(i for i, r in places.items() if r == "b")
    assert affinity._held(block_keys(common + text(moved + 1)), "b") == 0


def test_load_comes_before_affinity():
    affinity, keys = Affinity(2), block_keys(text(1))
    affinity.note(keys, "a")
    assert affinity.rank(keys, {"a": 2, "b": 0})[0] == "a"
    assert affinity.rank(keys, {"a": 3, "b": 0})[0] == "b"
    assert affinity.rank((), {"a": 1, "b": 0}) == ["b", "a"]


# --- retries -------------------------------------------------------------------------------------------------


class Replicas:
    """Stand-ins: each call takes the next script, a list of tokens, messages and errors."""

    def __init__(self, *scripts):
        self.scripts, self.calls = list(scripts), []

    async def _run(self, script):
        for i, step in enumerate(script):
            if isinstance(step, Exception):
                raise step
            if isinstance(step, dict):
                yield step
                continue
            end = "length" if i == len(script) - 1 else None
            yield {"text": f"<{step}>", "token_id": step, "finish_reason": end, "matched": None}

    def __call__(self, *arguments):
        self.calls.append(arguments)
        return self._run(self.scripts.pop(0))


def run(generation: Generation, replicas: Replicas, attempts: int = 3):
    return asyncio.run(gather(generation.stream(replicas, attempts)))


@pytest.mark.parametrize("died_after", range(4))
def test_another_replica_goes_on(died_after):
    replicas = Replicas([*range(died_after), ActorDiedError()], [], [0, 1, 2, 3])
    replicas.scripts[1] = [RayActorError()]
    answer = run(Generation("p", {"max_tokens": 4}), replicas)
    assert answer["token_ids"] == [0, 1, 2, 3]
    assert answer["text"] == "<0><1><2><3>"
    seeds = {call[2]["seed"] for call in replicas.calls}
    assert len(replicas.calls) == 3
    assert len(seeds) == 1, "the same seed, so the same text"


def test_a_different_text_is_never_spliced():
    replicas = Replicas([0, 1, ActorDiedError()], [0, 5, 2])
    with pytest.raises(LostError, match="differently"):
        run(Generation("p"), replicas)


def test_what_is_tried_and_what_is_not():
    with pytest.raises(LostError, match="None of 2 replicas") as caught:
        run(Generation("p"), Replicas([ActorDiedError()], [{"failed": "step failed"}]), attempts=2)
    assert len(caught.value.problems) == 2
    assert run(Generation("p"), Replicas([7, {"failed": "step failed"}], [7, 8]))["token_ids"] == [7, 8]
    replicas = Replicas([{"error": "too long"}], [0])
    with pytest.raises(RequestError, match="too long"):
        run(Generation("p"), replicas)
    assert len(replicas.calls) == 1
    assert run(Generation("p", {"seed": 5}), replicas)["token_ids"] == [0]
    assert replicas.calls[-1][2]["seed"] == 5
    replicas.scripts.append([0])
    run(Generation("p", {"seed": None}), replicas)
    assert replicas.calls[-1][2]["seed"] is not None


# --- requests ------------------------------------------------------------------------------------------------


def test_requests_are_taken_apart():
    body = {"prompt": "a", "max_tokens": 3, "stop": ["x"], "priority": 1, "salt": "s", "stream": True}
    generation, streams = parse(json.dumps(body).encode())
    assert streams
    params = {"max_tokens": 3, "stop": ["x"]}
    assert generation == Generation("a", params, "s", {"priority": 1})
    assert parse(b'{"prompt": [1, 2]}') == (Generation([1, 2]), False)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b"{", "no JSON"),
        (b"\xff", "no JSON"),
        (b"[" * 200_000, "no JSON"),
        (b"[1]", "with a prompt"),
        (b'{"prompt": 1}', "prompt is neither"),
        (b'{"prompt": [-1]}', "prompt is neither"),
        (b'{"prompt": [true]}', "prompt is neither"),
        (b'{"prompt": [4294967296]}', "prompt is neither"),
        (b'{"prompt": "a", "salt": 1, "stream": "no", "bad": 0}', "unknown name: bad"),
    ],
)
def test_requests_that_are_refused(body, message):
    with pytest.raises(RequestError, match=message):
        parse(body)


def test_the_file_for_serve_deploy():
    from ray.serve.schema import ServeDeploySchema

    path = Path(__file__).parent.parent / "deploy/ray_serve/serve.yaml"
    [described] = ServeDeploySchema.model_validate(yaml.safe_load(path.read_text())).applications
    assert described.import_path == f"{application.__module__}:{application.__name__}"
    Settings(**described.args)
    # As the command line gives them.
    assert Settings(engine="e", gpus="1", prefix_cache="1024") == Settings(
        engine="e", gpus=1, prefix_cache=1024
    )


def test_the_application_is_described_whole():
    application(Settings(engine="e", max_replicas=3, gpus=1, accelerator="H100"))
    with pytest.raises(ValueError, match="replica"):
        Settings(engine="e", replica=3)


# --- a replica -----------------------------------------------------------------------------------------------


async def opened(directory) -> EngineReplica:
    made = object.__new__(EngineReplica)
    await made.__init__(str(directory), {"max_sequences": 2, "threads": 1, "prefix_cache": 8 << 20}, 60)
    return made


async def closed(made: EngineReplica) -> None:
    await made._front.__aexit__(None, None, None)


def test_a_replica_generates_and_refuses(demo_engine_directory):
    async def ask():
        made = await opened(demo_engine_directory)
        call = made.stream
        texts = await asyncio.gather(
            *(
                gather(Generation(f"def f{i}", {"max_tokens": 12, "seed": i}).stream(call, 1))
                for i in range(5)
            )
        )
        errors = []
        for wrong in ({"max_tokens": 0}, {"max_tokens": "many"}, {"logit_bias": 1}):
            with pytest.raises(RequestError) as caught:
                await gather(Generation("a", wrong).stream(call, 1))
            errors.append(str(caught.value))
        with pytest.raises(RequestError, match="context"):
            await gather(Generation([5] * 5000).stream(call, 1))
        statistics = await made.statistics()
        await closed(made)
        return texts, errors, statistics

    texts, errors, statistics = asyncio.run(ask())
    engine = Engine.load(demo_engine_directory, threads=1)
    params = [replace(engine.default_params, max_tokens=12, seed=i) for i in range(5)]
    want = engine.generate([f"def f{i}" for i in range(5)], params)
    assert [t["text"] for t in texts] == [w.text for w in want]
    assert [t["token_ids"] for t in texts] == [list(w.token_ids) for w in want]
    assert [t["finish_reason"] for t in texts] == [w.finish_reason for w in want]
    assert all("max_tokens" in e or "logit_bias" in e for e in errors)
    assert statistics["scheduler"]["free_slots"] == 2


def test_parameters_of_a_json_object():
    defaults = SamplingParams(top_p=0.9)
    given = {"logit_bias": {"7": -5, "12": 1}, "stop": ["a"]}
    assert with_params(defaults, given) == SamplingParams(
        top_p=0.9, logit_bias={7: -5.0, 12: 1.0}, stop=("a",)
    )
    with pytest.raises(RequestError, match="no token id"):
        with_params(defaults, {"logit_bias": {"a": 1}})


def test_health_is_a_token(demo_engine_directory, monkeypatch):
    """An engine that steps is healthy without one; one that hangs, or fails, is not."""

    async def check():
        made = await opened(demo_engine_directory)
        tokens = []
        generate = made._front.generate

        async def counted(*args, **kwargs):
            done = await generate(*args, **kwargs)
            tokens.append(done)
            return done

        made._front.generate = counted
        await made.check_health()
        assert len(tokens) == 1, "idle: asked for a token"
        busy = asyncio.create_task(
            gather(Generation("a", {"max_tokens": 400, "ignore_eos": True}).stream(made.stream, 1))
        )
        while not made.engine.statistics().running:
            await asyncio.sleep(0.005)
        await asyncio.sleep(0.05)
        await made.check_health()
        assert len(tokens) == 1, "busy: its steps are enough"
        await busy
        made._patience = 0.2
        released = asyncio.Event()
        loop = asyncio.get_running_loop()
        monkeypatch.setattr(
            made.engine,
            "step",
            lambda *_, **__: asyncio.run_coroutine_threadsafe(released.wait(), loop).result(),
        )
        with pytest.raises(TimeoutError):
            await made.check_health()
        released.set()
        monkeypatch.undo()
        await closed(made)

    asyncio.run(check())


# --- batches -------------------------------------------------------------------------------------------------


def test_rows_of_a_batch(demo_engine_directory):
    engine = Engine.load(demo_engine_directory, threads=1)
    rows = [
        {"prompt": "import os", "id": "a"},
        {"id": "b"},
        {"prompt": "x", "params": {"max_tokens": 0}},
        {"prompt": "x", "params": 3},
        {"prompt": 7},
        {"prompt": "def f", "params": {"max_tokens": 3, "temperature": 0}},
    ]
    rows[0]["params"] = {"max_tokens": 5}
    answers = batch.complete(engine, rows, 10)
    assert ["error" in a for a in answers] == [False, True, True, True, True, False]
    seeded = replace(engine.default_params, max_tokens=5, seed=10)
    assert answers[0]["text"] == engine.generate("import os", seeded)[0].text
    assert len(answers[5]["token_ids"]) == 3


def test_batches_that_cannot_begin(demo_engine_directory, tmp_path):
    source, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text('{"prompt": "a"}\n[]\n{\n')
    with pytest.raises(UserError, match="cannot be used") as caught:
        batch.run_batch(demo_engine_directory, source, out)
    assert [p.split()[1].strip(":") for p in caught.value.problems] == ["2", "3"]
    source.write_text('{"prompt": "a"}\n')
    with pytest.raises(UserError, match=r"engine\.json"):
        batch.run_batch(tmp_path, source, out)
    assert [p.name for p in tmp_path.iterdir()] == ["in.jsonl"]
    out.touch()
    with pytest.raises(UserError, match="exists"):
        batch.run_batch(demo_engine_directory, source, out)


def test_blocks_of_other_work_are_not_used(demo_engine_directory, tmp_path):
    source = tmp_path / "in.jsonl"
    source.write_text('{"prompt": "a"}\n' * 5)
    parts = tmp_path / "parts"
    assert batch._begin(parts, demo_engine_directory, source, 2) == [0, 32, 64]
    assert batch._begin(parts, demo_engine_directory, source, 2) == [0, 32, 64]
    with pytest.raises(UserError, match="block size"):
        batch._begin(parts, demo_engine_directory, source, 3)
    source.write_text('{"prompt": "b"}\n' * 5)
    with pytest.raises(UserError, match="another input"):
        batch._begin(parts, demo_engine_directory, source, 2)
