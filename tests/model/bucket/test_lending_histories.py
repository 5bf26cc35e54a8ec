"""Histories of leases that random worlds seldom meet, one for each rule that they would not miss (B8, promise 7)."""

from dataclasses import replace

import pytest

from limiter.model.bucket.bucket import Flags, Params, Record
from limiter.model.bucket.leases import LeaseAnswer, LeaseAsk, LeaseKind, LeaseWant, SliceAnswer
from limiter.model.bucket.lending import LendStatus, LendTerms, Said, Used
from limiter.model.bucket.operations import Acquire, AcquireStatus, Want
from limiter.model.ledger.ledger import Ledger

BEGIN_US = 1_790_000_000_000_000
TERMS = Params(flags=Flags.LENDS, committed=100.0, capacity=100.0, debt_max=6000.0, lending=LendTerms(need=1.0))
MONTH = Params(
    flags=Flags.LENDS | Flags.QUOTA,
    capacity=1000.0,
    debt_max=0.0,
    window_start_us=BEGIN_US - 10**12,
    window_end_us=BEGIN_US + 10**12,
    lending=LendTerms(),
)


class Bucket:
    """One limit in memory, and a clock in seconds that the test moves."""

    def __init__(self, terms: Params = TERMS) -> None:
        self.ledger, self.terms = Ledger(), terms

    def lend(
        self,
        t: float,
        lease: str,
        number: float,
        kind: LeaseKind = LeaseKind.RENEW,
        *,
        taken: float = -1.0,
        **said: float,
    ) -> LeaseAnswer:
        """Serve a request; by default the holder has taken the answer before."""
        want = LeaseWant("limit", self.terms, Said(**said))
        ask = LeaseAsk(lease, number, (want,), taken=number - 1 if taken < 0 else taken, kind=kind)
        return self.ledger.lend(ask, self._us(t))

    def slice(self, t: float, lease: str, number: float, *, taken: float = -1.0, **said: float) -> SliceAnswer:
        """Serve a renewal."""
        answer = self.lend(t, lease, number, LeaseKind.RENEW, taken=taken, **said)
        assert answer.status is LendStatus.LENT
        return answer.slices[0]

    def balance(self, t: float) -> float:
        """What the bucket itself has left."""
        acquire = Acquire((Want("limit", self.terms, -1e9, 0.0),))
        return self.ledger.acquire([acquire], self._us(t))[0].buckets[0].balance

    def drain(self, t: float) -> None:
        """Plain callers take all of it."""
        acquire = Acquire((Want("limit", self.terms, 0.0, self.balance(t)),))
        assert self.ledger.acquire([acquire], self._us(t))[0].status is AcquireStatus.GRANTED

    @property
    def record(self) -> Record:
        return self.ledger.records["limit"]

    def _us(self, t: float) -> int:
        return BEGIN_US + round(t * 1e6)


def test_the_rate_of_a_part_that_has_ended_comes_back_from_then_on_and_not_for_before() -> None:
    bucket = Bucket()
    dead = bucket.slice(0.0, "dead", 1.0, wanted=50.0)  # ends at 3.5
    other = bucket.slice(1.0, "other", 1.0, wanted=10.0)
    bucket.balance(2.0)
    bucket.drain(2.9)
    own = 0.7 * 100.0 * (1.0 - dead.share - other.share)
    later = bucket.slice(3.6, "other", 2.0, wanted=10.0, held=other.share)
    assert dead.share >= 0.4
    assert later.balance + later.tokens <= own + 1e-6


def test_a_return_by_an_older_answer_brings_back_what_the_newer_one_brought_and_nothing_else() -> None:
    """F-L6: which of the two answers the tokens are of, nobody knows."""
    bucket = Bucket()
    first = bucket.slice(0.0, "one", 1.0, wanted=20.0)
    lost = bucket.slice(1.0, "one", 2.0, wanted=90.0, held=first.share)
    assert lost.tokens > 0
    before = bucket.balance(1.0)
    back = bucket.lend(1.0, "one", 3.0, LeaseKind.RETURN, taken=1.0, held=first.tokens)
    assert back.status is LendStatus.RETURNED
    assert bucket.balance(1.0) == pytest.approx(before + lost.tokens)


def test_a_late_return_brings_back_no_tokens() -> None:
    """F-L6: they ended with their lease, and the bucket has refilled since."""
    bucket = Bucket()
    one = bucket.slice(0.0, "one", 1.0, wanted=100.0)
    for t in (1.0, 2.0, 3.0, 4.0):
        bucket.drain(t)
    assert bucket.lend(4.0, "one", 2.0, LeaseKind.RETURN, held=one.tokens).status is LendStatus.RETURNED
    assert bucket.balance(4.0) == 0.0


def test_a_clock_that_goes_back_ends_no_part_later_and_wakes_no_lease() -> None:
    """F-L4."""
    bucket = Bucket()
    bucket.slice(0.0, "one", 1.0, wanted=50.0)
    for t in (-3600.0, -3599.0, -3598.0, -3597.0, -3596.0):
        bucket.balance(t)
    lent = bucket.record.lent
    assert lent is not None
    assert lent.rate == 0.0, "a lease and a second after it began, whatever the clock said"
    bucket.lend(-3584.0, "two", 1.0)
    bucket.lend(-3584.0, "two", 2.0, LeaseKind.RETURN)
    assert bucket.lend(-7200.0, "one", 2.0).status is LendStatus.UNKNOWN


def test_f_l5_a_capacity_that_is_raised_raises_no_bound() -> None:
    """Found by hostile(2653227196): until the next renewal the bucket held a part of a bound that had grown with it."""
    bucket = Bucket(replace(TERMS, lending=LendTerms(bound=100.0, need=1.0)))
    one = bucket.slice(0.0, "one", 1.0, wanted=50.0)
    bucket.terms = replace(bucket.terms, capacity=300.0)
    bucket.balance(0.1)
    lent = bucket.record.lent
    assert lent is not None
    assert 0 < lent.capacity < 1
    assert 300.0 * (1.0 - lent.capacity) == pytest.approx(400.0 * (1.0 - one.part))


def test_a_part_that_has_ended_is_held_no_more_whatever_its_holder_says() -> None:
    """F-L2: others may have it by now."""
    bucket = Bucket()
    one = bucket.slice(0.0, "one", 1.0, wanted=100.0)
    for t in (1.0, 2.0, 3.0):
        bucket.balance(t)
    other = bucket.slice(4.0, "other", 1.0, wanted=100.0)
    late = bucket.slice(4.5, "one", 2.0, wanted=100.0, held=one.share)
    assert other.share == 1.0
    assert late.share <= 1e-9
    assert other.part + late.part <= 1.0


def test_debt_that_a_holder_cannot_repay_in_time_becomes_the_bucket_s_once() -> None:
    """Whatever gets lost: `moved` says how much of it by now."""
    bucket = Bucket()
    one = bucket.slice(0.0, "one", 1.0, wanted=10.0)
    bucket.drain(0.0)
    two = bucket.slice(0.0, "one", 2.0, wanted=10.0, held=one.share, debt=1000.0)
    payable = 3.0 * 100.0 * two.share
    assert two.moved == pytest.approx(1000.0 - payable)
    assert bucket.balance(0.0) == pytest.approx(-two.moved)
    three = bucket.slice(0.0, "one", 3.0, taken=1.0, wanted=10.0, held=one.share, debt=1000.0)
    assert three.moved == pytest.approx(two.moved), "the second answer was lost, so it is still owed"
    bucket.lend(0.0, "one", 4.0, LeaseKind.RETURN, debt=1000.0 - three.moved, moved=three.moved)
    assert bucket.balance(0.0) == pytest.approx(-1000.0)


def test_no_more_is_given_back_than_was_lent() -> None:
    """A holder that makes up tokens would fill the bucket for everybody."""
    bucket = Bucket()
    bucket.drain(0.0)
    for number in range(20):
        name = f"liar-{number}"
        bucket.lend(0.0, name, 1.0, wanted=100.0)
        assert bucket.lend(0.0, name, 2.0, LeaseKind.RETURN, held=100.0).status is LendStatus.RETURNED
    assert bucket.balance(0.0) == pytest.approx(0.0)
    one = bucket.slice(0.0, "one", 1.0, wanted=100.0)
    one = bucket.slice(0.5, "one", 2.0, wanted=100.0, held=one.share)
    bucket.lend(1.0, "one", 3.0, LeaseKind.RETURN, held=100.0)
    assert bucket.balance(1.0) <= 100.0 * 1.0 + 1e-6


def test_what_a_holder_was_lent_and_gained_comes_back_whole() -> None:
    """F-L6."""
    bucket = Bucket()
    one = bucket.slice(0.0, "one", 1.0, wanted=100.0)
    held = min(one.capacity, one.tokens + one.rate)
    bucket.drain(1.0)
    two = bucket.slice(1.0, "one", 2.0, wanted=100.0, held=one.share)
    held = min(two.capacity, held + two.tokens)
    held = min(two.capacity, held + two.rate)
    before = bucket.balance(2.0)
    bucket.lend(2.0, "one", 3.0, LeaseKind.RETURN, held=held)
    assert bucket.balance(2.0) == pytest.approx(min(100.0, before + held))


@pytest.mark.parametrize("spent", [2000.0, 2.0**53])
def test_f_l8_a_holder_that_takes_back_what_it_said_it_had_spent_mints_nothing(spent: float) -> None:
    """Only what the quota paid comes back."""
    bucket = Bucket(MONTH)
    period = float(MONTH.window_end_us)
    bucket.drain(0.0)
    bucket.lend(0.0, "liar", 1.0, wanted=10.0, moved=period)
    bucket.lend(0.1, "liar", 2.0, wanted=10.0, moved=period, debt=spent)
    assert bucket.record.uncollected == spent
    bucket.lend(0.2, "liar", 3.0, wanted=0.0, moved=period)
    assert (bucket.balance(0.2), bucket.record.uncollected) == (0.0, 0.0)
    bucket.lend(0.3, "liar", 4.0, LeaseKind.RETURN, moved=period)
    assert bucket.balance(0.3) == 0.0


def test_sums_that_shrink_are_counted_as_they_were() -> None:
    bucket = Bucket()
    want = LeaseWant("limit", TERMS, Said(wanted=10.0))
    for number, requests in ((1.0, 0.0), (2.0, 50.0), (3.0, 20.0), (4.0, 60.0)):
        used = Used(requests=requests, charged=requests)
        bucket.ledger.lend(LeaseAsk("one", number, (want,), taken=number - 1, used=used), BEGIN_US)
    assert (bucket.record.requests, bucket.record.admitted, bucket.record.work_charged) == (60.0, 60.0, 60.0)
