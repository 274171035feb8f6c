"""What an audit finds, in one vocabulary, and the smallest change of the document that mends each."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from flashrt.analysis.claims import Claim
from flashrt.analysis.structure import PlacedNode, walk_nodes
from flashrt.ir import BuiltProgram

Kind = Literal[
    "undeclared-read",
    "undeclared-write",
    "unused-read",
    "unused-write",
    "reads-old-value",
    "changes-read-state",
    "changes-input",
    "shared-storage",
    "hidden-global",
    "hidden-attribute",
    "hidden-buffer",
    "hidden-random",
    "hidden-file",
    "hidden-environment",
    "hidden-unknown",
    "iteration-leak",
    "streaming-lookahead",
    "streaming-differs",
    "lookahead-unused",
    "could-stream",
    "order-dependent",
    "nondeterministic",
    "degree-differs",
    "file-written",
]
KINDS: tuple[str, ...] = get_args(Kind)
Severity = Literal["error", "warning", "hint"]
SEVERITY: Mapping[str, Severity] = {
    "unused-read": "warning", "unused-write": "warning", "lookahead-unused": "hint", "could-stream": "hint",
    "file-written": "hint",
}  # fmt: skip
"""An error makes what the analysis proves untrue; a warning costs parallelism; a hint is advice. Default: error."""

LOADED = 0.08
"""Progress once the ops are loaded: from then on every piece of work has a limit of its own."""


@dataclass(frozen=True)
class AuditFinding:
    """One way in which an operation is not what its node says."""

    kind: Kind
    operation: str
    """The operation's path; the first of several of one node."""
    subject: str
    """The state, port, edge or place that it is about."""
    evidence: dict[str, Any]
    fix: str
    edit: dict[str, Any] | None = None
    """The change, machine-readable: graph, node or edge, what to add, remove or set; None: the op has to change."""

    @property
    def severity(self) -> Severity:
        """How grave it is."""
        return SEVERITY.get(self.kind, "error")

    def as_dict(self) -> dict[str, Any]:
        """Return a JSON-ready record."""
        found: dict[str, Any] = {
            "kind": self.kind, "severity": self.severity, "where": self.operation, "subject": self.subject,
            "evidence": self.evidence, "fix": self.fix,
        }  # fmt: skip
        return found | ({"edit": self.edit} if self.edit is not None else {})


@dataclass
class Findings:
    """All that an audit has found so far; one finding a node, kind and subject."""

    built: BuiltProgram
    found: dict[tuple[str, str, str], AuditFinding] = field(default_factory=dict)
    unchecked: dict[str, str] = field(default_factory=dict)
    """What was not checked -> why."""
    claims: dict[str, tuple[str, str]] = field(default_factory=dict)
    """Claim -> (confirmed, refuted or unchecked; how)."""
    notes: list[str] = field(default_factory=list)
    _nodes: dict[str, PlacedNode] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._nodes = {path: node for node in walk_nodes(self.built) for path in node.operations}

    def node(self, path: str) -> PlacedNode:
        """Return the node of an operation."""
        return self._nodes[path]

    def template(self, path: str) -> str:
        """Return an operation's path with stars for iterations."""
        return self._nodes[path].template

    def add(
        self,
        kind: Kind,
        path: str,
        subject: str,
        fix: str,
        edit: Mapping[str, Any] | None = None,
        **evidence: Any,
    ) -> None:
        """Add a finding, unless the same one is there from another iteration or batch."""
        key = (self.template(path), kind, subject)
        if key in self.found:
            seen = self.found[key].evidence.setdefault("also", [])
            if path != self.found[key].operation and path not in seen:
                seen.append(path)
            return
        whole = None
        if edit is not None:
            node = self.node(path)
            whole = {"graph": node.graph, **({"node": node.name} if "edge" not in edit else {}), **edit}
        self.found[key] = AuditFinding(kind, path, subject, dict(evidence), fix, whole)

    def has(self, template: str, kinds: Iterable[str]) -> bool:
        """Return whether a node has a finding of one of these kinds."""
        return any(key[0] == template and key[1] in kinds for key in self.found)

    def claim(self, claim: Claim | str, status: str, how: str) -> None:
        """Say how a claim of the document fared; what is refuted stays so."""
        name = str(claim)
        if self.claims.get(name, ("",))[0] != "refuted":
            self.claims[name] = (status, how)

    def skip(self, what: str, why: str) -> None:
        """Say that something was not checked."""
        self.unchecked.setdefault(what, why)
