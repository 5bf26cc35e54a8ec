"""Callers may send their own measure: bytes become units of work before anything else happens to them (W19)."""

import pytest

from limiter.model.bucket.contract import AcquireRequest, Granted, Refused, SettleRequest
from tests.support.servers import Server
from tests.support.steered import policies
from tests.support.traffic import traffic

READ, WRITE = {"operation": "read"}, {"operation": "write"}
IO = {
    "name": "io", "match": {}, "rate": 0.001, "capacity": 1000, "work_unit": 2048, "max_request": 300,
    "weights": {"operation": {"write": 3}},
}  # fmt: skip


@pytest.mark.parametrize(
    ("descriptor", "sent", "charged", "left"),
    [(READ, 65_536, 32.0, 968.0), (READ, 1, 1.0, 999.0), (WRITE, 65_536, 32.0, 904.0), (READ, 0, 0.0, 1000.0)],
)
async def test_w19_64_kb_are_32_units_and_weights_come_after(
    valkey: Server, descriptor: dict[str, str], sent: float, charged: float, left: float
) -> None:
    async with traffic(valkey.url, policies(IO)) as callers:
        granted = await callers.decider.acquire(AcquireRequest(descriptor=descriptor, work=sent))
        assert isinstance(granted, Granted)
        assert granted.charged == charged
        assert granted.limits[0].balance == pytest.approx(left)


async def test_w19_progress_and_settles_are_in_the_callers_measure_and_corrections_in_units(valkey: Server) -> None:
    async with traffic(valkey.url, policies(IO)) as callers:
        granted = await callers.decider.acquire(AcquireRequest(descriptor=WRITE, work=4096))
        assert isinstance(granted, Granted)
        so_far = SettleRequest(reservation=granted.reservation, work=6000, final=False)
        assert (await callers.decider.settle(so_far)).adjusted == 1.0, "3 units so far, of which 2 were charged"
        settled = await callers.decider.settle(SettleRequest(reservation=granted.reservation, work=100))
        assert (settled.work, settled.adjusted) == (100.0, -1.0)
        assert settled.limits[0].balance == pytest.approx(997.0)


async def test_w13_the_bound_of_one_request_is_in_units(valkey: Server) -> None:
    async with traffic(valkey.url, policies(IO)) as callers:
        fits = await callers.decider.acquire(AcquireRequest(descriptor=READ, work=300 * 2048))
        beyond = await callers.decider.acquire(AcquireRequest(descriptor=READ, work=300 * 2048 + 1))
        assert isinstance(fits, Granted)
        assert isinstance(beyond, Refused)
        assert beyond.reason == "request_too_large"
