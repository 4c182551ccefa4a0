# SPDX-License-Identifier: Apache-2.0
"""A server on loopback, in a thread of this process or in one of its own."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx

from nemo_build.runtime.server.app import create_app
from nemo_build.runtime.server.backend import Backend
from nemo_build.runtime.server.context import Settings
from nemo_build.runtime.server.run import Server, listen, url_of


class Served:
    """A server in a thread.

    Attributes:
        url: Where it is.
        backend: What it generates with.
        server: The server.
        client: A client of it.
    """

    def __init__(self, backend: Backend, url: str, server: Server) -> None:
        self.url, self.backend, self.server = url, backend, server
        self.client = httpx.Client(base_url=url, timeout=60)

    def post(self, path: str, **body: Any) -> Any:
        """The JSON of an answer, which must be a good one."""
        answer = self.client.post(path, json=body)
        assert answer.status_code == 200, answer.text
        return answer.json()

    def refused(self, path: str, **body: Any) -> dict[str, Any]:
        """The error of an answer, which must have the status 400."""
        answer = self.client.post(path, json=body)
        assert answer.status_code == 400, answer.text
        return answer.json()["error"]

    def chunks(self, path: str, **body: Any) -> list[dict[str, Any]]:
        """The chunks of a stream, which must end as one does."""
        with self.client.stream("POST", path, json={**body, "stream": True}) as answer:
            answer.read()
        assert answer.status_code == 200, answer.text
        assert answer.headers["content-type"].startswith("text/event-stream")
        events = answer.text.split("\n\n")
        assert events[-2:] == ["data: [DONE]", ""]
        return [json.loads(event.removeprefix("data: ")) for event in events[:-2]]

    def idle(self, seconds: float = 10) -> bool:
        """Whether all slots become free."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            found = self.backend.statistics().scheduler
            if found.free_slots == self.backend.slots and not found.waiting:
                return True
            time.sleep(0.005)
        return False


@contextmanager
def served(backend: Backend, settings: Settings | None = None, **options: Any) -> Iterator[Served]:
    """A server in a thread, while the block runs."""
    ready = threading.Event()
    with listen("127.0.0.1", 0) as listening:
        server = Server(create_app(backend, settings), ready=ready.set, **{"drain_seconds": 5.0, **options})
        thread = threading.Thread(target=server.run, args=[[listening]], name="server")
        thread.start()
        try:
            assert ready.wait(30)
            yield Served(backend, url_of(listening), server)
        finally:
            server.stop()
            thread.join(30)
            assert not thread.is_alive()


@contextmanager
def process(engine: Path, *options: object, log: Path) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """``nemo-build serve`` in a process of its own that is ready, and its URL."""
    code = "from nemo_build.cli import main; main()"
    words = [sys.executable, "-c", code, "serve", str(engine), "--port", "0", *map(str, options)]
    environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
    with (
        log.open("w") as errors,
        subprocess.Popen(words, stdout=subprocess.PIPE, stderr=errors, text=True, env=environment) as running,
    ):
        try:
            assert running.stdout is not None
            line = running.stdout.readline()
            assert " is served at " in line, log.read_text()
            yield running, line.split(" is served at ")[1].split()[0]
        finally:
            if running.poll() is None:
                running.send_signal(signal.SIGKILL)
