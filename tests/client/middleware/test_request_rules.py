"""Rules read requests of every protocol alike."""

from typing import Any

import pytest

from limiter.client.middleware.asgi_middleware import AsgiRequest
from limiter.client.middleware.request_rules import (
    NOT_ASKED,
    VALUE_MAX,
    IncomingRequest,
    class_rule,
    descriptor_rule,
    within_bounds,
    work_rule,
)
from limiter.client.middleware.wsgi_middleware import WsgiRequest


def asgi(method: str = "GET", path: str = "/orders/17", headers: dict[str, str] | None = None, **scope: Any) -> Any:
    lines = [(name.lower().encode(), value.encode("latin-1")) for name, value in (headers or {}).items()]
    given = {"type": "http", "method": method, "path": path, "headers": lines, "client": ("10.0.0.9", 5)}
    return AsgiRequest({**given, "query_string": b"plan=gold", **scope}, None)


def wsgi(method: str = "GET", path: str = "/orders/17", headers: dict[str, str] | None = None, **more: Any) -> Any:
    lines = {f"HTTP_{name.upper().replace('-', '_')}": value for name, value in (headers or {}).items()}
    given = {"REQUEST_METHOD": method, "PATH_INFO": path, "REMOTE_ADDR": "10.0.0.9", "QUERY_STRING": "plan=gold"}
    return WsgiRequest({**given, **lines, **more}, None)


BOTH = pytest.mark.parametrize("request_of", [asgi, wsgi])


@BOTH
def test_values_name_parts_of_the_request(request_of: Any) -> None:
    rule = descriptor_rule(
        {
            "service": "shop",
            "operation": "{method} {path}",
            "customer": "header:X-Customer",
            "ip": "client",
            "plan": "query:plan",
            "site": "at {host}",
            "first": lambda request: request.path[1],
        }
    )
    assert rule(request_of(headers={"x-customer": "c1", "host": "shop.example"})) == {
        "service": "shop",
        "operation": "GET /orders/17",
        "customer": "c1",
        "ip": "10.0.0.9",
        "plan": "gold",
        "site": "at shop.example",
        "first": "o",
    }


@BOTH
@pytest.mark.parametrize("headers", [{}, {"x-customer": ""}])
def test_a_missing_value_says_what_happens(request_of: Any, headers: dict[str, str]) -> None:
    rule = descriptor_rule(
        {
            "customer": "header:x-customer",
            "account": "header:x-customer|guest",
            "plan": "header:x-customer|",
            "operation": "{method} {route}",
            "both": "{header:x-customer|}-{client}",
        }
    )
    assert rule(request_of(headers=headers)) == {
        "customer": "unknown",
        "account": "guest",
        "operation": "GET unknown",
        "both": "-10.0.0.9",
    }


def test_a_descriptor_without_dimensions_is_not_asked_for() -> None:
    assert descriptor_rule({"customer": "header:x-customer|"})(asgi()) is None


@pytest.mark.parametrize("text", ["{verb}", "{header:}", "{header}", "x {client.host}"])
def test_an_unknown_field_is_refused_at_once(text: str) -> None:
    with pytest.raises(ValueError, match="fields are method, path, route, host, client, header:NAME, query:NAME"):
        descriptor_rule({"service": text})


def test_long_values_are_shortened_and_stay_different() -> None:
    first, second = (within_bounds({"customer": "x" * 5000 + end})["customer"] for end in "ab")
    assert first != second
    assert len(first) <= VALUE_MAX
    assert within_bounds({"customer": "x" * VALUE_MAX}) == {"customer": "x" * VALUE_MAX}


def test_a_path_is_told_without_the_prefix_it_is_mounted_under() -> None:
    assert asgi(path="/api/orders", root_path="/api").path == "/orders"
    assert asgi(path="/apiary", root_path="/api").path == "/apiary"
    assert wsgi(path="/orders", SCRIPT_NAME="/api").path == "/orders"
    assert wsgi(path="/caf\u00c3\u00a9").path == "/café"


@BOTH
def test_work_goes_by_the_first_path_that_matches(request_of: Any) -> None:
    rule = work_rule({"/healthz": 0, "/assets/*": None, "POST /orders*": 5, "/orders*": 2})
    assert rule(request_of(path="/healthz")) == NOT_ASKED
    assert rule(request_of(path="/assets/a/b.css")) == NOT_ASKED
    assert rule(request_of("POST")) == 5
    assert rule(request_of()) == 2
    assert rule(request_of(path="/elsewhere")) is None, "each policy's own charge"
    assert rule(request_of(path="/healthz/../orders")) is None, "no prefix is meant where none is written"


def test_work_may_be_a_number_or_a_function() -> None:
    assert work_rule(3)(asgi()) == 3
    assert work_rule(None)(asgi()) is None
    heavy = work_rule(lambda request: float(len(request.path)) if request.method == "GET" else 0)
    assert heavy(asgi(path="/12")) == 3
    assert heavy(asgi("OPTIONS")) == NOT_ASKED


def test_a_pattern_that_is_no_path_is_refused_at_once() -> None:
    with pytest.raises(ValueError, match="'healthz' is no pattern of a path"):
        work_rule({"healthz": 0})


@BOTH
def test_g4_inside_the_header_names_the_class(request_of: Any) -> None:
    rule = class_rule(None, "sheddable_plus")
    assert rule(request_of(headers={"headgate-criticality": "Critical"})) == "critical"
    assert rule(request_of(headers={"headgate-criticality": "vip"})) == "sheddable_plus"
    assert rule(request_of()) == "sheddable_plus"
    assert class_rule(None, None)(request_of()) is None


@BOTH
@pytest.mark.parametrize(
    "edge",
    [
        "sheddable",
        {"/orders/*": "sheddable", "*": "critical"},
        lambda request: "sheddable" if request.method == "GET" else None,
    ],
)
def test_g4_at_the_edge_the_header_of_strangers_is_not_believed(request_of: Any, edge: Any) -> None:
    strangers: IncomingRequest = request_of(headers={"headgate-criticality": "critical_plus"})
    assert class_rule(edge, None)(strangers) == "sheddable"


def test_g4_at_the_edge_a_path_without_a_rule_has_the_class_of_requests_that_name_none() -> None:
    assert class_rule({"/other": "critical"}, "sheddable")(asgi()) == "sheddable"
    assert class_rule({"/other": "critical"}, None)(asgi()) is None


def test_a_class_that_does_not_exist_is_refused_at_once() -> None:
    for edge, default in (("vip", None), ({"*": "vip"}, None), (None, "vip")):
        with pytest.raises(ValueError, match="criticality 'vip' is none of"):
            class_rule(edge, default)
