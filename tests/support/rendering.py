"""The chart, rendered by the helm that comes with the test requirements; nothing is fetched and no cluster asked."""

import functools
import os
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.support.programs import find as find_program

ROOT = Path(__file__).resolve().parents[2]
CHART = ROOT / "helm" / "headgate"
HELM = find_program("helm") or Path("helm")
GOOD = sorted((CHART / "ci").glob("*-values.yaml"))
MINIMAL = CHART / "ci" / "minimal-values.yaml"
RELEASE = "hg"
NAMESPACE = "gates"

needs_helm = pytest.mark.needs("helm")

Manifest = dict[str, Any]


def stem(path: Path) -> str:
    return path.stem.removesuffix("-values")


def values_of(name: str) -> Manifest:
    found: Manifest = yaml.safe_load((CHART / "ci" / f"{name}-values.yaml").read_text())
    return found


def run_helm(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    """Run helm without this machine's helm and cluster settings."""
    hidden = ("HELM_", "KUBE", "HEADGATE_")
    environment = {name: value for name, value in os.environ.items() if not name.startswith(hidden)}
    environment |= {"KUBECONFIG": os.devnull, "HELM_REGISTRY_CONFIG": os.devnull, "HELM_REPOSITORY_CONFIG": os.devnull}
    return subprocess.run(
        [HELM, *arguments], capture_output=True, text=True, timeout=60, check=False, cwd=ROOT, env=environment
    )


@functools.cache
def render(*values: Path | str, sets: Sequence[str] = (), chart: Path = CHART) -> list[Manifest]:
    """The manifests under values files (`trial` is ci/trial-values.yaml) and `--set` options; not to be changed."""
    files = [CHART / "ci" / f"{value}-values.yaml" if isinstance(value, str) else value for value in values]
    options = [option for file in files for option in ("--values", str(file))]
    options += [option for text in sets for option in ("--set", text)]
    done = run_helm("template", RELEASE, chart, "--namespace", NAMESPACE, *options)
    assert done.returncode == 0, done.stderr
    return [manifest for manifest in yaml.load_all(done.stdout, Loader=yaml.CSafeLoader) if manifest is not None]


def find(manifests: Sequence[Manifest], kind: str, component: str = "api") -> Manifest:
    (found,) = find_all(manifests, kind, component)
    return found


def find_all(manifests: Sequence[Manifest], kind: str, component: str = "api") -> list[Manifest]:
    label = "app.kubernetes.io/component"
    return [it for it in manifests if it["kind"] == kind and it["metadata"]["labels"][label] == component]


def pods(manifests: Sequence[Manifest]) -> Iterator[tuple[str, Manifest]]:
    """Every pod, by the kind and name of what makes it: metadata and spec."""
    for manifest in manifests:
        name = f"{manifest['kind']}/{manifest['metadata']['name']}"
        if manifest["kind"] == "Pod":
            yield name, manifest
        elif "template" in manifest.get("spec", {}):
            yield name, manifest["spec"]["template"]


def containers(pod: Manifest) -> list[Manifest]:
    return [*pod["spec"].get("initContainers", []), *pod["spec"]["containers"]]


def environment_of(container: Mapping[str, Any], manifests: Sequence[Manifest]) -> dict[str, str]:
    """The container's variables, with those from Secrets of the chart's filled in; others are left out."""
    secrets = {it["metadata"]["name"]: it["stringData"] for it in manifests if it["kind"] == "Secret"}
    found: dict[str, str] = {}
    for variable in container.get("env", []):
        if "value" in variable:
            found[variable["name"]] = variable["value"]
        elif (reference := variable["valueFrom"].get("secretKeyRef", {})).get("name") in secrets:
            found[variable["name"]] = secrets[reference["name"]][reference["key"]]
    return found
