"""A key that was refused too often is denied for a time (W17)."""

from limiter.model.bucket.block import BlockTerms
from limiter.model.bucket.bucket import Flags
from limiter.model.bucket.operations import Acquire, AcquireAnswer, Lot, Verdict, Want
from limiter.model.control.stewardship import Steer
from limiter.model.overload.shedding import ShedOrder, State
from tests.support.operations import (
    BUCKET,
    HOUR_US,
    MINUTE_US,
    S_US,
    START_US,
    acquire,
    ask,
    look,
    record_of,
    work_terms,
)
from tests.support.stores import LEASE_MS, Decides

BLOCK = BlockTerms(after=3, in_us=60.0 * S_US, for_us=600.0 * S_US)
TERMS = work_terms(rate=0.1, capacity=10, block=BLOCK)
"""A refill of one token in ten seconds: refused requests are easily had."""


def refuse(ledger: Decides, times: int, now_us: int = START_US) -> AcquireAnswer:
    for _ in range(times):
        answer = acquire(ledger, ask(TERMS, charge=100, minimum=10.5), now_us)
        assert not answer.granted
    return answer


def test_w17_a_key_is_blocked_after_so_many_refusals_whatever_its_balance(ledger: Decides) -> None:
    assert refuse(ledger, 3).buckets[0].verdict is Verdict.BLOCKED
    answer = acquire(ledger, ask(TERMS, charge=1), START_US + 5 * S_US)
    assert (answer.granted, answer.buckets[0].verdict, answer.buckets[0].charge) == (False, Verdict.DENIED, 595 * S_US)
    assert answer.buckets[0].balance == 10
    assert record_of(ledger).refused == 4


def test_w17_a_block_ends_by_itself_and_the_count_begins_afresh(ledger: Decides) -> None:
    refuse(ledger, 3)
    assert not acquire(ledger, ask(TERMS, charge=1), START_US + 600 * S_US - 1).granted
    assert acquire(ledger, ask(TERMS, charge=1), START_US + 600 * S_US).granted
    refuse(ledger, 2, START_US + 601 * S_US)
    assert acquire(ledger, ask(TERMS, charge=1), START_US + 601 * S_US).granted
    refuse(ledger, 1, START_US + 601 * S_US)
    assert not acquire(ledger, ask(TERMS, charge=1), START_US + 602 * S_US).granted


def test_w17_refusals_that_come_slowly_block_nobody(ledger: Decides) -> None:
    for number in range(6):
        refuse(ledger, 1, START_US + number * 31 * S_US)
    assert acquire(ledger, ask(TERMS, charge=1), START_US + HOUR_US).granted


def test_w17_asking_while_blocked_makes_no_block_longer(ledger: Decides) -> None:
    refuse(ledger, 3)
    for second in range(100):
        acquire(ledger, ask(TERMS, charge=100), START_US + second * S_US)
    assert acquire(ledger, ask(TERMS, charge=1), START_US + 600 * S_US).granted


def test_w17_a_dry_run_counts_nothing_and_shows_a_block(ledger: Decides) -> None:
    for _ in range(5):
        acquire(ledger, ask(TERMS, charge=100, minimum=10.5).but(dry_run=True))
    assert acquire(ledger, ask(TERMS, charge=1)).granted
    refuse(ledger, 3)
    answer = acquire(ledger, ask(TERMS, charge=1).but(dry_run=True), START_US + S_US)
    assert (answer.buckets[0].verdict, answer.buckets[0].charge) == (Verdict.DENIED, 599 * S_US)


def test_w17_refusals_by_another_policy_count_only_there(ledger: Decides) -> None:
    other = work_terms(rate=0.1, capacity=10)
    both = Acquire((Want(BUCKET, TERMS, 1.0, 1.0), Want("other:a", other, 10.5, 1.0)))
    for _ in range(10):
        assert not acquire(ledger, both).granted
    assert look(ledger, TERMS) == 10
    assert acquire(ledger, ask(TERMS, charge=1)).granted


def test_w17_a_blocked_key_spends_nothing_anywhere(ledger: Decides) -> None:
    """P5: one acquire is all or nothing."""
    other = work_terms(rate=1e-30, capacity=10)
    refuse(ledger, 3)
    both = Acquire((Want(BUCKET, TERMS, 1.0, 1.0), Want("other:a", other, 1.0, 1.0)))
    answer = acquire(ledger, both)
    assert [found.verdict for found in answer.buckets] == [Verdict.DENIED, Verdict.PASSED]
    assert look(ledger, other, bucket="other:a") == 10


def test_w17_a_clock_that_steps_back_makes_no_block_longer(ledger: Decides) -> None:
    refuse(ledger, 3)
    answer = acquire(ledger, ask(TERMS, charge=1), START_US - HOUR_US)
    assert answer.buckets[0].charge == BLOCK.for_us
    assert acquire(ledger, ask(TERMS, charge=1), START_US + 600 * S_US).granted


def test_w17_a_policy_that_blocks_no_more_lets_its_keys_in(ledger: Decides) -> None:
    refuse(ledger, 3)
    plain = work_terms(rate=0.1, capacity=10)
    assert acquire(ledger, ask(plain, charge=1), START_US + S_US).granted
    assert record_of(ledger).block is None
    assert acquire(ledger, ask(TERMS, charge=1), START_US + 2 * S_US).granted, "and remembers nothing of it"


def test_w17_a_shorter_block_reaches_keys_that_are_blocked_already(ledger: Decides) -> None:
    refuse(ledger, 3)
    shorter = work_terms(rate=0.1, capacity=10, block=BLOCK._replace(for_us=60.0 * S_US))
    answer = acquire(ledger, ask(shorter, charge=1), START_US + S_US)
    assert answer.buckets[0].charge == MINUTE_US


def test_w17_a_shadow_blocks_nobody(ledger: Decides) -> None:
    shadow = work_terms(rate=0.1, capacity=10, block=BLOCK, flags=Flags.SHADOW)
    for _ in range(5):
        assert acquire(ledger, ask(shadow, charge=100, minimum=10.5)).granted
    answer = acquire(ledger, ask(shadow, charge=1))
    assert (answer.granted, answer.buckets[0].verdict) == (True, Verdict.DENIED)


def test_w17_overload_control_neither_blocks_nor_hides_a_block(ledger: Decides) -> None:
    terms = work_terms(rate=0.1, capacity=10, block=BLOCK, flags=Flags.OVERLOAD)
    request = ask(terms, charge=1).but(lot=Lot(3, 0.0))
    acquire(ledger, ask(terms, charge=0.0).but(lot=Lot(0, 0.5)))
    lease = ledger.take(b"owner", LEASE_MS)
    assert lease is not None
    order = ShedOrder(quality=1.0, state=State.OVERLOADED, refused_shares=(0.0, 0.0, 0.0, 1.0), rates=(0.0,) * 4)
    ledger.steer(lease, [Steer(BUCKET, terms, overload=order)], START_US)
    for _ in range(10):
        assert acquire(ledger, request).buckets[0].verdict is Verdict.TURNED_AWAY
    for _ in range(3):
        acquire(ledger, ask(terms, charge=100, minimum=10.5).but(lot=Lot(0, 0.5)))
    assert acquire(ledger, request).buckets[0].verdict is Verdict.DENIED
