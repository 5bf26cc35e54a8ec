"""Charts: what a reader needs is there, and values lie where they belong."""

import math
import xml.etree.ElementTree as ET

import pytest

from loadtest.plot import Band, Chart, Line, Panel, _ticks, render

SVG = "{http://www.w3.org/2000/svg}"


def drawn(*lines: Line, y_max: float = math.inf, bands: tuple[Band, ...] = ()) -> ET.Element:
    panel = Panel(title="Work", unit="units/s", lines=lines, y_max=y_max)
    return ET.fromstring(render(Chart(title="A & B <", subtitle="s", x_unit="time (s)", panels=(panel,), bands=bands)))


def test_a_chart_names_its_axes_units_and_lines() -> None:
    band = Band(from_x=1.0, to_x=2.0, label="asleep")
    root = drawn(Line(label="auto", points=[(0.0, 1.0), (10.0, 5.0)]), bands=(band,))
    words = [found.text for found in root.iter(f"{SVG}text")]
    assert {"A & B <", "Work (units/s)", "time (s)", "auto", "asleep", "0", "10"} <= set(words)


@pytest.mark.parametrize(
    ("highest", "ticks"), [(100.0, [0, 20, 40, 60, 80, 100]), (1.0, [0, 0.2, 0.4, 0.6, 0.8, 1.0]), (7.0, [0, 2, 4, 6])]
)
def test_ticks_are_round(highest: float, ticks: list[float]) -> None:
    assert _ticks(highest) == pytest.approx(ticks)


def test_a_value_that_is_no_number_leaves_a_gap() -> None:
    root = drawn(Line(label="cap", points=[(0.0, 1.0), (1.0, 1.0), (2.0, math.nan), (3.0, 1.0), (4.0, 1.0)]))
    (path,) = [found.get("d", "") for found in root.iter(f"{SVG}path") if found.get("clip-path")]
    assert path.count("M") == 2


def test_a_stepped_line_holds_its_value_until_the_next() -> None:
    root = drawn(Line(label="cap", points=[(0.0, 0.0), (10.0, 1.0)], is_stepped=True))
    (path,) = [found.get("d", "") for found in root.iter(f"{SVG}path") if found.get("clip-path")]
    assert path.count("L") == 2


def test_an_axis_may_reach_further_than_its_values() -> None:
    panel = Panel(title="Refused", unit="%", lines=[Line(label="all", points=[(0.0, 3.0), (1.0, 4.0)])], y_least=100)
    words = [
        found.text
        for found in ET.fromstring(render(Chart(title="t", subtitle="s", x_unit="time (s)", panels=(panel,)))).iter(
            f"{SVG}text"
        )
    ]
    assert "100" in words


def test_nothing_to_show_is_shown() -> None:
    assert drawn(Line(label="cap", points=[(0.0, math.nan), (1.0, math.nan)])) is not None
