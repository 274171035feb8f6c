"""A request resolved against a program and a profile: every contradiction is a finding, all at once."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from itertools import combinations

from flashrt.analysis.patterns import best_patterns
from flashrt.analysis.profile import TICKS_PER_MS, Profile, to_ticks
from flashrt.analysis.search.request import SearchRequest
from flashrt.errors import Finding, InputError, listed, nearest
from flashrt.ir import BuiltProgram, find_operations, state_accesses

MAX_DEVICES = 62
RETRY = "then call again"


@dataclass
class Ask:
    """What the search has to respect; operations by path, in the program's order."""

    num_devices: int
    max_stagger: int
    islands: tuple[tuple[int, ...], ...]
    capacity: int | None
    """Bytes of a device."""
    degrees: dict[str, tuple[int, ...]] = field(default_factory=dict)
    """Degrees that an operation may have: the node's, the profile's, the islands', the pins'."""
    memory: dict[str, dict[int, int]] = field(default_factory=dict)
    """Operation -> degree -> bytes on each device."""
    state_bytes: dict[str, int] = field(default_factory=dict)
    """State instance -> bytes on each device of the operations that use it."""
    state_users: dict[str, tuple[str, ...]] = field(default_factory=dict)
    pinned: dict[str, tuple[int, ...]] = field(default_factory=dict)
    kinship: dict[str, int] = field(default_factory=dict)
    """Operations with one number share a group."""
    reasons: dict[int, list[str]] = field(default_factory=dict)
    """Number of a kinship -> why: states and pins."""
    apart: set[tuple[str, str]] = field(default_factory=set)
    max_period: Fraction | None = None
    """In ticks."""
    max_latency: Fraction | None = None
    """In ticks."""


def resolve_request(built: BuiltProgram, profile: Profile, request: SearchRequest) -> Ask:
    """Return what the request means for this program.

    Raises
    ------
    InputError
        With every finding: unknown names, contradicting pins, operations without a usable degree, and what alone is
        too large for a device or an island.
    """
    findings: list[Finding] = []
    islands = _resolve_islands(request, findings)
    ask = Ask(request.num_devices, request.max_stagger, islands, request.memory_bytes)
    _resolve_limits(profile, request, ask, findings)
    _resolve_degrees(built, profile, request, ask, findings)
    _resolve_states(built, request, ask)
    _resolve_pins(built, request, ask, findings)
    if not findings:
        findings += _find_misfits(built, ask)
    if findings:
        raise InputError(findings)
    return ask


def _resolve_islands(request: SearchRequest, findings: list[Finding]) -> tuple[tuple[int, ...], ...]:
    where = "search"
    if not 1 <= request.num_devices <= MAX_DEVICES:
        findings.append(
            Finding(f"{where}, num_devices", f"a number from 1 to {MAX_DEVICES}", f"{request.num_devices}",
                    f"change it, {RETRY}", rule="num-devices")
        )  # fmt: skip
        return ()
    devices = range(request.num_devices)
    if request.max_stagger < 0 or request.max_stagger > 16:
        findings.append(
            Finding(f"{where}, max_stagger", "0 to 16 batches", f"{request.max_stagger}", f"change it, {RETRY}",
                    rule="max-stagger")
        )  # fmt: skip
    seen: set[int] = set()
    islands = []
    for island in request.islands:
        twice = sorted(seen & set(island)) or sorted({device for device in island if list(island).count(device) > 1})
        beyond = sorted(set(island) - set(devices))
        if twice:
            findings.append(
                Finding(f"{where}, islands", "every device in one island", f"{listed(twice)} in two",
                        f"take it out of one, {RETRY}", rule="island-twice")
            )  # fmt: skip
        if beyond and min(beyond) < 0:
            findings.append(
                Finding(f"{where}, islands", f"devices 0 to {request.num_devices - 1}", listed(beyond),
                        f"change the number, {RETRY}", rule="unknown-device")
            )  # fmt: skip
        seen |= set(island)
        islands.append(tuple(sorted(set(island) & set(devices))))
    if not islands:
        return (tuple(devices),)
    return tuple(island for island in (*islands, *((device,) for device in devices if device not in seen)) if island)


def _resolve_limits(profile: Profile, request: SearchRequest, ask: Ask, findings: list[Finding]) -> None:
    periods = [] if request.max_period_ms is None else [Fraction(to_ticks(request.max_period_ms))]
    if request.min_fps is not None:
        if profile.frames_per_batch is None:
            findings.append(
                Finding("search, min_fps", "a profile with frames_per_batch", "none is declared",
                        f"declare it, or give max_period_ms instead, {RETRY}", rule="no-frames")
            )  # fmt: skip
        elif request.min_fps > 0:
            periods.append(Fraction(1000 * TICKS_PER_MS * profile.frames_per_batch) / Fraction(str(request.min_fps)))
    if not 0 <= request.min_gain < 1:
        findings.append(
            Finding("search, min_gain", "a share from 0 to below 1", f"{request.min_gain}", f"change it, {RETRY}",
                    rule="min-gain")
        )  # fmt: skip
    for name in ("max_period_ms", "min_fps", "max_latency_ms", "time_limit_s"):
        value = getattr(request, name)
        if value is not None and not value > 0:
            findings.append(
                Finding(f"search, {name}", "a number above 0", f"{value}", f"change it, {RETRY}", rule="limit")
            )
    ask.max_period = min(periods, default=None)
    ask.max_latency = None if request.max_latency_ms is None else Fraction(to_ticks(request.max_latency_ms))
    if request.objective == "devices" and ask.max_period is None and ask.max_latency is None:
        findings.append(
            Finding("search, objective 'devices'", "a wanted period, rate or latency", "none",
                    f"give max_period_ms, min_fps or max_latency_ms, {RETRY}", rule="no-limit")
        )  # fmt: skip


def _resolve_degrees(
    built: BuiltProgram, profile: Profile, request: SearchRequest, ask: Ask, findings: list[Finding]
) -> None:
    for operation in built.flat.operations:
        path = operation.path
        found = {degree: profile.find_time(path, degree) for degree in operation.degrees}
        usable = tuple(sorted(degree for degree, time in found.items() if not isinstance(time, Finding)))
        if not usable:
            findings += [time for time in found.values() if isinstance(time, Finding)][:1]
        wanted = {request.pins.degree[pattern] for pattern in best_patterns(request.pins.degree, path)}
        where = f"search, pins, degree of '{path}'"
        if len(wanted) > 1:
            findings.append(
                Finding(where, "one degree", f"{listed(sorted(wanted))} from equally specific names",
                        f"name the operation by its path, {RETRY}", rule="pins-contradict")
            )  # fmt: skip
        elif wanted and usable:
            kept = tuple(degree for degree in usable if degree in wanted)
            if not kept:
                findings.append(
                    Finding(where, f"a degree that the node allows and the profile has: {listed(usable)}",
                            f"{wanted.pop()}", f"take one of these, or measure that one with profile_measure, {RETRY}",
                            rule="opaque-devices" if operation.opaque else "degree")
                )  # fmt: skip
            usable = kept or usable
        ask.degrees[path] = usable
        ask.memory[path] = {}
        for degree in usable:
            try:
                ask.memory[path][degree] = profile.memory_bytes(path, degree)
            except InputError as error:
                findings += error.findings
    for pattern in request.pins.degree:
        findings += _unknown(built, pattern, "search, pins, degree")


def _resolve_states(built: BuiltProgram, request: SearchRequest, ask: Ask) -> None:
    ask.kinship = {path: number for number, path in enumerate(ask.degrees)}
    ask.reasons = {number: [] for number in ask.kinship.values()}
    for instance, accesses in state_accesses(built.flat).items():
        size = built.program.states[instance.split("[", 1)[0]].bytes
        users = tuple(dict.fromkeys(path for path, _ in accesses))
        if size:
            ask.state_bytes[instance], ask.state_users[instance] = size, users
        if not request.split_states and any("w" in how for _, how in accesses):
            _join(ask, users, f"state '{instance}'")


def _join(ask: Ask, paths: Sequence[str], reason: str) -> None:
    numbers = sorted({ask.kinship[path] for path in paths})
    if len(numbers) < 2:
        return
    for path, number in ask.kinship.items():
        if number in numbers:
            ask.kinship[path] = numbers[0]
    ask.reasons[numbers[0]] = [*(text for number in numbers for text in ask.reasons.pop(number)), reason]


def _unknown(built: BuiltProgram, pattern: str, where: str) -> list[Finding]:
    if find_operations(built.flat, pattern):
        return []
    paths = list(built.flat.by_path)
    return [
        Finding(f"{where}, '{pattern}'", f"an operation path, glob or node; there are {listed(paths)}",
                "no operation of this program", f"correct it, {RETRY}", rule="unknown-operation",
                nearest=nearest(pattern, paths))
    ]  # fmt: skip


def _resolve_pins(built: BuiltProgram, request: SearchRequest, ask: Ask, findings: list[Finding]) -> None:
    pins = request.pins
    for pattern in (*pins.place, *(name for names in (*pins.together, *pins.apart) for name in names)):
        findings += _unknown(built, pattern, "search, pins")
    for names in pins.together:
        joined = [path for name in names for path in find_operations(built.flat, name)]
        _join(ask, joined, f"pin together {listed(names)}")
    for names in pins.apart:
        for first, second in combinations([find_operations(built.flat, name) for name in names], 2):
            ask.apart |= {(a, b) for a in first for b in second}
    for path in ask.degrees:
        groups: set[tuple[int, ...]] = {
            tuple(sorted(set(pins.place[pattern]))) for pattern in best_patterns(pins.place, path)
        }
        where = f"search, pins, place of '{path}'"
        if len(groups) > 1:
            findings.append(
                Finding(where, "one set of devices", f"{listed(sorted(groups))} from equally specific names",
                        f"name the operation by its path, {RETRY}", rule="pins-contradict")
            )  # fmt: skip
        elif groups:
            ask.pinned[path] = groups.pop()
            findings += _check_pinned(request, ask, path, where)
    for one, another in combinations(sorted(set(ask.pinned.values())), 2):
        a, b = set(one), set(another)
        if a & b and not (request.overlap == "aligned" and (a <= b or b <= a)):
            findings.append(
                Finding("search, pins, place", "groups that are equal or share no device"
                        + (", or one in the other" if request.overlap == "aligned" else ""),
                        f"{list(one)} and {list(another)}", f"change one, {RETRY}", rule="pins-contradict")
            )  # fmt: skip


def _check_pinned(request: SearchRequest, ask: Ask, path: str, where: str) -> Iterable[Finding]:
    devices = ask.pinned[path]
    beyond = [device for device in devices if not 0 <= device < ask.num_devices]
    if not devices or beyond:
        missing = max(devices, default=0) + 1 - ask.num_devices
        yield Finding(
            where, f"devices 0 to {ask.num_devices - 1}", listed(devices),
            f"change the pin, or give {missing} more device{'s' if missing > 1 else ''}, {RETRY}",
            rule="unknown-device",
        )  # fmt: skip
        return
    if ask.islands and not any(set(devices) <= set(island) for island in ask.islands):
        yield Finding(
            where, f"devices of one island: {listed(ask.islands)}", f"{list(devices)}",
            f"pin it inside one island, {RETRY}", rule="island",
        )  # fmt: skip
    if ask.degrees[path] and len(devices) not in ask.degrees[path]:
        yield Finding(
            where, f"as many devices as one of its degrees {listed(ask.degrees[path])}", f"{len(devices)}",
            f"pin as many, or measure that degree with profile_measure, {RETRY}", rule="pins-contradict",
        )  # fmt: skip


def _find_misfits(built: BuiltProgram, ask: Ask) -> list[Finding]:
    """Narrow the degrees of operations that share a group, and return what no device or island can hold."""
    findings: list[Finding] = []
    members: dict[int, list[str]] = {}
    for path, number in ask.kinship.items():
        members.setdefault(number, []).append(path)
    for number, paths in members.items():
        reason = f" (by {'; '.join(ask.reasons[number])})" if ask.reasons[number] else ""
        title = f"search, {'operations' if len(paths) > 1 else 'operation'} {listed(paths)}{reason}"
        places = {ask.pinned[path] for path in paths if path in ask.pinned}
        if len(places) > 1:
            findings.append(
                Finding(title, "one place", f"pinned to {listed(sorted(places))}", f"drop one of the pins, {RETRY}",
                        rule="pins-contradict")
            )  # fmt: skip
        contradicting = [pair for pair in sorted(ask.apart) if pair[0] in paths and pair[1] in paths]
        if contradicting:
            findings.append(
                Finding(title, "one group", f"pinned apart: {listed(contradicting[0])}",
                        f"drop the pin 'apart', or what puts them together, {RETRY}", rule="pins-contradict")
            )  # fmt: skip
        common = sorted(set.intersection(*(set(ask.degrees[path]) for path in paths)))
        if places:
            common = [degree for degree in common if degree == len(min(places))]
        if not common:
            has = "; ".join(f"'{path}': {listed(ask.degrees[path])}" for path in paths)
            findings.append(
                Finding(title, "a degree that all have", has,
                        f"measure a common degree with profile_measure, or let them be apart, {RETRY}",
                        rule="no-common-degree")
            )  # fmt: skip
            continue
        findings += _narrow(built, ask, paths, common, title)
        if places:
            for path in paths:
                ask.pinned[path] = min(places)
    for a, b in sorted(ask.apart):
        if set(ask.pinned.get(a, ())) & set(ask.pinned.get(b, ())):
            findings.append(
                Finding(f"search, pins, apart '{a}' and '{b}'", "no common device",
                        f"pinned to {list(ask.pinned[a])} and {list(ask.pinned[b])}", f"change one pin, {RETRY}",
                        rule="pins-contradict")
            )  # fmt: skip
    return findings


def _narrow(
    built: BuiltProgram, ask: Ask, paths: Sequence[str], common: Sequence[int], title: str
) -> Iterable[Finding]:
    largest = max(len(island) for island in ask.islands)
    fitting = [degree for degree in common if degree <= largest]
    if not fitting:
        more = common[0] - largest
        opaque = any(built.flat.by_path[path].opaque for path in paths)
        yield Finding(
            title, f"{common[0]} devices in one island" + (", which the opaque node declares" if opaque else ""),
            f"at most {largest}", f"give {more} more device{'s' if more > 1 else ''} in one island"
            + ("" if opaque else f", or measure a degree of at most {largest} with profile_measure") + f", {RETRY}",
            rule="too-few-devices",
        )  # fmt: skip
        return
    needs = {degree: needed_bytes(ask, dict.fromkeys(paths, degree)) for degree in fitting}
    if ask.capacity is not None and min(needs.values()) > ask.capacity:
        yield memory_finding(title, ask.capacity, min(needs.values()))
        return
    for path in paths:
        ask.degrees[path] = tuple(degree for degree in fitting if ask.capacity is None or needs[degree] <= ask.capacity)


def needed_bytes(ask: Ask, degrees: Mapping[str, int]) -> int:
    """Return what operations at their degrees take on a device that runs them all."""
    total = sum(ask.memory[path][degree] for path, degree in degrees.items())
    return total + sum(ask.state_bytes[state] for state, users in ask.state_users.items() if set(users) & set(degrees))


def memory_finding(where: str, capacity: int, needed: int) -> Finding:
    """Return the finding that says how much memory is missing."""
    percent = -(-(needed - capacity) * 100 // max(capacity, 1))
    return Finding(
        where, f"at most {gigabytes(capacity)} on a device", f"{gigabytes(needed)} at least",
        f"give devices with {percent} % more memory, or measure a degree that takes less on each device, {RETRY}",
        rule="memory",
    )  # fmt: skip


def gigabytes(num_bytes: int) -> str:
    """Return bytes as a person reads them."""
    return f"{num_bytes / 1e9:.3g} GB" if num_bytes >= 10**7 else f"{num_bytes} bytes"
