"""What a variant is, and what the queue as a whole says: values without the store."""

from __future__ import annotations

import json
import math
import sqlite3
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

State = Literal["pending", "claimed", "measured", "removed"]
CLAIM_S = 3600.0
MAX_IN_THE_WAY = 5
NO_BETTER = 1.01
"""A predicted gain up to here is none: a per cent is less than a measurement tells apart."""
NO_BETTER_RANK = -1.0


def as_time(seconds: float | None) -> str | None:
    """Return seconds since 1970 as ISO 8601 in UTC."""
    return None if seconds is None else datetime.fromtimestamp(seconds, UTC).isoformat(timespec="milliseconds")


@dataclass(frozen=True)
class Transition:
    """One change of a variant's state, with what it rested on."""

    at: str
    from_state: str | None
    to_state: str
    reason: str | None
    equivalence: str | None
    run: str | None


@dataclass(frozen=True)
class Variant:
    """One hypothesis about the application, and what became of it.

    Parameters
    ----------
    legality
        Why the transformation keeps the results.
    candidate
        Id of the analysis' candidate it was seeded from.
    rank
        Higher is offered first.
    folder
        Its isolated folder, absolute; None until a seeded one is claimed.
    isolation
        `kind` (worktree or copy), `linked` files, `note`.
    """

    id: str
    hypothesis: str
    transformation: str
    bottleneck: str
    legality: str
    system: str | None
    parent: str | None
    expected: dict[str, Any]
    candidate: str | None
    state: str
    rank: float
    folder: Path | None
    isolation: dict[str, Any] | None
    equivalence: str | None
    run: str | None
    reason: str | None
    created_at: str
    updated_at: str
    claimed_at: str | None
    children: tuple[str, ...] = ()
    depth: int = 0
    history: tuple[Transition, ...] = ()

    def as_dict(self, *, history: bool = False) -> dict[str, Any]:
        """Return the record that the tools answer with; with `history`, every change of state in it."""
        record = asdict(self)
        record["variant"] = self.id
        record["folder"] = None if self.folder is None else str(self.folder)
        record["children"] = list(self.children)
        del record["history"]
        if history:
            record["history"] = [asdict(transition) for transition in self.history]
        return record


@dataclass(frozen=True)
class QueueStatus:
    """Whether the search may stop, and what stands in its way.

    Parameters
    ----------
    counts
        Number of variants by state.
    note
        What to know although it may stop.
    """

    may_stop: bool
    in_the_way: tuple[str, ...]
    counts: dict[str, int]
    note: str = ""

    def as_dict(self) -> dict[str, Any]:
        """Return the part of a tool's answer that tells of the queue; what is in the way is cut to a few sentences."""
        record = asdict(self)
        left_out = len(self.in_the_way) - MAX_IN_THE_WAY
        record["in_the_way"] = [*self.in_the_way[:MAX_IN_THE_WAY], *([f"and {left_out} more"] if left_out > 0 else [])]
        return record


def judge(variants: Sequence[Variant], now_s: float) -> QueueStatus:
    """Say whether every variant is decided, and name those that are not."""
    counts = {state: sum(variant.state == state for variant in variants)
              for state in ("pending", "claimed", "measured", "removed")}  # fmt: skip
    if not variants:
        return QueueStatus(False, ("no variant was ever added; call analyze with seed_queue, or variant_add",), counts)
    in_the_way = []
    for variant in variants:
        if variant.state == "pending":
            in_the_way.append(f"{variant.id} ({variant.transformation}) is pending: call variant_next to claim it")
        elif variant.state == "claimed":
            assert variant.claimed_at is not None, "a claimed variant knows since when"
            age_s = now_s - datetime.fromisoformat(variant.claimed_at).timestamp()
            when = "is offered again by variant_next" if age_s > CLAIM_S else "is being worked on"
            in_the_way.append(
                f"{variant.id} ({variant.transformation}) is claimed since {variant.claimed_at} and {when}: "
                "call variant_update with measured, removed, or pending to give it back"
            )
    note = ""
    if not in_the_way and not counts["measured"]:
        note = "every variant was removed with a reason; none was measured, so the reference stands"
    return QueueStatus(not in_the_way, tuple(in_the_way), counts, note)


def default_rank(expected: Mapping[str, Any]) -> float:
    """Return how much better than the reference a variant is expected to be, in what it helps most; 0 if unsaid.

    From an analysis: the larger of the rate's ratio and the inverse ratios of latency and first output; where none of
    them is a gain, a rank after those of which nothing is known.
    """
    ratio = _number(expected.get("rate_ratio"))
    if ratio is not None:
        return ratio
    versus = expected.get("versus_baseline")
    if isinstance(versus, Mapping):
        gains = [_number(versus.get("fps"))]
        gains += [_inverse(_number(versus.get(name))) for name in ("latency", "first_output")]
        best = max((gain for gain in gains if gain is not None), default=None)
        return 0.0 if best is None else best if best > NO_BETTER else NO_BETTER_RANK
    fps = _number(expected.get("fps"))
    base = next((value for name in ("reference_fps", "baseline_fps") if (value := _number(expected.get(name)))), None)
    if fps is None or base is None or base <= 0 or not math.isfinite(fps / base):
        return 0.0
    return fps / base


def _inverse(value: float | None) -> float | None:
    return 1 / value if value and math.isfinite(1 / value) else None


def _number(value: object) -> float | None:
    return float(value) if is_number(value) else None  # type: ignore[arg-type]


def is_number(value: object) -> bool:
    """Say whether a value is a number that fits a finite float, and no truth value."""
    if not isinstance(value, int | float) or isinstance(value, bool):
        return False
    try:
        return math.isfinite(value)
    except OverflowError:
        return False


def from_rows(rows: Sequence[sqlite3.Row], history: Sequence[sqlite3.Row], workspace: Path) -> dict[str, Variant]:
    """Build all variants, in order of their numbers, with lineage and history."""
    children: dict[str, list[str]] = {}
    depths: dict[str, int] = {}
    for row in rows:
        # A parent is always older than its children.
        depths[row["id"]] = depths[row["parent"]] + 1 if row["parent"] else 0
        if row["parent"]:
            children.setdefault(row["parent"], []).append(row["id"])
    transitions: dict[str, list[Transition]] = {}
    for row in history:
        at = as_time(row["at"])
        assert at is not None, "every transition has a time"
        transitions.setdefault(row["variant"], []).append(
            Transition(at, row["from_state"], row["to_state"], row["reason"], row["equivalence"], row["run"])
        )
    variants = {}
    for row in rows:
        id = row["id"]
        variants[id] = Variant(
            id=id,
            hypothesis=row["hypothesis"],
            transformation=row["transformation"],
            bottleneck=row["bottleneck"],
            legality=row["legality"],
            system=row["system"],
            parent=row["parent"],
            expected=json.loads(row["expected"]),
            candidate=row["candidate"],
            state=row["state"],
            rank=row["rank"],
            folder=None if row["folder"] is None else workspace / row["folder"],
            isolation=None if row["isolation"] is None else json.loads(row["isolation"]),
            equivalence=row["equivalence"],
            run=row["run"],
            reason=row["reason"],
            created_at=as_time(row["created_at"]) or "",
            updated_at=as_time(row["updated_at"]) or "",
            claimed_at=as_time(row["claimed_at"]),
            children=tuple(children.get(id, ())),
            depth=depths[id],
            history=tuple(transitions.get(id, ())),
        )
    return variants
