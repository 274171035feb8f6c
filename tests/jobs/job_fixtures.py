"""Work for jobs under test; job processes import it by name, so it imports nothing of the tests."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from multiprocessing import get_context
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path
from typing import Any

from flashrt.errors import InputError, ResourceMissingError, input_error

Progress = Callable[[float, str], None]

# Ends by itself in the end, in case a test is killed.
STUBBORN = [
    sys.executable,
    "-c",
    "import signal, sys, time\nfor n in (1, 2, 15): signal.signal(n, signal.SIG_IGN)\n"
    "print('up', flush=True); time.sleep(300)",
]


def echo(workspace: Path, arguments: dict[str, Any], progress: Progress, folder: Path) -> dict[str, Any]:
    progress(0.5, "half")
    (folder / "trace.json").write_text("{}")
    print("said by the work")
    return {"arguments": arguments, "workspace": str(workspace), "job": os.environ["FLASHRT_JOB"], "cwd": os.getcwd()}


def gated(workspace: Path, arguments: dict[str, Any], progress: Progress, folder: Path) -> dict[str, Any]:
    """Tell of itself, wait for a file, then finish."""
    for step in range(1000):
        progress(step / 4000, f"step {step}")
    progress(0.3, "waiting")
    while not (workspace / "go").exists():
        time.sleep(0.01)
    return {"went": True}


def refuse(workspace: Path, arguments: dict[str, Any], progress: Progress, folder: Path) -> dict[str, Any]:
    raise input_error("system 'a.py:serve'", "outputs", "none", "write to io.outputs[name]")


def lack(workspace: Path, arguments: dict[str, Any], progress: Progress, folder: Path) -> dict[str, Any]:
    raise ResourceMissingError("no devices", holders=["alice"], retry_after_s=7.0)


def break_down(workspace: Path, arguments: dict[str, Any], progress: Progress, folder: Path) -> dict[str, Any]:
    raise ValueError("secret detail")


def leave(workspace: Path, arguments: dict[str, Any], progress: Progress, folder: Path) -> dict[str, Any]:
    sys.exit(0)


def unwritable(workspace: Path, arguments: dict[str, Any], progress: Progress, folder: Path) -> dict[str, Any]:
    return {"value": object()}


def family(workspace: Path, arguments: dict[str, Any], progress: Progress, folder: Path) -> dict[str, Any]:
    """Start children that ignore signals: in the group, in a session of their own, and with no mark."""
    children = [
        subprocess.Popen(STUBBORN, stdout=subprocess.PIPE),
        subprocess.Popen(STUBBORN, stdout=subprocess.PIPE, start_new_session=True),
        subprocess.Popen(STUBBORN, stdout=subprocess.PIPE, start_new_session=True, env={}),
    ]
    # Orphaned at once: only its mark and the subreaper lead back to the job.
    nested = (
        f"import subprocess; p = subprocess.Popen({STUBBORN!r}, start_new_session=True, stdout=subprocess.PIPE)\n"
        "p.stdout.readline(); print(p.pid, flush=True)"
    )
    orphan = subprocess.run([sys.executable, "-c", nested], stdout=subprocess.PIPE, check=True)
    for child in children:
        assert child.stdout is not None
        child.stdout.readline()
    pids = [os.getpid(), *(child.pid for child in children), int(orphan.stdout.split()[0])]
    part = workspace / "pids.part"
    part.write_text(" ".join(map(str, pids)))
    part.replace(workspace / "pids")
    if arguments.get("deaf"):
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, signal.SIG_IGN)
    if arguments.get("return"):
        return {"pids": pids}
    try:
        time.sleep(300)
    finally:
        (workspace / "unwound").touch()
    return {}


def translated(workspace: Path, arguments: dict[str, Any], progress: Progress, folder: Path) -> dict[str, Any]:
    """Turn whatever interrupts it into an error about the system, as careless code does."""
    progress(0.1, "up")
    try:
        time.sleep(300)
    except BaseException as error:
        raise InputError("the system crashed") from error
    return {}


def forked(workspace: Path, arguments: dict[str, Any], progress: Progress, folder: Path) -> dict[str, Any]:
    """End a forked child by SIGTERM: that is not a signal to the job."""
    process = get_context("fork").Process(target=time.sleep, args=(300,))
    process.start()
    process.terminate()
    process.join()
    progress(0.4, "waiting")
    while not (workspace / "go").exists():
        time.sleep(0.01)
    return {"code": process.exitcode}


def leak_memory(workspace: Path, arguments: dict[str, Any], progress: Progress, folder: Path) -> dict[str, Any]:
    """Make shared memory and never remove it."""
    memory = SharedMemory(create=True, size=64)
    name = memory.name
    memory.close()
    return {"name": name}
