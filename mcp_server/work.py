"""What jobs do: each function runs in a process of its own, detached from the server.

``function(workspace, arguments, progress, folder) -> result``; `folder` is the job's, for logs and artefacts.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flashrt.errors import InputError, input_error
from flashrt.ir.documents import read_document
from flashrt.mcp_server.devices import default_devices, device_names
from flashrt.mcp_server.workspace import Workspace, write_whole
from flashrt.variants.store import new_id

if TYPE_CHECKING:
    from flashrt.bench import System

Progress = Callable[[float, str], None]
DEFAULT_TIMEOUT_S = 120.0


def ir_interpret(root: Path, arguments: Mapping[str, Any], progress: Progress, folder: Path) -> dict[str, Any]:
    """Run a program sequentially over inputs; with a baseline, compare every output with it.

    The program runs in a process of its own, as every system does.
    """
    from flashrt.bench import CheckSettings, Tolerance, check_equivalence, read_inputs, write_recording
    from flashrt.bench.check import collect
    from flashrt.bench.drive import new_seed

    workspace = Workspace(root)
    system = find_system(workspace, arguments["program"], "argument 'program'", kinds=("program",))
    count = int(arguments.get("count") or 8)
    settings = CheckSettings(
        num_batches=count,
        tolerance=Tolerance.parse(arguments.get("tolerance")),
        devices=device_names(arguments.get("devices")),
        config=arguments.get("config"),
        timeout_s=timeout_s(arguments),
    )
    progress(0.05, f"interpreting {count} batches")
    items = read_inputs(arguments["inputs"], root, new_seed(), count)
    streams = collect(system, items, settings, folder / "program.log")
    path = folder / "outputs.frec"
    writes = [
        {name: values[index] for name, values in streams.values.items() if index < len(values)}
        for index in range(max((len(values) for values in streams.values.values()), default=0))
    ]
    write_recording(path, writes)
    result: dict[str, Any] = {
        "program": arguments["program"],
        "num_batches": len(items),
        "outputs": workspace.relative(path),
        "elements": dict(streams.num_elements),
        "elements_per_batch": {name: total / len(items) for name, total in streams.num_elements.items()},
        "startup_ms": streams.startup_ms,
    }
    if arguments.get("baseline"):
        baseline = find_system(workspace, arguments["baseline"], "argument 'baseline'")
        verdict = check_equivalence(
            baseline, system, arguments["inputs"], root, folder, settings,
            lambda share, message: progress(0.3 + 0.7 * share, message),
        )  # fmt: skip
        # The baseline that the program was proved against is the reference of this workspace from now on.
        result["equality"] = keep_equivalence(workspace, {**verdict, "role": "program"}, folder)
        result["equivalent"] = verdict["equivalent"]
    return result


def ir_trace(root: Path, arguments: Mapping[str, Any], progress: Progress, folder: Path) -> dict[str, Any]:
    """Trace a reference, write its draft into the workspace, and keep the program under its id."""
    from flashrt.bench.trace import TraceSettings, trace_system
    from flashrt.ir.building import build_file

    workspace = Workspace(root)
    system = find_system(workspace, arguments["system"], "argument 'system'", kinds=("code",))
    name, out = draft_folder(workspace, system, arguments)
    settings = TraceSettings(
        num_batches=int(arguments.get("count") or TraceSettings.num_batches),
        depth=TraceSettings.depth if arguments.get("depth") is None else int(arguments["depth"]),
        devices=device_names(arguments.get("devices")),
        config=arguments.get("config"),
        timeout_s=float(arguments.get("timeout_s") or TraceSettings.timeout_s),
    )
    progress(0.05, f"tracing {settings.num_batches} batches of {arguments['system']}")
    found = trace_system(system, arguments["inputs"], root, out, folder, settings, name)
    progress(0.9, "checking the draft")
    built = build_file(out / "program.yaml")
    record = {"name": built.program.name, "folder": workspace.relative(built.folder)}
    workspace.store.put_record("program", built.id, record, out / "program.yaml")
    files = {kind: workspace.relative(Path(path)) for kind, path in found.pop("files").items()}
    return {
        "program": built.id,
        "system": arguments["system"],
        "name": name,
        "path": files["program"],
        "files": files,
        "operations": [operation.path for operation in built.flat.operations],
        "counts": built.counts(),
        "diagnostics": [finding.as_dict() for finding in built.findings],
        **found,
    }


def draft_folder(workspace: Workspace, system: Any, arguments: Mapping[str, Any]) -> tuple[str, Path]:
    """Return a draft's name and the folder that it goes to: the one asked for, else a new one below ``traced``."""
    folder = system.path.parent
    name = arguments.get("name") or (folder.name if folder != workspace.root else system.path.stem)
    if arguments.get("out"):
        return name, workspace.path_to_write(arguments["out"], "argument 'out'", "traced/mine")
    out, number = workspace.root / "traced" / name, 1
    while (out / "program.yaml").exists() or (out / "ops.py").exists():
        number += 1
        out = workspace.root / "traced" / f"{name}-{number}"
    return name, out


def equivalence_check(root: Path, arguments: Mapping[str, Any], progress: Progress, folder: Path) -> dict[str, Any]:
    """Drive baseline and candidate with the same hidden inputs and compare every element."""
    from flashrt.bench import CheckSettings, Tolerance, check_equivalence

    workspace = Workspace(root)
    baseline = find_system(workspace, arguments["baseline"], "argument 'baseline'")
    candidate = find_system(workspace, arguments["candidate"], "argument 'candidate'")
    settings = CheckSettings(
        num_batches=int(arguments.get("count") or 8),
        runs=int(arguments.get("runs") or 1),
        tolerance=Tolerance.parse(arguments.get("tolerance")),
        devices=device_names(arguments.get("devices")),
        config=arguments.get("config"),
        timeout_s=timeout_s(arguments),
        known_noise=known_noise(workspace, baseline, arguments),
    )
    verdict = check_equivalence(baseline, candidate, arguments["inputs"], root, folder, settings, progress)
    verdict["warnings"] = [*verdict["warnings"], *device_warnings(candidate, settings.devices)]
    return keep_equivalence(workspace, verdict, folder)


def device_warnings(system: System, devices: Sequence[str]) -> list[str]:
    """Return what to say where a deployment was checked on other devices than those that it is for."""
    if system.kind != "deployment" or devices:
        return []
    kind = str(read_document(system.path).get("devices") or "cpu")
    if kind in {"cpu", "emulated"}:
        return []
    return [
        f"checked on the CPU, although '{system.path.name}' is for {kind} devices: other devices round otherwise; pass "
        "devices or a lease to check there"
    ]


def known_noise(workspace: Workspace, baseline: Any, arguments: Mapping[str, Any]) -> dict[str, float] | None:
    """Return the baseline's noise floor from an earlier check of the same code, inputs and devices, or None."""
    for record in reversed(workspace.store.list_records("equivalence")):
        found = record.payload
        same = found["baseline"]["digest"] == baseline.digest and found["inputs"] == arguments["inputs"]
        if same and found["devices"] == list(device_names(arguments.get("devices"))) and found["num_batches"] >= 8:
            floors = {name: output["noise_floor"] for name, output in found["outputs"].items()}
            if all(floor is not None for floor in floors.values()):
                return floors
    return None


def keep_equivalence(workspace: Workspace, verdict: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Keep a verdict under a new id, and what each system owes for a batch for later runs."""
    identity = new_id("eq")
    path = folder / "equivalence.json"
    record = {"equivalence": identity, **verdict}
    write_whole(path, json.dumps(record, indent=1, default=str))
    workspace.store.put_record("equivalence", identity, record, path)
    return record


LOAD = (
    "scenario", "duration_s", "runs", "warmup", "period_ms", "rate_hz", "burst_size", "trace", "speedup", "seed",
    "config", "max_batches", "d0_ms", "media_rate", "neighbours",
)  # fmt: skip


def run_settings(arguments: Mapping[str, Any], systems: Sequence[Any]) -> Any:
    """Return what a run is told; without devices, the most that one of the systems takes by default."""
    from flashrt.bench import RunSettings

    devices = device_names(arguments.get("devices"))
    if not devices:
        choices = [
            default_devices(read_document(system.path), f"deployment '{system.path.name}'")
            for system in systems
            if system.kind == "deployment"
        ]
        devices = max(choices, key=len, default=())
    return RunSettings(
        **{key: arguments[key] for key in LOAD if arguments.get(key) is not None},
        devices=devices,
        emulated=any(system.emulated for system in systems),
        timeout_s=timeout_s(arguments),
    )


def lease_notes(arguments: Mapping[str, Any]) -> list[str]:
    """Return what to say of figures without a lease."""
    if isinstance(arguments.get("devices"), str) and str(arguments["devices"]).startswith("lease"):
        return []
    return [
        "measured without a lease: others may have used the same devices; gpu_acquire (flashrt gpu acquire) gives one"
    ]


def bench_run(root: Path, arguments: Mapping[str, Any], progress: Progress, folder: Path) -> dict[str, Any]:
    """Drive a scenario through a system's buffers and measure it."""
    from dataclasses import replace

    from flashrt.bench import run_benchmark

    workspace = Workspace(root)
    system = find_system(workspace, arguments["system"], "argument 'system'")
    elements = arguments.get("elements_per_batch") or known_elements(workspace, system)
    settings = replace(run_settings(arguments, [system]), elements_per_batch=elements)
    against = known_baseline(workspace, system)
    result = run_benchmark(system, arguments["inputs"], root, folder, settings, progress, against)
    result["notes"] = [*result["notes"], *lease_notes(arguments)]
    return _keep(workspace, "run", new_id("run"), result, folder)


def bench_compare(root: Path, arguments: Mapping[str, Any], progress: Progress, folder: Path) -> dict[str, Any]:
    """Let two systems take turns and say which is faster."""
    from flashrt.bench import compare_systems

    workspace = Workspace(root)
    systems = [
        find_system(workspace, reference, f"argument 'systems[{index}]'")
        for index, reference in enumerate(arguments["systems"])
    ]
    result = compare_systems(
        systems, arguments["inputs"], root, folder, run_settings(arguments, systems), pairs=int(arguments["pairs"]),
        elements=[known_elements(workspace, system) for system in systems], progress=progress,
    )  # fmt: skip
    result["notes"] = [*result["notes"], *lease_notes(arguments)]
    return _keep(workspace, "comparison", new_id("cmp"), result, folder)


def _keep(workspace: Workspace, kind: str, identity: str, result: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """Keep a result under its id, paths relative to the workspace."""
    paths = {name: workspace.relative(Path(path)) for name, path in result["artifacts"].items()}
    record = {kind: identity, **result, "artifacts": paths}
    path = folder / Path(result["artifacts"]["result"]).name
    write_whole(path, json.dumps(record, indent=1, default=str))
    workspace.store.put_record(kind, identity, record, path)
    return record


def known_baseline(workspace: Workspace, system: Any) -> Any:
    """Return what a system was last found equal to (an `Against`), if that is still what it was; else None."""
    from flashrt.bench import Tolerance
    from flashrt.bench.recheck import Against

    for record in reversed(workspace.store.list_records("equivalence")):
        found = record.payload
        if not found.get("equivalent") or found["candidate"]["digest"] != system.digest:
            continue
        try:
            baseline = find_system(workspace, found["baseline"]["reference"], "the baseline")
        except InputError:
            continue
        if baseline.entry_digest == found["baseline"]["entry_digest"]:
            floors = {name: output["noise_floor"] for name, output in found["outputs"].items()}
            noise = floors if all(floor is not None for floor in floors.values()) else None
            return Against(baseline, Tolerance(**found["tolerance"]), noise, found["equivalence"])
    return None


def known_elements(workspace: Workspace, system: Any) -> dict[str, float] | None:
    """Return what a system owes for a batch, from the newest equivalence check that it took part in."""
    if system.kind != "code":
        return None
    for record in reversed(workspace.store.list_records("equivalence")):
        if record.payload.get("equivalent") and system.digest in {
            record.payload[side]["digest"] for side in ("baseline", "candidate")
        }:
            found: dict[str, float] = record.payload["elements_per_batch"]
            return found
    return None


def profile_measure(root: Path, arguments: Mapping[str, Any], progress: Progress, folder: Path) -> dict[str, Any]:
    """Measure every operation of a program at its degrees, and write a profile document."""
    from flashrt.bench.profile import measure_profile

    workspace = Workspace(root)
    system = find_system(workspace, arguments["program"], "argument 'program'", kinds=("program",))
    identity = new_id("profile")
    built = workspace.program(arguments["program"])
    document = measure_profile(
        system, built, arguments["inputs"], root, folder, count=int(arguments.get("count") or 16),
        devices=device_names(arguments.get("devices")), degrees=arguments.get("degrees"),
        config=arguments.get("config"), timeout_s=timeout_s(arguments), progress=progress,
    )  # fmt: skip
    path = workspace.folder("profiles") / f"{identity}.json"
    write_whole(path, json.dumps(document, indent=1))
    workspace.store.put_record("profile", identity, {"profile": identity, "program": built.id}, path)
    return {
        "profile": identity, "path": workspace.relative(path), "program": built.id, "notes": document["notes"],
        "document": document,
    }  # fmt: skip


def plan_deployment(root: Path, arguments: Mapping[str, Any], progress: Progress, folder: Path) -> dict[str, Any]:
    """Search the deployments of a program, write each point's document, and draw the front and every point."""
    from flashrt.mcp_server.planning import ask, draw, keep_deployment, rank, read_question

    workspace = Workspace(root)
    question = read_question(workspace, arguments)
    result = ask(question, progress)
    progress(0.6, f"{len(result.points)} points; ranking them under the profile's spread")
    ranked = rank(question, result.points)
    written = [keep_deployment(workspace, point) for point in result.points]
    progress(0.7, "drawing")
    paths, notes = draw(question, result, folder)
    charts = [{name: workspace.relative(path) for name, path in chart.items()} for chart in paths.pop("gantt")]
    request, identity = question.request, new_id("plan")
    record = {
        "plan": identity,
        "program": question.built.id,
        "profile": question.profile_name,
        "provenance": result.provenance,
        "figures": "predicted",
        "emulated": request.device_kind == "emulated",
        "num_devices": request.num_devices,
        "islands": [list(island) for island in request.islands],
        "memory_bytes": request.memory_bytes,
        "min_gain": request.min_gain,
        "front": [
            {**point.as_dict(), "id": one.id, "path": workspace.relative(one.path)}
            for point, one in zip(result.points, written, strict=True)
        ],
        "proof": result.proof.as_dict(),
        "left_out": [one.as_dict() for one in result.left_out],
        "ranked": ranked,
        "notes": [*question.notes, *result.notes, *notes],
        "num_nodes": result.num_nodes,
        "seconds": round(result.seconds, 3),
        "artifacts": {**{name: workspace.relative(path) for name, path in paths.items()}, "gantt": charts},
    }
    path = folder / "plan.json"
    write_whole(path, json.dumps(record, indent=1))
    workspace.store.put_record("plan", identity, record, path)
    return record


def plan_serving(root: Path, arguments: Mapping[str, Any], progress: Progress, folder: Path) -> dict[str, Any]:
    """Plan serving, write the deployment, draw the answer, and run it on emulated executors where that is asked."""
    from flashrt.mcp_server.serving import as_text, ask, read_question, run_plan, write_answer

    workspace = Workspace(root)
    question = read_question(workspace, arguments)
    answer = ask(question, lambda share, text: progress(0.05 + 0.75 * share, text))
    progress(0.82, "why, and pictures")
    record, paths = write_answer(answer, folder)
    if question.emulate_requests:
        progress(0.9, f"{question.emulate_requests} requests on emulated executors")
        record["emulated_run"] = run_plan(question, answer)
    record["artifacts"] = {name: workspace.relative(path) for name, path in paths.items()}
    path = folder / "plan-serving.json"
    write_whole(path, as_text(record))
    return record


def plan_elastic(root: Path, arguments: Mapping[str, Any], progress: Progress, folder: Path) -> dict[str, Any]:
    """Simulate the policies of elastic degrees on a workload, and draw them."""
    from flashrt.mcp_server.elastic import read_elastic_question
    from flashrt.planners.elastic import compare
    from flashrt.planners.elastic.plots import write_plots

    workspace = Workspace(root)
    question, policies, notes = read_elastic_question(workspace, arguments)
    found, simulations = compare(question, policies, lambda share, message: progress(0.05 + 0.75 * share, message))
    progress(0.8, "drawing")
    title = f"{question.profile.name}, {question.workload.name}, {question.num_devices} devices"
    paths = write_plots(found, simulations, title, folder)
    identity = new_id("plan")
    record = {
        "plan": identity,
        "profile": arguments["profile"],
        "workload": arguments["workload"],
        **found,
        "notes": [*found["notes"], *notes],
        "artifacts": {name: workspace.relative(path) for name, path in paths.items()},
    }
    path = folder / "elastic.json"
    write_whole(path, json.dumps(record, indent=1))
    workspace.store.put_record("plan", identity, record, path)
    return record


def find_system(workspace: Workspace, reference: str, where: str, kinds: Sequence[str] = ()) -> Any:
    """Return the system that a reference names; `kinds` bounds what it may be."""
    from flashrt.bench import resolve_system

    system = resolve_system(reference, workspace.root, where, workspace.find_id)
    if kinds and system.kind not in kinds:
        raise input_error(where, f"a {' or '.join(kinds)}", f"a {system.kind}", "name another", rule="kind-of-system")
    return system


def timeout_s(arguments: Mapping[str, Any]) -> float:
    """Return the silence after which a system counts as hanging."""
    value = arguments.get("timeout_s")
    return DEFAULT_TIMEOUT_S if value is None else float(value)
