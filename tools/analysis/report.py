"""The result of the tool ``analyze``: everything that the document, a profile and a deployment tell."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from flashrt.analysis.candidates import find_candidates
from flashrt.analysis.claims import NOT_AUDITED, Audited
from flashrt.analysis.cost import DeploymentCost, evaluate_placement
from flashrt.analysis.deployment import Deployment, deployment_document, read_deployment
from flashrt.analysis.parallel import find_parallel, find_streaming
from flashrt.analysis.profile import Profile, read_profile
from flashrt.analysis.profile_key import Use, check_profile_key
from flashrt.errors import Finding, InputError, input_error
from flashrt.ir import BuiltProgram, find_dependencies, reduce_dependencies


def analyze_program(
    built: BuiltProgram,
    profile: Path | Mapping[str, Any] | Profile | None = None,
    deployment: Path | Mapping[str, Any] | Deployment | None = None,
    audited: Audited = NOT_AUDITED,
) -> dict[str, Any]:
    """Return the result of ``analyze``, ready for JSON.

    Parameters
    ----------
    profile
        Adds expected figures to the candidates.
    deployment
        With a profile: adds the exact figures of this deployment, with its critical cycle and path.
    audited
        What a valid audit of the program says of its claims; each candidate names those that it rests on.

    Raises
    ------
    InputError
        With every finding of both documents; a measured profile that is not of the program as it is now is one.
    """
    findings: list[Finding] = []
    read, placement = None, None
    try:
        read = read_profile(profile, built) if profile is not None else None
    except InputError as error:
        findings += error.findings
    try:
        placement = read_deployment(deployment, built) if deployment is not None else None
    except InputError as error:
        findings += error.findings
    if read is not None:
        document = placement.document if placement is not None else None
        use = Use(document.devices, config=document.config) if document is not None else None
        findings += check_profile_key(
            read, built, use, f"profile '{profile.name}'" if isinstance(profile, Path) else "profile"
        )
    if findings:
        raise InputError(findings)
    if placement is not None and read is None:
        raise input_error(
            "analyze, argument 'deployment'", "a profile with it: a deployment alone has no times", "no profile",
            "give 'profile', or measure one with profile_measure", rule="no-profile",
        )  # fmt: skip
    cost = evaluate_placement(built, read, placement) if read is not None and placement is not None else None
    listing = find_candidates(built, read, cost, audited)
    result: dict[str, Any] = {
        "program": built.id,
        "dependencies": [edge.as_dict() for edge in sorted_dependencies(built)],
        "parallel": find_parallel(built),
        "streaming": find_streaming(built),
        "candidates": [candidate.as_dict() for candidate in listing.candidates],
        "compositions_left_out": listing.num_left_out,
        "audit": audited.id,
        "baseline": {"expected": listing.baseline, "deployment": listing.baseline_deployment},
    }
    if read is not None:
        result["provenance"] = read.provenance
    if cost is not None:
        result |= cost_record(cost)
    return result


def sorted_dependencies(built: BuiltProgram) -> list[Any]:
    """Return the dependencies without implied ones, in the program's order."""
    place = {operation.path: index for index, operation in enumerate(built.flat.operations)}
    edges = reduce_dependencies(find_dependencies(built.flat))
    return sorted(edges, key=lambda e: (e.lam, place[e.source], place[e.target], e.state or ""))


def cost_record(cost: DeploymentCost) -> dict[str, Any]:
    """Return a deployment's figures as ``analyze`` reports them."""
    return {
        "t_min_ms": cost.t_min_ms,
        "t_min_resource_ms": cost.t_min_resource_ms,
        "t_min_recurrence_ms": cost.t_min_recurrence_ms,
        "period_ms": cost.period_ms,
        "sustainable": cost.sustainable,
        "d0_ms": cost.d0_ms,
        "d0_bound_ms": cost.d0_bound_ms,
        "latency_ms": cost.latency_ms,
        "first_output_ms": cost.first_output_ms,
        "outputs": cost.outputs,
        "fps": cost.fps,
        "frames_per_batch": cost.frames_per_batch,
        "num_devices": cost.num_devices,
        "critical_cycle": [step.as_dict() for step in cost.critical_cycle],
        "critical_path": [step.as_dict() for step in cost.critical_path],
        "latency_path": [step.as_dict() for step in cost.latency_path],
        "latest_frame": cost.latest_frame,
        "order": {str(device): list(operations) for device, operations in cost.order.items()},
        "interleave": cost.interleave,
        "order_proof": cost.order_proof,
        "provenance": cost.provenance,
        "deployment": deployment_document(cost.deployment),
    }
