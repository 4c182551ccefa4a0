# SPDX-License-Identifier: Apache-2.0
"""Processes that die, and versions that change, under load."""

from __future__ import annotations

import os
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from nemo_build.errors import UserError
from nemo_build.runtime import SamplingParams
from nemo_build.runtime.opening import Options
from nemo_build.runtime.triton_client import TritonClient
from nemo_build.triton_repo.control import Control
from nemo_build.triton_repo.render import add_version
from nemo_build.triton_repo.server import Ports
from nemo_build.triton_repo.supervisor import reload

from .running import Running, children, front_of, nemo_build, options_of, until

PROMPTS = [f"def f{i}(" for i in range(8)]
PARAMS = SamplingParams(max_tokens=120, temperature=0, ignore_eos=True)


@pytest.fixture(scope="module")
def texts(plain) -> list[str]:
    return [a.text for a in plain.generate(PROMPTS, PARAMS)]


def shared() -> set[str]:
    return {p.name for p in Path("/dev/shm").iterdir()}


def alive(process: int) -> bool:
    try:
        return "State:\tZ" not in Path(f"/proc/{process}/status").read_text()
    except OSError:
        return False


def test_dead_models_of_a_step_are_repaired_and_no_request_is_lost(serve, texts):
    before = shared()
    with serve(speculate="mtp") as running:
        client = TritonClient(running.grpc)
        client.generate("import", SamplingParams(max_tokens=1))
        for victim in ("verify", "draft_mtp", "accept", "verify"):
            with ThreadPoolExecutor(8) as pool:
                asked = [pool.submit(client.generate, p, PARAMS, timeout=60) for p in PROMPTS]
                until(lambda: running.gauge("requests_running") == 4)
                running.kill(victim)
                assert [a.result(60).text for a in asked] == texts, victim
        assert running.gauge("requests_failed") == 0
        models = ("generate", "verify", "draft_mtp", "accept")
        until(lambda: all(len(running.stubs(m)) == 1 for m in models))  # those before end by themselves
        group = [p for m in models for p in running.stubs(m)]
    assert shared() <= before
    assert not any(map(alive, group))


def test_a_dead_front_is_told_from_a_live_one(serve):
    with serve() as running:
        assert running.control.probe(5) is None
        assert probe(running) == 0
        running.kill("generate")
        assert running.control.ready(), "which is why there is a probe"
        problem = running.control.probe(5)
        assert problem is not None
        assert "not healthy" in problem
        assert probe(running) == 1
        running.control.reload(["plain_step", "generate"])
        assert running.control.probe(10) is None


def probe(running: Running) -> int:
    return nemo_build("triton", "--probe", f"127.0.0.1:{running.server.ports.http}").wait(30)


def test_a_server_is_run_repaired_and_ended(demo_engine_directory, tmp_path):
    before = shared()
    ports = Ports.free()
    out = str(tmp_path / "repository")
    options = ["--speculate", "ngram", "--threads", "1", "--run", "-o", out, *options_of(ports)]
    process = nemo_build("triton", str(demo_engine_directory), *options)
    assert process.stdout is not None
    said: list[str] = []
    reader = threading.Thread(target=said.extend, args=(iter(process.stdout.readline, ""),))
    reader.start()
    control = Control(f"127.0.0.1:{ports.http}")
    try:
        until(lambda: control.probe(5) is None, 60)
        [server] = children(process.pid)
        stubs = children(server)
        os.kill(front_of(server), signal.SIGKILL)
        until(lambda: any("it answers again" in line for line in said), 40)
        assert control.probe(5) is None
        os.kill(server, signal.SIGKILL)
        until(lambda: any("the server is started again" in line for line in said), 40)
        until(lambda: control.probe(5) is None, 60)
    finally:
        process.send_signal(signal.SIGINT)
        code = process.wait(40)
        reader.join(10)
    assert code == 130, "".join(said)
    assert not any(map(alive, (server, *stubs)))
    assert shared() <= before


def test_a_new_version_is_loaded_under_load_and_no_request_is_lost(serve, demo_engine_directory, texts):
    with serve(speculate="mtp") as running:
        client = TritonClient(running.grpc)
        stop = threading.Event()

        def ask(i: int) -> list[str]:
            found = []
            while not stop.is_set():
                found.append(client.generate(PROMPTS[i], PARAMS, timeout=60).text)
            return found

        with ThreadPoolExecutor(8) as pool:
            asked = [pool.submit(ask, i) for i in range(8)]
            try:
                until(lambda: running.gauge("requests_running") == 4)
                rendered = add_version(
                    demo_engine_directory, running.repository, Options(speculate="ngram", threads=1)
                )
                assert rendered.version == 2
                said: list[str] = []
                assert reload(running.repository, running.control, said.append) == 2
                time.sleep(0.5)
            finally:
                stop.set()
            for i, future in enumerate(asked):
                found = future.result(60)
                assert found
                assert set(found) == {texts[i]}
        assert running.control.states("generate")[2] == "READY"
        assert running.stubs("verify_v2")
        until(lambda: not (running.stubs("verify") or running.stubs("draft_mtp") or running.stubs("accept")))
        assert reload(running.repository, running.control, said.append) == 2
        assert "already" in said[-1]
        # One that cannot be loaded leaves the one before.
        add_version(demo_engine_directory, running.repository, Options(threads=1))
        (running.repository / "generate/3/model.py").write_text("raise RuntimeError('it is broken')")
        with pytest.raises(UserError, match="it is broken"):
            reload(running.repository, running.control, said.append)
        until(lambda: not running.stubs("verify_v3"))
        assert client.generate(PROMPTS[0], PARAMS).text == texts[0]
        (running.repository / "generate/3/settings.json").write_text("{}")
        with pytest.raises(UserError, match="damaged"):
            reload(running.repository, running.control, said.append)
