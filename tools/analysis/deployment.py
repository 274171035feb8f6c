"""The deployment document: which device group runs which operation, and in which order."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, FiniteFloat

from flashrt.analysis.patterns import best_patterns, matches
from flashrt.analysis.profile import number_keys
from flashrt.errors import Finding, InputError, listed, nearest
from flashrt.ir import BuiltProgram, Frozen, dump, find_operations, read_document, validate

DEPLOYMENT_SCHEMA = "flashrt/deployment@1"
RETRY = "correct the deployment and call again"


def _spell_numbers(value: Any) -> Any:
    """Device numbers as keys may be written as text (JSON has no other keys)."""
    return number_keys(value) if isinstance(value, Mapping) else value


Device = Annotated[int, Field(ge=0, strict=True)]


class Deployment(Frozen):
    """A placement of a program's operations on devices."""

    schema_: Literal["flashrt/deployment@1"] = Field(default="flashrt/deployment@1", alias="schema")
    program: str | None = None
    """The program: a path or an id."""
    devices: Literal["cpu", "cuda", "rocm", "emulated"] | None = None
    """Kind of device."""
    groups: dict[str, tuple[Device, ...]]
    """Group name -> device numbers within the lease; groups may share devices."""
    place: dict[str, str]
    """Operation path, glob or node -> group; the path itself wins, then the longest pattern."""
    order: Annotated[dict[Device, tuple[str, ...]], BeforeValidator(_spell_numbers)] | None = None
    """Device number -> its operations in the order in which it runs them for a batch; absent: the best is found."""
    period_ms: Annotated[FiniteFloat, Field(gt=0, le=1e9)] | None = None
    """The batch period T for which d0 is wanted, in milliseconds; absent: the smallest sustainable one."""
    blocking: tuple[str, ...] = ()
    """Edges (``dit.latents -> vae.latents``) that stream in the program but are run whole here."""
    interleave: bool | None = None
    """Whether a device takes turns between operations that stream to each other; absent: whichever is better."""
    stagger: dict[str, Annotated[int, Field(ge=0, le=1000)]] = Field(default_factory=dict)
    """Node or operation -> n: in its cycle j a device runs it for batch j - n, so that batches interleave."""
    profile: str | None = None
    """Emulated devices: the profile whose times they take; a path or an id."""
    config: dict[str, Any] = Field(default_factory=dict)
    """Options handed to the operations."""
    asynchronous: tuple[str, ...] = ()
    """Event-driven nodes that run beside the batches: their consumers take the last value instead of waiting."""
    tiles: dict[str, Annotated[int, Field(ge=1)]] = Field(default_factory=dict)
    """Node -> into how many tiles its ranks cut its value; one of the node's `tiles`, and its group's size."""
    nan: Literal["refuse", "pass"] = "refuse"
    """What happens when an operation puts out a NaN: the run ends and names it, or the value travels on."""
    operation_timeout_s: Annotated[FiniteFloat, Field(gt=0, le=86400)] = 300.0
    """How long one call of an operation may take before the run ends and names it, in seconds."""
    in_flight: Annotated[int, Field(ge=1, le=1000)] | None = None
    """How many batches may be in flight; absent: as many as fill every group."""
    transport: Literal["auto", "shared_memory", "iceoryx2"] = "auto"
    """What carries values between processes of one host."""
    spin_us: Annotated[FiniteFloat, Field(ge=0, le=1e6)] = 0.0
    """How long a worker looks for its next value before it sleeps, in µs; takes a whole core while it does."""
    cluster: Literal["ray"] | None = None
    """Where the workers run: absent, on this host; ``ray``, on the nodes of a Ray cluster."""


@dataclass(frozen=True)
class Placement:
    """A deployment resolved against a program: the devices of every operation, and the order where one is given."""

    document: Deployment
    devices: dict[str, tuple[int, ...]]
    """Operation path -> its group's devices, rank 0 first."""
    order: dict[int, tuple[str, ...]]
    """Device -> operation paths, for the devices whose order the document gives."""
    asynchronous: frozenset[str] = frozenset()
    """Operations whose consumers take their last value."""
    stagger: dict[str, int] = field(default_factory=dict)
    """Operation -> by how many batches its device runs it later than its cycle; those at 0 are left out."""

    @property
    def num_devices(self) -> int:
        """How many devices are used."""
        return len({device for devices in self.devices.values() for device in devices})

    @property
    def by_device(self) -> dict[int, tuple[str, ...]]:
        """Device -> the operations that it runs, in the program's order."""
        found: dict[int, list[str]] = {}
        for path, devices in self.devices.items():
            for device in devices:
                found.setdefault(device, []).append(path)
        return {device: tuple(found[device]) for device in sorted(found)}

    def shares_resource(self, source: str, target: str) -> bool:
        """Return whether a value of `source` is already where `target` needs it, so that its lag is zero.

        All ranks of a group compute the value, so any part of the group has it.
        """
        return set(self.devices[target]) <= set(self.devices[source])


def read_deployment(source: Path | Mapping[str, Any] | Deployment, built: BuiltProgram) -> Placement:
    """Read a deployment of `built` and resolve its patterns.

    Raises
    ------
    InputError
        With every finding: unknown groups and operations, operations placed nowhere or twice, degrees that a node
        does not allow, orders that do not fit.
    """
    noun = "deployment"
    if isinstance(source, Deployment):
        document = source
    else:
        raw = source
        if isinstance(source, Path):
            noun = f"deployment '{source.name}'"
            raw = read_document(source, retry=RETRY)
        assert not isinstance(raw, Path)
        document = validate(Deployment, raw, noun=noun, retry=RETRY)
    findings = [*_check_program(document, built, noun), *_check_groups(document, noun)]
    devices, placing = _resolve_places(document, built, noun)
    findings += placing
    tiled, tiling = _resolve_tiles(document, built, devices, noun)
    findings += tiling
    findings += _check_degrees(document, built, devices, noun, tiled)
    order, ordering = _resolve_order(document, built, devices, noun)
    findings += ordering
    findings += _check_blocking(document, built, noun)
    asynchronous, events = _resolve_asynchronous(document, built, devices, noun)
    findings += events
    stagger, staggering = _resolve_stagger(document, built, devices, noun)
    findings += staggering
    if findings:
        raise InputError(findings)
    return Placement(document, devices, order, asynchronous, stagger)


def with_order(placement: Placement, order: Mapping[int, tuple[str, ...]], *, interleave: bool | None) -> Deployment:
    """Return the placement's document with the order (device -> operation paths) that was found."""
    return placement.document.model_copy(update={"order": dict(order), "interleave": interleave})


def deployment_document(deployment: Deployment) -> dict[str, Any]:
    """Return the document as it would be written, keys as text so that JSON can hold it."""
    return dump(deployment)


def _check_program(document: Deployment, built: BuiltProgram, noun: str) -> list[Finding]:
    named = document.program
    if named is None or not named.startswith("prog-") or named == built.id:
        return []
    return [
        Finding(f"{noun}, key 'program'", f"'{built.id}', the program that was given", f"'{named}'",
                "give the program that the deployment is for, or write the deployment anew", rule="other-program")
    ]  # fmt: skip


def _check_groups(document: Deployment, noun: str) -> list[Finding]:
    findings = []
    for name, devices in document.groups.items():
        where = f"{noun}, groups, '{name}'"
        repeated = sorted({device for device in devices if devices.count(device) > 1})
        if repeated:
            findings.append(
                Finding(where, "every device number once", f"{listed(repeated)} twice", RETRY, rule="device-twice")
            )
        if not devices:
            findings.append(Finding(where, "at least one device number", "none", RETRY, rule="empty-group"))
    for pattern, group in document.place.items():
        if group not in document.groups:
            findings.append(
                Finding(f"{noun}, place, '{pattern}'", f"a group: {listed(document.groups)}", f"'{group}'", RETRY,
                        rule="unknown-group", nearest=nearest(group, document.groups))
            )  # fmt: skip
    return findings


def _resolve_places(
    document: Deployment, built: BuiltProgram, noun: str
) -> tuple[dict[str, tuple[int, ...]], list[Finding]]:
    findings: list[Finding] = []
    devices: dict[str, tuple[int, ...]] = {}
    paths = [operation.path for operation in built.flat.operations]
    for pattern in document.place:
        if pattern not in built.flat.by_path and not any(matches(pattern, path) for path in paths):
            findings.append(
                Finding(f"{noun}, place, '{pattern}'", f"an operation path or glob; there are {listed(paths)}",
                        "no operation of this program", RETRY, rule="unknown-operation",
                        nearest=nearest(pattern, paths))
            )  # fmt: skip
    for path in paths:
        patterns = best_patterns(document.place, path)
        groups = {document.place[pattern] for pattern in patterns}
        where = f"{noun}, operation '{path}'"
        if not groups:
            findings.append(
                Finding(where, f"a group: {listed(document.groups)}", "placed nowhere",
                        f"add it under 'place'; {RETRY}", rule="not-placed")
            )  # fmt: skip
        elif len(groups) > 1:
            findings.append(
                Finding(where, "one group", f"{listed(patterns)}, equally specific, name {listed(sorted(groups))}",
                        f"name the operation by its path; {RETRY}", rule="placed-twice")
            )  # fmt: skip
        elif (group := groups.pop()) in document.groups:
            devices[path] = document.groups[group]
    return devices, findings


def _check_degrees(
    document: Deployment,
    built: BuiltProgram,
    devices: Mapping[str, tuple[int, ...]],
    noun: str,
    tiled: Mapping[str, int],
) -> list[Finding]:
    findings = []
    for operation in built.flat.operations:
        degree = len(devices.get(operation.path, ()))
        if not degree or degree in operation.degrees or operation.path in tiled:
            continue
        where = f"{noun}, operation '{operation.path}'"
        got = f"a group of {degree}: {list(devices[operation.path])}"
        if operation.opaque:
            findings.append(
                Finding(where, f"{operation.degrees[0]} devices, which the opaque node declares and keeps", got, RETRY,
                        rule="opaque-devices")
            )  # fmt: skip
        else:
            findings.append(
                Finding(where, f"a group of as many devices as one of its degrees {listed(operation.degrees)}", got,
                        f"change the group, or the node's degrees if the op can do it; {RETRY}", rule="degree")
            )  # fmt: skip
    return findings


def _resolve_order(
    document: Deployment, built: BuiltProgram, devices: Mapping[str, tuple[int, ...]], noun: str
) -> tuple[dict[int, tuple[str, ...]], list[Finding]]:
    findings: list[Finding] = []
    order: dict[int, tuple[str, ...]] = {}
    used = {device for group in devices.values() for device in group}
    for device, names in (document.order or {}).items():
        where = f"{noun}, order, device {device}"
        expected = [path for path, group in devices.items() if device in group]
        if device not in used:
            findings.append(
                Finding(where, f"a device that runs an operation: {listed(sorted(used))}", "none is placed on it",
                        RETRY, rule="unknown-device")
            )  # fmt: skip
            continue
        listing: list[str] = []
        for name in names:
            found = find_operations(built.flat, name)
            listing += found or [name]
        for name in dict.fromkeys(listing):
            if name not in devices and name not in built.flat.by_path:
                findings.append(
                    Finding(where, f"operations of the device: {listed(expected)}", f"'{name}', which does not exist",
                            RETRY, rule="unknown-operation", nearest=nearest(name, expected))
                )  # fmt: skip
            elif name in devices and name not in expected:
                findings.append(
                    Finding(where, f"operations of the device: {listed(expected)}",
                            f"'{name}', placed on devices {list(devices[name])}", f"remove it from the order; {RETRY}",
                            rule="not-on-device")
                )  # fmt: skip
            if listing.count(name) > 1:
                findings.append(
                    Finding(where, "every operation once", f"'{name}' {listing.count(name)} times", RETRY,
                            rule="order-repeats")
                )  # fmt: skip
        missing = [path for path in expected if path not in listing]
        if missing:
            findings.append(
                Finding(where, f"all operations of the device: {listed(expected)}", f"{listed(missing)} missing", RETRY,
                        rule="order-omits")
            )  # fmt: skip
        order[device] = tuple(listing)
    return order, findings


def _check_blocking(document: Deployment, built: BuiltProgram, noun: str) -> list[Finding]:
    streaming = [
        edge.label for graph in built.program.graphs.values() for edge in graph.edges if edge.mode == "streaming"
    ]
    return [
        Finding(f"{noun}, blocking, '{label}'", f"a streaming edge of the program: {listed(streaming)}", f"'{label}'",
                RETRY, rule="unknown-edge", nearest=nearest(label, streaming))
        for label in document.blocking
        if label not in streaming
    ]  # fmt: skip


def _resolve_tiles(
    document: Deployment, built: BuiltProgram, devices: Mapping[str, tuple[int, ...]], noun: str
) -> tuple[dict[str, int], list[Finding]]:
    """Return operation -> number of tiles."""
    findings: list[Finding] = []
    tiled: dict[str, int] = {}
    for name, count in document.tiles.items():
        where = f"{noun}, tiles, '{name}'"
        found, unknown = _find_named(built, name, where)
        findings += unknown
        for path in found:
            allowed = built.flat.by_path[path].tiles
            if count not in allowed:
                findings.append(
                    Finding(where, f"one of the tile counts that the node declares: {listed(allowed) or 'none'}",
                            f"{count}", f"change it, or the node's 'tiles' if the op can do it; {RETRY}",
                            rule="tile-count")
                )  # fmt: skip
            elif path in devices and len(devices[path]) != count:
                findings.append(
                    Finding(where, f"a group of {count} devices, one a tile", f"{list(devices[path])}",
                            f"change the group or the count; {RETRY}", rule="tile-group")
                )  # fmt: skip
            tiled[path] = count
    for operation in built.flat.operations:
        alike = [
            path for path, count in tiled.items()
            if built.flat.by_path[path].op == operation.op and devices.get(path) == devices.get(operation.path)
            and count != tiled.get(operation.path)
        ]  # fmt: skip
        if alike:
            findings.append(
                Finding(f"{noun}, tiles", "operations with the same op in one group cut alike",
                        f"'{operation.path}' and '{alike[0]}' are not", f"name both, or place them apart; {RETRY}",
                        rule="tile-mixed")
            )  # fmt: skip
            break
    return tiled, findings


def _resolve_asynchronous(
    document: Deployment, built: BuiltProgram, devices: Mapping[str, tuple[int, ...]], noun: str
) -> tuple[frozenset[str], list[Finding]]:
    """Return the operations that run beside the batches."""
    findings: list[Finding] = []
    asynchronous: set[str] = set()
    for name in document.asynchronous:
        where = f"{noun}, asynchronous, '{name}'"
        found, unknown = _find_named(built, name, where)
        findings += unknown
        asynchronous |= set(found)
        findings += [
            Finding(where, "a node with event_driven: true", f"'{path}' has not", f"declare it, or remove it; {RETRY}",
                    rule="not-event-driven")
            for path in found
            if not built.flat.by_path[path].event_driven
        ]  # fmt: skip
    for path in sorted(asynchronous & devices.keys()):
        beside = [
            other for other in devices if other not in asynchronous and set(devices[other]) & set(devices[path])
        ]  # fmt: skip
        if beside:
            findings.append(
                Finding(f"{noun}, asynchronous, '{path}'", "devices of its own",
                        f"it shares them with {listed(beside)}",
                        f"place it in a group of its own; {RETRY}", rule="asynchronous-shares")
            )  # fmt: skip
    return frozenset(asynchronous), findings


def _resolve_stagger(
    document: Deployment, built: BuiltProgram, devices: Mapping[str, tuple[int, ...]], noun: str
) -> tuple[dict[str, int], list[Finding]]:
    """Return operation -> its stagger, where that is not 0; the operation's own name wins, then the longest."""
    findings: list[Finding] = []
    for name in document.stagger:
        findings += _find_named(built, name, f"{noun}, stagger, '{name}'")[1]
    stagger: dict[str, int] = {}
    for path in (operation.path for operation in built.flat.operations):
        values = {document.stagger[pattern] for pattern in best_patterns(document.stagger, path)}
        if len(values) > 1:
            findings.append(
                Finding(f"{noun}, stagger, operation '{path}'", "one number of batches",
                        f"{listed(best_patterns(document.stagger, path))}, equally specific, differ",
                        f"name the operation by its path; {RETRY}", rule="staggered-twice")
            )  # fmt: skip
        elif values and (number := values.pop()):
            stagger[path] = number
    if stagger:
        ordered = document.order or {}
        for device in sorted({device for group in devices.values() for device in group} - set(ordered)):
            mine = [path for path, group in devices.items() if device in group]
            if len({stagger.get(path, 0) for path in mine}) > 1:
                findings.append(
                    Finding(f"{noun}, order, device {device}", "an order, because its operations have unlike staggers",
                            f"none for {listed(mine)}", f"write it, or take away 'stagger'; {RETRY}",
                            rule="stagger-order")
                )  # fmt: skip
    return stagger, findings


def _find_named(built: BuiltProgram, name: str, where: str) -> tuple[list[str], list[Finding]]:
    found = find_operations(built.flat, name)
    if found:
        return list(found), []
    paths = list(built.flat.by_path)
    return [], [
        Finding(where, f"a node or operation path; there are {listed(paths)}", "no operation of this program", RETRY,
                rule="unknown-operation", nearest=nearest(name, paths))
    ]  # fmt: skip
