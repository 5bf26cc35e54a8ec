"""OpenTelemetry traces, if HEADGATE_OTEL names a collector: a span for each request, in the caller's trace.

The libraries are an extra (`pip install 'headgate[server,otel]'`); none of them is imported unless tracing is on.
Their own variables apply, too: OTEL_TRACES_SAMPLER, OTEL_SERVICE_NAME and so on.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from limiter.settings import Settings, SettingsError

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import SpanProcessor
    from opentelemetry.trace import Span

TRACEPARENT = b"traceparent"
SERVICE = "headgate"
TRACES_PATH = "/v1/traces"


class RequestSpan:
    """The span of one request, from its parsed head to its answer."""

    __slots__ = ("_method", "_span")

    def __init__(self, span: Span, method: str) -> None:
        self._span = span
        self._method = method

    def end(self, route: bytes, status: int) -> None:
        """End the span: the request was answered."""
        shown = route.decode("ascii")
        self._span.update_name(f"{self._method} {shown}")
        self._span.set_attribute("http.route", shown)
        self._span.set_attribute("http.response.status_code", status)
        if status >= 500:
            self._span.set_attribute("error.type", str(status))
        self._span.end()


class Tracing:
    """Makes spans, and sends them in the background."""

    def __init__(self, processor: SpanProcessor) -> None:
        from opentelemetry.sdk.resources import OTELResourceDetector, Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.trace import SpanKind
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        resource = Resource.create({"service.name": SERVICE}).merge(OTELResourceDetector().detect())
        self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        self._provider.add_span_processor(processor)
        self._tracer = self._provider.get_tracer(SERVICE)
        self._propagator = TraceContextTextMapPropagator()
        self._kind = SpanKind.SERVER

    def begin(self, method: str, traceparent: bytes | None) -> RequestSpan:
        """Begin the span of a request: in its caller's trace if it names one, otherwise in one of its own."""
        carrier: dict[str, Any] = {} if traceparent is None else {"traceparent": traceparent.decode("latin-1")}
        context = self._propagator.extract(carrier)
        attributes = {"http.request.method": method}
        return RequestSpan(
            self._tracer.start_span(method, context=context, kind=self._kind, attributes=attributes), method
        )

    def close(self) -> None:
        """Send the remaining spans."""
        self._provider.shutdown()


def open_tracing(settings: Settings) -> Tracing | None:
    """Return tracing as configured; None if it is off. Raises `SettingsError` if the libraries are not installed."""
    if settings.otel is None:
        return None
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError:
        raise SettingsError("HEADGATE_OTEL needs the extra: pip install 'headgate[server,otel]'") from None
    return Tracing(BatchSpanProcessor(OTLPSpanExporter(settings.otel.rstrip("/") + TRACES_PATH)))
