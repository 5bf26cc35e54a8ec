"""One store for the API's tests, and a server for each lane, kept for the session; customers tell tests apart."""

from collections.abc import Iterator
from contextlib import ExitStack
from itertools import count
from pathlib import Path

import httpx
import pytest

from tests.support.live import LANES, POLICIES, Lane, LiveApi, live
from tests.support.servers import Server, running

_numbers = count(1)


@pytest.fixture(scope="session")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with running("valkey", tmp_path_factory.mktemp("api-store")) as server:
        yield server


@pytest.fixture(scope="session")
def policies(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("policies") / "policies.yaml"
    file.write_text(POLICIES)
    return file


@pytest.fixture(scope="session")
def both(store: Server, policies: Path) -> Iterator[dict[Lane, LiveApi]]:
    """A server of each kind on the same store."""
    with ExitStack() as stack:
        yield {lane: stack.enter_context(live(store.url, policies, lane=lane, body_timeout_s=1.0)) for lane in LANES}


@pytest.fixture(params=LANES)
def lane(request: pytest.FixtureRequest) -> Lane:
    chosen: Lane = request.param
    return chosen


@pytest.fixture
def api(both: dict[Lane, LiveApi], lane: Lane) -> LiveApi:
    """Each lane in turn."""
    return both[lane]


@pytest.fixture
def client(api: LiveApi) -> Iterator[httpx.Client]:
    with api.client() as client:
        yield client


@pytest.fixture
def customer() -> str:
    """A customer that nobody else has."""
    return f"customer-{next(_numbers)}"
