"""What a workspace knows: documents, checks and runs by id, in one database that several processes share."""

from __future__ import annotations

import json
import secrets
import sqlite3
import time
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, get_args

from flashrt.errors import input_error, listed
from flashrt.variants import database

Kind = Literal["program", "deployment", "profile", "equivalence", "run", "comparison", "plan", "audit"]
KINDS: tuple[str, ...] = get_args(Kind)

# What makes a record of each kind, for the error that an unknown id gets.
MAKERS = {
    "program": "ir_build",
    "deployment": "plan_deployment, or write a deployment document and name its path",
    "profile": "profile_measure, or write a profile document and name its path",
    "equivalence": "equivalence_check",
    "run": "bench_run",
    "comparison": "bench_compare with systems",
    "plan": "plan_deployment or plan_elastic",
    "audit": "ir_audit",
}
FOLDER = ".flashrt"


@dataclass(frozen=True)
class Record:
    """One thing that an earlier call made, found again by its id.

    Parameters
    ----------
    path
        The document or result file, absolute; None where there is none.
    created_at
        Seconds since 1970, of the first time it was put.
    """

    kind: str
    id: str
    payload: dict[str, Any]
    path: Path | None
    created_at: float


def new_id(prefix: str) -> str:
    """Return an id nobody has: ``run-`` and eight hexadecimal digits."""
    return f"{prefix}-{secrets.token_hex(4)}"


def open_store(workspace: Path) -> Store:
    """Open the workspace's store, making ``.flashrt/`` when it is not there.

    Raises
    ------
    InputError
        The workspace is no folder or cannot be written to; the database is corrupt or of a newer release. Nothing
        is changed then.
    """
    root = workspace.resolve()
    if not root.is_dir():
        raise input_error(f"workspace '{workspace}'", "an existing folder", "none", "make it, or name another one",
                          rule="no-such-workspace")  # fmt: skip
    folder = root / FOLDER
    try:
        folder.mkdir(exist_ok=True)
        ignore = folder / ".gitignore"
        if not ignore.exists():
            ignore.write_text("*\n", encoding="utf-8")
    except OSError as error:
        raise input_error(
            f"workspace '{root}'", f"a folder in which '{FOLDER}/' can be made and written", str(error),
            "make it writable, or name another workspace with --workspace", rule="unwritable-workspace",
        ) from None  # fmt: skip
    path = folder / "flashrt.db"
    database.prepare(path)
    return Store(root, path)


class Store:
    """An open store: safe to share between threads and after a fork, for each call opens a connection of its own."""

    def __init__(self, workspace: Path, path: Path) -> None:
        self.workspace = workspace
        self.path = path

    @property
    def folder(self) -> Path:
        """The workspace's ``.flashrt/``."""
        return self.path.parent

    def __enter__(self) -> Store:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        return None

    @contextmanager
    def reading(self) -> Iterator[sqlite3.Connection]:
        """Give a connection that sees one state of the database throughout."""
        with database.translated(self.path), closing(database.connect(self.path)) as connection:
            connection.execute("BEGIN")
            yield connection

    @contextmanager
    def writing(self) -> Iterator[sqlite3.Connection]:
        """Give a connection inside a write transaction: all of it is kept, or on any error nothing."""
        with database.translated(self.path), closing(database.connect(self.path)) as connection:
            connection.execute("BEGIN IMMEDIATE")
            try:
                yield connection
            except BaseException:
                connection.rollback()
                raise
            connection.commit()

    def put_record(self, kind: str, id: str, payload: Mapping[str, Any], path: Path | None = None) -> Record:
        """Keep a record under `id`; one of the same kind and id is replaced and keeps its time of creation.

        Raises
        ------
        InputError
            The path lies outside the workspace.
        """
        _require_kind(kind)
        text = json.dumps(dict(payload), allow_nan=True, default=str)
        with self.writing() as connection:
            connection.execute(
                "INSERT INTO records (kind, id, payload, path, created_at) VALUES (?, ?, ?, ?, ?) "
                "ON CONFLICT (kind, id) DO UPDATE SET payload = excluded.payload, path = excluded.path",
                (kind, id, text, self.relative(path), time.time()),
            )
            return self._find(connection, kind, id) or _lost(id)

    def get_record(self, kind: str, id: str) -> Record:
        """Return a record.

        Raises
        ------
        InputError
            There is none; the nearest id and the call that makes such records are named.
        """
        _require_kind(kind)
        with self.reading() as connection:
            record = self._find(connection, kind, id)
            if record is not None:
                return record
            ids = [row[0] for row in connection.execute(
                "SELECT id FROM records WHERE kind = ? ORDER BY created_at DESC", (kind,))]  # fmt: skip
            other = connection.execute("SELECT kind FROM records WHERE id = ?", (id,)).fetchone()
        raise input_error(
            f"{kind} '{id}'",
            f"the id of {_with_article(kind)} in this workspace (known: {listed(ids)})",
            f"the id of {_with_article(other[0])}" if other else "an unknown id",
            f"use one of those, or call {MAKERS[kind]}",
            rule=f"unknown-{kind}",
            valid=ids,
            name=id,
        )

    def find_record(self, id: str) -> tuple[str, dict[str, Any], Path | None] | None:
        """Return kind, payload and path of the record with this id, of whatever kind, or None."""
        with self.reading() as connection:
            row = connection.execute(
                "SELECT * FROM records WHERE id = ? ORDER BY created_at DESC LIMIT 1", (id,)
            ).fetchone()
        if row is None:
            return None
        record = self._record(row)
        return record.kind, record.payload, record.path

    def list_records(self, kind: str) -> list[Record]:
        """Return the records of one kind, oldest first."""
        _require_kind(kind)
        with self.reading() as connection:
            rows = connection.execute(
                "SELECT * FROM records WHERE kind = ? ORDER BY created_at, rowid", (kind,)
            ).fetchall()
        return [self._record(row) for row in rows]

    def relative(self, path: Path | None) -> str | None:
        """Return a path as the store keeps it: relative to the workspace, so that the workspace may move.

        Raises
        ------
        InputError
            It lies outside the workspace.
        """
        if path is None:
            return None
        absolute = path if path.is_absolute() else self.workspace / path
        for candidate in (absolute, absolute.resolve()):
            if candidate.is_relative_to(self.workspace) and ".." not in candidate.parts:
                return str(candidate.relative_to(self.workspace))
        raise input_error(
            f"path '{path}'", f"a path inside the workspace '{self.workspace}'", "one outside of it",
            "copy the file into the workspace and name it there", rule="outside-workspace",
        )  # fmt: skip

    def _find(self, connection: sqlite3.Connection, kind: str, id: str) -> Record | None:
        row = connection.execute("SELECT * FROM records WHERE kind = ? AND id = ?", (kind, id)).fetchone()
        return None if row is None else self._record(row)

    def _record(self, row: sqlite3.Row) -> Record:
        path = None if row["path"] is None else self.workspace / row["path"]
        return Record(row["kind"], row["id"], json.loads(row["payload"]), path, row["created_at"])


def _lost(id: str) -> Record:
    raise AssertionError(f"record '{id}' is read in the transaction that wrote it")


def _with_article(kind: str) -> str:
    return f"an {kind}" if kind[0] in "aeiou" else f"a {kind}"


def _require_kind(kind: str) -> None:
    assert kind in KINDS, f"kind of record: {kind!r}"
