"""The queue of variants: added or seeded, claimed by rank, and decided only with evidence or a reason."""

from __future__ import annotations

import json
import os
import sqlite3
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flashrt.errors import Finding, InputError
from flashrt.variants.evidence import check_evidence
from flashrt.variants.isolation import isolate, remove_folder, variants_folder
from flashrt.variants.owners import Owner
from flashrt.variants.refusals import add_findings, claim_findings, rank_findings, state_findings
from flashrt.variants.seeding import Seeds, seed_rows
from flashrt.variants.store import Store
from flashrt.variants.variant import CLAIM_S, QueueStatus, Variant, default_rank, from_rows, judge

# Inside the class `list` is the method.
Ids = list[str]


@dataclass(frozen=True)
class Answer:
    """A variant, where there is one, and the queue's state after the call."""

    variant: Variant | None
    status: QueueStatus

    def as_dict(self) -> dict[str, Any]:
        """Return the tool's answer: the variant's fields (``variant`` is its id, or None) and the queue's state."""
        record: dict[str, Any] = {"variant": None} if self.variant is None else self.variant.as_dict()
        return {**record, **self.status.as_dict()}


@dataclass(frozen=True)
class Listing:
    """All variants, oldest first, and the queue's state."""

    variants: tuple[Variant, ...]
    status: QueueStatus

    def as_dict(self, *, history: bool = False) -> dict[str, Any]:
        """Return the answer of ``variant_list``; with `history`, every change of state in it."""
        return {"variants": [variant.as_dict(history=history) for variant in self.variants], **self.status.as_dict()}


class VariantQueue:
    """The variants of one workspace; any number of processes may use it at once.

    Opening it removes the folders that an interrupted `add` left behind.

    Parameters
    ----------
    now_s
        Seconds since 1970; tests pass their own.
    """

    def __init__(self, store: Store, *, now_s: Callable[[], float] = time.time) -> None:
        self._store = store
        self._now_s = now_s
        self._clean_strays()

    def add(
        self,
        hypothesis: str,
        transformation: str,
        bottleneck: str,
        legality: str,
        *,
        system: str | None = None,
        parent: str | None = None,
        expected: Mapping[str, Any] | None = None,
        rank: float | None = None,
    ) -> Answer:
        """Add a pending variant with a folder of its own; it is seen by others only when the folder is complete.

        Parameters
        ----------
        legality
            Why the results stay the same.
        parent
            The variant it builds on: its folder starts from the parent's.
        expected
            What it should do, for example ``{"rate_ratio": 1.4}``.

        Raises
        ------
        InputError
            Something is empty or unknown (every finding is named), or the folder cannot be made.
        """
        words = {"hypothesis": hypothesis, "transformation": transformation, "bottleneck": bottleneck,
                 "legality": legality}  # fmt: skip
        with self._store.writing() as connection:
            known = self._read(connection)
            findings = add_findings(words, system, parent, expected, rank, known)
            if findings:
                raise InputError(findings)
            number = connection.execute(
                "INSERT INTO reservations (owner) VALUES (?)", (Owner.this_process().as_text(),)
            ).lastrowid
            assert number is not None, "an insert has a row number"
        id = variant_id(number)
        try:
            folder = isolate(self._store.workspace, id, known[parent].folder if parent else None)
            with self._store.writing() as connection:
                connection.execute("DELETE FROM reservations WHERE number = ?", (number,))
                row = {
                    **words,
                    "system": system,
                    "parent": parent,
                    "expected": json.dumps(dict(expected or {})),
                    "rank": float(rank) if rank is not None else default_rank(expected or {}),
                    "folder": self._store.relative(folder.path),
                    "isolation": json.dumps(folder.as_dict()),
                }
                self._insert(connection, number, "pending", None, row)
                return self._answer(connection, id)
        except BaseException:
            remove_folder(self._store.workspace, id)
            with self._store.writing() as connection:
                connection.execute("DELETE FROM reservations WHERE number = ?", (number,))
            raise

    def next(self, variant: str | None = None) -> Answer:
        """Claim the pending variant of the highest rank, the oldest among equals; no two callers get the same.

        With `variant`, claim that one, which must be pending.

        A claim older than an hour is offered again. Without a pending variant the answer holds none, and says
        whether the search may stop and what stands in its way.

        Raises
        ------
        InputError
            `variant` is unknown or not pending, or the folder of a seeded variant cannot be made; the claim is given
            back.
        """
        now = self._now_s()
        with self._store.writing() as connection:
            if variant is not None:
                findings = claim_findings(variant, self._read(connection))
                if findings:
                    raise InputError(findings)
            row = connection.execute(
                "SELECT id, state FROM variants WHERE (state = 'pending' OR (state = 'claimed' AND claimed_at < ?)) "
                "AND (? IS NULL OR id = ?) ORDER BY rank DESC, number LIMIT 1",
                (now - CLAIM_S, variant, variant),
            ).fetchone()
            if row is None:
                return self._answer(connection, None)
            reason = None if row["state"] == "pending" else "the earlier claim is over an hour old"
            self._set_state(connection, row["id"], row["state"], "claimed", reason=reason)
            claimed = self._read(connection)[row["id"]]
        if claimed.folder is None or not claimed.folder.is_dir():
            try:
                self._make_folder(claimed)
            except BaseException:
                self._give_back(claimed)
                raise
        with self._store.reading() as connection:
            return self._answer(connection, claimed.id)

    def update(
        self,
        variant: str,
        state: str,
        *,
        equivalence: str | None = None,
        run: str | None = None,
        reason: str | None = None,
        ranks: Mapping[str, float] | None = None,
        system: str | None = None,
    ) -> Answer:
        """Decide a variant, or give it back, and re-rank others, all in one step; a refusal changes nothing.

        Parameters
        ----------
        state
            ``measured`` needs `equivalence` and `run`; ``removed`` needs `reason`; ``pending`` gives a claim back, and
            opens a decided variant again when a `reason` says why.
        ranks
            New ranks of variants that are not decided.
        system
            The variant's system, where it differs from what was said before. A measured variant that never had one
            gets the system that its check names as candidate.

        Raises
        ------
        InputError
            With everything that is wrong.
        """
        where = f"variant_update, variant '{variant}'"
        with self._store.writing() as connection:
            known = self._read(connection)
            findings = state_findings(where, variant, state, reason, ranks, known)
            if system is not None and (not isinstance(system, str) or not system.strip()):
                findings.append(Finding(f"{where}, system", "a reference", repr(system), "name it or leave it out"))
            before = known.get(variant)
            if state == "measured" and before is not None:
                findings += check_evidence(
                    where, before, system or before.system, equivalence, run, self._payload, self._store.workspace
                )
            elif before is not None:
                for kind, id in (("equivalence", equivalence), ("run", run)):
                    findings += self._unknown(where, kind, id)
            findings += rank_findings(where, variant, state, ranks, known)
            if findings:
                raise InputError(findings)
            assert before is not None, "an unknown variant is a finding"
            if state == "measured" and system is None and before.system is None and equivalence is not None:
                system = self._payload("equivalence", equivalence)["candidate"].get("reference")
            if state != before.state:
                self._set_state(connection, variant, before.state, state, reason, equivalence, run)
            if system is not None:
                connection.execute("UPDATE variants SET system = ? WHERE id = ?", (system, variant))
            for id, rank in (ranks or {}).items():
                connection.execute("UPDATE variants SET rank = ? WHERE id = ?", (float(rank), id))
            return self._answer(connection, variant)

    def list(self) -> Listing:
        """Return all variants with lineage and history, and whether the search may stop."""
        with self._store.reading() as connection:
            variants = tuple(self._read(connection).values())
        return Listing(variants, judge(variants, self._now_s()))

    def seed(self, candidates: Sequence[Mapping[str, Any]], *, max_devices: int | None = None) -> Seeds:
        """Add the candidates of an analysis: legal ones pending, illegal ones removed with the argument as reason.

        Legal ones that need more than `max_devices` devices, or whose deployment an earlier candidate has already, are
        added as removed too, with that as reason.

        One that is in the queue already is not added again; a pending one that was seeded without a profile gets what
        is expected of it now. Folders are made when a variant is claimed.

        Raises
        ------
        InputError
            A candidate lacks a key; nothing is added then.
        """
        rows = seed_rows(candidates, max_devices)
        ids: dict[str, str] = {}
        added: Ids = []
        removed: Ids = []
        already: Ids = []
        with self._store.writing() as connection:
            present = {row["candidate"]: row for row in connection.execute(
                "SELECT * FROM variants WHERE candidate IS NOT NULL")}  # fmt: skip
            for row in rows:
                refusal, twin = row.pop("refusal"), row.pop("twin")
                found = present.get(row["candidate"])
                if found is not None:
                    ids[row["candidate"]] = found["id"]
                    already.append(found["id"])
                    _complete(connection, found, row)
                    continue
                number = connection.execute(
                    "INSERT INTO reservations (owner) VALUES (?)", (Owner.this_process().as_text(),)
                ).lastrowid
                assert number is not None, "an insert has a row number"
                connection.execute("DELETE FROM reservations WHERE number = ?", (number,))
                ids[row["candidate"]] = variant_id(number)
                reason = refusal or (f"the same deployment as {twin} ({ids[twin]})" if twin else None)
                self._insert(connection, number, "removed" if reason else "pending", reason, row)
                (removed if reason else added).append(variant_id(number))
            answer = self._answer(connection, None)
        return Seeds(tuple(added), tuple(removed), tuple(already), answer.status)

    def _insert(
        self, connection: sqlite3.Connection, number: int, state: str, reason: str | None, row: Mapping[str, Any]
    ) -> None:
        now = self._now_s()
        full = {"number": number, "id": variant_id(number), "state": state, "reason": reason, "created_at": now,
                "updated_at": now, **row}  # fmt: skip
        names = ", ".join(full)
        marks = ", ".join(f":{name}" for name in full)
        connection.execute(f"INSERT INTO variants ({names}) VALUES ({marks})", full)
        connection.execute(
            "INSERT INTO history (variant, at, from_state, to_state, reason) VALUES (?, ?, NULL, ?, ?)",
            (full["id"], now, state, reason),
        )

    def _set_state(
        self,
        connection: sqlite3.Connection,
        id: str,
        before: str,
        after: str,
        reason: str | None = None,
        equivalence: str | None = None,
        run: str | None = None,
    ) -> None:
        now = self._now_s()
        # The reason of a claim or of giving it back is history; the variant shows the one it was decided for.
        shown = reason if after in {"measured", "removed"} else None
        connection.execute(
            "UPDATE variants SET state = ?, reason = ?, equivalence = ?, run = ?, updated_at = ?, claimed_at = ? "
            "WHERE id = ?",
            (after, shown, equivalence, run, now, now if after == "claimed" else None, id),
        )
        connection.execute(
            "INSERT INTO history (variant, at, from_state, to_state, reason, equivalence, run) "
            "VALUES (?, ?, ?, ?, ?, ?, ?)",
            (id, now, before, after, reason, equivalence, run),
        )

    def _make_folder(self, variant: Variant) -> None:
        with self._store.reading() as connection:
            known = self._read(connection)
            document = connection.execute("SELECT deployment FROM variants WHERE id = ?", (variant.id,)).fetchone()[0]
        parent = known[variant.parent].folder if variant.parent else None
        folder = isolate(self._store.workspace, variant.id, parent)
        if document is not None:
            _write_deployment(self._store.workspace, folder.path, json.loads(document))
        with self._store.writing() as connection:
            connection.execute(
                "UPDATE variants SET folder = ?, isolation = ? WHERE id = ?",
                (self._store.relative(folder.path), json.dumps(folder.as_dict()), variant.id),
            )

    def _give_back(self, variant: Variant) -> None:
        with self._store.writing() as connection:
            state = connection.execute("SELECT state FROM variants WHERE id = ?", (variant.id,)).fetchone()[0]
            if state == "claimed":
                self._set_state(connection, variant.id, state, "pending", reason="its folder could not be made")

    def _payload(self, kind: str, id: str) -> Mapping[str, Any]:
        return self._store.get_record(kind, id).payload

    def _unknown(self, where: str, kind: str, id: str | None) -> Sequence[Finding]:
        if id is None:
            return ()
        try:
            self._payload(kind, id)
        except InputError as error:
            return [Finding(f"{where}, {one.where}", one.expected, one.got, one.fix, one.rule, one.nearest)
                    for one in error.findings]  # fmt: skip
        return ()

    def _read(self, connection: sqlite3.Connection) -> dict[str, Variant]:
        rows = connection.execute("SELECT * FROM variants ORDER BY number").fetchall()
        history = connection.execute("SELECT * FROM history ORDER BY number").fetchall()
        return from_rows(rows, history, self._store.workspace)

    def _answer(self, connection: sqlite3.Connection, id: str | None) -> Answer:
        known = self._read(connection)
        return Answer(None if id is None else known[id], judge(tuple(known.values()), self._now_s()))

    def _clean_strays(self) -> None:
        """Remove folders that no variant and no running `add` knows."""
        folder = variants_folder(self._store.workspace)
        # Looked at first: whoever makes a folder has reserved its number before.
        found = sorted(path.name for path in folder.iterdir()) if folder.is_dir() else []
        with self._store.reading() as connection:
            kept = {row[0] for row in connection.execute("SELECT id FROM variants")}
            reserved = connection.execute("SELECT number, owner FROM reservations").fetchall()
        abandoned = [row["number"] for row in reserved if Owner.parse(row["owner"]).is_gone()]
        kept |= {variant_id(row["number"]) for row in reserved if row["number"] not in abandoned}
        for name in found:
            if name.startswith("var-") and name not in kept:
                remove_folder(self._store.workspace, name)
        if abandoned:
            with self._store.writing() as connection:
                connection.executemany("DELETE FROM reservations WHERE number = ?", [(one,) for one in abandoned])


def variant_id(number: int) -> str:
    """Return the id of the variant with this number."""
    return f"var-{number:04d}"


def _complete(connection: sqlite3.Connection, found: sqlite3.Row, row: Mapping[str, Any]) -> None:
    """Give a pending variant what its candidate says now and did not say when it was seeded."""
    if found["state"] != "pending":
        return
    if found["deployment"] is None and row["deployment"] is not None and found["folder"] is None:
        connection.execute("UPDATE variants SET deployment = ? WHERE id = ?", (row["deployment"], found["id"]))
    if found["expected"] == "{}" and row["expected"] != "{}":
        rank = found["rank"] or row["rank"]
        connection.execute(
            "UPDATE variants SET expected = ?, rank = ? WHERE id = ?", (row["expected"], rank, found["id"])
        )


def _write_deployment(workspace: Path, folder: Path, document: dict[str, Any]) -> None:
    """Write the candidate's deployment into the variant's folder, its program named from there."""
    import yaml

    program = document.get("program")
    if isinstance(program, str):
        path = Path(os.path.normpath(workspace / program))
        if path.is_file() and path.is_relative_to(workspace):
            own = folder / path.relative_to(workspace)
            document = {**document, "program": os.path.relpath(own if own.is_file() else path, folder)}
    text = yaml.safe_dump(document, sort_keys=False, allow_unicode=True)
    (folder / "deployment.yaml").write_text(text, encoding="utf-8")
