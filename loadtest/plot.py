"""Line charts as SVG, without any library: panels above one another over one axis of time.

Everything is drawn in units of the picture (px); text uses the reader's own sans-serif font, and the colours can be
distinguished by most colour-blind readers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import floor, inf, isfinite, log10
from xml.sax.saxutils import escape

WIDTH, PANEL_HEIGHT = 900, 210
LEFT, RIGHT, TOP, GAP, BOTTOM = 78, 190, 76, 46, 48
INK, FAINT = "#222222", "#dddddd"
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7")
PAPER, SAND, EDGE = "white", "#f4ecd8", "#cdbb8d"
DARK = {
    "fill": {PAPER: "#0d1117", SAND: "#2b2618", INK: "#e6edf3"},
    "stroke": {INK: "#e6edf3", FAINT: "#30363d", SAND: "#2b2618", EDGE: "#6b5d33"}
    | dict(zip(COLOURS, ("#58b4f0", "#ff8f45", "#2fd6a3", "#e9a3cb"), strict=True)),
}
"""Colours for readers whose screen is dark, by those for a light one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """One line; a NaN is a gap."""

    label: str
    points: Sequence[tuple[float, float]]
    colour: str = COLOURS[0]
    width: float = 1.8
    """A wide line beneath a narrow one shows where they coincide."""
    is_dashed: bool = False
    is_stepped: bool = False
    """True if a value holds until the next."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Band:
    """A marked stretch of time."""

    from_x: float
    to_x: float
    label: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Panel:
    """Lines over one axis of values, from zero to y_max."""

    title: str
    unit: str
    lines: Sequence[Line]
    y_max: float = inf
    """Higher values leave the panel; if infinite, the largest value."""
    y_least: float = 0.0
    """The axis reaches at least this far, so that panels of the same kind can be compared."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Chart:
    """Panels above one another."""

    title: str
    subtitle: str
    x_unit: str
    panels: Sequence[Panel]
    bands: Sequence[Band] = field(default_factory=tuple)
    x_ticks: Sequence[tuple[float, str]] = ()
    """Places on the axis of time and their labels, where round numbers do not fit: powers of two, for example."""


def render(chart: Chart) -> str:
    """Return the chart as SVG."""
    height = TOP + len(chart.panels) * (PANEL_HEIGHT + GAP) - GAP + BOTTOM
    x_max = max(x for panel in chart.panels for line in panel.lines for x, _ in line.points)
    parts = [
        (
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height}" '
            f'viewBox="0 0 {WIDTH} {height}" font-family="sans-serif" font-size="12" fill="{INK}">'
        ),
        _style(),
        f'<rect width="{WIDTH}" height="{height}" fill="{PAPER}"/>',
        _text(LEFT, 22, chart.title, size=16, weight="bold"),
        _text(LEFT, 40, chart.subtitle),
    ]
    for number, panel in enumerate(chart.panels):
        top = TOP + number * (PANEL_HEIGHT + GAP)
        parts += _panel(panel, _Frame(top, x_max, _y_max(panel)), number, chart)
    parts += [_text((LEFT + WIDTH - RIGHT) / 2, height - 10, chart.x_unit, anchor="middle"), "</svg>"]
    return "\n".join(parts) + "\n"


def _style() -> str:
    """Return the colours of a dark screen, as a style sheet that applies there alone."""
    rules = [
        f'[{name}="{light}"]{{{name}:{dark}}}' for name, colours in DARK.items() for light, dark in colours.items()
    ]
    return f"<style>@media (prefers-color-scheme:dark){{{''.join(rules)}}}</style>"


@dataclass(frozen=True, slots=True)
class _Frame:
    """The place of a panel's values in the picture."""

    top: float
    x_max: float
    y_max: float

    @property
    def bottom(self) -> float:
        return self.top + PANEL_HEIGHT

    def x(self, value: float) -> float:
        return LEFT + (WIDTH - RIGHT - LEFT) * value / self.x_max

    def y(self, value: float) -> float:
        return self.bottom - PANEL_HEIGHT * value / self.y_max


def _y_max(panel: Panel) -> float:
    values = [y for line in panel.lines for _, y in line.points if isfinite(y)]
    highest = max(panel.y_least, min(panel.y_max, max(values, default=1.0))) or 1.0
    ticks = _ticks(highest)
    return ticks[-1] if ticks[-1] >= highest else ticks[-1] + ticks[1]


def _ticks(highest: float) -> list[float]:
    """Return about five round values from zero up."""
    rough = highest / 5
    power = 10.0 ** floor(log10(rough))
    gap = next(step * power for step in (1, 2, 2.5, 5, 10) if step * power >= rough * 0.999)
    return [gap * count for count in range(int(highest / gap + 1.001))]


def _panel(panel: Panel, frame: _Frame, number: int, chart: Chart) -> list[str]:
    right, bands = WIDTH - RIGHT, chart.bands
    parts = [
        (
            f'<clipPath id="panel{number}"><rect x="{LEFT}" y="{frame.top - 2:g}" width="{right - LEFT}" '
            f'height="{PANEL_HEIGHT + 4}"/></clipPath>'
        )
    ]
    for band in bands:
        from_x, to_x = frame.x(band.from_x), frame.x(band.to_x)
        parts.append(
            f'<rect x="{from_x:.1f}" y="{frame.top:g}" width="{max(1.0, to_x - from_x):.1f}" '
            f'height="{PANEL_HEIGHT}" fill="{SAND}"/>'
        )
        parts.append(f'<path d="M{from_x:.1f} {frame.top:g}V{frame.bottom:g}" stroke="{EDGE}"/>')
    for value in _ticks(frame.y_max):
        y = frame.y(value)
        parts.append(f'<path d="M{LEFT} {y:.1f}H{right}" stroke="{FAINT}"/>')
        parts.append(_text(LEFT - 8, y + 4, f"{value:g}", anchor="end"))
    for value, label in chart.x_ticks or [(value, f"{value:g}") for value in _ticks(frame.x_max)]:
        x = frame.x(value)
        parts.append(f'<path d="M{x:.1f} {frame.bottom:g}v5" stroke="{INK}"/>')
        parts.append(_text(x, frame.bottom + 18, label, anchor="middle"))
    parts.append(f'<path d="M{LEFT} {frame.top:g}V{frame.bottom:g}H{right}" stroke="{INK}" fill="none"/>')
    parts.append(_text(LEFT, frame.top - 8, f"{panel.title} ({panel.unit})", weight="bold"))
    for row, line in enumerate(panel.lines):
        parts += _line(line, frame, number, row)
    if number == 0:
        parts += [_text(frame.x(band.from_x) + 4, frame.top + 13, band.label, size=11, halo=True) for band in bands]
    return parts


def _line(line: Line, frame: _Frame, number: int, row: int) -> list[str]:
    dashes = ' stroke-dasharray="6 4"' if line.is_dashed else ""
    stroke = f'stroke="{line.colour}" stroke-width="{line.width:g}" fill="none"{dashes}'
    right, y = WIDTH - RIGHT + 14, frame.top + 14 + 20 * row
    return [
        f'<path clip-path="url(#panel{number})" d="{_path(line, frame)}" {stroke}/>',
        f'<path d="M{right} {y:g}h22" {stroke}/>',
        _text(right + 28, y + 4, line.label),
    ]


def _path(line: Line, frame: _Frame) -> str:
    parts, pen, last_y = [], "M", 0.0
    for x, value in line.points:
        if not isfinite(value):
            pen = "M"
            continue
        y = frame.y(value)
        if line.is_stepped and pen == "L":
            parts.append(f"L{frame.x(x):.1f} {last_y:.1f}")
        parts.append(f"{pen}{frame.x(x):.1f} {y:.1f}")
        pen, last_y = "L", y
    return "".join(parts)


def _text(
    x: float, y: float, text: str, *, anchor: str = "start", size: int = 12, weight: str = "normal", halo: bool = False
) -> str:
    """Return text at a place; with a halo it can be read on top of lines."""
    around = f' stroke="{SAND}" stroke-width="4" paint-order="stroke"' if halo else ""
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-size="{size}" font-weight="{weight}"{around}>'
        f"{escape(text)}</text>"
    )
