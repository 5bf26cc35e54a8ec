"""Traces: a span for each request, in its caller's trace, from either lane; nothing where tracing is off."""

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind

import api.server
import api.transport.tracing
from api.transport.tracing import Tracing, open_tracing
from limiter.settings import Settings, SettingsError
from tests.support import eventually
from tests.support.live import Lane, LiveApi, ask, live
from tests.support.servers import Server

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


@pytest.fixture
def exporter() -> InMemorySpanExporter:
    return InMemorySpanExporter()


@pytest.fixture
def traced(
    store: Server, policies: Path, lane: Lane, exporter: InMemorySpanExporter, monkeypatch: pytest.MonkeyPatch
) -> Iterator[LiveApi]:
    monkeypatch.setattr(api.server, "open_tracing", lambda _: Tracing(SimpleSpanProcessor(exporter)))
    with live(store.url, policies, lane=lane) as started:
        yield started


def spans(exporter: InMemorySpanExporter, count: int) -> list[ReadableSpan]:
    return eventually(lambda: found if len(found := list(exporter.get_finished_spans())) == count else [])


@contextmanager
def one_span(exporter: InMemorySpanExporter) -> Iterator[list[ReadableSpan]]:
    found: list[ReadableSpan] = []
    exporter.clear()
    yield found
    found += spans(exporter, 1)


@pytest.mark.parametrize(
    ("method", "path", "body", "route", "status"),
    [
        ("POST", "/v1/acquire", ask("traced"), "/v1/acquire", 200),
        ("POST", "/v1/acquire", {}, "/v1/acquire", 422),
        ("POST", "/v1/settle", {"reservation": "x", "work": 1}, "/v1/settle", 404),
        ("POST", "/v1/batch", {"operations": []}, "/v1/batch", 200),
        ("GET", "/v1/policies/slow", None, "/v1/policies/{name}", 200),
        ("GET", "/elsewhere", None, "none", 404),
    ],
)
def test_a_request_is_a_span_of_its_caller_s_trace(
    traced: LiveApi,
    exporter: InMemorySpanExporter,
    method: str,
    path: str,
    body: dict[str, object] | None,
    route: str,
    status: int,
) -> None:
    with one_span(exporter) as found, traced.client() as client:
        client.request(method, path, json=body, headers={"traceparent": f"00-{TRACE}-{PARENT}-01"})
    (span,) = found
    assert (span.name, span.kind) == (f"{method} {route}", SpanKind.SERVER)
    assert span.context is not None
    assert f"{span.context.trace_id:032x}" == TRACE
    assert span.parent is not None
    assert f"{span.parent.span_id:016x}" == PARENT
    assert span.attributes is not None
    assert dict(span.attributes) == {
        "http.request.method": method,
        "http.route": route,
        "http.response.status_code": status,
    }
    assert span.resource.attributes["service.name"] == "headgate"


@pytest.mark.parametrize("sent", [None, "nonsense", f"00-{'0' * 32}-{PARENT}-01"])
def test_without_a_caller_s_trace_it_is_one_of_its_own(
    traced: LiveApi, exporter: InMemorySpanExporter, sent: str | None
) -> None:
    with one_span(exporter) as found, traced.client() as client:
        client.post("/v1/acquire", json=ask("alone"), headers={} if sent is None else {"traceparent": sent})
    (span,) = found
    assert span.parent is None


def test_a_trace_that_is_not_sampled_is_not_sent(traced: LiveApi, exporter: InMemorySpanExporter) -> None:
    with one_span(exporter) as found, traced.client() as client:
        client.post("/v1/acquire", json=ask("quiet"), headers={"traceparent": f"00-{TRACE}-{PARENT}-00"})
        client.post("/v1/acquire", json=ask("loud"), headers={"traceparent": f"00-{'1' * 32}-{PARENT}-01"})
    context = found[0].context
    assert context is not None
    assert f"{context.trace_id:032x}" == "1" * 32


def test_tracing_is_off_unless_a_collector_is_named() -> None:
    assert open_tracing(Settings()) is None


def test_where_it_is_off_no_exporter_is_imported() -> None:
    code = "import sys, api.server; print(any(name.startswith('opentelemetry.exporter') for name in sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "False\n"


def test_without_the_extra_the_message_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.http.trace_exporter", None)
    with pytest.raises(SettingsError, match=r"pip install 'headgate\[server,otel\]'"):
        open_tracing(Settings(otel="http://collector:4318"))


@pytest.mark.parametrize("url", ["collector:4318", "grpc://collector", "http://", "http:///x"])
def test_a_url_that_is_no_collector_is_refused(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADGATE_OTEL", url)
    with pytest.raises(SettingsError, match="HEADGATE_OTEL"):
        Settings.load()


@pytest.mark.slow
def test_a_collector_that_is_away_harms_nobody(store: Server, policies: Path, lane: Lane) -> None:
    with live(store.url, policies, lane=lane, otel="http://127.0.0.1:9") as started, started.client() as client:
        assert client.post("/v1/acquire", json=ask("unseen")).status_code == 200
