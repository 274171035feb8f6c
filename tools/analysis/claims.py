"""What the legality of a candidate rests on: claims of the program document that only a run can check.

``states:NODE``
    the node touches just the states that it declares, and keeps nothing elsewhere.
``stream:EDGE``
    working chunk by chunk equals working on the whole, with no later chunk than `lookahead` says.
``parallel:NODE|NODE``
    two nodes without a dataflow path between them may run in either order, and at once.
``degree:NODE@N``
    N ranks give what one gives.
``tiles:NODE@N``, ``event:NODE``
    what no audit can check by comparing: results that are only perceptually equal, or that depend on timing.

``ir_audit`` checks them; an audit holds for the very code, options and versions that it saw.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from flashrt.analysis.profile_key import fingerprint, package_versions
from flashrt.analysis.settings import Setting
from flashrt.ir import INPUT, OUTPUT, BuiltProgram

AUDIT_SCHEMA = "flashrt/audit@1"
CONFIRMED, REFUTED, UNCHECKED = "confirmed", "refuted", "unchecked"
Claim = str


def state_claim(template: str) -> Claim:
    """Return the claim that a node touches only the states it declares."""
    return f"states:{template}"


def stream_claim(label: str) -> Claim:
    """Return the claim of a streaming edge, by the document's label of it."""
    return f"stream:{label}"


def parallel_claim(one: str, other: str) -> Claim:
    """Return the claim that two nodes do not need each other's order."""
    return f"parallel:{'|'.join(sorted((one, other)))}"


def degree_claim(template: str, degree: int) -> Claim:
    """Return the claim that a node gives the same at a degree."""
    return f"degree:{template}@{degree}"


def parallel_pairs(built: BuiltProgram) -> set[tuple[str, str]]:
    """Return the pairs of operations that no dataflow path orders, each in the program's order."""
    flat = built.flat
    paths = [operation.path for operation in flat.operations]
    return {(a, b) for i, a in enumerate(paths) for b in paths[i + 1 :] if a not in flat.predecessors[b]}


def streaming_labels(built: BuiltProgram) -> set[str]:
    """Return the labels of the edges that claim to stream between operations, or out of the last one."""
    streams = {e.label for graph in built.program.graphs.values() for e in graph.edges if e.mode == "streaming"}
    reach = {
        label for flow in built.flat.dataflow for label in flow.labels
        if flow.target_chunks > 1 and flow.target != OUTPUT
    }  # fmt: skip
    return streams & reach


def all_claims(built: BuiltProgram, max_degree: int | None = None) -> tuple[Claim, ...]:
    """Return every claim that a search over deployments may rest on.

    Parameters
    ----------
    max_degree
        Degrees above it are left out: there are no more devices.
    """
    template = {operation.path: operation.template for operation in built.flat.operations}
    found: dict[Claim, None] = {state_claim(name): None for name in template.values()}
    found |= {stream_claim(label): None for label in sorted(streaming_labels(built))}
    found |= {parallel_claim(template[a], template[b]): None for a, b in sorted(parallel_pairs(built))}
    for operation in built.flat.operations:
        for degree in operation.degrees:
            if degree > 1 and not operation.opaque and (max_degree is None or degree <= max_degree):
                found[degree_claim(operation.template, degree)] = None
    return tuple(found)


def claims_of_setting(built: BuiltProgram, operations: Iterable[str], setting: Setting | None) -> tuple[Claim, ...]:
    """Return the claims that a way to place a program rests on.

    Parameters
    ----------
    operations
        Paths of the operations that it moves.
    """
    template = {operation.path: operation.template for operation in built.flat.operations}
    found: dict[Claim, None] = {state_claim(template[path]): None for path in sorted(operations)}
    if setting is None:
        return tuple(found)
    block = {path: number for number, paths in enumerate(setting.blocks) for path in paths}
    if len(setting.blocks) > 1:
        found |= {state_claim(template[path]): None for path in sorted(block)}
    for a, b in sorted(parallel_pairs(built)):
        if block.get(a) != block.get(b):
            found[parallel_claim(template[a], template[b])] = None
    claimed = streaming_labels(built)
    found |= {stream_claim(label): None for label in sorted(setting.streamed & claimed)}
    found |= {degree_claim(template[path], degree): None for path, degree in setting.degrees if degree > 1}
    ends = {
        end for flow in built.flat.dataflow if set(flow.labels) & setting.streamed
        for end in (flow.source, flow.target)
    } - {INPUT, OUTPUT}  # fmt: skip
    found |= {state_claim(template[path]): None for path in sorted(ends)}
    found |= {f"event:{template[path]}": None for path in sorted(setting.variation.asynchronous)}
    return tuple(found)


@dataclass(frozen=True)
class Audited:
    """What a valid audit says of a program's claims."""

    id: str | None
    claims: Mapping[Claim, str]
    """Claim -> confirmed, refuted or unchecked."""

    def status(self, claim: Claim) -> str:
        """Return how a claim fared; one that the audit does not know is unchecked."""
        return self.claims.get(claim, UNCHECKED)

    def confirms(self, claims: Iterable[Claim]) -> bool:
        """Return whether all of these claims were confirmed."""
        return all(self.status(claim) == CONFIRMED for claim in claims)


NOT_AUDITED = Audited(None, {})


def audit_key(built: BuiltProgram, files: Sequence[str], config: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return what an audit holds for: the program, the files of its ops, options and versions.

    Parameters
    ----------
    files
        Files that the ops were made of: relative to the program's folder, or absolute.
    """
    return {
        "program": built.id,
        "files": {name: fingerprint(built.folder / name) or "none" for name in sorted(files)},
        "config": json.loads(json.dumps(dict(config or {}))),
        "packages": package_versions(),
    }


def audit_changes(key: Mapping[str, Any], built: BuiltProgram, config: Mapping[str, Any] | None = None) -> list[str]:
    """Return why an audit does not hold any more; empty: it does.

    Parameters
    ----------
    config
        Options that the program is to run with; None: any.
    """
    found = []
    if key.get("program") != built.id:
        found.append("the program document or its ops file")
    files = key.get("files") or {}
    found += [f"file '{name}'" for name, old in files.items() if (fingerprint(built.folder / name) or "none") != old]
    if config is not None and json.loads(json.dumps(dict(config))) != (key.get("config") or {}):
        found.append("the options (config)")
    versions = package_versions()
    found += [f"version of {name}" for name, old in (key.get("packages") or {}).items() if versions.get(name) != old]
    return found
