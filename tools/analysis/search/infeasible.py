"""Why nothing meets a request, and the least change after which something would."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from decimal import ROUND_CEILING, ROUND_FLOOR, Context, Decimal
from fractions import Fraction
from typing import Any

from flashrt.analysis.cost import to_ms
from flashrt.analysis.profile import TICKS_PER_MS, Profile
from flashrt.analysis.search.arrays import LATENCY, RATE
from flashrt.analysis.search.layout import Found
from flashrt.analysis.search.model import build_models
from flashrt.analysis.search.request import Pins, SearchRequest
from flashrt.analysis.search.resolve import MAX_DEVICES, RETRY, Ask, gigabytes, needed_bytes, resolve_request
from flashrt.analysis.search.solve import Solver
from flashrt.errors import Finding, InputError
from flashrt.ir import BuiltProgram

MAX_MORE_DEVICES = 16
TRIAL_S = 2.0
"""How long one trial of a changed request may take."""
TRIED = {"pins-contradict", "too-few-devices", "memory", "no-common-degree", "island"}
"""Contradictions for which it is tried what would help; others say it themselves."""
COUNTED = {
    "too-few-devices": f"more devices alone do not help: see the other findings, {RETRY}",
    "memory": f"more memory alone does not help: see the other findings, {RETRY}",
}
"""What there can be too little of -> what to say where more of it is not enough."""


def explain_infeasible(
    built: BuiltProgram, profile: Profile, request: SearchRequest, ask: Ask, *, proved: bool
) -> InputError:
    """Return the error for a request that nothing meets, with a finding for each change that helps on its own.

    Every change is tried: more devices, more memory, one pin less, a looser limit.
    """
    if not proved:
        return InputError(
            Finding("search, time_limit_s", "time enough to find one deployment",
                    f"none was found in {request.time_limit_s:g} s, and that there is none is not proved either",
                    f"give more time, or pin more, {RETRY}", rule="time-limit")
        )  # fmt: skip
    plain = replace(request, max_period_ms=None, min_fps=None, max_latency_ms=None, objective="front")
    limited = ask.max_period is not None or ask.max_latency is not None
    if limited and find_any(built, profile, plain) is not None:
        return InputError(_limit_findings(built, profile, request, plain, ask))
    return InputError(_helping_changes(built, profile, plain) or [_several_changes()])


def explain_contradiction(
    built: BuiltProgram, profile: Profile, request: SearchRequest, refused: InputError
) -> InputError:
    """Return the error of a request that contradicts itself, with a finding for each change that helps on its own.

    What one operation or group lacks is a lower bound of what the request lacks: the devices or the memory to give are
    named as they were tried.
    """
    if any(finding.rule not in TRIED for finding in refused.findings):
        return refused
    plain = replace(request, max_period_ms=None, min_fps=None, max_latency_ms=None, objective="front")
    changes = _helping_changes(built, profile, plain)
    tried = {change.rule: change for change in changes if change.rule in COUNTED}
    findings = [
        replace(finding, fix=tried[finding.rule].fix if finding.rule in tried else COUNTED[finding.rule])
        if finding.rule in COUNTED
        else finding
        for finding in refused.findings
    ]
    said = {finding.rule for finding in findings} & set(tried)
    added = [change for change in changes if change.rule not in said]
    return InputError([*findings, *(added if changes else [_several_changes()])])


def _helping_changes(built: BuiltProgram, profile: Profile, request: SearchRequest) -> list[Finding]:
    return [
        *_device_findings(built, profile, request), *_memory_findings(built, profile, request),
        *_pin_findings(built, profile, request), *_state_findings(built, profile, request),
    ]  # fmt: skip


def _several_changes() -> Finding:
    return Finding(
        "search", "a deployment that meets devices, memory, islands and pins", "there is none",
        "more devices, more memory, one pin less or split states do not help alone: change several, " + RETRY,
        rule="infeasible",
    )  # fmt: skip


def find_any(
    built: BuiltProgram, profile: Profile, request: SearchRequest, objective: int | None = None
) -> Found | None:
    """Return some deployment that meets a request (the best by `objective`, if given), or None."""
    try:
        ask = resolve_request(built, profile, request)
    except InputError:
        return None
    models = build_models(built, profile, ask)
    solver = Solver(
        built, profile, ask, models, RATE if objective is None else objective, nested=request.overlap == "aligned",
        first_only=objective is None,
    )  # fmt: skip
    found = solver.solve(TRIAL_S).found
    if not found:
        return None
    return min(found, key=lambda one: (one.latency, one.period) if objective == LATENCY else (one.period, one.latency))


def _more_devices(built: BuiltProgram, profile: Profile, request: SearchRequest) -> tuple[int, str] | None:
    """Return the least number of further devices that helps, and where they have to be if there are islands."""
    for more in range(1, MAX_MORE_DEVICES + 1):
        number = request.num_devices + more
        if number > MAX_DEVICES:
            break
        for islands, where in _grown(request.islands, tuple(range(request.num_devices, number))):
            if find_any(built, profile, replace(request, num_devices=number, islands=islands)) is not None:
                return more, where
    return None


def _grown(islands: Sequence[Sequence[int]], devices: tuple[int, ...]) -> list[tuple[Sequence[Sequence[int]], str]]:
    """Return the islands with further devices: as an island of their own, and in the largest."""
    if not islands:
        return [((), "")]
    largest = max(islands, key=len)
    grown = [(*island, *devices) if island is largest else island for island in islands]
    return [((*islands, devices), " in an island of their own"), (grown, f" in island {list(largest)}")]


def _give(more: tuple[int, str]) -> str:
    return f"give {more[0]} more device{'s' if more[0] > 1 else ''}{more[1]}"


def _device_findings(built: BuiltProgram, profile: Profile, request: SearchRequest) -> list[Finding]:
    more = _more_devices(built, profile, request)
    if more is None:
        return []
    return [
        Finding("search, num_devices", f"at least {request.num_devices + more[0]} devices", f"{request.num_devices}",
                f"{_give(more)}, {RETRY}", rule="too-few-devices")
    ]  # fmt: skip


def _memory_findings(built: BuiltProgram, profile: Profile, request: SearchRequest) -> list[Finding]:
    unlimited = replace(request, memory_bytes=None)
    if request.memory_bytes is None or find_any(built, profile, unlimited) is None:
        return []
    ask = resolve_request(built, profile, unlimited)
    low = request.memory_bytes
    high = needed_bytes(ask, {path: max(by, key=lambda degree: by[degree]) for path, by in ask.memory.items()})
    step = max(1, low // 1000)
    while high - low > step:
        middle = (low + high) // 2
        if find_any(built, profile, replace(request, memory_bytes=middle)) is not None:
            high = middle
        else:
            low = middle
    percent = -(-(high - request.memory_bytes) * 100 // max(request.memory_bytes, 1))
    return [
        Finding("search, memory_bytes", f"{gigabytes(high)} on a device", f"{gigabytes(request.memory_bytes)}",
                f"give devices with {percent} % more memory, {RETRY}", rule="memory")
    ]  # fmt: skip


def _state_findings(built: BuiltProgram, profile: Profile, request: SearchRequest) -> list[Finding]:
    if request.split_states or find_any(built, profile, replace(request, split_states=True)) is None:
        return []
    return [
        Finding("search, split_states", "true, so that operations that share a state may be in different groups",
                "false", f"set it, for a plan that the runtime refuses, or give each a state of its own, {RETRY}",
                rule="states-together")
    ]  # fmt: skip


def _pin_findings(built: BuiltProgram, profile: Profile, request: SearchRequest) -> list[Finding]:
    findings = []
    for name, fewer in _without_each_pin(request.pins):
        if find_any(built, profile, replace(request, pins=fewer)) is not None:
            findings.append(
                Finding(f"search, pins, {name}", "a pin that leaves a deployment possible", "none with it",
                        f"drop this pin, {RETRY}", rule="pins-contradict")
            )  # fmt: skip
    return findings


def _without_each_pin(pins: Pins) -> list[tuple[str, Pins]]:
    found = [
        (f"place '{key}'", replace(pins, place={k: v for k, v in pins.place.items() if k != key})) for key in pins.place
    ]
    found += [
        (f"degree '{key}'", replace(pins, degree={k: v for k, v in pins.degree.items() if k != key}))
        for key in pins.degree
    ]
    for kind in ("together", "apart"):
        lists = list(getattr(pins, kind))
        for index, names in enumerate(lists):
            left: dict[str, Any] = {kind: lists[:index] + lists[index + 1 :]}
            found.append((f"{kind} {list(names)}", replace(pins, **left)))
    return found


def _limit_findings(
    built: BuiltProgram, profile: Profile, request: SearchRequest, plain: SearchRequest, ask: Ask
) -> list[Finding]:
    findings = []
    wanted = replace(request, objective="front")
    more = _more_devices(built, profile, wanted)
    help_devices = "" if more is None else f"{_give(more)}, or "
    num_devices = f"{request.num_devices} device{'s' if request.num_devices > 1 else ''}"
    if ask.max_period is not None:
        best = find_any(built, profile, replace(plain, max_latency_ms=request.max_latency_ms), RATE)
        if best is not None:
            frames = profile.frames_per_batch
            rate = ""
            if frames and best.period:
                fps = Fraction(1000 * TICKS_PER_MS * frames) / best.period
                rate = f" ({_rounded(fps, ROUND_FLOOR)} elements a second)"
            within = f" within {request.max_latency_ms:g} ms latency" if request.max_latency_ms is not None else ""
            findings.append(
                Finding("search, wanted period", f"at most {to_ms(ask.max_period):g} ms",
                        f"{_at_least(best.period)} ms{rate} at best{within} on {num_devices}",
                        f"{help_devices}settle for that period, {RETRY}", rule="rate-not-reached")
            )  # fmt: skip
    if ask.max_latency is not None:
        without = replace(plain, max_period_ms=request.max_period_ms, min_fps=request.min_fps)
        best = find_any(built, profile, without, LATENCY)
        if best is not None:
            within = f" at a period of at most {to_ms(ask.max_period):g} ms" if ask.max_period is not None else ""
            findings.append(
                Finding("search, max_latency_ms", f"at most {to_ms(ask.max_latency):g} ms",
                        f"{_at_least(best.latency)} ms at best{within} on {num_devices}",
                        f"{help_devices}settle for that latency, {RETRY}", rule="latency-not-reached")
            )  # fmt: skip
    if not findings:
        fastest, soonest = find_any(built, profile, plain, RATE), find_any(built, profile, plain, LATENCY)
        assert fastest is not None, "without limits there is a deployment"
        assert soonest is not None, "without limits there is a deployment"
        findings.append(
            Finding("search, limits", f"a deployment on {num_devices} that keeps both",
                    f"alone at best {_at_least(fastest.period)} ms period, and {_at_least(soonest.latency)} ms latency",
                    f"{help_devices}loosen a limit, {RETRY}", rule="limits-not-reached")
        )  # fmt: skip
    return findings


def _at_least(ticks: Fraction) -> str:
    """Return ticks as milliseconds, rounded up, so that a limit of just what is said can be kept."""
    return _rounded(ticks / TICKS_PER_MS, ROUND_CEILING)


def _rounded(value: Fraction, rounding: str) -> str:
    exact = Context(prec=40).divide(Decimal(value.numerator), Decimal(value.denominator))
    return f"{float(Context(prec=6, rounding=rounding).plus(exact)):g}"
