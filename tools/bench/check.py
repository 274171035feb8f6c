"""The equivalence check: drive baseline and candidate with the same hidden inputs and compare every element."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from flashrt.bench.drive import new_seed, run_all
from flashrt.bench.equality import OutputEquality, Tolerance, compare_output, stream_length
from flashrt.bench.guards import guard_records, judge_guards, private_files, reference_files
from flashrt.bench.process import SystemProcess
from flashrt.bench.record import SUFFIX, read_inputs
from flashrt.bench.systems import System, changed_files, remove_bytecode
from flashrt.errors import input_error, listed

MIN_BATCHES = 8

Report = Callable[[float, str], None]


def ignore_progress(share: float, message: str) -> None:
    """Take progress and do nothing with it."""


@dataclass(frozen=True)
class CheckSettings:
    """How an equivalence check runs."""

    num_batches: int = MIN_BATCHES
    runs: int = 1
    """How often the candidate is checked, each time with new hidden inputs."""
    tolerance: Tolerance = field(default_factory=Tolerance)
    devices: tuple[str, ...] = ()
    config: Mapping[str, Any] | None = None
    timeout_s: float = 120
    measure_noise: bool = True
    """Whether the baseline runs twice, for the noise floor."""
    known_noise: Mapping[str, float] | None = None
    """Noise floor by output, from an earlier check of the same baseline: it is not measured again then."""


@dataclass(frozen=True)
class Streams:
    """What one system wrote: output -> values in order."""

    values: Mapping[str, Sequence[Any]]
    num_elements: Mapping[str, int]
    startup_ms: float
    guards: Mapping[str, Any] = field(default_factory=dict)
    seen: Sequence[str] = ()
    """What the guards saw it do."""


def collect(
    system: System,
    items: Sequence[Mapping[str, Any]],
    settings: CheckSettings,
    log_path: Path,
    baseline: System | None = None,
    workspace: Path | None = None,
) -> Streams:
    """Run a system once over `items` and return what it wrote; a candidate, kept from reading `baseline` and store."""
    # Byte code beside the system is in no digest, and Python would run it instead of the source.
    remove_bytecode(system)
    with SystemProcess(
        system, list(items[0]), devices=settings.devices, config=settings.config, log_path=log_path,
        hidden=reference_files(system, baseline), private=private_files(workspace) if workspace else (),
    ) as process:  # fmt: skip
        process.wait_ready(settings.timeout_s)
        recorder = run_all(process, items, settings.timeout_s)
        startup_ms = ((process.ready_ns or process.started_ns) - process.started_ns) / 1e6
        events = list(process.events)
    return Streams(recorder.values(), dict(recorder.elements), startup_ms, guard_records(events), judge_guards(events))


def check_equivalence(
    baseline: System,
    candidate: System,
    inputs: str,
    workspace: Path,
    folder: Path,
    settings: CheckSettings,
    progress: Report = ignore_progress,
) -> dict[str, Any]:
    """Check a candidate against a baseline over the same hidden inputs.

    The candidate runs first, in its own process, so that nothing of the baseline is there to be read.

    Parameters
    ----------
    inputs
        Reference of an inputs function, or of a recording.
    folder
        Where logs are kept.

    Returns
    -------
    The result of ``equivalence_check``: `equivalent`, per output the counts and errors, reasons.

    Raises
    ------
    InputError
        A system cannot be started, fails, hangs or returns early; names it.
    """
    outputs: dict[str, OutputEquality] = {}
    reasons: list[str] = []
    owed: dict[str, float] = {}
    startup: dict[str, float] = {}
    guards: Mapping[str, Any] = {}
    num_items = settings.num_batches
    for run in range(settings.runs):
        share = run / settings.runs
        seed = new_seed()
        items = read_inputs(inputs, workspace, seed, settings.num_batches)
        num_items = len(items)
        progress(share, f"candidate over {num_items} batches")
        got = collect(candidate, items, settings, folder / f"process-{3 * run}.log", baseline, workspace)
        refuse_changes(baseline, candidate)
        progress(share + 0.4 / settings.runs, "baseline")
        want = collect(baseline, items, settings, folder / f"process-{3 * run + 1}.log")
        noise = None
        if settings.measure_noise and settings.known_noise is None and run == 0:
            progress(share + 0.7 / settings.runs, "baseline again, for the noise floor")
            noise = collect(baseline, items, settings, folder / f"process-{3 * run + 2}.log")
        guards = got.guards
        reasons += got.seen
        startup = {"baseline": want.startup_ms, "candidate": got.startup_ms}
        owed = {name: count / num_items for name, count in want.num_elements.items()}
        for name in dict.fromkeys((*want.values, *got.values)):
            result = compare_output(
                name, want.values.get(name, []), got.values.get(name, []), settings.tolerance, num_items,
                noise.values.get(name, []) if noise else None, (settings.known_noise or {}).get(name),
            )  # fmt: skip
            if name not in got.values:
                result = _absent(name, "the candidate never writes it", want.values[name])
            elif name not in want.values:
                result = _absent(name, "the baseline has no such output", got.values[name])
            if name not in outputs or (outputs[name].equal and not result.equal):
                outputs[name] = result
        if not want.values:
            reasons.append("the baseline writes nothing, so nothing can be proved")
    refuse_changes(baseline, candidate)
    reasons = list(dict.fromkeys(reasons))
    reasons += [reason for result in outputs.values() for reason in result.reasons]
    empty = [name for name, result in outputs.items() if result.equal and result.total == 0]
    reasons += [f"output '{name}' has no element, so nothing is proved" for name in empty]
    warnings = _warnings(outputs, settings, num_items, inputs)
    return {
        "equivalent": bool(outputs) and not reasons and all(result.equal for result in outputs.values()),
        "tier": settings.tolerance.tier,
        "tolerance": asdict(settings.tolerance),
        "outputs": {name: result.as_dict() for name, result in outputs.items()},
        "reasons": reasons,
        "warnings": warnings,
        "num_batches": num_items,
        "runs": settings.runs,
        "elements_per_batch": owed,
        "startup_ms": startup,
        "guards": dict(guards),
        "baseline": baseline.as_record(),
        "candidate": candidate.as_record(),
        "inputs": inputs,
        "devices": list(settings.devices),
    }


def refuse_changes(*systems: System) -> None:
    """Refuse to go on when the files of a system are not those that it was found with.

    Raises
    ------
    InputError
        Names the files: the candidate, or somebody else, has changed them since the check began.
    """
    moved = [f"{system.reference}: {change}" for system in systems for change in changed_files(system)]
    if moved:
        raise input_error(
            "equivalence check", "files that stay as they are while they are checked", listed(moved, 5),
            "undo the change, let nothing write there, and call again", rule="files-changed",
        )  # fmt: skip


def _absent(name: str, why: str, values: Sequence[Any]) -> OutputEquality:
    total = sum(stream_length(value) for value in values)
    return OutputEquality(name, False, total, total, None, None, None, None, [f"output '{name}': {why}"])


def _warnings(outputs: Mapping[str, OutputEquality], settings: CheckSettings, num_items: int, inputs: str) -> list[str]:
    found = []
    if num_items < MIN_BATCHES:
        found.append(f"{num_items} batches; state drift shows over at least {MIN_BATCHES}")
    if inputs.endswith(SUFFIX):
        found.append("recorded inputs are known in advance; an inputs function gives hidden ones")
    for name, result in outputs.items():
        if result.noise_floor and settings.tolerance.tier == "bit":
            found.append(
                f"output '{name}': the baseline differs from itself by {result.noise_floor:.3g} in another process; "
                "bit equality cannot hold: make it deterministic, or ask for tolerance 'numeric'"
            )
    return found
