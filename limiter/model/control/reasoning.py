"""Why a bucket is steered as it is, for people: what was measured, which rule was applied, what came of it (R11)."""

from __future__ import annotations

from msgspec import Struct

from limiter.model.bucket.bucket import Flags, Record
from limiter.model.control import mechanism
from limiter.model.control.caps import Reason
from limiter.model.control.kept_state import KeptState
from limiter.model.overload.overload_control import Note
from limiter.model.overload.shedding import CLASSES, Shedding
from limiter.model.policy.limit import policy_of


class Cycle(Struct, frozen=True):
    """What was done to a cap in one cycle."""

    at_ms: float
    committed: float
    """C: work units a second"""
    work_rate: float
    """L: work units a second"""
    work_per_request: float
    """f: work units"""
    rejection_rate: float
    rule: str
    before: float
    after: float
    """Requests a second."""
    sentence: str


class Step(Struct, frozen=True):
    """What one of the controllers of overload did."""

    at_ms: float
    controller: str
    """expectations | response_time | utilisation"""
    rule: str
    before: float
    after: float
    sentence: str


class Overload(Struct, frozen=True):
    """What overload control does to one bucket, and why."""

    overloaded: bool
    quality: float
    refused_shares: dict[str, float]
    """By class: 0.4 = four in ten are refused."""
    rates: dict[str, float | None]
    """By class: requests a second; None: not limited."""
    steps: list[Step]
    """The last ones, oldest first."""


class Reasoning(Struct, frozen=True):
    """One bucket, as the controller sees it."""

    bucket: str
    policy: str
    mechanism: str
    mechanism_reason: str
    committed: float | None
    """The bucket's share of the policy's rate; None for a quota, which has none."""
    cap: float | None
    """Requests a second; None where work is counted."""
    charge: float | None
    """What was learned; None where nothing was."""
    charge_error: float | None
    """0.5: requests do half as much again as they are charged."""
    share: float | None
    """Part of a divided limit that was lent to this partition; None: an equal part."""
    share_ends_in_ms: float | None
    cycles: list[Cycle]
    """The last ones, oldest first."""
    overload: Overload | None
    """None where the policy has no `overload` block."""


def reasoning(bucket: str, record: Record, memory: KeptState | None, now_us: float) -> Reasoning:
    """What is known of a bucket at a time of the store's."""
    counts = record.counts_requests and not record.is_quota
    share_left_us = record.share_until_us - now_us
    return Reasoning(
        bucket=bucket,
        policy=policy_of(bucket),
        mechanism="quota" if record.is_quota else "requests" if counts else "work",
        mechanism_reason=_mechanism_reason(record, memory),
        committed=None if record.is_quota else record.committed,
        cap=record.rate if counts else None,
        charge=record.charge or None,
        charge_error=memory.state.learning.error if memory and record.charge else None,
        share=record.share if share_left_us > 0 else None,
        share_ends_in_ms=share_left_us / 1000 if share_left_us > 0 else None,
        cycles=[_cycle(reason) for reason in memory.reasons] if memory else [],
        overload=None if record.shedding is None else _overload(record.shedding, memory),
    )


def _overload(known: Shedding, memory: KeptState | None) -> Overload:
    return Overload(
        overloaded=known.overloaded == 1,
        quality=known.quality,
        refused_shares=dict(zip(CLASSES, known.refused_shares, strict=True)),
        rates={name: rate or None for name, rate in zip(CLASSES, known.rates, strict=True)},
        steps=[_step(note) for note in memory.notes] if memory else [],
    )


def _step(note: Note) -> Step:
    at_us, controller, rule, before, after, sentence = note
    return Step(at_us / 1000, controller, rule, before, after, sentence)


def _mechanism_reason(record: Record, memory: KeptState | None) -> str:
    if Flags.AUTO not in record.flags:
        return "set by the policy"
    if memory is None:
        return "chosen while running: nothing was measured yet"
    state = memory.state
    return mechanism.explain(state.pace, state.moments, counts_requests=record.counts_requests)


def _cycle(reason: Reason) -> Cycle:
    return Cycle(
        reason.at_us / 1000,
        reason.committed,
        reason.work_rate,
        reason.work_per_request,
        reason.rejection_rate,
        reason.rule,
        reason.before,
        reason.after,
        reason.sentence,
    )
