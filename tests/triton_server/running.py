# SPDX-License-Identifier: Apache-2.0
"""A server that runs, and ways to look at it and to hurt it."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nemo_build.triton_repo.control import Control
from nemo_build.triton_repo.server import Ports, TritonServer

GENERATE = "/v2/models/generate/generate"


@dataclass(frozen=True)
class Running:
    """A server, its repository, and the file of its messages."""

    repository: Path
    server: TritonServer
    control: Control
    log: Path

    @property
    def http(self) -> str:
        return f"http://127.0.0.1:{self.server.ports.http}"

    @property
    def grpc(self) -> str:
        return f"127.0.0.1:{self.server.ports.grpc}"

    def post(self, body: Any, path: str = GENERATE, timeout: float = 30) -> tuple[int, Any]:
        """Status and content of an answer; a body of bytes is sent as it is."""
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        try:
            with urllib.request.urlopen(f"{self.http}{path}", data, timeout=timeout) as reply:
                return reply.status, _content(reply.read())
        except urllib.error.HTTPError as error:
            return error.code, _content(error.read())

    def gauge(self, name: str) -> float:
        """A figure of the engine, of the newest version; -1 before there is one."""
        url = f"http://127.0.0.1:{self.server.ports.metrics}/metrics"
        with urllib.request.urlopen(url, timeout=10) as reply:
            found = re.findall(rf"^nemo_build_{name}{{.*}} (\S+)$", reply.read().decode(), re.M)
        return float(found[-1]) if found else -1.0

    def stubs(self, model: str) -> list[int]:
        """Processes of a model that live."""
        found = []
        for process in Path("/proc").iterdir():
            if not process.name.isdecimal():
                continue
            try:
                line = (process / "cmdline").read_bytes().split(b"\0")
            except OSError:
                continue
            if f"{self.repository.resolve()}/{model}/".encode() in b" ".join(line[:2]):
                found.append(int(process.name))
        return found

    def kill(self, model: str) -> None:
        """Kill the process of a model."""
        killed = self.stubs(model)
        assert killed, model
        for process in killed:
            os.kill(process, signal.SIGKILL)


def until(condition: Callable[[], bool], seconds: float = 20) -> None:
    """Wait for something to come true."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it does not come true"
        time.sleep(0.02)


def nemo_build(*arguments: str) -> subprocess.Popen[str]:
    """The command line in a process of its own."""
    code = "import sys; from nemo_build.cli import main; main(sys.argv[1:])"
    return subprocess.Popen(
        [sys.executable, "-c", code, *arguments], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def options_of(ports: Ports) -> list[str]:
    """Options of ``nemo-build triton --run``."""
    numbers = zip(("http", "grpc", "metrics"), (ports.http, ports.grpc, ports.metrics), strict=True)
    return [word for kind, port in numbers for word in (f"--{kind}-port", str(port))]


def children(process: int) -> list[int]:
    """Processes that a process has started."""
    return [int(p) for p in Path(f"/proc/{process}/task/{process}/children").read_text().split()]


def front_of(server: int) -> int:
    """The process of a server's ``generate``."""
    return next(p for p in children(server) if b"/generate/" in Path(f"/proc/{p}/cmdline").read_bytes())


def _content(data: bytes) -> Any:
    try:
        return json.loads(data)
    except ValueError:
        return data.decode("utf-8", "replace")
