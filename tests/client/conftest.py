"""A node for the client's tests, kept for the session; customers tell tests apart."""

from collections.abc import AsyncIterator, Iterator
from itertools import count
from pathlib import Path

import pytest

from tests.support.askers import Spent, spent_of
from tests.support.live import LiveApi, live
from tests.support.scripted_service import ScriptedService
from tests.support.servers import Server, running

_numbers = count(1)

POLICIES = """
policies:
  - {name: ledger, match: {service: ledger}, per: [customer], rate: 1/d, capacity: 1000000, max_debt: 1000000}
  - {name: streams, match: {service: streams}, per: [customer], rate: 1/d, capacity: 10, max_debt: 1000, stop_debt: 50}
  - {name: paced, match: {service: paced}, per: [customer], rate: 50, capacity: 1}
  - {name: bounded, match: {service: bounded}, per: [customer], rate: 1/d, capacity: 1000, max_request: 40}
  - {name: places, match: {service: places}, per: [customer], rate: 1000, in_flight: 2}
  - {name: daily, match: {service: daily}, per: [customer], quota: {work: 10, period: day}}
  - {name: closed, match: {service: closed}, deny: true}
  - {name: blocking, match: {service: blocking}, per: [customer], rate: 1/d, capacity: 1,
     block: {after: 2, in: 1m, for: 10m}}
  - {name: lent, match: {service: lent}, per: [customer], rate: 1000, capacity: 1000, local: {allowed: true}}
  - {name: pack, match: {service: lent, pack: "*"}, per: [customer], quota: {work: 100000, period: month},
     local: {allowed: true}}
  - {name: timed, match: {service: timed}, per: [customer], rate: 1000,
     overload: {expectations: {expected_latency_ms: 60000}, outcomes: [error, timeout, cancelled]}}
"""


@pytest.fixture(scope="session")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with running("valkey", tmp_path_factory.mktemp("client-store")) as server:
        yield server


@pytest.fixture(scope="session")
def policies(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("client-policies") / "policies.yaml"
    file.write_text(POLICIES)
    return file


@pytest.fixture(scope="session")
def node(store: Server, policies: Path) -> Iterator[LiveApi]:
    """A node that decides."""
    with live(store.url, policies) as api:
        yield api


@pytest.fixture
def customer() -> str:
    """A customer that nobody else has."""
    return f"customer-{next(_numbers)}"


@pytest.fixture
def spent(node: LiveApi) -> Iterator[Spent]:
    """Return what a bucket lacks of its capacity: the sum of the work that was counted, to a tenth."""
    with node.client() as client:
        yield lambda policy, customer: spent_of(client, policy, customer)


@pytest.fixture
async def service() -> AsyncIterator[ScriptedService]:
    """A service that answers as the test says."""
    async with ScriptedService() as service:
        yield service
