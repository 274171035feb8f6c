"""What a search returns: points with documents, proofs and explanations, and what it left out."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from flashrt.analysis.cost import DeploymentCost
from flashrt.analysis.search.sensitivity import Sensitivity


@dataclass(frozen=True)
class Proof:
    """How good a point is known to be."""

    status: str
    """``optimal``: nothing that was asked for is better; ``gap``: the time limit cut the search; ``partial``: not all
    that was asked for was searched (see `scope`)."""
    gap: float | None = None
    """Nothing is better in period and latency by more than this share (of what `scope` says, if that is given); None:
    nothing is known."""
    bound: dict[str, float] | None = None
    """`period_ms` and `latency_ms` below which nothing can be at once, where there is a gap."""
    scope: str | None = None
    """``partial`` only: which deployments were searched."""

    def as_dict(self) -> dict[str, Any] | str:
        """Return ``optimal``, or the gap and the bound; of a part that was searched, they stand under ``within``."""
        if self.status == "optimal":
            return "optimal"
        if self.status == "partial":
            within = {"scope": self.scope, "gap": self.gap, "bound": self.bound}
            return {"gap": None, "bound": None, "within": within}
        return {"gap": self.gap, "bound": self.bound}

    def __str__(self) -> str:
        if self.status == "optimal":
            return "optimal"
        known = "nothing is proved: the time limit came first"
        if self.gap is not None:
            known = f"nothing is better in both by more than {self.gap:.4g}" if self.gap else "optimal"
        return f"{known}, {self.scope}" if self.status == "partial" else known


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
    """Whether the runtime runs it, staggers included; see `notes` for what it refuses."""
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
class LeftOut:
    """A point of the front that `min_gain` left out, and the one that stands for it."""

    period_ms: float
    latency_ms: float
    num_devices: int
    instead: int
    """Place of the other among the points that were kept, from 0."""
    period_percent: float
    """How much longer (shorter, where negative) the other's period is."""
    latency_percent: float
    """How much longer the other's latency is."""

    def as_dict(self) -> dict[str, Any]:
        """Return a JSON-ready record."""
        return {
            "period_ms": self.period_ms, "latency_ms": self.latency_ms, "num_devices": self.num_devices,
            "instead": self.instead, "period_percent": self.period_percent, "latency_percent": self.latency_percent,
            "says": str(self),
        }  # fmt: skip

    def __str__(self) -> str:
        return (
            f"{self.period_ms:g} ms period and {self.latency_ms:g} ms latency on {self.num_devices} devices: point "
            f"{self.instead + 1} stands for it, with {self.period_percent:+.3g} % period and "
            f"{self.latency_percent:+.3g} % latency"
        )


@dataclass(frozen=True)
class SearchResult:
    """What a search found, best period first."""

    points: tuple[Point, ...]
    proof: Proof
    """Of the whole front: that nothing is missing but what `left_out` says."""
    num_nodes: int
    seconds: float
    provenance: str
    left_out: tuple[LeftOut, ...] = ()
    """What the request's `min_gain` left out, best period first."""
    notes: tuple[str, ...] = ()
    """What was not searched."""

    def as_dict(self) -> dict[str, Any]:
        """Return a JSON-ready record."""
        return {
            "points": [point.as_dict() for point in self.points], "proof": self.proof.as_dict(),
            "left_out": [one.as_dict() for one in self.left_out], "notes": list(self.notes),
            "num_nodes": self.num_nodes, "seconds": round(self.seconds, 3), "provenance": self.provenance,
        }  # fmt: skip
