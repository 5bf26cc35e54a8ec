"""`headgate up` with two workers and a controller, after traffic: everything that there is to see."""

from collections.abc import Iterator
from itertools import count
from pathlib import Path

import httpx
import pytest

from tests.support import eventually
from tests.support.command import started_headgate
from tests.support.scraping import POLICIES, Scrape, scrape
from tests.support.servers import free_port


@pytest.fixture(scope="session")
def up(tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    directory = tmp_path_factory.mktemp("up")
    (directory / "policies.yaml").write_text(POLICIES)
    port = free_port()
    settings = {"port": port, "workers": 2, "policies": directory / "policies.yaml", "data_dir": directory / "data"}
    with (
        started_headgate("up", **settings) as (_, printed),
        httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=20, trust_env=False) as client,
    ):
        assert printed[0].startswith("headgate ")
        yield client


@pytest.fixture(scope="session")
def busy(up: httpx.Client) -> Scrape:
    """A scrape after some of everything, once the controller has learned a charge and knows response times."""
    numbers = count()

    def ask(service: str, **more: object) -> httpx.Response:
        descriptor = {"service": service, "customer": f"c{next(numbers)}"}
        return up.post("/v1/acquire", json={"descriptor": descriptor, **more})

    def settle(reservation: str, work: float) -> None:
        up.post("/v1/settle", json={"reservation": reservation, "work": work, "latency_ms": 1})

    def has_learned() -> Scrape | None:
        for _ in range(10):
            settle(ask("learning").json()["reservation"], 8)
            settle(ask("capped").json()["reservation"], 8)
            settle(ask("guarded").json()["reservation"], 8)
            settle(ask("timed").json()["reservation"], 8)
        shown = scrape(up)
        known = ("charge_error_ratio", "class_rate_requests_per_second", "percentile_seconds", "late_share_ratio")
        return shown if all(shown.values(f"headgate_policy_{name}") for name in known) else None

    ask("month", work=3)
    ask("nobody")
    ask("each", dry_run=True)
    settle(ask("each", work=10).json()["reservation"], 500)
    shown = eventually(has_learned, within_s=30)
    assert shown is not None
    return shown


@pytest.fixture(scope="session")
def root() -> Path:
    return Path(__file__).resolve().parents[2]
