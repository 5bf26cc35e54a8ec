"""Both lanes of a node at once: the same bytes are sent to each, and their answers compared."""

import re
from collections.abc import Callable
from itertools import count
from typing import Any

from tests.support.live import LANES, Lane, LiveApi, Reply, exchange

_numbers = count(1)
CUSTOMER = b"CUSTOMER-NAME"

IDS_AND_TIMES = [
    (re.compile(rb'"reservation":"[^"]*"'), b'"reservation":"id"'),
    (re.compile(rb'"(balance|retry_after_ms)":[-0-9.e]+'), rb'"\1":0'),
    (re.compile(rb"balance is [-0-9.e+]+"), b"balance is 0"),
    (re.compile(rb'"request_id":"[0-9a-f]{32}"'), b'"request_id":"made"'),
]


def normal(reply: Reply, customer: bytes) -> tuple[int, list[tuple[str, str]], bytes, bool]:
    body = reply.body.replace(customer, CUSTOMER)
    for pattern, instead in IDS_AND_TIMES:
        body = pattern.sub(instead, body)
    headers = [(name, re.sub(r"\b([rt])=\d+|^[0-9a-f]{32}$", r"\1=0", value)) for name, value in reply.headers]
    skipped = {"date", "content-length", "retry-after"}  # balances differ in their last digits, and so in length
    return reply.status, [pair for pair in headers if pair[0] not in skipped], body, reply.complete


def whole(raw: bytes) -> list[bytes]:
    return [raw]


def send_to_both(both: dict[Lane, LiveApi], raw: bytes, parts: Callable[[bytes], list[bytes]] = whole) -> list[Reply]:
    """The answers, the same from both."""
    answers: dict[Lane, Any] = {}
    number = next(_numbers)
    replies: list[Reply] = []
    for lane in reversed(LANES):
        own = f"{lane[0]}{number:012}".encode()
        assert len(own) == len(CUSTOMER)
        replies = exchange(both[lane], *parts(raw.replace(CUSTOMER, own)))
        answers[lane] = [normal(reply, own) for reply in replies]
    assert answers["fast"] == answers["plain"]
    assert all(reply.status < 500 for reply in replies)
    return replies
