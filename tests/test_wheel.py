"""The wheel, installed into an empty environment with exactly the pinned packages, runs from anywhere."""

import os
import re
import subprocess
import zipfile
from pathlib import Path

import httpx
import pytest

from tests.support.servers import free_port
from tests.support.wheels import ROOT, build_wheel, run, with_pinned_packages

LOAD_SCRIPTS = """
from limiter.store.scripts import load_source, scripts_directory
print(*sorted(path.stem for path in scripts_directory().glob("*.lua") if load_source(path.stem)))
"""

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_wheel(tmp_path_factory.mktemp("wheel"))


def test_the_wheel_holds_every_script_and_nothing_of_the_tests(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    scripts = {f"limiter/{path.relative_to(ROOT)}" for path in (ROOT / "lua").rglob("*.lua")}
    assert {"limiter/lua/acquire.lua", "limiter/lua/settle.lua"} <= scripts
    assert any(name.startswith("limiter/lua/lib/") for name in scripts)
    assert scripts <= set(names)
    assert {"headgate/__init__.py", "headgate/py.typed", "limiter/py.typed"} <= set(names)
    assert not [name for name in names if name.startswith(("tests/", "docs/", "loadtest/"))]


def test_the_wheel_runs_in_an_empty_environment(wheel: Path, tmp_path: Path) -> None:
    """One test, since making the environment takes longer than everything else in it."""
    installed = with_pinned_packages(wheel, tmp_path / "environment")
    assert run([installed / "headgate", "--version"], cwd=tmp_path) == "headgate 0.2.0\n"
    assert run([installed / "python", "-I", "-c", LOAD_SCRIPTS], cwd=tmp_path).split() == sorted(
        path.stem for path in (ROOT / "lua").glob("*.lua")
    )
    assert "--controller" in run([installed / "headgate", "bench", "--help"], cwd=tmp_path)
    serves_from_its_own_store_and_stops_in_order(installed / "headgate", tmp_path)


def serves_from_its_own_store_and_stops_in_order(headgate: Path, directory: Path) -> None:
    environment = {"PATH": os.environ["PATH"], "HEADGATE_DATA_DIR": str(directory / "data")}
    port = free_port()
    command = [str(headgate), "up", "--port", str(port)]
    with subprocess.Popen(command, cwd=directory, env=environment, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            assert process.stdout.readline() == "headgate 0.2.0: ready\n"
            with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=20, trust_env=False) as client:
                answers(client)
            process.terminate()
            assert process.wait(timeout=20) == 0
        finally:
            process.kill()


def answers(client: httpx.Client) -> None:
    """An acquire, its settle, and the documentation with every file that its page asks for."""
    granted = client.post("/v1/acquire", json={"descriptor": {"customer": "c1"}, "work": 3})
    assert granted.json()["granted"] is True
    settled = client.post("/v1/settle", json={"reservation": granted.json()["reservation"], "work": 5})
    assert settled.status_code == 200
    files = re.findall(r'(?:src|href)="(docs/[^"]+)"', client.get("/docs").text)
    assert len(files) > 2
    for file in files:
        assert client.get(f"/{file}").status_code == 200, file
    assert "/v1/acquire" in client.get("/openapi.json").json()["paths"]
