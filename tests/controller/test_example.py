"""The example with read, write and combined controllers does what it says (W12, R9)."""

from pathlib import Path

from limiter.engine.policy_file import load_policy_file
from tests.support.nodes import until
from tests.support.servers import Server
from tests.support.steered import Look
from tests.support.traffic import steering, traffic

EXAMPLE = Path(__file__).resolve().parents[2] / "docs" / "policies.controller.example.yaml"


def asking(operation: str, customer: str) -> dict[str, str]:
    return {"service": "table", "operation": operation, "customer": customer}


async def test_w12_reads_and_writes_are_steered_apart_and_together(valkey: Server) -> None:
    """100 units/s ÷ 5 → 20 reads/s; 30 ÷ 10 → 3 writes/s; scans have the combined one alone: a scan of 10 units weighs
    five, so that is 50 units and five tokens (W16), and 250 units/s ÷ 10 → 25 tokens/s.
    """
    limits = load_policy_file(EXAMPLE)
    look = Look(valkey)
    fits = {"table-reads:c1": 20.0, "table-writes:c1": 3.0, "table-all:c2": 25.0}
    async with (
        steering(valkey.url, limits),
        traffic(valkey.url, limits) as callers,
        callers.flowing(asking("read", "c1"), rate=40, work=lambda: 5.0),
        callers.flowing(asking("write", "c1"), rate=10, work=lambda: 10.0),
        callers.flowing(asking("scan", "c2"), rate=20, work=lambda: 10.0),
    ):
        await until(lambda: all(abs(look.cap(bucket) - cap) < 0.2 * cap for bucket, cap in fits.items()), within_s=60)
        await until(lambda: all(look.memory(bucket) for bucket in fits))
    costs = {"table-reads:c1": 5.0, "table-writes:c1": 10.0, "table-all:c2": 10.0}
    for bucket, cost in costs.items():
        memory = look.memory(bucket)
        assert memory is not None
        assert abs(memory.reasons[-1].work_per_request - cost) < 0.1 * cost, bucket
