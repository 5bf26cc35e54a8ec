"""Headgate with the recipes' own policies, and programs that ask it."""

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest
import yaml

from tests.support import eventually
from tests.support.documents import ROOT
from tests.support.live import live
from tests.support.recipe_service import RECIPES, STANDING, Service, Serving
from tests.support.servers import free_port, running


@pytest.fixture(scope="package")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    folder = tmp_path_factory.mktemp("recipes")
    document = yaml.safe_load((RECIPES / "policies.yaml").read_text())
    for policy in document["policies"]:
        if policy["name"] in STANDING:
            policy |= {"rate": "1/d", "capacity": STANDING[policy["name"]], "max_debt": 100_000}
    (folder / "policies.yaml").write_text(yaml.safe_dump(document))
    with running("valkey", folder / "store") as store, live(store.url, folder / "policies.yaml") as api:
        yield Service(api.base)


@pytest.fixture
def serving(service: Service, tmp_path: Path) -> Serving:
    """Start a program that serves on the port that is given for PORT in its command; its address."""

    @contextmanager
    def serve(command: list[str]) -> Iterator[str]:
        port = free_port()
        address = f"http://127.0.0.1:{port}"
        said = tmp_path / "said"
        with said.open("w") as out:
            process = subprocess.Popen(
                [word.replace("PORT", str(port)) for word in command],
                cwd=ROOT,
                env=service.environment(),
                stdout=out,
                stderr=subprocess.STDOUT,
            )
        try:
            eventually(lambda: _answers(address, process), within_s=60, what=said.read_text())
            yield address
        finally:
            process.terminate()
            process.wait(30)

    return serve


def _answers(address: str, process: subprocess.Popen[bytes]) -> bool:
    assert process.poll() is None, "it has ended"
    try:
        httpx.get(f"{address}/nothing", trust_env=False)
    except httpx.TransportError:
        return False
    return True
