"""A variant counts as measured only with proof: a passed check and a valid run, of one and the same system."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from flashrt.errors import Finding, InputError, listed
from flashrt.variants.store import open_store
from flashrt.variants.variant import Variant

GetPayload = Callable[[str, str], Mapping[str, Any]]
MIN_BATCHES = 8
MAX_RELATIVE = 0.02


def check_evidence(
    where: str, variant: Variant, system: str | None, equivalence: object, run: object, get: GetPayload, workspace: Path
) -> list[Finding]:
    """Return everything that keeps a variant from being measured; nothing when the proof holds.

    Parameters
    ----------
    system
        The variant's system as said in this update, else as said before; None where it never was.
    get
        Returns the payload of a record by kind and id, or raises `InputError`.
    """
    findings: list[Finding] = []
    check = _payload(where, "equivalence", "equivalence_check", equivalence, get, findings)
    bench = _payload(where, "run", "bench_run", run, get, findings)
    if check is not None and check.get("equivalent") is not True:
        why = "; ".join(str(reason) for reason in check.get("reasons") or [])[:600]
        findings.append(
            Finding(f"{where}, equivalence '{equivalence}'", "a check that says equivalent: true",
                    f"equivalent: {_said(check, 'equivalent')}{f' ({why})' if why else ''}",
                    "correct the variant and call equivalence_check again, or remove it with a reason",
                    rule="not-equivalent")
        )  # fmt: skip
    if bench is not None and bench.get("valid") is not True:
        why = "; ".join(str(reason) for reason in bench.get("reasons") or [])[:600]
        findings.append(
            Finding(f"{where}, run '{run}'", "a run that says valid: true",
                    f"valid: {_said(bench, 'valid')}{f' ({why})' if why else ''}",
                    "call bench_run again as the reasons say, or remove the variant with a reason",
                    rule="invalid-run")
        )  # fmt: skip
    if bench is not None and bench.get("valid") is True and not _rechecked(bench):
        findings.append(
            Finding(f"{where}, run '{run}'", "a run whose outputs were compared with the baseline's while it was timed",
                    "one that was measured before the system was found equal, so nothing was compared",
                    "call bench_run again, after equivalence_check", rule="run-not-rechecked")
        )  # fmt: skip
    if check is not None:
        findings += _weak_check(where, equivalence, check)
        findings += _other_baseline(where, equivalence, check, workspace)
    checked = _system(where, f"equivalence '{equivalence}'", "candidate", check, findings)
    baseline = _system(where, f"equivalence '{equivalence}'", "baseline", check, findings)
    benched = _system(where, f"run '{run}'", "system", bench, findings)
    if checked and benched and checked["digest"] != benched["digest"]:
        findings.append(
            Finding(f"{where}, run '{run}'", f"a run of the system that was checked, {_named(checked)}",
                    f"a run of {_named(benched)}{_changes(checked, benched)}",
                    "call equivalence_check and bench_run on the same system, without changing its files in between; "
                    "documents that were written beside it count too, so write all candidates first",
                    rule="different-systems")
        )  # fmt: skip
    for role, one in (("equivalence", checked), ("run", benched)):
        if one and baseline and one["digest"] == baseline["digest"]:
            findings.append(
                Finding(f"{where}, {role}", "a system that differs from the reference",
                        f"the reference itself, {_named(baseline)}",
                        "check and run the variant's own system: a reference that equals itself proves nothing",
                        rule="variant-is-reference")
            )  # fmt: skip
    if system and benched and _differs(system, str(benched.get("reference")), variant, workspace):
        findings.append(
            Finding(f"{where}, run '{run}'", f"a run of '{system}', the system of {variant.id}",
                    f"a run of '{benched['reference']}'",
                    "check and run that system, or pass system= with the one that the variant now is",
                    rule="other-system")
        )  # fmt: skip
    return findings


def _rechecked(bench: Mapping[str, Any]) -> bool:
    rechecked = bench.get("rechecked")
    return isinstance(rechecked, Mapping) and rechecked.get("equal") is True


def _weak_check(where: str, equivalence: object, check: Mapping[str, Any]) -> list[Finding]:
    """Return what makes a passed check too weak to count: few batches, or a tolerance that passes anything."""
    findings = []
    batches = check.get("num_batches")
    if isinstance(batches, int) and batches < MIN_BATCHES:
        findings.append(
            Finding(f"{where}, equivalence '{equivalence}'", f"a check over at least {MIN_BATCHES} batches",
                    str(batches), "call equivalence_check again with a larger count", rule="short-check")
        )  # fmt: skip
    tolerance = check.get("tolerance")
    relative = tolerance.get("relative") if isinstance(tolerance, Mapping) else None
    if isinstance(relative, int | float) and relative > MAX_RELATIVE:
        findings.append(
            Finding(f"{where}, equivalence '{equivalence}'",
                    f"bit equality, or a relative error of at most {MAX_RELATIVE}", str(relative),
                    "call equivalence_check again with a smaller tolerance", rule="loose-check")
        )  # fmt: skip
    return findings


def _other_baseline(where: str, equivalence: object, check: Mapping[str, Any], workspace: Path) -> list[Finding]:
    """Refuse a check against anything but the reference that the program was proved equal to, or that program."""
    proofs = [
        record.payload
        for record in open_store(workspace).list_records("equivalence")
        if record.payload.get("role") == "program" and record.payload.get("equivalent")
    ]
    baseline = check.get("baseline")
    if not proofs or not isinstance(baseline, Mapping):
        return []
    trusted = [proof[side] for proof in proofs for side in ("baseline", "candidate")]
    keys = ("entry", "entry_digest")
    if any(all(one.get(key) == baseline.get(key) for key in keys) for one in trusted):
        return []
    return [
        Finding(f"{where}, equivalence '{equivalence}'",
                f"a check against the reference that ir_interpret proved the program equal to, "
                f"'{proofs[-1]['baseline'].get('reference')}' as it was then",
                f"one against '{baseline.get('reference')}'",
                "call equivalence_check with that baseline; if the reference itself changed, call ir_interpret again",
                rule="other-baseline")
    ]  # fmt: skip


def _changes(checked: Mapping[str, Any], benched: Mapping[str, Any]) -> str:
    """Return which files differ between the two records, where both name theirs."""
    before, after = checked.get("files"), benched.get("files")
    if not isinstance(before, Mapping) or not isinstance(after, Mapping) or before == after:
        return ""
    names = [path for path in sorted({*before, *after}) if before.get(path) != after.get(path)]
    return f", whose files differ: {listed(names, 5)}"


def _payload(
    where: str, kind: str, maker: str, id: object, get: GetPayload, findings: list[Finding]
) -> Mapping[str, Any] | None:
    if not isinstance(id, str) or not id.strip():
        what = {"equivalence": "a passed equivalence check", "run": "a valid run"}[kind]
        findings.append(
            Finding(f"{where}, {kind}", f"the id of {what} of this variant's system",
                    "nothing" if id is None else repr(id), f"call {maker} and pass the id it returns as {kind}",
                    rule=f"missing-{kind}")
        )  # fmt: skip
        return None
    try:
        return get(kind, id)
    except InputError as error:
        findings += [Finding(f"{where}, {one.where}", one.expected, one.got, one.fix, one.rule, one.nearest)
                     for one in error.findings]  # fmt: skip
        return None


def _system(
    where: str, source: str, key: str, payload: Mapping[str, Any] | None, findings: list[Finding]
) -> Mapping[str, Any] | None:
    if payload is None:
        return None
    system = payload.get(key)
    if isinstance(system, Mapping) and isinstance(system.get("digest"), str) and system["digest"]:
        return system
    findings.append(
        Finding(f"{where}, {source}", f"a record that names its {key} by digest", "one without",
                "make a new record with equivalence_check or bench_run", rule="evidence-without-digest")
    )  # fmt: skip
    return None


def _named(system: Mapping[str, Any]) -> str:
    return f"'{system.get('reference')}' (digest {system['digest']})"


def _said(payload: Mapping[str, Any], key: str) -> str:
    return str(payload[key]).lower() if key in payload else "nothing"


def _differs(system: str, reference: str, variant: Variant, workspace: Path) -> bool:
    """Say whether two references are certainly not the same; an id and a path are told apart by digest only."""
    if _is_path(system) != _is_path(reference):
        return False
    if not _is_path(system):
        return system != reference
    benched = _place(workspace, reference)
    # A reference relative to the workspace means the same file in the variant's own folder.
    return benched not in {_place(folder, system) for folder in (workspace, variant.folder) if folder is not None}


def _is_path(reference: str) -> bool:
    return ".py:" in reference or reference.endswith((".yaml", ".yml", ".json"))


def _place(folder: Path, reference: str) -> str:
    return os.path.realpath(os.path.join(folder, reference))
