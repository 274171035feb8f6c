"""``flashrt demo``: the whole loop on an application, through a real client and server, as an agent goes through it."""

from __future__ import annotations

import argparse
import json
import shutil
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.resources import files
from pathlib import Path
from typing import Any

import anyio
from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from flashrt.errors import input_error
from flashrt.mcp_server.client import Answer, Caller, started_server
from flashrt.mcp_server.demo_emulated import EmulatedRow, print_emulated, run_emulated
from flashrt.mcp_server.demo_plan import FILE, Attempt, DemoFailedError, DemoPlan, read_plan
from flashrt.mcp_server.demo_real import real_folder, run_real

MARK = ".flashrt-demo"
NUM_DEVICES = 2
LEASE_TTL_S = 900
DURATION_S = 5.0
QUICK_DURATION_S = 2.0
LOG_WIDTH = 150
MAX_ATTEMPTS = 3
MIN_BATCHES = 12
BUDGET_S = 285.0
"""A demonstration that is not asked for everything leaves out what would end after so many seconds."""
FIGURES = {"fps": "FPS", "first_output_ms": "ms to the first output", "latency_ms": "ms to the last output"}


@dataclass
class Row:
    """One line of the table."""

    variant: str
    candidate: str
    legality: str
    state: str
    equal: bool | None = None
    figures: Mapping[str, float | None] = field(default_factory=dict)
    predicted: Mapping[str, float | None] = field(default_factory=dict)
    ratio: float | None = None
    ratio_confidence_95: list[float] | None = None
    reason: str = ""
    evidence: Mapping[str, str] = field(default_factory=dict)


def application_root() -> Path:
    """Return the folder of the shipped applications."""
    try:
        return Path(str(files("flashrt.apps")))
    except ModuleNotFoundError:
        return Path(str(files("flashrt"))).parent / "apps"


def applications() -> dict[str, Path]:
    """Return the shipped applications: name -> folder. Each has a program and a demonstration."""
    found = sorted(application_root().glob(f"*/{FILE}"))
    return {path.parent.name: path.parent for path in found if (path.parent / "program.yaml").exists()}


def prepare_workspace(app: str, folder: Path) -> Path:
    """Copy an application into a fresh workspace and return that.

    Raises
    ------
    InputError
        No such application, or the folder holds something that is not a demonstration's.
    """
    known = applications()
    if app not in known:
        raise input_error(
            "demo", f"an application: {', '.join(known)}", f"'{app}'", "name one of them", valid=list(known), name=app
        )
    workspace = folder / app
    if workspace.exists() and any(workspace.iterdir()) and not (workspace / MARK).exists():
        raise input_error(
            f"folder '{workspace}'", "an empty folder, or one that an earlier demo made", "other files",
            "name another with --workspace", rule="not-a-demo-folder",
        )  # fmt: skip
    shutil.rmtree(workspace, ignore_errors=True)
    shutil.copytree(known[app], workspace, ignore=shutil.ignore_patterns("__pycache__", "*.pyc"))
    (workspace / MARK).write_text("made by flashrt demo; may be deleted\n")
    return workspace


def run_demo_command(options: argparse.Namespace) -> int:
    """Carry out the command."""
    return run_demo(
        options.app, options.workspace, options.json, quick=options.quick, real=options.real, whole=options.all
    )


def run_demo(
    app: str, folder: Path, json_path: Path | None, *, quick: bool, real: bool = False, whole: bool = False
) -> int:
    """Run the demonstration and print the table; return 0, or 1 when a step failed.

    Parameters
    ----------
    real
        Only the part with trained weights.
    quick
        No published deployments.
    whole
        Longer runs with restarts, and all published deployments, however long that takes.
    """
    begin = time.monotonic()
    console = Console()
    if not console.is_terminal:
        console = Console(width=LOG_WIDTH)
    workspace = prepare_workspace(app, folder)
    if real:
        return _run_real(app, workspace, console, json_path)
    plan = read_plan(workspace)
    deadline_s = None if whole else begin if quick else begin + BUDGET_S
    try:
        rows, emulated, facts = anyio.run(_run, workspace, plan, console, deadline_s)
    except (DemoFailedError, BaseExceptionGroup) as error:
        failure = _failure_in(error)
        if failure is None:
            raise
        console.print(f"demo stopped: {failure}", style="red", markup=False)
        return 1
    seconds = time.monotonic() - begin
    _print_table(console, rows, facts, plan.figure)
    print_emulated(console, emulated, plan)
    left_out = len(plan.emulated.runs) - len(emulated) if plan.emulated else 0
    if left_out:
        console.print(f"{left_out} published deployments on emulated devices were left out for time; --all runs them")
    console.print(f"{seconds:.0f} s in all. Workspace: {workspace}")
    record = {"app": app, "seconds": round(seconds, 1), **facts, "variants": [vars(row) for row in rows]}
    record |= {"emulated_runs": [vars(row) for row in emulated], "said": plan.said}
    if json_path is not None:
        json_path.write_text(json.dumps(record, indent=2, default=str) + "\n")
        console.print(f"Table written to {json_path}.")
    faster = [row for row in rows if row.state == "measured" and row.ratio is not None and row.ratio > 1]
    if not faster:
        console.print("[red]No measured variant is better than the reference on this machine.[/]")
        return 1
    return 0


def _run_real(app: str, workspace: Path, console: Console, json_path: Path | None) -> int:
    folder = real_folder(app, workspace, applications())
    try:
        record = anyio.run(run_real, folder, console)
    except (DemoFailedError, BaseExceptionGroup) as error:
        failure = _failure_in(error)
        if failure is None:
            raise
        console.print(f"demo stopped: {failure}", style="red", markup=False)
        return 1
    if json_path is not None:
        json_path.write_text(json.dumps({"app": app, "real": True, **record}, indent=2) + "\n")
    return 0


def _failure_in(error: BaseException) -> DemoFailedError | None:
    """Return the demonstration's own failure, which the client's task groups may have wrapped."""
    if isinstance(error, DemoFailedError):
        return error
    inner = error.exceptions if isinstance(error, BaseExceptionGroup) else ()
    return next((found for each in inner if (found := _failure_in(each))), None)


async def _run(
    workspace: Path, plan: DemoPlan, console: Console, deadline_s: float | None
) -> tuple[list[Row], list[EmulatedRow], dict[str, Any]]:
    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    async with started_server(workspace) as caller:
        with Progress(*columns, console=console, transient=True) as progress:
            loop = _Loop(caller, plan, progress, console, quick=deadline_s is not None)
            lease = await loop.acquire()
            try:
                rows, facts = await loop.run()
                emulated = await run_emulated(
                    loop.call, workspace, plan, facts["program"], facts["profile_ms"], deadline_s
                )
                return rows, emulated, facts
            finally:
                with anyio.CancelScope(shield=True):
                    await caller.call("gpu_release", {"lease": lease})


class _Loop:
    """The chain-of-program loop: each step one tool call."""

    def __init__(self, caller: Caller, plan: DemoPlan, progress: Progress, console: Console, *, quick: bool) -> None:
        self.caller = caller
        self.plan = plan
        self.progress = progress
        self.console = console
        self.num_runs = 1 if quick else plan.runs
        self.duration_s = QUICK_DURATION_S if quick else DURATION_S
        self.task = progress.add_task("starting the server", total=1.0)
        self.lease = ""
        self.renewed_s = 0.0
        self.facts: dict[str, Any] = {}

    async def call(self, tool: str, step: str, **arguments: Any) -> Answer:
        """Call a tool, showing the step; a failure ends the demonstration with the tool's own words."""
        self.progress.update(self.task, description=f"{tool}: {step}", completed=0.0)
        await self.keep_lease()

        def show(share: float, message: str) -> None:
            self.progress.update(self.task, description=f"{tool}: {step} ({message})", completed=share)

        answer = await self.caller.call(tool, arguments, show)
        if not answer.ok:
            raise DemoFailedError(f"{tool}: {answer.text}")
        return answer

    def say(self, text: str) -> None:
        """Print a line that stays."""
        self.console.print(text)

    async def acquire(self) -> str:
        """Lease CPU cores; the measurements then belong to them."""
        answer = await self.call(
            "gpu_acquire", f"{NUM_DEVICES} CPU devices", count=NUM_DEVICES, holder="flashrt demo", kind="cpu",
            ttl_s=LEASE_TTL_S, purpose="demonstration",
        )  # fmt: skip
        self.lease, self.renewed_s = str(answer.record["lease"]), time.monotonic()
        names = [device["uuid"] for device in answer.record["devices"]]
        self.facts |= {"devices": names, "emulated": False}
        self.say(f"leased {', '.join(names)}")
        return self.lease

    async def keep_lease(self) -> None:
        """Renew the lease in time: on a slow machine the demonstration takes longer than one lasts."""
        if self.lease and time.monotonic() - self.renewed_s > LEASE_TTL_S / 3:
            self.renewed_s = time.monotonic()
            await self.caller.call("gpu_renew", {"lease": self.lease, "ttl_s": LEASE_TTL_S})

    async def run(self) -> tuple[list[Row], dict[str, Any]]:
        """Go through the loop; return the rows of the table and the facts around it."""
        program, profile = await self.write_and_prove()
        analysis = await self.call(
            "analyze", "dependencies and candidates", program=program, profile=profile, seed_queue=True,
            max_devices=NUM_DEVICES,
        )  # fmt: skip
        candidates = {candidate["id"]: candidate for candidate in analysis.record["candidates"]}
        legal = sum(bool(candidate["legal"]) for candidate in candidates.values())
        pending = len(analysis.record["seeded"]["added"])
        self.say(
            f"{len(candidates)} candidates: {legal} legal; {pending} of those to try on {NUM_DEVICES} devices, the "
            "others removed with their reasons"
        )
        for _ in range(MAX_ATTEMPTS):
            reference = await self.bench("reference.py:serve", "the reference")
            if reference["valid"]:
                break
            self.say(f"a run of the reference was not valid ({'; '.join(reference['reasons'])})")
        else:
            raise DemoFailedError("the reference has no valid run: " + "; ".join(reference["reasons"]))
        self.facts["reference"] = {"run": reference["run"], **_figures(reference)}
        rows = [Row("reference", "", "it is the definition", "baseline", True, _figures(reference), ratio=1.0)]
        rows += await self.work_through_queue(candidates, reference)
        rows += [await self.attempt(one, reference) for one in self.plan.also]
        listing = (await self.call("variant_list", "may the search stop?")).record
        self.facts["may_stop"] = listing["may_stop"]
        if not listing["may_stop"]:
            raise DemoFailedError("the queue may not stop: " + "; ".join(map(str, listing["in_the_way"])))
        return rows, self.facts

    async def write_and_prove(self) -> tuple[str, str]:
        """Build the program, prove it equal to the reference, and measure its operations."""
        built = await self.call("ir_build", "the program document", document="program.yaml")
        program = str(built.record["program"])
        await self.call("ir_show", "a drawing of it", program=program, view="svg")
        self.say(f"program {program}: {', '.join(built.record['operations'])}")
        proof = await self.call(
            "ir_interpret", "the program against the reference", program=program, inputs="inputs.py:batches",
            baseline="reference.py:serve", devices=self.lease, count=self.plan.batches,
        )  # fmt: skip
        if not proof.record["equivalent"]:
            raise DemoFailedError("; ".join(proof.record["equality"]["reasons"]))
        self.say("the program equals the reference, element by element")
        measured = await self.call(
            "profile_measure", "every operation", program=program, inputs="inputs.py:batches", devices=self.lease,
            degrees=[1],
        )  # fmt: skip
        times = {path: by_degree["1"] for path, by_degree in measured.record["document"]["operations"].items()}
        self.say("profile (ms): " + ", ".join(f"{path} {time_ms:.1f}" for path, time_ms in times.items()))
        # Long enough for a few batches, however slow this machine is.
        self.duration_s = max(self.duration_s, MIN_BATCHES * sum(times.values()) / 1000.0)
        self.facts |= {"program": program, "profile": measured.record["profile"], "profile_ms": times}
        return program, str(measured.record["profile"])

    async def bench(self, system: str, step: str) -> Mapping[str, Any]:
        """Find a system's rate through its own buffers."""
        answer = await self.call(
            "bench_run", step, system=system, inputs="inputs.py:batches", scenario=self.plan.scenario,
            devices=self.lease, runs=self.num_runs, duration_s=self.duration_s, media_rate=self.plan.media_rate,
        )  # fmt: skip
        return answer.record

    async def work_through_queue(
        self, candidates: Mapping[str, Mapping[str, Any]], reference: Mapping[str, Any]
    ) -> list[Row]:
        """Claim variants until none is pending: measure those that fit this machine, remove the others."""
        rows: list[Row] = []
        measured: dict[tuple[Any, ...], str] = {}
        while True:
            found = (await self.call("variant_next", "the highest-ranked variant")).record
            if found["variant"] is None:
                return rows
            variant, candidate = str(found["variant"]), candidates[str(found["candidate"])]
            row = Row(
                variant, str(candidate["id"]), str(candidate["legality"]), "removed",
                predicted=_predicted(candidate["expected"]),
            )  # fmt: skip
            rows.append(row)
            reason = _reason_to_remove(candidate, measured)
            if reason is None and not self.plan.wants(row.candidate):
                reason = "not among the variants that this application's demonstration measures"
            if reason is None:
                reason = await self.measure(row, f"{found['folder']}/deployment.yaml", reference)
            if reason is None:
                measured[_shape(candidate)] = variant
                continue
            await self.remove(row, reason)

    async def remove(self, row: Row, reason: str) -> None:
        """Take a variant off the queue."""
        row.reason = reason
        await self.call("variant_update", f"{row.variant} removed", variant=row.variant, state="removed", reason=reason)
        if self.plan.wants(row.candidate):
            self.say(f"{row.variant} {row.candidate}: removed, {reason}")

    async def attempt(self, attempt: Attempt, reference: Mapping[str, Any]) -> Row:
        """Queue a ready deployment, and prove and measure it."""
        added = await self.call(
            "variant_add", attempt.name, hypothesis=attempt.hypothesis, transformation=attempt.name,
            bottleneck=attempt.bottleneck, legality=attempt.legality, system=attempt.system,
        )  # fmt: skip
        variant = str(added.record["variant"])
        await self.call("variant_next", attempt.name, variant=variant)
        row = Row(variant, attempt.name, attempt.legality, "removed")
        predicted = await self.call(
            "analyze", f"{attempt.name}: model", program=self.facts["program"], profile=self.facts["profile"],
            deployment=attempt.system,
        )  # fmt: skip
        row.predicted = _predicted(predicted.record)
        reason = await self.measure(row, attempt.system, reference)
        if reason is not None:
            await self.remove(row, reason)
        return row

    async def measure(self, row: Row, system: str, reference: Mapping[str, Any]) -> str | None:
        """Prove a variant equal, benchmark it, and decide it; return why it must go, or None."""
        check = await self.call(
            "equivalence_check", f"{row.variant} {row.candidate}", baseline="reference.py:serve", candidate=system,
            inputs="inputs.py:batches", devices=self.lease, count=self.plan.batches,
        )  # fmt: skip
        row.equal = bool(check.record["equivalent"])
        if not row.equal:
            return "it is not equal to the reference: " + "; ".join(check.record["reasons"])
        for attempt in range(MAX_ATTEMPTS):
            run = await self.bench(
                system, f"{row.variant} {row.candidate}" + f", attempt {attempt + 1}" * (attempt > 0)
            )
            if run["valid"]:
                break
            # Other processes of the machine can disturb a run; a system that cannot keep its period fails each time.
            self.say(f"{row.variant}: a run was not valid ({'; '.join(run['reasons'])})")
        if not run["valid"]:
            return f"none of {MAX_ATTEMPTS} runs was valid: " + "; ".join(run["reasons"])
        row.figures = _figures(run)
        compared = await self.call("bench_compare", "with the reference", runs=[reference["run"], run["run"]])
        better = compared.record["comparisons"][0]["metrics"][self.plan.figure]
        row.ratio, row.ratio_confidence_95 = better["ratio"], better["confidence_95"]
        if self.plan.figure != "fps" and row.ratio:
            # Of times, less is better: how many times shorter it became.
            bounds = row.ratio_confidence_95 or []
            row.ratio, row.ratio_confidence_95 = 1 / row.ratio, [1 / bound for bound in reversed(bounds) if bound]
        row.evidence = {"equivalence": str(check.record["equivalence"]), "run": str(run["run"])}
        await self.call(
            "variant_update", f"{row.variant} measured", variant=row.variant, state="measured", system=system,
            **row.evidence,
        )  # fmt: skip
        row.state = "measured"
        shown = f"{row.figures[self.plan.figure]:.1f} {FIGURES[self.plan.figure]}"
        self.say(f"{row.variant} {row.candidate}: equal, {shown}, {row.ratio:.2f} × as good as the reference")
        return None


def _shape(candidate: Mapping[str, Any]) -> tuple[Any, ...]:
    expected = candidate["expected"]
    keys = ("num_devices", "period_ms", "latency_ms", "first_output_ms")
    return tuple(round(expected[key], 1) for key in keys)


def _reason_to_remove(candidate: Mapping[str, Any], measured: Mapping[tuple[Any, ...], str]) -> str | None:
    """Return why a variant need not or cannot be measured here, or None."""
    if candidate.get("deployment") is None:
        return "no placement realises it in this version's runtime"
    if not isinstance(candidate["expected"], Mapping):
        return "the profile has no times for its sequence-parallel groups"
    twin = measured.get(_shape(candidate))
    if twin is not None:
        return f"the model predicts the figures of {twin}, which is measured"
    return None


def _figures(run: Mapping[str, Any]) -> dict[str, float | None]:
    return {
        "fps": run["fps"],
        "period_ms": run["period_ms"],
        "latency_ms": run["latency_ms"]["p50"],
        "first_output_ms": run["first_output_ms"],
        "d0_ms": run.get("d0_ms"),
        "rtf": run.get("rtf"),
        "skew_ms": _largest(run.get("skew_ms")),
    }


def _largest(skew: Any) -> float | None:
    """Return the largest skew of a run's pairs of outputs."""
    found = [pair["max"] for pair in (skew or {}).values()]
    return max(found, default=None)


def _predicted(expected: Any) -> dict[str, float | None]:
    if not isinstance(expected, Mapping):
        return {}
    return {key: expected.get(key) for key in ("fps", "period_ms", "latency_ms", "first_output_ms", "d0_ms")}


def _print_table(console: Console, rows: list[Row], facts: Mapping[str, Any], figure: str) -> None:
    title = f"measured buffer to buffer on {', '.join(facts['devices'])}; the model's prediction in brackets"
    table = Table(title=title, title_justify="left")
    media = [key for key in ("rtf", "skew_ms") if any(row.figures.get(key) is not None for row in rows)]
    headings = [{"rtf": "RTF", "skew_ms": "skew ms"}[key] for key in media]
    last = "× reference" if figure == "fps" else f"× sooner ({FIGURES[figure].removeprefix('ms ')})"
    for heading in ("variant", "candidate", "equal", "latency ms", "first ms", "d0 ms", "FPS", *headings, last):
        table.add_column(heading, justify="left" if heading in {"variant", "candidate", "equal"} else "right")
    for row in rows:
        if row.state == "removed":
            continue
        cells = [_cell(row, key) for key in ("latency_ms", "first_output_ms", "d0_ms", "fps")]
        ratio = f"{row.ratio:.2f}" if row.ratio else ""
        cells += ["" if (value := row.figures.get(key)) is None else f"{value:.3g}" for key in media]
        table.add_row(row.variant, row.candidate, "yes" if row.equal else "", *cells, ratio)
    console.print(table)
    for row in rows:
        if row.state == "measured":
            console.print(f"{row.variant} is legal: {row.legality}", style="dim")


def _cell(row: Row, key: str) -> str:
    value, predicted = row.figures.get(key), row.predicted.get(key)
    text = f"{value:.0f}" if value is not None else ""
    return f"{text} [{predicted:.0f}]".replace("[", r"\[") if predicted is not None else text
