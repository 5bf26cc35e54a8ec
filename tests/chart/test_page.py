"""docs/kubernetes.md: its commands are run, its values rendered, its URLs read.

What needs a cluster or a container engine is replaced: `helm install` and `upgrade` render, the others are noted down.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from limiter.store.link.urls import parse
from tests.support.rendering import HELM, MINIMAL, ROOT, needs_helm, render

PAGE = (ROOT / "docs" / "kubernetes.md").read_text()

STANDINS = {
    "headgate": f"""exec {sys.executable} -c 'from limiter.cli.main import main; main()' "$@" """,
    "helm": f"""case "$1" in
      install|upgrade) shift; exec {HELM} template "${{@/--install/--include-crds}}" ;;
      *) echo "$0 $*" >>"$NOTED" ;;
    esac""",
    "docker": 'echo "$0 $*" >>"$NOTED"',
    "kubectl": 'echo "$0 $*" >>"$NOTED"',
}


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE)


@needs_helm
def test_the_commands_do_what_they_say(tmp_path: Path) -> None:
    programs = tmp_path / "bin"
    programs.mkdir()
    for name, script in STANDINS.items():
        (programs / name).write_text(f"#!/bin/bash\n{script}\n")
        (programs / name).chmod(0o755)
    for name in ("helm", "docs"):
        (tmp_path / name).symlink_to(ROOT / name)
    noted = tmp_path / "noted"
    environment = {
        **os.environ,
        "PATH": f"{programs}:{os.environ['PATH']}",
        "NOTED": str(noted),
        "PYTHONPATH": str(ROOT),
    }
    script = "\n".join(f"{block}echo ---" for block in blocks("sh"))
    done = subprocess.run(
        ["bash", "-euc", script], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    manifests = [it for it in yaml.load_all(done.stdout, Loader=yaml.CSafeLoader) if isinstance(it, dict)]
    trial, production = [it for it in manifests if it["kind"] == "Deployment" and it["metadata"]["name"] == "headgate"]
    assert {trial["metadata"]["namespace"], production["metadata"]["namespace"]} == {"headgate"}
    assert len([it for it in manifests if it["kind"] == "StatefulSet"]) == 1
    for configured in [it for it in manifests if it["kind"] == "ConfigMap"]:
        assert configured["data"]["policies.yaml"] == (ROOT / "docs" / "policies.example.yaml").read_text()
    commands = noted.read_text().replace(f"{programs}/", "").splitlines()
    assert [" ".join(line.split()[:2]) for line in commands] == [
        "docker build", "helm test", "kubectl -n", "kubectl -n"
    ]  # fmt: skip
    # The Secrets hold what the chart looks for.
    (container,) = production["spec"]["template"]["spec"]["containers"]
    for variable in container["env"]:
        if reference := variable.get("valueFrom", {}).get("secretKeyRef"):
            made = f"secret generic {reference['name']} --from-literal={reference['key']}="
            assert [line for line in commands if made in line], made


@needs_helm
@pytest.mark.parametrize("number", range(len(blocks("yaml"))))
def test_the_values_can_be_used(number: int, tmp_path: Path) -> None:
    values = tmp_path / "values.yaml"
    values.write_text(blocks("yaml")[number])
    assert render(MINIMAL, values) != render(MINIMAL), "they change something"


def test_the_image_has_the_version_of_the_chart() -> None:
    version = yaml.safe_load((ROOT / "helm" / "headgate" / "Chart.yaml").read_text())["appVersion"]
    assert re.findall(r"headgate:(\d+\.\d+\.\d+)", PAGE) == [version]


def test_the_urls_are_store_urls() -> None:
    urls = re.findall(r"`(rediss?(?:\+\w+)?://[^`]+)`", PAGE)
    assert [parse(url).kind for url in urls] == ["server", "server", "server", "sentinel", "cluster"]
