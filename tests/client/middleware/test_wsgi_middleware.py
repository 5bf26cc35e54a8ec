"""The WSGI middleware in real Flask and Django applications on threads, before a real Headgate."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import django
import flask
import httpx
import pytest
from django.conf import settings
from django.core.asgi import get_asgi_application
from django.core.wsgi import get_wsgi_application
from django.http import HttpRequest, HttpResponse, JsonResponse, StreamingHttpResponse
from django.urls import path

from headgate import Headgate, SyncHeadgate, Throttled, present_grant
from headgate.asgi import AsgiRequest
from headgate.wsgi import HeadgateMiddleware, throttled_response
from limiter.client.request_context import current
from tests.support import eventually
from tests.support.live import LiveApi
from tests.support.settles import Settled
from tests.support.web_apps import serving_wsgi

PAGES = {"service": "pages", "customer": "header:x-customer"}
INNER = {"service": "inner", "customer": "header:x-customer"}

released = threading.Event()


def pieces(count: int) -> Iterator[bytes]:
    """Bodies whose pieces say the class under which they were made."""
    for _ in range(count):
        yield f"{current()} ".encode()


def endless() -> Iterator[bytes]:
    while True:
        yield b"x" * 10_000


def held() -> Iterator[bytes]:
    yield b"x" * 4000
    yield b"x" * 4000
    assert released.wait(20.0)


def refused_below() -> str:
    raise Throttled(reason="work", policy="secret-policy-of-below", retry="after", retry_after_ms=100.0)


def broken() -> str:
    raise ZeroDivisionError


def flask_application() -> flask.Flask:
    app = flask.Flask("service")
    app.add_url_rule("/class", view_func=lambda: flask.jsonify(current()), endpoint="class")
    app.add_url_rule("/stream/<int:count>", view_func=lambda count: flask.Response(pieces(count)), endpoint="stream")
    app.add_url_rule("/endless", view_func=lambda: flask.Response(endless()), endpoint="endless")
    app.add_url_rule("/held", view_func=lambda: flask.Response(held()), endpoint="held")
    app.add_url_rule("/below", view_func=refused_below, endpoint="below")
    app.add_url_rule("/fail", view_func=broken, endpoint="fail")
    app.register_error_handler(Throttled, throttled_response)

    @app.get("/tokens/<int:used>")
    def tokens(used: int) -> str:
        assert flask.request.environ["headgate"] is present_grant()
        present_grant().settle(work=used)
        return "settled"

    return app


def tokens(request: HttpRequest, used: int) -> HttpResponse:
    request.META["headgate"].settle(work=used)
    return HttpResponse("settled")


urlpatterns = [
    path("class", lambda request: JsonResponse(current(), safe=False)),
    path("stream/<int:count>", lambda request, count: StreamingHttpResponse(pieces(count))),
    path("endless", lambda request: StreamingHttpResponse(endless())),
    path("held", lambda request: StreamingHttpResponse(held())),
    path("below", lambda request: refused_below()),
    path("fail", lambda request: broken()),
    path("tokens/<int:used>", tokens),
]


def django_application() -> Any:
    if not settings.configured:
        settings.configure(
            ALLOWED_HOSTS=["127.0.0.1"],
            ROOT_URLCONF=__name__,
            MIDDLEWARE=["headgate.wsgi.DjangoRefusals"],
            SECRET_KEY="of a test",
            LOGGING_CONFIG=None,
        )
        django.setup()
    return get_wsgi_application()


@pytest.fixture(params=["flask", "django"])
def framework(request: pytest.FixtureRequest) -> str:
    return str(request.param)


Serving = Callable[..., Any]


@pytest.fixture
def serving(headgate: LiveApi, framework: str) -> Serving:
    """Serve an application of each framework, limited by these rules; the address."""

    @contextmanager
    def serve(descriptor: Any = PAGES, **rules: Any) -> Iterator[str]:
        with Headgate.sync(headgate.base) as gate, serving_wsgi(limited(framework, gate, descriptor, **rules)) as url:
            yield url

    return serve


def limited(framework: str, gate: SyncHeadgate, descriptor: Any, **rules: Any) -> Callable[..., Any]:
    if framework == "django":
        return HeadgateMiddleware(django_application(), gate, descriptor=descriptor, **rules)
    app = flask_application()
    app.wsgi_app = HeadgateMiddleware(app.wsgi_app, gate, descriptor=descriptor, **rules)  # type: ignore[method-assign]
    return app


def test_a_refused_request_gets_a_problem_and_the_headers_that_say_when_to_come_again(
    serving: Serving, customer: str, client: httpx.Client
) -> None:
    headers = {"x-customer": customer}
    with serving(work={"/class": 0, "*": 11}) as url:
        assert client.get(f"{url}/stream/1", headers=headers).status_code == 200
        refused = client.get(f"{url}/stream/1", headers=headers)
        assert client.get(f"{url}/class", headers=headers).status_code == 200, "it is not asked for"
    assert refused.status_code == 429
    assert refused.headers["content-type"] == "application/problem+json"
    assert refused.headers["headgate-retry"] == "after"
    assert int(refused.headers["retry-after"]) > 60
    assert refused.headers["ratelimit"].startswith('"pages";r=0;t=')
    assert refused.json()["policy"] == "pages"


def test_what_the_application_settles_is_the_debt(
    serving: Serving, customer: str, client: httpx.Client, balance: Callable[..., float]
) -> None:
    with serving(work=2) as url:
        assert client.get(f"{url}/tokens/50", headers={"x-customer": customer}).text == "settled"
        eventually(lambda: balance() == pytest.approx(-40, abs=0.1))


def test_settling_by_bytes_counts_the_body_that_was_sent(
    serving: Serving, customer: str, client: httpx.Client, last_settled: Callable[[], Settled]
) -> None:
    with serving(settle="bytes") as url:
        answer = client.get(f"{url}/stream/300", headers={"x-customer": customer})
        assert last_settled()[:2] == (len(answer.content), "ok")


@pytest.mark.parametrize("settle", ["latency", "cpu", lambda request, work: float(work.status + work.cpu_ms)])
def test_the_work_is_what_the_rule_measures(
    settle: Any, serving: Serving, customer: str, client: httpx.Client, last_settled: Callable[[], Settled]
) -> None:
    with serving(settle=settle) as url:
        assert client.get(f"{url}/stream/50", headers={"x-customer": customer}).status_code == 200
        assert last_settled().work > (200 if callable(settle) else 0)


def test_a_client_that_leaves_in_the_middle_pays_for_what_it_was_sent(
    serving: Serving, customer: str, client: httpx.Client, last_settled: Callable[[], Settled]
) -> None:
    with serving(settle="bytes") as url:
        with client.stream("GET", f"{url}/endless", headers={"x-customer": customer}) as answer:
            next(answer.iter_raw())
        work, outcome, _ = last_settled()
    assert outcome == "cancelled"
    assert work >= 10_000
    assert work % 10_000 == 0


def test_a_stream_reports_its_progress_while_it_is_sent(
    serving: Serving, customer: str, client: httpx.Client, balance: Callable[..., float]
) -> None:
    released.clear()
    with (
        serving(settle="bytes") as url,
        client.stream("GET", f"{url}/held", headers={"x-customer": customer}) as answer,
    ):
        eventually(lambda: balance() == pytest.approx(10 - 8000, abs=0.1))
        released.set()
        answer.read()


def test_a_failure_of_the_application_is_the_outcome(
    serving: Serving, customer: str, client: httpx.Client, last_settled: Callable[[], Settled]
) -> None:
    with serving() as url:
        assert client.get(f"{url}/fail", headers={"x-customer": customer}).status_code == 500
        assert last_settled().outcome == "error"


def test_g6_a_refusal_of_a_layer_below_tells_the_callers_above_not_to_retry(
    serving: Serving, customer: str, client: httpx.Client, last_settled: Callable[[], Settled]
) -> None:
    with serving() as url:
        answer = client.get(f"{url}/below", headers={"x-customer": customer})
        assert last_settled().outcome == "error"
    assert (answer.status_code, answer.headers["headgate-retry"]) == (503, "never")
    assert "secret" not in answer.text


def test_g4_the_class_reaches_the_application_and_its_streams_and_no_other_request(
    serving: Serving, customer: str, client: httpx.Client
) -> None:
    headers = {"x-customer": customer, "headgate-criticality": "critical"}
    with serving(INNER) as url:
        assert client.get(f"{url}/class", headers=headers).json() == "critical"
        assert client.get(f"{url}/stream/3", headers=headers).text == "critical critical critical "
        assert client.get(f"{url}/class", headers={"x-customer": customer}).json() is None
    with serving(INNER, edge="sheddable") as url:
        assert client.get(f"{url}/class", headers=headers).json() == "sheddable"


def test_routes_are_named_by_their_patterns(serving: Serving, framework: str, client: httpx.Client) -> None:
    seen: list[str | None] = []
    with serving(lambda request: seen.append(request.route)) as url:
        client.get(f"{url}/stream/3")
        client.get(f"{url}/nowhere")
    assert seen == ["/stream/<int:count>", None]


def test_routes_of_django_are_named_under_asgi_as_well() -> None:
    django_application()
    scope = {"type": "http", "method": "GET", "path": "/tokens/7", "headers": []}
    assert AsgiRequest(scope, get_asgi_application()).route == "/tokens/<int:used>"


def environ(customer: str) -> dict[str, Any]:
    return {"REQUEST_METHOD": "GET", "PATH_INFO": "/", "HTTP_X_CUSTOMER": customer}


class Started:
    """`start_response` of a server that the test plays."""

    def __init__(self) -> None:
        self.statuses: list[str] = []
        self.written: list[bytes] = []

    def __call__(self, status: str, headers: Any, *error: Any) -> Callable[[bytes], object]:
        self.statuses.append(status)
        return self.written.append


def test_g6_a_refusal_from_below_while_nothing_was_sent_takes_the_place_of_the_answer(
    headgate: LiveApi, customer: str, settled: list[Settled]
) -> None:
    def lazily(environ: Any, start: Any) -> Iterator[bytes]:
        start("200 OK", [])
        refused_below()
        yield b""

    def at_once(environ: Any, start: Any) -> list[bytes]:
        start("200 OK", [])
        refused_below()
        return []

    with Headgate.sync(headgate.base) as gate:
        for app in (lazily, at_once):
            started = Started()
            body = HeadgateMiddleware(app, gate, descriptor=PAGES)(environ(customer), started)
            assert b"refused_below" in b"".join(body)
            assert started.statuses == ["200 OK", "503 Service Unavailable"]
    assert [one.outcome for one in settled] == ["error", "error"]


def test_what_is_written_without_an_iterator_counts_as_well(
    headgate: LiveApi, customer: str, settled: list[Settled]
) -> None:
    def app(environ: Any, start: Any) -> list[bytes]:
        start("200 OK", [])(b"x" * 70)
        return [b"x" * 30]

    started = Started()
    with Headgate.sync(headgate.base) as gate:
        limited = HeadgateMiddleware(app, gate, descriptor=PAGES, settle="bytes")
        assert list(limited(environ(customer), started)) == [b"x" * 30]
    assert started.written == [b"x" * 70]
    assert [one[:2] for one in settled] == [(100, "ok")]


def test_an_exception_that_is_no_refusal_goes_on_and_is_the_outcome(
    headgate: LiveApi, customer: str, settled: list[Settled]
) -> None:
    def app(environ: Any, start: Any) -> list[bytes]:
        raise TimeoutError

    def late(environ: Any, start: Any) -> Iterator[bytes]:
        yield b"x"
        refused_below()

    with Headgate.sync(headgate.base) as gate:
        with pytest.raises(TimeoutError):
            HeadgateMiddleware(app, gate, descriptor=PAGES)(environ(customer), Started())
        with pytest.raises(Throttled):
            list(HeadgateMiddleware(late, gate, descriptor=PAGES, settle="bytes")(environ(customer), Started()))
    assert [one.outcome for one in settled] == ["timeout", "error"]
