"""The profile document: milliseconds by operation and degree, transfers between devices, and their provenance.

Nothing is extrapolated: a degree that the profile does not have is an error that names the degrees it has.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, FiniteFloat, model_validator

from flashrt.analysis.patterns import best_patterns, matches
from flashrt.errors import Finding, InputError, input_error, listed, nearest
from flashrt.ir import INPUT, OUTPUT, BuiltProgram, Dataflow, FlatProgram, Frozen, Port, read_document, validate

PROFILE_SCHEMA = "flashrt/profile@1"
TICKS_PER_MS = 10**9
"""Times are integers inside the analysis, so that its results are exact; a tick is a picosecond."""

RETRY = "correct the profile and call again"
Milliseconds = Annotated[FiniteFloat, Field(ge=0, le=1e9)]
Share = Annotated[FiniteFloat, Field(ge=0, le=1e9)]

_BYTES_BY_DTYPE = {
    "bool": 1, "int8": 1, "uint8": 1, "float8_e4m3fn": 1, "float8_e5m2": 1,
    "int16": 2, "uint16": 2, "float16": 2, "bfloat16": 2,
    "int32": 4, "uint32": 4, "float32": 4,
    "int64": 8, "uint64": 8, "float64": 8, "complex64": 8, "complex128": 16,
}  # fmt: skip


def number_keys(value: Mapping[Any, Any]) -> dict[Any, Any]:
    """Return `value` with numbers for the keys that spell one, as JSON has to; refuses two spellings of a number."""
    found: dict[Any, Any] = {}
    spelled: dict[Any, Any] = {}
    for key, item in value.items():
        number = int(key) if str(key).strip().isdecimal() else key
        if number in found:
            raise ValueError(f"every number once, not as {spelled[number]!r} and as {key!r}")
        found[number], spelled[number] = item, key
    return found


def _spell_times(value: Any) -> Any:
    """A plain number is the time at degree 1; degrees may be written as text."""
    if isinstance(value, int | float) and not isinstance(value, bool):
        return {1: value}
    if isinstance(value, Mapping):
        return number_keys(value)
    return value


def _spell_keys(value: Any) -> Any:
    return number_keys(value) if isinstance(value, Mapping) else value


Degree = Annotated[int, Field(ge=1, strict=True)]
TimesByDegree = Annotated[dict[Degree, Milliseconds], BeforeValidator(_spell_times)]
MemoryByDegree = (
    Annotated[int, Field(ge=0)] | Annotated[dict[Degree, Annotated[int, Field(ge=0)]], BeforeValidator(_spell_times)]
)
SamplesByDegree = Annotated[dict[Degree, tuple[Milliseconds, ...]], BeforeValidator(_spell_times)]
ShareByDegree = Annotated[dict[Degree, Share], BeforeValidator(_spell_keys)]
CountByDegree = Annotated[dict[Degree, Annotated[int, Field(ge=0)]], BeforeValidator(_spell_keys)]


class Transfer(Frozen):
    """What it costs to hand a value to other devices."""

    latency_ms: Milliseconds = 0.0
    """Fixed part of every transfer, in milliseconds."""
    gigabytes_per_s: Annotated[FiniteFloat, Field(gt=0)] | None = None
    """Bandwidth, in 10^9 bytes per second; absent: only the latency counts."""
    edges: dict[str, Milliseconds] = Field(default_factory=dict)
    """Measured milliseconds by the two ends: ``dit -> vae``; each a path, a glob or a node."""
    samples: dict[str, tuple[Milliseconds, ...]] | None = None
    """Edge -> the measured milliseconds behind its time."""
    bytes: dict[str, Annotated[int, Field(ge=0)]] | None = None
    """Edge -> bytes of the values that were handed over for one batch."""
    sizes: SamplesByDegree | None = None
    """Bytes -> milliseconds of hand-overs of that size, to which latency and bandwidth were fitted."""
    fit_error: Annotated[FiniteFloat, Field(ge=0)] | None = None
    """By how much the fit is off at the worst of the sizes, relative to the median there."""


class Profile(Frozen):
    """Times of a program's operations on one kind of device, with their provenance."""

    schema_: Literal["flashrt/profile@1"] = Field(default="flashrt/profile@1", alias="schema")
    device: str
    """Kind of device that was measured: ``cpu``, ``emulated``, or a device's own name."""
    frames_per_batch: int | None = Field(default=None, ge=1, le=1_000_000)
    """N: how many frames (displayed chunks) a batch has."""
    operations: dict[str, TimesByDegree]
    """Operation path or glob -> degree -> milliseconds of one call for one batch."""
    chunks: dict[str, Annotated[tuple[Share, ...], Field(max_length=1024)]] = Field(default_factory=dict)
    """Operation path or glob -> shares of its chunks: one each, or three for first, middle and last; default: equal."""
    transfer: Transfer = Field(default_factory=Transfer)
    """Lags between operations on different devices."""
    memory: dict[str, MemoryByDegree] = Field(default_factory=dict)
    """Operation path or glob -> bytes on each device that runs it: one number, or one by degree."""
    provenance: Literal["measured", "declared", "inferred", "predicted"]
    """Where the figures came from; every result that uses them repeats it."""
    samples: dict[str, SamplesByDegree] | None = None
    """Operation path -> degree -> the measured milliseconds behind each time."""
    spread: dict[str, ShareByDegree] | None = None
    """Operation path -> degree -> interquartile range of the samples over their median."""
    warmup: dict[str, CountByDegree] | None = None
    """Operation path -> degree -> how many batches were cut before the samples."""
    states: dict[str, Annotated[int, Field(ge=0)]] | None = None
    """State instance -> bytes that it held at the end, on each device that has it."""
    ranks: Annotated[dict[Degree, tuple[str, ...]], BeforeValidator(_spell_keys)] | None = None
    """Degree -> the device of each rank; one that is there twice was shared by two ranks."""
    methods: dict[str, str] | None = None
    """Time, warmup, memory, transfer -> how it was measured."""
    notes: tuple[str, ...] = ()
    """What could not be measured, and why; what makes figures less sure."""
    key: dict[str, Any] | None = None
    """All that changes the times: program, files, options, versions, device; see `flashrt.analysis.profile_key`."""
    program: str | None = None
    """The program that was measured: a path or an id."""

    @model_validator(mode="after")
    def _check_shares(self) -> Profile:
        for pattern, shares in self.chunks.items():
            if not shares or sum(shares) <= 0:
                raise ValueError(f"chunks of '{pattern}': at least one share must be above zero")
        return self

    def degrees(self, operation: str) -> tuple[int, ...]:
        """Return the degrees at which the profile has a time for the operation."""
        return tuple(sorted(self._times(operation)))

    def time_ms(self, operation: str, degree: int) -> float:
        """Return the time of one call of `operation` on `degree` devices, in milliseconds.

        Raises
        ------
        InputError
            The profile has no time for it, or two equally specific patterns differ.
        """
        found = self.find_time(operation, degree)
        if isinstance(found, Finding):
            raise InputError(found)
        return found

    def find_time(self, operation: str, degree: int) -> float | Finding:
        """Return the time in milliseconds, or the finding that says why there is none."""
        patterns = best_patterns(self.operations, operation)
        where = f"profile, operation '{operation}', degree {degree}"
        if not patterns:
            return Finding(
                where, f"a time; the profile names {listed(self.operations)}", "nothing for this operation",
                "measure it with profile_measure or declare it under 'operations'", rule="no-time",
                nearest=nearest(operation, self.operations),
            )  # fmt: skip
        found = {self.operations[pattern].get(degree) for pattern in patterns}
        if found == {None}:
            known = self.degrees(operation)
            near = min(known, key=lambda other: abs(other - degree), default=None)
            return Finding(
                where, f"a time at this degree; the profile has degrees {listed(known)} for '{patterns[0]}'",
                f"none at {degree} (nearest degree: {near}; times are never extrapolated)",
                "measure this degree with profile_measure or use a degree that is there", rule="no-time-at-degree",
            )  # fmt: skip
        if len(found) > 1 or None in found:
            return Finding(
                where, "one most specific pattern", f"{listed(patterns)} match equally and differ",
                "name the operation by its path", rule="ambiguous-time",
            )  # fmt: skip
        (value,) = found
        assert value is not None
        return value

    def memory_bytes(self, operation: str, degree: int) -> int:
        """Return what `operation` takes on each of `degree` devices, in bytes; 0 where the profile does not say.

        Of equally specific patterns the largest number counts.

        Raises
        ------
        InputError
            The profile has its memory by degree, and not for this one.
        """
        largest = 0
        for pattern in best_patterns(self.memory, operation):
            given = self.memory[pattern]
            if isinstance(given, int):
                largest = max(largest, given)
            elif degree in given:
                largest = max(largest, given[degree])
            else:
                raise input_error(
                    f"profile, memory of '{pattern}', degree {degree}", f"bytes; it has degrees {listed(given)}",
                    "none at this degree", f"declare it, or one number for all degrees; {RETRY}",
                    rule="no-memory-at-degree",
                )  # fmt: skip
        return largest

    def _times(self, operation: str) -> dict[int, float]:
        merged: dict[int, float] = {}
        for pattern in best_patterns(self.operations, operation):
            merged.update(self.operations[pattern])
        return merged

    def require_times(self, wanted: Mapping[str, int]) -> dict[str, int]:
        """Return the times of all operations at their degrees, in ticks.

        Raises
        ------
        InputError
            With a finding for every time that is missing.
        """
        found = {operation: self.find_time(operation, degree) for operation, degree in wanted.items()}
        missing = [value for value in found.values() if isinstance(value, Finding)]
        if missing:
            raise InputError(missing)
        return {path: to_ticks(value) for path, value in found.items() if not isinstance(value, Finding)}

    def split_ticks(self, operation: str, total: int, num_chunks: int) -> list[int]:
        """Cut an operation's ticks into its chunks by the profile's shares; the parts add up to `total`.

        Raises
        ------
        InputError
            The profile's shares are neither one for each chunk nor first, middle and last.
        """
        if num_chunks == 1:
            return [total]
        patterns = best_patterns(self.chunks, operation)
        shares = self.chunks[patterns[0]] if patterns else (1.0,) * num_chunks
        if len(shares) == 3 and num_chunks != 3:
            first, middle, last = shares
            shares = (first, *(middle,) * (num_chunks - 2), last)
        if len(shares) != num_chunks:
            raise input_error(
                f"profile, chunks of '{patterns[0]}'",
                f"{num_chunks} shares for the {num_chunks} chunks of '{operation}', or 3: first, middle, last",
                f"{len(shares)}", RETRY, rule="chunk-shares",
            )  # fmt: skip
        sums = list(accumulate(shares))
        marks = [0, *(min(total, round(total * (part / sums[-1]))) for part in sums[:-1]), total]
        return [max(0, after - before) for before, after in pairwise(marks)]

    def edge_ms(self, source: str, target: str) -> float | None:
        """Return the measured transfer between two operations, or None; the longest matching key counts."""
        found: list[tuple[int, float]] = []
        for key, value in self.transfer.edges.items():
            left, _, right = (part.strip() for part in key.partition("->"))
            if matches(left, source) and matches(right, target):
                found.append((len(key), value))
        return max(found)[1] if found else None

    def transfer_ms(self, source: str, target: str, num_bytes: int | None, num_chunks: int = 1) -> float:
        """Return the lag κ of handing a value, or one of its `num_chunks` chunks, to other devices.

        A measured edge comes first, then latency plus bytes over bandwidth, then the latency alone. A chunk pays
        the whole latency and its part of the rest. The caller knows whether both ends share a resource (then: 0).
        """
        if source == INPUT or target == OUTPUT:
            return 0.0
        latency = self.transfer.latency_ms
        measured = self.edge_ms(source, target)
        if measured is not None:
            return measured if measured <= latency else latency + (measured - latency) / num_chunks
        if num_bytes is None or self.transfer.gigabytes_per_s is None:
            return latency
        return latency + num_bytes / num_chunks / (self.transfer.gigabytes_per_s * 1e6)


def to_ticks(time_ms: float) -> int:
    """Return milliseconds as integer ticks."""
    return round(time_ms * TICKS_PER_MS)


def flow_bytes(flat: FlatProgram, flow: Dataflow) -> int | None:
    """Return the size of the value on `flow`, or None where neither end's port says all axes and the dtype."""
    ends: list[Port | None] = []
    if flow.source in flat.by_path:
        ends.append(flat.by_path[flow.source].outputs.get(flow.source_port))
    if flow.target in flat.by_path:
        ends.append(flat.by_path[flow.target].inputs.get(flow.target_port))
    for port in ends:
        size = _port_bytes(port)
        if size is not None:
            return size
    return None


def _port_bytes(port: Port | None) -> int | None:
    if port is None or port.shape is None or port.dtype not in _BYTES_BY_DTYPE:
        return None
    size = _BYTES_BY_DTYPE[port.dtype]
    for length in port.shape:
        if not isinstance(length, int):
            return None
        size *= length
    return size


def read_profile(source: Path | Mapping[str, Any] | Profile, built: BuiltProgram | None = None) -> Profile:
    """Read a profile document; with a program, also check that every pattern names one of its operations.

    Raises
    ------
    InputError
        With every finding.
    """
    if isinstance(source, Profile):
        profile, noun = source, "profile"
    else:
        noun = f"profile '{source.name}'" if isinstance(source, Path) else "profile"
        document = read_document(source, retry=RETRY) if isinstance(source, Path) else source
        profile = validate(Profile, document, noun=noun, retry=RETRY)
    findings = list(_check_edges(profile, noun))
    if built is not None:
        findings += _check_patterns(profile, built, noun)
    if findings:
        raise InputError(findings)
    return profile


def _check_edges(profile: Profile, noun: str) -> Iterable[Finding]:
    for key in profile.transfer.edges:
        left, arrow, right = (part.strip() for part in key.partition("->"))
        if not (left and arrow and right):
            yield Finding(
                f"{noun}, transfer, edges, '{key}'", "two ends: 'dit -> vae'", f"'{key}'", RETRY, rule="transfer-edge"
            )


def _check_patterns(profile: Profile, built: BuiltProgram, noun: str) -> list[Finding]:
    paths = [operation.path for operation in built.flat.operations]
    findings = []
    named: dict[str, Iterable[str]] = {
        "operations": profile.operations,
        "chunks": profile.chunks,
        "memory": profile.memory,
    }
    for key, patterns in named.items():
        for pattern in patterns:
            if not any(matches(pattern, path) for path in paths):
                findings.append(
                    Finding(
                        f"{noun}, {key}, '{pattern}'", f"an operation path or glob; there are {listed(paths)}",
                        "no operation of this program", RETRY, rule="unknown-operation",
                        nearest=nearest(pattern, [*paths, *(o.template for o in built.flat.operations)]),
                    )
                )  # fmt: skip
    return findings
