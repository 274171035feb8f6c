"""The folder that a server works in: paths inside it, ids that earlier calls returned, and the store."""

from __future__ import annotations

import uuid
from dataclasses import replace
from pathlib import Path
from typing import Any

from flashrt.errors import InputError, input_error
from flashrt.variants.store import Record, Store, open_store

PREFIXES = {"program": "prog-", "deployment": "deploy-", "profile": "profile-"}
DOCUMENT_SUFFIXES = (".yaml", ".yml", ".json")


def write_whole(path: Path, text: str) -> None:
    """Write a file so that it is there whole or not at all."""
    part = path.with_name(f"{path.name}.{uuid.uuid4().hex[:8]}.part")
    try:
        part.write_text(text, encoding="utf-8")
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)


def has_document(record: Record) -> bool:
    """Return whether the file that a record names is still there."""
    return record.path is not None and record.path.is_file()


class Workspace:
    """One workspace; cheap to make, opens its database on first use.

    Raises
    ------
    InputError
        `root` is no folder that exists.
    """

    def __init__(self, root: Path) -> None:
        self.root = root.resolve()
        if not self.root.is_dir():
            raise input_error("option --workspace", "a folder that exists", f"'{root}'", "create it first")
        self._store: Store | None = None

    @property
    def store(self) -> Store:
        """The workspace's database, opened when first asked for, and again when it was moved away."""
        if self._store is None or not self._store.path.is_file():
            self._store = open_store(self.root)
        return self._store

    def folder(self, *parts: str) -> Path:
        """Return (and make) a folder under the workspace's own state folder."""
        path = self.store.folder.joinpath(*parts)
        path.mkdir(parents=True, exist_ok=True)
        return path

    def relative(self, path: Path) -> str:
        """Return a path as tools print it: relative to the workspace where it lies inside."""
        resolved = path.resolve()
        return str(resolved.relative_to(self.root)) if resolved.is_relative_to(self.root) else str(resolved)

    def path_to_write(self, text: str, where: str, example: str) -> Path:
        """Return the path in the workspace that something is to be written to.

        Raises
        ------
        InputError
            It lies outside the workspace, or no file can have that path.
        """
        from flashrt.bench.systems import inside

        try:
            return inside(self.root, text, where)
        except InputError as error:
            fix = f"name one inside it, such as '{example}'"
            raise InputError(
                replace(finding, fix=fix) if finding.rule == "outside-workspace" else finding
                for finding in error.findings
            ) from None

    def find_id(self, reference: str) -> Any:
        """Return the program or deployment document that an id names (a `Found`), or None."""
        from flashrt.bench.systems import Found

        kind = next((kind for kind, prefix in PREFIXES.items() if reference.startswith(prefix)), None)
        if kind is None or reference.endswith(DOCUMENT_SUFFIXES):
            return None
        path, folder = self._record(kind, reference)
        return Found(path, folder)

    def _record(self, kind: str, reference: str) -> tuple[Path, Path]:
        record = self.store.get_record(kind, reference)
        if record.path is None or not record.path.is_file():
            raise input_error(
                f"{kind} '{reference}'", "its document", f"no file at '{record.path}'",
                "put it back, or make it again", rule="no-such-file",
            )  # fmt: skip
        folder = record.payload.get("folder")
        return record.path, self.root / folder if folder is not None else record.path.parent

    def document(self, reference: str, kind: str, where: str) -> tuple[dict[str, Any], Path]:
        """Return (document, its path) for a path in the workspace or an id of that kind.

        Raises
        ------
        InputError
            Unknown id, path outside the workspace, absent or unreadable file.
        """
        from flashrt.bench.systems import find_file
        from flashrt.ir.documents import read_document

        if reference.startswith(PREFIXES[kind]) and not reference.endswith(DOCUMENT_SUFFIXES):
            path, _ = self._record(kind, reference)
        else:
            path = find_file(self.root, reference, where)
        return read_document(path), path

    def program_name(self, reference: str) -> str:
        """Return how a deployment names a program: by its path, or by its id where its ops file is elsewhere."""
        found = self.find_id(reference)
        if found is None:
            return self.relative(self.root / reference)
        return self.relative(found.path) if found.folder.resolve() == found.path.resolve().parent else reference

    def program(self, reference: str) -> Any:
        """Return the built program (`BuiltProgram`) that an id or a path names.

        Raises
        ------
        InputError
            Unknown, or its document or ops changed since the id was made.
        """
        from flashrt.bench.systems import find_file
        from flashrt.ir.building import build, build_file
        from flashrt.ir.documents import read_document

        found = self.find_id(reference)
        if found is None:
            return build_file(find_file(self.root, reference, "argument 'program'"))
        built = build(read_document(found.path), found.folder, f"program '{found.path.name}'")
        if built.id != reference:
            raise input_error(
                f"program '{reference}'", "the document and ops file that it was built from",
                f"they have changed since (now {built.id})", "call ir_build again and use the new id",
                rule="program-changed",
            )  # fmt: skip
        return built
