"""Decisions in the client, by leases: asked for, and begun by itself where that pays (P9, B8)."""

from typing import Any

import pytest

from headgate import Headgate, Throttled
from limiter.client.lease import leasing
from tests.support import eventually_async
from tests.support.askers import Spent, ask_often, ask_until_local
from tests.support.live import LiveApi
from tests.support.nodes import until
from tests.support.scripted_service import Operation, ScriptedService


async def test_a_lease_decides_without_a_call(node: LiveApi, customer: str, spent: Spent) -> None:
    async with Headgate(node.base) as gate:
        async with gate.lease({"service": "lent", "customer": customer}) as lease:
            calls = gate.counts()["calls"]
            for _ in range(100):
                grant = lease.try_acquire(1)
                assert grant
                grant.settle(2)
            assert gate.counts()["calls"] <= calls + 1, "a renewal at most"
            assert gate.counts()["leases"] == 1
        assert gate.counts()["leases"] == 0
    assert spent("lent", customer) > 0


async def test_what_may_not_be_lent_is_told_by_a_falsy_answer(node: LiveApi, customer: str) -> None:
    async with Headgate(node.base) as gate, gate.lease({"service": "ledger", "customer": customer}) as lease:
        assert not lease.try_acquire(1)


async def test_a_lease_without_a_service_refuses_and_comes_later(service: ScriptedService) -> None:
    service.others = lambda *_: (503, {"reason": "store_unavailable"})
    numbers: list[tuple[str, int]] = []

    def lend(path: str, body: Operation) -> Any:
        numbers.append((path, body.get("number", 1)))
        row = {"policy": "p", "mechanism": "work", "share": 1.0, "rate": 1000.0, "capacity": 1000.0, "tokens": 1000.0,
               "moved": 0.0, "weight": 1.0}  # fmt: skip
        return 200, {"lease": "t", "number": body.get("number", 1), "expires_in_ms": 3000, "renew_in_ms": 20,
                     "slices": [row]}  # fmt: skip

    async with Headgate(service.url) as gate, gate.lease({"service": "a"}) as lease:
        assert not lease.try_acquire(1)
        service.others = lend
        await until(lambda: lease.try_acquire(1))
        assert numbers[0] == ("/v1/leases", 1), "a first request is made anew"
        await until(lambda: len(numbers) > 3)
        assert [path for path, _ in numbers[1:3]] == ["/v1/leases/renew"] * 2


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Look often and forget soon."""
    monkeypatch.setattr(leasing, "LOOK_S", 0.1)
    monkeypatch.setattr(leasing, "SELDOM_S", 0.3)


@pytest.mark.usefixtures("quick")
async def test_what_is_asked_for_often_is_leased_and_given_back(node: LiveApi, customer: str) -> None:
    descriptor = {"service": "lent", "customer": customer}
    async with Headgate(node.base, local="auto") as gate:
        await ask_until_local(gate, descriptor)
        assert gate.counts()["decided_locally"] > 0
        assert gate.counts()["leases"] == 1
        await until(lambda: gate.counts()["leases"] == 0, within_s=20)
        grant = await gate.acquire(descriptor)
        assert not grant.local
        with node.client() as client:
            assert client.get("/v1/leases", params={"policy": "lent", "contains": customer}).status_code == 200


@pytest.mark.usefixtures("quick")
async def test_a_lease_is_kept_for_as_long_as_its_grants_are_open(
    node: LiveApi, customer: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a long stream settles after a quiet time is debited."""
    descriptor = {"service": "lent", "customer": customer}
    looks: list[leasing.HeldLease] = []

    def look(held: leasing.HeldLease) -> bool:
        looks.append(held)
        return False

    monkeypatch.setattr(leasing.HeldLease, "is_useless", property(look))
    async with Headgate(node.base, local="auto") as gate:
        await ask_until_local(gate, descriptor)
        stream = await gate.acquire(descriptor, work=1)
        assert stream.local
        seen = len(looks)
        await until(lambda: len(looks) > seen + 10, within_s=20)
        assert gate.counts()["leases"] == 1, "three times as long as a lease that is not asked for"
        stream.settle(610)
        await until(lambda: gate.counts()["leases"] == 0, within_s=20)
    with node.client() as client:
        found = client.get("/v1/buckets", params={"policy": "lent", "contains": customer}).json()["buckets"]
        assert next(one for one in found if one["bucket"] == f"lent:{customer}")["work_settled"] >= 610


@pytest.mark.usefixtures("quick")
async def test_what_a_lease_cannot_decide_is_asked_of_the_service(node: LiveApi, customer: str, spent: Spent) -> None:
    descriptor = {"service": "lent", "customer": customer}
    async with Headgate(node.base, local="auto", adaptive=False) as gate:
        await ask_until_local(gate, descriptor)
        before = spent("lent", customer)
        grant = await gate.acquire(descriptor, work=999, on_refused="degrade")
        assert not grant.local, "too large for the slice: the service decides"
        assert grant or spent("lent", customer) >= before


@pytest.mark.usefixtures("quick")
async def test_what_a_slice_does_not_have_is_refused_here(node: LiveApi, customer: str) -> None:
    descriptor = {"service": "lent", "customer": customer}
    async with Headgate(node.base, local="auto", adaptive=False) as gate:
        await ask_until_local(gate, descriptor)

        async def refused() -> Throttled | None:
            for _ in range(500):
                grant = await gate.acquire(descriptor, work=5, on_refused="degrade")
                grant.settle(5)
                if isinstance(grant.refusal, Throttled) and grant.refusal.local:
                    return grant.refusal
            return None

        refusal = await eventually_async(refused, within_s=30)
        assert refusal is not None
        assert (refusal.policy, refusal.reason, refusal.retry) == ("lent", "work", "after")
        assert refusal.retry_after_ms is None or refusal.retry_after_ms > 0


@pytest.mark.usefixtures("quick")
async def test_what_may_not_be_lent_is_not_tried_again_for_a_while(
    node: LiveApi, customer: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    descriptor = {"service": "ledger", "customer": customer}
    async with Headgate(node.base, local="auto") as gate:
        begun: list[Any] = []
        parts, begin = gate.parts().leasing, gate.parts().leasing._new

        def note(*given: Any) -> Any:
            begun.append(given)
            return begin(*given)

        monkeypatch.setattr(parts, "_new", note)
        assert not any(await ask_often(gate, descriptor, 2))
        assert len(begun) == 1


@pytest.mark.usefixtures("quick")
async def test_what_no_policy_covers_is_not_leased_for_long(node: LiveApi, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leasing, "LOOKS_MAX", 0)
    async with Headgate(node.base, local="auto") as gate:
        assert not any(await ask_often(gate, {"service": "nowhere"}, 1))
        await until(lambda: gate.parts().leasing._held == {})


async def test_nothing_is_leased_by_itself_unless_asked(node: LiveApi, customer: str) -> None:
    async with Headgate(node.base) as gate:
        assert not any(await ask_often(gate, {"service": "lent", "customer": customer}, 1.5))
        assert gate.counts()["leases"] == 0
