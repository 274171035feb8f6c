"""``report_write``: gathers what a workspace has and writes it as one page."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Field

from flashrt import __version__
from flashrt.errors import FlashrtError, InputError, input_error
from flashrt.mcp_server.workspace import Workspace, has_document, write_whole

if TYPE_CHECKING:
    from flashrt.ir.building import BuiltProgram
    from flashrt.variants.report import Contents, Drawn, ProgramPart

DEFAULT_OUT = ".flashrt/report.html"
MARK = '<meta name="generator" content="FlashRT">'
MAX_RUNS = 20
MAX_OTHERS = 50
"""Checks, comparisons, audits and jobs that a report has, the newest."""
MAX_CHARTS = 3
"""Points of a front whose steady state is drawn."""
MAX_TRACE_BYTES = 64 * 2**20


class ReportTools:
    """The report's part of `Tools`."""

    workspace: Workspace

    def report_write(
        self,
        out: Annotated[str, Field(description="Where to write it, in the workspace; ends in .html")] = DEFAULT_OUT,
        runs: Annotated[
            list[str] | None, Field(description=f"Ids of the runs to show; default: the newest {MAX_RUNS}")
        ] = None,
        program: Annotated[str | None, Field(description="Id or path; default: the newest that was built")] = None,
        title: Annotated[str | None, Field(max_length=200)] = None,
    ) -> dict[str, Any]:
        """Write the report."""
        from flashrt.variants.report import render_report

        path = report_path(self.workspace, out)
        contents = gather(self.workspace, runs, program, title)
        write_page(path, render_report(contents))
        queue = contents.variants
        return {
            "path": self.workspace.relative(path),
            "program": contents.program.id if contents.program else None,
            "runs": [one.record["run"] for one in contents.runs],
            "variants": len(queue.get("variants") or []),
            "may_stop": queue.get("may_stop"),
            "in_the_way": queue.get("in_the_way"),
            "missing": list(contents.missing),
        }


def report_path(workspace: Workspace, out: str) -> Path:
    """Return where a report goes.

    Raises
    ------
    InputError
        Outside the workspace, no .html, or a file that is no report.
    """
    path = workspace.path_to_write(out, "argument 'out'", "report.html")
    if path.suffix != ".html" or path.is_dir():
        raise input_error(
            "argument 'out'", "a file that ends in .html", f"'{out}'", f"leave it out for {DEFAULT_OUT}",
            rule="no-html",
        )  # fmt: skip
    if path.exists():
        with path.open(encoding="utf-8", errors="replace") as file:
            if MARK not in file.read(2000):
                raise input_error(
                    "argument 'out'", "a new file, or a report to replace", f"'{out}', which is something else",
                    "name another file; nothing was written", rule="not-a-report",
                )  # fmt: skip
    return path


def write_page(path: Path, text: str) -> None:
    """Write a page as a whole, or leave what was there.

    Raises
    ------
    InputError
        The file cannot be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, text)
    except OSError as error:
        raise input_error(
            f"report '{path.name}'", "a file that can be written", str(error),
            "make room or give access, and call report_write again", rule="not-written",
        ) from None  # fmt: skip


def gather(workspace: Workspace, runs: Sequence[str] | None, program: str | None, title: str | None) -> Contents:
    """Return what a workspace has for a report; what cannot be read is named in it.

    Raises
    ------
    InputError
        A run or a program that was named is unknown.
    """
    from flashrt import gpu
    from flashrt.mcp_server.jobs import list_jobs
    from flashrt.variants.queue import VariantQueue
    from flashrt.variants.report import Contents

    missing: list[str] = []
    store = workspace.store
    if runs is None:
        kept = [record.payload for record in reversed(store.list_records("run"))]
        if len(kept) > MAX_RUNS:
            missing.append(f"{len(kept) - MAX_RUNS} older runs: name them in 'runs'")
    else:
        kept = [store.get_record("run", run).payload for run in dict.fromkeys(runs)]
    plans = [record.payload for record in reversed(store.list_records("plan"))]
    fronts = [plan for plan in plans if plan.get("front") and "period_ms" in plan["front"][0]]
    built = find_program(workspace, program, missing)
    if built is not None:
        fronts = sorted(fronts, key=lambda plan: plan.get("program") != built.id)
    plan = fronts[0] if fronts else None
    others = {
        kind: [_document(record.payload, record.path) for record in reversed(store.list_records(kind))]
        for kind in ("equivalence", "comparison", "audit")
    }
    try:
        devices = gpu.status()
    except (FlashrtError, OSError) as error:
        devices = {}
        missing.append(f"devices: {error}")
    return Contents(
        title=title or f"{built.program.name if built else workspace.root.name}: FlashRT report",
        workspace=str(workspace.root),
        made_at=datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        version=__version__,
        program=part_of(workspace, built, plan, missing) if built is not None else None,
        plan=draw_plan(workspace, built, plan) if plan is not None else None,
        other_plans=[one for one in plans if one is not plan],
        variants=VariantQueue(store).list().as_dict(history=True),
        runs=[draw_run(workspace, run) for run in kept[: MAX_RUNS if runs is None else None]],
        checks=others["equivalence"][:MAX_OTHERS],
        comparisons=others["comparison"][:MAX_OTHERS],
        audits=others["audit"][:MAX_OTHERS],
        jobs=[job.as_dict() for job in list_jobs(workspace.root)[:MAX_OTHERS]],
        devices=devices,
        missing=missing,
    )


def find_program(workspace: Workspace, program: str | None, missing: list[str]) -> BuiltProgram | None:
    """Return the program that is named, else the newest that still is as it was built, else None."""
    if program is not None:
        found: BuiltProgram = workspace.program(program)
        return found
    gone: list[str] = []
    newest: BuiltProgram | None = None
    for record in reversed(workspace.store.list_records("program")):
        if not has_document(record):
            gone.append(record.id)
            continue
        try:
            newest = workspace.program(record.id)
            break
        except InputError as error:
            missing.append(f"program {record.id}: {error}")
    if gone:
        programs = (
            "1 newer program whose document is" if len(gone) == 1 else f"{len(gone)} newer programs whose documents are"
        )
        missing.append(f"{programs} gone ({', '.join(gone)}): put back what you need, or call ir_build with another")
    return newest


def part_of(
    workspace: Workspace, built: BuiltProgram, plan: Mapping[str, Any] | None, missing: list[str]
) -> ProgramPart:
    """Return a program's drawing and analysis, with the figures of the plan's first point where they still hold."""
    from flashrt.analysis import analyze_program
    from flashrt.ir import to_svg
    from flashrt.mcp_server.auditing import find_audit
    from flashrt.variants.report import ProgramPart

    analysis, basis = None, ""
    if plan is not None and plan.get("program") == built.id:
        try:
            times, _ = workspace.document(plan["profile"], "profile", "the plan's profile")
            audit = find_audit(workspace, built, times)
            analysis = analyze_program(built, times, plan["front"][0]["deployment"], audit)
            basis = f"point 1 of {plan['plan']}"
        except InputError as error:
            missing.append(f"bounds of {plan['plan']}: {error}")
    if analysis is None:
        analysis = analyze_program(built, None, None, find_audit(workspace, built))
    return ProgramPart(
        built.id, built.program.name, workspace.relative(built.folder), to_svg(built.program, embedded=True),
        [operation.path for operation in built.flat.operations], analysis, basis,
    )  # fmt: skip


def draw_plan(workspace: Workspace, built: BuiltProgram | None, plan: Mapping[str, Any]) -> Drawn:
    """Return a plan with its front, and the steady state of its first points where the program is still the same."""
    from flashrt.analysis.cost import evaluate_placement
    from flashrt.analysis.deployment import read_deployment
    from flashrt.analysis.profile import read_profile
    from flashrt.analysis.schedule import find_schedule
    from flashrt.variants.report import Drawn, front_chart, gantt_chart

    missing, charts = [], []
    if built is None or plan.get("program") != built.id:
        missing.append(f"steady states: the program of {plan['plan']} is not the one of this report")
    else:
        for number, point in enumerate(plan["front"][:MAX_CHARTS], 1):
            try:
                times, _ = workspace.document(plan["profile"], "profile", "the plan's profile")
                cost = evaluate_placement(
                    built, read_profile(times, built), read_deployment(point["deployment"], built)
                )
            except InputError as error:
                missing.append(f"point {number}: {error}")
                continue
            charts.append(gantt_chart(f"Point {number}: steady state", find_schedule(cost)))
    return Drawn(plan, [("Period against latency", front_chart(plan))], charts, missing)


def draw_run(workspace: Workspace, run: Mapping[str, Any]) -> Drawn:
    """Return a run with the drawings of its samples and its trace, as far as they are still there."""
    from flashrt.variants.report import Drawn, read_spans, read_timelines, run_charts, run_timeline

    charts: list[tuple[str, str]] = []
    timelines, missing = [], []
    paths = {name: workspace.root / path for name, path in (run.get("artifacts") or {}).items()}
    try:
        charts = run_charts(run, read_timelines(paths["samples"], run))
    except (OSError, KeyError, ValueError) as error:
        missing.append(f"samples: {error}")
    try:
        if paths["trace"].stat().st_size > MAX_TRACE_BYTES:
            missing.append(f"the trace is too large to be drawn here: open {workspace.relative(paths['trace'])}")
        else:
            picture = run_timeline(read_spans(paths["trace"]), emulated=bool(run.get("emulated")))
            timelines = [picture] if picture else []
    except (OSError, KeyError, ValueError) as error:
        missing.append(f"trace: {error}")
    return Drawn(run, charts, timelines, missing)


def _document(payload: Mapping[str, Any], path: Path | None) -> Mapping[str, Any]:
    """Return a record with all that its file has of it."""
    try:
        found = json.loads(path.read_text(encoding="utf-8")) if path is not None and path.suffix == ".json" else {}
    except (OSError, ValueError):
        found = {}
    return {**payload, **found} if isinstance(found, Mapping) else payload
