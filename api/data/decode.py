"""Decode bodies into requests, in the same way for both lanes, so that both refuse the same in the same words.

bytes ── msgspec ──► request
           └─ refused ── json_text, explain ──► the field, what was found, what is allowed
"""

from __future__ import annotations

from collections.abc import Sequence
from heapq import nsmallest
from typing import Annotated, Any, TypeVar

import msgspec
from msgspec import Meta, Raw, Struct

from api.data import json_text
from api.data.field_problems import PROBLEMS_MAX, VISIBLE, FieldProblem, problems
from api.data.json_text import Fields, Malformed, TooMany, shown
from limiter.model.bucket.contract import AcquireRequest, SettleRequest, SignalRequest
from limiter.model.bucket.lease_contract import LeaseRequest, RenewRequest, ReturnRequest

StructT = TypeVar("StructT", bound=Struct)

JSON = b"application/json"
MERGE_PATCH = b"application/merge-patch+json"
OPERATIONS_MAX = 1000
BATCH_PROBLEMS_MAX = 200
"""Problems that the answer to a batch lists; every operation after that lists its first."""
IDEMPOTENCY_KEY_MAX = 255

# Characters that a header carries unambiguously (RFC 9110, 5.5): so a key is the same there and in a batch.
IdempotencyKey = Annotated[str, Meta(min_length=1, max_length=IDEMPOTENCY_KEY_MAX, pattern=r"^[!-~]+$(?!\n)")]


class AcquireOperation(AcquireRequest, frozen=True, forbid_unknown_fields=True, tag_field="op", tag="acquire"):
    """An acquire within a batch; its idempotency key, otherwise a header, is a field."""

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
    """The request cannot be understood. Holds the kind of answer and the reason."""

    status = 400
    reason = "malformed"


class Invalid(BadRequest):
    """The body is JSON, but has wrong fields: 422, field by field."""

    status = 422
    reason = "invalid"

    def __init__(self, found: Sequence[FieldProblem]) -> None:
        self.problems = tuple(found)
        more = f" (and {len(found) - 1} more)" if len(found) > 1 else ""
        super().__init__(f"{found[0]}{more}")


class TooLong(BadRequest):
    """More operations or bytes than are accepted: 413 (F-H2)."""

    status = 413
    reason = "too_long"


class WrongType(BadRequest):
    """The body is not declared as JSON: 415 (F-V5)."""

    status = 415
    reason = "content_type"


class CrossSite(BadRequest):
    """The request comes from a page of another site, as the browser says: 403 (F-H15)."""

    status = 403
    reason = "cross_site"


_ACQUIRE = msgspec.json.Decoder(AcquireRequest)
_SETTLE = msgspec.json.Decoder(SettleRequest)
_BATCH = msgspec.json.Decoder(BatchRequest)
_SIGNALS = msgspec.json.Decoder(SignalRequest)
_LEASE = msgspec.json.Decoder(LeaseRequest)
_RENEW = msgspec.json.Decoder(RenewRequest)
_RETURN = msgspec.json.Decoder(ReturnRequest)
_NAMES = msgspec.json.Decoder(dict[str, Raw])
_PLAIN = msgspec.json.Decoder()
_BATCH_NAMES = msgspec.json.Decoder(_Names)
_OPERATIONS: dict[str, type[Operation]] = {"acquire": AcquireOperation, "settle": SettleOperation}

# Errors of decoders: msgspec's own, and those of the functions that it calls.
_REFUSED = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)


def acquire(body: bytes) -> AcquireRequest:
    """Decode the body of an acquire, or raise BadRequest."""
    try:
        request = _ACQUIRE.decode(body)
        # Each key has a colon: with the smallest possible number of colons, no key occurs twice.
        if body.count(b":") == 1 + len(request.descriptor) + (request.work is not None):
            return request
        keys = len(_NAMES.decode(body)) + len(request.descriptor)
    except _REFUSED as error:
        raise _explained(body, AcquireRequest, error) from None
    if json_text.has_twice(body, keys):
        raise _explained(body, AcquireRequest)
    return request


def settle(body: bytes) -> SettleRequest:
    """Decode the body of a settle, or raise BadRequest."""
    try:
        request = _SETTLE.decode(body)
        # As above: reservation, work, and every field whose value is not its default.
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
    """Decode the body of a report, or raise BadRequest."""
    try:
        request = _SIGNALS.decode(body)
        keys = len(_NAMES.decode(body)) + len(request.signals) + len(request.key or ())
    except _REFUSED as error:
        raise _explained(body, SignalRequest, error) from None
    if json_text.has_twice(body, keys):
        raise _explained(body, SignalRequest)
    return request


def lease(body: bytes) -> LeaseRequest:
    """Decode the body of a first request for a lease, or raise BadRequest."""
    return _strictly(body, _LEASE, LeaseRequest)


def renew(body: bytes) -> RenewRequest:
    """Decode the body of a renewal, or raise BadRequest."""
    return _strictly(body, _RENEW, RenewRequest)


def give_back(body: bytes) -> ReturnRequest:
    """Decode the body of a lease's return, or raise BadRequest."""
    return _strictly(body, _RETURN, ReturnRequest)


def _strictly(body: bytes, decoder: msgspec.json.Decoder[StructT], kind: type[StructT]) -> StructT:
    try:
        request = decoder.decode(body)
        keys = _count_keys(_PLAIN.decode(body))
    except _REFUSED as error:
        raise _explained(body, kind, error) from None
    if json_text.has_twice(body, keys):
        raise _explained(body, kind)
    return request


def _count_keys(document: Any) -> int:
    if isinstance(document, dict):
        return len(document) + sum(map(_count_keys, document.values()))
    return sum(map(_count_keys, document)) if isinstance(document, list) else 0


def batch(body: bytes) -> Sequence[Operation | BadRequest]:
    """Decode the operations of a batch in order; a wrong one is replaced by the error that its own call would get."""
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
    """Return the number of keys of an operation, if every field with its default value was left out."""
    if type(operation) is AcquireOperation:
        return 2 + len(operation.descriptor) + (operation.work is not None)
    return 3  # op, reservation and work


def idempotency_key(header: bytes | None) -> str | None:
    """Return the value of an `Idempotency-Key` header, or raise BadRequest."""
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
    """Raise WrongType unless the body is declared as JSON: a page of another site cannot do that unasked (F-H15)."""
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
    """Decode a body as plain data, or raise BadRequest; impossible values stay as written (`api.data.json_text`)."""
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
