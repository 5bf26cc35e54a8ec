"""The trial's pods, run here: the same settings, arguments, variables and probes, with addresses of this machine."""

import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from urllib.request import urlopen

import pytest
from typer.testing import CliRunner

from limiter.cli.main import app
from tests.support import eventually
from tests.support.command import HEADGATE, environment
from tests.support.dockerfile import healthcheck
from tests.support.rendering import CHART, Manifest, environment_of, find, needs_helm, render
from tests.support.servers import HOST, Server, free_port

pytestmark = needs_helm

SMOKE = [sys.executable, "-I", str(CHART / "files" / "smoke.py")]


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Server]:
    """A Valkey with the settings that the chart writes, but for where it is."""
    text = find(render("trial"), "Secret", "valkey")["stringData"]["valkey.conf"]
    settings = dict(line.split(" ", 1) for line in text.splitlines())
    here = {name: value for name, value in settings.items() if name not in ("bind", "port", "dir")}
    server = Server("valkey", tmp_path / "valkey", here)
    server.start()
    yield server
    server.stop()


@contextmanager
def api(store: Server, policies: Path) -> Iterator[tuple[str, dict[str, str]]]:
    """The API container; where it is, and its variables."""
    manifests = render("trial")
    (container,) = find(manifests, "Deployment")["spec"]["template"]["spec"]["containers"]
    given = environment_of(container, manifests)
    service = find(manifests, "Service", "valkey")["metadata"]["name"]
    given["HEADGATE_REDIS_URL"] = given["HEADGATE_REDIS_URL"].replace(f"{service}:6379", f"{HOST}:{store.port}")
    given |= {"HEADGATE_HOST": HOST, "HEADGATE_PORT": str(free_port()), "HEADGATE_POLICIES": str(policies)}
    process = subprocess.Popen([*HEADGATE, *container["args"]], env=environment() | given)
    base = f"http://{HOST}:{given['HEADGATE_PORT']}"
    try:
        eventually(lambda: all(answers(base, container[it]) for it in ("startupProbe", "readinessProbe")))
        assert answers(base, container["livenessProbe"])
        yield base, given
    finally:
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0


def answers(base: str, probe: Manifest) -> bool:
    try:
        with urlopen(base + probe["httpGet"]["path"]) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False


def run(command: Sequence[str], variables: Mapping[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    everything = environment() | dict(variables or {})
    return subprocess.run(command, capture_output=True, text=True, timeout=30, check=False, env=everything)


def test_the_trial_runs(store: Server, tmp_path: Path) -> None:
    """One test, since starting it takes longer than everything else."""
    assert store.command("CONFIG", "GET", "maxmemory-policy")[1] == b"noeviction"
    assert store.command("CONFIG", "GET", "appendonly")[1] == b"yes"

    policies = tmp_path / "policies.yaml"
    policies.write_text(find(render("trial"), "ConfigMap")["data"]["policies.yaml"])
    (check,) = find(render("trial"), "Deployment")["spec"]["template"]["spec"]["initContainers"]
    checked = CliRunner().invoke(app, [*check["args"][:-1], str(policies)])
    assert checked.exit_code == 0, checked.output

    with api(store, policies) as (base, given):
        smoke = run([*SMOKE, base])
        assert smoke.returncode == 0, smoke.stdout + smoke.stderr
        assert smoke.stdout.count("ok ") == 3
        health = run([sys.executable, *healthcheck()[1:]], {"HEADGATE_PORT": given["HEADGATE_PORT"]})
        assert health.returncode == 0, health.stderr


def test_the_test_of_the_chart_fails_where_nobody_answers() -> None:
    smoke = run([*SMOKE, f"http://{HOST}:{free_port()}"])
    assert smoke.returncode == 1
    assert smoke.stdout.count("FAIL") == 3
    assert run([sys.executable, *healthcheck()[1:]], {"HEADGATE_PORT": str(free_port())}).returncode != 0


def test_the_script_of_the_test_pod_is_the_file_that_was_tried_here() -> None:
    (container,) = find(render("minimal"), "Pod", "test")["spec"]["containers"]
    assert container["command"][:2] == ["python", "-c"]
    assert container["command"][2] == (CHART / "files" / "smoke.py").read_text()
    assert "$(" not in container["command"][2], "Kubernetes would put a variable there"
    assert container["command"][3] == "http://hg-headgate.gates.svc:8080"
