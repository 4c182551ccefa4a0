# SPDX-License-Identifier: Apache-2.0
"""What is known of an HTTP request when it is over: for its line in the log, its span and the counters."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from nemo_build.runtime.server.generation import Usage
from nemo_build.runtime.server.logs import RequestLine
from nemo_build.runtime.server.tracing import RequestSpan

__all__ = ["Record"]


@dataclass
class Record:
    """What is known of a request so far.

    Attributes:
        usage: Its tokens, if it generates any.
        finish: How each of its answers ended.
        first_token: Seconds until the first token.
        status: HTTP status of the answer.
        response_id: Of the answer.
        model: That answers.
        client_aborted: Whether the client went away.
        error: What kind of error it ended with.
        span: For traces.
    """

    usage: Usage | None = None
    finish: list[str] = field(default_factory=list)
    first_token: float | None = None
    status: int = 0
    response_id: str | None = None
    model: str | None = None
    client_aborted: bool = False
    error: str | None = None
    span: RequestSpan = field(default_factory=lambda: RequestSpan(None))
    _start: float = field(default_factory=time.perf_counter)

    def begin(self, response_id: str, model: str, usage: Usage) -> None:
        """Something is generated for it, which is counted in `usage`."""
        self.response_id, self.model, self.usage = response_id, model, usage

    def token(self) -> None:
        """A token has come."""
        if self.first_token is None:
            self.first_token = time.perf_counter() - self._start
            self.span.first_token()

    def close(self, route: str, count_error: Callable[[int], None]) -> None:
        """It is over: tell everybody.

        Args:
            route: Its path, as the server declares it.
            count_error: Told the status of an error.
        """
        if self.status >= 400 and not self.client_aborted:
            count_error(self.status)
        usage = self.usage
        tokens = (
            [None] * 5
            if usage is None
            else [usage.prompt, usage.cached, usage.completion, usage.reasoning, usage.accepted]
        )
        prompt, cached, completion, reasoning, accepted = tokens
        self.span.end(
            status=self.status,
            response_id=self.response_id,
            model=self.model,
            finish_reasons=self.finish,
            input_tokens=prompt,
            cached_tokens=cached,
            output_tokens=completion,
            reasoning_tokens=reasoning,
            accepted_draft_tokens=accepted,
            first_token_seconds=self.first_token,
            error=self.error,
        )
        RequestLine(
            route,
            self.status,
            prompt_tokens=prompt,
            cached_tokens=cached,
            completion_tokens=completion,
            reasoning_tokens=reasoning,
            accepted_draft_tokens=accepted,
            finish_reason=",".join(self.finish) or None,
            first_token_seconds=self.first_token,
            seconds=time.perf_counter() - self._start,
            client_aborted=self.client_aborted,
            error=self.error,
            trace_id=self.span.trace_id,
        ).write()
