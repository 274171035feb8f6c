"""A setting: what a candidate chooses (blocks, degrees, streamed edges), as a deployment and as figures."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from flashrt.analysis.constraints import Variation
from flashrt.analysis.cost import DeploymentCost, evaluate_placement
from flashrt.analysis.deployment import DEPLOYMENT_SCHEMA, read_deployment
from flashrt.analysis.ordering import DEFAULT_WORK
from flashrt.analysis.profile import Profile
from flashrt.analysis.structure import find_units, streaming_labels
from flashrt.errors import InputError
from flashrt.ir import BuiltProgram

CANDIDATE_NODE_LIMIT = 200


@dataclass(frozen=True)
class Setting:
    """Choices that a deployment document can hold, and those that need a changed program (`variation`)."""

    blocks: frozenset[frozenset[str]]
    """Operations in one block share its devices; each block has devices of its own."""
    degrees: tuple[tuple[str, int], ...] = ()
    """Operation -> degree, where it is not the least that the operation allows."""
    streamed: frozenset[str] = frozenset()
    """Streaming edges that are run chunk by chunk; the program's other streaming edges are run whole."""
    variation: Variation = field(default_factory=Variation)


def baseline_setting(built: BuiltProgram) -> Setting:
    """Return what candidates are compared with: all operations on one block, one after the other, nothing streamed."""
    return Setting(frozenset({frozenset(operation.path for operation in built.flat.operations)}))


def merge_settings(a: Setting, b: Setting) -> Setting | None:
    """Return both choices at once, or None where they contradict each other."""
    degrees = dict(a.degrees)
    for path, degree in b.degrees:
        if degrees.setdefault(path, degree) != degree:
            return None
    blocks = frozenset(common for x in a.blocks for y in b.blocks if (common := x & y))
    variation = Variation(
        a.variation.asynchronous | b.variation.asynchronous,
        a.variation.double_buffered | b.variation.double_buffered,
    )
    return Setting(blocks, tuple(sorted(degrees.items())), a.streamed | b.streamed, variation)


def deployment_of(built: BuiltProgram, setting: Setting) -> dict[str, Any]:
    """Return the deployment document of a setting, devices numbered from 0; opaque nodes get devices of their own."""
    wanted = dict(setting.degrees)
    operations = built.flat.operations
    first = {operation.path: index for index, operation in enumerate(operations)}
    groups: dict[tuple[int, ...], str] = {}
    group_of: dict[str, str] = {}

    def assign(path: str, devices: tuple[int, ...]) -> None:
        group_of[path] = groups.setdefault(devices, _group_name(len(groups)))

    base = 0
    for block in sorted(setting.blocks, key=lambda block: min(first[path] for path in block)):
        members = [operation for operation in operations if operation.path in block]
        degrees = {o.path: wanted.get(o.path, min(o.degrees)) for o in members if not o.opaque}
        for path, degree in degrees.items():
            assign(path, tuple(range(base, base + degree)))
        base += max(degrees.values(), default=0)
        for operation in members:
            if operation.opaque:
                assign(operation.path, tuple(range(base, base + operation.degrees[0])))
                base += operation.degrees[0]
    place: dict[str, str] = {}
    for unit in find_units(built):
        used = {group_of[path] for path in unit.operations}
        if len(used) == 1 and unit.pattern:
            place[unit.pattern] = used.pop()
        else:
            place.update({path: group_of[path] for path in unit.operations})
    document: dict[str, Any] = {
        "schema": DEPLOYMENT_SCHEMA,
        "program": built.id,
        "groups": {name: list(devices) for devices, name in groups.items()},
        "place": place,
    }
    whole = sorted(streaming_labels(built) - setting.streamed)
    return {**document, "blocking": whole} if whole else document


def _group_name(index: int) -> str:
    letters = "abcdefghijklmnopqrstuvwxyz"
    return letters[index] if index < len(letters) else f"g{index}"


def cost_of(built: BuiltProgram, profile: Profile, setting: Setting, work: int = DEFAULT_WORK) -> DeploymentCost:
    """Return the figures of a setting.

    Parameters
    ----------
    work
        What the search for the best order may take; see `evaluate_placement`.

    Raises
    ------
    InputError
        The profile lacks a time that it needs.
    """
    placement = read_deployment(deployment_of(built, setting), built)
    return evaluate_placement(
        built, profile, placement, variation=setting.variation, node_limit=CANDIDATE_NODE_LIMIT, work=work
    )


def expectation(cost: DeploymentCost, baseline: DeploymentCost | None) -> dict[str, Any]:
    """Return the expected figures of a candidate and their ratios to the baseline's."""
    figures: dict[str, Any] = {
        "period_ms": cost.t_min_ms,
        "latency_ms": cost.latency_ms,
        "first_output_ms": cost.first_output_ms,
        "outputs": cost.outputs,
        "d0_ms": cost.d0_ms,
        "fps": cost.fps,
        "num_devices": cost.num_devices,
        "t_min_recurrence_ms": cost.t_min_recurrence_ms,
        "order_proof": cost.order_proof,
        "provenance": cost.provenance,
    }
    if baseline is not None:
        figures["versus_baseline"] = {
            "period": _ratio(cost.t_min_ms, baseline.t_min_ms),
            "latency": _ratio(cost.latency_ms, baseline.latency_ms),
            "first_output": _ratio(cost.first_output_ms, baseline.first_output_ms),
            "d0": _ratio(cost.d0_ms, baseline.d0_ms),
            "fps": _ratio(baseline.t_min_ms, cost.t_min_ms),
        }
    return figures


def _ratio(value: float | None, base: float | None) -> float | None:
    return round(value / base, 6) if value is not None and base else None


def try_cost(built: BuiltProgram, profile: Profile, setting: Setting, work: int = DEFAULT_WORK) -> DeploymentCost | str:
    """Return the figures of a setting, or a sentence that says what the profile lacks."""
    try:
        return cost_of(built, profile, setting, work)
    except InputError as error:
        return "not predicted: " + "; ".join(f"{finding.where}: {finding.message}" for finding in error.findings[:3])


def share_of(cost: DeploymentCost, operations: Mapping[str, Any] | frozenset[str]) -> tuple[float, float]:
    """Return how many milliseconds of the critical cycle fall on `operations`, and the cycle's whole length."""
    own = sum(step.time_ms for step in cost.critical_cycle if step.operation in operations)
    return own, sum(step.time_ms + step.lag_ms for step in cost.critical_cycle)
