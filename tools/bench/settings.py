"""What a benchmark run can be told."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

from flashrt.bench.neighbours import ALLOWED_SHARE, RULES, Rule
from flashrt.errors import Finding, InputError, listed, nearest

Scenario = Literal["single_stream", "realtime", "poisson", "burst", "trace", "max_rate"]
SCENARIOS: tuple[str, ...] = get_args(Scenario)
# Scenarios whose items are due at moments that are known before the run, apart by no common period.
PLANNED = ("poisson", "burst", "trace")
# Argument -> the scenarios that take it; those where it is needed.
TAKEN_BY: Mapping[str, tuple[str, ...]] = {
    "rate_hz": ("poisson", "burst"),
    "burst_size": ("burst",),
    "trace": ("trace",),
    "seed": ("poisson", "burst"),
    "d0_ms": ("realtime", "max_rate"),
}
NEEDED = ("rate_hz", "burst_size", "trace")
EXAMPLES = {"rate_hz": "rate_hz=4", "burst_size": "burst_size=8", "trace": "trace='arrivals.csv'"}

MAX_ELEMENTS = 1e9


@dataclass(frozen=True)
class RunSettings:
    """How a benchmark runs.

    Attributes
    ----------
    duration_s
        Time of the measured part of each run; a run also ends when `max_batches` have been sent.
    period_ms
        ``realtime`` only: the period; None: 1.1 times the latency seen in warm-up.
    rate_hz
        ``poisson`` and ``burst``: items a second, on average.
    burst_size
        ``burst``: items that are due at once.
    trace
        ``trace``: a CSV file of moments, see `flashrt.bench.arrivals.read_trace`.
    speedup
        ``trace``: by how much faster its items come.
    seed
        ``poisson`` and ``burst``: arrivals to repeat, restart r with seed + r; None: new ones every restart. The
        contents of inputs never repeat.
    d0_ms
        Open loop with a period: the offset that is promised; deadline misses are counted at it.
    media_rate
        Output -> elements in a second of its medium (frames, samples), for the real-time factor and skew.
    elements_per_batch
        What each output owes for a batch; None: found by a calibration run where the system does not say.
    neighbours
        ``refuse``: others on the devices make a run invalid; ``record``: they are noted; None: refuse on GPUs.
    neighbour_share
        Share of the time of cores that others may take, from 0 to 1.
    """

    scenario: Scenario = "single_stream"
    duration_s: float = 8.0
    runs: int = 3
    warmup: int = 3
    max_batches: int = 256
    period_ms: float | None = None
    rate_hz: float | None = None
    burst_size: int | None = None
    trace: str | None = None
    speedup: float = 1.0
    seed: int | None = None
    d0_ms: float | None = None
    media_rate: Mapping[str, float] | None = None
    elements_per_batch: Mapping[str, float] | None = None
    devices: tuple[str, ...] = ()
    config: Mapping[str, Any] | None = None
    timeout_s: float = 120
    neighbours: Rule | None = None
    neighbour_share: float = ALLOWED_SHARE
    emulated: bool = False


def check_settings(settings: RunSettings) -> None:
    """Refuse settings that cannot be run, by name, all at once."""
    findings = []
    if settings.scenario not in SCENARIOS:
        findings.append(
            Finding("argument 'scenario'", f"one of {listed(SCENARIOS)}", f"'{settings.scenario}'", "name one of them",
                    rule="unknown-scenario", nearest=nearest(settings.scenario, SCENARIOS))
        )  # fmt: skip
    for name, low, high in (
        ("duration_s", 0.1, 3600),
        ("runs", 1, 100),
        ("warmup", 0, 1000),
        ("max_batches", 1, 100000),
        ("period_ms", 0.01, 1e7),
        ("d0_ms", 0.0, 1e9),
        ("rate_hz", 1e-4, 1e5),
        ("burst_size", 1, 100000),
        ("speedup", 1e-4, 1e6),
        ("seed", 0, 2**32 - 1),
        ("neighbour_share", 0.0, 1.0),
    ):
        value = getattr(settings, name)
        if value is not None and not low <= value <= high:
            findings.append(
                Finding(f"argument '{name}'", f"between {low} and {high}", str(value), "change it and call again")
            )
    if settings.neighbours is not None and settings.neighbours not in RULES:
        findings.append(
            Finding("argument 'neighbours'", f"one of {listed(RULES)}", f"'{settings.neighbours}'", "name one of them",
                    rule="unknown-rule", nearest=nearest(settings.neighbours, RULES))
        )  # fmt: skip
    if settings.scenario in SCENARIOS:
        findings += _belonging(settings)
    for argument, without in (("elements_per_batch", "have it found"), ("media_rate", "do without a real-time factor")):
        for name, count in (getattr(settings, argument) or {}).items():
            if not 0 < count <= MAX_ELEMENTS:
                findings.append(
                    Finding(f"argument '{argument}', '{name}'", f"above 0 and at most {MAX_ELEMENTS:g}", str(count),
                            f"change it, or leave it out to {without}")
                )  # fmt: skip
    if findings:
        raise InputError(findings)


def _belonging(settings: RunSettings) -> list[Finding]:
    """Return what the scenario needs and was not told, and what it was told and does not take."""
    findings = []
    for name, takers in TAKEN_BY.items():
        given = getattr(settings, name) is not None
        where = f"argument '{name}'"
        if settings.scenario in takers and not given and name in NEEDED:
            findings.append(
                Finding(where, f"a value: scenario '{settings.scenario}' needs one", "nothing",
                        f"pass {EXAMPLES[name]} and call again", rule="missing-argument")
            )  # fmt: skip
        elif given and settings.scenario not in takers:
            findings.append(_foreign(where, takers, settings))
    if settings.speedup != 1 and settings.scenario != "trace":
        findings.append(_foreign("argument 'speedup'", ("trace",), settings))
    return findings


def _foreign(where: str, takers: tuple[str, ...], settings: RunSettings) -> Finding:
    return Finding(where, f"it only with scenario {' or '.join(takers)}", f"it with '{settings.scenario}'",
                   f"leave it out, or pass scenario='{takers[0]}'", rule="foreign-argument")  # fmt: skip
