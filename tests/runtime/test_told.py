"""Waiting for a callback."""

from limiter.runtime.told import Told


async def test_an_outcome_that_comes_after_its_caller_gave_up_is_dropped() -> None:
    told = Told[int]()
    told.future.cancel()
    told(1)
    assert told.future.cancelled()


async def test_the_first_outcome_counts() -> None:
    told = Told[int]()
    told(1)
    told(2)
    assert await told.future == 1
