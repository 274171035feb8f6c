"""The search as its callers see it: a request in, points with documents, proofs and explanations out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction

from flashrt.analysis.cost import evaluate_placement, to_ms
from flashrt.analysis.deployment import deployment_document, read_deployment
from flashrt.analysis.profile import Profile
from flashrt.analysis.search.explain import describe_cycle, describe_device, describe_path
from flashrt.analysis.search.infeasible import explain_contradiction, explain_infeasible
from flashrt.analysis.search.layout import Found, write_document
from flashrt.analysis.search.model import build_models
from flashrt.analysis.search.request import SearchRequest
from flashrt.analysis.search.resolve import Ask, resolve_request
from flashrt.analysis.search.result import LeftOut, Point, Proof, SearchResult
from flashrt.analysis.search.sensitivity import find_sensitivity
from flashrt.analysis.search.solve import OBJECTIVES, Solution, Solver
from flashrt.analysis.search.thin import scope_of, thin_front, untried_edges, untried_note
from flashrt.analysis.search.warm import warm_search
from flashrt.errors import Finding, InputError, InternalFaultError
from flashrt.ir import BuiltProgram


def search_deployments(built: BuiltProgram, profile: Profile, request: SearchRequest) -> SearchResult:
    """Return the best deployments of a program, with proofs.

    Raises
    ------
    InputError
        The request contradicts itself, the program or the profile, or no deployment meets it; with every finding and
        the least change that would help.
    """
    try:
        ask = resolve_request(built, profile, request)
    except InputError as error:
        raise explain_contradiction(built, profile, request, error) from None
    warm_search()
    solution, ask = solve_request(built, profile, request, ask)
    untried = untried_edges(built)
    if not solution.found:
        refused = explain_infeasible(built, profile, request, ask, proved=solution.tolerance is not None)
        raise _with_scope(refused, untried)
    found, left_out = _wanted(solution.found, request)
    richer = _one_more(built, profile, request, solution)
    scope = scope_of(untried)
    gaps = {id(one): gap for one, gap in zip(solution.found, solution.gaps, strict=True)}
    points = tuple(
        _point(built, profile, request, ask, one, _proof(gaps[id(one)], one, scope), richer) for one in found
    )
    return SearchResult(
        points, _proof(solution.tolerance, None, scope), solution.num_nodes, solution.seconds, profile.provenance,
        tuple(left_out), (untried_note(untried),) if untried else (),
    )  # fmt: skip


def _with_scope(refused: InputError, untried: Sequence[str]) -> InputError:
    """Return the refusal with what it does not cover: a limit might be kept by running other edges whole."""
    limits = {"rate-not-reached", "latency-not-reached", "limits-not-reached"}
    if not untried or not limits & {finding.rule for finding in refused.findings}:
        return refused
    note = Finding(
        "search, streaming edges", "every edge that might be better whole tried so", untried_note(untried),
        "change the edges' mode where that may help, then call again", rule="not-all-searched", severity="info",
    )  # fmt: skip
    return InputError([*refused.findings, note])


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
            gaps: list[Fraction | None] = solution.gaps if proved else [None] * len(solution.found)
            return Solution(solution.found, tolerance, gaps, nodes, seconds), smaller
        proved = proved and solution.tolerance == 0
    raise AssertionError("the last number of devices returns")


def _could_fit(ask: Ask, number: int) -> bool:
    largest = max(sum(device < number for device in island) for island in ask.islands)
    return all(degrees[0] <= largest for degrees in ask.degrees.values())


def _solve(built: BuiltProgram, profile: Profile, request: SearchRequest, ask: Ask, limit_s: float) -> Solution:
    models = build_models(built, profile, ask)
    solver = Solver(built, profile, ask, models, OBJECTIVES[request.objective], nested=request.overlap == "aligned")
    return solver.solve(limit_s)


def _wanted(found: Sequence[Found], request: SearchRequest) -> tuple[list[Found], list[LeftOut]]:
    if request.objective in ("rate", "devices"):
        return [min(found, key=lambda one: (one.period, one.latency))], []
    if request.objective == "latency":
        return [min(found, key=lambda one: (one.latency, one.period))], []
    return thin_front(found, request.min_gain)


def _proof(tolerance: Fraction | None, found: Found | None, scope: str | None) -> Proof:
    status = "partial" if scope is not None else "gap"
    if tolerance is None:
        return Proof(status, scope=scope)
    if tolerance == 0:
        return Proof("optimal") if scope is None else Proof(status, 0.0, scope=scope)
    bound = None
    if found is not None:
        bound = {
            "period_ms": to_ms(found.period / (1 + tolerance)),
            "latency_ms": to_ms(found.latency / (1 + tolerance)),
        }
    return Proof(status, float(tolerance), bound, scope)


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
    """Return what the runtime refuses of a point; it obeys staggers, orders, and edges that are run whole."""
    notes = []
    groups = sorted(set(found.placement.devices.values()))
    overlapping = [(a, b) for a in groups for b in groups if a < b and set(a) & set(b)]
    if overlapping:
        a, b = overlapping[0]
        notes.append(
            f"groups {list(a)} and {list(b)} share devices: the runtime runs groups that are equal or have none in "
            "common; plan with overlap: disjoint for deployments that it runs"
        )
    if request.split_states:
        for operation in built.flat.operations:
            for instance in operation.writes.values():
                users = [o.path for o in built.flat.operations if instance in o.accesses]
                if len({found.placement.devices[path] for path in users}) > 1:
                    notes.append(
                        f"state '{instance}' is written and used in several groups: in the runtime a state lives in "
                        "one; plan with split_states: false for deployments that it runs"
                    )
    return tuple(dict.fromkeys(notes))
