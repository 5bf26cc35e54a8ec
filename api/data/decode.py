"""Bodies into requests: the same for both lanes, so that what one refuses the other refuses in the same words.

bytes ── msgspec ──► request
           └─ refused ── json_text, explain ──► the field, what was found, what is allowed
"""

from __future__ import annotations

from collections.abc import Sequence
from heapq import nsmallest
from typing import Annotated, Any

import msgspec
from msgspec import Meta, Raw, Struct

from api.data import json_text
from api.data.field_problems import PROBLEMS_MAX, VISIBLE, FieldProblem, problems
from api.data.json_text import Fields, Malformed, TooMany, shown
from limiter.model.bucket.contract import AcquireRequest, SettleRequest, SignalRequest

JSON = b"application/json"
MERGE_PATCH = b"application/merge-patch+json"
OPERATIONS_MAX = 1000
BATCH_PROBLEMS_MAX = 200
"""Problems that the answer to a batch lists; every operation after that names its first."""
IDEMPOTENCY_KEY_MAX = 255

# What a header carries without a doubt about its encoding (RFC 9110, 5.5): a key is the same there and in a batch.
IdempotencyKey = Annotated[str, Meta(min_length=1, max_length=IDEMPOTENCY_KEY_MAX, pattern=r"^[!-~]+$(?!\n)")]


class AcquireOperation(AcquireRequest, frozen=True, forbid_unknown_fields=True, tag_field="op", tag="acquire"):
    """An acquire within a batch; its idempotency key, elsewhere a header, stands beside the rest."""

    idempotency_key: IdempotencyKey | None = None


class SettleOperation(SettleRequest, frozen=True, forbid_unknown_fields=True, tag_field="op", tag="settle"):
    """A settle within a batch."""


Operation = AcquireOperation | SettleOperation


class BatchRequest(Struct, frozen=True, forbid_unknown_fields=True):
    """Up to 1000 operations, answered in order."""

    operations: Annotated[list[Operation], Meta(max_length=OPERATIONS_MAX)]


class _Names(Struct):
    """The names in a batch, for counting."""

    operations: list[dict[str, Raw]]


class BadRequest(Exception):
    """The request cannot be understood: what kind of answer that is, and why."""

    status = 400
    reason = "malformed"


class Invalid(BadRequest):
    """JSON, but not what was asked for: 422, field by field."""

    status = 422
    reason = "invalid"

    def __init__(self, found: Sequence[FieldProblem]) -> None:
        self.problems = tuple(found)
        more = f" (and {len(found) - 1} more)" if len(found) > 1 else ""
        super().__init__(f"{found[0]}{more}")


class TooLong(BadRequest):
    """More at once than is taken: 413 (F-H2)."""

    status = 413
    reason = "too_long"


class WrongType(BadRequest):
    """Not sent as JSON: 415 (F-V5)."""

    status = 415
    reason = "content_type"


class CrossSite(BadRequest):
    """Sent by a page of another site, in a browser that says so: 403 (F-H15)."""

    status = 403
    reason = "cross_site"


_ACQUIRE = msgspec.json.Decoder(AcquireRequest)
_SETTLE = msgspec.json.Decoder(SettleRequest)
_BATCH = msgspec.json.Decoder(BatchRequest)
_SIGNALS = msgspec.json.Decoder(SignalRequest)
_NAMES = msgspec.json.Decoder(dict[str, Raw])
_BATCH_NAMES = msgspec.json.Decoder(_Names)
_OPERATIONS: dict[str, type[Operation]] = {"acquire": AcquireOperation, "settle": SettleOperation}

# What decoders raise: msgspec's own errors, and those of what it calls.
_REFUSED = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)


def acquire(body: bytes) -> AcquireRequest:
    """An acquire's body, or BadRequest."""
    try:
        request = _ACQUIRE.decode(body)
        # Each key brings a colon: as many as the least it must have, and none of them stands twice.
        if body.count(b":") == 1 + len(request.descriptor) + (request.work is not None):
            return request
        keys = len(_NAMES.decode(body)) + len(request.descriptor)
    except _REFUSED as error:
        raise _explained(body, AcquireRequest, error) from None
    if json_text.has_twice(body, keys):
        raise _explained(body, AcquireRequest)
    return request


def settle(body: bytes) -> SettleRequest:
    """A settle's body, or BadRequest."""
    try:
        request = _SETTLE.decode(body)
        # As above: reservation and work, and what has another value than its default.
        least = 2 + (request.latency_ms is not None) + (not request.final) + (request.outcome != "ok")
        if body.count(b":") == least:
            return request
        keys = len(_NAMES.decode(body))
    except _REFUSED as error:
        raise _explained(body, SettleRequest, error) from None
    if json_text.has_twice(body, keys):
        raise _explained(body, SettleRequest)
    return request


def signals(body: bytes) -> SignalRequest:
    """A report's body, or BadRequest."""
    try:
        request = _SIGNALS.decode(body)
        keys = len(_NAMES.decode(body)) + len(request.signals) + len(request.key or ())
    except _REFUSED as error:
        raise _explained(body, SignalRequest, error) from None
    if json_text.has_twice(body, keys):
        raise _explained(body, SignalRequest)
    return request


def batch(body: bytes) -> Sequence[Operation | BadRequest]:
    """A batch's operations in order, and for each that is wrong what its own call would have been told."""
    try:
        operations = _BATCH.decode(body).operations
        if body.count(b":") == 1 + sum(map(_least_keys, operations)):  # as above
            return operations
        names = _BATCH_NAMES.decode(body).operations
    except _REFUSED:
        return _batch_leniently(body)
    keys = 1 + sum(map(len, names)) + sum([len(o.descriptor) for o in operations if type(o) is AcquireOperation])
    return _batch_leniently(body) if json_text.has_twice(body, keys) else operations


def _least_keys(operation: Operation) -> int:
    """Of an operation as it is, if whatever has its default was left out."""
    if type(operation) is AcquireOperation:
        return 2 + len(operation.descriptor) + (operation.work is not None)
    return 3  # op, reservation and work


def idempotency_key(header: bytes | None) -> str | None:
    """The value of an `Idempotency-Key` header, or BadRequest."""
    if header is None:
        return None
    key = header.strip().decode("latin-1")
    if not 1 <= len(key) <= IDEMPOTENCY_KEY_MAX:
        raise _bad_key(f"{len(key)} characters")
    if not (key.isascii() and key.isprintable() and " " not in key):
        raise _bad_key(shown(key))
    return key


def _bad_key(found: str) -> Invalid:
    return Invalid([FieldProblem("Idempotency-Key", found, f"1 to {IDEMPOTENCY_KEY_MAX} {VISIBLE}")])


def check_json(content_type: bytes | None, content_encoding: bytes | None, *, kinds: Sequence[bytes] = (JSON,)) -> None:
    """WrongType unless the body says that it is JSON: a page of another site cannot, without asking first (F-H15)."""
    if content_type == JSON and content_encoding is None:
        return
    if content_encoding is not None and content_encoding.strip().lower() != b"identity":
        raise WrongType(f"Content-Encoding: found {_header(content_encoding)}; allowed: none")
    kind, _, parameters = (content_type or b"").lower().partition(b";")
    charset = parameters.strip().removeprefix(b"charset=").strip(b'"')
    if kind.strip() not in kinds or charset not in (b"", b"utf-8"):
        found = "none" if content_type is None else _header(content_type)
        raise WrongType(f"Content-Type: found {found}; allowed: {' or '.join(kind.decode() for kind in kinds)}")


def _header(value: bytes) -> str:
    return shown(value.decode("latin-1"))


def document(body: bytes) -> Any:
    """A body as plain data, or BadRequest; what cannot be in it is kept as it was written (`api.data.json_text`)."""
    try:
        return json_text.read(body)
    except Malformed as malformed:
        raise BadRequest(str(malformed)) from None
    except TooMany as error:
        raise TooLong(str(error)) from None


def _explained(body: bytes, kind: type[Struct], error: Exception | None = None) -> BadRequest:
    try:
        read = document(body)
    except BadRequest as refused:
        return refused
    found = problems(read, kind)
    return Invalid(found) if found else BadRequest(f"the body cannot be read: {error}")


def _batch_leniently(body: bytes) -> Sequence[Operation | BadRequest]:
    operations = _operations_of(document(body))
    if len(operations) > OPERATIONS_MAX:
        raise TooLong(f"operations: found {len(operations)}; allowed: at most {OPERATIONS_MAX}")
    read: list[Operation | BadRequest] = []
    left = BATCH_PROBLEMS_MAX
    for operation in operations:
        read.append(_operation(operation, most=max(1, min(left, PROBLEMS_MAX))))
        left -= len(read[-1].problems) if isinstance(read[-1], Invalid) else 0
    return read


def _operations_of(read: Any) -> list[Any]:
    allowed = f"an object with a list of at most {OPERATIONS_MAX} operations"
    if not isinstance(read, Fields):
        raise Invalid([FieldProblem("", shown(read), allowed)])
    names = nsmallest(PROBLEMS_MAX, read.keys() - {"operations"})
    unknown = [FieldProblem(shown(name), "a field that is not known", "operations") for name in names]
    twice = [FieldProblem("operations", "it more than once", "each name once")] if "operations" in read.twice else []
    if unknown or twice:
        raise Invalid([*unknown, *twice])
    operations = read.get("operations")
    if not isinstance(operations, list):
        raise Invalid([FieldProblem("operations", shown(operations), "a list of operations")])
    return operations


def _operation(read: Any, *, most: int) -> Operation | BadRequest:
    name = read.get("op") if isinstance(read, Fields) else None
    kind = _OPERATIONS.get(name) if isinstance(name, str) else None
    if kind is None:
        return Invalid([FieldProblem("op", shown(name), " or ".join(_OPERATIONS))])
    found = problems(read, kind, most)
    if found:
        return Invalid(found)
    try:
        return msgspec.convert(read, kind)
    except msgspec.ValidationError as error:
        return BadRequest(f"the operation cannot be read: {error}")
