"""Tracing in a process of its own, since the reference is the user's code; the files of a draft."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import yaml

from flashrt.bench.process import library_settings
from flashrt.bench.record import read_inputs, write_items
from flashrt.bench.systems import System, remove_bytecode
from flashrt.bench.trace.child import EXIT_USER_ERROR
from flashrt.errors import Finding, InputError, input_error
from flashrt.gpu.exports import mask_devices
from flashrt.runtime.lifeline import MARK, exit_words, kill_marked

LOG_TAIL_BYTES = 1500


@dataclass(frozen=True)
class TraceSettings:
    """How a reference is traced.

    Attributes
    ----------
    num_batches
        Batches to run: the first ones find the stages, one is looked at closely, the rest are measured.
    depth
        How many levels of calls of the application's own functions may be opened.
    """

    num_batches: int = 8
    depth: int = 2
    seed: int = 0
    devices: tuple[str, ...] = ()
    config: Mapping[str, Any] | None = None
    timeout_s: float = 600


def trace_system(
    system: System, inputs: str, workspace: Path, out: Path, folder: Path, settings: TraceSettings, name: str
) -> dict[str, Any]:
    """Trace a reference and write its draft: program.yaml, ops.py, profile.yaml and questions.json in `out`.

    Parameters
    ----------
    inputs
        Reference of an inputs function, or of a recording.
    folder
        Where the log is kept.

    Returns
    -------
    `questions`, `nodes` (operation -> places, calls, states), `notes`, `batch_ms`, `files` by kind.

    Raises
    ------
    InputError
        The reference cannot be followed, fails, hangs, or breaks a rule of drafts; `out` has a draft already.
    """
    if system.kind != "code":
        raise input_error(
            "argument 'system'", "a reference, file.py:function", f"a {system.kind}",
            "name the code that the program is to be drafted from", rule="kind-of-system",
        )  # fmt: skip
    refuse_other_draft(out)
    items = read_inputs(inputs, workspace, settings.seed, settings.num_batches)
    mask, names = mask_devices(settings.devices)
    spec = {
        "path": str(system.path), "function": system.function, "name": name, "out": str(out), "depth": settings.depth,
        "config": dict(settings.config or {}), "devices": names or ["cpu"],
    }  # fmt: skip
    remove_bytecode(system)
    with tempfile.TemporaryFile() as recording, tempfile.TemporaryFile() as answer:
        write_items(recording, items)
        recording.seek(0)
        log = folder / "trace.log"
        code = _run(spec, system, recording, answer, log, {**library_settings(), **mask}, settings.timeout_s)
        answer.seek(0)
        text = answer.read().decode()
    if code is None:
        raise _failed(system, "hang", f"{len(items)} batches within {settings.timeout_s:.0f} s", "nothing", log)
    if code == EXIT_USER_ERROR:
        raise InputError([Finding(**finding) for finding in json.loads(text)])
    if code != 0:
        raise _failed(system, "crash", "a traced run", f"the process ended with {exit_words(code)}", log)
    found: dict[str, Any] = json.loads(text)
    out.mkdir(parents=True, exist_ok=True)
    files = {
        "program": ("program.yaml", found.pop("yaml")),
        "ops": ("ops.py", found.pop("ops")),
        "profile": ("profile.yaml", yaml.safe_dump(found.pop("profile"), sort_keys=False, allow_unicode=True)),
        "questions": ("questions.json", json.dumps(found["questions"], indent=1, ensure_ascii=False) + "\n"),
    }
    for file, content in files.values():
        part = out / f"{file}.{uuid.uuid4().hex[:8]}.part"
        part.write_text(content, encoding="utf-8")
        part.replace(out / file)
    return {**found, "files": {kind: str(out / file) for kind, (file, _) in files.items()}}


def refuse_other_draft(out: Path) -> None:
    """Refuse a folder that has a draft, and what is no folder.

    Raises
    ------
    InputError
        It has a program or ops file, which somebody may have edited; or something else has its name.
    """
    if os.path.lexists(out) and not out.is_dir():
        raise input_error(
            "argument 'out'", "a folder, or a name that nothing has yet", f"'{out.name}', which is none",
            "name another one", rule="no-folder",
        )  # fmt: skip
    if any((out / one).exists() for one in ("program.yaml", "ops.py")):
        raise input_error(
            "argument 'out'", "a folder without a draft, which may have been edited", f"'{out.name}' has one",
            "name another folder, or remove that one", rule="draft-exists",
        )  # fmt: skip


def _failed(system: System, rule: str, expected: str, got: str, log: Path) -> InputError:
    tail = log.read_bytes()[-LOG_TAIL_BYTES:].decode(errors="replace").strip() if log.is_file() else ""
    said = f"; its last output:\n{tail}" if tail else ""
    return input_error(
        f"system '{system.reference}'", expected, f"{got}{said}", "correct the reference and call ir_trace again",
        rule=rule,
    )  # fmt: skip


def _run(
    spec: Mapping[str, Any], system: System, recording: IO[bytes], answer: IO[bytes], log_path: Path,
    environment: Mapping[str, str], timeout_s: float,
) -> int | None:  # fmt: skip
    """Run the tracing process to its end; return its exit status, or None when it was not done in time."""
    mark = uuid.uuid4().hex
    command = [sys.executable, "-P", "-m", "flashrt.bench.trace.child", json.dumps(dict(spec))]
    with log_path.open("ab") as log:
        process = subprocess.Popen(
            [*command, str(recording.fileno()), str(answer.fileno()), str(os.getpid())],
            stdin=subprocess.DEVNULL, stdout=log, stderr=log, cwd=system.path.parent, start_new_session=True,
            pass_fds=[recording.fileno(), answer.fileno()],
            env={**os.environ, **environment, MARK: mark, "PYTHONUNBUFFERED": "1", "PYTHONDONTWRITEBYTECODE": "1"},
        )  # fmt: skip
    try:
        return process.wait(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        return None
    finally:
        if process.returncode is None:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
        # The reference's own processes, wherever they moved to.
        kill_marked(mark)
        process.wait()
