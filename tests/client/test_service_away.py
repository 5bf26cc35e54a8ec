"""The service does not answer: what the program sees, and how it goes on afterwards (B3)."""

import asyncio
import time
from typing import Any

import pytest

from headgate import Headgate, Throttled
from limiter.client import leasing
from limiter.client.service_away import ServiceAway
from tests.support import eventually_async
from tests.support.askers import ask_until_local
from tests.support.live import LiveApi
from tests.support.nodes import until
from tests.support.proxy import Proxy
from tests.support.scripted_service import BUSY, ScriptedService, granted, refused
from tests.support.servers import free_port


async def test_open_grants_and_closed_refuses() -> None:
    url = f"http://127.0.0.1:{free_port()}"
    async with Headgate(url, unavailable="open", deadline_ms=30) as gate:
        grant = await gate.acquire({"service": "a"}, work=3)
        assert (bool(grant), grant.degraded, grant.charged) == (True, True, 3)
        grant.settle(5)
        assert await gate.flush() == 0, "nobody waits for it"
        assert gate.counts()["undecided"] == 1
    async with Headgate(url, unavailable="closed", deadline_ms=30) as gate:
        with pytest.raises(Throttled) as away:
            await gate.acquire({"service": "a"})
        assert (away.value.reason, away.value.status, away.value.retry) == ("unavailable", 503, "after")
        assert not await gate.acquire({"service": "a"}, on_refused="degrade")


@pytest.mark.parametrize(("mode", "is_granted"), [("open", True), ("closed", False)])
async def test_a_service_that_decides_nothing_is_asked_less(
    service: ScriptedService, mode: Any, is_granted: bool
) -> None:
    """Requests are then decided at once, as the mode says, and none of them is told that it was throttled."""
    service.whole = BUSY
    async with Headgate(service.url, unavailable=mode, deadline_ms=20_000) as gate:
        now_s = 1000.0
        gate._now_s = lambda: now_s
        reasons = []
        for _ in range(400):
            now_s += 0.01
            grant = await gate.acquire({"service": "a"}, on_refused="degrade")
            assert bool(grant) is is_granted
            reasons.append(getattr(grant.refusal, "reason", None))
        assert set(reasons) == ({None} if is_granted else {"unavailable", "node_busy"} & set(reasons))
        assert len(service.calls) < 200
        service.whole = None
        now_s += 10
        assert not (await gate.acquire({"service": "a"})).degraded
        for _ in range(400):
            now_s += 0.01
            grant = await gate.acquire({"service": "a"})
        assert not grant.degraded


async def test_it_recovers_by_itself(node: LiveApi, customer: str) -> None:
    async with Proxy(node.port) as proxy:
        url = f"http://127.0.0.1:{proxy.port}"
        async with Headgate(url, unavailable="open", deadline_ms=100) as gate:
            descriptor = {"service": "ledger", "customer": customer}
            assert not (await gate.acquire(descriptor)).degraded
            proxy.mode = "stall"
            for _ in range(30):
                assert (await gate.acquire(descriptor)).degraded
            proxy.mode = "pass"

            async def is_back() -> bool:
                return not (await gate.acquire(descriptor, deadline_ms=2000)).degraded

            await eventually_async(is_back, within_s=20)


async def test_local_goes_on_at_the_pace_of_before(service: ScriptedService) -> None:
    async with Headgate(service.url, deadline_ms=2000) as gate:
        for _ in range(200):
            await gate.acquire({"service": "known"}, work=1)
        service.decide = lambda number, operation: granted(number, operation, limits=[{"mechanism": "quota"}])
        await gate.acquire({"service": "quota"}, work=1)
        service.whole = BUSY
        found = [bool(await gate.acquire({"service": "known"}, work=1, on_refused="degrade")) for _ in range(200)]
        assert found[0]
        assert 10 <= sum(found) < 150, "about a second's pace"
        assert not await gate.acquire({"service": "quota"}, on_refused="degrade"), "nobody knows what is left of it"
        assert not await gate.acquire({"service": "other"}, on_refused="degrade")


def test_local_keeps_its_pace_over_time() -> None:
    away = ServiceAway("local")
    for step in range(1000):
        away.granted("known", 1.0, step / 100, has_quota=False)
    granted_work = sum(away.admits("known", 1.0, 10 + step / 1000) for step in range(20_000))
    assert granted_work == pytest.approx(100 * 20, rel=0.4)
    away.answered()
    assert away.admits("known", 1.0, 31.0)


async def test_a_refusal_shows_that_the_service_is_there(service: ScriptedService) -> None:
    async with Headgate(service.url, adaptive=False) as gate:
        await gate.acquire({"service": "a"})
        service.whole = BUSY
        await gate.acquire({"service": "a"}, on_refused="degrade")
        assert gate._away._away_since_s is not None
        service.whole = refused()
        assert not await gate.acquire({"service": "a"}, on_refused="degrade")
        assert gate._away._away_since_s is None


async def test_a_lease_decides_on_until_it_ends_and_comes_back(
    node: LiveApi, customer: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(leasing, "LOOK_S", 0.1)
    async with Proxy(node.port) as proxy:
        url = f"http://127.0.0.1:{proxy.port}"
        async with Headgate(url, local="auto", unavailable="closed", deadline_ms=300) as gate:
            descriptor = {"service": "lent", "customer": customer}
            await ask_until_local(gate, descriptor)
            proxy.mode = "stall"
            grant = await gate.acquire(descriptor, work=0.01)
            assert grant.local, "its slice is its own until the lease ends"
            grant.settle(0.01)

            async def is_over() -> bool:
                grant = await gate.acquire(descriptor, work=0.01, on_refused="degrade")
                return not grant.local

            await eventually_async(is_over, within_s=20)
            proxy.mode = "pass"
            await ask_until_local(gate, descriptor)


async def test_the_policy_of_a_lease_says_what_happens() -> None:
    async with ScriptedService() as service:
        row = {"policy": "p", "mechanism": "work", "share": 1.0, "rate": 1.0, "capacity": 1.0, "tokens": 0.0,
               "moved": 0.0, "weight": 1.0}  # fmt: skip
        answer = {"lease": "t", "expires_in_ms": 1000, "renew_in_ms": 60_000, "slices": [row]}
        for mode, is_granted in (("open", True), ("closed", False)):
            service.others = lambda _, body: (
                200, answer | {"number": body.get("number", 1), "on_service_failure": mode}  # noqa: B023
            )  # fmt: skip
            service.whole = None
            gate = Headgate(service.url, local="auto", unavailable="closed" if is_granted else "open", adaptive=False)
            async with gate:
                await gate.acquire({"service": "a"})
                asked = gate.parts().leasing
                key = next(iter(asked._asked))
                held = asked._held[key] = asked._new(key[0], dict(key[1]))
                await held.begin()
                assert held.lease.token == "t"
                service.whole = BUSY
                await until(lambda: time.monotonic_ns() > held.lease.deadline_ns)  # noqa: B023
                assert bool(await gate.acquire({"service": "a"}, on_refused="degrade")) is is_granted


async def test_no_future_is_left_when_the_service_is_away() -> None:
    async with Headgate(f"http://127.0.0.1:{free_port()}", unavailable="closed", deadline_ms=30) as gate:
        before = len(asyncio.all_tasks())
        asked = (gate.acquire({"service": "a"}).grant() for _ in range(100))
        found = await asyncio.gather(*asked, return_exceptions=True)
        assert {type(one) for one in found} == {Throttled}
        await until(lambda: len(asyncio.all_tasks()) <= before)
