"""Measuring a profile: what each operation takes at each degree, in time and memory, and what a hand-over costs.

The program runs through the runtime itself, once a degree: the operations that allow it in one group of so many ranks,
all others at their smallest degree, one batch and one operation at a time.
"""

from __future__ import annotations

import os
import shutil
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from flashrt.analysis.profile_key import make_key
from flashrt.bench import profile_layout as layout
from flashrt.bench import profile_times as times
from flashrt.bench import profile_transfer
from flashrt.bench.check import Report, ignore_progress
from flashrt.bench.drive import Recorder, drain, new_seed, one_by_one
from flashrt.bench.process import SystemProcess
from flashrt.bench.profile_layout import Part, Pool
from flashrt.bench.record import read_inputs
from flashrt.bench.systems import System, remove_bytecode
from flashrt.clock import monotonic_ns
from flashrt.errors import Finding, InputError, input_error, listed
from flashrt.ir import BuiltProgram
from flashrt.runtime.holdings import METHOD_CPU, METHOD_GPU

MIN_SAMPLES = 3
FOREVER_NS = int(3.6e12)
WRITE_BATCH = times.MIN_WARMUP - 1
"""The batch whose values are written down; it is warm-up, so the writing is in no sample."""


@dataclass
class Measured:
    """What has been measured so far: operation -> degree -> figure."""

    samples: dict[str, dict[int, list[float]]] = field(default_factory=lambda: defaultdict(dict))
    warmup: dict[str, dict[int, int]] = field(default_factory=lambda: defaultdict(dict))
    memory: dict[str, dict[int, int]] = field(default_factory=lambda: defaultdict(dict))
    states: dict[str, int] = field(default_factory=dict)
    ranks: dict[int, list[str]] = field(default_factory=dict)
    files: set[str] = field(default_factory=set)
    notes: list[str] = field(default_factory=list)
    elements: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Experiment:
    """What is measured, and on what."""

    system: System
    built: BuiltProgram
    parts: tuple[Part, ...]
    pool: Pool
    items: Sequence[Mapping[str, Any]]
    config: Mapping[str, Any]
    folder: Path
    timeout_s: float

    @property
    def num_timed(self) -> int:
        """Batches before the one that is weighed, warm-up included."""
        return len(self.items) - 1


def measure_profile(
    system: System,
    built: BuiltProgram,
    inputs: str,
    workspace: Path,
    folder: Path,
    *,
    count: int = 16,
    devices: Sequence[str] = (),
    degrees: Sequence[int] | None = None,
    config: Mapping[str, Any] | None = None,
    timeout_s: float = 120,
    progress: Report = ignore_progress,
) -> dict[str, Any]:
    """Measure every operation of a program at every degree.

    Parameters
    ----------
    count
        Batches that are sampled where the shortest warm-up is enough.
    devices
        Names of real devices of one kind; none: this machine's cores, which ranks then share where they are too few.
    degrees
        Default: all that operations declare and the devices allow.

    Returns
    -------
    A ``flashrt/profile@1`` document with samples (ms), spread, memory, transfers, key and notes. What could not be
    measured is left out and named in the notes.

    Raises
    ------
    InputError
        The program fails, an argument is wrong, or nothing could be measured.
    """
    if count < MIN_SAMPLES:
        raise input_error("argument 'count'", "at least 3 batches", str(count), "raise it", rule="too-few-batches")
    pool = layout.find_pool(devices)
    chosen = layout.choose_degrees(built, degrees, pool.limit)
    parts = layout.find_parts(built.flat)
    _require_homes(parts, pool)
    wanted = count + times.MIN_WARMUP + 1
    items = read_inputs(inputs, workspace, new_seed(), wanted)
    least = MIN_SAMPLES + times.MIN_WARMUP + 1
    if len(items) < least:
        raise input_error(
            "argument 'inputs'", f"at least {least} batches: {times.MIN_WARMUP} of warm-up, {MIN_SAMPLES} samples, one "
            "to weigh", str(len(items)), "yield more and call again", rule="too-few-batches",
        )  # fmt: skip
    experiment = Experiment(system, built, parts, pool, items, dict(config or {}), folder, timeout_s)
    remove_bytecode(system)
    values = folder / "values"
    shutil.rmtree(values, ignore_errors=True)
    values.mkdir(parents=True)
    found = Measured()
    try:
        for number, degree in enumerate(chosen):
            progress(0.05 + 0.75 * number / len(chosen), f"degree {degree}, {len(items)} batches")
            _measure_degree(experiment, degree, found, values)
        if not any(found.samples.values()):
            raise InputError("\n".join(["profile_measure measured nothing:", *found.notes]))
        progress(0.85, "what hand-overs cost")
        transfer, notes = profile_transfer.measure_transfers(
            profile_transfer.read_values(values), pool, folder, timeout_s
        )
    finally:
        shutil.rmtree(values, ignore_errors=True)
    found.notes += notes
    return _document(experiment, found, transfer, chosen)


def _require_homes(parts: Sequence[Part], pool: Pool) -> None:
    findings = [
        Finding(
            f"operations {listed(part.paths)}", f"{part.home} devices, the smallest degree that they allow",
            f"{pool.limit} given", "lease more with gpu_acquire and call again", rule="too-few-devices",
        )
        for part in parts if pool.limit is not None and part.home > pool.limit
    ]  # fmt: skip
    if findings:
        raise InputError(findings)


def _measure_degree(experiment: Experiment, degree: int, found: Measured, values: Path) -> None:
    """Measure all operations that allow a degree, in one run where none of them fails."""
    flat = experiment.built.flat
    wide = [part for part in experiment.parts if degree in part.degrees]
    for part in experiment.parts:
        for path in part.paths:
            if part not in wide and degree in flat.by_path[path].degrees:
                others = [other for other in part.paths if degree not in flat.by_path[other].degrees]
                found.notes.append(
                    f"operation '{path}', degree {degree}: not measured, because it shares a state with "
                    f"{listed(others)}, which cannot run at this degree"
                )
    if not wide:
        return
    while wide:
        error = _try(experiment, degree, wide, found, values)
        if error is None:
            return
        if all(part.home == degree for part in experiment.parts):
            # The program does not run even as simply as it can.
            raise error
        # Whoever is at fault is left out, and the others run again; where that is not said, each runs by itself.
        guilty = [part for part in wide if any(f"operation '{path}'" in str(error) for path in part.paths)]
        if len(wide) == 1 or len(guilty) == 1:
            guilty = guilty or wide
            found.notes += _unmeasured(guilty[0], degree, error)
            wide = [part for part in wide if part not in guilty]
            continue
        for part in wide:
            failed = _try(experiment, degree, [part], found, values)
            if failed is not None:
                found.notes += _unmeasured(part, degree, failed)
        return


def _unmeasured(part: Part, degree: int, error: InputError) -> list[str]:
    words = " ".join(str(error).split())[:600]
    return [f"operation '{path}', degree {degree}: not measured, because its group failed: {words}"
            for path in part.paths]  # fmt: skip


def _try(experiment: Experiment, degree: int, wide: Sequence[Part], found: Measured, values: Path) -> InputError | None:
    """Run the program with some parts at a degree and keep what was measured; return why it failed, or None."""
    document, devices = layout.place(experiment.parts, degree, wide, experiment.pool)
    document |= {"blocking": layout.streaming_edges(experiment.built)}
    writes = not any(values.iterdir())
    told = {"weigh": experiment.num_timed, "write": WRITE_BATCH, "values": str(values) if writes else ""}
    try:
        events, recorder = _run(experiment, document, devices, told, degree)
    except InputError as error:
        if any(finding.rule == "nan" for finding in error.findings) and document.get("nan") is None:
            document["nan"] = "pass"
            try:
                events, recorder = _run(experiment, document, devices, told, degree)
            except InputError as again:
                return again
            found.notes.append("operations put out NaNs: measured with nan: pass")
        else:
            for path in values.iterdir() if writes else ():
                path.unlink()
            return error
    found.elements = found.elements or dict(recorder.elements)
    found.ranks[degree] = devices[:degree]
    _note_shared_cores(experiment.pool, devices[:degree], degree, found)
    _keep_times(events, degree, wide, found)
    _keep_memory(events, degree, wide, found)
    return None


def _run(
    experiment: Experiment, document: dict[str, Any], devices: list[str], told: dict[str, Any], degree: int
) -> tuple[list[Mapping[str, Any]], Recorder]:
    folder = experiment.folder
    system = layout.write_system(experiment.system, document, folder / f"degree-{degree}.json", told)
    recorder = Recorder(keep_values=False)
    with SystemProcess(
        system, list(experiment.items[0]), devices=devices, config=experiment.config,
        log_path=folder / f"degree-{degree}.log",
    ) as process:  # fmt: skip
        process.wait_ready(experiment.timeout_s)
        until_ns = monotonic_ns() + FOREVER_NS
        one_by_one(process, experiment.items, None, experiment.timeout_s, until_ns, recorder)
        # To be weighed, each op is loaded once more.
        startup_s = ((process.ready_ns or process.started_ns) - process.started_ns) / 1e9
        num_ops = len({operation.op for operation in experiment.built.flat.operations})
        drain(process, recorder, experiment.timeout_s + 2 * num_ops * startup_s)
        return list(process.events), recorder


def _note_shared_cores(pool: Pool, ranks: Sequence[str], degree: int, found: Measured) -> None:
    if len(set(ranks)) < len(ranks):
        found.notes.append(
            f"degree {degree}: {len(ranks)} ranks shared {len(set(ranks))} devices ({listed(dict.fromkeys(ranks))}), "
            "so these times are longer than those of as many devices"
        )


def _keep_times(
    events: Sequence[Mapping[str, Any]], degree: int, wide: Sequence[Part], found: Measured
) -> None:  # fmt: skip
    sampled = times.operation_times(event for event in events if event["kind"] == "span")
    last = max((one.batch for many in sampled.values() for one in many), default=0)
    for path in (path for part in wide for path in part.paths):
        # The last batch was weighed.
        timed = [one for one in sampled.get(path, ()) if one.batch < last]
        cut, is_steady = times.warmup_end([one.time_ms for one in timed]) if timed else (0, True)
        clean = [one.time_ms for one in timed[cut:] if one.disturbed_by is None]
        if len(clean) < MIN_SAMPLES:
            other = next((one.disturbed_by for one in timed if one.disturbed_by), None)
            why = f"'{other}' works on its devices at the same time" if other else "it ran for too few batches"
            found.notes.append(
                f"operation '{path}', degree {degree}: not measured, because {why}"
                + ("; measure with one device more" if other else "")
            )
            continue
        if not is_steady:
            found.notes.append(
                f"operation '{path}', degree {degree}: its times did not become steady in {len(timed)} batches; raise "
                "'count', or see what else uses the device"
            )
        found.samples[path][degree] = [round(value, 4) for value in clean]
        found.warmup[path][degree] = cut
    found.notes += list(dict.fromkeys(str(event["text"]) for event in events if event["kind"] == "note"))


def _keep_memory(
    events: Sequence[Mapping[str, Any]], degree: int, wide: Sequence[Part], found: Measured
) -> None:  # fmt: skip
    measured = {path for part in wide for path in part.paths}
    for event in events:
        name = str(event.get("name"))
        if event["kind"] == "memory" and name in measured:
            found.memory[name][degree] = max(found.memory[name].get(degree, 0), int(event["total_bytes"]))
        elif event["kind"] == "held":
            found.states[name] = max(found.states.get(name, 0), int(event["num_bytes"]))
        elif event["kind"] == "file":
            found.files.add(name)


def _document(
    experiment: Experiment, found: Measured, transfer: dict[str, Any], degrees: Sequence[int]
) -> dict[str, Any]:
    pool, built = experiment.pool, experiment.built
    order = [operation.path for operation in built.flat.operations if found.samples.get(operation.path)]
    names = list(dict.fromkeys(name for ranks in found.ranks.values() for name in ranks))
    item = experiment.items[0]
    key = make_key(
        built, files=found.files, kind=pool.kind, devices=names, config=experiment.config, degrees=degrees,
        inputs={name: profile_transfer.signature(value) for name, value in item.items()},
    )  # fmt: skip
    document: dict[str, Any] = {
        "schema": "flashrt/profile@1",
        "device": pool.kind,
        "program": _program_name(experiment.system, built),
        "operations": {
            path: _by_degree({d: round(float(np.median(s)), 4) for d, s in found.samples[path].items()})
            for path in order
        },
        "transfer": transfer,
        "memory": {path: _by_degree(found.memory[path]) for path in order if found.memory.get(path)},
        "states": dict(sorted(found.states.items())),
        "provenance": "measured",
        "samples": {path: _by_degree(found.samples[path]) for path in order},
        "spread": {
            path: _by_degree({d: round(times.relative_spread(s), 4) for d, s in found.samples[path].items()})
            for path in order
        },
        "warmup": {path: _by_degree(found.warmup[path]) for path in order},
        "ranks": _by_degree(found.ranks),
        "methods": {
            "time": times.TIME_METHOD,
            "warmup": times.WARMUP_RULE,
            "memory": METHOD_GPU if pool.kind in layout.GPU_KINDS else METHOD_CPU,
            "transfer": profile_transfer.METHOD,
        },
        "notes": list(dict.fromkeys(found.notes)),
        "key": key,
    }
    frames = sum(found.elements.values()) / len(experiment.items) if len(found.elements) == 1 else None
    if frames is not None and frames == int(frames):
        document["frames_per_batch"] = int(frames)
    return document


def _program_name(system: System, built: BuiltProgram) -> str:
    return system.reference if os.path.sep in system.reference or "." in system.reference else built.id


def _by_degree(found: Mapping[int, Any]) -> dict[str, Any]:
    return {str(degree): found[degree] for degree in sorted(found)}
