"""Many processes and tasks on the same few buckets: every unit is accounted for (promises 1 and 2)."""

import logging
import random
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

import pytest

from limiter.model.ledger.ledger import Ledger
from tests.support.hammer import CHARGES, SLOT, TERMS, Held, acquire_all, settle_all
from tests.support.operations import acquire, ask, record_of
from tests.support.servers import Server
from tests.support.stores import ScriptStore

PROCESSES = 3


def let_in_by_the_model(bucket: str) -> int:
    """The number of requests that one bucket admits, asked one after the other."""
    ledger, count = Ledger(), 0
    while acquire(ledger, ask(TERMS, bucket=bucket, minimum=1, charge=CHARGES[bucket])).granted:
        count += 1
    return count


@pytest.mark.slow
def test_processes_that_hammer_the_same_buckets_are_admitted_and_settled_exactly(server: Server) -> None:
    seed = random.randrange(2**32)
    logging.getLogger(__name__).warning("seed %d", seed)
    draw, store = random.Random(seed), ScriptStore(server, SLOT)
    with ProcessPoolExecutor(PROCESSES, mp_context=get_context("spawn")) as processes:
        found = processes.map(acquire_all, [server.url] * PROCESSES, range(seed, seed + PROCESSES))
        reservations = [held for part in found for held in part]
        admitted = Counter(held.bucket for held in reservations)
        for bucket in CHARGES:
            record = record_of(store, bucket)
            assert admitted[bucket] == record.admitted == let_in_by_the_model(bucket)
            assert TERMS.capacity - record.balance == record.work_charged == admitted[bucket] * CHARGES[bucket]

        # Settled by whichever node, a third of them by two at once.
        parts: list[list[Held]] = [[] for _ in range(PROCESSES)]
        for held in draw.sample(reservations, len(reservations)):
            for number in draw.sample(range(PROCESSES), draw.choice([1, 1, 2])):
                parts[number].append(held)
        counts = processes.map(settle_all, [server.url] * PROCESSES, range(seed, seed + PROCESSES), parts)
        assert sum(counts) == len(reservations), "each settle counted once"

    for bucket in CHARGES:
        record, work = record_of(store, bucket), sum(held.work for held in reservations if held.bucket == bucket)
        assert (record.settles, record.work_settled, record.uncollected) == (admitted[bucket], work, 0)
        assert TERMS.capacity - record.balance == work, "charged − refunded + extra = work settled"
