"""From the candidates of an analysis to rows of the queue: checked, none twice, none without an argument."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from flashrt.errors import Finding, InputError
from flashrt.variants.variant import QueueStatus, default_rank


@dataclass(frozen=True)
class Seeds:
    """What became of the candidates: ids of new pending variants, of new removed (illegal) ones, of known ones."""

    added: tuple[str, ...]
    removed: tuple[str, ...]
    already: tuple[str, ...]
    status: QueueStatus

    def as_dict(self) -> dict[str, Any]:
        """Return lists of ids and the queue's state."""
        record = asdict(self)
        record.pop("status")
        return {**{name: list(ids) for name, ids in record.items()}, **self.status.as_dict()}


def seed_rows(candidates: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return one row for each candidate id, with the truth value `legal` beside the columns.

    Raises
    ------
    InputError
        With every key that is missing or wrong.
    """
    findings: list[Finding] = []
    rows: dict[str, dict[str, Any]] = {}
    for index, candidate in enumerate(candidates):
        where = f"candidate {index} '{candidate.get('id', '?')}'"
        for name in ("id", "transformation", "legality", "bottleneck"):
            value = candidate.get(name)
            if not isinstance(value, str) or not value.strip():
                findings.append(_finding(where, name, "text", value))
        if not isinstance(candidate.get("legal"), bool):
            findings.append(_finding(where, "legal", "true or false", candidate.get("legal")))
        expected = candidate.get("expected") or {}
        deployment = candidate.get("deployment")
        for name, value in (("expected", expected), ("deployment", deployment)):
            if value is not None and not isinstance(value, Mapping):
                findings.append(_finding(where, name, "a mapping", value))
        if findings:
            continue
        rows.setdefault(
            candidate["id"],
            {
                "candidate": candidate["id"],
                "hypothesis": candidate.get("hypothesis") or _hypothesis(candidate),
                "transformation": candidate["transformation"],
                "bottleneck": candidate["bottleneck"],
                "legality": candidate["legality"],
                "expected": json.dumps(dict(expected), default=str),
                "rank": default_rank(expected),
                "deployment": None if deployment is None else json.dumps(dict(deployment), default=str),
                "legal": candidate["legal"],
            },
        )
    if findings:
        raise InputError(findings)
    return list(rows.values())


def _finding(where: str, name: str, expected: str, value: object) -> Finding:
    got = "nothing" if value is None else repr(value)[:80]
    return Finding(f"{where}, key '{name}'", expected, got, "call analyze again with seed_queue", rule="bad-candidate")


def _hypothesis(candidate: Mapping[str, Any]) -> str:
    targets = candidate.get("targets") or []
    names = targets if isinstance(targets, str) else ", ".join(str(target) for target in targets)
    on = f" of {names}" if names else ""
    return f"{candidate['transformation']}{on} relieves the bottleneck: {candidate['bottleneck']}"
