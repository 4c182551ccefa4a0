# SPDX-License-Identifier: Apache-2.0
"""Logs: one line a request, as text or as JSON, and the lines of uvicorn in the same form.

What clients send is not in them: no text of prompts or answers, no headers, no query strings. Messages of exceptions
may quote it, so within a request they are left out, except those of errors that are made by us and tell of the engine.
"""

from __future__ import annotations

import json
import logging
import re
import secrets
import time
import traceback
from collections.abc import Iterator, Mapping
from contextvars import ContextVar
from dataclasses import asdict, dataclass
from typing import Any, Literal

from nemo_build.errors import RequestError, UserError

__all__ = ["FORMATS", "LogFormat", "RequestLine", "configuration", "request_id", "take_request_id"]

LogFormat = Literal["text", "json"]
FORMATS: tuple[LogFormat, ...] = ("text", "json")

request_id: ContextVar[str | None] = ContextVar("request_id", default=None)
"""Of the request that is served; every line that is written meanwhile has it."""

_QUIET = frozenset({"/health", "/ready", "/metrics"})
"""Routes that are asked all the time; they are logged if they fail."""

_REQUESTS = logging.getLogger("nemo_build.requests")
_ID = re.compile(r"[A-Za-z0-9._:/+=-]{1,128}")
_PLAIN = re.compile(r"[^\s\"=\\]+")


def take_request_id(given: str | None) -> str:
    """The id of a request: what its client calls it, or a new one if that is not fit to be written into a log."""
    if given is not None and _ID.fullmatch(given):
        return given
    return f"req-{secrets.token_hex(12)}"


@dataclass
class RequestLine:
    """What is logged of a request, when it is over.

    Attributes:
        route: Its path, as the server declares it.
        status: HTTP status of the answer.
        prompt_tokens: Tokens of the prompt; ``None``, here and below: it does not apply, and is left out.
        cached_tokens: How many of these came from the prefix cache.
        completion_tokens: Tokens generated, of all choices.
        reasoning_tokens: How many of these are reasoning.
        accepted_draft_tokens: How many of these were drafts.
        finish_reason: Why it ended; of several choices, each.
        first_token_seconds: Seconds until the first token.
        seconds: Seconds until the end.
        client_aborted: Whether the client went away.
        error: What kind of error was the answer.
        trace_id: Of the trace that it is part of.
    """

    route: str
    status: int
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    completion_tokens: int | None = None
    reasoning_tokens: int | None = None
    accepted_draft_tokens: int | None = None
    finish_reason: str | None = None
    first_token_seconds: float | None = None
    seconds: float | None = None
    client_aborted: bool = False
    error: str | None = None
    trace_id: str | None = None

    def write(self) -> None:
        """Log it: at level ERROR if the server is to blame."""
        level = logging.ERROR if self.status >= 500 else logging.INFO
        if self.route in _QUIET and level == logging.INFO:
            level = logging.DEBUG
        if _REQUESTS.isEnabledFor(level):
            fields = {key: value for key, value in asdict(self).items() if value is not None}
            _REQUESTS.log(level, "request", extra={"fields": fields})


def configuration(form: LogFormat, level: str = "INFO") -> dict[str, Any]:
    """For :func:`logging.config.dictConfig`, and for uvicorn's ``log_config``.

    uvicorn's own line for each request is off: it has the query string.

    Args:
        form: One of :data:`FORMATS`.
        level: Of what is written; never below INFO for others' loggers, which then write what clients send.
    """
    others = level if logging.getLevelNamesMapping()[level] > logging.INFO else "INFO"
    formatter = {"text": TextFormatter, "json": JsonFormatter}[form]
    return {
        "version": 1,
        "disable_existing_loggers": False,
        "formatters": {"line": {"()": formatter}},
        "handlers": {
            "stderr": {"class": "logging.StreamHandler", "formatter": "line", "stream": "ext://sys.stderr"}
        },
        "root": {"level": others if others != "INFO" else "WARNING", "handlers": ["stderr"]},
        "loggers": {
            "nemo_build": {"level": level, "propagate": True},
            "uvicorn": {"level": others, "propagate": True},  # which uvicorn's own configuration turns off
            "uvicorn.access": {"handlers": [], "propagate": False},
        },
    }


class JsonFormatter(logging.Formatter):
    """One JSON object a line: ``time``, ``level``, ``logger``, ``message``, ``request_id`` and fields of its own."""

    def format(self, record: logging.LogRecord) -> str:
        found: dict[str, Any] = {
            "time": _time(record),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if (identity := request_id.get()) is not None:
            found["request_id"] = identity
        found |= _fields(record)
        if record.exc_info and record.exc_info[1] is not None:
            found["exception"] = "\n".join(_exception(record.exc_info[1]))
        return json.dumps(found, default=str)


class TextFormatter(logging.Formatter):
    """One line for people: time, level, message, and fields as ``key=value``; exceptions below it, indented."""

    def format(self, record: logging.LogRecord) -> str:
        identity = request_id.get()
        fields = ({} if identity is None else {"id": identity}) | _fields(record)
        words = [_time(record), f"{record.levelname:<7}", _one_line(record.getMessage())]
        words += [f"{key}={_value(value)}" for key, value in fields.items()]
        lines = [" ".join(words)]
        if record.exc_info and record.exc_info[1] is not None:
            lines += [f"    {line}" for line in _exception(record.exc_info[1])]
        return "\n".join(lines)


def _fields(record: logging.LogRecord) -> dict[str, Any]:
    fields: Mapping[str, Any] = getattr(record, "fields", {})
    return {k: round(v, 6) if isinstance(v, float) else v for k, v in fields.items()}


def _time(record: logging.LogRecord) -> str:
    """When it happened: UTC, ISO 8601, to the millisecond."""
    return f"{time.strftime('%Y-%m-%dT%H:%M:%S', time.gmtime(record.created))}.{int(record.msecs):03d}Z"


def _value(value: object) -> str:
    """A value that ends where the next begins, whatever is in it."""
    if isinstance(value, bool):
        return "true" if value else "false"
    text = str(value)
    return text if text.isprintable() and _PLAIN.fullmatch(text) else json.dumps(text)


def _one_line(text: str) -> str:
    return "".join(char if char.isprintable() else json.dumps(char)[1:-1] for char in text)


def _exception(error: BaseException) -> Iterator[str]:
    """An exception and those it came from: where each was raised, its type, and its message if that may be shown."""
    cause = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    if cause is not None:
        yield from _exception(cause)
        yield "which led to:"
    for entry in traceback.format_tb(error.__traceback__):
        yield from entry.rstrip("\n").split("\n")
    name = f"{type(error).__module__}.{type(error).__qualname__}".removeprefix("builtins.")
    shown = request_id.get() is None or (isinstance(error, UserError) and not isinstance(error, RequestError))
    message = str(error) if shown else "(message left out: it may quote what the client sent)"
    first, *rest = f"{name}: {message}".splitlines()
    yield from (_one_line(line) for line in (first, *rest))
