"""Decisions, settlements and errors as HTTP answers: the same for both lanes."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from http import HTTPStatus
from math import ceil

import msgspec

from api.answer import JSON, PROBLEM, Answer
from api.auth import Forbidden, Unauthenticated
from api.decode import BadRequest, Invalid
from api.rate_limit_headers import HeaderSet, lines, reset_s
from api.schemas import GrantedAnswer, Limit, Problem, RefusedAnswer, SettledAnswer
from limiter.errors import IdempotencyConflict, NotDecided, SettledOtherwise, UnknownReservation
from limiter.model.contract import Decision, Granted, LimitState, Refused, Settled
from limiter.model.policy import PolicyError
from limiter.store.errors import StoreError
from limiter.store.inspect import CursorError
from limiter.store.policies import PolicyMissing, RevisionConflict

log = logging.getLogger(__name__)

TYPES = "https://iana.org/assignments/http-problem-types"
QUOTA_EXCEEDED = f"{TYPES}#quota-exceeded"
REDUCED_CAPACITY = f"{TYPES}#temporary-reduced-capacity"
BLANK = "about:blank"

QUOTA_EXCEEDED_TITLE = "Request cannot be satisfied as assigned quota has been exceeded"
REDUCED_CAPACITY_TITLE = "Request cannot be satisfied due to temporary server capacity constraints"
CHALLENGE = 'Bearer realm="headgate"'

_REPLAYED = b"idempotency-replayed: true\r\n"
_encode = msgspec.json.Encoder().encode


class Renderer:
    """Renders with the set of rate limit headers that is configured."""

    def __init__(self, headers: HeaderSet = "draft") -> None:
        self._headers: HeaderSet = headers

    def decision(self, decision: Decision) -> Answer:
        """The answer to an acquire."""
        if isinstance(decision, Granted):
            head = JSON + lines(decision.limits, self._headers)
            return Answer(200, head + _REPLAYED if decision.replayed else head, _granted(decision))
        head = PROBLEM + lines(decision.limits, self._headers)
        if decision.retry == "after":
            resets = [reset_s(limit) for limit in decision.limits if not limit.passed and not limit.shadow]
            head += b"retry-after: %d\r\n" % max([_seconds(decision.retry_after_ms), *resets])
        return Answer(429, head + _REPLAYED if decision.replayed else head, _refused(decision))


def decision_body(decision: Decision) -> Answer:
    """The same without headers: within a batch nobody would see them."""
    if isinstance(decision, Granted):
        return Answer(200, b"", _granted(decision))
    return Answer(429, b"", _refused(decision))


def _granted(granted: Granted) -> bytes:
    return _encode(
        GrantedAnswer(
            True,
            granted.reservation,
            granted.charged,
            granted.expires_in_ms,
            _limits(granted.limits),
            granted.overloaded,
            granted.quality,
            granted.degraded,
        )
    )


def _refused(refused: Refused) -> bytes:
    return _encode(
        RefusedAnswer(
            type=QUOTA_EXCEEDED,
            title=QUOTA_EXCEEDED_TITLE,
            status=429,
            detail=refused.detail,
            granted=False,
            policy=refused.policy,
            reason=refused.reason,
            retry=refused.retry,
            retry_after_ms=refused.retry_after_ms,
            limits=_limits(refused.limits),
            violated_policies=[limit.policy for limit in refused.limits if not limit.passed and not limit.shadow],
            degraded=refused.degraded,
        )
    )


def settled(answer: Settled) -> Answer:
    """The answer to a settle."""
    return Answer(200, JSON, _encode(_settled(answer)))


def _settled(answer: Settled) -> SettledAnswer:
    return SettledAnswer(
        answer.work, answer.adjusted, answer.stop, answer.duplicate, answer.late, _limits(answer.limits)
    )


def batch(answers: Iterable[Answer]) -> Answer:
    """The answers to a batch's operations, each as it would have stood alone, with its status."""
    results = [
        b'{"status":%d,%b' % (answer.status, answer.body[1:]) if answer.status == 200 else answer.body
        for answer in answers
    ]
    return Answer(200, JSON, b'{"results":[' + b",".join(results) + b"]}")


def problem(status: int, reason: str, detail: str) -> Answer:
    """An error that has no more to tell than its kind."""
    return _problem(Problem(BLANK, HTTPStatus(status).phrase, status, detail, reason))


def failure(error: Exception) -> Answer:
    """What an exception means to the caller. One that means nothing is ours: 500, and logged."""
    if isinstance(error, BadRequest):
        return _bad_request(error)
    if isinstance(error, NotDecided):
        return _not_decided(error)
    if isinstance(error, SettledOtherwise):
        title = HTTPStatus.CONFLICT.phrase
        return _problem(Problem(BLANK, title, 409, str(error), "settled_otherwise", first=_settled(error.first)))
    for kind, (status, reason) in _KINDS.items():
        if isinstance(error, kind):
            answer = problem(status, reason, str(error))
            return answer.with_header("www-authenticate", CHALLENGE) if status == 401 else answer
    log.error("a request failed", exc_info=error)
    return problem(500, "internal", "the request failed for a reason of ours; it is in the log")


_KINDS: dict[type[Exception], tuple[int, str]] = {
    StoreError: (503, "store_unavailable"),
    PolicyMissing: (404, "no_such_policy"),
    RevisionConflict: (412, "revision"),
    PolicyError: (422, "invalid"),
    CursorError: (422, "invalid"),
    UnknownReservation: (404, "unknown_reservation"),
    IdempotencyConflict: (409, "idempotency_conflict"),
    Unauthenticated: (401, "unauthenticated"),
    Forbidden: (403, "forbidden"),
}


def _bad_request(error: BadRequest) -> Answer:
    errors = error.problems if isinstance(error, Invalid) else ()
    return _problem(
        Problem(BLANK, HTTPStatus(error.status).phrase, error.status, str(error), error.reason, errors=errors)
    )


def _not_decided(error: NotDecided) -> Answer:
    answer = _problem(
        Problem(
            REDUCED_CAPACITY,
            REDUCED_CAPACITY_TITLE,
            503,
            str(error),
            error.reason,
            policy=error.policy,
            retry_after_ms=error.retry_after_ms,
        )
    )
    return answer.with_header("retry-after", str(_seconds(error.retry_after_ms)))


def _problem(body: Problem) -> Answer:
    return Answer(body.status, PROBLEM, _encode(body))


def _limits(limits: Sequence[LimitState]) -> list[Limit]:
    return [
        Limit(limit.policy, limit.mechanism, limit.balance, limit.capacity, limit.rate, limit.passed, limit.shadow)
        for limit in limits
    ]


def _seconds(milliseconds: float) -> int:
    return ceil(milliseconds / 1000)
