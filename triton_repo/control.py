# SPDX-License-Identifier: Apache-2.0
"""A running server, through its HTTP interface: whether it works, and which models it has.

Nothing but the standard library is needed, so that a probe is quick.
"""

from __future__ import annotations

import http.client
import json
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from typing import Any

from nemo_build.errors import UserError
from nemo_build.triton_repo import BUSY, FRONT

_LOADING = 900.0
"""Seconds for a model to be loaded: a large engine's is reading its weights."""

_POLL = 0.1


_DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))
"""Asks servers themselves, whatever proxy the environment names: they are on this machine or beside it."""


class Control:
    """A server.

    Args:
        address: ``HOST:PORT`` of its HTTP interface, with ``http://`` in front or without.
    """

    def __init__(self, address: str) -> None:
        self._url = address.rstrip("/") if "://" in address else f"http://{address}"

    def ready(self) -> bool:
        """Whether it says so of itself; it does so of models whose process has died, too."""
        try:
            self._call("GET", "/v2/health/ready", None, 5)
        except UserError:
            return False
        return True

    def probe(self, seconds: float = 10.0) -> str | None:
        """Have it generate a token.

        A busy server is one that works: if the token is not there in time, that the request ends with a timeout shows
        that the scheduler makes steps.

        Args:
            seconds: For the whole of it.

        Returns:
            ``None`` if it works, or what does not.
        """
        body = {
            "text_input": ".",
            "max_tokens": 1,
            "temperature": 0,
            "timeout": max(seconds - 2, seconds / 2),
        }
        try:
            reply = self._call("POST", f"/v2/models/{FRONT}/generate", body, seconds)
        except _AnswerError as error:
            return None if error.message.startswith(BUSY) else str(error)
        except UserError as error:
            return str(error)
        return None if reply.get("finish_reason") else f"it answers {json.dumps(reply)}"

    def load(self, model: str) -> None:
        """Load a model. Raises UserError with the server's reason if it fails; it goes on with what it had."""
        self._call("POST", f"/v2/repository/models/{model}/load", {}, _LOADING)

    def unload(self, model: str) -> None:
        """Unload a model; what it was asked is answered first."""
        self._call("POST", f"/v2/repository/models/{model}/unload", {}, _LOADING)

    def reload(self, models: Sequence[str]) -> None:
        """Load models again, in this order, whether they work or not.

        Raises:
            UserError: One fails.
        """
        # Loading alone does nothing where no file of a model has changed.
        for name in reversed(models):
            self.unload(name)
        for name in models:
            self.load(name)

    def states(self, model: str) -> dict[int, str]:
        """The versions of a model that it has or had, and their states in Triton's words."""
        index = self._call("POST", "/v2/repository/index", {}, 30)
        return {
            int(entry["version"]): entry.get("state", "")
            for entry in index
            if entry["name"] == model and entry.get("version")
        }

    def wait_until_gone(self, model: str, versions: Sequence[int], seconds: float) -> bool:
        """Wait until versions of a model have answered all they were asked; returns whether they have."""
        end = time.monotonic() + seconds
        while any(self.states(model).get(v) in ("READY", "UNLOADING") for v in versions):
            if time.monotonic() > end:
                return False
            time.sleep(_POLL)
        return True

    def _call(self, method: str, path: str, body: Any, seconds: float) -> Any:
        """Raises UserError: there is no answer, or an error."""
        data = None if body is None else json.dumps(body).encode()
        try:
            request = urllib.request.Request(f"{self._url}{path}", data, method=method)
            with _DIRECT.open(request, timeout=seconds) as reply:
                content = reply.read()
                return json.loads(content) if content else {}
        except urllib.error.HTTPError as error:
            raise _AnswerError(f"{self._url}{path}", error.code, error.read()) from error
        except (OSError, http.client.HTTPException, ValueError) as error:
            raise UserError(f"{self._url} does not answer: {getattr(error, 'reason', error)}.") from error


class _AnswerError(UserError):
    """An error that the server answers with."""

    def __init__(self, url: str, status: int, content: bytes) -> None:
        try:
            self.message = str(json.loads(content)["error"])
        except (ValueError, KeyError, TypeError):
            self.message = content.decode("utf-8", "replace")
        super().__init__(f"{url} answers with status {status}: {self.message}")
