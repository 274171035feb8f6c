"""Resources: what earlier calls made, by id; and completions of ids and paths."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from mcp.server import MCPServer
from mcp.server.mcpserver.exceptions import ResourceNotFoundError
from mcp_types import Completion, CompletionArgument, PromptReference, Resource, ResourceTemplateReference

from flashrt.errors import FlashrtError, InputError
from flashrt.mcp_server.workspace import Workspace, has_document

LOG = logging.getLogger("flashrt")
JSON = "application/json"
TEMPLATES = {
    "program": "A program document as it was built",
    "run": "A benchmark run: validity with reasons, every figure, paths of its plots and traces",
    "variant": "A variant: hypothesis, legality, lineage, evidence, state",
    "job": "A job: state, progress, result or error, artefacts",
}
MAX_LISTED = 50
"""Things of one kind that a list of resources has, the newest."""
MAX_COMPLETIONS = 100
SUFFIXES = {".py", ".yaml", ".yml", ".json", ".frec"}
MAX_FILES = 2000
"""Files that are looked at to complete a path."""


class WorkspaceResources:
    """The resources of one workspace. Nothing is made there by looking."""

    def __init__(self, workspace: Workspace) -> None:
        self.workspace = workspace

    def offer(self, server: MCPServer[Any]) -> None:
        """Register one template a kind: ``program://{id}``, ``run://{id}``, ``variant://{id}``, ``job://{id}``."""
        for kind, says in TEMPLATES.items():
            template = server.resource(
                f"{kind}://{{id}}", name=kind, title=f"FlashRT {kind}", description=says, mime_type=JSON
            )
            template(self._reader(kind))

    def listed(self) -> list[Resource]:
        """Return the newest things of each kind."""
        return [
            Resource(uri=f"{kind}://{id}", name=id, title=f"{kind} {id}", description=says, mime_type=JSON)
            for kind in TEMPLATES
            for id, says in self._ids(kind)[:MAX_LISTED]
        ]

    def complete(
        self, reference: PromptReference | ResourceTemplateReference, argument: CompletionArgument
    ) -> Completion:
        """Return ids or paths of the workspace that begin with what was typed, the newest ids first."""
        if isinstance(reference, ResourceTemplateReference):
            kind = reference.uri.partition("://")[0]
            found = [id for id, _ in self._ids(kind)] if kind in TEMPLATES and argument.name == "id" else []
        elif argument.name == "program":
            found = [*(id for id, _ in self._ids("program")), *self._paths({".yaml", ".yml", ".json"})]
        elif argument.name in {"reference", "baseline", "system"}:
            found = [f"{path}:serve" if path.endswith(".py") else path for path in self._paths(SUFFIXES - {".frec"})]
        else:
            found = []
        fitting = [value for value in dict.fromkeys(found) if value.startswith(argument.value)]
        shown = fitting[:MAX_COMPLETIONS]
        return Completion(values=shown, total=len(fitting), has_more=len(fitting) > len(shown))

    def _reader(self, kind: str) -> Callable[[str], str]:
        def read(id: str) -> str:
            try:
                found = self._read(kind, id)
            except InputError as error:
                raise ResourceNotFoundError(str(error)) from None
            return json.dumps(found, indent=1, default=str)

        return read

    def _read(self, kind: str, id: str) -> Any:
        if not self._has_store():
            raise ResourceNotFoundError(f"{kind} '{id}': this workspace has none yet")
        if kind == "program":
            self.workspace.store.get_record("program", id)
            return self.workspace.document(id, "program", f"resource '{kind}://{id}'")[0]
        if kind == "run":
            return self.workspace.store.get_record("run", id).payload
        if kind == "job":
            from flashrt.mcp_server.jobs import read_job

            return read_job(self.workspace.root, id).as_dict()
        from flashrt.variants.queue import VariantQueue

        listing = VariantQueue(self.workspace.store).list().as_dict(history=True)
        for variant in listing["variants"]:
            if variant["variant"] == id:
                return variant
        raise ResourceNotFoundError(f"variant '{id}': expected one of variant_list, got an unknown id")

    def _has_store(self) -> bool:
        return (self.workspace.root / ".flashrt" / "flashrt.db").is_file()

    def _ids(self, kind: str) -> list[tuple[str, str]]:
        """Return (id, what it is) of one kind, the newest first; none where the database cannot be read."""
        if not self._has_store():
            return []
        try:
            return self._stored(kind)
        except FlashrtError as error:
            # A list has no place for words; any tool refuses with them.
            LOG.warning("resources: %s", error)
            return []

    def _stored(self, kind: str) -> list[tuple[str, str]]:
        store = self.workspace.store
        if kind in {"program", "run"}:
            records = reversed(store.list_records(kind))
            key = "name" if kind == "program" else "system"
            return [
                (record.id, str(record.payload.get(key, "")))
                for record in records
                if kind == "run" or has_document(record)
            ]
        if kind == "variant":
            from flashrt.variants.queue import VariantQueue

            found = VariantQueue(store).list().as_dict()["variants"]
            return [(one["variant"], f"{one['state']}: {one['hypothesis']}") for one in reversed(found)]
        with store.reading() as connection:
            rows = connection.execute("SELECT id, tool, state FROM jobs ORDER BY number DESC").fetchall()
        return [(row["id"], f"{row['tool']}, {row['state']}") for row in rows]

    def _paths(self, suffixes: set[str]) -> list[str]:
        found = (path for path in _files(self.workspace.root) if path.suffix in suffixes)
        return sorted(str(path.relative_to(self.workspace.root)) for path in found)


def _files(root: Path) -> Iterator[Path]:
    """Yield files below a folder, hidden folders left out, nearest first and not more than `MAX_FILES`."""
    waiting, seen = [root], 0
    while waiting:
        folder = waiting.pop(0)
        try:
            entries = sorted(folder.iterdir())
        except OSError:
            continue
        for entry in entries:
            seen += 1
            if seen > MAX_FILES:
                return
            if entry.is_symlink() or entry.name.startswith((".", "__pycache__")):
                continue
            if entry.is_dir():
                waiting.append(entry)
            else:
                yield entry
