"""``report_write``: one page that is whole, safe, readable by everyone, and true to the records."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from mcp.shared.exceptions import MCPError

from flashrt.variants.report import front_chart, render_report
from flashrt.variants.report.charts import (
    MAX_POINTS,
    Mark,
    Series,
    Span,
    line_chart,
    scatter_chart,
    ticks,
    timeline_chart,
)
from flashrt.variants.report.page import STYLE, Contents, lineage
from tests.server import browser
from tests.server.connection import connected

pytestmark = pytest.mark.anyio
EVIL = "</td><script>document.title='pwned'</script><img src=x onerror=\"document.title='pwned'\">"
INPUTS = "inputs.py:batches"


class Reader(HTMLParser):
    """What a page has: elements with their attributes, in order."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))

    def all(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.elements if name == tag]


def check_page(text: str) -> Reader:
    """Hold a page against what every report promises: it loads nothing, runs only ours, and can be read by all."""
    page = Reader(text)
    for tag, attributes in page.elements:
        for name, value in attributes.items():
            assert not name.startswith("on"), (tag, name)
            if name in {"src", "href", "srcset", "data", "action"}:
                assert value is not None
                assert value.startswith(("#", "data:")), (tag, value)
    assert len(page.all("script")) == 1
    assert not re.search(r"url\((?!#)|@import", text)
    assert page.all("html")[0]["lang"] == "en"
    assert len(page.all("main")) == len(page.all("h1")) == 1
    ids = [attributes["id"] for _, attributes in page.elements if "id" in attributes]
    assert len(ids) == len(set(ids))
    for one in page.all("a"):
        assert str(one["href"]).removeprefix("#") in ids, one
    assert len(page.all("caption")) == len(page.all("table"))
    assert all(one.get("scope") in {"col", "row"} for one in page.all("th"))
    for one in page.all("svg"):
        assert one["role"] == "img"
        assert all(name in ids for name in str(one.get("aria-labelledby", "")).split())
    return page


async def test_an_empty_workspace_says_what_to_do_next(tmp_path: Path) -> None:
    async with connected(tmp_path) as session:
        written = await session.call("report_write")
    text = (tmp_path / written["path"]).read_text()
    check_page(text)
    assert written["path"] == ".flashrt/report.html"
    for words in ("Nothing was built or measured", "flashrt init my-app", "ir_build"):
        assert words in text


async def test_programs_whose_documents_are_gone_are_one_line(workspace: Path) -> None:
    text = (workspace / "program.yaml").read_text()
    async with connected(workspace) as session:
        kept = (await session.call("ir_build", document="program.yaml"))["program"]
        gone = []
        for number in range(2):
            path = workspace / f"other-{number}.yaml"
            path.write_text(re.sub(r"^name: .*$", f"name: other_{number}", text, flags=re.MULTILINE))
            gone.append((await session.call("ir_build", document=path.name))["program"])
            path.unlink()
        written = await session.call("report_write")
        resources = (await session.client.list_resources()).resources
        assert [one.name for one in resources if one.uri.startswith("program://")] == [kept]
        with pytest.raises(MCPError, match="no file at"):
            await session.client.read_resource(f"program://{gone[0]}")
    assert written["program"] == kept
    assert len(set(gone)) == 2
    (line,) = written["missing"]
    assert line.startswith(f"2 newer programs whose documents are gone ({gone[1]}, {gone[0]}): ")


async def test_the_report_has_all_that_the_workspace_knows(workspace: Path, tmp_path: Path) -> None:
    (workspace / "profile.yaml").write_text((workspace / "profile.yaml").read_text().replace("cpu", "emulated"))
    async with connected(workspace) as session:
        program = (await session.call("ir_build", document="program.yaml"))["program"]
        await session.finish("ir_audit", program=program, inputs=INPUTS, count=3)
        plan = await session.finish("plan_deployment", program=program, profile="profile.yaml", devices=2)
        system = plan["front"][0]["id"]
        added = await session.call(
            "variant_add", hypothesis=EVIL, transformation="disaggregate drift|render", bottleneck="device 0",
            legality="no state ties them", system=system,
        )  # fmt: skip
        child = await session.call(
            "variant_add", hypothesis="one value may differ", transformation="approximate", bottleneck="render",
            legality=EVIL, parent=added["variant"],
        )  # fmt: skip
        check = await session.finish("equivalence_check", baseline="reference.py:serve", candidate=system,
                                     inputs=INPUTS, count=8)  # fmt: skip
        assert check["equivalent"] is True
        run = await session.finish("bench_run", system=system, inputs=INPUTS, scenario="realtime", period_ms=150,
                                   duration_s=3, runs=1)  # fmt: skip
        await session.call("variant_update", variant=child["variant"], state="removed", reason=EVIL)
        written = await session.call("report_write", out="page.html", title=EVIL)
        text = (workspace / "page.html").read_text()
        again = await session.call("report_write", out="page.html", runs=[run["run"]], program=program)
        assert again["path"] == "page.html", "a report may be replaced"
        (workspace / "other.html").write_text("mine")
        for arguments, words in (
            (
                {"out": "../page.html"},
                "inside the workspace, got '../page.html'; name one inside it, such as 'report.html'",
            ),
            ({"out": "page.txt"}, "ends in .html"),
            ({"out": "other.html"}, "something else"),
            ({"runs": ["run-unknown"]}, run["run"]),
            ({"program": "prog-unknown"}, program),
        ):
            said, _ = await session.refused("report_write", **arguments)
            assert words in said
        assert (workspace / "other.html").read_text() == "mine"
    assert written["missing"] == []
    assert (written["runs"], written["variants"], written["may_stop"]) == ([run["run"]], 2, False)
    page = check_page(text)
    assert EVIL not in text
    for part in ("program", "analysis", "front", "variants", "runs", "checks", "audits", "environment", "jobs"):
        assert f'<section id="{part}"' in text, part
    for words in (
        run["run"], check["equivalence"], plan["plan"], system, "drift|render", "The search may not stop yet",
        "Latency from the intended send time", "Times between elements", "elements a second",
        "Offset of each batch from its schedule",
        "Point 1: the steady state", "What the devices did (EMULATED devices)", "confirmed", "bit",
    ):  # fmt: skip
        assert words in text, words
    row = text.partition(f'<a href="#{run["run"]}">{run["run"]}</a></th>')[2].partition("</tr>")[0]
    assert "emulated" in row
    assert ("not valid" in row) is (run["valid"] is False)
    for reason in run["reasons"]:
        assert reason.split("'")[0] in text
    assert len(page.all("svg")) >= 7
    program_path = browser.find()
    if program_path is None:
        print("no Chromium on this machine: the page was read, not shown")
        return
    with browser.Browser(program_path, tmp_path / "chromium") as tab:
        look_at(tab, workspace / "page.html")


def look_at(tab: browser.Browser, path: Path) -> None:
    address = path.as_uri()
    tab.open(address)
    assert tab.value("document.title") != "pwned"
    assert tab.requests == [address], "it loads nothing"
    button = "document.querySelector('#runs table.sorts th:nth-child(5) button')"
    tab.value(f"{button}.click()")
    assert tab.value(f"{button}.closest('th').getAttribute('aria-sort')") == "ascending"
    wide = tab.value("[...document.querySelectorAll('.scroll')].filter(b => b.scrollWidth > b.clientWidth).length")
    assert tab.value("document.querySelectorAll('.scroll[tabindex=\"0\"]').length") == wide
    for width in (1300, 400):
        tab.send("Emulation.setDeviceMetricsOverride", width=width, height=900, deviceScaleFactor=1, mobile=False)
        assert tab.value("document.documentElement.scrollWidth") <= width, "only tables scroll sideways"


def colours(text: str) -> dict[str, tuple[float, ...]]:
    found = re.findall(r"--([a-z0-9-]+): #([0-9a-f]{6});", text)
    return {name: tuple(int(value[at : at + 2], 16) / 255 for at in (0, 2, 4)) for name, value in found}


def luminance(colour: tuple[float, ...]) -> float:
    linear = [one / 12.92 if one <= 0.04045 else ((one + 0.055) / 1.055) ** 2.4 for one in colour]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_text_has_the_contrast_that_readers_need(theme: str) -> None:
    light, _, rest = STYLE.read_text().partition("@media (prefers-color-scheme: dark)")
    own = colours(light) if theme == "light" else colours(rest.partition("* {")[0])
    pairs = [(text, back) for text in ("ink", "soft", "link") for back in ("paper", "raised")]
    pairs += [(name, f"{name}-back") for name in ("good", "bad", "wait", "mark")]
    pairs += [("ink", f"b{number}") for number in range(6)] + [("ink", name) for name in ("op", "graph", "opaque")]
    pairs += [("soft", name) for name in ("op", "graph", "opaque")] + [("bad", "paper")]
    for text, back in pairs:
        low, high = sorted((luminance(own[text]), luminance(own[back])))
        assert (high + 0.05) / (low + 0.05) >= 4.5, (text, back)
    for number in range(6):
        low, high = sorted((luminance(own[f"c{number}"]), luminance(own["paper"])))
        assert (high + 0.05) / (low + 0.05) >= 3, f"line c{number}"


def test_charts_keep_peaks_and_leave_out_what_is_no_number() -> None:
    points = [(float(x), 1.0) for x in range(10 * MAX_POINTS)]
    points[777] = (777.0, 50.0)
    points[3] = (3.0, float("nan"))
    text = line_chart(EVIL, "x", "y", [Series(EVIL, points), Series("b", [(0.0, 2.0)])])
    assert "from 1 to 50" in text
    assert "nan" not in text
    assert "<script" not in text
    assert text.count("L") < 3 * MAX_POINTS
    assert line_chart("t", "x", "y", [Series("a", [(0.0, float("inf"))])]) == ""
    assert scatter_chart("t", "x", "y", []) == timeline_chart("t", []) == ""
    assert "<script" not in scatter_chart("t", "x", "y", [Mark(1, 1, EVIL, EVIL)])
    assert "<script" not in timeline_chart("t", [Span(EVIL, 0, 1, EVIL, EVIL)], {0.5: EVIL})
    for low, high in ((0, 1), (-3.2, 1e6), (5, 5), (1e-9, 2e-9), (0, 0)):
        found = ticks(low, high)
        assert len(found) <= 12
        assert all(low - 1e-9 <= tick <= high + 1e-9 for tick in found)


def test_a_front_shows_every_point_and_what_was_left_out() -> None:
    point = {"period_ms": 30.0, "latency_ms": 50.0, "num_devices": 2, "proof": "optimal"}
    text = front_chart({"front": [point, {**point, "period_ms": 40.0}], "left_out": [{**point, "latency_ms": 51.0}]})
    assert text.count('class="point"') == 2
    assert text.count('class="hollow"') == 1


def test_lineage_is_a_tree_also_where_a_parent_is_unknown() -> None:
    variants: list[dict[str, Any]] = [
        {"variant": "a", "parent": None}, {"variant": "b", "parent": "a"}, {"variant": "c", "parent": "gone"},
    ]  # fmt: skip
    roots = lineage(variants)
    assert [root["variant"]["variant"] for root in roots] == ["a", "c"]
    assert [node["variant"]["variant"] for node in roots[0]["below"]] == ["b"]


def test_records_of_other_shapes_are_shown_as_far_as_they_go() -> None:
    from flashrt.variants.report import Drawn

    text = render_report(
        Contents(
            EVIL, EVIL, "now", "0", runs=[Drawn({"run": "run-1", "system": EVIL, "notes": [EVIL]})],
            checks=[{"equivalence": "eq-1"}], audits=[{"audit": "audit-1"}], comparisons=[{"comparison": "cmp-1"}],
            jobs=[{"job": "job-1"}], missing=[EVIL],
        )
    )  # fmt: skip
    check_page(text)
    assert EVIL not in text
