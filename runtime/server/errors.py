# SPDX-License-Identifier: Apache-2.0
"""Errors as OpenAI's clients know them: a status, and ``{"error": {message, type, param, code}}``."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Mapping, Sequence
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import Response

from nemo_build.errors import RequestError, UserError
from nemo_build.runtime.server.backend import BusyError

__all__ = ["ApiError", "JsonResponse", "as_api_error", "install"]

_log = logging.getLogger(__name__)

_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
    500: "server_error",
    503: "service_unavailable_error",
}
"""``type`` by status; all others are ``invalid_request_error``."""

_MOST_PROBLEMS = 8
"""Problems of a body that an answer lists."""

_MOST_CHARACTERS = 400
"""Of one problem, and of what says where it is."""

_PLACE = re.compile(r"(?:(?:[\w-]+|\[\d+\])\.?)+")

RETRY_SECONDS = 1
"""When who was refused for want of room may come again."""


class JsonResponse(Response):
    """A JSON answer, in ASCII: what it echoes may hold halves of surrogate pairs, which have no other form."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        return json.dumps(content, allow_nan=False, separators=(",", ":")).encode("ascii")


class ApiError(Exception):
    """An answer that is an error.

    Args:
        status: HTTP status.
        message: What is wrong, for people.
        param: The member of the body that is to blame.
        code: For programs.
        headers: Of the answer.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code
        self.headers = dict(headers or {})

    def body(self) -> dict[str, Any]:
        """The JSON of the answer."""
        kind = _TYPES.get(self.status, "invalid_request_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}

    def response(self) -> JsonResponse:
        """The answer."""
        return JsonResponse(self.body(), self.status, self.headers)


def busy() -> ApiError:
    """There is no room for a request."""
    return ApiError(
        429,
        "The server has as many requests as it can take. Send it again a little later.",
        code="queue_full",
        headers={"Retry-After": str(RETRY_SECONDS)},
    )


def unavailable(message: str) -> ApiError:
    """The server cannot answer at the moment."""
    return ApiError(503, message, code="unavailable", headers={"Retry-After": str(RETRY_SECONDS)})


def _cut(text: str) -> str:
    return text if len(text) <= _MOST_CHARACTERS else f"{text[:_MOST_CHARACTERS]} ..."


def _listed(problems: Sequence[str]) -> str:
    """Problems as one text: the first ones, each of a bounded length, for they may repeat what a client sent."""
    shown = [_cut(problem) for problem in problems[:_MOST_PROBLEMS]]
    more = len(problems) - len(shown)
    return "; ".join([*shown, f"and {more} more"] if more else shown)


def as_api_error(error: BaseException, param: str | None = None) -> ApiError:
    """What a client is told of an exception; what is no fault of the client's is logged.

    Args:
        error: The exception.
        param: The member of the body that is to blame, where the exception names none.
    """
    if isinstance(error, ApiError):
        return error
    if isinstance(error, RequestError):
        found = _PLACE.match(_cut(error.problems[0])) if error.problems else None
        place = found[0].rstrip(".") if found else ""
        named = place if re.search(r"[_.\[]", place) or place in _MEMBERS else param
        message = " ".join([_cut(error.headline), _listed(error.problems), error.hint]).strip()
        return ApiError(400, message, param=named, code="invalid_value")
    if isinstance(error, BusyError):
        return busy()
    if isinstance(error, ConnectionError | TimeoutError):
        _log.error("the backend cannot be reached: %s", error)
        return unavailable("What generates cannot be reached.")
    if isinstance(error, UserError):
        _log.error("%s", error)
        return ApiError(500, error.headline, code="engine_error")
    _log.error("unexpected error", exc_info=error)
    return ApiError(500, "The server met an unexpected error; its log has more.", code="internal_error")


_MEMBERS = frozenset({"messages", "tools", "stop", "seed", "temperature", "grammar", "thinking"})
"""Names at the beginning of a problem that are members of a body, though they look like words."""


def _path(location: Sequence[int | str]) -> str:
    """Where in a body something is, as OpenAI writes it. Names of alternatives of a union are left out."""
    parts = [part for part in location[1:] if isinstance(part, int) or part.isidentifier()]
    kept = [p for p in parts if p not in ("str", "int", "float", "bool", "list", "dict")]
    path = ""
    for part in kept:
        path += f"[{part}]" if isinstance(part, int) else f".{part}" if path else part
    return _cut(path)


def _of_validation(error: RequestValidationError) -> ApiError:
    problems: dict[str, list[str]] = {}
    for found in error.errors():
        if found["type"] == "json_invalid":
            return ApiError(400, f"The body is no valid JSON: {found['ctx']['error']}.", code="invalid_json")
        problems.setdefault(_path(found["loc"]), []).append(found["msg"])
    lines = [
        f"{place or 'the body'}: {' or: '.join(dict.fromkeys(messages))}"
        for place, messages in problems.items()
    ]
    return ApiError(400, _listed(lines), param=next(iter(problems)) or None, code="invalid_value")


def install(app: FastAPI) -> None:
    """Have all errors of an app answered in OpenAI's form."""

    def told(request: Request, error: ApiError) -> Response:
        request.state.record.error = error.code or "error"
        return error.response()

    def answer(request: Request, error: Exception) -> Response:
        return told(request, as_api_error(error))

    def of_http(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        if isinstance(error.__cause__, ApiError):  # FastAPI wraps what comes of reading a body
            return told(request, error.__cause__)
        messages = {
            404: f"There is nothing at {_cut(request.url.path)}.",
            405: f"{_cut(request.method)} is not allowed at {_cut(request.url.path)}.",
            400: "The body cannot be read: it is no valid JSON, or nested too deeply.",
        }
        message = messages.get(error.status_code, str(error.detail))
        return told(request, ApiError(error.status_code, message, headers=error.headers))

    def of_validation(request: Request, error: Exception) -> Response:
        assert isinstance(error, RequestValidationError)
        return told(request, _of_validation(error))

    app.add_exception_handler(ApiError, answer)
    app.add_exception_handler(UserError, answer)
    app.add_exception_handler(BusyError, answer)
    app.add_exception_handler(ConnectionError, answer)
    app.add_exception_handler(HTTPException, of_http)
    app.add_exception_handler(RequestValidationError, of_validation)
