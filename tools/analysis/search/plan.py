"""The search as its callers see it: a request in, points with documents, proofs and explanations out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any

from flashrt.analysis.cost import DeploymentCost, evaluate_placement, to_ms
from flashrt.analysis.deployment import deployment_document, read_deployment
from flashrt.analysis.profile import Profile
from flashrt.analysis.search.explain import describe_cycle, describe_device, describe_path
from flashrt.analysis.search.infeasible import explain_infeasible
from flashrt.analysis.search.layout import Found, write_document
from flashrt.analysis.search.model import build_models
from flashrt.analysis.search.request import SearchRequest
from flashrt.analysis.search.resolve import Ask, resolve_request
from flashrt.analysis.search.sensitivity import Sensitivity, find_sensitivity
from flashrt.analysis.search.solve import OBJECTIVES, Solution, Solver
from flashrt.errors import InternalFaultError
from flashrt.ir import BuiltProgram


@dataclass(frozen=True)
class Proof:
    """How good a point is known to be."""

    status: str
    """``optimal``: nothing that was asked for is better; ``gap``: the time limit cut the search."""
    gap: float | None = None
    """Nothing is better in period and latency by more than this share; None: nothing is known."""
    bound: dict[str, float] | None = None
    """`period_ms` and `latency_ms` below which nothing can be at once, where there is a gap."""

    def as_dict(self) -> dict[str, Any] | str:
        """Return ``optimal``, or the gap and the bound."""
        return self.status if self.status == "optimal" else {"gap": self.gap, "bound": self.bound}


@dataclass(frozen=True)
class Point:
    """One deployment that was found."""

    period_ms: float
    """Smallest period that it sustains."""
    fps: float | None
    latency_ms: float
    """From a batch being ready to its last output, at that period."""
    first_output_ms: float
    d0_ms: float
    """Action-to-visible latency at that period."""
    num_devices: int
    proof: Proof
    deployment: dict[str, Any]
    """Ready for `read_deployment` and the runtime."""
    runnable: bool
    """Whether the runtime runs it; see `notes` for what it does not."""
    notes: tuple[str, ...]
    period_because: str
    """Which cycle binds the period."""
    latency_because: str
    """Which path binds the latency."""
    one_more_device: str
    """What another device would buy."""
    sensitivity: tuple[Sensitivity, ...]
    cost: DeploymentCost

    def as_dict(self) -> dict[str, Any]:
        """Return a JSON-ready record."""
        return {
            "period_ms": self.period_ms, "fps": self.fps, "latency_ms": self.latency_ms,
            "first_output_ms": self.first_output_ms, "d0_ms": self.d0_ms, "num_devices": self.num_devices,
            "proof": self.proof.as_dict(), "deployment": self.deployment, "runnable": self.runnable,
            "notes": list(self.notes), "period_because": self.period_because,
            "latency_because": self.latency_because, "one_more_device": self.one_more_device,
            "sensitivity": [one.as_dict() for one in self.sensitivity],
            "critical_cycle": [step.as_dict() for step in self.cost.critical_cycle],
            "latency_path": [step.as_dict() for step in self.cost.latency_path],
        }  # fmt: skip


@dataclass(frozen=True)
class SearchResult:
    """What a search found, best period first."""

    points: tuple[Point, ...]
    proof: Proof
    """Of the whole front: that nothing is missing."""
    num_nodes: int
    seconds: float
    provenance: str

    def as_dict(self) -> dict[str, Any]:
        """Return a JSON-ready record."""
        return {
            "points": [point.as_dict() for point in self.points], "proof": self.proof.as_dict(),
            "num_nodes": self.num_nodes, "seconds": round(self.seconds, 3), "provenance": self.provenance,
        }  # fmt: skip


def search_deployments(built: BuiltProgram, profile: Profile, request: SearchRequest) -> SearchResult:
    """Return the best deployments of a program, with proofs.

    Raises
    ------
    InputError
        The request contradicts itself, the program or the profile, or no deployment meets it; with every finding and
        the least change that would help.
    """
    ask = resolve_request(built, profile, request)
    solution, ask = solve_request(built, profile, request, ask)
    if not solution.found:
        raise explain_infeasible(built, profile, request, ask, proved=solution.tolerance is not None)
    found = _wanted(solution.found, request)
    richer = _one_more(built, profile, request, solution)
    points = tuple(_point(built, profile, request, ask, one, _proof(solution.tolerance, one), richer) for one in found)
    return SearchResult(
        points, _proof(solution.tolerance, None), solution.num_nodes, solution.seconds, profile.provenance
    )


def solve_request(built: BuiltProgram, profile: Profile, request: SearchRequest, ask: Ask) -> tuple[Solution, Ask]:
    """Return the solution of a resolved request, and the request as it was solved (with fewer devices, perhaps)."""
    if request.objective != "devices":
        return _solve(built, profile, request, ask, request.time_limit_s), ask
    left, nodes, seconds, proved = request.time_limit_s, 0, 0.0, True
    for number in range(1, request.num_devices + 1):
        fewer = replace(request, num_devices=number)
        if any(max(devices) >= number for devices in ask.pinned.values()):
            continue
        if number < request.num_devices and not _could_fit(ask, number):
            continue
        smaller = resolve_request(built, profile, fewer)
        solution = _solve(built, profile, fewer, smaller, max(left, 0.05))
        left -= solution.seconds
        nodes, seconds = nodes + solution.num_nodes, seconds + solution.seconds
        if solution.found or number == request.num_devices:
            tolerance = solution.tolerance if proved else None
            return Solution(solution.found, tolerance, nodes, seconds), smaller
        proved = proved and solution.tolerance == 0
    raise AssertionError("the last number of devices returns")


def _could_fit(ask: Ask, number: int) -> bool:
    largest = max(sum(device < number for device in island) for island in ask.islands)
    return all(degrees[0] <= largest for degrees in ask.degrees.values())


def _solve(built: BuiltProgram, profile: Profile, request: SearchRequest, ask: Ask, limit_s: float) -> Solution:
    models = build_models(built, profile, ask)
    solver = Solver(built, profile, ask, models, OBJECTIVES[request.objective], nested=request.overlap == "aligned")
    return solver.solve(limit_s)


def _wanted(found: Sequence[Found], request: SearchRequest) -> list[Found]:
    if request.objective in ("rate", "devices"):
        return [min(found, key=lambda one: (one.period, one.latency))]
    if request.objective == "latency":
        return [min(found, key=lambda one: (one.latency, one.period))]
    share = 1 + Fraction(str(request.min_gain))

    def covers(a: Found, b: Found) -> bool:
        return a.period <= b.period * share and a.latency <= b.latency * share

    return [b for b in found if not any(covers(a, b) and not covers(b, a) for a in found)]


def _proof(tolerance: Fraction | None, found: Found | None) -> Proof:
    if tolerance == 0:
        return Proof("optimal")
    if tolerance is None:
        return Proof("gap")
    bound = None
    if found is not None:
        bound = {
            "period_ms": to_ms(found.period / (1 + tolerance)),
            "latency_ms": to_ms(found.latency / (1 + tolerance)),
        }
    return Proof("gap", float(tolerance), bound)


def _one_more(built: BuiltProgram, profile: Profile, request: SearchRequest, solution: Solution) -> Solution | None:
    """Return the front with one more device, where finding it takes about as long as this one did."""
    if request.objective == "devices" or request.islands or solution.seconds > request.time_limit_s / 2:
        return None
    richer = replace(request, num_devices=request.num_devices + 1)
    if richer.num_devices > 62:
        return None
    ask = resolve_request(built, profile, richer)
    found = _solve(built, profile, richer, ask, request.time_limit_s / 2)
    return found if found.tolerance == 0 else None


def _point(
    built: BuiltProgram,
    profile: Profile,
    request: SearchRequest,
    ask: Ask,
    found: Found,
    proof: Proof,
    richer: Solution | None,
) -> Point:
    document = write_document(
        built, found.placement, device_kind=request.device_kind, profile_name=request.profile_name
    )
    placement = read_deployment(document, built)
    cost = evaluate_placement(built, profile, placement)
    figures = cost.ordered.figures
    if (figures.ratio.ratio, figures.latency) != (found.period, found.latency):
        raise InternalFaultError(
            f"the search found a deployment of {to_ms(found.period):g} ms and {to_ms(found.latency):g} ms that the "
            f"cost model gives {cost.t_min_ms:g} ms and {cost.latency_ms:g} ms: {document}"
        )
    notes = _notes(built, request, found)
    assert cost.d0_ms is not None, "the smallest period is sustainable"
    return Point(
        period_ms=cost.t_min_ms,
        fps=cost.fps,
        latency_ms=cost.latency_ms,
        first_output_ms=cost.first_output_ms,
        d0_ms=cost.d0_ms,
        num_devices=cost.num_devices,
        proof=proof,
        deployment=deployment_document(cost.deployment),
        runnable=not notes,
        notes=notes,
        period_because=describe_cycle(cost),
        latency_because=describe_path(cost),
        one_more_device=describe_device(ask.num_devices, found, None if richer is None else richer.found),
        sensitivity=find_sensitivity(cost),
        cost=cost,
    )


def _notes(built: BuiltProgram, request: SearchRequest, found: Found) -> tuple[str, ...]:
    notes = []
    groups = sorted(set(found.placement.devices.values()))
    overlapping = [(a, b) for a in groups for b in groups if a < b and set(a) & set(b)]
    if overlapping:
        a, b = overlapping[0]
        notes.append(f"groups {list(a)} and {list(b)} overlap, which the runtime does not run yet")
    if request.split_states:
        for operation in built.flat.operations:
            for instance in operation.writes.values():
                users = [o.path for o in built.flat.operations if instance in o.accesses]
                if len({found.placement.devices[path] for path in users}) > 1:
                    notes.append(f"state '{instance}' is used in several groups, which the runtime does not run")
    return tuple(dict.fromkeys(notes))
