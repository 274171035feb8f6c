"""A workspace's damaged database: kept as a backup, and a new one made of what can still be read of it."""

from __future__ import annotations

import os
import shutil
import sqlite3
import tempfile
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from flashrt.errors import InputError, input_error
from flashrt.variants import database
from flashrt.variants.store import FOLDER

TABLES = ("records", "reservations", "variants", "history", "jobs")
"""Those that hold what a user made, the referred to before those that refer to them."""
LOGS = ("-wal", "-shm")


@dataclass(frozen=True)
class Repaired:
    """What a repair found.

    Parameters
    ----------
    backup
        The damaged file as it was, with its log beside it where there was one.
    kept
        Rows that the new database has, by table.
    whole
        Whether every row of every table could be read; else some may be missing.
    """

    backup: Path
    kept: dict[str, int]
    whole: bool

    def __str__(self) -> str:
        counts = ", ".join(f"{number} {table}" for table, number in self.kept.items())
        rest = "all that there was" if self.whole else "the rest cannot be read"
        return f"the damaged database is kept as '{self.backup.name}'; the new one has {counts} ({rest})"


def repair(workspace: Path) -> Repaired:
    """Put a new database in the place of a damaged one, which is kept, byte for byte, under a name of its own.

    Raises
    ------
    InputError
        There is no database, or nothing is wrong with it that a repair could mend.
    """
    path = workspace.resolve() / FOLDER / "flashrt.db"
    if not path.is_file():
        raise input_error(
            f"database '{path}'", "a damaged database", "none", "call any tool: it makes one", rule="no-database"
        )
    with database.only_one(path.with_name("setup.lock")):
        _require_damage(path)
        with tempfile.TemporaryDirectory(dir=path.parent, prefix="repair-") as name:
            fresh = Path(name) / path.name
            damaged = Path(name) / "damaged.db"
            # Reading writes beside a database; the backup is to stay as it is.
            for suffix in ("", *LOGS):
                if (found := Path(f"{path}{suffix}")).is_file():
                    shutil.copyfile(found, f"{damaged}{suffix}")
            database.make(fresh)
            kept, whole = _salvage(damaged, fresh, _last_variant(path.parent))
            backup = _free_name(path)
            # At each moment there is a database, and what fails before the last steps has changed nothing. The log goes
            # before the new file comes, which must not take it for its own.
            shutil.copy2(path, backup)
            for suffix in LOGS:
                if Path(f"{path}{suffix}").exists():
                    os.replace(f"{path}{suffix}", f"{backup}{suffix}")
            os.replace(fresh, path)
    return Repaired(backup, kept, whole)


def _require_damage(path: Path) -> None:
    try:
        database.inspect(path)
    except InputError as error:
        if [finding.rule for finding in error.findings] == ["corrupt-database"]:
            return
        raise
    raise input_error(
        f"database '{path}'", "a damaged one", "one that is sound", "there is nothing to repair", rule="sound-database"
    )


def _free_name(path: Path) -> Path:
    number = 1
    while (backup := path.with_name(f"{path.stem}-damaged-{number}{path.suffix}")).exists():
        number += 1
    return backup


def _last_variant(folder: Path) -> int:
    """Return the largest number that a variant's folder has, so that no new variant takes the folder of a lost one."""
    digits = [path.name.rpartition("-")[2] for path in (folder / "variants").glob("var-*")]
    return max((int(one) for one in digits if one.isdecimal()), default=0)


def _salvage(damaged: Path, fresh: Path, last_variant: int) -> tuple[dict[str, int], bool]:
    kept = dict.fromkeys(TABLES, 0)
    whole = True
    with closing(database.connect(fresh)) as target:
        # A row may be readable although that which it refers to is not.
        target.execute("PRAGMA foreign_keys = OFF")
        target.execute("BEGIN IMMEDIATE")
        for table in TABLES:
            names = [str(row["name"]) for row in target.execute(f"PRAGMA table_info({table})")]
            for row in _rows(damaged, table):
                if row is None or not _insert(target, table, names, row):
                    whole = False
        target.execute(
            "UPDATE variants SET parent = NULL WHERE parent IS NOT NULL AND parent NOT IN (SELECT id FROM variants)"
        )
        target.execute("DELETE FROM history WHERE variant NOT IN (SELECT id FROM variants)")
        last = target.execute("SELECT coalesce(max(number), 0) FROM variants").fetchone()[0]
        target.execute("DELETE FROM sqlite_sequence WHERE name = 'reservations'")
        target.execute("INSERT INTO sqlite_sequence VALUES ('reservations', ?)", (max(int(last), last_variant),))
        for table in TABLES:
            kept[table] = int(target.execute(f"SELECT count(*) FROM {table}").fetchone()[0])
        target.commit()
        # One file, without a log beside it, can be put into its place at once.
        target.execute("PRAGMA journal_mode = DELETE")
    return kept, whole


def _rows(damaged: Path, table: str) -> Iterator[dict[str, object] | None]:
    """Yield the rows that can be read, from both ends up to where it is damaged; None for what cannot."""
    for order in ("ASC", "DESC"):
        try:
            with closing(sqlite3.connect(damaged)) as source:
                source.row_factory = sqlite3.Row
                for row in source.execute(f"SELECT * FROM {table} NOT INDEXED ORDER BY rowid {order}"):
                    yield dict(row)
                return
        except (sqlite3.DatabaseError, UnicodeDecodeError, OverflowError):
            yield None


def _insert(target: sqlite3.Connection, table: str, names: list[str], row: dict[str, object]) -> bool:
    found = [name for name in row if name in names]
    marks = ", ".join("?" * len(found))
    try:
        target.execute(
            f"INSERT OR IGNORE INTO {table} ({', '.join(found)}) VALUES ({marks})", [row[name] for name in found]
        )
    except sqlite3.DatabaseError:
        return False
    return True
