"""What the queue refuses, and the words it says it in: all findings of a call at once."""

from __future__ import annotations

import json
from collections.abc import Mapping

from flashrt.errors import Finding, listed, nearest
from flashrt.variants.variant import Variant, is_number

_SETTABLE = ("measured", "removed", "pending")
_MIN_REASON_WORDS = 3


def _blank(value: object) -> bool:
    return not isinstance(value, str) or not value.strip()


def add_findings(
    words: Mapping[str, object],
    system: object,
    parent: object,
    expected: object,
    rank: object,
    known: Mapping[str, Variant],
) -> list[Finding]:
    """Return what is wrong with the arguments of ``variant_add``."""
    meant = {
        "hypothesis": "what should get better, and why",
        "transformation": "what is changed: stream, disaggregate, step-pipelining, …",
        "bottleneck": "the operation, edge or device it attacks, as analyze names it",
        "legality": "why the results stay the same: the dependencies that allow it",
    }
    retry = "and call variant_add again"
    findings = [
        Finding(f"variant_add, {name}", meant[name], "nothing" if value is None or value == "" else repr(value),
                f"say it in words {retry}", rule=f"missing-{name}")
        for name, value in words.items() if _blank(value)
    ]  # fmt: skip
    if system is not None and _blank(system):
        findings.append(Finding("variant_add, system", "a system's reference, such as 'variant.py:serve'", repr(system),
                                f"name it or leave it out {retry}", rule="bad-argument"))  # fmt: skip
    if parent is not None and parent not in known:
        findings.append(_unknown_variant("variant_add, parent", str(parent), known, f"name one of those {retry}"))
    if rank is not None and not is_number(rank):
        findings.append(Finding("variant_add, rank", "a finite number, higher first", repr(rank),
                                f"pass a number or leave it out {retry}", rule="bad-argument"))  # fmt: skip
    try:
        good = expected is None or (isinstance(expected, Mapping) and bool(json.dumps(dict(expected), allow_nan=False)))
        got = repr(expected)
    except (TypeError, ValueError) as error:
        good, got = False, str(error)
    if not good:
        findings.append(Finding("variant_add, expected", "a mapping of JSON values, such as {\"rate_ratio\": 1.4}",
                                got[:200], f"correct it or leave it out {retry}", rule="bad-argument"))  # fmt: skip
    return findings


def _unknown_variant(where: str, name: str, known: Mapping[str, Variant], fix: str) -> Finding:
    return Finding(where, f"a variant of this workspace (known: {listed(known)})", f"'{name}'",
                   f"{fix}; variant_list shows them all", rule="unknown-variant",
                   nearest=nearest(name, known))  # fmt: skip


def claim_findings(variant: str, known: Mapping[str, Variant]) -> list[Finding]:
    """Return what forbids that ``variant_next`` claims this one."""
    where = "variant_next, variant"
    found = known.get(variant)
    pending = [id for id, one in known.items() if one.state == "pending"]
    if found is None:
        return [_unknown_variant(where, variant, known, "name one of those, or none for the highest-ranked")]
    if found.state == "pending":
        return []
    fix = (
        "call variant_update with state pending first, to give the claim back"
        if found.state == "claimed"
        else "call variant_update with state pending and a reason first, to open it again"
    )
    return [Finding(where, f"a pending variant (there are: {listed(pending)})", f"'{variant}', which is {found.state}",
                    f"{fix}, or name another", rule="not-pending")]  # fmt: skip


def state_findings(
    where: str, variant: str, state: object, reason: object, ranks: object, known: Mapping[str, Variant]
) -> list[Finding]:
    """Return what forbids the change of state, the evidence for ``measured`` apart."""
    findings = []
    before = known.get(variant)
    again = "and call variant_update again"
    if before is None:
        findings.append(_unknown_variant("variant_update, variant", str(variant), known, f"name one of those {again}"))
    if state not in _SETTABLE:
        fix = "call variant_next to claim one" if state == "claimed" else f"pass one of those {again}"
        findings.append(
            Finding(f"{where}, state", f"one of {listed(_SETTABLE)}", repr(state), fix, rule="unknown-state",
                    nearest=nearest(str(state), _SETTABLE))
        )  # fmt: skip
    given = isinstance(reason, str) and len(reason.split()) >= _MIN_REASON_WORDS
    if reason is not None and not isinstance(reason, str):
        findings.append(
            Finding(f"{where}, reason", "text", repr(reason), f"say it in words {again}", rule="bad-reason")
        )
    if state == "removed" and not given:
        findings.append(
            Finding(f"{where}, reason", f"why it is removed, in at least {_MIN_REASON_WORDS} words",
                    "nothing" if reason is None else repr(reason),
                    f"name what was seen (not equal at …, no faster: …) {again}", rule="missing-reason")
        )  # fmt: skip
    if before is None:
        return findings
    if before.state in {"measured", "removed"}:
        if state in {"measured", "removed"}:
            findings.append(
                Finding(where, "a variant that is not decided", f"one that is {before.state}",
                        "call variant_update with state pending and a reason first, to open it again",
                        rule="already-decided")
            )  # fmt: skip
        elif state == "pending" and not given:
            findings.append(
                Finding(f"{where}, reason", f"why a {before.state} variant is opened again, in at least "
                        f"{_MIN_REASON_WORDS} words", "nothing" if reason is None else repr(reason),
                        f"pass a reason {again}", rule="missing-reason")
            )  # fmt: skip
    if before.state == "pending" and state == "pending" and not ranks:
        findings.append(Finding(where, "a change", "a variant that is pending already",
                                "pass ranks to re-rank, or call variant_next", rule="nothing-to-do"))  # fmt: skip
    return findings


def rank_findings(
    where: str, variant: str, state: object, ranks: object, known: Mapping[str, Variant]
) -> list[Finding]:
    """Return what is wrong with new ranks."""
    if ranks is None:
        return []
    again = "and call variant_update again"
    if not isinstance(ranks, Mapping):
        return [Finding(f"{where}, ranks", "a mapping of variant to number", repr(ranks)[:200], f"correct it {again}",
                        rule="bad-ranks")]  # fmt: skip
    findings = []
    for id, rank in ranks.items():
        place = f"{where}, ranks '{id}'"
        if id not in known:
            findings.append(_unknown_variant(place, str(id), known, f"correct the id {again}"))
            continue
        after = state if id == variant else known[id].state
        if after in {"measured", "removed"}:
            findings.append(Finding(place, "a variant that is not decided", f"one that is {after}",
                                    f"leave it out {again}", rule="already-decided"))  # fmt: skip
        if not is_number(rank):
            findings.append(Finding(place, "a finite number, higher first", repr(rank), f"correct it {again}",
                                    rule="bad-ranks"))  # fmt: skip
    return findings
