"""Plots of a search: the front, and a Gantt chart of a point's steady state; each as PNG and as one page of HTML.

A figure is drawn once. In the page it is an inline SVG whose marks say on hover what they are.
"""

from __future__ import annotations

import io
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from flashrt.analysis.schedule import Bar, Schedule, Transfer, find_schedule
from flashrt.analysis.search.pages import front_page, gantt_page
from flashrt.analysis.search.result import Point, SearchResult

DPI = 110
SVG = "http://www.w3.org/2000/svg"
XLINK = "http://www.w3.org/1999/xlink"
COLOURS = ("#4c78a8", "#f58518", "#54a24b", "#e45756", "#72b7b2", "#b279a2", "#eeca3b", "#9d755d")
"""Of the batches, in turn."""
WORDS_WIDTH = 0.006
"""Share of a chart's width that a character of a bar's label takes."""


@dataclass(frozen=True)
class Heading:
    """What the plots say of a search beside its figures."""

    name: str
    """Of the program."""
    profile: str
    """The profile's path or id."""
    provenance: str
    """Of the profile's times."""
    device_kind: str | None
    num_devices: int
    """How many there are to plan for."""

    def __str__(self) -> str:
        emulated = ", EMULATED devices" if self.device_kind == "emulated" else f", {self.device_kind or 'any'} devices"
        return f"predicted from {self.provenance} times ({self.profile}){emulated}"


def write_front(result: SearchResult, heading: Heading, png: Path, page: Path) -> None:
    """Write the front, period against latency, as PNG and as a page with every point's explanation and deployment."""
    figure, titles = draw_front(result, heading)
    _save_png(figure, png)
    page.write_text(front_page(result, str(heading), heading.name, heading.num_devices, to_svg(figure, titles)))


def write_gantt(point: Point, number: int, heading: Heading, png: Path, page: Path) -> None:
    """Write the steady state of a front's point (`number` from 1) as PNG and as a page."""
    schedule = find_schedule(point.cost)
    figure, titles = draw_gantt(point, number, heading, schedule)
    _save_png(figure, png)
    page.write_text(gantt_page(point, number, str(heading), heading.name, schedule, to_svg(figure, titles)))


def _save_png(figure: Any, png: Path) -> None:
    figure.savefig(png, dpi=DPI)
    # The layout stands: finding it again for the SVG would take as long as drawing it.
    figure.set_layout_engine("none")


def draw_front(result: SearchResult, heading: Heading) -> tuple[Any, dict[str, str]]:
    """Return the figure, and id of a mark -> what it says on hover."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.subplots()
    corners = [(point.period_ms, point.latency_ms) for point in result.points]
    bounds = [
        (point.proof.bound["period_ms"], point.proof.bound["latency_ms"])
        for point in result.points
        if point.proof.bound is not None
    ]
    others = [(one.period_ms, one.latency_ms) for one in result.left_out]
    limits = _limits([*corners, *bounds, *others])
    titles: dict[str, str] = {}
    _shade(axes, bounds, limits, "gap", "#fbe3c4")
    _shade(axes, corners, limits, "reached", "#eef1f4" if bounds else "#f4f6f8")
    if bounds:
        titles["gap"] = f"not searched to the end: {result.proof}"
    if corners:
        titles["reached"] = "some point is at least as good as everything here"
    for number, one in enumerate(result.left_out, 1):
        axes.plot(one.period_ms, one.latency_ms, marker="o", mfc="white", mec="#8a8f98", gid=f"left-{number}")
        titles[f"left-{number}"] = f"left out: {one}"
    for number, point in enumerate(result.points, 1):
        colour = COLOURS[0] if point.runnable else "#8a8f98"
        axes.plot(point.period_ms, point.latency_ms, marker="o", ms=8, color=colour, gid=f"point-{number}", zorder=3)
        axes.annotate(
            f"{number}: {point.num_devices} device{'s' if point.num_devices > 1 else ''}",
            (point.period_ms, point.latency_ms), xytext=(7, 6), textcoords="offset points", fontsize=8, zorder=4,
        )  # fmt: skip
        titles[f"point-{number}"] = describe_point(number, point)
    axes.set_xlim(limits[0], limits[1])
    axes.set_ylim(limits[2], limits[3])
    axes.set_xlabel("period (ms a batch)" + ("; hollow: left out" if result.left_out else ""))
    axes.set_ylabel("latency (ms, batch ready to last output)")
    _set_titles(figure, axes, f"{heading.name} on up to {heading.num_devices} devices: {result.proof}", str(heading))
    return figure, titles


def describe_point(number: int, point: Point) -> str:
    """Return what a point's mark says on hover."""
    rate = f" ({point.fps:.4g} elements a second)" if point.fps is not None else ""
    return (
        f"point {number}: period {point.period_ms:g} ms{rate}, latency {point.latency_ms:g} ms, {point.num_devices} "
        f"device{'s' if point.num_devices > 1 else ''}, {point.proof}\n{point.period_because}\n{point.latency_because}"
    )


def draw_gantt(point: Point, number: int, heading: Heading, schedule: Schedule) -> tuple[Any, dict[str, str]]:
    """Return the figure, and id of a mark -> what it says on hover."""
    from matplotlib.figure import Figure
    from matplotlib.patches import Rectangle

    height = 1.9 + 0.55 * len(schedule.devices)
    figure = Figure(figsize=(11, height), layout="constrained")
    axes = figure.subplots()
    row = {device: place for place, device in enumerate(schedule.devices)}
    end = max([bar.end_ms for bar in schedule.bars], default=0.0) or 1.0
    titles: dict[str, str] = {}
    for place, bar in enumerate(schedule.bars):
        name = f"bar-{place}"
        width = bar.end_ms - bar.begin_ms
        axes.add_patch(
            Rectangle(
                (bar.begin_ms, row[bar.device] - 0.36), width, 0.72, gid=name,
                facecolor=COLOURS[bar.batch % len(COLOURS)], alpha=0.85, hatch="//" if bar.on_cycle else None,
                edgecolor="black" if bar.on_path else "white", linewidth=2.2 if bar.on_path else 0.6,
                zorder=4 if bar.on_path else 2,
            )
        )  # fmt: skip
        titles[name] = describe_bar(bar)
        label = bar.operation if bar.num_chunks == 1 else f"{bar.operation} {bar.chunk}"
        label = label if len(label) * WORDS_WIDTH * end < width else label.rpartition("/")[2]
        if len(label) * WORDS_WIDTH * end < width:
            axes.text(
                bar.begin_ms + width / 2, row[bar.device], label, ha="center", va="center", fontsize=7, zorder=5,
                parse_math=False, clip_on=True, in_layout=False,
            )  # fmt: skip
    for place, transfer in enumerate(schedule.transfers):
        name = f"transfer-{place}"
        axes.annotate(
            "", (transfer.end_ms, row[transfer.to_device]), (transfer.begin_ms, row[transfer.from_device]), gid=name,
            arrowprops={
                "arrowstyle": "-|>", "lw": 1.6 if transfer.on_path else 0.7, "shrinkA": 0, "shrinkB": 0,
                "color": "black" if transfer.on_path else COLOURS[transfer.batch % len(COLOURS)], "gid": name,
            },
            zorder=6,
        )  # fmt: skip
        titles[name] = describe_transfer(transfer)
    for batch in range(schedule.num_batches + 1):
        ready = batch * schedule.period_ms
        axes.axvline(ready, color="#40444b", lw=0.8, ls="--", zorder=1, gid=f"ready-{batch}")
        titles[f"ready-{batch}"] = f"batch {batch} is ready: {ready:g} ms"
    top = -0.72
    axes.annotate(
        "", (schedule.period_ms, top), (0, top), arrowprops={"arrowstyle": "<->", "lw": 1.0, "color": "#40444b"}
    )
    axes.text(
        schedule.period_ms / 2, top - 0.06, f"period {schedule.period_ms:g} ms", ha="center", va="bottom", fontsize=8
    )
    axes.set_xlim(min(0.0, *[bar.begin_ms for bar in schedule.bars], 0.0) - 0.01 * end, 1.01 * end)
    axes.set_ylim(len(schedule.devices) - 0.4, -1.25)
    axes.set_yticks(range(len(schedule.devices)), [f"device {device}" for device in schedule.devices])
    axes.set_xlabel("ms from when batch 0 is ready; outlined: the path that binds the latency; hatched: the cycle "
                    "that binds the period")  # fmt: skip
    _set_titles(
        figure, axes, f"{heading.name}, point {number}: period {point.period_ms:g} ms, latency "
        f"{point.latency_ms:g} ms, {schedule.num_batches} batches of the steady state", str(heading),
    )  # fmt: skip
    return figure, titles


def describe_bar(bar: Bar) -> str:
    """Return what a bar says on hover."""
    chunk = f" chunk {bar.chunk} of {bar.num_chunks}" if bar.num_chunks > 1 else ""
    marks = [words for marked, words in ((bar.on_path, "on the path that binds the latency"),
                                         (bar.on_cycle, "on the cycle that binds the period")) if marked]  # fmt: skip
    return "; ".join([
        f"{bar.operation}{chunk}, batch {bar.batch}, device {bar.device}: {bar.begin_ms:g} to {bar.end_ms:g} ms "
        f"({bar.end_ms - bar.begin_ms:g} ms)", *marks,
    ])  # fmt: skip


def describe_transfer(transfer: Transfer) -> str:
    """Return what an arrow says on hover."""
    return (
        f"{transfer.source} -> {transfer.target} ({transfer.cause}), batch {transfer.batch}, device "
        f"{transfer.from_device} to {transfer.to_device}: {transfer.begin_ms:g} to {transfer.end_ms:g} ms "
        f"({transfer.end_ms - transfer.begin_ms:g} ms)"
    )


def to_svg(figure: Any, titles: Mapping[str, str]) -> str:
    """Return a figure as an SVG element in which the marks with these ids have titles, so that hovering shows them."""
    import matplotlib

    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "flashrt"}):
        buffer = io.BytesIO()
        figure.savefig(buffer, format="svg", metadata={"Date": None})
    ElementTree.register_namespace("", SVG)
    ElementTree.register_namespace("xlink", XLINK)
    root = ElementTree.fromstring(buffer.getvalue())
    for metadata in root.findall(f"{{{SVG}}}metadata"):
        root.remove(metadata)
    named = {element.get("id"): element for element in root.iter(f"{{{SVG}}}g")}
    for name, text in titles.items():
        title = ElementTree.Element(f"{{{SVG}}}title")
        title.text = text
        named[name].insert(0, title)
    return ElementTree.tostring(root, encoding="unicode")


def _set_titles(figure: Any, axes: Any, title: str, below: str) -> None:
    figure.suptitle(title, fontsize=10, parse_math=False)
    axes.set_title(below, fontsize=8, color="#40444b", parse_math=False)


def _limits(corners: Sequence[tuple[float, float]]) -> tuple[float, float, float, float]:
    periods, latencies = zip(*corners, strict=True)
    pads = [0.08 * (max(values) - min(values)) or 0.08 * max(values) or 1.0 for values in (periods, latencies)]
    return (
        min(periods) - pads[0], max(periods) + 2 * pads[0], min(latencies) - pads[1], max(latencies) + 2 * pads[1]
    )  # fmt: skip


def _shade(
    axes: Any, corners: Sequence[tuple[float, float]], limits: tuple[float, float, float, float], name: str, colour: str
) -> None:
    """Fill what lies above and to the right of at least one corner."""
    if corners:
        outline = [*_staircase(corners, limits), (limits[1], limits[3])]
        axes.fill(*zip(*outline, strict=True), color=colour, ec="#c3c8cf", lw=0.8, gid=name, zorder=0.5)


def _staircase(
    corners: Sequence[tuple[float, float]], limits: tuple[float, float, float, float]
) -> Iterator[tuple[float, float]]:
    level = limits[3]
    for period, latency in sorted(corners):
        if latency < level:
            yield period, level
            yield period, latency
            level = latency
    yield limits[1], level
