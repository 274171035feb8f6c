"""The key of a measured profile: all that its times depend on; and what of it no longer holds.

Parts that are compared: the program document, node by node; every file of its folder that was read to run it; the
options; versions; kind and name of the device. Kept to be read, not compared: the cores, the inputs, the degrees.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from flashrt.analysis.profile import Profile
from flashrt.errors import Finding, listed
from flashrt.gpu import Kind, inventory
from flashrt.ir import BuiltProgram, dump
from flashrt.ir.hashing import content_hash

KEY_VERSION = 2
PACKAGES = ("flashrt", "torch", "numpy", "diffusers", "transformers")
STALE, FOREIGN = "stale-profile", "foreign-profile"
AGAIN = "call profile_measure again and use the profile that it returns"
WHOLE_BYTES, PART_BYTES = 16 << 20, 1 << 20
HASH_DIGITS = 16
NONE = "none"


@dataclass(frozen=True)
class Use:
    """What a profile is to be used for; None: it is not said, and not compared."""

    devices: str | None = None
    """Kind of device that the deployment runs on: ``cpu``, ``cuda``, ``rocm``, ``emulated``."""
    names: tuple[str, ...] = ()
    """The devices themselves, as runs call them: ``cuda:1``; empty: any of this machine of that kind."""
    config: Mapping[str, Any] | None = None
    """Options that the operations are loaded with."""


def make_key(
    built: BuiltProgram,
    *,
    files: Iterable[str],
    kind: str,
    devices: Sequence[str],
    config: Mapping[str, Any],
    inputs: Mapping[str, str],
    degrees: Sequence[int],
) -> dict[str, Any]:
    """Return the key of a profile that was measured just now, on this machine.

    Parameters
    ----------
    files
        Files that the operations were made of, relative to the program's folder.
    kind, devices
        Kind of device, and the devices that were used, by name.
    inputs
        Input -> dtype and shape of its values.
    """
    names = sorted({*files, built.program.ops.partition(":")[0]} if built.program.ops else set(files))
    found = {name: fingerprint(built.folder / name) for name in names}
    return {
        "version": KEY_VERSION,
        "program": built.id,
        "structure": _structure(built),
        "files": {name: value for name, value in found.items() if value is not None},
        "config": json.loads(json.dumps(dict(config))),
        "config_files": _config_files(config),
        "packages": package_versions(),
        "device": {"kind": kind, "name": " + ".join(_names_here(kind, devices)), "driver": _driver(kind)},
        "devices": list(devices),
        "cores": len(os.sched_getaffinity(0)),
        "affinity": sorted(os.sched_getaffinity(0)),
        "threads": os.environ.get("OMP_NUM_THREADS", "1"),
        "inputs": dict(inputs),
        "degrees": list(degrees),
    }


def check_profile_key(
    profile: Profile, built: BuiltProgram, use: Use | None = None, where: str = "profile"
) -> list[Finding]:
    """Return why a profile's times are not those of a program as it is now, where it is to run; empty: they are.

    Rule ``stale-profile``: the program, a file of its operations, an option or a version has changed since; names
    which, from what to what. Rule ``foreign-profile``: it was measured on another kind of device, or one of another
    name. Emulated devices stand for others: for them neither device nor versions are compared. A profile without a
    key (declared or inferred by hand) has nothing to compare.

    Parameters
    ----------
    use
        Where and with which options it is to be used; None: only program, files and versions are compared.
    where
        How findings call the profile.
    """
    if profile.key is None:
        return []
    use = use or Use()
    key = _in_this_version(profile)
    stale = [*_program_changes(key, built), *_file_changes(key, built)]
    if use.config is not None:
        stale += _differences("option", key.get("config") or {}, json.loads(json.dumps(dict(use.config))))
        stale += _differences("file of option", key.get("config_files") or {}, _config_files(use.config))
    device = key.get("device") or {}
    foreign = _foreign(device, use, where)
    here = not foreign and device.get("name") in _names_here(str(device.get("kind")), use.names, all_of_kind=True)
    if use.devices != "emulated" and here:
        stale += _differences("version of", key.get("packages") or {}, package_versions(), only_named=True)
        if device.get("driver"):
            stale += _differences("version of", {"driver": device["driver"]}, {"driver": _driver(device["kind"])})
    return [
        *(Finding(f"{where}, key, {what}", f"{old}, as when it was measured", new, AGAIN, rule=STALE)
          for what, old, new in stale),
        *foreign,
    ]  # fmt: skip


Change = tuple[str, str, str]
"""(what, before, now)."""


def _in_this_version(profile: Profile) -> Mapping[str, Any]:
    """Return the key; one of version 1, which had no hashes of files, by what it had."""
    key = profile.key or {}
    if key.get("version") == KEY_VERSION or "processor" not in key:
        return key
    name = key["processor"] if profile.device == "cpu" else None
    return {**key, "device": {"kind": profile.device, "name": name}}


def _program_changes(key: Mapping[str, Any], built: BuiltProgram) -> list[Change]:
    before = key.get("structure")
    if isinstance(before, Mapping):
        return _differences("program,", before, _structure(built))
    named = key.get("program")
    if isinstance(named, str) and named.startswith("prog-") and named != built.id:
        return [("program", named, built.id)]
    return []


def _file_changes(key: Mapping[str, Any], built: BuiltProgram) -> list[Change]:
    files = key.get("files")
    if not isinstance(files, Mapping):
        return []
    now = {name: fingerprint(built.folder / name) for name in files}
    return _differences("file", files, {name: value for name, value in now.items() if value is not None})


def _differences(
    noun: str, before: Mapping[str, Any], now: Mapping[str, Any], *, only_named: bool = False
) -> list[Change]:
    names = sorted(before if only_named else {*before, *now}, key=str)
    return [
        (f"{noun} '{name}'" if noun != "program," else f"program, {name}", _shown(before, name), _shown(now, name))
        for name in names
        if before.get(name) != now.get(name)
    ]


def _shown(values: Mapping[str, Any], name: str) -> str:
    return json.dumps(values[name]) if name in values else NONE


def _foreign(device: Mapping[str, Any], use: Use, where: str) -> list[Finding]:
    kind, name = device.get("kind"), device.get("name")
    if kind is None or use.devices in {None, "emulated"}:
        return []
    if kind != use.devices:
        return [
            Finding(
                f"{where}, key, device", f"a profile of the kind that the deployment runs on: '{use.devices}'",
                f"one of '{kind}' ({name})", f"on the machine with these devices, {AGAIN}; or write devices: emulated",
                rule=FOREIGN,
            )
        ]  # fmt: skip
    names = _names_here(kind, use.names, all_of_kind=not use.names)
    if name and names and set(str(name).split(" + ")) - set(names):
        return [
            Finding(
                f"{where}, key, device", f"a profile of the devices here: {listed(names)}", f"one of '{name}'",
                f"{AGAIN}; or write devices: emulated", rule=FOREIGN,
            )
        ]  # fmt: skip
    return []


def package_versions() -> dict[str, str]:
    """Return the versions that decide how long operations take: packages, and Python."""
    found = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def processor_name() -> str:
    """Return the processor's model."""
    try:
        with Path("/proc/cpuinfo").open(encoding="utf-8") as file:
            return next((line.split(":", 1)[1].strip() for line in file if line.startswith("model name")), "")
    except OSError:
        return platform.processor()


def _names_here(kind: str, devices: Sequence[str] = (), *, all_of_kind: bool = False) -> list[str]:
    """Return the models of this machine's devices of a kind: of those named, or of all."""
    if kind == "cpu":
        return [processor_name()]
    if kind not in {"cuda", "rocm"}:
        return []
    known = dict(_models(kind))
    named = known if all_of_kind else devices
    return sorted({known[name] for name in named if name in known})


@lru_cache(maxsize=4)
def _models(kind: str) -> tuple[tuple[str, str], ...]:
    kinds: tuple[Kind, ...] = ("cuda",) if kind == "cuda" else ("rocm",)
    found = inventory(kinds=kinds)
    return tuple((device.run_name, device.name) for device in found.devices)


def _driver(kind: str) -> str | None:
    module = {"cuda": "nvidia", "rocm": "amdgpu"}.get(kind)
    try:
        return Path(f"/sys/module/{module}/version").read_text().strip() if module else None
    except OSError:
        return None


def _structure(built: BuiltProgram) -> dict[str, str]:
    """Return part of the program document -> its hash; the name of the program decides nothing."""
    document = dump(built.program)
    found = {f"key '{key}'": content_hash(document.get(key)) for key in ("ops", "entry", "states")}
    for name, graph in document["graphs"].items():
        for node, declared in graph["nodes"].items():
            found[f"graph '{name}', node '{node}'"] = content_hash(declared)
        rest = {key: value for key, value in graph.items() if key != "nodes"}
        found[f"graph '{name}', ports and edges"] = content_hash(rest)
    return found


def fingerprint(path: Path) -> str | None:
    """Return the hash of a file, of a large one by its size, beginning, middle and end; None: it cannot be read."""
    try:
        with path.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            digest = hashlib.sha256(str(size).encode())
            whole = size <= WHOLE_BYTES
            for start in (0,) if whole else (0, size // 2, size - PART_BYTES):
                file.seek(start)
                digest.update(file.read(size if whole else PART_BYTES))
    except OSError:
        return None
    return digest.hexdigest()[:HASH_DIGITS]


def _config_files(config: Mapping[str, Any]) -> dict[str, str]:
    """Return the hash of every file that an option names by an absolute path: weights, for example."""
    found = {}
    for text in _texts(config):
        if os.path.isabs(text) and "\0" not in text and len(text) < 4096 and Path(text).is_file():
            found[text] = fingerprint(Path(text)) or NONE
    return found


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _texts(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _texts(item)
