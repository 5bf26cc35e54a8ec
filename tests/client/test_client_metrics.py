"""Counts of a client: plain numbers, and metrics where prometheus-client is installed."""

import asyncio
from typing import Any

from prometheus_client import CollectorRegistry, generate_latest

import headgate
from headgate import Headgate, raised
from limiter.client.client_metrics import GAUGES, TOTALS
from limiter.client.request_context import enter
from tests.support.scripted_service import BUSY, Operation, ScriptedService, granted, refused


async def test_everything_is_counted_once(service: ScriptedService) -> None:
    def decide(number: int, operation: Operation) -> Any:
        return {"yes": granted(number, operation), "no": refused(), "busy": BUSY}[operation["descriptor"]["service"]]

    service.decide = decide
    async with Headgate(service.url, unavailable="closed", adaptive=False) as gate:
        for name in ("yes", "yes", "no", "busy"):
            grant = await gate.acquire({"service": name}, on_refused="degrade")
            grant.settle()
        await gate.flush()
        counts = gate.counts()
    assert set(counts) == {*TOTALS, *GAUGES}
    assert (counts["granted"], counts["refused"], counts["undecided"]) == (2, 1, 1)
    assert (counts["requests"], counts["retries"], counts["acquires"]) == (4, 2, 6)
    assert (counts["settles"], counts["settles_waiting"]) == (2, 0)
    assert counts["calls"] == len(service.calls)


async def test_metrics_show_the_counts(service: ScriptedService) -> None:
    registry = CollectorRegistry()
    async with Headgate(service.url) as gate:
        headgate.metrics(gate, registry=registry, client="orders")
        with enter(criticality="sheddable"), raised("critical_plus"):
            await gate.acquire({"service": "a"})
        service.decide = lambda *_: refused("overload")
        for _ in range(60):
            await gate.acquire({"service": "a"}, on_refused="degrade", criticality="critical")
        await asyncio.sleep(0)
        text = generate_latest(registry).decode()
        assert 'headgate_client_granted_total{client="orders"} 1.0' in text
        assert 'headgate_client_settles_waiting{client="orders"} 0.0' in text
        name = 'headgate_client_raises_total{after="critical_plus",before="sheddable",client="orders"}'
        assert name in text
        labels = {"client": "orders", "criticality": "critical"}
        probability = registry.get_sample_value("headgate_client_rejection_probability", labels)
        assert probability is not None
        assert 0 <= probability < 1
        assert "# HELP headgate_client_rejected_total Requests that adaptive throttling rejected" in text


async def test_a_closed_client_still_tells_its_counts(service: ScriptedService) -> None:
    gate = Headgate(service.url)
    assert gate.counts()["granted"] == 0
    async with gate:
        await gate.acquire({"service": "a"})
    assert gate.counts()["granted"] == 1
