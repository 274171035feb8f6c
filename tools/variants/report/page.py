"""A workspace as one page of HTML: pure, from records to text; everything that comes from records is escaped."""

from __future__ import annotations

import base64
import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flashrt.variants.report.charts import short

if TYPE_CHECKING:
    from jinja2 import Environment

FOLDER = Path(__file__).parent
STYLE, SCRIPT = FOLDER / "style.css", FOLDER / "tables.js"
# What a reader asks of a run first: (name, path in the record, unit).
FIGURES = (
    ("elements a second", "fps", ""),
    ("period", "period_ms", "ms"),
    ("latency, mean", "latency_ms.mean", "ms"),
    ("latency, p50", "latency_ms.p50", "ms"),
    ("latency, p90", "latency_ms.p90", "ms"),
    ("latency, p99", "latency_ms.p99", "ms"),
    ("first output", "first_output_ms", "ms"),
    ("offset d0", "d0_ms", "ms"),
    ("very first output", "ttfo_ms", "ms"),
    ("jitter", "jitter_ms", "ms"),
    ("deadline misses", "deadline_misses", ""),
    ("stall ratio", "stall_ratio", ""),
    ("real-time factor", "rtf", ""),
    ("start-up", "startup_ms", "ms"),
)
VIRTUAL = "emulated"


@dataclass(frozen=True)
class ProgramPart:
    """A program with what is known of it.

    Parameters
    ----------
    drawing
        SVG, made by `flashrt.ir.to_svg`.
    analysis
        What ``analyze`` answers; with the newest plan's best point where there is one.
    """

    id: str
    name: str
    path: str
    drawing: str
    operations: Sequence[str]
    analysis: Mapping[str, Any]
    analysed_with: str = ""


@dataclass(frozen=True)
class Drawn:
    """A record with its drawings, and what could not be drawn.

    Parameters
    ----------
    charts
        (what it shows, SVG).
    """

    record: Mapping[str, Any]
    charts: Sequence[tuple[str, str]] = ()
    timelines: Sequence[str] = ()
    missing: Sequence[str] = ()


@dataclass(frozen=True)
class Contents:
    """What a report has; an empty part is left out of the page.

    Parameters
    ----------
    variants
        What ``variant_list`` answers, with history.
    devices
        What ``gpu_status`` answers.
    missing
        What could not be read, and why.
    """

    title: str
    workspace: str
    made_at: str
    version: str
    program: ProgramPart | None = None
    plan: Drawn | None = None
    other_plans: Sequence[Mapping[str, Any]] = ()
    variants: Mapping[str, Any] = field(default_factory=dict)
    runs: Sequence[Drawn] = ()
    checks: Sequence[Mapping[str, Any]] = ()
    comparisons: Sequence[Mapping[str, Any]] = ()
    audits: Sequence[Mapping[str, Any]] = ()
    jobs: Sequence[Mapping[str, Any]] = ()
    devices: Mapping[str, Any] = field(default_factory=dict)
    missing: Sequence[str] = ()

    @property
    def is_empty(self) -> bool:
        """Whether nothing was built or measured yet."""
        return not (self.program or self.plan or self.runs or self.checks or self.variants.get("variants"))


def render_report(contents: Contents) -> str:
    """Return the page: one file that loads nothing, with style, drawings and a script for its tables inside."""
    runs = [one.record for one in contents.runs]
    script = SCRIPT.read_text(encoding="utf-8")
    return environment().get_template("report.html").render(
        c=contents, roots=lineage(contents.variants.get("variants") or []), best=best_runs(runs), hosts=hosts(runs),
        style=STYLE.read_text(encoding="utf-8"), script=script, script_hash=fingerprint(script),
    )  # fmt: skip


def fingerprint(script: str) -> str:
    """Return what a policy names the one script by that may run."""
    return "sha256-" + base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()


@cache
def environment(*more: Path) -> Environment:
    """Return the templates' environment, which escapes whatever is put into a page; `more` are further folders."""
    from jinja2 import ChainableUndefined, Environment, FileSystemLoader

    made = Environment(
        loader=FileSystemLoader([*more, FOLDER]), autoescape=True, undefined=ChainableUndefined, trim_blocks=True,
        lstrip_blocks=True,
    )  # fmt: skip
    made.filters |= {"figure": figure, "figures": figures, "as_json": as_json, "name_of": name_of, "interval": interval,
                     "when": when}  # fmt: skip
    return made


def lineage(variants: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the variants that build on none, each with those that build on it below ``below``."""
    nodes: dict[str, dict[str, Any]] = {str(one["variant"]): {"variant": one, "below": []} for one in variants}
    roots: list[dict[str, Any]] = []
    for node in nodes.values():
        parent = nodes.get(str(node["variant"].get("parent")))
        (roots if parent is None else parent["below"]).append(node)
    return roots


def best_runs(runs: Sequence[Mapping[str, Any]]) -> list[tuple[str, Mapping[str, Any]]]:
    """Return the valid runs with the highest rate and the shortest first output, real devices and emulated apart."""
    found = []
    for emulated in (False, True):
        valid = [run for run in runs if run.get("valid") and bool(run.get("emulated")) is emulated]
        rates = [run for run in valid if is_figure(run.get("fps"))]
        firsts = [run for run in valid if is_figure(run.get("first_output_ms"))]
        if rates:
            found.append(("highest rate", max(rates, key=lambda run: float(run["fps"]))))
        if firsts:
            found.append(("earliest first output", min(firsts, key=lambda run: float(run["first_output_ms"]))))
    return found


def hosts(runs: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the different environments that runs were measured in, each with its runs."""
    found: dict[str, dict[str, Any]] = {}
    for run in runs:
        environment_ = {key: value for key, value in (run.get("environment") or {}).items()
                        if key not in {"load_average_1m", "device_states", "neighbours"}}  # fmt: skip
        key = json.dumps(environment_, sort_keys=True, default=str)
        found.setdefault(key, {"environment": environment_, "runs": []})["runs"].append(run.get("run"))
    return list(found.values())


def is_figure(value: Any) -> bool:
    """Say whether a value is a finite number."""
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def figure(value: Any, unit: str = "") -> str:
    """Return a value as a reader wants it: few digits, a dash for what is not known."""
    if is_figure(value):
        return f"{short(float(value))} {unit}".strip()
    return "–" if value is None or isinstance(value, float) else str(value)


def figures(run: Mapping[str, Any]) -> list[tuple[str, str, str]]:
    """Return (name, value, 95 % interval) of a run's figures that there are."""
    rows = []
    for name, path, unit in FIGURES:
        value = at(run, path)
        if is_figure(value):
            rows.append((name, figure(value, unit), interval(at(run.get("confidence_95") or {}, path))))
    return rows


def interval(bounds: Any) -> str:
    """Return an interval in words, nothing where there is none."""
    if isinstance(bounds, list) and len(bounds) == 2 and all(is_figure(one) for one in bounds):
        return f"{short(float(bounds[0]))} to {short(float(bounds[1]))}"
    return ""


def at(record: Mapping[str, Any], path: str) -> Any:
    """Return what stands at a dotted path, or None."""
    value: Any = record
    for step in path.split("."):
        value = value.get(step) if isinstance(value, Mapping) else None
    return value


def as_json(value: Any) -> str:
    """Return a record as indented text."""
    return json.dumps(value, indent=1, default=str, ensure_ascii=False)


def name_of(system: Any) -> str:
    """Return how a record names a system."""
    return str(system.get("reference", "")) if isinstance(system, Mapping) else str(system or "")


def when(moment: Any) -> str:
    """Return an ISO time without its fraction."""
    return str(moment or "")[:19].replace("T", " ")
