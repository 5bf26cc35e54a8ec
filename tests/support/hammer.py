"""One process of many that use the same buckets: it acquires until all are empty, or settles others' reservations."""

import asyncio
import random
from collections.abc import Awaitable, Callable, Sequence
from typing import NamedTuple

from limiter.model.bucket.bucket import Params
from limiter.model.bucket.operations import Charge, Settle, SettleStatus
from limiter.store.buckets import Buckets
from limiter.store.keys import Slot
from tests.support.nodes import PATIENT_S, node
from tests.support.operations import MINUTE_US, NO_REFILL, ask, work_terms

SLOT = Slot("hammer")
TASKS = 64
TERMS = work_terms(rate=NO_REFILL, capacity=2000, debt_max=1e9)
CHARGES = {"a": 1.0, "b": 2.0, "c": 3.0, "d": 7.0}
"""The charge of each bucket for a request."""


class Held(NamedTuple):
    """A reservation, and the work that it will turn out to have been."""

    name: str
    bucket: str
    acquired_us: int
    work: int


def acquire_all(url: str, seed: int) -> list[Held]:
    """Acquire from many tasks at once until every bucket has refused each; the reservations."""
    return asyncio.run(_acquire_all(url, seed))


async def _acquire_all(url: str, seed: int) -> list[Held]:
    held: list[Held] = []

    async def caller(buckets: Buckets, number: int) -> None:
        draw = random.Random(f"{seed}.{number}")
        left = list(CHARGES)
        while left:
            bucket = draw.choice(left)
            operation = ask(TERMS, bucket=bucket, minimum=1, charge=CHARGES[bucket])
            answer = await buckets.acquire(SLOT, operation, timeout_s=PATIENT_S)
            if answer.granted:
                held.append(Held(f"{seed}.{len(held)}", bucket, answer.now_us, draw.randrange(20)))
            else:
                left.remove(bucket)

    await _from_many_tasks(url, [caller] * TASKS)
    return held


def settle_all(url: str, seed: int, reservations: Sequence[Held]) -> int:
    """Settle from many tasks at once, some with progress before, some twice; how many settles counted."""
    return asyncio.run(_settle_all(url, seed, reservations))


async def _settle_all(url: str, seed: int, reservations: Sequence[Held]) -> int:
    counted = 0

    async def caller(buckets: Buckets, number: int) -> None:
        nonlocal counted
        draw = random.Random(f"{seed}.{number}")
        for held in reservations[number::TASKS]:
            final = _settle(held, held.work, TERMS)
            if draw.random() < 0.3:
                await buckets.settle(SLOT, _settle(held, held.work // 2, TERMS, final=False), timeout_s=PATIENT_S)
            calls = [buckets.settle(SLOT, final, timeout_s=PATIENT_S)]
            if draw.random() < 0.3:
                calls.append(buckets.settle(SLOT, final, timeout_s=PATIENT_S))
            statuses = [answer.status for answer in await asyncio.gather(*calls)]
            assert set(statuses) <= {SettleStatus.SETTLED, SettleStatus.DUPLICATE}, statuses
            counted += statuses.count(SettleStatus.SETTLED)

    await _from_many_tasks(url, [caller] * TASKS)
    return counted


def _settle(held: Held, work: float, terms: Params, *, final: bool = True) -> Settle:
    return Settle(
        reservation=held.name,
        charges=(Charge(held.bucket, CHARGES[held.bucket], 1.0, terms),),
        work=float(work),
        acquired_us=held.acquired_us,
        deadline_us=held.acquired_us + MINUTE_US,
        final=final,
    )


async def _from_many_tasks(url: str, callers: Sequence[Callable[[Buckets, int], Awaitable[None]]]) -> None:
    async with node(url) as buckets:
        await asyncio.gather(*(caller(buckets, number) for number, caller in enumerate(callers)))
