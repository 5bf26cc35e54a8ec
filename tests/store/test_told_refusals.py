"""Refusals that nodes repeat by themselves are reported to the store, and count there like its own."""

from limiter.model.bucket.block import BlockTerms
from limiter.model.bucket.bucket import Params
from limiter.model.bucket.operations import REFUSING, Acquire, AcquireAnswer, AcquireStatus, Verdict, Want
from tests.support.operations import (
    NO_REFILL,
    S_US,
    START_US,
    acquire,
    ask,
    look,
    quota_terms,
    record_of,
    work_terms,
)
from tests.support.stores import LEASE_MS, Decides

TERMS = work_terms(rate=NO_REFILL)
FOR_A_MINUTE = BlockTerms(after=100, in_us=60e6, for_us=60e6)


def tell(ledger: Decides, requests: float, *buckets: tuple[str, Params, bool], now_us: int = START_US) -> AcquireAnswer:
    """Each bucket with its terms, and whether it was a reason."""
    wants = tuple(Want(name, terms, 0.0, 0.0, REFUSING if refused else 0) for name, terms, refused in buckets)
    return acquire(ledger, Acquire(wants, requests=requests, told=True), now_us)


def test_told_refusals_count_in_every_bucket_and_as_refused_where_the_reason_was(ledger: Decides) -> None:
    acquire(ledger, ask(TERMS, bucket="a:"))
    answer = tell(ledger, 7, ("a:", TERMS, True), ("b:", TERMS, False))
    assert (answer.status, answer.granted, answer.buckets) == (AcquireStatus.COUNTED, False, ())
    counted = [(record.requests, record.refused) for record in (record_of(ledger, name) for name in ("a:", "b:"))]
    assert counted == [(8, 7), (7, 0)]


def test_told_refusals_spend_nothing(ledger: Decides) -> None:
    tell(ledger, 1e6, ("a:", TERMS, True))
    assert look(ledger, TERMS, bucket="a:") == 50
    record = record_of(ledger, "a:")
    assert (record.admitted, record.work_charged, record.uncollected) == (0, 0, 0)


def test_the_controller_samples_a_bucket_that_only_nodes_refused_in(ledger: Decides) -> None:
    tell(ledger, 1, ("a:", TERMS, True))
    lease = ledger.take(b"owner", LEASE_MS)
    assert lease is not None
    assert ledger.sample(lease, 10) == ["a:"]


def test_w17_reported_refusals_lead_to_a_block(ledger: Decides) -> None:
    terms = work_terms(rate=NO_REFILL, block=FOR_A_MINUTE)
    tell(ledger, 99, ("a:", terms, True))
    assert acquire(ledger, ask(terms, bucket="a:")).granted
    tell(ledger, 1, ("a:", terms, True))
    assert acquire(ledger, ask(terms, bucket="a:")).buckets[0].verdict is Verdict.DENIED


def test_w17_refusals_because_of_another_bucket_block_no_key(ledger: Decides) -> None:
    terms = work_terms(rate=NO_REFILL, block=FOR_A_MINUTE)
    tell(ledger, 1000, ("a:", terms, False))
    assert acquire(ledger, ask(terms, bucket="a:")).granted


def test_w17_refusals_while_blocked_bring_no_new_block(ledger: Decides) -> None:
    terms = work_terms(rate=NO_REFILL, block=FOR_A_MINUTE)
    tell(ledger, 100, ("a:", terms, True))
    tell(ledger, 100, ("a:", terms, True), now_us=START_US + 59 * S_US)
    assert acquire(ledger, ask(terms, bucket="a:"), START_US + 60 * S_US).granted
    assert record_of(ledger, "a:").refused == 200


def test_refusals_of_a_window_that_is_over_are_answered_and_not_counted(ledger: Decides) -> None:
    terms = quota_terms(10, (START_US - 60 * S_US, START_US))
    assert tell(ledger, 3, ("a:", terms, True)).status is AcquireStatus.WINDOW
