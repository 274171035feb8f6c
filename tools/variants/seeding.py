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


def seed_rows(candidates: Sequence[Mapping[str, Any]], max_devices: int | None = None) -> list[dict[str, Any]]:
    """Return one row for each candidate id; beside the columns: `refusal` and `twin`.

    `refusal` says why it cannot be pending: illegal, or more devices than `max_devices`. `twin` is the id of an earlier
    legal candidate with the same deployment. Both are None otherwise.

    Raises
    ------
    InputError
        With every key that is missing or wrong.
    """
    findings: list[Finding] = []
    rows: dict[str, dict[str, Any]] = {}
    by_deployment: dict[str, str] = {}
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
                "refusal": _refusal(candidate, max_devices),
                "twin": _twin(candidate, by_deployment),
            },
        )
    if findings:
        raise InputError(findings)
    return list(rows.values())


def _refusal(candidate: Mapping[str, Any], max_devices: int | None) -> str | None:
    if not candidate["legal"]:
        return str(candidate["legality"])
    groups = (candidate.get("deployment") or {}).get("groups") or {}
    num_devices = len({device for group in groups.values() for device in group})
    if max_devices is not None and num_devices > max_devices:
        return f"it needs {num_devices} devices; max_devices is {max_devices}"
    return None


def _twin(candidate: Mapping[str, Any], by_deployment: dict[str, str]) -> str | None:
    """Return the legal candidate that had this deployment first, or None; notes this one where it is the first."""
    deployment = candidate.get("deployment")
    if not candidate["legal"] or deployment is None:
        return None
    first = by_deployment.setdefault(_without_group_names(deployment), candidate["id"])
    return None if first == candidate["id"] else first


def _without_group_names(deployment: Mapping[str, Any]) -> str:
    """Return a deployment as text in which groups are their devices, so that their names do not matter."""
    groups = deployment.get("groups") or {}
    place = {pattern: groups.get(group, group) for pattern, group in (deployment.get("place") or {}).items()}
    rest = {key: value for key, value in deployment.items() if key not in {"groups", "place", "blocking"}}
    blocking = sorted(deployment.get("blocking") or ())
    return json.dumps([rest, place, blocking], sort_keys=True, default=str)


def _finding(where: str, name: str, expected: str, value: object) -> Finding:
    got = "nothing" if value is None else repr(value)[:80]
    return Finding(f"{where}, key '{name}'", expected, got, "call analyze again with seed_queue", rule="bad-candidate")


def _hypothesis(candidate: Mapping[str, Any]) -> str:
    targets = candidate.get("targets") or []
    names = targets if isinstance(targets, str) else ", ".join(str(target) for target in targets)
    on = f" of {names}" if names else ""
    return f"{candidate['transformation']}{on} relieves the bottleneck: {candidate['bottleneck']}"
