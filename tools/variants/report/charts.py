"""Drawings as inline SVG: their colours are the page's, so that they fit its light and its dark theme."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape

NUM_COLOURS = 6
"""Classes ``c0`` to ``c5`` of the page; series of few points differ by their dashes too."""
MAX_POINTS = 400
DENSE = 120
"""Points from which on a line is thin and whole."""
WIDTH, HEIGHT = 560, 250
LEFT, RIGHT, TOP, BOTTOM = 62, 14, 14, 44
ROW = 30
_ids = itertools.count()


@dataclass(frozen=True)
class Series:
    """One line of a chart: (x, y) pairs; `steps` for a distribution."""

    name: str
    points: Sequence[tuple[float, float]]
    steps: bool = False


@dataclass(frozen=True)
class Mark:
    """One point of a scatter chart.

    Parameters
    ----------
    kind
        ``point``, or ``hollow`` for one that stands apart.
    """

    x: float
    y: float
    label: str
    says: str
    kind: str = "point"


@dataclass(frozen=True)
class Span:
    """One bar of a timeline.

    Parameters
    ----------
    marks
        ``path`` (outlined), ``cycle`` (hatched).
    """

    row: str
    begin: float
    end: float
    label: str
    says: str
    colour: int = 0
    marks: frozenset[str] = frozenset()


def line_chart(title: str, x_label: str, y_label: str, series: Sequence[Series], *, from_zero: bool = False) -> str:
    """Return lines over one pair of axes, with a legend where there are several; empty without a finite point."""
    cleaned = [Series(one.name, thin(finite(one.points)), one.steps) for one in series]
    cleaned = [one for one in cleaned if one.points]
    if not cleaned:
        return ""
    axes = _Axes([point for one in cleaned for point in one.points], from_zero=from_zero)
    shown = cleaned if len(cleaned) > 1 else []
    legend = 20 * math.ceil(len(shown) / 3)
    parts = axes.frame(x_label, y_label)
    looks = [f"c{number % NUM_COLOURS} {_dash(number, len(one.points))}" for number, one in enumerate(cleaned)]
    for one, look in zip(cleaned, looks, strict=True):
        path = "".join(axes.path(one.points, one.steps))
        parts.append(f'<path class="line {look}" d="{path}"><title>{escape(one.name)}</title></path>')
    for number, one in enumerate(shown):
        x, y = LEFT + 170 * (number % 3), HEIGHT + 14 + 20 * (number // 3)
        parts.append(f'<path class="line {looks[number]}" d="M{x} {y - 4}h26"/>')
        parts.append(f'<text x="{x + 32}" y="{y}">{escape(_cut(one.name, 22))}</text>')
    lows = [min(y for _, y in one.points) for one in cleaned]
    highs = [max(y for _, y in one.points) for one in cleaned]
    says = f"{y_label} by {x_label}: from {short(min(lows))} to {short(max(highs))}; {len(cleaned)} lines"
    return _svg(WIDTH, HEIGHT + legend, title, says, parts)


def scatter_chart(title: str, x_label: str, y_label: str, marks: Sequence[Mark]) -> str:
    """Return marks that say what they are on hover, with the staircase of what the solid ones reach."""
    marks = [one for one in marks if math.isfinite(one.x) and math.isfinite(one.y)]
    if not marks:
        return ""
    axes = _Axes([(one.x, one.y) for one in marks], padded=True)
    parts = axes.frame(x_label, y_label)
    corners = sorted((one.x, one.y) for one in marks if one.kind == "point")
    if corners:
        steps, level = [f"M{axes.x(corners[0][0]):.1f} {TOP}"], math.inf
        for x, y in corners:
            if y < level:
                steps.append(f"H{axes.x(x):.1f}V{axes.y(y):.1f}")
                level = y
        parts.append(f'<path class="stairs" d="{"".join(steps)}H{WIDTH - RIGHT}"/>')
    for one in marks:
        x, y = axes.x(one.x), axes.y(one.y)
        parts.append(
            f'<g><title>{escape(one.says)}</title><circle class="{escape(one.kind)}" cx="{x:.1f}" cy="{y:.1f}" '
            f'r="6"/><text x="{x + 9:.1f}" y="{y - 8:.1f}">{escape(_cut(one.label, 30))}</text></g>'
        )
    says = "; ".join(one.says.splitlines()[0] for one in marks[:12])
    return _svg(WIDTH, HEIGHT, title, says, parts)


def timeline_chart(title: str, spans: Sequence[Span], lines: Mapping[float, str] | None = None) -> str:
    """Return bars in rows over time in ms; `lines` are moments with what they are."""
    spans = [one for one in spans if math.isfinite(one.begin) and math.isfinite(one.end)]
    if not spans:
        return ""
    rows = list(dict.fromkeys(one.row for one in spans))
    low, high = min(one.begin for one in spans), max(one.end for one in spans)
    left, width = 150, 900
    scale = (width - left - RIGHT) / ((high - low) or 1.0)
    bottom = TOP + ROW * len(rows)
    hatch = f"hatch-{next(_ids)}"
    parts = [f'<defs><pattern id="{hatch}" width="6" height="6" patternUnits="userSpaceOnUse" '
             'patternTransform="rotate(45)"><path class="hatch" d="M0 0v6"/></pattern></defs>']  # fmt: skip
    for number, row in enumerate(rows):
        y = TOP + ROW * number
        parts.append(f'<text class="end" x="{left - 8}" y="{y + 19}">{escape(_cut(row, 22))}</text>')
        parts.append(f'<path class="grid" d="M{left} {y + ROW - 1}H{width - RIGHT}"/>')
    for tick in ticks(low, high):
        x = left + (tick - low) * scale
        parts.append(f'<path class="grid" d="M{x:.1f} {TOP}V{bottom}"/>')
        parts.append(f'<text class="middle" x="{x:.1f}" y="{bottom + 16}">{short(tick)}</text>')
    parts.append(f'<text class="middle" x="{(left + width) / 2}" y="{bottom + 34}">ms</text>')
    for one in spans:
        x, wide = left + (one.begin - low) * scale, max((one.end - one.begin) * scale, 0.8)
        y = TOP + ROW * rows.index(one.row) + 3
        box = f'x="{x:.1f}" y="{y}" width="{wide:.1f}" height="{ROW - 8}"'
        marked = " onpath" if "path" in one.marks else ""
        parts.append(f'<g><title>{escape(one.says)}</title><rect class="bar c{one.colour % NUM_COLOURS}{marked}" '
                     f'{box}/>')  # fmt: skip
        if "cycle" in one.marks:
            parts.append(f'<rect fill="url(#{hatch})" {box}/>')
        if 6.6 * len(one.label) < wide:
            parts.append(f'<text class="onbar middle" x="{x + wide / 2:.1f}" y="{y + 15}">{escape(one.label)}</text>')
        parts.append("</g>")
    for moment, words in (lines or {}).items():
        if low <= moment <= high:
            x = left + (moment - low) * scale
            parts.append(f'<path class="moment" d="M{x:.1f} {TOP}V{bottom}"><title>{escape(words)}</title></path>')
    says = f"{len(spans)} spans on {len(rows)} rows ({', '.join(rows[:8])}) over {short(high - low)} ms"
    return _svg(width, bottom + 42, title, says, parts)


def finite(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Return the points that are numbers."""
    return [(float(x), float(y)) for x, y in points if math.isfinite(x) and math.isfinite(y)]


def thin(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Return at most twice `MAX_POINTS`: of each part of the line its lowest and its highest, so no peak is lost."""
    if len(points) <= 2 * MAX_POINTS:
        return list(points)
    kept: list[tuple[float, float]] = []
    size = math.ceil(len(points) / MAX_POINTS)
    for begin in range(0, len(points), size):
        part = points[begin : begin + size]
        low, high = min(part, key=lambda one: one[1]), max(part, key=lambda one: one[1])
        kept += [low] if low == high else sorted((low, high))
    return kept


def ticks(low: float, high: float) -> list[float]:
    """Return round numbers between two, about six of them."""
    span = (high - low) or abs(high) or 1.0
    raw = span / 5
    power = 10 ** math.floor(math.log10(raw))
    step = next(power * unit for unit in (1, 2, 2.5, 5, 10) if power * unit >= raw * 0.999)
    first = math.ceil(low / step - 1e-9)
    return [number * step for number in range(first, math.floor(high / step + 1e-9) + 1)]


def short(value: float) -> str:
    """Return a number in as few digits as say it."""
    if value == 0 or not math.isfinite(value):
        return "0" if value == 0 else "–"
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.3g}" if abs(value) >= 0.001 else f"{value:.1e}"


class _Axes:
    """Scales of a chart, from the points that it shows."""

    def __init__(self, points: Sequence[tuple[float, float]], *, from_zero: bool = False, padded: bool = False) -> None:
        self.low_x, self.high_x = _range([x for x, _ in points], 0.1 if padded else 0.0)
        self.low_y, self.high_y = _range([y for _, y in points], 0.15 if padded else 0.06)
        if from_zero and self.low_y > 0:
            self.low_y = 0.0

    def x(self, value: float) -> float:
        return LEFT + (value - self.low_x) / (self.high_x - self.low_x) * (WIDTH - LEFT - RIGHT)

    def y(self, value: float) -> float:
        return HEIGHT - BOTTOM - (value - self.low_y) / (self.high_y - self.low_y) * (HEIGHT - TOP - BOTTOM)

    def frame(self, x_label: str, y_label: str) -> list[str]:
        bottom, right = HEIGHT - BOTTOM, WIDTH - RIGHT
        parts = []
        for tick in ticks(self.low_x, self.high_x):
            x = self.x(tick)
            parts.append(f'<path class="grid" d="M{x:.1f} {TOP}V{bottom}"/>')
            parts.append(f'<text class="middle" x="{x:.1f}" y="{bottom + 16}">{short(tick)}</text>')
        for tick in ticks(self.low_y, self.high_y):
            y = self.y(tick)
            parts.append(f'<path class="grid" d="M{LEFT} {y:.1f}H{right}"/>')
            parts.append(f'<text class="end" x="{LEFT - 6}" y="{y + 4:.1f}">{short(tick)}</text>')
        parts.append(f'<path class="axis" d="M{LEFT} {TOP}V{bottom}H{right}"/>')
        parts.append(f'<text class="middle" x="{(LEFT + right) / 2}" y="{HEIGHT - 8}">{escape(x_label)}</text>')
        middle = (TOP + bottom) / 2
        parts.append(f'<text class="middle" transform="translate(14 {middle}) rotate(-90)">{escape(y_label)}</text>')
        return parts

    def path(self, points: Sequence[tuple[float, float]], steps: bool) -> Iterator[str]:
        for number, (x, y) in enumerate(points):
            if number == 0:
                yield f"M{self.x(x):.1f} {self.y(y):.1f}"
            elif steps:
                yield f"H{self.x(x):.1f}V{self.y(y):.1f}"
            else:
                yield f"L{self.x(x):.1f} {self.y(y):.1f}"


def _dash(number: int, num_points: int) -> str:
    # Between points that lie close, dashes look like noise.
    return "dense" if num_points > DENSE else f"d{(number + number // NUM_COLOURS) % 3}"


def _range(values: Sequence[float], pad: float) -> tuple[float, float]:
    low, high = min(values), max(values)
    extra = (high - low) * pad if high > low else abs(high) * 0.1 or 1.0
    return low - extra, high + extra


def _cut(text: str, length: int) -> str:
    return text if len(text) <= length else text[: length - 1] + "…"


def _svg(width: float, height: float, title: str, says: str, parts: Sequence[str]) -> str:
    name = f"chart-{next(_ids)}"
    return (
        f'<svg class="chart" viewBox="0 0 {width} {height}" width="{width}" height="{height}" role="img" '
        f'aria-labelledby="{name} {name}-says"><title id="{name}">{escape(title)}</title>'
        f'<desc id="{name}-says">{escape(says)}</desc>{"".join(parts)}</svg>'
    )
