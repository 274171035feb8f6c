"""Plots: what they show is what was found, mark by mark."""

from __future__ import annotations

import itertools
import re
import subprocess
import sys
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import yaml

import flashrt.apps.worldplay
from flashrt.analysis import Profile, read_deployment, read_profile, simulate
from flashrt.analysis.schedule import Schedule, find_schedule
from flashrt.analysis.search import Pins, Point, Proof, SearchRequest, SearchResult, search_deployments
from flashrt.analysis.search.plots import (
    Heading,
    describe_bar,
    describe_point,
    describe_transfer,
    write_front,
    write_gantt,
)
from flashrt.ir import BuiltProgram, build, build_file

WORLDPLAY = Path(flashrt.apps.worldplay.__file__).parent
SVG = "{http://www.w3.org/2000/svg}"
HEADING = Heading("a<b & $x$", "profiles/paper.yaml", "inferred", "emulated", 6)
PNG = b"\x89PNG\r\n"
Found = tuple[BuiltProgram, Profile, SearchResult]


@pytest.fixture(scope="module")
def world() -> Found:
    built = build_file(WORLDPLAY / "program.yaml")
    profile = read_profile(WORLDPLAY / "profiles" / "paper.yaml", built)
    request = SearchRequest(
        6, pins=Pins(together=[["dit"]]), min_gain=0.005, device_kind="emulated", profile_name="profiles/paper.yaml"
    )
    return built, profile, search_deployments(built, profile, request)


@pytest.fixture(scope="module")
def staggered() -> Found:
    """Three operations in a chain, with transfers, on two devices that interleave batches."""
    names = ["first", "second", "third"]
    ends = [("x", "first.x"), ("first.y", "second.x"), ("second.y", "third.x"), ("third.y", "y")]
    built = build(
        {
            "schema": "flashrt/program@1", "name": "chain", "entry": "app",
            "graphs": {"app": {
                "inputs": {"x": {}}, "outputs": {"y": {}}, "nodes": {name: {"op": name} for name in names},
                "edges": [{"from": a, "to": b, "mode": "blocking"} for a, b in ends],
            }},
        },
        Path(__file__).parent,
    )  # fmt: skip
    profile = read_profile({
        "schema": "flashrt/profile@1", "device": "emulated", "provenance": "declared",
        "operations": dict(zip(names, (5, 10, 5), strict=True)), "transfer": {"latency_ms": 1},
    })  # fmt: skip
    found = search_deployments(built, profile, SearchRequest(2, max_stagger=2))
    assert found.points[0].deployment["stagger"]
    return built, profile, found


def drawing(page: Path) -> ElementTree.Element:
    """Return the one drawing of a page, which must load nothing from elsewhere."""
    text = page.read_text()
    assert not re.findall(r"(?:src|href)=\"(?!#)", text)
    assert set(re.findall(r"https?://[^\s\"<]+", text)) <= {
        "http://www.w3.org/2000/svg",
        "http://www.w3.org/1999/xlink",
    }
    (svg,) = re.findall(r"<figure>(<svg.*?</svg>)</figure>", text, re.DOTALL)
    return ElementTree.fromstring(svg)


def marks(svg: ElementTree.Element, prefix: str) -> dict[str, ElementTree.Element]:
    """Return the groups whose id begins so."""
    return {str(g.get("id")): g for g in svg.iter(f"{SVG}g") if str(g.get("id")).startswith(prefix)}


def titles(svg: ElementTree.Element, prefix: str) -> list[str]:
    """Return what marks say, by their numbers."""
    found = {int(name.removeprefix(prefix)): g.findtext(f"{SVG}title") or "" for name, g in marks(svg, prefix).items()}
    return [found[number] for number in sorted(found)]


def words(svg: ElementTree.Element) -> str:
    return "\n".join("".join(text.itertext()) for text in svg.iter(f"{SVG}text"))


def x_range(mark: ElementTree.Element) -> tuple[float, float]:
    """Return how far a mark reaches from left to right."""
    (path,) = mark.iter(f"{SVG}path")
    numbers = [float(number) for number in re.findall(r"-?\d+\.?\d*", str(path.get("d")))]
    return min(numbers[::2]), max(numbers[::2])


def test_the_front_has_every_point_with_its_words_and_its_deployment(world: Found, tmp_path: Path) -> None:
    result = world[2]
    write_front(result, HEADING, tmp_path / "front.png", tmp_path / "front.html")
    assert (tmp_path / "front.png").read_bytes().startswith(PNG)
    svg = drawing(tmp_path / "front.html")
    assert titles(svg, "point-") == [describe_point(number, point) for number, point in enumerate(result.points, 1)]
    for point, title in zip(result.points, titles(svg, "point-"), strict=True):
        assert f"{point.period_ms:g} ms" in title
        assert f"{point.latency_ms:g} ms" in title
        assert point.period_because in title
    (left,) = titles(svg, "left-")
    assert "303.8 ms period and 436.96 ms latency on 6 devices: point 1 stands for it" in left
    assert "gap" not in marks(svg, "gap")
    said = words(svg)
    for part in ("1: 6 devices", "2: 4 devices", "a<b & $x$ on up to 6 devices: optimal", "inferred times",
                 "predicted", "EMULATED"):  # fmt: skip
        assert part in said
    text = (tmp_path / "front.html").read_text()
    assert "<b " not in text
    documents = [yaml.safe_load(block) for block in re.findall(r"<pre>(.*?)</pre>", text, re.DOTALL)]
    assert documents == [point.deployment for point in result.points]
    assert text.count("binds the latency") >= 2 * len(result.points)


def test_a_gap_is_shaded_between_what_was_found_and_its_bound(world: Found, tmp_path: Path) -> None:
    result = world[2]
    points = tuple(
        replace(p, proof=Proof("gap", 0.1, {"period_ms": p.period_ms / 1.1, "latency_ms": p.latency_ms / 1.1}))
        for p in result.points
    )  # fmt: skip
    cut = replace(result, points=points, proof=Proof("gap", 0.1))
    write_front(cut, HEADING, tmp_path / "front.png", tmp_path / "front.html")
    svg = drawing(tmp_path / "front.html")
    (gap,) = marks(svg, "gap").values()
    assert "by more than 0.1" in str(gap.findtext(f"{SVG}title"))
    assert x_range(gap)[0] < x_range(marks(svg, "reached")["reached"])[0]
    assert "nothing is better in both by more than 0.1" in words(svg)
    unknown = replace(result, points=tuple(replace(p, proof=Proof("gap")) for p in points), proof=Proof("gap"))
    write_front(unknown, HEADING, tmp_path / "front.png", tmp_path / "front.html")
    svg = drawing(tmp_path / "front.html")
    assert not marks(svg, "gap")
    assert "nothing is proved" in words(svg)


def check_schedule(point: Point, schedule: Schedule) -> None:
    """No overlap on a device, the period between batches, the path's end at the latency."""
    for device in schedule.devices:
        bars = sorted((bar.begin_ms, bar.end_ms) for bar in schedule.bars if bar.device == device)
        assert all(one[1] <= other[0] + 1e-6 for one, other in itertools.pairwise(bars))
    begin = {(bar.device, bar.operation, bar.chunk, bar.batch): bar.begin_ms for bar in schedule.bars}
    for (*part, batch), at in begin.items():
        if batch:
            assert at - begin[(*part, batch - 1)] == pytest.approx(point.period_ms)  # type: ignore[index]
    ends = [bar.end_ms for bar in schedule.bars if bar.on_path and bar.batch == schedule.path_batch]
    assert max(ends) - schedule.path_batch * schedule.period_ms == pytest.approx(point.latency_ms)
    walked = {(bar.operation, bar.chunk) for bar in schedule.bars if bar.on_path}
    assert walked == {(step.operation, step.chunk or 1) for step in point.cost.latency_path}
    cycle = {(bar.operation, bar.chunk) for bar in schedule.bars if bar.on_cycle}
    assert cycle == {(step.operation, step.chunk or 1) for step in point.cost.critical_cycle}


def check_simulation(built: BuiltProgram, profile: Profile, point: Point, schedule: Schedule) -> None:
    """What is drawn is where operations that start as early as they may end up."""
    parts = {
        device: [(point.cost.constraints.parts[n].operation, point.cost.constraints.parts[n].index) for n in numbers]
        for device, numbers in point.cost.ordered.sequences.items()
    }
    placement, first = read_deployment(point.deployment, built), 40
    period = point.cost.ordered.figures.ratio.ratio / 10**9
    run = simulate(built, profile, placement, parts, Fraction(period), first + schedule.num_batches + 4)
    for bar in schedule.bars:
        end = run.completion_ms[first + bar.batch, bar.operation, bar.chunk - 1] - (first + 1) * period
        assert float(end) == pytest.approx(bar.end_ms)


@pytest.mark.parametrize("name", ["world", "staggered"])
def test_a_chart_s_bars_are_those_of_the_simulator(name: str, request: pytest.FixtureRequest) -> None:
    built, profile, result = request.getfixturevalue(name)
    for point in result.points:
        schedule = find_schedule(point.cost)
        check_schedule(point, schedule)
        check_simulation(built, profile, point, schedule)


def check_drawing(svg: ElementTree.Element, schedule: Schedule) -> None:
    """Every bar and transfer has its words, and bars lie where their times say, between the marks of the period."""
    assert titles(svg, "bar-") == [describe_bar(bar) for bar in schedule.bars]
    assert titles(svg, "transfer-") == [describe_transfer(one) for one in schedule.transfers]
    lines = marks(svg, "ready-")
    assert len(lines) == schedule.num_batches + 1
    origin, scale = x_range(lines["ready-0"])[0], 0.0
    scale = (x_range(lines["ready-1"])[0] - origin) / schedule.period_ms
    for number, bar in enumerate(schedule.bars):
        left, right = x_range(marks(svg, f"bar-{number}")[f"bar-{number}"])
        assert (left - origin) / scale == pytest.approx(bar.begin_ms, abs=1e-3 * schedule.period_ms)
        assert (right - origin) / scale == pytest.approx(bar.end_ms, abs=1e-3 * schedule.period_ms)
    said = words(svg)
    assert f"period {schedule.period_ms:g} ms" in said
    assert all(f"device {device}" in said for device in schedule.devices)


def outlined(svg: ElementTree.Element) -> set[str]:
    return {
        name for name, mark in marks(svg, "bar-").items()
        if any("stroke: #000000" in str(path.get("style")) for path in mark.iter(f"{SVG}path"))
    }  # fmt: skip


@pytest.mark.parametrize("name", ["world", "staggered"])
def test_a_chart_shows_every_bar_transfer_and_period(name: str, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    point = request.getfixturevalue(name)[2].points[0]
    write_gantt(point, 1, HEADING, tmp_path / "gantt.png", tmp_path / "gantt.html")
    assert (tmp_path / "gantt.png").read_bytes().startswith(PNG)
    svg, schedule = drawing(tmp_path / "gantt.html"), find_schedule(point.cost)
    assert bool(schedule.transfers) == (name == "staggered")
    check_drawing(svg, schedule)
    assert outlined(svg) == {f"bar-{number}" for number, bar in enumerate(schedule.bars) if bar.on_path}
    text = (tmp_path / "gantt.html").read_text()
    assert all(part in words(svg) for part in ("EMULATED", "predicted", "point 1", f"{point.latency_ms:g} ms"))
    assert ("Transfers" in text) == (name == "staggered")


def test_the_same_result_is_drawn_the_same(world: Found, tmp_path: Path) -> None:
    pages: list[Any] = []
    for number in range(2):
        write_front(world[2], HEADING, tmp_path / "front.png", tmp_path / f"{number}.html")
        pages.append((tmp_path / f"{number}.html").read_text())
    assert pages[0] == pages[1]


def test_importing_the_plots_loads_no_matplotlib() -> None:
    code = "import sys, flashrt.analysis.search.plots; sys.exit('matplotlib' in sys.modules or 'numba' in sys.modules)"
    subprocess.run([sys.executable, "-P", "-c", code], check=True, timeout=60)
