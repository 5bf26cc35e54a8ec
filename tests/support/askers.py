"""Callers who ask through the client library, and a look at what their buckets have counted."""

import time
from collections.abc import Callable

import httpx

from headgate import Headgate
from tests.support import eventually_async
from tests.support.nodes import until

Spent = Callable[[str, str], float]
"""Return what the bucket of a policy and a customer lacks of its capacity."""


def spent_of(client: httpx.Client, policy: str, customer: str) -> float:
    answer = client.get("/v1/buckets", params={"policy": policy, "contains": customer})
    assert answer.status_code == 200, answer.text
    found = [one for one in answer.json()["buckets"] if one["bucket"] == f"{policy}:{customer}"]
    return round(found[0]["capacity"] - found[0]["balance"], 1) if found else 0.0


async def ask_often(gate: Headgate, descriptor: dict[str, str], seconds: float, work: float = 0.01) -> list[bool]:
    """Ask a hundred times a second; whether each was decided locally."""
    found: list[bool] = []
    began_s = time.monotonic()
    for number in range(int(seconds * 100)):
        await until(lambda: time.monotonic() >= began_s + number / 100)  # noqa: B023
        grant = await gate.acquire(descriptor, work=work, on_refused="degrade")
        found.append(grant.local)
        if grant:
            grant.settle(work)
    return found


async def ask_until_local(gate: Headgate, descriptor: dict[str, str]) -> None:
    async def is_local() -> bool:
        return any(await ask_often(gate, descriptor, 0.2))

    await eventually_async(is_local, within_s=30)
