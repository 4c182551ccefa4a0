# SPDX-License-Identifier: Apache-2.0
"""Several builds at a time, each in a process of its own; one that fails takes none of the others with it."""

from __future__ import annotations

import json
import queue
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Protocol

from nemo_build.engines.worker import BuildJob
from nemo_build.errors import UserError

_TAIL = 15  # last lines of a crashed build's log that are shown

Report = Callable[[BuildJob, dict[str, Any]], None]
"""Told of events: ``phase`` (``what``, ``total`` bytes), ``done`` (``bytes`` of it so far), ``log`` (``line``)."""


@dataclass(frozen=True)
class Outcome:
    """What came of a job: its result (``key``, ``cached``, ``plan``), or the error that ended it."""

    job: BuildJob
    result: dict[str, Any] | None
    error: UserError | None = None


class Runner(Protocol):
    """Where builds run."""

    def run(self, job: BuildJob, report: Report) -> dict[str, Any]:
        """Do a job and return its result. Raises UserError if it fails."""
        ...

    def stop(self) -> None:
        """End what is running; called from another thread."""
        ...


@dataclass
class LocalRunner:
    """Runs builds in processes on this machine."""

    _running: set[subprocess.Popen[str]] = field(default_factory=set)
    _stopped: bool = False

    def run(self, job: BuildJob, report: Report) -> dict[str, Any]:
        """Do a job in a process."""
        if self._stopped:
            raise UserError("The build was interrupted.")
        process = subprocess.Popen(
            [sys.executable, "-m", "nemo_build.engines.worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self._running.add(process)
        if self._stopped:  # meanwhile
            process.terminate()
        try:
            return _follow(process, job, report)
        finally:
            self._running.discard(process)

    def is_running(self) -> bool:
        """Whether a build is running."""
        return bool(self._running)

    def stop(self) -> None:
        """Ask all processes to end; each cleans up after itself."""
        self._stopped = True
        for process in list(self._running):
            process.terminate()


def fan_out(
    jobs: Sequence[BuildJob],
    runner: Runner,
    report: Report,
    *,
    needs: Callable[[BuildJob], int] = lambda job: 0,
    memory: int = 0,
    at_most: int | None = None,
) -> list[Outcome]:
    """Do jobs, as many at a time as there is room for; returns their outcomes in order.

    Args:
        jobs: What to do.
        runner: Where.
        report: Told of their events, in the caller's thread.
        needs: Bytes of memory that a job takes while it runs.
        memory: Bytes that all that run may take. A job that needs more than all of it runs alone.
        at_most: Jobs at a time.
    """
    happened: queue.SimpleQueue[tuple[BuildJob, dict[str, Any] | Outcome]] = queue.SimpleQueue()

    def run(job: BuildJob) -> None:
        try:
            result = runner.run(job, lambda job, event: happened.put((job, event)))
            happened.put((job, Outcome(job, result)))
        except UserError as error:
            happened.put((job, Outcome(job, None, error)))
        except Exception as error:  # a defect in one transport must not lose the other builds
            happened.put((job, Outcome(job, None, UserError(f"The build broke off: {error!r}."))))

    waiting, running, outcomes = deque(jobs), dict[str, int](), dict[str, Outcome]()
    threads: list[threading.Thread] = []
    try:
        while waiting or running:
            for job in _admitted(waiting, running, needs, memory, at_most):
                threads.append(threading.Thread(target=run, args=(job,), daemon=True))
                threads[-1].start()
            job, event = happened.get()
            if isinstance(event, Outcome):
                del running[job.name]
                outcomes[job.name] = event
            else:
                report(job, event)
    except BaseException:
        runner.stop()
        for thread in threads:  # each process removes what it has half written
            if thread.ident is not None:  # else the interruption came before it was started
                thread.join()
        raise
    return [outcomes[job.name] for job in jobs]


def require_all(outcomes: Iterable[Outcome]) -> None:
    """Raise UserError that lists all builds that failed, if any did."""
    outcomes = list(outcomes)
    failed = [o for o in outcomes if o.error is not None]
    if failed:
        raise UserError(
            f"{len(failed)} of {len(outcomes)} builds failed:",
            [f"{o.job.name}: {str(o.error).replace(chr(10), chr(10) + '    ')}" for o in failed],
        )


def _admitted(
    waiting: deque[BuildJob],
    running: dict[str, int],
    needs: Callable[[BuildJob], int],
    memory: int,
    at_most: int | None,
) -> list[BuildJob]:
    """Move the jobs that may start from `waiting` to `running`, in order."""
    started = []
    while waiting and (at_most is None or len(running) < at_most):
        need = needs(waiting[0])
        if running and need + sum(running.values()) > memory:
            break
        job = waiting.popleft()
        running[job.name] = need
        started.append(job)
    return started


def _follow(process: subprocess.Popen[str], job: BuildJob, report: Report) -> dict[str, Any]:
    """Pass a process's events and log on until it ends; returns the result."""
    assert process.stdin is not None, "all streams are pipes"
    assert process.stdout is not None, "all streams are pipes"
    assert process.stderr is not None, "all streams are pipes"
    tail: deque[str] = deque(maxlen=_TAIL)
    log = threading.Thread(target=_read_log, args=(process.stderr, tail, job, report), daemon=True)
    log.start()
    with suppress(BrokenPipeError), process.stdin as stdin:  # it ended at once; how is told by its exit
        stdin.write(json.dumps(job.to_json()))
    last: dict[str, Any] = {}
    for line in process.stdout:
        last = json.loads(line)
        if last["event"] in ("phase", "done"):
            report(job, last)
    status = process.wait()
    log.join()
    if last.get("event") == "result" and status == 0:
        return {name: last[name] for name in ("key", "cached", "plan")}
    if last.get("event") == "error":
        raise UserError(last["headline"], last["problems"], last["hint"])
    how = f"signal {-status}" if status < 0 else f"exit status {status}"
    raise UserError(f"The process of the build ended with {how}.", tail)


def _read_log(stream: Iterable[str], tail: deque[str], job: BuildJob, report: Report) -> None:
    for line in stream:
        tail.append(line.rstrip("\n"))
        report(job, {"event": "log", "line": line.rstrip("\n")})
