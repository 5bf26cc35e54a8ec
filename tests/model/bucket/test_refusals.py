"""Promise 1: a node refuses by itself only requests that the model refuses too; it never admits, and stops soon."""

from hypothesis import given
from hypothesis import strategies as st

from limiter.model.bucket.operations import Acquire, Want
from limiter.model.bucket.refusals import KEEP_MAX_S, REMEMBERED_MAX, Refusals, Remembered
from limiter.model.ledger.ledger import Ledger
from tests.support.operations import START_US, work_terms

TERMS = work_terms(rate=20, capacity=10)
ASK = [(0, 1.0, 2.0)]


def remembered(
    until_s: float = 1.0, *, bucket: str = "a", asks: list[tuple[int, float, float]] = ASK
) -> Remembered[int]:
    return Remembered(0, [bucket], asks, [True], until_s)


def test_a_refusal_is_repeated_for_requests_of_as_much_until_its_time_is_over() -> None:
    refusals: Refusals[int] = Refusals(KEEP_MAX_S)
    refusals.remember(remembered(1.0), 0.99)
    assert refusals.find(0, ["a"], [(0, 1.0, 2.0)], 0.999) is not None
    assert refusals.find(0, ["a"], [(0, 1.0, 3.0)], 0.999) is not None, "more is refused as well"
    assert refusals.find(0, ["a"], [(0, 1.0, 1.0)], 0.999) is None, "less might pass"
    assert refusals.find(0, ["a"], [(0, 0.0, 2.0)], 0.999) is None, "a class that needs less might pass"
    assert refusals.find(0, ["a"], [(4, 1.0, 2.0)], 0.999) is None, "asked in another way"
    assert refusals.find(0, ["a", "b"], [(0, 1.0, 2.0)] * 2, 0.999) is None, "other buckets"
    assert refusals.find(1, ["a"], [(0, 1.0, 2.0)], 0.999) is None, "another slot"
    assert refusals.find(0, ["a"], [(0, 1.0, 2.0)], 1.0) is None, "its time is over"


def test_a_settle_or_a_change_of_policies_ends_it() -> None:
    refusals: Refusals[int] = Refusals(KEEP_MAX_S)
    refusals.remember(remembered(), 0.99)
    refusals.forget(0, ["a"])
    assert refusals.find(0, ["a"], ASK, 0.99) is None
    refusals.remember(remembered(), 0.99)
    refusals.forget_all()
    assert refusals.find(0, ["a"], ASK, 0.99) is None


def test_each_repetition_is_reported_once() -> None:
    refusals: Refusals[int] = Refusals(KEEP_MAX_S)
    first, second = remembered(), remembered(bucket="b")
    for refused in (first, first, second):
        refusals.repeat(refused)
    assert [(refused.buckets, refused.count) for refused in refusals.take_untold()] == [(["a"], 2), (["b"], 1)]
    assert refusals.take_untold() == []


def test_it_remembers_a_bounded_number() -> None:
    refusals: Refusals[int] = Refusals(KEEP_MAX_S)
    for number in range(REMEMBERED_MAX + 10):
        refusals.remember(remembered(bucket=str(number)), 0.99)
    assert len(refusals.known) <= REMEMBERED_MAX


requests = st.tuples(st.integers(1, 40_000).map(lambda us: us / 1e6), st.sampled_from([0.0, 1.0, 2.0, 5.0, 15.0, 40.0]))


@given(asked=st.lists(requests, min_size=1, max_size=60))
def test_whatever_it_refuses_the_model_refuses_too(asked: list[tuple[float, float]]) -> None:
    """One bucket, asked at any moments for any amounts: with the memory the same are granted as without it."""
    plain, remembering = Ledger(), Ledger()
    refusals: Refusals[int] = Refusals(KEEP_MAX_S)
    now_s = 1000.0
    for step_s, charge in asked:
        now_s += step_s
        now_us = START_US + round(now_s * 1e6)
        operation = Acquire((Want("a", TERMS, 1.0, charge),))
        (expected,) = plain.acquire([operation], now_us)
        asks = [(0, 1.0, charge)]
        if refusals.find(0, ["a"], asks, now_s) is not None:
            assert not expected.granted
            continue
        (answer,) = remembering.acquire([operation], now_us)
        assert answer.granted == expected.granted
        if not answer.granted:
            (bucket,) = answer.buckets
            need = max(1.0, min(charge - TERMS.debt_max, TERMS.capacity))
            until_s = min(now_s + KEEP_MAX_S, now_s + (need - bucket.balance) / TERMS.committed)
            refusals.remember(Remembered(0, ["a"], asks, [True], until_s), now_s)


def test_a_refusal_whose_time_is_over_is_not_remembered() -> None:
    refusals: Refusals[int] = Refusals(KEEP_MAX_S)
    refusals.remember(remembered(1.0), 1.0)
    assert not refusals.known
