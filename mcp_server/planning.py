"""What ``plan_deployment`` and ``flashrt plan`` share: the question read, asked, and the answer written down."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

from pydantic import Field

from flashrt.analysis import Profile, Use, check_profile_key, read_deployment, read_profile
from flashrt.analysis.search import (
    Pins,
    Point,
    SearchRequest,
    SearchResult,
    rank_under_spread,
    search_deployments,
    warm_search,
)
from flashrt.analysis.search.infeasible import TRIED
from flashrt.analysis.search.pages import as_yaml
from flashrt.analysis.search.resolve import resolve_request
from flashrt.errors import Finding, InputError
from flashrt.gpu.devices import device_name
from flashrt.ir import BuiltProgram, Frozen, validate
from flashrt.mcp_server.auditing import require_audited
from flashrt.mcp_server.devices import DevicesToPlan, devices_to_plan
from flashrt.mcp_server.workspace import Workspace, write_whole

TOOL = "plan_deployment"
RETRY = "call plan_deployment again"
DEFAULT_MIN_GAIN = 0.005
DEFAULT_TIME_LIMIT_S = 10.0
MAX_CHARTS = 24
MAX_DRAWS, MIN_DRAWS, RANKING_WORK = 200, 20, 400_000
ID_DIGITS = 12

Progress = Callable[[float, str], None]
Value = TypeVar("Value")


class PinsDocument(Frozen):
    """What the caller has decided already; operations by path, glob or node."""

    place: dict[str, list[int]] = Field(default_factory=dict)
    """Operations -> the device numbers that they run on."""
    together: list[list[str]] = Field(default_factory=list)
    """Operations that share a group, list by list."""
    apart: list[list[str]] = Field(default_factory=list)
    """Names whose operations share no device with those of the other names of the same list."""
    degree: dict[str, int] = Field(default_factory=dict)
    """Operations -> their degree."""


@dataclass(frozen=True)
class Question:
    """A request with what it is about, all checked."""

    built: BuiltProgram
    profile: Profile
    request: SearchRequest
    program_name: str
    """How the deployments name the program."""
    profile_path: Path
    notes: tuple[str, ...] = field(default=())

    @property
    def profile_name(self) -> str:
        """How the deployments name the profile."""
        return self.request.profile_name or ""


@dataclass(frozen=True)
class Written:
    """A deployment in the workspace."""

    id: str
    path: Path


def read_question(workspace: Workspace, arguments: Mapping[str, Any]) -> Question:
    """Return what a call asks.

    Raises
    ------
    InputError
        With every finding about program, profile, devices, pins and limits.
    """
    findings: list[Finding] = []
    built = _kept(findings, lambda: workspace.program(str(arguments["program"])))
    devices = _kept(findings, lambda: devices_to_plan(arguments["devices"]))
    pins = _kept(
        findings,
        lambda: validate(
            PinsDocument, arguments.get("pins") or {}, noun=f"{TOOL}, argument 'pins'", retry=RETRY
        ),
    )  # fmt: skip
    found = _kept(findings, lambda: _find_profile(workspace, str(arguments["profile"]), built))
    request = _request(arguments, devices, pins, found[2] if found else None)
    if built is not None and found is not None:
        findings += check_profile_key(
            found[0], built, Use(request.device_kind), f"{TOOL}, argument 'profile', '{found[1].name}'"
        )
    if built is not None and found is not None:
        contradictions: list[Finding] = []
        _kept(contradictions, lambda: resolve_request(built, found[0], request))
        if findings or any(one.rule not in TRIED for one in contradictions):
            findings += contradictions
        # Else the search is asked: it tries which changes would help before it names them.
    if findings or built is None or devices is None or found is None:
        raise _as_asked(InputError(list(dict.fromkeys(findings))))
    if arguments.get("require_audit"):
        require_audited(workspace, built, found[0], devices.num_devices, f"{TOOL}, argument 'program'")
    notes = [*devices.notes, *_profile_notes(found[0], devices)]
    if built.program.ops is None:
        notes.append("the program names no 'ops': its deployments can be planned, and run once it does")
    return Question(built, found[0], request, workspace.program_name(str(arguments["program"])), found[1], tuple(notes))


def _kept(findings: list[Finding], call: Callable[[], Value]) -> Value | None:
    """Return what a call returns; where it refuses, keep its findings instead."""
    try:
        return call()
    except InputError as error:
        findings += error.findings or [Finding(TOOL, "arguments that hold", str(error), RETRY)]
        return None


def _find_profile(workspace: Workspace, reference: str, built: BuiltProgram | None) -> tuple[Profile, Path, str]:
    _, path = workspace.document(reference, "profile", "argument 'profile'")
    # By its path: `flashrt deploy` and other workspaces' copies find it too.
    return read_profile(path, built), path, workspace.relative(path)


def _request(
    arguments: Mapping[str, Any], devices: DevicesToPlan | None, pins: PinsDocument | None, profile: str | None
) -> SearchRequest:
    given = {
        name: arguments[name]
        for name in ("objective", "max_period_ms", "min_fps", "max_latency_ms", "overlap", "max_stagger",
                     "split_states", "time_limit_s", "memory_bytes", "islands")
        if arguments.get(name) is not None
    }  # fmt: skip
    devices = devices or DevicesToPlan(1, None)
    islands: Sequence[Sequence[int]] = given.pop("islands", devices.islands)
    return SearchRequest(
        devices.num_devices,
        min_gain=DEFAULT_MIN_GAIN if arguments.get("min_gain") is None else float(arguments["min_gain"]),
        islands=tuple(tuple(island) for island in islands),
        memory_bytes=given.pop("memory_bytes", devices.memory_bytes),
        pins=Pins(pins.place, pins.together, pins.apart, pins.degree) if pins else Pins(),
        device_kind=devices.kind or "emulated",
        profile_name=profile,
        **given,
    )


def _profile_notes(profile: Profile, devices: DevicesToPlan) -> list[str]:
    here = {devices.kind, *devices.names} - {None}
    if devices.kind is None or profile.device in here:
        return []
    return [
        f"the profile's times are of '{profile.device}', the devices are {', '.join(sorted(map(str, here)))}: measure "
        "them with profile_measure before you trust the figures"
    ]


def _as_asked(error: InputError) -> InputError:
    """Return an error of the search in the words of the tool's arguments."""
    return InputError([
        replace(one, where=one.where.replace("search, num_devices", "search, devices").replace("search", TOOL, 1))
        if one.where.startswith("search") else one
        for one in error.findings
    ]) if error.findings else error  # fmt: skip


def ask(question: Question, progress: Progress) -> SearchResult:
    """Search, and return the points with documents that name program and profile by where they are.

    Raises
    ------
    InputError
        Nothing meets the request: says which constraint is in the way, and the least change.
    """
    progress(0.05, "loading the search; the first time on a machine compiles it, for about a minute")
    warm_search()
    progress(0.15, f"searching, for up to {question.request.time_limit_s:g} s")
    try:
        result = search_deployments(question.built, question.profile, question.request)
    except InputError as error:
        raise _as_asked(error) from None
    return replace(result, points=tuple(_runnable(question, point) for point in result.points))


def _runnable(question: Question, point: Point) -> Point:
    """Return a point with its program's name; what the runtime would refuse before it starts is said."""
    from flashrt.runtime.serve import plan_workers

    point = replace(point, deployment={**point.deployment, "program": question.program_name})
    if not point.runnable:
        return point
    placement = read_deployment(point.deployment, question.built)
    kind = question.request.device_kind or "emulated"
    names = [device_name(kind, number) for number in range(question.request.num_devices)]
    try:
        plan_workers(question.built, placement, names, question.profile_path)
    except InputError as error:
        return replace(point, runnable=False, notes=(*point.notes, f"the runtime refuses it: {error}"))
    return point


def rank(question: Question, points: Sequence[Point]) -> list[dict[str, Any]] | str:
    """Return the points under the profile's spread, or why there is no such ranking."""
    if not question.profile.samples:
        return "the profile has no samples, so how the points hold under noise is not known: profile_measure keeps them"
    num_arcs = sum(len(point.cost.ordered.arcs) for point in points)
    draws = max(MIN_DRAWS, min(MAX_DRAWS, RANKING_WORK // max(num_arcs, 1)))
    try:
        ranked = rank_under_spread(question.profile, points, num_draws=draws)
    except InputError as error:
        return str(error)
    return [{**one.as_dict(), "num_draws": draws} for one in ranked]


def keep_deployment(workspace: Workspace, point: Point) -> Written:
    """Write a point's deployment to the workspace under the id of its content."""
    text = as_yaml(point.deployment)
    identity = f"deploy-{hashlib.sha256(text.encode()).hexdigest()[:ID_DIGITS]}"
    path = workspace.folder("deployments") / f"{identity}.yaml"
    write_whole(path, text)
    workspace.store.put_record("deployment", identity, {"deployment": identity, "made_by": TOOL}, path)
    return Written(identity, path)


def draw(question: Question, result: SearchResult, folder: Path) -> tuple[dict[str, Any], list[str]]:
    """Write the plots of an answer; return their paths by kind, and what was not drawn."""
    from flashrt.analysis.search.plots import Heading, write_front, write_gantt

    folder.mkdir(parents=True, exist_ok=True)
    request = question.request
    heading = Heading(
        question.built.program.name, question.profile_name, result.provenance, request.device_kind, request.num_devices
    )
    front = folder / "front.png", folder / "front.html"
    write_front(result, heading, *front)
    charts = []
    for number, point in enumerate(result.points[:MAX_CHARTS], 1):
        chart = folder / f"gantt-{number}.png", folder / f"gantt-{number}.html"
        write_gantt(point, number, heading, *chart)
        charts.append({"png": chart[0], "html": chart[1]})
    missing = len(result.points) - MAX_CHARTS
    notes = [f"points {MAX_CHARTS + 1} to {len(result.points)} have no Gantt chart"] if missing > 0 else []
    return {"front_png": front[0], "front_html": front[1], "gantt": charts}, notes
