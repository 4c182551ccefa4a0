# SPDX-License-Identifier: Apache-2.0
"""A Triton server on this machine, for development: the binary of the ``nvidia-pytriton`` wheel, without its wrapper.

It listens on the loopback address only. Version 2.51, which is in the wheel, can be ended by two malformed requests
that anybody may send (JSON nested a hundred thousand deep; a shape near 2^63), so it is not to be exposed; later
servers refuse these.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import BinaryIO, Self

from nemo_build.errors import UserError
from nemo_build.triton_repo.control import Control
from nemo_build.triton_repo.shared import leftovers

EXTRA = "triton"
"""The extra of this project that installs the server."""

_HOST = "127.0.0.1"
_BACKEND = ("libtriton_python.so", "triton_python_backend_utils.py")
_EXIT = 5
"""Seconds that a server lets its clients finish in."""

_GRACE = 15.0
"""Seconds for a server to end by itself."""

_REGION = "/dev/shm/triton_python_backend_shm_region_"
"""Memory that a server shares with the processes of its Python models; one that is killed leaves it behind."""


@dataclass(frozen=True)
class Ports:
    """Where a server listens."""

    http: int = 8000
    grpc: int = 8001
    metrics: int = 8002

    @classmethod
    def free(cls) -> Ports:
        """Ports that nobody listens on at the moment."""
        with ExitStack() as stack:
            sockets = [stack.enter_context(socket.socket()) for _ in range(3)]
            for s in sockets:
                s.bind((_HOST, 0))
            return cls(*(s.getsockname()[1] for s in sockets))


class TritonServer:
    """A server process and all that it has started.

    Args:
        repository: Its models.
        ports: Where it listens.
        models: Which of them it loads.
        log: Where its messages go; this process's standard error if there is none.
        arguments: Further arguments of the server.

    Attributes:
        ports: As given.

    Raises:
        UserError: The server is not installed for this Python.
    """

    def __init__(
        self,
        repository: Path,
        ports: Ports,
        *,
        models: Sequence[str] = ("*",),
        log: BinaryIO | None = None,
        arguments: Sequence[str] = (),
    ) -> None:
        self.ports = ports
        self._regions: set[Path] = set()
        package = _package()
        self._backends = Path(tempfile.mkdtemp(prefix="nemo-build-triton-"))
        try:
            stub = package / "python_backend_stubs" / f"{sys.version_info[0]}.{sys.version_info[1]}"
            (self._backends / "python").mkdir()
            for source in [
                *(package / "backends/python" / n for n in _BACKEND),
                stub / "triton_python_backend_stub",
            ]:
                (self._backends / "python" / source.name).symlink_to(source)
            for path in leftovers():
                path.unlink(missing_ok=True)
            command = [
                str(package / "bin/tritonserver"),
                f"--model-repository={repository.resolve()}",
                f"--backend-directory={self._backends}",
                f"--cache-directory={package / 'caches'}",
                "--disable-auto-complete-config",
                "--model-control-mode=explicit",
                *(f"--load-model={name}" for name in models),
                f"--exit-timeout-secs={_EXIT}",
                *(f"--{kind}-address={_HOST}" for kind in ("http", "grpc", "metrics")),
                f"--http-port={ports.http}",
                f"--grpc-port={ports.grpc}",
                f"--metrics-port={ports.metrics}",
                *arguments,
            ]
            # A session of its own, so that what it started can be ended with it: its stubs ignore SIGTERM.
            self.process = subprocess.Popen(
                command,
                env=_environment(package),
                stdin=subprocess.DEVNULL,
                stdout=log or sys.stderr,
                stderr=log or sys.stderr,
                start_new_session=True,
            )
        except BaseException:
            shutil.rmtree(self._backends, ignore_errors=True)
            raise

    def wait(self, seconds: float = 120.0) -> None:
        """Wait until all models are ready.

        Raises:
            UserError: The server has ended, or is not ready by then.
        """
        end = time.monotonic() + seconds
        while not self.ready():
            if not self.alive():
                raise UserError(
                    f"The server ended with exit code {self.process.returncode} before it was ready.",
                    hint="Its messages say which model failed to load.",
                )
            if time.monotonic() > end:
                raise UserError(f"The server is not ready after {seconds:.0f} seconds.")
            time.sleep(0.1)

    def ready(self) -> bool:
        """Whether the server says so."""
        return Control(f"{_HOST}:{self.ports.http}").ready()

    def alive(self) -> bool:
        """Whether it has not ended. What it has in memory by now is removed with it, even if it crashes."""
        self._regions |= _regions(self.process.pid)
        return self.process.poll() is None

    def stop(self) -> None:
        """End it, what it started, and what it left in memory."""
        if self.alive():
            self.process.send_signal(signal.SIGINT)
            with suppress(subprocess.TimeoutExpired):
                self.process.wait(_GRACE)
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        shutil.rmtree(self._backends, ignore_errors=True)
        for path in (*leftovers(), *self._regions):
            path.unlink(missing_ok=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()


def _regions(session: int) -> set[Path]:
    """What processes of a session share of the server's memory."""
    found = set()
    for process in Path("/proc").iterdir():
        with suppress(OSError, ValueError):  # it is no process, or has ended
            if os.getsid(int(process.name)) == session:
                lines = (process / "maps").read_text().splitlines()
                found |= {Path(line[line.index("/") :]) for line in lines if _REGION in line}
    return {path for path in found if path.exists()}


def _package() -> Path:
    """The server in the wheel. Raises UserError if it is not installed, or has no stub for this Python."""
    spec = importlib.util.find_spec("pytriton")
    folder = None if spec is None or spec.origin is None else Path(spec.origin).parent / "tritonserver"
    if folder is None or not (folder / "bin/tritonserver").is_file():
        raise UserError(
            "There is no Triton server for this Python.",
            hint=f"Install the one for development: pip install 'nemo-build[{EXTRA}]' (Linux on x86-64). "
            "In production, mount the repository in NVIDIA's container; docs/triton.md says how.",
        )
    version = f"{sys.version_info[0]}.{sys.version_info[1]}"
    if not (folder / "python_backend_stubs" / version).is_dir():
        have = ", ".join(sorted(p.name for p in (folder / "python_backend_stubs").iterdir()))
        raise UserError(
            f"The Triton server of nvidia-pytriton has no stub for Python {version}, but for {have}."
        )
    return folder


def _environment(package: Path) -> dict[str, str]:
    """This process's, with this Python the first, whose packages the models import."""
    libraries = package.parent.parent / "nvidia_pytriton.libs"
    return {
        **os.environ,
        "LD_LIBRARY_PATH": str(libraries),
        "PATH": f"{Path(sys.executable).parent}:{os.environ.get('PATH', '')}",
        "PYTHONUNBUFFERED": "1",
    }
