# SPDX-License-Identifier: Apache-2.0
"""A process that calls functions for this one, with an environment of its own, and that may die without harm.

Triton needs both: LLVM ends the process on code that it cannot compile, and whether functions are compiled or
interpreted is decided when they are defined, by an environment variable.
"""

from __future__ import annotations

import atexit
import importlib
import os
import pickle
import subprocess
import sys
import tempfile
import threading
import traceback
from collections.abc import Mapping
from typing import Any, BinaryIO


class WorkerDied(RuntimeError):
    """The process ended during a call; the text has the end of what it wrote."""


class WorkerFailed(RuntimeError):
    """The function raised; the text is its traceback."""


class Worker:
    """Calls functions in another process, which is started when it is first needed and again after it has died.

    Calls may come from several threads; they are made one after the other.
    """

    def __init__(self, environment: Mapping[str, str | None]) -> None:
        """``environment`` is set on top of this process's; None unsets a variable."""
        self._environment = environment
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        atexit.register(self.close)

    def call(self, function: str, *args: Any) -> Any:
        """Call ``module:name`` with arguments that can be pickled.

        Raises:
            WorkerDied: The process ended, for example because LLVM aborted it.
            WorkerFailed: The function raised an exception.
        """
        with self._lock:
            process = self._process if self._process and self._process.poll() is None else self._start()
            assert process.stdin
            assert process.stdout
            try:
                _send(process.stdin, (function, args))
                ok, result = pickle.load(process.stdout)
            except (EOFError, BrokenPipeError, pickle.UnpicklingError) as error:
                code = process.wait()
                self._log.seek(0)
                text = self._log.read().decode(errors="replace")[-2000:]
                raise WorkerDied(f"{function}: the process ended with {code}.\n{text}") from error
            except BaseException:
                process.kill()  # an interrupted call's reply must not become the next one's
                process.wait()
                raise
        if not ok:
            raise WorkerFailed(f"{function}\n{result}")
        return result

    def close(self) -> None:
        """End the process."""
        with self._lock:
            if self._process and self._process.stdin:
                self._process.stdin.close()
                self._process.wait()
            self._process = None

    def _start(self) -> subprocess.Popen[bytes]:
        environment = {**os.environ, **{k: v for k, v in self._environment.items() if v is not None}}
        for name in (k for k, v in self._environment.items() if v is None):
            environment.pop(name, None)
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 (as long as the process lives)
        command = [sys.executable, "-P", "-c", f"from {__name__} import serve; serve()"]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._log, env=environment
        )
        return self._process


def _send(stream: BinaryIO | Any, message: Any) -> None:
    pickle.dump(message, stream, protocol=pickle.HIGHEST_PROTOCOL)
    stream.flush()


def serve() -> None:
    """Answer calls until the other side closes the pipe. What the functions print goes to standard error."""
    requests, replies = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)
    while True:
        try:
            function, args = pickle.load(requests)
        except EOFError:
            return
        try:
            module, _, name = function.partition(":")
            reply = (True, getattr(importlib.import_module(module), name)(*args))
        except Exception:
            reply = (False, traceback.format_exc())
        _send(replies, reply)
