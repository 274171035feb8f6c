"""What a benchmark run can be told."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

from flashrt.errors import Finding, InputError, listed, nearest

Scenario = Literal["single_stream", "realtime", "max_rate"]
SCENARIOS: tuple[str, ...] = get_args(Scenario)

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
    elements_per_batch
        What each output owes for a batch; None: found by a calibration run where the system does not say.
    """

    scenario: Scenario = "single_stream"
    duration_s: float = 8.0
    runs: int = 3
    warmup: int = 3
    max_batches: int = 256
    period_ms: float | None = None
    elements_per_batch: Mapping[str, float] | None = None
    devices: tuple[str, ...] = ()
    config: Mapping[str, Any] | None = None
    timeout_s: float = 120
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
    ):
        value = getattr(settings, name)
        if value is not None and not low <= value <= high:
            findings.append(
                Finding(f"argument '{name}'", f"between {low} and {high}", str(value), "change it and call again")
            )
    for name, count in (settings.elements_per_batch or {}).items():
        if not 0 < count <= MAX_ELEMENTS:
            findings.append(
                Finding(f"argument 'elements_per_batch', '{name}'", f"above 0 and at most {MAX_ELEMENTS:g}", str(count),
                        "change it, or leave it out to have it found")
            )  # fmt: skip
    if findings:
        raise InputError(findings)
