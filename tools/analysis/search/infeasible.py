"""Why nothing meets a request, and the least change after which something would."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from flashrt.analysis.cost import to_ms
from flashrt.analysis.profile import Profile
from flashrt.analysis.search.arrays import LATENCY, RATE
from flashrt.analysis.search.layout import Found
from flashrt.analysis.search.model import build_models
from flashrt.analysis.search.request import Pins, SearchRequest
from flashrt.analysis.search.resolve import RETRY, Ask, gigabytes, needed_bytes, resolve_request
from flashrt.analysis.search.solve import Solver
from flashrt.errors import Finding, InputError
from flashrt.ir import BuiltProgram

MAX_MORE_DEVICES = 16
TRIAL_S = 2.0
"""How long one trial of a changed request may take."""


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
    findings = [*_device_findings(built, profile, plain), *_memory_findings(built, profile, plain, ask)]
    findings += _pin_findings(built, profile, plain)
    if not findings:
        findings = [
            Finding("search", "a deployment that meets devices, memory, islands and pins", "there is none",
                    "more devices, more memory or one pin less do not help alone: change several, " + RETRY,
                    rule="infeasible")
        ]  # fmt: skip
    return InputError(findings)


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


def _more_devices(built: BuiltProgram, profile: Profile, request: SearchRequest) -> int | None:
    """Return the least number of further devices (in one island of their own, where there are islands) that helps."""
    for more in range(1, MAX_MORE_DEVICES + 1):
        number = request.num_devices + more
        if number > 62:
            break
        islands = request.islands
        if islands:
            islands = (*islands, tuple(range(request.num_devices, number)))
        if find_any(built, profile, replace(request, num_devices=number, islands=islands)) is not None:
            return more
    return None


def _device_findings(built: BuiltProgram, profile: Profile, request: SearchRequest) -> list[Finding]:
    more = _more_devices(built, profile, request)
    if more is None:
        return []
    return [
        Finding("search, num_devices", f"at least {request.num_devices + more} devices", f"{request.num_devices}",
                f"give {more} more device{'s' if more > 1 else ''}"
                + (" in an island of their own" if request.islands else "") + f", {RETRY}", rule="too-few-devices")
    ]  # fmt: skip


def _memory_findings(built: BuiltProgram, profile: Profile, request: SearchRequest, ask: Ask) -> list[Finding]:
    if request.memory_bytes is None or find_any(built, profile, replace(request, memory_bytes=None)) is None:
        return []
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
    help_devices = f"give {more} more device{'s' if more != 1 else ''}, or " if more is not None else ""
    if ask.max_period is not None:
        best = find_any(built, profile, replace(plain, max_latency_ms=request.max_latency_ms), RATE)
        if best is not None:
            period = to_ms(best.period)
            frames = profile.frames_per_batch
            rate = f" ({1000 * frames / period:.4g} frames a second)" if frames and period else ""
            within = f" within {request.max_latency_ms:g} ms latency" if request.max_latency_ms is not None else ""
            findings.append(
                Finding("search, wanted period", f"at most {to_ms(ask.max_period):g} ms",
                        f"{period:g} ms{rate} at best{within} on {request.num_devices} devices",
                        f"{help_devices}settle for that period, {RETRY}", rule="rate-not-reached")
            )  # fmt: skip
    if ask.max_latency is not None:
        without = replace(plain, max_period_ms=request.max_period_ms, min_fps=request.min_fps)
        best = find_any(built, profile, without, LATENCY)
        if best is not None:
            within = f" at a period of at most {to_ms(ask.max_period):g} ms" if ask.max_period is not None else ""
            findings.append(
                Finding("search, max_latency_ms", f"at most {to_ms(ask.max_latency):g} ms",
                        f"{to_ms(best.latency):g} ms at best{within} on {request.num_devices} devices",
                        f"{help_devices}settle for that latency, {RETRY}", rule="latency-not-reached")
            )  # fmt: skip
    if not findings:
        fastest, soonest = find_any(built, profile, plain, RATE), find_any(built, profile, plain, LATENCY)
        assert fastest is not None, "without limits there is a deployment"
        assert soonest is not None, "without limits there is a deployment"
        findings.append(
            Finding("search, limits", f"a deployment on {request.num_devices} devices that keeps both",
                    f"at best {to_ms(fastest.period):g} ms period, and {to_ms(soonest.latency):g} ms latency, alone",
                    f"{help_devices}loosen a limit, {RETRY}", rule="limits-not-reached")
        )  # fmt: skip
    return findings
