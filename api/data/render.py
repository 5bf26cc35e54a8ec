"""Decisions, settlements and errors as HTTP answers: the same for both lanes."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from functools import partial
from http import HTTPStatus
from math import ceil

import msgspec
from msgspec import UNSET
from msgspec.structs import replace

from api.data import plain_answers
from api.data.answer import JSON, PROBLEM, RETRY, Answer
from api.data.auth import Forbidden, Unauthenticated
from api.data.decode import BadRequest, Invalid
from api.data.field_problems import FieldProblem
from api.data.plain_answers import QUOTA_EXCEEDED, QUOTA_EXCEEDED_TITLE, TYPES
from api.data.rate_limit_headers import HeaderSet, draft, lines, reset_s
from api.data.schemas import GrantedAnswer, Limit, Problem, RefusedAnswer, SettledAnswer
from limiter.engine.operation import Operation
from limiter.engine.request_errors import (
    ClosedLease,
    IdempotencyConflict,
    LocalNotAllowed,
    NotDecided,
    OutdatedLease,
    SettledOtherwise,
    TooManyLimits,
    TooMuchAtOnce,
    Uncovered,
    UnfitField,
    UnknownLease,
    UnknownReservation,
)
from limiter.engine.settler import Correction
from limiter.model.bucket.contract import Decision, Granted, LimitState, Refused, Settled
from limiter.model.bucket.decision import PlainRefusal
from limiter.model.bucket.refusals import Remembered
from limiter.model.policy.problems import PolicyError
from limiter.store.inspect import CursorError
from limiter.store.keys import Slot
from limiter.store.policies.policy_sets import OwnedByOthers
from limiter.store.policies.policy_store import PolicyMissing, RevisionConflict
from limiter.store.store_errors import StoreError, without_address

log = logging.getLogger(__name__)

REDUCED_CAPACITY = f"{TYPES}#temporary-reduced-capacity"
BLANK = "about:blank"

REDUCED_CAPACITY_TITLE = "Request cannot be satisfied due to temporary server capacity constraints"
CHALLENGE = 'Bearer realm="headgate"'

_FORBIDDEN = frozenset({"denied", "blocked"})
_KINDS_OF_REFUSAL = {
    "overload": (REDUCED_CAPACITY, REDUCED_CAPACITY_TITLE),
    "denied": (BLANK, HTTPStatus.FORBIDDEN.phrase),
    "blocked": (BLANK, HTTPStatus.FORBIDDEN.phrase),
}
_REPLAYED = b"idempotency-replayed: true\r\n"
_encode = msgspec.json.Encoder().encode


class Renderer:
    """Renders answers with the configured set of rate limit headers."""

    def __init__(self, headers: HeaderSet = "draft") -> None:
        self._lines = draft if headers == "draft" else partial(lines, headers=headers)
        self._is_draft = headers == "draft"

    def answer(self, operations: Sequence[Operation]) -> None:
        """Render the answers to acquires, and give them to their callers."""
        is_draft = self._is_draft
        for operation in operations:
            outcome = operation.outcome
            try:
                if outcome is None and is_draft:  # nearly all
                    status, (head, body) = 200, plain_answers.rendered(operation)
                elif operation.remembered is not None:
                    status, head, body = self._repeated(operation.remembered)
                elif type(outcome) is PlainRefusal and is_draft:
                    status, (head, body) = 429, plain_answers.refused(outcome)
                else:
                    operation.place.take(self.decision(outcome or operation.decision()))
                    continue
            except Exception as error:  # an error in one must not keep the others from their answers
                operation.place.take(failure(error))
                continue
            operation.place.take_plain(status, head, body)

    def _repeated(self, refusal: Remembered[Slot]) -> tuple[int, bytes, bytes]:
        """Render a refusal that is repeated word for word only once."""
        answer: Answer | None = refusal.kept
        if answer is None:
            answer = refusal.kept = self.decision(refusal.answer.refused)
        return answer.status, answer.head, answer.body

    def decision(self, outcome: Decision | PlainRefusal | Exception) -> Answer:
        """Return the answer to an acquire."""
        try:
            if type(outcome) is PlainRefusal:
                if self._is_draft:
                    return Answer(429, *plain_answers.refused(outcome))
                return self._refused(outcome.refused())
            if type(outcome) is Granted:
                head = JSON + self._lines(outcome.limits)
                return Answer(200, head + _REPLAYED if outcome.replayed else head, _granted(outcome))
            return self._refused(outcome) if type(outcome) is Refused else failure(outcome)  # type: ignore[arg-type]
        except Exception as error:
            return failure(error)

    def _refused(self, outcome: Refused) -> Answer:
        head = PROBLEM + self._lines(outcome.limits) + RETRY[outcome.retry]
        if outcome.retry == "after":
            resets = [reset_s(limit) for limit in outcome.limits if not limit.passed and not limit.shadow]
            head += b"retry-after: %d\r\n" % max([_seconds(outcome.retry_after_ms), *resets])
        status = _status(outcome)
        return Answer(status, head + _REPLAYED if outcome.replayed else head, _refused(outcome, status))


def decision_body(operation: Operation) -> Answer:
    """Return the answer without headers: within a batch nobody would see them."""
    outcome = operation.outcome
    try:
        if outcome is None:
            return Answer(200, b"", plain_answers.body(operation))
        if type(outcome) is PlainRefusal:
            return Answer(429, b"", plain_answers.refused_body(outcome))
        if type(outcome) is Granted:
            return Answer(200, b"", _granted(outcome))
        if type(outcome) is Refused:
            return Answer(_status(outcome), b"", _refused(outcome, _status(outcome)))
        return failure(outcome)  # type: ignore[arg-type]
    except Exception as error:
        return failure(error)


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
            granted.covered,
            UNSET if granted.state is None else granted.state,
            UNSET if granted.refused_share is None else granted.refused_share,
            UNSET if granted.drawn_share is None else granted.drawn_share,
        )
    )


def _status(refused: Refused) -> int:
    """Return 429 if another time may pass; 403 if a policy refuses whatever the balance."""
    return 403 if refused.reason in _FORBIDDEN else 429


def _refused(refused: Refused, status: int) -> bytes:
    kind, title = _KINDS_OF_REFUSAL.get(refused.reason, (QUOTA_EXCEEDED, QUOTA_EXCEEDED_TITLE))
    return _encode(
        RefusedAnswer(
            type=kind,
            title=title,
            status=status,
            detail=refused.detail,
            granted=False,
            policy=refused.policy,
            reason=refused.reason,
            retry=refused.retry,
            retry_after_ms=refused.retry_after_ms,
            limits=_limits(refused.limits),
            violated_policies=[limit.policy for limit in refused.limits if not limit.passed and not limit.shadow],
            degraded=refused.degraded,
            overloaded=refused.overloaded,
            state=refused.state,
            refused_share=refused.refused_share,
            drawn_share=refused.drawn_share,
        )
    )


def settled(operation: Correction) -> Answer:
    """Return the answer to a settle."""
    outcome = operation.outcome
    if outcome is None:  # nearly all
        try:
            return Answer(200, JSON, plain_answers.settled_body(operation))
        except Exception as error:
            return failure(error)
    if isinstance(outcome, Settled):
        return Answer(200, JSON, settled_body(outcome))
    return failure(outcome)


def settled_body(answer: Settled) -> bytes:
    """Return the effect of a settle."""
    return _encode(_settled(answer))


def _settled(answer: Settled) -> SettledAnswer:
    return SettledAnswer(
        answer.work, answer.adjusted, answer.uncollected, answer.stop, answer.duplicate, answer.late,
        answer.expires_in_ms, _limits(answer.limits),
    )  # fmt: skip


def batch(answers: Iterable[Answer]) -> Answer:
    """Return the answers to a batch's operations, each as if alone, with its status."""
    results: list[bytes] = []
    error = None
    for answer in answers:
        results.append(b'{"status":%d,%b' % (answer.status, answer.body[1:]) if answer.status == 200 else answer.body)
        error = error or answer.error
    return Answer(200, JSON, b'{"results":[' + b",".join(results) + b"]}", error)


def problem(status: int, reason: str, detail: str) -> Answer:
    """Return an error of this kind without further fields."""
    return _problem(Problem(BLANK, HTTPStatus(status).phrase, status, detail, reason))


def failure(error: Exception) -> Answer:
    """Return the answer for an exception. One without a meaning for callers is an internal error: 500, and logged."""
    if isinstance(error, BadRequest):
        return _bad_request(error)
    if isinstance(error, UnfitField):
        return _bad_request(Invalid([FieldProblem(error.field, error.found, error.allowed)]))
    if isinstance(error, PolicyError):
        return _bad_policy(error)
    if isinstance(error, NotDecided):
        return _not_decided(error)
    if isinstance(error, StoreError):
        log.warning("a request could not be served: %s", error)  # the store's address stays in the log
        return _not_decided(NotDecided("store_unavailable", without_address(error)))
    if isinstance(error, PolicyMissing):
        return problem(404, f"no_such_{error.place.kind}", str(error))
    if isinstance(error, SettledOtherwise):
        title = HTTPStatus.CONFLICT.phrase
        return _problem(Problem(BLANK, title, 409, str(error), "settled_otherwise", first=_settled(error.first)))
    if isinstance(error, LocalNotAllowed):
        title = HTTPStatus.FORBIDDEN.phrase
        return _problem(Problem(BLANK, title, 403, str(error), "local_not_allowed", policy=error.policy))
    for kind, (status, reason) in _KINDS.items():
        if isinstance(error, kind):
            answer = problem(status, reason, str(error))
            return answer.with_header("www-authenticate", CHALLENGE) if status == 401 else answer
    answer = problem(500, "internal", "the request failed because of an internal error; the log of the node has it")
    return replace(answer, error=error)


_KINDS: dict[type[Exception], tuple[int, str]] = {
    RevisionConflict: (412, "revision"),
    OwnedByOthers: (409, "owned_by_others"),
    CursorError: (422, "invalid"),
    UnknownReservation: (404, "unknown_reservation"),
    UnknownLease: (404, "lease_unknown"),
    OutdatedLease: (409, "lease_outdated"),
    ClosedLease: (409, "lease_closed"),
    Uncovered: (403, "uncovered"),
    TooManyLimits: (422, "too_many_policies"),
    TooMuchAtOnce: (413, "too_long"),
    IdempotencyConflict: (409, "idempotency_conflict"),
    Unauthenticated: (401, "unauthenticated"),
    Forbidden: (403, "forbidden"),
}


def _bad_request(error: BadRequest) -> Answer:
    errors = error.problems if isinstance(error, Invalid) else ()
    return _problem(
        Problem(BLANK, HTTPStatus(error.status).phrase, error.status, str(error), error.reason, errors=errors)
    )


def _bad_policy(error: PolicyError) -> Answer:
    """Return the faults of a policy, on one line and field by field."""
    first, *others = error.problems
    detail = f"{first} (and {len(others)} more)" if others else first
    errors = tuple(FieldProblem(problem.field, problem.found, problem.allowed) for problem in error.fields)
    return _problem(Problem(BLANK, HTTPStatus(422).phrase, 422, detail, "invalid", errors=errors))


def _not_decided(error: NotDecided) -> Answer:
    answer = _problem(
        Problem(
            REDUCED_CAPACITY,
            REDUCED_CAPACITY_TITLE,
            503,
            str(error),
            error.reason,
            policy=error.policy,
            retry=error.retry,
            retry_after_ms=error.retry_after_ms,
        )
    )
    answer = answer.with_header("headgate-retry", error.retry)
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
