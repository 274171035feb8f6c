"""The SQLite file of a workspace: looked at before it is touched, made once, upgraded with a copy of the old one beside
it, its errors in the reader's words."""

from __future__ import annotations

import fcntl
import logging
import os
import sqlite3
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from urllib.parse import quote

from flashrt import __version__
from flashrt.errors import FlashrtError, ResourceMissingError, input_error

LOG = logging.getLogger("flashrt")
SCHEMA_VERSION = 2
BUSY_TIMEOUT_S = 20.0
_MAGIC = b"SQLite format 3\0"
_INSPECT_S = 5.0

_SCHEMA = """
CREATE TABLE records (
    kind TEXT NOT NULL, id TEXT NOT NULL, payload TEXT NOT NULL, path TEXT, created_at REAL NOT NULL,
    PRIMARY KEY (kind, id)
) STRICT;
CREATE INDEX records_by_id ON records (id);
CREATE TABLE reservations (number INTEGER PRIMARY KEY AUTOINCREMENT, owner TEXT NOT NULL) STRICT;
CREATE TABLE variants (
    number INTEGER PRIMARY KEY,
    id TEXT NOT NULL UNIQUE,
    hypothesis TEXT NOT NULL,
    transformation TEXT NOT NULL,
    bottleneck TEXT NOT NULL,
    legality TEXT NOT NULL,
    system TEXT,
    parent TEXT REFERENCES variants (id),
    expected TEXT NOT NULL,
    candidate TEXT UNIQUE,
    deployment TEXT,
    state TEXT NOT NULL CHECK (state IN ('pending', 'claimed', 'measured', 'removed')),
    rank REAL NOT NULL,
    folder TEXT,
    isolation TEXT,
    equivalence TEXT,
    run TEXT,
    reason TEXT,
    created_at REAL NOT NULL,
    updated_at REAL NOT NULL,
    claimed_at REAL,
    CHECK (state != 'measured' OR (equivalence IS NOT NULL AND run IS NOT NULL)),
    CHECK (state != 'removed' OR length(trim(reason)) > 0)
) STRICT;
CREATE TABLE history (
    number INTEGER PRIMARY KEY AUTOINCREMENT,
    variant TEXT NOT NULL REFERENCES variants (id),
    at REAL NOT NULL,
    from_state TEXT,
    to_state TEXT NOT NULL,
    reason TEXT,
    equivalence TEXT,
    run TEXT
) STRICT;
CREATE TABLE jobs (
    number INTEGER PRIMARY KEY AUTOINCREMENT,
    id TEXT NOT NULL UNIQUE,
    tool TEXT NOT NULL,
    function TEXT NOT NULL,
    arguments TEXT NOT NULL,
    state TEXT NOT NULL CHECK (state IN ('queued', 'running', 'done', 'failed', 'cancelled', 'lost')),
    progress REAL NOT NULL DEFAULT 0,
    message TEXT NOT NULL DEFAULT '',
    error TEXT,
    error_detail TEXT,
    starter TEXT NOT NULL,
    process TEXT,
    created_at REAL NOT NULL,
    started_at REAL,
    finished_at REAL
) STRICT;
"""

_RELEASES = """
CREATE TABLE releases (schema INTEGER PRIMARY KEY, release TEXT NOT NULL, at REAL NOT NULL) STRICT;
"""
# What makes the next schema of each; the first is that of 0.1.0.
_UPGRADES = {1: _RELEASES}


def prepare(path: Path) -> None:
    """Make the database when there is none, upgrade an older one, and refuse one that this release must not touch.

    A refusal changes nothing. Before an upgrade the old database is copied beside it, to ``flashrt-schema-1.db``.

    Raises
    ------
    InputError
        The file is newer than this release, is corrupt, is no database of FlashRT, or cannot be written.
    """
    if inspect(path) == SCHEMA_VERSION:
        return
    with only_one(path.with_name("setup.lock")), translated(path), closing(connect(path)) as connection:
        deadline = time.monotonic() + BUSY_TIMEOUT_S
        while True:
            try:
                connection.execute("PRAGMA journal_mode = WAL")
                break
            except sqlite3.OperationalError:
                # Changing the mode does not wait for a reader that is just leaving.
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.01)
        version = int(connection.execute("PRAGMA user_version").fetchone()[0])
        if version == SCHEMA_VERSION:
            return
        if version > 0:
            backup = path.with_name(f"{path.stem}-schema-{version}{path.suffix}")
            _copy(connection, backup)
            LOG.warning("database '%s': upgraded to schema %d; the old one is kept as '%s'", path, SCHEMA_VERSION,
                        backup.name)  # fmt: skip
        _bring_up(connection, version)


def make(path: Path) -> None:
    """Make an empty database where there is no file."""
    with translated(path), closing(connect(path)) as connection:
        _bring_up(connection, 0)


def _bring_up(connection: sqlite3.Connection, version: int) -> None:
    script = _SCHEMA + _RELEASES if version == 0 else "".join(_UPGRADES[one] for one in range(version, SCHEMA_VERSION))
    # One transaction: another process sees the old tables or all of the new ones.
    connection.execute("BEGIN IMMEDIATE")
    try:
        for statement in filter(str.strip, script.split(";")):
            connection.execute(statement)
        connection.execute("INSERT INTO releases VALUES (?, ?, ?)", (SCHEMA_VERSION, __version__, time.time()))
        connection.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")
    except BaseException:
        connection.rollback()
        raise
    connection.commit()


def _copy(connection: sqlite3.Connection, target: Path) -> None:
    """Write what a connection sees, its log included, to a file of its own: whole or not at all."""
    part = target.with_name(f"{target.name}.part")
    part.unlink(missing_ok=True)
    try:
        with closing(sqlite3.connect(part)) as copy:
            connection.backup(copy)
        part.replace(target)
    except OSError as error:
        raise _unwritable(target, str(error)) from None
    finally:
        part.unlink(missing_ok=True)


def connect(path: Path) -> sqlite3.Connection:
    """Open the database for reading and writing, with foreign keys on and transactions begun by hand."""
    connection = sqlite3.connect(path, timeout=BUSY_TIMEOUT_S, isolation_level=None)
    try:
        connection.row_factory = sqlite3.Row
        connection.execute("PRAGMA foreign_keys = ON")
        connection.execute("PRAGMA synchronous = NORMAL")
    except BaseException:
        connection.close()
        raise
    return connection


def inspect(path: Path) -> int:
    """Return the schema version, 0 for a file to be made; writes nothing, not even beside the file."""
    try:
        with path.open("rb") as file:
            head = file.read(len(_MAGIC))
    except FileNotFoundError:
        return 0
    except OSError as error:
        raise _unwritable(path, str(error)) from None
    if not head:
        return 0
    if head != _MAGIC:
        raise _corrupt(path, "a file that is no SQLite database")
    deadline = time.monotonic() + _INSPECT_S
    while True:
        # Without a log beside it the file is all there is, and a reader that takes no locks leaves no trace.
        immutable = not _has_log(path)
        try:
            return _read_version(path, immutable)
        except (sqlite3.DatabaseError, FlashrtError) as error:
            # Another process may have written while we read without locks: look again, now with them.
            moved = immutable and _has_log(path)
            waiting = isinstance(error, sqlite3.OperationalError) and _code(error) not in _CORRUPT_CODES
            if (moved or waiting) and time.monotonic() < deadline:
                time.sleep(0.01)
                continue
            if isinstance(error, FlashrtError):
                raise
            raise _explained(path, error) from None


def _has_log(path: Path) -> bool:
    try:
        return os.stat(f"{path}-wal").st_size > 0
    except OSError:
        return False


def _read_version(path: Path, immutable: bool) -> int:
    uri = f"file:{quote(str(path))}?mode=ro" + ("&immutable=1" if immutable else "")
    with closing(sqlite3.connect(uri, uri=True, timeout=BUSY_TIMEOUT_S)) as connection:
        version = int(connection.execute("PRAGMA user_version").fetchone()[0])
        if version > SCHEMA_VERSION:
            raise input_error(
                f"database '{path}'",
                f"schema version {SCHEMA_VERSION} or older, which this release of flashrt ({__version__}) reads",
                f"version {version}, written by {_release_of(connection, version)}",
                "upgrade flashrt, or name another workspace; the file was left as it is",
                rule="newer-database",
            )
        problems = [str(row[0]) for row in connection.execute("PRAGMA quick_check(3)")]
        if problems != ["ok"]:
            raise _corrupt(path, "damage: " + "; ".join(" ".join(problem.split()) for problem in problems))
        if version == 0 and connection.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]:
            raise _corrupt(path, "a database of another program")
    return version


def _release_of(connection: sqlite3.Connection, version: int) -> str:
    try:
        row = connection.execute("SELECT release FROM releases WHERE schema = ?", (version,)).fetchone()
    except sqlite3.DatabaseError:
        row = None
    return f"flashrt {row[0]}" if row is not None else "a newer release"


@contextmanager
def only_one(path: Path) -> Iterator[None]:
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    except OSError as error:
        raise _unwritable(path, str(error)) from None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


_CORRUPT_CODES = {sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_SCHEMA, sqlite3.SQLITE_ERROR}
_UNWRITABLE_CODES = {sqlite3.SQLITE_READONLY, sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_PERM, sqlite3.SQLITE_AUTH}
_DISK_CODES = {sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR}
_BUSY_CODES = {sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED}


def _code(error: sqlite3.Error) -> int:
    return int(getattr(error, "sqlite_errorcode", sqlite3.SQLITE_ERROR)) & 0xFF


def _explained(path: Path, error: sqlite3.Error) -> FlashrtError | sqlite3.Error:
    code = _code(error)
    if code in _CORRUPT_CODES:
        return _corrupt(path, str(error))
    if code in _UNWRITABLE_CODES:
        return _unwritable(path, str(error))
    if code in _DISK_CODES:
        return ResourceMissingError(f"database '{path}': the disk refuses ({error}); make room on it and call again")
    if code in _BUSY_CODES:
        return ResourceMissingError(
            f"database '{path}': another process has kept it locked for {BUSY_TIMEOUT_S:.0f} s; call again",
            retry_after_s=BUSY_TIMEOUT_S,
        )
    return error


@contextmanager
def translated(path: Path) -> Iterator[None]:
    """Turn what SQLite says about the file into an error that an agent can act on; our own faults pass as they are."""
    try:
        yield
    except sqlite3.DatabaseError as error:
        explained = _explained(path, error)
        if explained is error:
            raise
        raise explained from None


def _corrupt(path: Path, got: str) -> FlashrtError:
    return input_error(
        f"database '{path}'",
        "a sound database of FlashRT",
        got,
        f"run \"flashrt repair --workspace '{path.parent.parent}'\": it keeps the file as a backup and "
        f"makes a new one of what can still be read; or move '{path.name}' (and '{path.name}-wal', "
        f"'{path.name}-shm') aside and call again: a new one is made. The file was left as it is",
        rule="corrupt-database",
    )


def _unwritable(path: Path, got: str) -> FlashrtError:
    return input_error(
        f"database '{path}'",
        "a file in a folder that can be written to",
        got,
        "make the folder writable, or name another workspace with --workspace",
        rule="unwritable-workspace",
    )
