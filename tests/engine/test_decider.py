"""Acquire and settle by policies, on a real store."""

import asyncio
import math
import struct
from collections.abc import AsyncIterator
from typing import Any

import msgspec
import pytest

from limiter.engine.decider import Decider
from limiter.engine.operation import Memo, Operation
from limiter.engine.replays import replay
from limiter.engine.request_errors import (
    IdempotencyConflict,
    NotDecided,
    SettledOtherwise,
    TooManyLimits,
    Uncovered,
    UnknownReservation,
)
from limiter.engine.settler import Correction
from limiter.model.bucket.contract import AcquireRequest, Decision, Granted, Refused, SettleRequest
from limiter.model.bucket.operations import AcquireAnswer, AcquireStatus, BucketAnswer, Verdict
from limiter.model.bucket.reservation import ID_SIZE, Signer
from limiter.model.policy.criticality import Criticality
from limiter.model.policy.reading import read_policy_set
from limiter.runtime.told import WAITING_ROOM, Told
from limiter.store import keys
from limiter.store.buckets import Buckets
from limiter.store.keys import Slot
from limiter.store.link.connect import open_link
from tests.support.nodes import PATIENT_S, until
from tests.support.servers import Server

SLOW = 1e-6  # a rate at which nothing refills while a test runs


@pytest.fixture
async def decider(valkey: Server) -> AsyncIterator[Decider]:
    link = await open_link(valkey.url)
    yield Decider(Buckets(link), Signer(b"a secret of the tests"), deadline_s=5)
    await link.aclose()


def enforce(decider: Decider, *policies: dict[str, Any]) -> None:
    decider.enforce(read_policy_set({"policies": list(policies)}))


def reads(**more: Any) -> dict[str, Any]:
    return {
        "name": "reads",
        "match": {"operation": "read"},
        "per": ["customer"],
        "rate": SLOW,
        "capacity": 50,
        "max_debt": 1e6,
        **more,
    }


def ask(customer: str = "c1", **more: Any) -> AcquireRequest:
    return AcquireRequest({"operation": "read", "customer": customer}, **more)


def granted(decision: Decision) -> Granted:
    assert isinstance(decision, Granted), decision
    return decision


def refused(decision: Decision) -> Refused:
    assert isinstance(decision, Refused), decision
    return decision


async def test_w10_the_charge_is_taken_at_once_and_corrected_later(decider: Decider) -> None:
    enforce(decider, reads(charge=2))
    grant = granted(await decider.acquire(ask()))
    assert (grant.charged, grant.limits[0].balance) == (2.0, 48.0)
    settled = await decider.settle(SettleRequest(grant.reservation, 12))
    assert (settled.work, settled.adjusted, settled.duplicate, settled.late) == (12.0, 10.0, False, False)
    assert settled.limits[0].balance == pytest.approx(38)


async def test_the_caller_s_own_estimate_wins_over_the_policy_s_charge(decider: Decider) -> None:
    enforce(decider, reads(charge=2))
    assert granted(await decider.acquire(ask(work=7))).charged == 7


async def test_w12_operations_convert_to_work_by_weights(decider: Decider) -> None:
    enforce(decider, {**reads(), "match": {}, "weights": {"operation": {"read": 1, "write": 3, "peek": 0.5}}})
    for operation, weight in (("read", 1.0), ("write", 3.0), ("peek", 0.5), ("other", 1.0)):
        request = AcquireRequest({"operation": operation, "customer": operation}, work=4)
        grant = granted(await decider.acquire(request))
        assert grant.limits[0].balance == pytest.approx(50 - 4 * weight)
        assert grant.charged == 4
        settled = await decider.settle(SettleRequest(grant.reservation, 10))
        assert settled.adjusted == 6
        assert settled.limits[0].balance == pytest.approx(50 - 10 * weight)


async def test_b1_a_refusal_explains_itself_and_spends_nothing(decider: Decider) -> None:
    enforce(
        decider,
        reads(rate=10, charge=100),
        {"name": "all", "match": {}, "rate": SLOW, "capacity": 1000},
        {"name": "watching", "match": {}, "rate": SLOW, "capacity": 1, "charge": 5, "shadow": True},
    )
    granted(await decider.acquire(ask()))
    refusal = refused(await decider.acquire(ask()))
    assert (refusal.policy, refusal.reason, refusal.retry) == ("reads", "work", "after")
    assert 0 < refusal.retry_after_ms <= 5200  # −50 to 1 at 10 a second
    states = {state.policy: state for state in refusal.limits}
    assert [states[name].passed for name in ("all", "reads", "watching")] == [True, False, False]
    assert states["all"].balance == pytest.approx(999)
    assert states["watching"].shadow
    assert "the balance is -" in refusal.detail


async def test_a_dry_run_answers_the_same_and_spends_nothing(decider: Decider) -> None:
    enforce(decider, reads(charge=2))
    for _ in range(3):
        dry = granted(await decider.acquire(ask(dry_run=True)))
        assert (dry.reservation, dry.charged, dry.limits[0].balance) == ("", 2.0, 50.0)


async def test_g2_a_customer_out_of_quota_never_hurts_another(decider: Decider) -> None:
    month = {"name": "month", "match": {}, "per": ["customer"], "quota": {"work": 10, "period": "month"}}
    enforce(decider, month)
    granted(await decider.acquire(ask("a", work=10)))
    refusal = refused(await decider.acquire(ask("a", work=1)))
    assert (refusal.reason, refusal.retry) == ("quota", "after")
    granted(await decider.acquire(ask("b", work=10)))


async def test_a_request_beyond_the_whole_quota_is_not_to_be_retried(decider: Decider) -> None:
    enforce(decider, {"name": "month", "match": {}, "quota": {"work": 10, "period": "month"}})
    assert refused(await decider.acquire(ask(work=11))).retry == "never"


async def test_a_request_rate_says_so(decider: Decider) -> None:
    enforce(
        decider,
        {"name": "rps", "match": {}, "mechanism": "requests", "rate": SLOW, "burst": 2, "steering": {"initial": "C"}},
    )
    granted(await decider.acquire(ask(work=1000)))
    granted(await decider.acquire(ask(work=1000)))
    assert refused(await decider.acquire(ask())).reason == "request_rate"


async def test_w11_the_least_critical_are_refused_first(decider: Decider) -> None:
    enforce(decider, reads(reserve={"sheddable": "50%", "critical_plus": "-20%"}))
    granted(await decider.acquire(ask(work=26)))  # 24 of 50 are left
    refused(await decider.acquire(ask(criticality=Criticality.SHEDDABLE)))
    granted(await decider.acquire(ask(work=24)))
    refused(await decider.acquire(ask(criticality=Criticality.CRITICAL)))
    granted(await decider.acquire(ask(work=9, criticality=Criticality.CRITICAL_PLUS)))


async def test_p2_in_a_group_an_override_beats_the_default(decider: Decider) -> None:
    enforce(
        decider,
        reads(group="reads"),
        {**reads(group="reads", capacity=500), "name": "big", "match": {"customer": "c1"}},
    )
    assert [state.policy for state in granted(await decider.acquire(ask("c2"))).limits] == ["reads"]
    assert [state.policy for state in granted(await decider.acquire(ask("c1"))).limits] == ["big"]


async def test_p7_a_request_that_no_policy_covers_is_approved_and_counted(decider: Decider) -> None:
    grant = granted(await decider.acquire(ask()))
    assert (grant.limits, grant.charged, grant.covered) == ((), 0.0, False)
    assert decider.decisions.uncovered == {True: 0, False: 1}, "nobody declared the namespace"
    assert (await decider.settle(SettleRequest(grant.reservation, 5))).adjusted == 0


async def test_p7_or_refused_where_that_is_set(valkey: Server) -> None:
    link = await open_link(valkey.url)
    strict = Decider(Buckets(link), Signer(b"s"), deadline_s=5, refuse_uncovered=True)
    with pytest.raises(Uncovered, match="no policy covers this descriptor: nobody declared the namespace 'default'"):
        await strict.acquire(ask())
    enforce(strict, reads(match={"service": "other"}))
    with pytest.raises(Uncovered, match="no policy covers this descriptor, and this service refuses"):
        await strict.acquire(ask())
    await link.aclose()


async def test_f_r2_f_r3_a_settle_repeated_and_one_with_another_amount(decider: Decider) -> None:
    enforce(decider, reads())
    grant = granted(await decider.acquire(ask()))
    first = await decider.settle(SettleRequest(grant.reservation, 5))
    again = await decider.settle(SettleRequest(grant.reservation, 5))
    assert (again.duplicate, again.adjusted) == (True, first.adjusted)
    with pytest.raises(SettledOtherwise) as conflict:
        await decider.settle(SettleRequest(grant.reservation, 6))
    assert (conflict.value.first.work, conflict.value.first.adjusted) == (5.0, 4.0)


@pytest.mark.parametrize("token", ["", "no", "A" * 200])
async def test_f_r6_text_that_is_no_reservation_is_unknown(decider: Decider, token: str) -> None:
    with pytest.raises(UnknownReservation, match=r"^no such reservation$"):
        await decider.settle(SettleRequest(token, 1))


async def test_f_r6_a_reservation_of_another_namespace_is_unknown_without_the_right_to_see_it(decider: Decider) -> None:
    enforce(decider, reads())
    grant = granted(await decider.acquire(ask()))
    with pytest.raises(UnknownReservation):
        await decider.settle(SettleRequest(grant.reservation, 1), namespace="another")
    await decider.settle(SettleRequest(grant.reservation, 1), namespace="default")


@pytest.mark.parametrize("timezone", ["UTC", "Europe/Berlin", "Pacific/Kiritimati", "America/New_York"])
async def test_p4_the_first_acquire_of_a_node_may_be_of_a_quota_anywhere(decider: Decider, timezone: str) -> None:
    """A node that has not heard the store's time assumes zero: east of Greenwich that day began before all time."""
    enforce(decider, {"name": "daily", "quota": {"work": 10, "period": "day", "timezone": timezone}})
    assert granted(await decider.acquire(ask(work=3))).limits[0].balance == 7


async def test_f_r7_f_r8_an_acquire_under_its_key_is_one_acquire(decider: Decider) -> None:
    enforce(decider, reads(charge=2))
    first = granted(await decider.acquire(ask(), idempotency_key="k"))
    again = granted(await decider.acquire(ask(attempt=2), idempotency_key="k"))
    assert (again.reservation, again.replayed, again.limits[0].balance) == (first.reservation, True, 48.0)
    with pytest.raises(IdempotencyConflict):
        await decider.acquire(ask(work=9), idempotency_key="k")


async def test_f_r7_holds_when_the_policies_have_changed_meanwhile(decider: Decider) -> None:
    enforce(decider, reads(charge=2))
    first = granted(await decider.acquire(ask(), idempotency_key="k"))
    enforce(decider, {**reads(), "name": "others"})
    again = granted(await decider.acquire(ask(), idempotency_key="k"))
    assert (again.reservation, again.charged) == (first.reservation, 2.0)


async def test_a_reply_that_breaks_off_is_passed_on_as_far_as_it_goes(decider: Decider) -> None:
    def broken(tell: Any) -> Any:
        return lambda batch, reply, now_us: tell(batch, reply[:-1], now_us)

    enforce(decider, reads(charge=2, max_debt=0))
    tokens = [granted(await decider.acquire(ask("c2"))).reservation for _ in range(2)]
    decider._buckets.acquires.tell, decider._buckets.settles.tell = broken(decider.tell), broken(decider.settler.tell)
    asked = [(ask(work=60), Told[Operation](), None, None) for _ in range(2)]
    asked += [(ask(work=20), Told[Operation](), None, None), (ask(work=1), Told[Operation](), None, None)]
    decider.begin(asked, WAITING_ROOM)
    *told, lost = [await asyncio.wait_for(told.future, PATIENT_S) for _, told, _, _ in asked]
    granted(told[0].decision())
    refused(told[1].decision())
    refused(told[2].decision())
    with pytest.raises(struct.error):
        lost.decision()
    settling = [(SettleRequest(token, 1), Told[Correction](), None) for token in tokens]
    decider.settler.begin(settling, WAITING_ROOM)
    first, last = [await asyncio.wait_for(told.future, PATIENT_S) for _, told, _ in settling]
    assert first.settled().adjusted == -1
    with pytest.raises(struct.error):
        last.settled()


async def test_f_p3_a_deleted_policy_still_honours_its_settles(decider: Decider) -> None:
    enforce(decider, reads(charge=2))
    grant = granted(await decider.acquire(ask()))
    enforce(decider)
    assert (await decider.settle(SettleRequest(grant.reservation, 12))).adjusted == 10


async def test_f_p4_a_lowered_limit_reaches_live_buckets(decider: Decider) -> None:
    enforce(decider, reads())
    granted(await decider.acquire(ask()))
    enforce(decider, reads(capacity=5))
    assert granted(await decider.acquire(ask())).limits[0].balance == pytest.approx(4)


async def test_f_s11_a_damaged_record_is_no_decision(decider: Decider, valkey: Server) -> None:
    enforce(decider, reads())
    key = keys.bucket(Slot().prefix, keys.bucket_name("reads", ["c1"]))
    valkey.client().set(key, b"not ours")
    with pytest.raises(NotDecided) as error:
        await decider.acquire(ask())
    assert error.value.reason == "record_damaged"
    assert str(error.value) == "the record of a bucket cannot be read; nothing was charged"
    assert valkey.client().get(key) == b"not ours"
    granted(await decider.acquire(ask("c2")))


async def test_f_s11_damage_under_an_idempotency_key_is_not_blamed_on_a_bucket_alone(
    decider: Decider, valkey: Server
) -> None:
    enforce(decider, reads())
    granted(await decider.acquire(ask(), idempotency_key="k"))
    valkey.client().set(keys.idempotency(Slot().prefix, "k"), b"not ours")
    with pytest.raises(NotDecided) as error:
        await decider.acquire(ask(), idempotency_key="k")
    assert error.value.reason == "record_damaged"
    assert str(error.value) == (
        "the record of a bucket, or what was kept under this Idempotency-Key, cannot be read; nothing was charged"
    )


async def test_f_s11_damage_to_a_reservation_is_not_blamed_on_a_bucket_alone(decider: Decider, valkey: Server) -> None:
    enforce(decider, reads())
    grant = granted(await decider.acquire(ask()))
    await decider.settle(SettleRequest(grant.reservation, 1, final=False))
    (tombstone,) = valkey.client().keys(Slot().prefix + b"r:*")
    valkey.client().set(tombstone, b"not ours")
    with pytest.raises(NotDecided) as error:
        await decider.settle(SettleRequest(grant.reservation, 2))
    assert error.value.reason == "record_damaged"
    assert str(error.value) == (
        "the record of this reservation or of one of its buckets cannot be read; nothing was settled"
    )
    assert valkey.client().get(tombstone) == b"not ours"


async def test_g6_when_many_retry_already_the_answer_is_never(decider: Decider) -> None:
    enforce(decider, reads(rate=10, capacity=1, charge=1))
    granted(await decider.acquire(ask()))
    assert refused(await decider.acquire(ask())).retry == "after"
    for _ in range(40):
        refused(await decider.acquire(ask(attempt=2)))
    refusal = refused(await decider.acquire(ask(attempt=3)))
    assert (refusal.retry, refusal.retry_after_ms) == ("never", 0)


async def test_g6_the_retries_of_one_policy_s_callers_are_not_held_against_another_s(decider: Decider) -> None:
    """G2: a tenant that retries without end takes no hope from others."""
    noisy = {"name": "noisy", "namespace": "noisy", "rate": 1000, "capacity": 1000}
    enforce(decider, reads(rate=10, capacity=1, charge=1), noisy)
    for _ in range(60):
        granted(await decider.acquire(AcquireRequest({"customer": "x"}, namespace="noisy", attempt=2)))
    granted(await decider.acquire(ask()))
    assert refused(await decider.acquire(ask())).retry == "after"


async def test_g6_the_retries_of_one_customer_are_not_held_against_another_of_the_same_policy(decider: Decider) -> None:
    """G2, G6."""
    enforce(decider, reads(rate=10, capacity=1, charge=1))
    for _ in range(60):
        await decider.acquire(AcquireRequest({"customer": "noisy", "operation": "read"}, attempt=2))
    noisy = refused(await decider.acquire(AcquireRequest({"customer": "noisy", "operation": "read"})))
    granted(await decider.acquire(ask()))
    assert (noisy.retry, refused(await decider.acquire(ask())).retry) == ("never", "after")


async def test_f_v3_work_that_weights_carry_beyond_all_bounds_is_decided_all_the_same(decider: Decider) -> None:
    enforce(decider, reads(weights={"operation": {"read": 3}}))
    decision = await decider.acquire(ask(work=2.0**53))
    assert math.isfinite(decision.limits[0].balance)


async def test_a_settle_of_weights_beyond_all_bounds_is_answered(decider: Decider) -> None:
    enforce(decider, reads(weights={"customer": {"c1": 1e15}, "operation": {"read": 1e15}}))
    grant = granted(await decider.acquire(ask(work=0)))
    settled = await asyncio.wait_for(decider.settle(SettleRequest(grant.reservation, 1.0)), timeout=5)
    assert settled.work == 1.0


async def test_more_policies_than_one_decision_holds_are_named(decider: Decider) -> None:
    enforce(decider, *({"name": f"p{number}", "rate": 1000} for number in range(256)))
    with pytest.raises(TooManyLimits, match="256 policies cover this descriptor; at most 255"):
        await decider.acquire(ask())


async def test_p11_a_shadow_s_damaged_record_refuses_nothing(decider: Decider, valkey: Server) -> None:
    enforce(decider, reads(), {"name": "watching", "match": {}, "rate": 1, "shadow": True})
    valkey.client().set(keys.bucket(Slot().prefix, "watching"), b"not ours")
    assert [state.policy for state in granted(await decider.acquire(ask())).limits] == ["reads"]


async def test_an_operation_that_cannot_be_sent_again_is_answered_once(
    decider: Decider, valkey: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A second answer would be taken for that of the next request on a connection."""
    enforce(decider, reads(), {"name": "watching", "match": {}, "rate": 1, "shadow": True})
    valkey.client().set(keys.bucket(Slot().prefix, "watching"), b"not ours")

    def refuses(*_: object) -> None:
        raise ValueError("not sound")

    monkeypatch.setattr(decider._buckets.acquires, "start", refuses)
    watched = decider._buckets.acquires._deadlines
    told: list[Operation] = []
    decider.begin([(ask(), told.append, None, None)], WAITING_ROOM)
    (operation,) = watched._queue
    await until(lambda: told)
    operation.give_up()
    assert [str(operation.outcome) for operation in told] == ["not sound"]


async def test_f_r7_a_refusal_under_its_key_stands_when_the_policies_have_changed(decider: Decider) -> None:
    enforce(decider, reads(charge=2))
    granted(await decider.acquire(ask(work=500)))
    refused(await decider.acquire(ask(), idempotency_key="k"))
    enforce(decider, {**reads(), "name": "others"})
    again = refused(await decider.acquire(ask(), idempotency_key="k"))
    assert (again.replayed, again.limits) == (True, ())
    assert "by policies that have changed since" in again.detail


async def test_a_dry_run_under_a_key_decides_nothing_that_could_be_repeated(decider: Decider) -> None:
    enforce(decider, reads(charge=2))
    granted(await decider.acquire(ask(dry_run=True), idempotency_key="k"))
    first = granted(await decider.acquire(ask(work=9), idempotency_key="k"))
    assert (first.replayed, first.charged) == (False, 9.0)


async def test_f_r7_an_acquire_that_is_asked_again_without_a_damaged_shadow_keeps_its_key(
    decider: Decider, valkey: Server
) -> None:
    enforce(decider, reads(), {"name": "watching", "match": {}, "rate": 1, "shadow": True})
    valkey.client().set(keys.bucket(Slot().prefix, "watching"), b"not ours")
    first = granted(await decider.acquire(ask(work=3), idempotency_key="k"))
    again = granted(await decider.acquire(ask(work=3), idempotency_key="k"))
    assert (again.reservation, again.replayed, again.limits[0].balance) == (first.reservation, True, 47.0)


async def test_p11_a_damaged_shadow_alone_refuses_nobody(decider: Decider, valkey: Server) -> None:
    enforce(decider, {"name": "watching", "match": {}, "rate": 1, "shadow": True})
    valkey.client().set(keys.bucket(Slot().prefix, "watching"), b"not ours")
    assert granted(await decider.acquire(ask())).charged == 0


NO_ROWS = msgspec.msgpack.encode(Memo(b"i" * ID_SIZE, 1, 1.0, []))


@pytest.mark.parametrize("memo", [b"\xc1", NO_ROWS], ids=["no memo", "of no bucket"])
async def test_f_s11_a_damaged_memo_is_not_a_decision(decider: Decider, memo: bytes) -> None:
    enforce(decider, reads(charge=2))
    told = Told[Operation]()
    decider.begin([(ask(), told, "k", None)], WAITING_ROOM)
    operation = await told.future
    bucket = BucketAnswer(Verdict.DEBITED, 48.0, 2.0, 1.0, 50.0)
    with pytest.raises(NotDecided, match="cannot be read"):
        replay(decider._granter, operation, AcquireAnswer(AcquireStatus.GRANTED, 1, (bucket,), memo))


async def test_a_settle_while_the_circuit_is_open_is_to_be_sent_again(decider: Decider) -> None:
    enforce(decider, reads())
    grant = granted(await decider.acquire(ask()))
    decider._store_health.breaker.is_open = True
    decider._store_health.breaker.open_until_s = math.inf
    with pytest.raises(NotDecided, match="settle again later"):
        await decider.settle(SettleRequest(grant.reservation, 1))
    assert decider.settles.unanswered["breaker"] == 1


async def test_f_r5_a_settle_after_its_grace_is_unknown(decider: Decider) -> None:
    enforce(decider, reads())
    grant = granted(await decider.acquire(ask(ttl_ms=1)))
    signer = Signer(b"a secret of the tests")
    reservation = signer.open(grant.reservation)
    assert reservation is not None
    old = msgspec.structs.replace(reservation, acquired_us=1, deadline_us=2, late_us=1)
    with pytest.raises(UnknownReservation):
        await decider.settle(SettleRequest(signer.sign(old), 1))
