# SPDX-License-Identifier: Apache-2.0
"""Spans of requests: in memory, and at a collector that listens on loopback."""

from __future__ import annotations

import gzip
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from nemo_build import settings
from nemo_build.runtime.server import tracing
from nemo_build.runtime.server.tracing import Tracing, open_tracing

VARIABLES = ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_TRACES_EXPORTER")
TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
HEADERS = {"traceparent": f"00-{TRACE}-{PARENT}-01"}


@pytest.fixture(autouse=True)
def no_variables(monkeypatch):
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def memory():
    """Tracing, and where its spans go."""
    pytest.importorskip("opentelemetry.sdk", reason="opentelemetry-sdk is not installed")
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    return Tracing(provider), exporter


def test_a_span(memory):
    from opentelemetry.trace import SpanKind, StatusCode

    tracer, exporter = memory
    asked = {"temperature": 0.5, "max_tokens": 64, "seed": None, "stream": True}
    span = tracer.request("chat", "lightning", HEADERS, asked)
    assert span.trace_id == TRACE
    span.first_token()
    assert exporter.get_finished_spans() == ()
    span.end(
        status=200,
        response_id="chatcmpl-1",
        model="lightning",
        finish_reasons=["stop", "length"],
        input_tokens=120,
        cached_tokens=0,
        output_tokens=40,
        reasoning_tokens=7,
        accepted_draft_tokens=21,
        first_token_seconds=0.25,
    )
    [found] = exporter.get_finished_spans()
    assert (found.name, found.kind) == ("chat lightning", SpanKind.SERVER)
    assert f"{found.context.trace_id:032x}" == TRACE
    assert f"{found.parent.span_id:016x}" == PARENT
    assert found.parent.is_remote
    assert found.status.status_code is StatusCode.UNSET
    assert [event.name for event in found.events] == ["first token"]
    assert dict(found.attributes) == {
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": "nemo_build",
        "gen_ai.request.model": "lightning",
        "gen_ai.request.temperature": 0.5,
        "gen_ai.request.max_tokens": 64,
        "gen_ai.request.stream": True,
        "http.response.status_code": 200,
        "gen_ai.response.id": "chatcmpl-1",
        "gen_ai.response.model": "lightning",
        "gen_ai.response.finish_reasons": ("stop", "length"),
        "gen_ai.response.time_to_first_chunk": 0.25,
        "gen_ai.usage.input_tokens": 120,
        "gen_ai.usage.cache_read.input_tokens": 0,
        "gen_ai.usage.output_tokens": 40,
        "gen_ai.usage.reasoning.output_tokens": 7,
        "nemo.usage.accepted_draft_tokens": 21,
    }


def test_names_are_those_of_the_conventions(memory):
    conventions = pytest.importorskip("opentelemetry.semconv._incubating.attributes.gen_ai_attributes")
    known = {value for name, value in vars(conventions).items() if name.startswith("GEN_AI_")}
    tracer, exporter = memory
    asked = dict.fromkeys(
        (
            "choice.count",
            "frequency_penalty",
            "max_tokens",
            "presence_penalty",
            "seed",
            "stream",
            "temperature",
        ),
        1,
    )
    tracer.request("chat", "m", {}, asked | {"top_k": 1, "top_p": 1}).end(
        status=200, response_id="x", model="m", finish_reasons=["stop"], input_tokens=1, cached_tokens=1,
        output_tokens=1, reasoning_tokens=1, first_token_seconds=1.0,
    )  # fmt: skip
    [found] = exporter.get_finished_spans()
    assert {name for name in found.attributes if name.startswith("gen_ai.")} <= known


@pytest.mark.parametrize(
    ("status", "is_failure"), [(200, True), (500, True), (503, True), (400, False), (429, False)]
)
def test_errors(memory, status, is_failure):
    from opentelemetry.trace import StatusCode

    tracer, exporter = memory
    tracer.request("chat", "lightning", {}, {}).end(status=status, error="timeout")
    [found] = exporter.get_finished_spans()
    assert found.attributes["error.type"] == "timeout"
    assert (found.status.status_code is StatusCode.ERROR) == is_failure


@pytest.mark.parametrize("header", ["", "00-zz-1-01", f"00-{'0' * 32}-{PARENT}-01", "x" * 5000])
def test_a_damaged_parent_is_none(memory, header):
    tracer, exporter = memory
    tracer.request("chat", "lightning", {"traceparent": header}, {}).end(status=200)
    [found] = exporter.get_finished_spans()
    assert found.parent is None


def test_who_is_not_sampled_stays_so(memory):
    tracer, exporter = memory
    tracer.request("chat", "m", {"traceparent": f"00-{TRACE}-{PARENT}-00"}, {}).end(status=200)
    assert exporter.get_finished_spans() == ()


def test_without_tracing_nothing_happens():
    tracer = open_tracing()
    span = tracer.request("chat", "lightning", HEADERS, {"temperature": 1.0})
    assert span.trace_id is None
    span.first_token()
    span.end(status=200, error="timeout")
    tracer.close()


@pytest.mark.parametrize(
    ("variables", "wanted"),
    [
        ({}, False),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://here"}, True),
        ({"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://here"}, True),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": ""}, False),
        ({"OTEL_TRACES_EXPORTER": "otlp"}, False),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://here", "OTEL_TRACES_EXPORTER": "otlp"}, True),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://here", "OTEL_TRACES_EXPORTER": "none"}, False),
    ],
)
def test_when_traces_are_wanted(monkeypatch, variables, wanted):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert settings.traces() == wanted


def test_without_the_extra_there_is_a_warning(monkeypatch, caplog):
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:1")
    for name in list(sys.modules):
        if name.split(".")[0] == "opentelemetry":
            monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.setitem(sys.modules, "opentelemetry", None)
    tracer = open_tracing()
    assert "nemo-build[otel]" in caplog.text
    assert tracer.request("chat", "lightning", HEADERS, {}).trace_id is None


def test_the_server_does_not_load_what_it_does_not_need():
    code = (
        f"import sys, {tracing.__name__}; sys.exit(any(m.startswith('opentelemetry') for m in sys.modules))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


class Collector(BaseHTTPRequestHandler):
    """Takes what is sent to it."""

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["content-length"]))
        zipped = self.headers.get("content-encoding") == "gzip"
        self.server.received.append(
            (self.path, dict(self.headers), gzip.decompress(body) if zipped else body)
        )
        self.send_response(200)
        self.end_headers()

    def log_message(self, *args) -> None:
        pass


def test_a_collector_gets_the_spans(monkeypatch):
    pytest.importorskip("opentelemetry.exporter.otlp.proto.http", reason="the OTLP exporter is not installed")
    from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

    with HTTPServer(("127.0.0.1", 0), Collector) as server:
        server.received = []
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{server.server_port}")
            monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "x-tenant=a")
            monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "deployment.environment=test")
            tracer = open_tracing()
            tracer.request("chat", "lightning", HEADERS, {}).end(status=200)
            tracer.close()
        finally:
            server.shutdown()
            thread.join()
    [(path, headers, body)] = server.received
    assert path == "/v1/traces"
    assert headers["x-tenant"] == "a"
    sent = ExportTraceServiceRequest.FromString(body).resource_spans[0]
    resource = {a.key: a.value.string_value for a in sent.resource.attributes}
    assert resource["service.name"] == "nemo-build"
    assert resource["deployment.environment"] == "test"
    [span] = sent.scope_spans[0].spans
    assert (span.name, span.trace_id.hex(), span.parent_span_id.hex()) == ("chat lightning", TRACE, PARENT)


def test_the_service_can_be_renamed(monkeypatch):
    pytest.importorskip("opentelemetry.exporter.otlp.proto.http", reason="the OTLP exporter is not installed")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:1")
    monkeypatch.setenv("OTEL_SERVICE_NAME", "mine")
    tracer = open_tracing()
    assert tracer._provider.resource.attributes["service.name"] == "mine"
    tracer.close()
