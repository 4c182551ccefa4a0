# SPDX-License-Identifier: Apache-2.0
"""Several builds at a time, on this machine and on a cluster."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace

import pytest
from click.testing import CliRunner

from nemo_build.bundle import ENGINE_BUNDLE
from nemo_build.cli import cli
from nemo_build.engines import remote
from nemo_build.engines.build import BuildOptions, build_engine
from nemo_build.engines.diff import diff
from nemo_build.engines.fanout import LocalRunner, Outcome, fan_out, require_all
from nemo_build.engines.targets import TARGETS, build_memory
from nemo_build.engines.worker import BuildJob
from nemo_build.errors import BundleError, UserError

OPTIONS = BuildOptions(max_sequences=2, max_context=64)


def job(name: str, bundle: object = "b", out: object = "o", target: str = "cpu", **more) -> BuildJob:
    return BuildJob(name, str(bundle), str(out), target, OPTIONS, **more)


class FakeRunner:
    """Runs nothing; notes which jobs run at the same time."""

    def __init__(self, *, fail: tuple[str, ...] = ()) -> None:
        self._fail = fail
        self._lock = threading.Lock()
        self._running: set[str] = set()
        self.together: set[frozenset[str]] = set()

    def run(self, job, report):
        with self._lock:
            self._running.add(job.name)
            self.together.add(frozenset(self._running))
        time.sleep(0.05)
        report(job, {"event": "log", "line": f"line of {job.name}"})
        with self._lock:
            self._running.discard(job.name)
        if job.name in self._fail:
            raise UserError(f"{job.name} is bad.", ["one problem"], "Mend it.")
        return {"key": job.name, "cached": False, "plan": {}}

    def stop(self):
        pass


def test_jobs_run_together_as_memory_allows():
    jobs = [job(name) for name in "abcd"]
    runner = FakeRunner()
    outcomes = fan_out(jobs, runner, lambda *_: None, needs=lambda job: 3, memory=7)
    assert [o.result["key"] for o in outcomes] == ["a", "b", "c", "d"]
    assert max(map(len, runner.together)) == 2
    alone = FakeRunner()
    fan_out(jobs, alone, lambda *_: None, needs=lambda job: 100, memory=7)
    assert max(map(len, alone.together)) == 1
    one = FakeRunner()
    fan_out(jobs, one, lambda *_: None, memory=7, at_most=1)
    assert max(map(len, one.together)) == 1


def test_failures_are_listed_together_and_lose_nothing():
    told = []
    jobs = [job(name) for name in "abcd"]
    outcomes = fan_out(jobs, FakeRunner(fail=("a", "c")), lambda job, event: told.append(event["line"]))
    assert [o.error is None for o in outcomes] == [False, True, False, True]
    assert sorted(told) == [f"line of {name}" for name in "abcd"]
    with pytest.raises(UserError, match="2 of 4 builds failed") as caught:
        require_all(outcomes)
    assert [p.split(":")[0] for p in caught.value.problems] == ["a", "c"]
    assert "one problem" in caught.value.problems[0]
    require_all([o for o in outcomes if o.error is None])


def test_what_a_build_takes():
    assert build_memory(TARGETS["cpu"], 10**12) == build_memory(TARGETS["cpu"], 0) > 0
    assert build_memory(TARGETS["rtx-50"], 10**12) > 10**12  # its compiler holds all weights


def test_jobs_travel_as_json():
    one = job("a", force=True)
    assert BuildJob.from_json(json.loads(json.dumps(one.to_json()))) == one


def test_processes_build_what_this_one_builds(tiny_bundle, tmp_path):
    build_engine(tiny_bundle, tmp_path / "here", options=OPTIONS, use_cache=False)
    jobs = [job(name, tiny_bundle, tmp_path / name, use_cache=False) for name in ("one", "two")]
    told = []
    outcomes = fan_out(jobs, LocalRunner(), lambda job, event: told.append((job.name, event)), at_most=2)
    require_all(outcomes)
    for name in ("one", "two"):
        assert diff(tmp_path / "here", tmp_path / name).equal
        mine = [event for who, event in told if who == name]
        total = next(e["total"] for e in mine if e["event"] == "phase" and e["what"] == "packing weights")
        assert [e["bytes"] for e in mine if e["event"] == "done"][-1] == total


def test_errors_of_processes_arrive_whole(tiny_bundle, tmp_path):
    jobs = [
        job("bad", tmp_path / "nothing", tmp_path / "a"),
        job("refused", tiny_bundle, tmp_path / "b", target="abacus"),
        job("good", tiny_bundle, tmp_path / "c"),
    ]
    outcomes = fan_out(jobs, LocalRunner(), lambda *_: None, at_most=2)
    assert "nemo-build export" in outcomes[0].error.hint
    assert "cpu: any CPU" in outcomes[1].error.problems
    assert outcomes[2].error is None
    assert [p.name for p in tmp_path.iterdir()] == ["c"]


def test_a_process_that_crashes(tiny_bundle, tmp_path, monkeypatch):
    """Its last words are shown; the others are not touched."""
    script = tmp_path / "crash"
    script.write_text("#!/bin/sh\necho last words >&2\nkill -SEGV $$\n")
    script.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(script))
    (outcome,) = fan_out([job("a", tiny_bundle, tmp_path / "e")], LocalRunner(), lambda *_: None)
    assert "signal 11" in outcome.error.headline
    assert outcome.error.problems == ("last words",)


def test_the_command_builds_what_it_can(tiny_bundle, tmp_path):
    sizes = ["--max-sequences", "2", "--max-context", "64"]
    command = ["build", str(tiny_bundle), "-o", str(tmp_path / "all"), "--target", "cpu,h100,b200", *sizes]
    done = CliRunner().invoke(cli, [*command, "--json"])
    engines = json.loads(done.stdout)["engines"]
    assert [e["error"] is None for e in engines] == [True, False, False]
    assert isinstance(done.exception, UserError)
    assert "2 of 3 builds failed" in str(done.exception)
    assert [p.name for p in (tmp_path / "all").iterdir()] == ["cpu"]
    assert (tmp_path / "all" / "cpu" / ENGINE_BUNDLE).is_file()
    unknown = CliRunner().invoke(cli, ["build", "b", "-o", "o", "--target", "cpu,abacus"])
    assert isinstance(unknown.exception, UserError)
    assert "abacus" in str(unknown.exception)


def test_an_interrupted_command_leaves_nothing(tiny_bundle, tmp_path):
    """Its processes end, and remove what they had begun."""
    code = f"""
import sys
from nemo_build.cli import main
from nemo_build.engines import fanout
run = fanout.LocalRunner.run
def slow(self, job, report):
    print("started", flush=True)
    return run(self, job, report)
fanout.LocalRunner.run = slow
main(["build", {str(tiny_bundle)!r}, "-o", {str(tmp_path / "all")!r}, "--target", "cpu,h100", "--no-cache"])
"""
    process = subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    process.stdout.readline()
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=60)
    assert process.returncode == 143
    assert not [p for p in tmp_path.rglob("*") if p.name.endswith(".partial")]


def test_an_interruption_before_all_builds_have_started(tiny_bundle, tmp_path, monkeypatch):
    """Nobody waits for a build that was never begun."""

    class Idle:
        stopped = threading.Event()

        def run(self, job, report):
            self.stopped.wait()
            raise UserError("The build was interrupted.")

        def stop(self):
            self.stopped.set()

    start, started = threading.Thread.start, []

    def interrupted(thread):
        if started:
            raise KeyboardInterrupt
        started.append(thread)
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", interrupted)
    jobs = [job(name, tiny_bundle, tmp_path / name) for name in "ab"]
    with pytest.raises(KeyboardInterrupt):
        fan_out(jobs, Idle(), lambda *_: None)
    assert not started[0].is_alive()


def test_an_address_that_is_none():
    with pytest.raises(UserError, match="ray://HOST:PORT"):
        remote.RayRunner("http://x")


def test_names_of_files_stay_inside_the_engine():
    for name in ("/etc/passwd", "../engine.json", "a/../../b"):
        with pytest.raises(BundleError, match="no file of an engine"):
            remote._relative(name)


def _free_port(below: int) -> int:
    """A port that is free, below those that Ray's workers take."""
    for port in range(below - 1, 1024, -1):
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
    raise AssertionError("no port is free")


def _connected(address: str) -> remote.RayRunner:
    """A connection to a cluster that was just started, when it answers."""
    for _ in range(40):
        with suppress(UserError):
            return remote.RayRunner(address)
        time.sleep(3)  # sooner, Ray may find the end of the last attempt
    raise AssertionError(f"no cluster answers at {address}")


@pytest.fixture(scope="module")
def cluster() -> Iterator[remote.RayRunner]:
    """A cluster of one node that builds for the CPU, one build at a time, and says so of one GPU."""
    pytest.importorskip("ray")
    port = _free_port(10_000)
    command = [sys.executable, "-m", "ray.scripts.scripts", "start", "--head", "--block"]
    command += ["--port", str(_free_port(port)), "--ray-client-server-port", str(port)]
    command += ["--num-cpus", "2", "--object-store-memory", "100000000", "--include-dashboard", "false"]
    command += ["--resources", '{"nemo_target_cpu": 1, "nemo_target_h100": 1}', "--disable-usage-stats"]
    patch = pytest.MonkeyPatch()
    patch.setenv(
        "RAY_AUTH_MODE", "disabled"
    )  # a token that some other cluster has left asks for one here too
    process = subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
    )
    try:
        with _connected(f"ray://127.0.0.1:{port}") as runner:
            yield runner
    finally:
        patch.undo()
        process.terminate()
        with suppress(subprocess.TimeoutExpired):
            process.wait(30)
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


@pytest.mark.slow
def test_a_cluster_builds_what_this_machine_builds(cluster, tiny_bundle, tmp_path):
    build_engine(tiny_bundle, tmp_path / "here", options=OPTIONS, use_cache=False)
    told = []
    jobs = [
        job("one", tiny_bundle, tmp_path / "one", use_cache=False),
        job("two", tiny_bundle, tmp_path / "two", use_cache=False),
        replace(
            job("refused", tiny_bundle, tmp_path / "refused", target="h100"),
            options=replace(OPTIONS, backend="abacus"),
        ),
        job("nowhere", tiny_bundle, tmp_path / "nowhere", target="b200"),
    ]
    outcomes = fan_out(jobs, cluster, lambda job, event: told.append((job.name, event)))
    by_name: dict[str, Outcome] = {o.job.name: o for o in outcomes}
    for name in ("one", "two"):
        assert by_name[name].error is None
        assert diff(tmp_path / "here", tmp_path / name).equal
        events = [event for who, event in told if who == name]
        assert any(e["event"] == "log" and e["line"].startswith("builds on ") for e in events)
        assert {"packing weights", "fetching"} <= {e["what"] for e in events if e["event"] == "phase"}
    assert "There is no backend 'abacus' for h100" in by_name["refused"].error.headline
    assert "nemo_target_b200" in by_name["nowhere"].error.headline
    assert by_name["nowhere"].error.problems == ("nemo_target_cpu: 1", "nemo_target_h100: 1")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["here", "one", "two"]


@pytest.mark.slow
def test_an_engine_that_arrives_damaged_is_refused(cluster, tiny_bundle, tmp_path, monkeypatch):
    real = remote.RayRunner._get

    def damaged(self, reference):
        found = real(self, reference)
        return found[:-1] + bytes([found[-1] ^ 1]) if isinstance(found, bytes) else found

    monkeypatch.setattr(remote.RayRunner, "_get", damaged)
    (outcome,) = fan_out([job("a", tiny_bundle, tmp_path / "a")], cluster, lambda *_: None)
    assert "damaged on its way" in outcome.error.headline
    assert list(tmp_path.iterdir()) == []
