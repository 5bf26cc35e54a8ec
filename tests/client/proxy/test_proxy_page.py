"""docs/proxy.md: its commands are run, its options are those of the command, its manifests are valid."""

import re
import shlex
import subprocess
from dataclasses import replace
from pathlib import Path

import kubernetes_validate.utils
import pytest
import yaml
from typer.main import get_command

from limiter.cli.main import app
from tests.support.documents import ROOT, blocks, rows, script
from tests.support.live import live
from tests.support.programs import need
from tests.support.proxies import proxied
from tests.support.rendering import MINIMAL, needs_helm, render
from tests.support.servers import Server

PAGE = (ROOT / "docs" / "proxy.md").read_text()
COMMAND = get_command(app).commands["proxy"]  # type: ignore[attr-defined]
OPTIONS = {option.opts[0]: option for option in COMMAND.params if option.opts[0] != "--help"}


def test_the_commands_do_what_they_say(valkey: Server) -> None:
    need("curl")
    started, asked = blocks("docs/proxy.md", "sh")
    words = shlex.split(started.text)
    assert words[:2] == ["headgate", "proxy"]
    COMMAND.make_context("proxy", words[2:])
    with live(valkey.url, ROOT / "docs" / "policies.example.yaml") as api, proxied(api.base) as proxy:
        here = replace(asked, text=asked.text.replace("http://127.0.0.1:8090", proxy.base))
        done = subprocess.run(["bash", "-c", script([here])], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, f"{done.stderr}\n{done.stdout}"


def test_every_option_is_documented_with_its_default() -> None:
    told = {row[0].strip("`"): row[1].strip("`") for row in rows(PAGE) if row[0].startswith("`--")}
    defaults = {
        name: "required" if it.required else "none" if it.default is None else str(it.default)
        for name, it in OPTIONS.items()
    }
    assert told == defaults
    named = set(re.findall(r"HEADGATE_PROXY_[A-Z_]*[A-Z]", PAGE))
    assert named == {option.envvar for option in OPTIONS.values() if option.envvar}


@needs_helm
def test_the_chart_s_values_run_a_proxy(tmp_path: Path) -> None:
    values = tmp_path / "values.yaml"
    values.write_text(blocks("docs/proxy.md", "yaml")[0].text)
    kinds = [it["kind"] for it in render(MINIMAL, values) if it["metadata"]["name"].endswith("-proxy")]
    assert sorted(kinds) == ["Deployment", "PodDisruptionBudget", "Service"]


def test_the_sidecar_is_valid_and_starts_the_command_as_it_is() -> None:
    manifest = yaml.safe_load(blocks("docs/proxy.md", "yaml")[1].text)
    kubernetes_validate.utils.validate(manifest, "1.34", strict=True)
    (sidecar,) = manifest["spec"]["template"]["spec"]["initContainers"]
    command, *options = sidecar["args"]
    assert command == "proxy"
    COMMAND.make_context("proxy", options)
    assert {it["name"] for it in sidecar["env"]} <= {option.envvar for option in OPTIONS.values()}


@pytest.mark.parametrize("path", ["/v1/acquire", "/v1/settle", "/v1/batch", "/v1/leases", "/v1/signals"])
def test_the_paths_are_those_that_are_served(path: str, valkey: Server) -> None:
    assert f"`{path}`" in PAGE or f"POST {path}`" in PAGE
    with live(valkey.url, None) as api, proxied(api.base) as proxy, proxy.client() as client:
        assert client.post(path, json={}).status_code == 422
