"""The fast lane is an accelerator, never a second truth: whatever is sent, both lanes answer the same.

The same bytes go to both, apart from the customer's name, so that each finds a bucket as the other does. Equal are
the number of answers and the status, headers and body of each, apart from ids and times.
"""

import json
import re
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.support.bad_values import BAD_DESCRIPTORS, REFUSED_FIELDS, WITH
from tests.support.lanes import CUSTOMER, send_to_both
from tests.support.live import Lane, LiveApi, ask, request, statuses

numbers = st.one_of(
    st.integers(-10, 20), st.floats(allow_nan=True), st.integers(-(2**70), 2**70), st.booleans(), st.text(max_size=5),
    st.none(),
)  # fmt: skip
known = st.sampled_from(["slow", "orders", "read", CUSTOMER.decode(), "hits", "{", ":"])
texts = st.one_of(st.text(max_size=12), known)
descriptors = st.one_of(
    st.just(ask(CUSTOMER.decode())["descriptor"]),
    st.dictionaries(st.one_of(st.sampled_from(["service", "plan", "trial"]), texts), texts, max_size=5).map(
        lambda given: {**given, "customer": CUSTOMER.decode()}  # a bucket of its own for each lane
    ),
    st.none(),
    st.lists(texts, max_size=2),
)
acquires = st.fixed_dictionaries(
    {"descriptor": descriptors},
    optional={
        "namespace": texts,
        "work": numbers,
        "criticality": st.sampled_from(["critical", "sheddable", "other", None, 3]),
        "expected_latency_ms": numbers,
        "attempt": numbers,
        "ttl_ms": numbers,
        "dry_run": st.sampled_from([True, False, 1, "x"]),
        "lease": st.booleans(),
        "unknown": numbers,
    },
)
settles = st.fixed_dictionaries(
    {"reservation": texts, "work": numbers},
    optional={"final": st.booleans(), "latency_ms": numbers, "outcome": texts, "requests": numbers},
)
operations = st.one_of(
    acquires.map(lambda fields: {"op": "acquire"} | fields),
    settles.map(lambda fields: {"op": "settle"} | fields),
    numbers,
)
bodies = st.one_of(
    st.tuples(st.just("/v1/acquire"), acquires),
    st.tuples(st.just("/v1/settle"), settles),
    st.tuples(st.just("/v1/batch"), st.lists(operations, max_size=4).map(lambda listed: {"operations": listed})),
    st.tuples(st.sampled_from(["/v1/acquire", "/v1/settle", "/v1/batch"]), numbers),
)

GENERATED = settings(
    max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture], print_blob=True
)


def encoded(document: Any) -> bytes:
    return json.dumps(document).encode()


@GENERATED
@given(call=bodies)
def test_both_lanes_answer_generated_requests_alike(both: dict[Lane, LiveApi], call: tuple[str, Any]) -> None:
    path, document = call
    replies = send_to_both(both, request(path, encoded(document)))
    assert len(replies) == 2
    assert replies[0].json is not None


@GENERATED
@given(data=st.data())
def test_both_lanes_answer_damaged_requests_alike(both: dict[Lane, LiveApi], data: st.DataObject) -> None:
    """Valid requests with bytes changed, cut out or put in, in pieces: some are still HTTP, some are not."""
    path, document = data.draw(bodies)
    raw = request(path, encoded(document))
    places = st.integers(0, len(raw))
    changes = data.draw(st.lists(st.tuples(places, st.integers(0, 3), st.binary(max_size=3)), max_size=3))
    cuts = sorted(data.draw(st.lists(places, max_size=3)))

    def damaged(raw: bytes) -> list[bytes]:
        changed = bytearray(raw)
        for at, size, instead in changes:
            changed[at : at + size] = instead
        parts = [bytes(changed[start:end]) for start, end in zip([0, *cuts], [*cuts, len(changed)], strict=True)]
        return [part for part in parts if part]

    send_to_both(both, raw, damaged)


JSON = ("Content-Type", "application/json")
OK = request(body=ask(CUSTOMER.decode(), work=1))
BODY = OK.partition(b"\r\n\r\n")[2]
LENGTH = b"Content-Length: %d\r\n" % len(BODY)
HAND_MADE: list[bytes] = [
    OK,
    OK * 3,
    b"\r\n" + OK,
    b"\r\n\r\n" + OK,
    OK + b"\r\n" + OK,
    OK.replace(b"\r\n", b"\n"),
    OK.replace(b"POST", b"post"),
    OK.replace(b"POST", b"GET"),
    OK.replace(b"POST", b"FETCH"),
    OK.replace(b"HTTP/1.1", b"HTTP/1.0"),
    OK.replace(b"HTTP/1.1", b"HTTP/2.0"),
    OK.replace(b"HTTP/1.1", b"HTTP/9.9"),
    OK.replace(b"HTTP/1.1", b""),
    OK.replace(b"/v1/acquire", b"http://x/v1/acquire"),
    OK.replace(b"/v1/acquire", b"/v1/acquire?x=1"),
    OK.replace(b"/v1/acquire", b"/v1/acquire#x"),
    OK.replace(b"/v1/acquire", b"/v1/%61cquire"),
    OK.replace(b"/v1/acquire", b"//v1/acquire"),
    OK.replace(b"/v1/acquire", b"/v1/acquire/"),
    OK.replace(b"/v1/acquire", b"/v1/acq\xc3\xa9"),
    OK.replace(b"/v1/acquire", b"*"),
    OK.replace(b"Host: x\r\n", b""),
    OK.replace(b"Host: x", b"Host: x\r\nHost: y"),
    OK.replace(LENGTH, LENGTH * 2),
    OK.replace(LENGTH, b""),
    OK.replace(LENGTH, b"Content-Length: -1\r\n"),
    OK.replace(LENGTH, b"Content-Length: +5\r\n"),
    OK.replace(LENGTH, b"Content-Length: 0x10\r\n"),
    OK.replace(LENGTH, b"Content-Length: 99999999999999999999999\r\n"),
    OK.replace(LENGTH, b"Content-Length: 5, 5\r\n"),
    OK.replace(LENGTH, LENGTH.replace(b"\r\n", b" \r\n")),
    OK.replace(LENGTH, LENGTH.replace(b": ", b":")),
    OK.replace(LENGTH, LENGTH.replace(b": ", b" : ")),
    OK.replace(LENGTH, LENGTH.lower()),
    OK.replace(LENGTH, LENGTH.upper()),
    OK.replace(LENGTH, LENGTH + b"Transfer-Encoding: chunked\r\n"),
    OK.replace(LENGTH, LENGTH + b"Transfer-Encoding: identity\r\n"),
    OK.replace(LENGTH, b"Transfer-Encoding: gzip\r\n"),
    OK.replace(LENGTH, LENGTH + b"Content-Encoding: gzip\r\n"),
    OK.replace(LENGTH, LENGTH + b"Expect: 200-maybe\r\n"),
    OK.replace(LENGTH, LENGTH + b"Connection: close\r\n"),
    OK.replace(LENGTH, LENGTH + b"Connection: keep-alive, close\r\n"),
    OK.replace(LENGTH, LENGTH + b"Connection: upgrade\r\nUpgrade: h2c\r\n"),
    OK.replace(LENGTH, LENGTH + b"Upgrade: h2c\r\n"),
    OK.replace(LENGTH, LENGTH + b"Folded: a\r\n b\r\n"),
    OK.replace(LENGTH, LENGTH + b"No colon here\r\n"),
    OK.replace(LENGTH, LENGTH + b"Nul: a\x00b\r\n"),
    OK.replace(LENGTH, LENGTH + b": no name\r\n"),
    OK.replace(LENGTH, LENGTH + b"X: " + b"y" * 70_000 + b"\r\n"),
    OK.replace(LENGTH, LENGTH + b"X: y\r\n" * 200),
    OK.replace(LENGTH, LENGTH + b"Idempotency-Key: \r\n"),
    OK.replace(LENGTH, LENGTH + b"Idempotency-Key: CUSTOMER-NAME\r\nIdempotency-Key: two\r\n"),
    OK.replace(LENGTH, LENGTH + b"Idempotency-Key: CUSTOMER-NAME\r\n") * 2,
    OK.replace(LENGTH, LENGTH + b"X-Request-Id: one/2\r\n"),
    OK.replace(LENGTH, LENGTH + b"X-Request-Id: one\r\nX-Request-Id: two\r\n"),
    OK.replace(LENGTH, LENGTH + b'X-Request-Id: "quoted"\r\n'),
    OK.replace(LENGTH, LENGTH + b"X-Request-Id: \r\n"),
    OK.replace(LENGTH, LENGTH + b"X-Request-Id: " + b"x" * 129 + b"\r\n"),
    OK.replace(LENGTH, LENGTH + b"X-Request-Id: one\r\nContent-Encoding: gzip\r\n"),
    OK.replace(LENGTH, LENGTH + b"Traceparent: 00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01\r\n"),
    request("/v1/settle", {"reservation": "x", "work": 1}, headers=[JSON, ("x-request-id", "mine")]),
    request("/v1/batch", {"operations": [{"op": "settle"}]}, headers=[JSON, ("x-request-id", "mine")]),
    OK.replace(LENGTH, LENGTH + b"Content-Type: text/plain\r\n"),
    OK.replace(b"application/json", b"text/plain"),
    OK.replace(b"application/json", b"\xff"),
    OK.replace(b"Content-Type: application/json\r\n", b""),
    OK + b"garbage",
    OK + b"GET / HTTP/1.1\r\nHost: x\r\n\r\n" + OK,
    b"GET / HTTP/1.1\r\nHost: x\r\n\r\n" + OK,
    b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
    b"\x00" * 100,
    b"POST /v1/acquire",
    b"POST /v1/acquire HTTP/1.1\r\n\r\n",
    b"POST /v1/batch HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\n\r\n{}",
    request("/v1/batch", {"operations": [{"op": "acquire", **ask(CUSTOMER.decode())}, {"op": "settle"}, None]}),
    request("/v1/batch", {"operations": [{"op": "acquire", **ask(CUSTOMER.decode())}] * 1001}),
    request(body=b" " * 1_048_577),
    request(body=b" " * 1_048_576),
    request("/v1/settle", {"reservation": "x", "work": 1}),
    request("/v1/settle", b'{"reservation": "x", "work": 1, "work": 1}'),
    *(request(body=WITH % row[1]) for row in REFUSED_FIELDS),
    *(request(body=b'{"descriptor":%b}' % row[0]) for row in BAD_DESCRIPTORS),
]


@pytest.mark.parametrize("raw", HAND_MADE, ids=range(len(HAND_MADE)))
def test_both_lanes_answer_odd_requests_alike(both: dict[Lane, LiveApi], raw: bytes) -> None:
    assert statuses(send_to_both(both, raw))


@pytest.mark.parametrize("raw", HAND_MADE[:20], ids=range(20))
def test_both_lanes_answer_odd_requests_alike_in_pieces(both: dict[Lane, LiveApi], raw: bytes) -> None:
    pieces = re.compile(rb"\r\n|HTTP|Cont|er|.", re.DOTALL)
    assert statuses(send_to_both(both, raw, pieces.findall))


@pytest.mark.parametrize("fields", [{"work": 3}, {"work": 30}, {"dry_run": True}, {"criticality": "sheddable"}])
def test_both_lanes_decide_alike(both: dict[Lane, LiveApi], fields: dict[str, Any]) -> None:
    rows = [
        request(body=ask(CUSTOMER.decode(), service, **fields))
        for service in ("slow", "hits", "hits", "hits", "hits", "slow", "slow", "slow")
    ]
    replies = send_to_both(both, b"".join(rows))
    assert len(replies) == len(rows) + 1
