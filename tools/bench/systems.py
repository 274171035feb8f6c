"""What a system reference means: code with buffers, a program for the interpreter, a deployment for the runtime."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from flashrt.errors import Finding, input_error, listed

CODE_SUFFIXES = {".py", ".yaml", ".yml", ".json"}
SKIPPED_FOLDERS = {".flashrt", ".git", ".venv", "__pycache__", "node_modules"}
MAX_HASHED_FILES = 2000
HASH_DIGITS = 16

FindId = Callable[[str], "Found | None"]


@dataclass(frozen=True)
class System:
    """A system under test, found but not started.

    `digest` covers the code and documents in its folder: it changes when the system does.

    Attributes
    ----------
    path
        The Python file, or the document.
    program, folder
        Documents only: the program document, and the folder that its ops file is in.
    """

    reference: str
    kind: Literal["code", "program", "deployment"]
    path: Path
    function: str
    digest: str
    program: Path | None = None
    folder: Path | None = None
    profile: Path | None = None
    """Deployments on emulated devices only: the profile whose times they take."""
    emulated: bool = False
    root: Path | None = None
    """The folder that the digest covers."""
    runs_in: Path | None = None
    """The folder that it starts in; None: that of `path`."""
    measured: Mapping[str, Any] = field(default_factory=dict)
    """Deployments only: what a profile asks of the workers, see `flashrt.runtime.measuring`."""
    files: Mapping[str, str] = field(default_factory=dict, compare=False, repr=False)
    """Path in `root` -> short hash, of every file that the digest covers."""

    @property
    def entry_digest(self) -> str:
        """Hash of the file that the reference names, alone."""
        return hashlib.sha256(self.path.read_bytes()).hexdigest()[:HASH_DIGITS]

    def media_rates(self) -> dict[str, float]:
        """Return what the program says of its outputs: elements in a second of each medium; code says nothing."""
        if self.program is None:
            return {}
        from flashrt.ir.documents import read_document

        document = read_document(self.program)
        outputs = document["graphs"][document["entry"]].get("outputs") or {}
        return {name: port["rate_hz"] for name, port in outputs.items() if (port or {}).get("rate_hz")}

    def as_record(self) -> dict[str, Any]:
        """Return what a verdict or run keeps of the system."""
        return {
            "reference": self.reference,
            "kind": self.kind,
            "digest": self.digest,
            "entry": str(self.path),
            "entry_digest": self.entry_digest,
            "files": dict(self.files),
        }

    def as_hello(self) -> dict[str, Any]:
        """Return what the host process needs to load it."""
        return {
            "kind": self.kind,
            "path": str(self.path),
            "function": self.function,
            "program": str(self.program or ""),
            "folder": str(self.folder or ""),
            "profile": str(self.profile or ""),
            "measured": dict(self.measured),
        }


@dataclass(frozen=True)
class Found:
    """A document that an id names: where it is, and the folder that a program's ops file is in."""

    path: Path
    folder: Path


def inside(workspace: Path, text: str, where: str) -> Path:
    """Return the path that `text` names in the workspace.

    Raises
    ------
    InputError
        It lies outside the workspace, links resolved, or no file can have that path.
    """
    root = workspace.resolve()
    try:
        path = (root / text).resolve()
        path.is_file()
    # Python before 3.13 calls a loop of links a RuntimeError.
    except (OSError, ValueError, RuntimeError) as error:
        raise input_error(
            where, "a path that a file can have", f"{text[:80]!r} ({getattr(error, 'strerror', error)})",
            "correct the path", rule="impossible-path",
        ) from None  # fmt: skip
    if not path.is_relative_to(root):
        raise input_error(
            where, "a path inside the workspace", f"'{text}'", "copy the file into the workspace and name it there",
            rule="outside-workspace",
        )  # fmt: skip
    return path


def split_function(text: str, where: str, example: str) -> tuple[str, str]:
    """Return file and function of ``path/to/file.py:function``."""
    file, separator, function = text.rpartition(":")
    if not separator or not file.endswith(".py") or not function.isidentifier():
        raise input_error(where, f"file.py:function, such as '{example}'", f"'{text}'", "correct the reference")
    return file, function


def find_file(workspace: Path, text: str, where: str) -> Path:
    """Return an existing file of the workspace; an absent one is refused with its neighbours' names."""
    path = inside(workspace, text, where)
    if not path.is_file():
        folder = path if path.is_dir() else path.parent
        near = sorted(str(p.relative_to(workspace.resolve())) for p in folder.glob("*") if p.is_file())
        raise input_error(
            where, f"an existing file; {'in that folder' if path.is_dir() else 'beside it'} are {listed(near)}",
            f"'{text}', a folder" if path.is_dir() else f"'{text}'", "correct the path",
            rule="no-such-file", valid=near, name=text,
        )  # fmt: skip
    return path


def resolve_system(
    reference: str, workspace: Path, where: str = "argument 'system'", find_id: FindId | None = None
) -> System:
    """Find a system by its reference.

    Parameters
    ----------
    reference
        ``path/to/file.py:function``, a program or deployment document, or an id that `find_id` knows.

    Raises
    ------
    InputError
        It is outside the workspace, absent, or none of these.
    """
    known = find_id(reference) if find_id else None
    if known is not None:
        return _document_system(reference, known, workspace, where, find_id)
    if ".py" in reference:
        file, function = split_function(reference, where, "variant.py:serve")
        path = find_file(workspace, file, where)
        files = hash_folder(path.parent)
        digest = digest_of(files, f"{path.name}:{function}")
        return System(reference, "code", path, function, digest, root=path.parent, files=files)
    if not reference.endswith((".yaml", ".yml", ".json")):
        raise input_error(
            where, "file.py:function, a program or deployment document, or an id of one", f"'{reference}'",
            "call ir_build for the id of a program, or name a file", rule="unknown-system",
        )  # fmt: skip
    path = find_file(workspace, reference, where)
    return _document_system(reference, Found(path, path.parent), workspace, where, find_id)


def _document_system(reference: str, found: Found, workspace: Path, where: str, find_id: FindId | None) -> System:
    from flashrt.ir.documents import read_document

    document = read_document(found.path)
    schema = str(document.get("schema"))
    own = hashlib.sha256(found.path.read_bytes()).hexdigest()
    if schema == "flashrt/program@1":
        files = hash_folder(found.folder)
        digest = digest_of(files, f"program:{own}")
        return System(
            reference, "program", found.path, "", digest, found.path, found.folder, root=found.folder, files=files
        )
    if schema == "flashrt/deployment@1":
        beside = found.path.parent
        program = find_named(str(document.get("program")), "program", beside, workspace, where, find_id)
        profile = None
        if document.get("profile"):
            profile = find_named(str(document["profile"]), "profile", beside, workspace, where, find_id).path
        times = hashlib.sha256(profile.read_bytes()).hexdigest() if profile else ""
        files = hash_folder(program.folder)
        digest = digest_of(files, f"deployment:{own}:{times}:{program.path.name}")
        return System(
            reference, "deployment", found.path, "", digest, program.path, program.folder, profile,
            emulated=document.get("devices") == "emulated", root=program.folder, files=files,
        )  # fmt: skip
    raise input_error(
        where, "a document with schema flashrt/program@1 or flashrt/deployment@1", f"schema {schema}",
        "name a program or a deployment", rule="wrong-schema",
    )  # fmt: skip


def find_named(
    reference: str, kind: str, beside: Path, workspace: Path, where: str, find_id: FindId | None = None
) -> Found:
    """Return the document that a deployment's key `kind` names: an id, or a path beside it or in the workspace.

    Raises
    ------
    InputError
        None of these, or outside the workspace.
    """
    known = find_id(reference) if find_id else None
    if known is not None:
        return known
    root = workspace.resolve()
    for folder in (beside, root):
        try:
            path = (folder / reference).resolve()
            found = path.is_file() and path.is_relative_to(root)
        # No file can have that name, or it is a loop of links.
        except (OSError, ValueError, RuntimeError):
            continue
        if found:
            return Found(path, path.parent)
    raise input_error(
        f"{where}, key '{kind}'", f"a {kind} document beside the deployment or in the workspace, or an id",
        f"'{reference}'", "correct the path, or name an id that a tool returned", rule=f"unknown-{kind}",
    )  # fmt: skip


def hash_folder(folder: Path) -> dict[str, str]:
    """Return path -> short hash for all code and documents in `folder`; links to folders are not followed."""
    files = sorted(_code_files(folder))
    if len(files) > MAX_HASHED_FILES:
        raise input_error(
            f"folder '{folder.name}'", f"at most {MAX_HASHED_FILES} code files and documents beside a system",
            str(len(files)), "give the system a folder of its own", rule="too-many-files",
        )  # fmt: skip
    return {str(p.relative_to(folder)): hashlib.sha256(p.read_bytes()).hexdigest()[:HASH_DIGITS] for p in files}


def digest_of(files: Mapping[str, str], entry: str) -> str:
    """Return the hash of a system: its files and what is run of them."""
    return hashlib.sha256(json.dumps([entry, dict(files)]).encode()).hexdigest()[:HASH_DIGITS]


def find_changes(before: Mapping[str, str], after: Mapping[str, str]) -> list[str]:
    """Return the files that were added, removed or changed, each with which of the three."""
    words = {(False, True): "added", (True, False): "removed", (True, True): "changed"}
    return [
        f"{path} {words[path in before, path in after]}"
        for path in sorted({*before, *after})
        if before.get(path) != after.get(path)
    ]


def changed_files(system: System) -> list[str]:
    """Return what has changed on disk since the system was found."""
    return find_changes(system.files, hash_folder(system.root)) if system.root else []


def remove_bytecode(system: System) -> None:
    """Remove compiled files beside a system's sources, so that what runs is what its digest covers."""
    if system.root is None:
        return
    for folder in {path.parent for path in _code_files(system.root)}:
        shutil.rmtree(folder / "__pycache__", ignore_errors=True)


def check_system_times(
    system: System, devices: Sequence[str] = (), config: Mapping[str, Any] | None = None
) -> list[Finding]:
    """Return why the measured profile that a deployment names is not that of its program as it would run now.

    Raises
    ------
    InputError
        One of the three documents is wrong.
    """
    from flashrt.analysis.deployment import read_deployment
    from flashrt.analysis.profile import read_profile
    from flashrt.ir.building import build
    from flashrt.ir.documents import read_document
    from flashrt.runtime.serve import check_times

    if system.kind != "deployment" or system.profile is None or system.program is None or system.folder is None:
        return []
    profile = read_profile(system.profile)
    if profile.key is None:
        return []
    built = build(read_document(system.program), system.folder)
    document = read_deployment(system.path, built).document
    return check_times(built, document, profile, system.profile.name, devices, config)


def _code_files(folder: Path) -> list[Path]:
    found = []
    pending = [folder]
    while pending:
        for path in pending.pop().iterdir():
            if path.is_dir() and not path.is_symlink() and path.name not in SKIPPED_FOLDERS:
                pending.append(path)
            elif path.is_file() and path.suffix in CODE_SUFFIXES:
                found.append(path)
    return found
