"""A live Headgate for the middlewares' tests, kept for the session; customers tell tests apart."""

from collections.abc import Callable, Iterator
from itertools import count

import httpx
import pytest

from limiter.client.grants import ByReservation
from tests.support import eventually
from tests.support.live import LiveApi, live
from tests.support.servers import running
from tests.support.settles import Settled

POLICIES = """
policies:
  - {name: pages, match: {service: pages}, per: [customer], rate: 1/d, capacity: 10, charge: 1, max_debt: 1000000}
  - {name: banned, match: {service: banned}, deny: true}
  - name: leaf
    match: {service: leaf}
    per: [customer]
    rate: 1/d
    capacity: 100
    charge: 1
    reserve: {sheddable: 50%, sheddable_plus: 25%, critical: 0, critical_plus: 0}
  - {name: inner, match: {service: inner}, per: [customer], rate: 1000}
"""

_numbers = count(1)


@pytest.fixture(scope="session")
def headgate(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveApi]:
    directory = tmp_path_factory.mktemp("middleware")
    (directory / "policies.yaml").write_text(POLICIES)
    with running("valkey", directory) as server, live(server.url, directory / "policies.yaml") as api:
        yield api


@pytest.fixture
def customer() -> str:
    return f"customer-{next(_numbers)}"


@pytest.fixture
def balance(headgate: LiveApi, customer: str) -> Iterator[Callable[[str], float]]:
    """Return the balance of this customer's bucket under a policy."""
    with headgate.client() as client:

        def read(policy: str = "pages") -> float:
            found = client.get("/v1/buckets", params={"policy": policy, "contains": customer}).json()["buckets"]
            return float(found[0]["balance"]) if found else 10.0

        yield read


@pytest.fixture
def settled(monkeypatch: pytest.MonkeyPatch) -> list[Settled]:
    """The settles of this process, in order; they go to the service as always."""
    seen: list[Settled] = []
    settle = ByReservation.settle

    def noting(self: ByReservation, work: float, outcome: str, latency_ms: float) -> None:
        seen.append(Settled(work, outcome, latency_ms))
        settle(self, work, outcome, latency_ms)

    monkeypatch.setattr(ByReservation, "settle", noting)
    return seen


@pytest.fixture
def last_settled(settled: list[Settled]) -> Callable[[], Settled]:
    """Wait for a settle, and return the last one."""

    def last() -> Settled:
        eventually(lambda: settled)
        return settled[-1]

    return last


@pytest.fixture
def client() -> Iterator[httpx.Client]:
    with httpx.Client(timeout=20.0, trust_env=False) as opened:
        yield opened
