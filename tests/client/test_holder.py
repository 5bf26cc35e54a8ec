"""The holder of a lease by itself: what it grants, asks for, takes over and gives up (B8, P9)."""

import os
import threading
from typing import Any

import pytest

from limiter.client.lease.holder import Grant, Lease, PlacedGrant, Refusal

S_NS = 1_000_000_000


class Clock:
    """A monotonic clock that the test moves."""

    def __init__(self) -> None:
        self.now_ns = 5 * S_NS

    def __call__(self) -> int:
        return self.now_ns

    def pass_s(self, seconds: float) -> None:
        self.now_ns += int(seconds * 1e9)


@pytest.fixture
def clock() -> Clock:
    return Clock()


def row(policy: str = "reads", **fields: Any) -> dict[str, Any]:
    plain = {
        "policy": policy, "mechanism": "work", "counts_requests": False, "share": 0.1, "rate": 10.0, "capacity": 10.0,
        "tokens": 10.0, "moved": 0.0, "charge": 1.0, "weight": 1.0, "minimums": {}, "debt_max": 600.0,
    }  # fmt: skip
    return plain | fields


def lent(lease: Lease, clock: Clock, *rows: dict[str, Any], **fields: Any) -> Lease:
    """Let a lease ask, and take over such an answer."""
    lease.ask(clock())
    answer = {"lease": "token", "number": lease.number, "expires_in_ms": 3000, "slices": list(rows or [row()])} | fields
    assert lease.take(answer, clock())
    return lease


def acquire(lease: Lease, clock: Clock, work: float | None = 1.0, criticality: str | None = None) -> Grant | Refusal:
    return lease.try_acquire(work, criticality, clock)


def test_without_a_lease_nothing_is_granted() -> None:
    found = Lease().try_acquire(1)
    assert not found
    assert isinstance(found, Refusal)
    assert found.reason == "no_lease"
    assert Lease().allow(1) is False


def test_a_slice_is_a_bucket_of_its_own(clock: Clock) -> None:
    lease = lent(Lease(now_ns=clock()), clock)
    assert [bool(acquire(lease, clock)) for _ in range(11)] == [True] * 10 + [False]
    refused = acquire(lease, clock)
    assert isinstance(refused, Refusal)
    assert (refused.policy, refused.reason) == ("reads", "work")
    assert refused.retry_after_ms == pytest.approx(100)
    clock.pass_s(0.1)
    assert acquire(lease, clock)


def test_yes_or_no_decides_as_a_grant_does(clock: Clock) -> None:
    lease, other = (lent(Lease(now_ns=clock()), clock) for _ in range(2))
    for _ in range(30):
        clock.pass_s(0.03)
        assert lease.allow(0.9, clock) is bool(acquire(other, clock, 0.9))
    assert lease.used() == other.used()


def test_f_r15_a_paused_holder_decides_nothing_on_an_old_lease(clock: Clock) -> None:
    lease = lent(Lease(now_ns=clock()), clock)
    clock.pass_s(2.9)
    assert acquire(lease, clock)
    clock.pass_s(0.1)
    found = acquire(lease, clock)
    assert isinstance(found, Refusal)
    assert found.reason == "no_lease"
    assert lease.allow(1, clock) is False


def test_f_l2_an_answer_that_comes_after_its_lease_is_not_taken(clock: Clock) -> None:
    lease = Lease(now_ns=clock())
    lease.ask(clock())
    clock.pass_s(3)
    assert not lease.take({"number": 1, "expires_in_ms": 3000, "slices": [row()]}, clock())


def test_f_l3_only_the_answer_to_the_latest_request_is_taken_and_once(clock: Clock) -> None:
    lease = lent(Lease(now_ns=clock()), clock, row(tokens=0.0))
    lease.ask(clock())
    lease.ask(clock())
    first = {"number": 2, "expires_in_ms": 3000, "slices": [row()]}
    assert not lease.take(first, clock())
    assert lease.take(first | {"number": 3}, clock())
    assert not lease.take(first | {"number": 3}, clock())
    assert lease.slices[0].balance == 10.0


def test_f_l3_a_first_request_without_an_answer_is_the_same_again_and_after_a_second_another(clock: Clock) -> None:
    """Its deadline counts from when it was sent first: that is the one that the service may have answered."""
    lease = Lease(now_ns=clock())
    acquire(lease, clock)
    (path, body), holder = lease.ask(clock()), lease.holder
    clock.pass_s(0.5)
    assert lease.ask(clock()) == (path, body)
    assert lease.take({"lease": "token", "number": 1, "expires_in_ms": 3000, "slices": [row()]}, clock())
    clock.pass_s(2.5)
    assert not acquire(lease, clock)
    other = Lease(now_ns=clock())
    acquire(other, clock)
    holder = other.ask(clock())[1]["holder"]
    clock.pass_s(1.0)
    path, body = other.ask(clock())
    assert path == "/v1/leases"
    assert body["holder"] != holder
    assert other.used()["refused"] == 1.0, "a first request reports nothing, so nothing is dropped with it"


@pytest.mark.parametrize("work", [-1.0, float("nan"), float("inf")])
def test_work_that_is_no_amount_is_refused_and_spoils_nothing(clock: Clock, work: float) -> None:
    lease = lent(Lease(now_ns=clock()), clock)
    with pytest.raises(ValueError, match="work is a number from 0 on"):
        acquire(lease, clock, work)
    with pytest.raises(ValueError, match="work is a number from 0 on"):
        lease.allow(work, clock)
    grant = acquire(lease, clock, 4.0)
    assert isinstance(grant, Grant)
    with pytest.raises(ValueError, match="work is a number from 0 on"):
        grant.settle(work)
    assert lease.slices[0].balance == 6.0
    assert lease.used()["charged"] == 4.0


def test_debt_that_moved_in_another_unit_is_not_repaid_in_this_one(clock: Clock) -> None:
    """A policy may begin to count requests; what the bucket has taken over of the holder's debt was work."""
    lease = lent(Lease(now_ns=clock()), clock, row(moved=0.0, tokens=0.0))
    lent(lease, clock, row(mechanism="requests", counts_requests=True, moved=300.0, tokens=0.0))
    assert lease.slices[0].balance == 0.0


def test_the_first_request_and_the_later_ones_go_to_their_routes(clock: Clock) -> None:
    lease = Lease({"service": "orders"}, namespace="edge", holder="me", weight=3, now_ns=clock())
    path, body = lease.ask(clock())
    assert path == "/v1/leases"
    assert body == {"descriptor": {"service": "orders"}, "namespace": "edge", "holder": "me", "weight": 3, "slices": []}
    assert lease.take({"lease": "token", "number": 1, "expires_in_ms": 3000, "slices": [row()]}, clock())
    path, body = lease.ask(clock())
    assert (path, body["lease"], body["number"], body["taken"]) == ("/v1/leases/renew", "token", 2, 1)
    path, body = lease.give_back(clock())
    assert (path, body["number"], body["slices"][0]["tokens"]) == ("/v1/leases/return", 3, 10.0)
    assert not acquire(lease, clock)


def test_a_holder_lowers_itself_to_its_demand_before_it_asks(clock: Clock) -> None:
    lease = lent(Lease(now_ns=clock()), clock)
    for _ in range(20):
        clock.pass_s(0.1)
        acquire(lease, clock, 0.2)
    _, body = lease.ask(clock())
    assert body["work_rate"] == pytest.approx(2.0 * 1.05, rel=0.05)
    assert body["slices"][0]["held"] == pytest.approx(0.1 * 0.21, rel=0.05)


def test_work_beyond_the_charge_is_debt_and_moves_once(clock: Clock) -> None:
    lease = lent(Lease(now_ns=clock()), clock)
    grant = acquire(lease, clock)
    assert isinstance(grant, Grant)
    grant.settle(50)
    grant.settle(70)
    _, body = lease.ask(clock())
    assert body["slices"][0]["debt"] == 40.0
    moved = {"number": 2, "expires_in_ms": 3000, "slices": [row(tokens=0.0, moved=30.0)]}
    assert lease.take(moved, clock())
    _, body = lease.ask(clock())
    assert (body["slices"][0]["debt"], body["slices"][0]["moved"]) == (10.0, 30.0)


def test_the_end_of_a_lease_voids_tokens_and_keeps_debt(clock: Clock) -> None:
    lease = lent(Lease(now_ns=clock()), clock)
    clock.pass_s(5)
    lent(lease, clock, row(tokens=2.0))
    assert lease.slices[0].balance == 2.0


def test_several_policies_grant_together_or_not_at_all(clock: Clock) -> None:
    lease = lent(Lease(now_ns=clock()), clock, row(), row("hits", counts_requests=True, tokens=2.0, capacity=2.0))
    assert [bool(acquire(lease, clock, 3)) for _ in range(3)] == [True, True, False]
    refused = acquire(lease, clock, 3)
    assert isinstance(refused, Refusal)
    assert (refused.policy, refused.reason) == ("hits", "request_rate")
    assert lease.slices[0].balance == 4.0
    assert [one.said()["refused"] for one in lease.slices] == [0.0, 2.0]


def test_a_class_needs_its_minimum(clock: Clock) -> None:
    lease = lent(Lease(now_ns=clock()), clock, row(minimums={"sheddable": 5.0}))
    assert [bool(acquire(lease, clock, 1, "sheddable")) for _ in range(7)] == [True] * 6 + [False]
    assert acquire(lease, clock, 1, "critical")


def test_a_request_larger_than_the_slice_asks_the_service(clock: Clock) -> None:
    found = acquire(lent(Lease(now_ns=clock()), clock), clock, 11)
    assert isinstance(found, Refusal)
    assert (found.reason, found.retry_after_ms) == ("too_large", None)


def portion(tokens: float, period: float = 7.0) -> dict[str, Any]:
    return row("month", mechanism="quota", tokens=tokens, period=period, ends_in_ms=60_000, share=0.0, rate=0.0)


def test_f_l8_a_portion_outlives_its_lease_until_its_period_ends(clock: Clock) -> None:
    lease = lent(Lease(now_ns=clock()), clock, portion(3.0))
    clock.pass_s(30)
    assert [bool(acquire(lease, clock)) for _ in range(4)] == [True, True, True, False]
    assert lease.ask(clock())[1]["slices"][0] | {"refused": 0} == {
        "policy": "month", "mechanism": "quota", "refused": 0, "held": 0.0, "spent": 3.0, "period": 7.0,
    }  # fmt: skip
    clock.pass_s(31)
    assert not acquire(lease, clock)


def test_f_l8_a_new_period_begins_with_nothing_spent(clock: Clock) -> None:
    lease = lent(Lease(now_ns=clock()), clock, portion(3.0))
    acquire(lease, clock)
    lent(lease, clock, portion(5.0, period=8.0))
    (one,) = lease.slices
    assert (one.balance, one.spent, one.period) == (5.0, 0.0, 8.0)


def test_a_forgotten_lease_begins_again_with_its_debt_and_what_was_not_reported(clock: Clock) -> None:
    lease = lent(Lease({"service": "x"}, now_ns=clock()), clock, row(), portion(5.0))
    for _ in range(2):
        acquire(lease, clock)
    lease.ask(clock())  # carries two, and is never answered
    grant = acquire(lease, clock)
    assert isinstance(grant, Grant)
    grant.settle(20.0)
    before = lease.holder
    lease.begin_again(clock())
    assert lease.holder != before
    path, body = lease.ask(clock())
    assert path == "/v1/leases"
    rate, quota = body["slices"]
    assert (rate["debt"], rate["held"], rate["moved"]) == (pytest.approx(12.0), 0.0, 0.0)
    assert (quota["spent"], quota["held"]) == (17.0, 0.0)
    assert lease.used() | {"seconds": 0.0} == {
        "requests": 1.0, "refused": 0.0, "charged": 1.0, "work": 20.0, "work_squared": 400.0, "settles": 1.0,
        "answered": 0.0, "late": 0.0, "seconds": 0.0,
    }  # fmt: skip
    assert not acquire(lease, clock)


OVERLOAD: dict[str, Any] = {"in_flight": {}, "refused_share": {}, "rate": {}, "late_after_ms": {}}


def test_places_in_flight_are_taken_and_freed(clock: Clock) -> None:
    """W18, S9."""
    lease = lent(Lease(now_ns=clock()), clock, overload=OVERLOAD | {"in_flight": {"critical": 2.0}})
    grants = [acquire(lease, clock) for _ in range(3)]
    assert [bool(grant) for grant in grants] == [True, True, False]
    assert isinstance(grants[2], Refusal)
    assert grants[2].reason == "in_flight"
    assert isinstance(grants[0], PlacedGrant)
    grants[0].settle(1.0)
    assert acquire(lease, clock)


def test_a_forgotten_grant_frees_its_place(clock: Clock) -> None:
    lease = lent(Lease(now_ns=clock()), clock, overload=OVERLOAD | {"in_flight": {"critical": 1.0}})
    for _ in range(3):
        assert acquire(lease, clock)


def test_a_share_of_a_class_is_refused(clock: Clock) -> None:
    lease = lent(Lease(now_ns=clock()), clock, overload=OVERLOAD | {"refused_share": {"sheddable": 1.0}})
    found = acquire(lease, clock, 1, "sheddable")
    assert isinstance(found, Refusal)
    assert found.reason == "overload"
    assert acquire(lease, clock, 1, "critical")


def test_a_class_has_its_rate(clock: Clock) -> None:
    lease = lent(Lease(now_ns=clock()), clock, overload=OVERLOAD | {"rate": {"sheddable": 2.0}})
    assert [bool(acquire(lease, clock, 0.1, "sheddable")) for _ in range(2)] == [True, False]
    clock.pass_s(0.5)
    assert acquire(lease, clock, 0.1, "sheddable")


def test_a_grant_of_earlier_overload_control_frees_no_place_of_the_present_one(clock: Clock) -> None:
    one_place = OVERLOAD | {"in_flight": {"critical": 1.0}}
    lease = lent(Lease(now_ns=clock()), clock, overload=one_place)
    earlier = acquire(lease, clock)
    lent(lease, clock)
    lent(lease, clock, overload=one_place)
    held = acquire(lease, clock)
    assert isinstance(earlier, Grant)
    assert held
    earlier.settle(1.0)
    assert not acquire(lease, clock)


def test_a_grant_that_is_forgotten_while_another_thread_decides_waits_for_nobody(clock: Clock) -> None:
    """The last reference may go anywhere, also where the lock is held."""
    lock = threading.Lock()
    lease = lent(Lease(lock=lock, now_ns=clock()), clock, overload=OVERLOAD | {"in_flight": {"critical": 1.0}})
    held: list[Grant | Refusal] = [acquire(lease, clock)]
    with lock:
        held.clear()
    assert acquire(lease, clock)


def test_threads_that_grant_and_settle_free_every_place(clock: Clock) -> None:
    overload = OVERLOAD | {"in_flight": {"critical": 1000.0}}
    lease = lent(Lease(lock=threading.Lock(), now_ns=clock()), clock, row(tokens=1e6, capacity=1e6), overload=overload)

    def work() -> None:
        for number in range(2000):
            grant = acquire(lease, clock)
            assert isinstance(grant, Grant)
            if number % 2:
                grant.settle(1.0)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    acquire(lease, clock, 0.0).settle(0.0)  # type: ignore[union-attr]
    assert lease.throttle is not None
    assert lease.throttle.open == 0.0
    assert lease.used()["answered"] == 4001.0


def test_answers_are_timed_where_overload_control_wants_it(clock: Clock) -> None:
    lease = lent(Lease(now_ns=clock()), clock, overload=OVERLOAD | {"late_after_ms": {"critical": 200.0}})
    for took_s in (0.1, 0.3):
        grant = acquire(lease, clock, 0.1)
        assert isinstance(grant, PlacedGrant)
        clock.pass_s(took_s)
        grant.settle(0.1, clock)
    used = lease.used()
    assert (used["answered"], used["late"]) == (2.0, 1.0)
    assert used["seconds"] == pytest.approx(0.4)


def test_overload_control_that_ends_leaves_nothing_behind(clock: Clock) -> None:
    lease = lent(Lease(now_ns=clock()), clock, overload=OVERLOAD | {"in_flight": {"critical": 1.0}}, quality=0.5)
    held = acquire(lease, clock)
    assert lease.quality == 0.5
    lent(lease, clock)
    assert lease.throttle is None
    assert lease.quality == 1.0
    assert isinstance(held, Grant)
    held.settle(1.0)


def test_f_l7_a_child_process_sees_that_the_lease_is_not_its_own() -> None:
    lease = Lease()
    assert not lease.is_foreign
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.write(writer, b"%d" % lease.is_foreign)
        os._exit(0)
    os.waitpid(child, 0)
    assert os.read(reader, 1) == b"1"
    os.close(reader)
    os.close(writer)


def test_threads_share_a_lease_with_a_lock(clock: Clock) -> None:
    lease = lent(Lease(lock=threading.Lock(), now_ns=clock()), clock, row(tokens=1000.0, capacity=1000.0, rate=0.0))
    granted: list[int] = []

    def work() -> None:
        granted.append(sum(bool(acquire(lease, clock)) for _ in range(1000)))

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sum(granted) == 1000
    assert lease.used()["requests"] == 4000
