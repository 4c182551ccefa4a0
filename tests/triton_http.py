# SPDX-License-Identifier: Apache-2.0
"""A front behind HTTP as Triton has it, in this process: server-sent events of one model, and nothing else."""

from __future__ import annotations

import json
import queue
import select
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import numpy as np

from nemo_build.triton_repo.arrays import Tensors
from nemo_build.triton_repo.front import Front
from nemo_build.triton_repo.front_tensors import INPUTS

_DTYPES = {
    "STRING": np.object_,
    "INT32": np.int32,
    "FP32": np.float32,
    "UINT64": np.uint64,
    "BOOL": np.bool_,
}


def tensors_of(body: dict[str, Any]) -> dict[str, Any]:
    """The members of a request's body as tensors of one prompt."""
    kinds = {spec.name: _DTYPES[spec.type] for spec in INPUTS}
    found = {}
    for name, value in body.items():
        items = value if isinstance(value, list) else [value]
        items = [v.encode() if isinstance(v, str) else v for v in items]
        found[name] = np.array([items], kinds[name])
    return found


class HttpFront:
    """Serves a front on a port of its own. Use as a context manager.

    Args:
        front: The front.
        port: 0: one that is free.

    Attributes:
        dead: Whether it behaves like a server whose model's process has died.
    """

    def __init__(self, front: Front, port: int = 0) -> None:
        self.dead = False
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                if outer.dead:
                    self._refuse("Stub process 'generate_0_0' is not healthy.", 500)
                    return
                responder = _Responder(self.connection, lambda: outer.dead)
                front.submit(tensors_of(body), responder)
                is_first = True
                while (found := responder.answers.get()) is not None:
                    if "error" in found and is_first:
                        self._refuse(found["error"], 400)
                        return
                    if is_first:
                        self.send_response(200)
                        self.end_headers()
                    is_first = False
                    try:
                        self.wfile.write(f"data: {json.dumps(found)}\n\n".encode())
                    except OSError:
                        responder.gone = True
                        return

            def _refuse(self, message: str, status: int) -> None:
                self.send_response(status)
                self.end_headers()
                self.wfile.write(json.dumps({"error": message}).encode())

            def log_message(self, *arguments: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", port), Handler)
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True)

    @property
    def port(self) -> int:
        return self._server.server_port

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def __enter__(self) -> HttpFront:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()


class _Responder:
    """Hands responses to the thread that writes them; one of a dead process says nothing any more."""

    def __init__(self, connection: Any, is_dead: Callable[[], bool]) -> None:
        self.answers: queue.SimpleQueue[dict[str, Any] | None] = queue.SimpleQueue()
        self.gone = False
        self._connection, self._is_dead = connection, is_dead

    def send(self, outputs: Tensors, *, final: bool) -> None:
        if self._is_dead():
            return
        found = {}
        for name, array in outputs.items():
            values = [v.decode() if isinstance(v, bytes) else v for v in array.ravel().tolist()]
            found[name] = values[0] if len(values) == 1 else values
        self.answers.put(found)
        if final:
            self.answers.put(None)

    def fail(self, message: str, *, busy: bool = False) -> None:
        self.answers.put({"error": message})
        self.answers.put(None)

    def cancelled(self) -> bool:
        readable, _, _ = select.select([self._connection], [], [], 0)
        return self.gone or bool(readable)
