"""The proxy's memory of refusals, and the reservations that it grants from a lease (G7, F-R14)."""

import gc
from typing import Any

import pytest

from limiter.client.lease.holder import Lease
from limiter.client.lease.leasing import key_of
from limiter.client.proxy.known_refusals import HOLDS_MAX_S, KNOWN_MAX, KnownRefusals
from limiter.client.proxy.own_reservations import LATE_S, OwnReservations, SettledBefore, UnknownHere, is_own
from limiter.model.bucket.contract import SettleRequest

ASKER = (key_of("default", {"customer": "c1"}), "sheddable_plus")
REFUSAL = {"reason": "work", "retry": "after", "retry_after_ms": 500, "policy": "reads"}


def known(work: float | None = 3.0, **fields: Any) -> KnownRefusals:
    refusals = KnownRefusals()
    refusals.note(ASKER, work, {**REFUSAL, **fields}, 10.0)
    return refusals


def test_a_refusal_is_repeated_with_the_time_that_is_left() -> None:
    answer = known().find(ASKER, 3.0, 10.2)
    assert answer == {**REFUSAL, "retry_after_ms": 300}


def test_a_larger_request_is_refused_and_a_smaller_one_is_asked() -> None:
    refusals = known()
    assert refusals.find(ASKER, 4.0, 10.1)
    assert refusals.find(ASKER, 2.0, 10.1) is None
    assert refusals.find(ASKER, None, 10.1) is None


def test_another_class_or_customer_is_asked() -> None:
    refusals = known()
    assert refusals.find((ASKER[0], "critical"), 3.0, 10.1) is None
    assert refusals.find((key_of("default", {"customer": "c2"}), ASKER[1]), 3.0, 10.1) is None


def test_a_refusal_ends_when_it_said_and_never_holds_longer_than_a_bound() -> None:
    assert known().find(ASKER, 3.0, 10.5) is None
    refusals = known(retry_after_ms=3_600_000)
    assert refusals.find(ASKER, 3.0, 10.0 + HOLDS_MAX_S * 0.99)
    assert refusals.find(ASKER, 3.0, 10.0 + HOLDS_MAX_S) is None


@pytest.mark.parametrize("fields", [{"reason": "overload"}, {"reason": "in_flight"}, {"retry": "never"}])
def test_a_refusal_that_may_differ_next_time_is_not_remembered(fields: dict[str, Any]) -> None:
    assert not len(known(**fields))


def test_the_number_of_known_refusals_is_bounded() -> None:
    refusals = KnownRefusals()
    for number in range(KNOWN_MAX + 10):
        refusals.note((key_of("default", {"customer": str(number)}), "critical"), 1.0, REFUSAL, 10.0)
    assert len(refusals) == KNOWN_MAX


def lease(**slices: Any) -> Lease:
    held = Lease({"service": "lent"})
    held.ask()
    row = {"policy": "lent", "mechanism": "work", "rate": 10.0, "capacity": 100.0, "share": 0.1, "tokens": 100.0,
           "moved": 0.0, **slices}  # fmt: skip
    assert held.take({"number": 1, "expires_in_ms": 60_000, "slices": [row], "lease": "t", "charge": 1.0})
    return held


def granted(own: OwnReservations, held: Lease, work: float = 10.0, ttl_ms: int = 1000) -> str:
    grant = held.try_acquire(work)
    assert grant
    answer = own.grant(grant, held, ttl_ms, 100.0)
    assert answer.charged == work
    assert is_own(answer.reservation)
    return answer.reservation


def test_a_settle_corrects_the_lease_once() -> None:
    own, held = OwnReservations(), lease()
    token = granted(own, held)
    before = held.slices[0].balance
    first = own.settle(SettleRequest(token, 14.0), 100.5)
    assert (first.work, first.adjusted, first.duplicate, first.late) == (14.0, 4.0, False, False)
    again = own.settle(SettleRequest(token, 14.0), 100.6)
    assert (again.work, again.adjusted, again.duplicate) == (14.0, 4.0, True)
    with pytest.raises(SettledBefore) as other:
        own.settle(SettleRequest(token, 15.0), 100.7)
    assert other.value.first == first
    assert held.slices[0].balance == pytest.approx(before - 4.0, abs=0.5)
    assert (held.settles, held.settled) == (1.0, 14.0)


def test_progress_debits_what_is_new_and_renews() -> None:
    own, held = OwnReservations(), lease()
    token = granted(own, held)
    assert own.settle(SettleRequest(token, 12.0, final=False), 100.9).adjusted == 2.0
    assert own.settle(SettleRequest(token, 11.0, final=False), 101.8).adjusted == 0.0
    last = own.settle(SettleRequest(token, 9.0), 102.7)
    assert (last.adjusted, last.late) == (-3.0, False)


def test_a_late_settle_debits_and_never_refunds() -> None:
    own, held = OwnReservations(), lease()
    cheap, expensive = granted(own, held), granted(own, held)
    assert own.settle(SettleRequest(cheap, 1.0), 102.0).adjusted == 0.0
    late = own.settle(SettleRequest(expensive, 13.0), 102.0)
    assert (late.adjusted, late.late) == (3.0, True)


def test_a_reservation_is_forgotten_after_its_time_and_its_place_is_free() -> None:
    own, held = OwnReservations(), lease()
    token = granted(own, held)
    own.forget(101.0 + LATE_S)
    gc.collect()
    assert not len(own)
    with pytest.raises(UnknownHere):
        own.settle(SettleRequest(token, 1.0), 101.0 + LATE_S)


def test_a_token_of_the_proxy_before_this_one_is_unknown() -> None:
    token = granted(OwnReservations(), lease())
    with pytest.raises(UnknownHere, match="restarted"):
        OwnReservations().settle(SettleRequest(token, 1.0), 100.0)


@pytest.mark.parametrize("token", ["", "proxy.", "proxy.XYZ", "Aiz6CGW9GaIMz_4", "proxy." + "0" * 32 + "\n"])
def test_other_tokens_belong_to_the_service(token: str) -> None:
    assert not is_own(token)
