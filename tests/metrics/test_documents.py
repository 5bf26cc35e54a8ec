"""Documents, dashboard and alerts use the metrics that a running node shows."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from limiter.metrics.catalogue import ALL
from tests.support.scraping import Scrape

# Prometheus adds these to whatever it scrapes.
TARGET_LABELS = {"job", "instance"}
CALLED_OUT = re.compile(r"(headgate_[a-z_]+)(?:\{([^}]*)\})?")
GROUPED = re.compile(r"\b(?:by|on|group_left|group_right|without) \(([^)]*)\)")
MATCHER = re.compile(r'([a-z_]+)\s*(=~|!=|!~|=)\s*"([^"]*)"')


def test_everything_in_the_catalogue_is_shown_and_nothing_else(busy: Scrape) -> None:
    shown = {family.name: (family.type, family.documentation) for family in busy.families}
    assert shown == {definition.family: (definition.kind, definition.help) for definition in ALL}


def test_every_sample_has_the_labels_that_the_catalogue_lists(busy: Scrape) -> None:
    for definition in ALL:
        (family,) = [family for family in busy.families if family.name == definition.family]
        assert family.samples, definition.name
        for sample in family.samples:
            assert set(sample.labels) - {"le"} == set(definition.labels), sample


def test_no_text_of_a_client_becomes_a_label(busy: Scrape) -> None:
    values = {value for _, labels, _ in busy.samples() for value in labels.values()}
    assert not [value for value in values if re.fullmatch(r"c\d+", value)]


def test_names_follow_the_conventions() -> None:
    names = [definition.name for definition in ALL]
    assert len(set(names)) == len(names)
    for definition in ALL:
        assert definition.name.startswith("headgate_")
        assert definition.name.endswith("_total") == (definition.kind == "counter")
        assert not re.search(r"_(ms|us|millis\w*|percent)(_|$)", definition.name), "base units"


def test_the_page_lists_every_metric(root: Path) -> None:
    rows = re.findall(
        r"^\| `(\w+)` \| (\w+) \| (.*?) \| (.*?) \|$", (root / "docs/metrics.md").read_text(), re.MULTILINE
    )
    assert rows == [
        (definition.name, definition.kind, ", ".join(f"`{label}`" for label in definition.labels), definition.help)
        for definition in ALL
    ]


def expressions(document: Any) -> Iterator[str]:
    """Every query in a document, wherever it stands."""
    if isinstance(document, dict):
        for name, inner in document.items():
            if name in ("expr", "definition") and isinstance(inner, str):
                yield inner
            else:
                yield from expressions(inner)
    elif isinstance(document, list):
        for inner in document:
            yield from expressions(inner)


def check(expression: str, shown: Scrape) -> set[str]:
    """The metrics that an expression uses: they exist, with those labels, and those values where the set is closed."""
    names, values = shown.label_names(), shown.label_values()
    used: set[str] = set()
    labels: set[str] = set(TARGET_LABELS)
    for name, matchers in CALLED_OUT.findall(expression):
        assert name in names, f"{expression}: there is no {name}"
        used.add(name)
        labels |= names[name]
        for label, how, value in MATCHER.findall(matchers):
            assert label in names[name] | TARGET_LABELS, f"{expression}: {name} has no {label}"
            if "$" not in value and label in names[name]:
                wanted = set(value.split("|")) if how in ("=~", "!~") else {value}
                assert wanted <= values[name, label], f"{expression}: {label} is never {value}"
    for group in GROUPED.findall(expression):
        assert {label.strip() for label in group.split(",") if label.strip()} <= labels, expression
    return used


def families(names: set[str]) -> set[str]:
    suffixes = re.compile(r"_(bucket|sum|count)$")
    known = {definition.name for definition in ALL}
    return {name if name in known else suffixes.sub("", name) for name in names}


def test_the_alerts_use_metrics_that_exist(root: Path, busy: Scrape) -> None:
    document = yaml.safe_load((root / "docs/alerts.yaml").read_text())
    for expression in expressions(document):
        assert check(expression, busy)


def test_every_alert_has_a_meaning_and_a_remedy(root: Path) -> None:
    (group,) = yaml.safe_load((root / "docs/alerts.yaml").read_text())["groups"]
    names = [rule["alert"] for rule in group["rules"]]
    assert len(set(names)) == len(names)
    for rule in group["rules"]:
        assert re.fullmatch(r"Headgate[A-Za-z]+", rule["alert"])
        assert rule["labels"]["severity"] in ("critical", "warning", "info")
        assert rule["for"]
        assert set(rule["annotations"]) == {"summary", "description", "runbook"}
        for label in re.findall(r"\$labels\.(\w+)", json.dumps(rule["annotations"])):
            assert any(label in group for group in GROUPED.findall(rule["expr"])), f"{rule['alert']}: {label}"
        for setting in re.findall(r"headgate_\w+", rule["annotations"]["runbook"]):
            assert setting in {definition.name for definition in ALL}


def test_the_dashboard_uses_metrics_that_exist_and_shows_all_of_them(root: Path, busy: Scrape) -> None:
    document = json.loads((root / "docs/grafana-dashboard.json").read_text())
    used: set[str] = set()
    for expression in expressions(document):
        used |= check(expression, busy)
    assert families(used) == {definition.name for definition in ALL}
    titles = [panel["title"] for panel in document["panels"]]
    assert len(set(titles)) == len(titles)
    assert all(panel["description"] for panel in document["panels"] if panel["type"] != "row")


def test_the_dashboard_s_panels_do_not_overlap(root: Path) -> None:
    taken: set[tuple[int, int]] = set()
    for panel in json.loads((root / "docs/grafana-dashboard.json").read_text())["panels"]:
        at = panel["gridPos"]
        cells = {(x, y) for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])}
        assert not cells & taken, panel["title"]
        assert at["x"] + at["w"] <= 24
        taken |= cells


@pytest.mark.parametrize(
    ("expression", "fault"),
    [
        ("rate(headgate_nothing_total[5m])", "there is no headgate_nothing_total"),
        ('headgate_decisions_total{customer="x"}', "has no customer"),
        ('headgate_decisions_total{decision="maybe"}', "decision is never maybe"),
        ("sum by (customer) (headgate_decisions_total)", "customer"),
    ],
)
def test_a_wrong_expression_is_found(busy: Scrape, expression: str, fault: str) -> None:
    with pytest.raises(AssertionError, match=fault):
        check(expression, busy)
