# SPDX-License-Identifier: Apache-2.0
"""OpenTelemetry: a span for each request, by the semantic conventions for generative AI.

It needs the extra ``otel``, and an endpoint in OpenTelemetry's own variables; without either nothing happens. Spans go
to a collector by OTLP over HTTP. The SDK reads the variables itself: ``OTEL_EXPORTER_OTLP_*``, ``OTEL_SERVICE_NAME``,
``OTEL_RESOURCE_ATTRIBUTES``, ``OTEL_TRACES_SAMPLER``, ``OTEL_BSP_*``, ``OTEL_PROPAGATORS``, ``OTEL_SDK_DISABLED``.

A span is that of the server (kind SERVER); its parent is what the client's ``traceparent`` names. Texts of prompts,
answers and stop strings are not in it. The names of attributes are those of the conventions
(https://github.com/open-telemetry/semantic-conventions-genai), which are still in development.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from nemo_build import __version__, settings

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.trace import Span
    from opentelemetry.util.types import AttributeValue

__all__ = ["PROVIDER", "RequestSpan", "Tracing", "open_tracing"]

_LOGGER = logging.getLogger(__name__)

PROVIDER = "nemo_build"
"""Value of ``gen_ai.provider.name``."""


def open_tracing() -> Tracing:
    """What the environment asks for; it warns if that needs the extra ``otel``."""
    if not settings.traces():
        return Tracing()
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import SERVICE_NAME, SERVICE_VERSION, OTELResourceDetector, Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError as error:
        _LOGGER.warning("There are no traces, as %s is missing: pip install 'nemo-build[otel]'.", error.name)
        return Tracing()
    ours = Resource.create({SERVICE_NAME: "nemo-build", SERVICE_VERSION: __version__})
    provider = TracerProvider(resource=ours.merge(OTELResourceDetector().detect()))
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
    return Tracing(provider)


class Tracing:
    """Makes spans.

    Args:
        provider: Where they go; ``None``: there are none, and nothing else changes.
    """

    def __init__(self, provider: TracerProvider | None = None) -> None:
        self._provider = provider
        self._tracer = None if provider is None else provider.get_tracer("nemo_build", __version__)

    def request(
        self,
        operation: str,
        model: str,
        headers: Mapping[str, str],
        asked: Mapping[str, AttributeValue | None],
    ) -> RequestSpan:
        """The span of a request that has come.

        Args:
            operation: ``chat`` or ``text_completion``.
            model: The model it asks for.
            headers: Of HTTP, found by names in lower case.
            asked: What it asks for, by the names after ``gen_ai.request.``, for example ``temperature``; what is
                ``None`` is left out.
        """
        if self._tracer is None:
            return RequestSpan(None)
        from opentelemetry.propagate import extract
        from opentelemetry.trace import SpanKind

        attributes: dict[str, AttributeValue] = {
            "gen_ai.operation.name": operation,
            "gen_ai.provider.name": PROVIDER,
            "gen_ai.request.model": model,
        }
        attributes |= {f"gen_ai.request.{key}": value for key, value in asked.items() if value is not None}
        name, context = f"{operation} {model}", extract(headers)
        return RequestSpan(self._tracer.start_span(name, context, SpanKind.SERVER, attributes))

    def close(self) -> None:
        """Send what is left; waits for it."""
        if self._provider is not None:
            self._provider.shutdown()


class RequestSpan:
    """The span of one request.

    Args:
        span: OpenTelemetry's; ``None``: every method does nothing.
    """

    def __init__(self, span: Span | None) -> None:
        self._span = span

    @property
    def trace_id(self) -> str | None:
        """The trace it is part of, in hexadecimal; ``None`` without tracing."""
        return None if self._span is None else f"{self._span.get_span_context().trace_id:032x}"

    def first_token(self) -> None:
        """The first token has come."""
        if self._span is not None:
            self._span.add_event("first token")

    def end(
        self,
        *,
        status: int,
        response_id: str | None = None,
        model: str | None = None,
        finish_reasons: Sequence[str] = (),
        input_tokens: int | None = None,
        cached_tokens: int | None = None,
        output_tokens: int | None = None,
        reasoning_tokens: int | None = None,
        accepted_draft_tokens: int | None = None,
        first_token_seconds: float | None = None,
        error: str | None = None,
    ) -> None:
        """It is over. What is ``None`` is left out.

        Args:
            status: HTTP status of the answer.
            response_id: Of the answer.
            model: That answered.
            finish_reasons: One for each choice.
            input_tokens: Tokens of the prompt.
            cached_tokens: How many of these came from the prefix cache.
            output_tokens: Tokens generated, of all choices.
            reasoning_tokens: How many of these are reasoning.
            accepted_draft_tokens: How many of these were drafts.
            first_token_seconds: Seconds until the first token.
            error: What kind of error it ended with, for example ``timeout`` or the name of an exception's class.
        """
        if self._span is None:
            return
        found: dict[str, AttributeValue | None] = {
            "http.response.status_code": status,
            "gen_ai.response.id": response_id,
            "gen_ai.response.model": model,
            "gen_ai.response.finish_reasons": list(finish_reasons) or None,
            "gen_ai.response.time_to_first_chunk": first_token_seconds,
            "gen_ai.usage.input_tokens": input_tokens,
            "gen_ai.usage.cache_read.input_tokens": cached_tokens,
            "gen_ai.usage.output_tokens": output_tokens,
            "gen_ai.usage.reasoning.output_tokens": reasoning_tokens,
            "nemo.usage.accepted_draft_tokens": accepted_draft_tokens,
            "error.type": error,
        }
        self._span.set_attributes({key: value for key, value in found.items() if value is not None})
        if error is not None and not 400 <= status < 500:  # of which the client is the cause
            from opentelemetry.trace import Status, StatusCode

            self._span.set_status(Status(StatusCode.ERROR))
        self._span.end()
