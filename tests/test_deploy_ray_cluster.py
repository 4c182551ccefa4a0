# SPDX-License-Identifier: Apache-2.0
"""The Ray application on a cluster of this machine: two replicas, requests over HTTP, one killed, batches."""

from __future__ import annotations

import http.client
import json
import os
import random
import signal
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from nemo_build.errors import UserError
from nemo_build.runtime import Engine, SamplingParams

pytest.importorskip("ray.serve", reason="the extra `ray` is not installed")

import ray
from ray import serve

from nemo_build.deploy.ray_serve import batch
from nemo_build.deploy.ray_serve.application import REPLICAS, Settings, application

pytestmark = pytest.mark.slow

CACHE = 64 << 20
WAIT = 90.0
"""Seconds for what takes one or two."""


class Served:
    """The application, seen from outside."""

    def __init__(self, port: int) -> None:
        self.port = port

    def post(self, body: dict[str, Any]) -> http.client.HTTPResponse:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=WAIT)
        connection.request("POST", "/generate", json.dumps(body))
        return connection.getresponse()

    def ask(self, body: dict[str, Any]) -> dict[str, Any]:
        return json.loads(self.post(body).read())

    def events(self, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
        with self.post({**body, "stream": True}) as response:
            assert response.status == 200, response.read()
            for line in response:
                if line.startswith(b"data: "):
                    yield json.loads(line[6:])

    def statistics(self) -> dict[int, dict[str, Any]]:
        """Those of both replicas, by process."""
        handle, found = serve.get_deployment_handle(REPLICAS, "app"), {}
        end = time.monotonic() + WAIT
        while len(found) < 2:
            assert time.monotonic() < end, "there are not two replicas"
            one = handle.statistics.remote().result()
            found[one["process"]] = one
        return found

    def steps(self) -> int:
        return sum(s["scheduler"]["steps"] for s in self.statistics().values())

    def saved(self) -> int:
        return sum(s["prefix_cache"]["saved_tokens"] for s in self.statistics().values())


@pytest.fixture(scope="module")
def cluster():
    ray.init(
        address="local",
        num_cpus=2,
        object_store_memory=100_000_000,
        include_dashboard=False,
        log_to_driver=False,
    )
    yield
    serve.shutdown()
    ray.shutdown()


@pytest.fixture(scope="module")
def served(cluster, demo_engine_directory):
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    serve.start(http_options={"host": "127.0.0.1", "port": port})
    settings = Settings(
        engine=str(demo_engine_directory),
        min_replicas=2,
        max_replicas=2,
        cpus=0.5,
        max_sequences=4,
        max_waiting=28,
        threads=1,
        prefix_cache=CACHE,
        health_period=2,
    )
    serve.run(application(settings), name="app")
    served = Served(port)
    processes = set(served.statistics())
    yield served
    processes |= set(served.statistics())
    serve.delete("app")
    end = time.monotonic() + WAIT
    while any(Path(f"/proc/{p}").exists() for p in processes):
        assert time.monotonic() < end, "replicas are left"
        time.sleep(0.1)


@pytest.fixture(scope="module")
def engine(demo_engine_directory) -> Engine:
    return Engine.load(demo_engine_directory, threads=1, prefix_cache=CACHE)


def merged(engine: Engine, params: dict[str, Any]) -> SamplingParams:
    return replace(engine.default_params, **params)


def test_killing_a_replica_loses_no_request(served, engine):
    asked = [
        {
            "prompt": f"def function_{i}(argument):",
            "max_tokens": 250,
            "ignore_eos": True,
            "temperature": 0.8 * (i % 2),
            "seed": i,
        }
        for i in range(24)
    ]
    begun = threading.Semaphore(0)

    def read(body: dict[str, Any]) -> list[dict[str, Any]]:
        events = []
        for event in served.events(body):
            if not events:
                begun.release()
            events.append(event)
        return events

    with ThreadPoolExecutor(len(asked)) as pool:
        work = [pool.submit(read, body) for body in asked]
        for _ in range(4):
            assert begun.acquire(timeout=WAIT)
        victim, before = next(
            (p, s["scheduler"]) for p, s in served.statistics().items() if s["scheduler"]["running"]
        )
        os.kill(victim, signal.SIGKILL)
        answers = [w.result(timeout=WAIT) for w in work]
    assert before["running"] > 1, "it had begun some"
    assert before["waiting"] > 1, "and had not begun others"
    params = [merged(engine, {n: v for n, v in body.items() if n != "prompt"}) for body in asked]
    wanted = engine.generate([body["prompt"] for body in asked], params)
    assert [[e["token_id"] for e in events] for events in answers] == [list(w.token_ids) for w in wanted]
    assert ["".join(e["text"] for e in events) for events in answers] == [w.text for w in wanted]
    after = served.statistics()
    assert victim not in after, "Serve has replaced it"


def test_common_beginnings_meet_in_one_cache(served, demo_engine_directory):
    """Two replicas save as much as one engine that gets all requests."""
    source, rng = Path(__file__).read_text(), random.Random(3)
    prompts = [
        source[group * 300 : group * 300 + 900] + f"\n# {rng.random()}"
        for _ in range(5)
        for group in rng.sample(range(8), 8)
    ]
    before = served.saved()
    for prompt in prompts:
        assert served.ask({"prompt": prompt, "max_tokens": 4, "temperature": 0})["finish_reason"]
    saved = served.saved() - before
    alone = Engine.load(demo_engine_directory, threads=1, max_sequences=4, prefix_cache=CACHE)
    for prompt in prompts:
        alone.generate(prompt, SamplingParams(max_tokens=4, temperature=0))
    assert saved == alone.cache_statistics().saved_tokens > 2000
    both = [s["prefix_cache"]["hits"] for s in served.statistics().values()]
    assert min(both) > 0, "not all went to one"


def test_a_client_that_goes_frees_its_slot(served):
    before = served.steps()
    events = served.events({"prompt": "import", "max_tokens": 900, "ignore_eos": True})
    next(events)
    events.close()
    end = time.monotonic() + WAIT
    while any(s["scheduler"]["running"] for s in served.statistics().values()):
        assert time.monotonic() < end, "it still runs"
        time.sleep(0.05)
    assert served.steps() - before < 700, "it did not run to its end"


def test_errors_have_a_status(served):
    for body, status, message in (
        ({"prompt": "a", "max_tokens": 0}, 400, "max_tokens"),
        ({"prompt": [5] * 2000}, 400, "context"),
        ({"prompt": "a", "stream": True, "temperature": -1}, 400, "temperature"),
        ({"prompt": "a", "beams": 2}, 400, "unknown name"),
    ):
        response = served.post(body)
        assert response.status == status
        assert message in json.loads(response.read())["error"]


def test_batches(cluster, engine, demo_engine_directory, tmp_path, monkeypatch):
    """Texts are the engine's; what is interrupted goes on with the blocks that are missing."""
    rows = [{"prompt": f"class C{i}", "params": {"max_tokens": 10, "temperature": 0.7}} for i in range(22)]
    source, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text("".join(json.dumps(row) + "\n" for row in rows))
    how = {"actors": 2, "cpus": 0.25, "block": 4, "options": {"max_sequences": 4, "threads": 1}}

    def interrupted(*_: object) -> None:
        raise UserError("interrupted")

    with monkeypatch.context() as patch:
        patch.setattr(batch, "_join", interrupted)
        with pytest.raises(UserError, match="interrupted"):
            batch.run_batch(demo_engine_directory, source, out, **how)
    parts = sorted((tmp_path / ".out.jsonl.parts").glob("*.jsonl"))
    assert len(parts) == 6
    assert not out.exists()
    for path in parts[1:5:2]:
        path.unlink()
    kept = [path.stat().st_mtime_ns for path in parts if path.exists()]
    with monkeypatch.context() as patch:
        patch.setattr(batch.shutil, "rmtree", lambda _: None)
        assert batch.run_batch(demo_engine_directory, source, out, **how) == 2
    assert [p.stat().st_mtime_ns for p in parts if p not in parts[1:5:2]] == kept
    answers = [json.loads(line) for line in out.read_text().splitlines()]
    params = [merged(engine, row["params"] | {"seed": i}) for i, row in enumerate(rows)]
    wanted = engine.generate([row["prompt"] for row in rows], params)
    assert [a["text"] for a in answers] == [w.text for w in wanted]
    assert [{n: a[n] for n in ("prompt", "params")} for a in answers] == rows
