"""Audits in a workspace: made by ``ir_audit``, found again by what they hold for, required by who asks for it."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flashrt.analysis.claims import NOT_AUDITED, Audited, all_claims, audit_changes
from flashrt.errors import Finding, InputError, listed
from flashrt.mcp_server.workspace import Workspace, write_whole

if TYPE_CHECKING:
    from flashrt.analysis import Profile
    from flashrt.ir import BuiltProgram
    from flashrt.variants.queue import VariantQueue

Progress = Callable[[float, str], None]
AGAIN = "call ir_audit with this program, mend what it finds, and call again; or leave require_audit out"


def ir_audit(root: Path, arguments: Mapping[str, Any], progress: Progress, folder: Path) -> dict[str, Any]:
    """Audit a program, keep the document under an id, and return it."""
    from flashrt.bench.audit import DEFAULT_BATCHES, audit_program
    from flashrt.mcp_server.work import find_system, timeout_s

    workspace = Workspace(root)
    system = find_system(workspace, arguments["program"], "argument 'program'", kinds=("program",))
    built = workspace.program(arguments["program"])
    document = audit_program(
        system, built, arguments["inputs"], root, folder,
        count=int(arguments.get("count") or DEFAULT_BATCHES), degrees=arguments.get("degrees"),
        config=arguments.get("config"), seed=arguments.get("seed"), timeout_s=timeout_s(arguments), progress=progress,
    )  # fmt: skip
    return keep_audit(workspace, document)


def keep_audit(workspace: Workspace, document: Mapping[str, Any]) -> dict[str, Any]:
    """Keep an audit in the workspace; return it with its id and path."""
    from flashrt.variants.store import new_id

    identity = new_id("audit")
    path = workspace.folder("audits") / f"{identity}.json"
    write_whole(path, json.dumps(document, indent=1))
    payload = {"audit": identity, **{key: document[key] for key in ("program", "clean", "counts", "key", "claims")}}
    workspace.store.put_record("audit", identity, payload, path)
    return {"audit": identity, "path": workspace.relative(path), **document}


def find_audit(workspace: Workspace, built: BuiltProgram, profile: Any = None) -> Audited:
    """Return what the newest audit says that still holds for a program as it is now.

    Parameters
    ----------
    profile
        A profile or its document: where it has a key, an audit with other options does not count.
    """
    return _newest(workspace, built, _config_of(profile))[0]


def _config_of(profile: Any) -> Mapping[str, Any] | None:
    key = profile.get("key") if isinstance(profile, Mapping) else getattr(profile, "key", None)
    config = key.get("config") if isinstance(key, Mapping) else None
    return config if isinstance(config, Mapping) else None


def _newest(workspace: Workspace, built: BuiltProgram, config: Mapping[str, Any] | None) -> tuple[Audited, list[str]]:
    """Return the newest audit that holds, or none and why the newest one does not."""
    why: list[str] = []
    for record in reversed(workspace.store.list_records("audit")):
        if record.payload["program"] != built.id:
            continue
        changes = audit_changes(record.payload["key"], built, config)
        if not changes:
            claims = {name: one["status"] for name, one in record.payload["claims"].items()}
            return Audited(record.id, claims), []
        why = why or [f"{record.id}: {', '.join(changes)} changed since"]
    return NOT_AUDITED, why


def require_audited(
    workspace: Workspace,
    built: BuiltProgram,
    profile: Profile | None,
    num_devices: int | None,
    where: str,
    claims: Sequence[str] | None = None,
) -> Audited:
    """Return the audit of a program all of whose claims it confirms.

    Parameters
    ----------
    num_devices
        Degrees above it do not count.
    claims
        Those that matter; None: all that a search over deployments may rest on.

    Raises
    ------
    InputError
        No audit holds, or some claims are refuted or were not checked; names them all.
    """
    audited, why = _newest(workspace, built, _config_of(profile))
    if audited.id is None:
        got = f"none that holds ({'; '.join(why)})" if why else "none"
        raise InputError([Finding(where, "a program with an audit, as require_audit asks", got, AGAIN, "not-audited")])
    wanted = all_claims(built, num_devices) if claims is None else claims
    findings = []
    for status, rule in (("refuted", "refuted-claim"), ("unchecked", "unaudited-claim")):
        bad = [claim for claim in wanted if audited.status(claim) == status]
        if bad:
            findings.append(
                Finding(f"{where}, {audited.id}", "every claim confirmed, as require_audit asks",
                        f"{status}: {listed(bad)}", AGAIN, rule)
            )  # fmt: skip
    if findings:
        raise InputError(findings)
    return audited


def require_audited_variant(workspace: Workspace, queue: VariantQueue, variant: str, system: str | None) -> None:
    """Refuse a variant whose program has unaudited or refuted claims among those that its system rests on.

    Raises
    ------
    InputError
        Also where the system is code: nothing of it is declared.
    """
    where = f"variant_update, variant '{variant}'"
    known = next((one for one in queue.list().variants if one.id == variant), None)
    reference = system or (known.system if known is not None else None)
    if reference is None:
        return  # The update itself says what is missing.
    from flashrt.bench import resolve_system
    from flashrt.ir.building import build
    from flashrt.ir.documents import read_document

    found = resolve_system(reference, workspace.root, where, workspace.find_id)
    if found.program is None or found.folder is None:
        raise InputError([Finding(
            where, "a program or a deployment of one, as require_audit asks", f"'{reference}', which is code",
            "leave require_audit out, or write it as a program document", "not-audited",
        )])  # fmt: skip
    built = build(read_document(found.program), found.folder)
    claims = None
    if found.kind == "deployment":
        claims = deployment_claims(built, found.path)
    require_audited(workspace, built, None, None, where, claims)


def deployment_claims(built: BuiltProgram, path: Path) -> tuple[str, ...]:
    """Return the claims that a deployment rests on."""
    from flashrt.analysis.claims import claims_of_setting, streaming_labels
    from flashrt.analysis.deployment import read_deployment
    from flashrt.analysis.settings import Setting

    placement = read_deployment(path, built)
    blocks: dict[tuple[int, ...], set[str]] = {}
    for name, numbers in placement.devices.items():
        blocks.setdefault(tuple(numbers), set()).add(name)
    degrees = tuple((name, len(numbers)) for name, numbers in placement.devices.items() if len(numbers) > 1)
    streamed = frozenset(streaming_labels(built)) - frozenset(placement.document.blocking)
    setting = Setting(frozenset(frozenset(block) for block in blocks.values()), degrees, streamed)
    opaque = {f"degree:{one.template}@{n}" for one in built.flat.operations if one.opaque for n in one.degrees}
    found = claims_of_setting(built, placement.devices, setting)
    template = {one.path: one.template for one in built.flat.operations}
    timing = tuple(f"event:{template[name]}" for name in sorted(placement.asynchronous))
    tiles = tuple(f"tiles:{name}@{count}" for name, count in placement.document.tiles.items())
    return (*(claim for claim in found if claim not in opaque), *timing, *tiles)
