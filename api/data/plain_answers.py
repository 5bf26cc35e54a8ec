"""Plain grants and settles as bytes: a limit's face with the balance filled in.

A face is the text about a limit's buckets of one capacity and rate, in the body and in the headers, without the
numbers that change with every request. The bytes equal those that `api.data.render` makes of a `Granted`; tests
compare them.
"""

from __future__ import annotations

from math import ceil

import msgspec

from api.data.answer import JSON, PROBLEM, RETRY
from api.data.rate_limit_headers import INTEGER_MAX, policy_item
from limiter.engine.operation import IN_REQUESTS, Operation
from limiter.engine.settler import Correction
from limiter.model.bucket.decision import REASON_OF, YEAR_MS, YEAR_S, PlainRefusal
from limiter.model.policy.limit import Limit

FACES_MAX = 4096
"""Faces kept for all limits, about 2 KB each: a steered cap has many rates, and each key its own."""

_faces: dict[tuple[Limit, float, float, bool], Face] = {}

_encode = msgspec.json.Encoder().encode


_BODY = (
    b'{"granted":true,"reservation":"%b","charged":%b,"expires_in_ms":%d,"limits":[%b],'
    b'"overloaded":false,"quality":1.0,"degraded":false,"covered":true}'
)


TYPES = "https://iana.org/assignments/http-problem-types"
QUOTA_EXCEEDED = f"{TYPES}#quota-exceeded"
QUOTA_EXCEEDED_TITLE = "Request cannot be satisfied as assigned quota has been exceeded"
_REFUSED = (
    f'{{"type":"{QUOTA_EXCEEDED}","title":"{QUOTA_EXCEEDED_TITLE}","status":429,"detail":%b,"granted":false,'
    '"policy":%b,"reason":"%b","retry":"%%b","retry_after_ms":%%d,"limits":[%b%%b%b,"passed":false}],'
    '"violated-policies":[%b]}'
).encode()


def _quoted(text: bytes) -> bytes:
    """Escape text for use in a format."""
    return text.replace(b"%", b"%%")


class Face:
    """The text about a limit's buckets of one capacity and rate."""

    __slots__ = ("after", "before", "body", "head", "name", "policy", "refused_body", "refused_head")

    def __init__(self, limit: Limit, capacity: float, rate: float, in_requests: bool) -> None:
        mechanism = limit.mechanism
        if mechanism == "auto":
            mechanism = "requests" if in_requests else "work"
        self.name, self.policy = policy_item(limit.name, capacity, rate, min(capacity / rate, YEAR_S))
        self.head = b"%bratelimit: %b;r=%%d;t=%%d\r\nratelimit-policy: %b\r\n" % (
            JSON, _quoted(self.name), _quoted(self.policy),
        )  # fmt: skip
        """The header lines of an answer with this limit alone."""
        self.before = b'{"policy":%b,"mechanism":"%b","balance":' % (_encode(limit.name), mechanism.encode())
        self.after = b',"capacity":%b,"rate":%b}' % (_encode(capacity), _encode(rate))
        self.refused_head = b"%bratelimit: %b;r=%%d;t=%%d\r\nratelimit-policy: %b\r\n%%b" % (
            PROBLEM, _quoted(self.name), _quoted(self.policy),
        )  # fmt: skip
        name = _quoted(_encode(limit.name))
        self.refused_body = _REFUSED % (
            _detail(limit, capacity, rate, in_requests), name, REASON_OF[mechanism].encode(),
            _quoted(self.before), _quoted(self.after[:-1]), name,
        )  # fmt: skip
        self.body = _BODY.replace(b"[%b]", b"[%b%%b%b]" % (_quoted(self.before), _quoted(self.after)))


def _detail(limit: Limit, capacity: float, rate: float, in_requests: bool) -> bytes:
    """The sentence of a refusal, as a format for the balance and what is needed."""
    nan, inf = float("nan"), float("inf")  # they stand in a sentence as nothing else does, but for the limit's name
    refusal = PlainRefusal(limit, nan, rate, capacity, in_requests, need=inf, wait_us=0.0, never=False)
    before, _, after = _quoted(_encode(refusal.detail)).rpartition(b"nan")
    between, _, end = after.rpartition(b"inf")
    return b"%b%%.6g%b%%g%b" % (before, between, end)


def face_of(limit: Limit, capacity: float, rate: float, in_requests: bool) -> Face:
    """Return the face of a limit, made at first use."""
    key = (limit, capacity, rate, in_requests)
    face = _faces.get(key)
    if face is None:
        if len(_faces) >= FACES_MAX:
            _faces.clear()
        face = _faces[key] = Face(limit, capacity, rate, in_requests)
    return face


def rendered(operation: Operation) -> tuple[bytes, bytes]:
    """Return the header lines, in the draft's set, and the body."""
    values = operation.values
    if len(values) > 1:
        return _head_of_many(operation), body(operation)
    ((code, balance, _, rate, capacity),) = values  # nearly all
    limit = operation.limits[0]
    face = _faces.get((limit, capacity, rate, code >= IN_REQUESTS))
    if face is None:
        face = face_of(limit, capacity, rate, code >= IN_REQUESTS)
    full_ms = (capacity - balance) / rate * 1e3
    if 0 <= balance <= INTEGER_MAX and 0 <= full_ms < YEAR_MS:
        head = face.head % (balance, -(-full_ms // 1000))
    else:
        head = face.head % (_left(balance), _reset_s(balance, rate, capacity))
    return head, face.body % (
        operation.token, _encode(operation.charged), operation.request.ttl_ms, _encode(balance),
    )  # fmt: skip


def _head_of_many(operation: Operation) -> bytes:
    states, policies = [], []
    for limit, (code, balance, _, rate, capacity) in zip(operation.limits, operation.values, strict=True):
        face = face_of(limit, capacity, rate, code >= IN_REQUESTS)
        states.append(b"%b;r=%d;t=%d" % (face.name, _left(balance), _reset_s(balance, rate, capacity)))
        policies.append(face.policy)
    return b"%bratelimit: %b\r\nratelimit-policy: %b\r\n" % (JSON, b", ".join(states), b", ".join(policies))


def body(operation: Operation) -> bytes:
    """Return the body alone."""
    told = []
    for limit, (code, balance, _, rate, capacity) in zip(operation.limits, operation.values, strict=True):
        face = face_of(limit, capacity, rate, code >= IN_REQUESTS)
        told.append(b"%b%b%b" % (face.before, _encode(balance), face.after))
    return _BODY % (operation.token, _encode(operation.charged), operation.request.ttl_ms, b",".join(told))


def refused(refusal: PlainRefusal) -> tuple[bytes, bytes]:
    """Return the header lines, in the draft's set, and the body of a refusal by the only limit."""
    face = face_of(refusal.limit, refusal.capacity, refusal.rate, refusal.in_requests)
    wait_ms = refusal.wait_us / 1e3
    reset_s = int(-(-(min(YEAR_MS, wait_ms)) // 1000)) if wait_ms > 0 else 0
    after_ms = refusal.retry_after_ms
    body = _refused_body(refusal, face, after_ms)
    if refusal.never:
        return face.refused_head % (_left(refusal.balance), reset_s, RETRY["never"]), body
    retry_after = b"headgate-retry: after\r\nretry-after: %d\r\n" % max(ceil(after_ms / 1000), reset_s)
    return face.refused_head % (_left(refusal.balance), reset_s, retry_after), body


def refused_body(refusal: PlainRefusal) -> bytes:
    """Return the body alone."""
    face = face_of(refusal.limit, refusal.capacity, refusal.rate, refusal.in_requests)
    return _refused_body(refusal, face, refusal.retry_after_ms)


def _refused_body(refusal: PlainRefusal, face: Face, after_ms: int) -> bytes:
    balance = refusal.balance
    return face.refused_body % (
        balance, refusal.need, b"never" if refusal.never else b"after", after_ms, _encode(balance),
    )  # fmt: skip


_SETTLED = (
    b'{"work":%b,"adjusted":%b,"uncollected":%b,"stop":%b,"duplicate":false,"late":%b,"expires_in_ms":%d,"limits":[%b]}'
)
_BOOLEANS = {False: b"false", True: b"true"}


def settled_body(operation: Correction) -> bytes:
    """The body of the answer to a plain settle."""
    work, adjusted, uncollected, stop, late, expires_ms, present, in_requests, balance, rate, capacity, _ = (
        operation.plain
    )
    told, limit = b"", operation.limits[0]
    if present and limit is not None:
        face = face_of(limit, capacity, rate, in_requests)
        told = b"%b%b%b" % (face.before, _encode(balance), face.after)
    return _SETTLED % (
        _encode(work), _encode(adjusted), _encode(uncollected), _BOOLEANS[stop], _BOOLEANS[late], expires_ms, told,
    )  # fmt: skip


def _left(balance: float) -> int:
    return int(balance) if 0 <= balance <= INTEGER_MAX else 0 if balance < 0 else INTEGER_MAX


def _reset_s(balance: float, rate: float, capacity: float) -> int:
    """Return whole seconds until the bucket is full."""
    full_ms = (capacity - balance) / rate * 1e3
    if full_ms <= 0:
        return 0
    return int(-(-(min(YEAR_MS, full_ms)) // 1000))
