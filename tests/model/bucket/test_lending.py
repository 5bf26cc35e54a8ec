"""Slices in virtual time: bucket and holders together keep the limit, and divide it fairly (B8, P9, promise 7)."""

import os
import random
from collections.abc import Callable
from dataclasses import replace

import pytest

from limiter.model.bucket.bucket import Flags, Params
from limiter.model.bucket.leases import LeaseAsk, LeaseWant
from limiter.model.bucket.lending import LendStatus, LendTerms, Said
from limiter.model.bucket.operations import Acquire, Want
from limiter.model.ledger.ledger import Ledger
from tests.support.lending_world import Holder, Meter, World, hostile, spend_a_quota

SEED = int(os.environ.get("LENDING_SEED", random.randrange(10**6)))
WORLDS = int(os.environ.get("LENDING_WORLDS", "150"))


@pytest.mark.slow
def test_whatever_goes_wrong_all_that_could_be_admitted_fits_into_the_limit() -> None:
    """F-L1 to F-L6: deaths, pauses, cuts, returns, losses, copies, delays, clocks, changed policies, debts."""
    for seed in range(SEED, SEED + WORLDS):
        world = hostile(seed)
        assert not world.violations, f"hostile({seed}): {world.violations[:3]}"


@pytest.mark.long
@pytest.mark.parametrize("portion", range(25))
def test_in_five_thousand_hostile_worlds_the_limit_holds(
    portion: int, record_property: Callable[[str, object], None]
) -> None:
    """Promise 7. A world that breaks it is named by its seed; LENDING_SEED begins there."""
    begin = int(os.environ.get("LENDING_SEED", random.randrange(10**9))) + 200 * portion
    record_property("seed", begin)
    for seed in range(begin, begin + 200):
        world = hostile(seed)
        assert not world.violations, f"hostile({seed}): {world.violations[:3]}"


def test_clocks_that_leap_forward_cost_less_than_a_capacity_and_a_second_each() -> None:
    """F-L4, promise 6. Other faults beside them; a world may have several leaps."""
    for seed in range(SEED, SEED + WORLDS // 3):
        world = hostile(seed, leaps=True)
        assert world.meter.worst <= 0.7 * world.leaps * _largest(world) + 1e-3, f"hostile({seed}, leaps=True)"


def _largest(world: World) -> float:
    return max(rate + capacity for _, rate, capacity in world.meter.terms)


@pytest.mark.parametrize("capacity", [2.0, 50.0, 120.0, 300.0])
@pytest.mark.parametrize("leap_s", [1.0, 3600.0])
def test_at_whatever_moment_a_clock_leaps_it_costs_less_than_a_capacity_and_a_second(
    capacity: float, leap_s: float
) -> None:
    """F-L4, promise 6: a holder has all of the rate and is cut off; it and plain callers use all that there is."""
    for begin_us in (1_790_000_000_000_000, 1_790_000_000_970_000):  # ends are rounded up to a grain
        for moment in range(30):
            beyond = _beyond_after_a_leap(capacity, begin_us, leap_s, at_s=moment / 10)
            assert beyond <= 0.7 * (100.0 + capacity), (begin_us, moment)


def _beyond_after_a_leap(capacity: float, begin_us: int, leap_s: float, *, at_s: float) -> float:
    """All that is admitted beyond the limit, if the clock leaps so long after a holder's last request."""
    params = Params(
        flags=Flags.LENDS, committed=100.0, capacity=capacity, debt_max=6000.0, lending=LendTerms(0.0, 1.0, 3e6)
    )
    ledger, meter = Ledger(), Meter(100.0, capacity)
    said = LeaseWant("limit", params, Said(wanted=100.0))
    (lent,) = ledger.lend(LeaseAsk("holder", 1.0, (said,)), begin_us).slices
    assert lent.share == 1.0
    held = lent.tokens
    for step in range(100):
        t = step / 20
        held = min(lent.capacity, held + (lent.rate / 20 if step else 0.0))
        if t < 3.0:
            meter.add(t, held)
            held = 0.0
        now_us = begin_us + round((t + (leap_s if t >= at_s else 0.0)) * 1e6)
        (plain,) = ledger.acquire([Acquire((Want("limit", params, -1e9, 0.0),))], now_us)
        if plain.buckets[0].balance > 0:
            ledger.acquire([Acquire((Want("limit", params, 0.0, plain.buckets[0].balance),))], now_us)
            meter.add(t, plain.buckets[0].balance)
    return meter.worst


def test_a_long_lease_is_renewed_seldom_and_the_buckets_own_part_refills_all_the_same() -> None:
    """A minute's lease: three requests for it, and a plain caller every five seconds."""
    params = Params(
        flags=Flags.LENDS, committed=10.0, capacity=200.0, debt_max=600.0, lending=LendTerms(0.0, 4.0, 60e6)
    )
    ledger, begin_us = Ledger(), 1_790_000_000_000_000
    for second in range(0, 600, 5):
        now_us = begin_us + second * 1_000_000
        if second % 20 == 0:
            number = second / 20 + 1
            want = LeaseWant("limit", params, Said(held=0.2, wanted=2.0))
            assert ledger.lend(LeaseAsk("one", number, (want,), taken=number - 1), now_us).status is LendStatus.LENT
        else:
            ledger.acquire([Acquire((Want("limit", params, 0.0, 25.0),))], now_us)
        lent = ledger.records["limit"].lent
        assert lent is not None
        assert lent.shift_us == 0.0, "its own time keeps up"
    for second in range(600, 665, 5):
        ledger.acquire([Acquire((Want("limit", params, 0.0, 0.0),))], begin_us + second * 1_000_000)
    lent = ledger.records["limit"].lent
    assert lent is not None
    assert lent.rate == 0.0, "a dead holder strands its part for a lease and a second"


@pytest.fixture
def ten() -> World:
    world = World(100.0, 100.0, seed=SEED, loss=0.02)
    for number in range(10):
        world.at(number / 20, world.join, Holder(world, f"h{number}", 30.0))
    world.run(20.0)
    return world


def _measured(world: World, seconds: float) -> dict[str, float]:
    before = {name: holder.admitted for name, holder in world.holders.items()}
    world.run(world.t + seconds)
    return {name: (holder.admitted - before.get(name, 0.0)) / seconds for name, holder in world.holders.items()}


def test_ten_devices_get_a_tenth_each(ten: World) -> None:
    rates = _measured(ten, 20.0)
    assert sum(rates.values()) >= 95.0
    assert all(rate == pytest.approx(10.0, rel=0.1) for rate in rates.values()), rates


def test_an_eleventh_device_gets_its_part_within_three_leases(ten: World) -> None:
    ten.join(Holder(ten, "eleventh", 30.0))
    ten.run(ten.t + 9.0)
    rates = _measured(ten, 20.0)
    assert len(rates) == 11
    assert all(rate == pytest.approx(100 / 11, rel=0.1) for rate in rates.values()), rates


def test_one_that_wants_most_of_it_gets_that_from_those_that_do_not(ten: World) -> None:
    for name, holder in ten.holders.items():
        holder.demand = 90.0 if name == "h0" else 1.0
    ten.run(ten.t + 9.0)
    rates = _measured(ten, 30.0)
    assert rates["h0"] == pytest.approx(90.0, rel=0.08), rates
    assert sum(rates.values()) - rates["h0"] == pytest.approx(9.0, rel=0.3), rates


def test_what_a_dead_holder_held_is_used_again_after_its_lease(ten: World) -> None:
    """F-L1."""
    for name in ("h1", "h2", "h3"):
        ten.die(ten.holders[name])
    ten.run(ten.t + 9.0)
    assert sum(_measured(ten, 20.0).values()) >= 95.0


def test_plain_callers_beside_holders_get_their_fair_part() -> None:
    world = World(100.0, 100.0, seed=SEED)
    for number in range(9):
        world.at(number / 20, world.join, Holder(world, f"h{number}", 30.0))
    world.plain_stream(30.0)
    world.run(20.0)
    before = world.plain_admitted
    rates = _measured(world, 20.0)
    plain = (world.plain_admitted - before) / 20.0
    assert plain == pytest.approx(10.0, rel=0.2)
    assert plain + sum(rates.values()) >= 95.0


def test_a_holder_of_weight_three_gets_three_parts() -> None:
    world = World(100.0, 100.0, seed=SEED)
    for number in range(7):
        world.at(number / 20, world.join, Holder(world, f"h{number}", 60.0, weight=3.0 if number == 0 else 1.0))
    world.run(20.0)
    rates = _measured(world, 20.0)
    assert rates["h0"] == pytest.approx(3 * 100 / 9, rel=0.15), rates


def test_uneven_holders_use_the_limit_and_equals_get_equal_parts() -> None:
    world = World(1000.0, 1000.0, seed=SEED, loss=0.02, slow=0.01, checks_potential=False)
    for number in range(50):
        world.at(number / 50, world.join, Holder(world, f"h{number:02}", [2.0, 10.0, 20.0, 100.0, 100.0][number // 10]))
    world.run(20.0)
    rates = _measured(world, 20.0)
    short = [rates[f"h{number:02}"] for number in range(30, 50)]
    assert sum(rates.values()) >= 950.0
    assert max(short) - min(short) <= 0.1 * sum(short) / len(short), short


@pytest.mark.slow
def test_f_l8_a_quota_is_never_overspent_whatever_holders_and_networks_do() -> None:
    """Portions on a network that loses, doubles and reorders; holders that die, forget and return."""
    for seed in range(SEED, SEED + WORLDS // 3):
        spent, left = spend_a_quota(seed)
        assert spent <= 1000, f"spend_a_quota({seed})"
        assert spent + max(0.0, left) <= 1000, f"spend_a_quota({seed})"


def test_f_l8_without_deaths_a_quota_is_spent_to_its_last_unit() -> None:
    for seed in range(SEED, SEED + 5):
        spent, _ = spend_a_quota(seed, is_calm=True)
        assert spent == 1000, f"spend_a_quota({seed}, is_calm=True)"


@pytest.mark.parametrize("share", [0.25, 0.7])
def test_a_partition_of_a_divided_limit_has_its_share_of_the_bound(share: float) -> None:
    """Four of them together lend the bound once."""
    params = Params(
        flags=Flags.LENDS | Flags.DIVIDED, committed=100.0, capacity=100.0, debt_max=1000.0, partitions=4,
        lending=LendTerms(40.0, 1.0, 3e6),
    )  # fmt: skip
    ledger, now_us = Ledger(), 1_790_000_000_000_000
    ledger.acquire([Acquire((Want("limit", params, 0.0, 0.0),))], now_us)
    record = ledger.records["limit"]
    record.share, record.share_until_us, record.share_partitions = share, 1e18, 4
    (lent,) = ledger.lend(LeaseAsk("one", 1.0, (LeaseWant("limit", params, Said(wanted=50.0)),)), now_us).slices
    assert lent.capacity == pytest.approx(lent.part * (100.0 + 40.0) * share)
    own = record.capacity * (1.0 - ledger.records["limit"].lent.capacity)  # type: ignore[union-attr]
    assert own + lent.capacity <= (100.0 + 40.0) * share + 1e-9


def test_a_raised_capacity_leaves_the_bucket_no_more_than_what_is_not_lent() -> None:
    """All that was lent before came out of the bound, and the bucket kept all of a small capacity."""
    small = Params(
        flags=Flags.LENDS, committed=100.0, capacity=10.0, debt_max=1000.0, lending=LendTerms(40.0, 1.0, 3e6)
    )
    large = replace(small, capacity=1000.0)
    ledger, now_us = Ledger(), 1_790_000_000_000_000
    (lent,) = ledger.lend(LeaseAsk("one", 1.0, (LeaseWant("limit", small, Said(wanted=10.0)),)), now_us).slices
    ledger.acquire([Acquire((Want("limit", large, 0.0, 0.0),))], now_us)
    record = ledger.records["limit"]
    assert record.lent is not None
    own = record.capacity * (1.0 - record.lent.capacity)
    assert own <= (1000.0 + 40.0) * (1.0 - lent.part) + 1e-9
