"""The reasoning behind a bucket's steering, for people: measurement, applied rule and result (R11)."""

from __future__ import annotations

from msgspec import Struct

from limiter.model.bucket.bucket import Flags, Record
from limiter.model.control import mechanism
from limiter.model.control.caps import Reason
from limiter.model.control.kept_state import KeptState
from limiter.model.control.mechanism import AutoParams, Signs
from limiter.model.overload.overload_control import Note
from limiter.model.overload.overload_state import NOTHING_SEEN, seen, unpack_state
from limiter.model.overload.shedding import CLASSES, Shedding, State
from limiter.model.policy.limit import policy_of


class Cycle(Struct, frozen=True):
    """One cycle's change of a cap."""

    at_ms: float
    committed: float
    """C: work units per second"""
    work_rate: float
    """L: work units per second"""
    work_per_request: float
    """f: work units"""
    rejection_rate: float
    rule: str
    before: float
    after: float
    """Requests per second."""
    sentence: str


class Step(Struct, frozen=True):
    """One action of a part of overload control."""

    at_ms: float
    controller: str
    """expectations | response_time | utilisation"""
    rule: str
    before: float
    after: float
    sentence: str


class Overload(Struct, frozen=True):
    """Overload control's effect on one bucket, with reasons."""

    state: str
    """calm | degraded | recovering | overloaded"""
    overloaded: bool
    quality: float
    in_flight: float | None
    """Open reservations; None if not counted."""
    limits: dict[str, float | None]
    """By class: requests in flight, of all classes together, at which the class is refused; None: not limited."""
    target_ms: float | None
    late_share: float | None
    """Share of recent answers that were late and count."""
    percentile_ms: float | None
    """None if the policy keeps no histogram."""
    refused_shares: dict[str, float]
    """By class: 0.4 = four in ten are refused."""
    rates: dict[str, float | None]
    """By class: requests per second, by the published rules; None: not limited."""
    steps: list[Step]
    """The last ones, oldest first."""


class Reasoning(Struct, frozen=True):
    """One bucket, as the controller sees it."""

    bucket: str
    policy: str
    mechanism: str
    mechanism_reason: str
    committed: float | None
    """The bucket's share of the policy's rate; None for a quota, which has no rate."""
    cap: float | None
    """Requests per second; None if work is counted."""
    charge: float | None
    """The learned charge; None without one."""
    charge_error: float | None
    """0.5: requests do 1.5 times the work that they are charged."""
    share: float | None
    """Part of a divided limit that was lent to this partition; None: an equal part."""
    share_ends_in_ms: float | None
    cycles: list[Cycle]
    """The last ones, oldest first."""
    overload: Overload | None
    """None if the policy has no `overload` block."""


def reasoning(
    bucket: str, record: Record, memory: KeptState | None, now_us: float, auto: AutoParams | None = None
) -> Reasoning:
    """Return the reasoning about a bucket at a time of the store's clock."""
    counts = record.counts_requests and not record.is_quota
    share_left_us = record.share_until_us - now_us
    return Reasoning(
        bucket=bucket,
        policy=policy_of(bucket),
        mechanism="quota" if record.is_quota else "requests" if counts else "work",
        mechanism_reason=_mechanism_reason(record, memory, auto),
        committed=None if record.is_quota else record.committed,
        cap=record.rate if counts else None,
        charge=record.charge or None,
        charge_error=memory.state.learning.error if memory and record.charge else None,
        share=record.share if share_left_us > 0 else None,
        share_ends_in_ms=share_left_us / 1000 if share_left_us > 0 else None,
        cycles=[_cycle(reason) for reason in memory.reasons] if memory else [],
        overload=None if record.shedding is None else _overload(record, record.shedding, memory),
    )


def _overload(record: Record, known: Shedding, memory: KeptState | None) -> Overload:
    measured = seen(unpack_state(memory.overload)) if memory else NOTHING_SEEN
    return Overload(
        state=State(int(known.state)).word,
        overloaded=known.state == State.OVERLOADED,
        quality=known.quality,
        in_flight=None if record.slots is None else record.slots.count,
        limits={name: limit or None for name, limit in zip(CLASSES, known.limits, strict=True)},
        target_ms=measured.target_ms,
        late_share=measured.late_share,
        percentile_ms=measured.percentile_ms,
        refused_shares=dict(zip(CLASSES, known.refused_shares, strict=True)),
        rates={name: rate or None for name, rate in zip(CLASSES, known.rates, strict=True)},
        steps=[_step(note) for note in memory.notes] if memory else [],
    )


def _step(note: Note) -> Step:
    at_us, controller, rule, before, after, sentence = note
    return Step(at_us / 1000, controller, rule, before, after, sentence)


def _mechanism_reason(record: Record, memory: KeptState | None, auto: AutoParams | None) -> str:
    if Flags.AUTO not in record.flags:
        return "set by the policy"
    if memory is None:
        return "chosen while running: nothing was measured yet"
    state = memory.state
    params = AutoParams() if auto is None else auto
    signs = Signs(state.pace, state.moments, state.minute, state.caps.cost, params.capacity_s * record.committed)
    return mechanism.explain(signs, params, counts_requests=record.counts_requests)


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
