"""WSGI middleware over the client for threads: the same rules as under ASGI (`from headgate.wsgi import …`).

    app.wsgi_app = HeadgateMiddleware(app.wsgi_app, gate, descriptor={…})            Flask
    application = HeadgateMiddleware(get_wsgi_application(), gate, descriptor={…})   Django

Each request runs in a context of its own, the pieces of a streaming answer as well, so that nothing of one request is
left to the next that the thread serves. The application finds the grant in `environ["headgate"]` or by
`headgate.present_grant()`.

Flask and Django make a 500 of every exception, so a `Throttled` of a layer below does not escape from them. Tell them:

    app.register_error_handler(Throttled, throttled_response)       Flask
    MIDDLEWARE = ["headgate.wsgi.DjangoRefusals", …]                Django
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import Context, copy_context
from http import HTTPStatus
from time import monotonic_ns, thread_time_ns
from typing import Any, Self, Unpack

from limiter.client.grants import Grant, outcome_of
from limiter.client.middleware.framework_routes import django_route, is_django, werkzeug_route
from limiter.client.middleware.measured_work import (
    MeasuredWork,
    SettleRule,
    check_settle,
    work_under,
)
from limiter.client.middleware.refusal_answer import RefusalAnswer, passed_on_answer, refusal_answer, throttled_in
from limiter.client.middleware.request_rules import (
    AcquireOptions,
    DescriptorRule,
    EdgeRule,
    IncomingRequest,
    RequestRules,
    WorkRule,
    within_bounds,
)
from limiter.client.request_context import enter
from limiter.client.sync_gate import SyncHeadgate
from limiter.client.throttled import Throttled

Environ = dict[str, Any]
StartResponse = Callable[..., Callable[[bytes], object]]
App = Callable[[Environ, Any], Iterable[bytes]]


class WsgiRequest(IncomingRequest):
    """A WSGI environment as rules see it."""

    def __init__(self, environ: Environ, app: Any) -> None:
        self.raw = environ
        self._app = app
        self.method = environ["REQUEST_METHOD"]
        self.path = environ.get("PATH_INFO", "").encode("latin-1").decode("utf-8", "replace") or "/"
        self.client = environ.get("REMOTE_ADDR")
        self.query_string = environ.get("QUERY_STRING", "")

    def header(self, name: str) -> str | None:
        key = name.upper().replace("-", "_")
        found: str | None = self.raw.get(key if key in ("CONTENT_TYPE", "CONTENT_LENGTH") else f"HTTP_{key}")
        return found

    @property
    def route(self) -> str | None:
        app = getattr(self._app, "__self__", self._app)  # of a bound method, as Flask's wsgi_app is
        if is_django(app):
            return django_route(self.path)
        url_map = getattr(app, "url_map", None)
        return None if url_map is None else werkzeug_route(url_map, self.raw)


class HeadgateMiddleware:
    """Limits the requests of a WSGI application; arguments as those of the ASGI middleware, with `Headgate.sync(…)`."""

    def __init__(
        self,
        app: App,
        gate: SyncHeadgate,
        *,
        descriptor: DescriptorRule,
        work: WorkRule = None,
        settle: SettleRule = None,
        edge: EdgeRule = None,
        criticality: str | None = None,
        **acquire: Unpack[AcquireOptions],
    ) -> None:
        self.app = app
        self._gate = gate
        self._rules = RequestRules(descriptor, work=work, edge=edge, criticality=criticality, options=acquire)
        self._settle = check_settle(settle)

    def __call__(self, environ: Environ, start_response: StartResponse) -> Iterable[bytes]:
        context = copy_context()
        return context.run(self._serve, environ, start_response, context)

    def _serve(self, environ: Environ, start_response: StartResponse, context: Context) -> Iterable[bytes]:
        came_ns = monotonic_ns()
        request = WsgiRequest(environ, self.app)
        enter(came_ns, criticality=self._rules.class_of(request))
        try:
            grant = self._ask(request)
        except Throttled as refusal:
            return _answered(start_response, refusal_answer(refusal))
        cpu = _ThreadCpu()
        work = MeasuredWork(grant, request, self._settle)
        work.cpu = cpu if work.needs_cpu else None
        environ["headgate"] = work.grant
        start = _Start(work, start_response)
        work_under(work.grant)
        try:
            with cpu.counted():
                pieces = self.app(environ, start)
        except BaseException as error:
            work.end(outcome_of(error))
            if throttled_in(error) is None or start.write_was_used:
                raise
            return _answered(start_response, passed_on_answer(), is_second=start.was_called)
        return _Pieces(pieces, work, cpu, context, start_response)

    def _ask(self, request: WsgiRequest) -> Grant | None:
        asked = self._rules.asks(request)
        if asked is None or not asked[1]:
            return None
        work, descriptor = asked
        return self._gate.acquire(within_bounds(descriptor), work, **self._rules.options).now()


class _ThreadCpu:
    """CPU time of the steps of one request, whichever threads they ran in."""

    def __init__(self) -> None:
        self._spent_ns = 0
        self._began_ns: int | None = None

    @property
    def ms(self) -> float:
        running_ns = 0 if self._began_ns is None else thread_time_ns() - self._began_ns
        return (self._spent_ns + running_ns) / 1e6

    @contextmanager
    def counted(self) -> Iterator[None]:
        self._began_ns = thread_time_ns()
        try:
            yield
        finally:
            self._spent_ns += thread_time_ns() - self._began_ns
            self._began_ns = None


class _Start:
    """`start_response` as the application calls it."""

    def __init__(self, work: MeasuredWork, start_response: StartResponse) -> None:
        self._work = work
        self._start_response = start_response
        self.was_called = False
        self.write_was_used = False

    def __call__(self, status: str, headers: list[tuple[str, str]], *error: Any) -> Callable[[bytes], object]:
        write = self._start_response(status, headers, *error)
        self.was_called = True
        self._work.answered(int(status[:3]), headers)

        def counted(data: bytes) -> None:
            self.write_was_used = True
            write(data)
            self._work.sent(len(data), more=True)

        return counted


class _Pieces:
    """The body of an answer, passed on piece by piece; settled after the last one, or when the server gives it up."""

    def __init__(
        self,
        pieces: Iterable[bytes],
        work: MeasuredWork,
        cpu: _ThreadCpu,
        context: Context,
        start_response: StartResponse,
    ) -> None:
        self._pieces = pieces
        self._work = work
        self._cpu = cpu
        self._context = context
        self._start_response = start_response
        self._source: Iterator[bytes] | None = None
        self._answer: bytes | None = None
        """An answer in place of the application's."""
        self._given_bytes = 0
        """Bytes that the server was given last: they are sent once it asks for more."""

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> bytes:
        if self._answer is not None:
            raise StopIteration
        self._work.sent(self._given_bytes, more=self._given_bytes > 0)
        self._given_bytes = 0
        try:
            piece = self._context.run(self._next)
        except StopIteration:
            self._work.end_by_status()
            raise
        except BaseException as error:
            self._work.end(outcome_of(error))
            if throttled_in(error) is None or self._work.sent_bytes:
                raise
            (self._answer,) = _answered(self._start_response, passed_on_answer(), is_second=True)
            return self._answer
        self._given_bytes = len(piece)
        return piece

    def _next(self) -> bytes:
        with self._cpu.counted():
            if self._source is None:
                self._source = iter(self._pieces)
            return next(self._source)

    def close(self) -> None:
        """End the answer. One that was not passed on to its end was given up by the client."""
        try:
            close = getattr(self._pieces, "close", None)
            if close is not None:
                self._context.run(close)
        finally:
            self._work.end("cancelled")


def _answered(start_response: StartResponse, answer: RefusalAnswer, *, is_second: bool = False) -> list[bytes]:
    """Begin an answer; a second one replaces one that was begun and of which nothing was sent."""
    error = (sys.exc_info(),) if is_second else ()
    start_response(f"{answer.status} {HTTPStatus(answer.status).phrase}", answer.headers, *error)
    return [answer.body]


def throttled_response(refusal: Exception) -> tuple[bytes, int, list[tuple[str, str]]]:
    """Return the answer where a layer below refused, as Flask takes it from an error handler."""
    answer = passed_on_answer()
    return answer.body, answer.status, answer.headers


class DjangoRefusals:
    """A middleware of Django's that answers where a layer below refused."""

    def __init__(self, get_response: Callable[[Any], Any]) -> None:
        self._get_response = get_response

    def __call__(self, request: Any) -> Any:
        return self._get_response(request)

    def process_exception(self, request: Any, error: Exception) -> Any:
        """Return an answer to a view's `Throttled`; None for other exceptions."""
        if throttled_in(error) is None:
            return None
        from django.http import HttpResponse

        answer = passed_on_answer()
        return HttpResponse(answer.body, status=answer.status, headers=dict(answer.headers))
