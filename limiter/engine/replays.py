"""Answers under an `Idempotency-Key` that was used before: the first decision again, whatever has changed since.

The store keeps the first decision for a minute, with a `Memo` (`limiter.engine.operation`) that rebuilds its answer.
"""

from __future__ import annotations

import msgspec

from limiter.engine.granting import Granter
from limiter.engine.operation import Memo, Operation
from limiter.engine.request_errors import NotDecided
from limiter.model.bucket.contract import Decision, Granted, Refused
from limiter.model.bucket.operations import AcquireAnswer, Verdict
from limiter.model.bucket.reservation import ID_SIZE, Taken

_DAMAGED_MEMO = "what was kept under this Idempotency-Key cannot be read; nothing was charged, use another key"


def replay(granter: Granter, operation: Operation, answer: AcquireAnswer) -> Decision:
    """Return the first answer under an idempotency key, whatever has changed since."""
    try:
        memo = msgspec.msgpack.decode(answer.memo, type=Memo)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        raise NotDecided("record_damaged", _DAMAGED_MEMO) from None
    if len(memo.rows) != len(answer.buckets) or len(memo.id) != ID_SIZE:
        raise NotDecided("record_damaged", _DAMAGED_MEMO)
    operation.id, operation.lot = memo.id, None
    if memo.draw is not None:
        operation.draw(memo.draw)
    if [bucket for bucket, *_ in memo.rows] != list(operation.buckets):
        # The policies have changed: the charge still stands, but the limits cannot be shown.
        return _replay_without_limits(granter, operation, memo, answer)
    wants = operation.wants(answer.now_us)
    if answer.granted:
        granted = granter.grant(operation, wants, answer.buckets, answer.now_us)
        return msgspec.structs.replace(granted, replayed=True)
    refused = granter.refuse(operation, wants, answer.buckets, answer.now_us)
    return msgspec.structs.replace(refused, replayed=True)


def _replay_without_limits(granter: Granter, operation: Operation, memo: Memo, answer: AcquireAnswer) -> Decision:
    if not answer.granted:
        return Refused(
            policy="", reason="work", retry="after", retry_after_ms=1, limits=(), replayed=True,
            detail="refused before under this Idempotency-Key, by policies that have changed since",
        )  # fmt: skip
    rows = zip(memo.rows, answer.buckets, strict=True)
    taken: list[Taken] = [
        (
            bucket,
            told.charge,
            weight,
            told.in_requests or number in memo.counting,
            expected_ms,
            0.0,
            memo.learn_ids[number] if number < len(memo.learn_ids) else 0,
        )
        for number, ((bucket, weight, expected_ms), told) in enumerate(rows)
        if told.verdict is Verdict.DEBITED
    ]
    return Granted(
        reservation=granter.sign(operation, taken, answer.now_us),
        charged=max((charge for _, charge, _, in_requests, *_ in taken if not in_requests), default=0.0),
        expires_in_ms=memo.ttl_ms,
        limits=(),
        replayed=True,
    )
