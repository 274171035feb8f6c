"""Kill one process of a running deployment at a random moment and see that nothing hangs and nothing is left."""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import sys
import time
import uuid
from dataclasses import dataclass
from pathlib import Path

TOY = Path(__file__).parents[1] / "toy"
MARK = "FLASHRT_KILL_ROUND"
LIMIT_S = 10.0
ROLES = {"flashrt.bench.host": "host", "flashrt.runtime.worker": "worker"}
HARNESS = """
import sys
from pathlib import Path
from flashrt.bench import CheckSettings, read_inputs, resolve_system
from flashrt.bench.check import collect
folder = Path.cwd()
system = resolve_system("split.yaml", folder)
items = read_inputs("inputs.py:batches", folder, 1, 200)
print("started", flush=True)
collect(system, items, CheckSettings(timeout_s=600, config={"delay_s": 0.01}), folder / "log")
"""


@dataclass(frozen=True)
class Round:
    """What one kill did: whom it hit when, how long the rest lived on, and what was wrong."""

    victim: str
    after_s: float
    ended_s: float
    problems: tuple[str, ...]


def marked_processes(mark: str) -> dict[int, str]:
    """Return the processes of a round by what they are."""
    found = {}
    for name in os.listdir("/proc"):
        if not name.isdigit():
            continue
        try:
            if f"{MARK}={mark}".encode() not in Path(f"/proc/{name}/environ").read_bytes():
                continue
            command = Path(f"/proc/{name}/cmdline").read_bytes().decode(errors="replace").split("\0")
        except OSError:
            continue
        found[int(name)] = next((ROLES[part] for part in command if part in ROLES), "harness")
    return found


def shared_memory() -> set[str]:
    """Return what is in shared memory now."""
    return set(os.listdir("/dev/shm"))


def kill_one(folder: Path, seed: int) -> Round:
    """Run the split toy deployment in `folder` from a harness of its own and kill one of its processes."""
    generator = random.Random(seed)
    workspace = folder / "toy"
    if not workspace.exists():
        shutil.copytree(TOY, workspace, ignore=shutil.ignore_patterns("__pycache__"))
    mark, memory = uuid.uuid4().hex, shared_memory()
    wanted, after_s = generator.choice(["harness", "host", "worker", "worker"]), generator.uniform(0, 2.5)
    harness = subprocess.Popen(
        [sys.executable, "-P", "-c", HARNESS], cwd=workspace, env={**os.environ, MARK: mark, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    problems = []
    try:
        assert harness.stdout is not None
        harness.stdout.readline()
        time.sleep(after_s)
        there = marked_processes(mark)
        # Early on the wanted one may not have started yet: then whoever is there.
        victims = sorted(number for number, role in there.items() if role == wanted) or sorted(there)
        victim = generator.choice(victims)
        os.kill(victim, signal.SIGKILL)
        begin = time.monotonic()
        try:
            _, said = harness.communicate(timeout=LIMIT_S)
        except subprocess.TimeoutExpired:
            problems.append(f"the harness hangs for {LIMIT_S:.0f} s")
            said = b""
        if victim != harness.pid and harness.returncode == 0:
            problems.append("the harness saw nothing")
        if victim != harness.pid and b"InputError" not in said and not problems:
            problems.append(f"no error that names what broke: {said.decode(errors='replace')[-300:]}")
        while (left := marked_processes(mark)) and time.monotonic() < begin + LIMIT_S:
            time.sleep(0.01)
        if left:
            problems.append(f"left after {LIMIT_S:.0f} s: {sorted(left.values())}")
        if shared_memory() - memory:
            problems.append(f"left in shared memory: {sorted(shared_memory() - memory)}")
        return Round(there[victim], after_s, time.monotonic() - begin, tuple(problems))
    finally:
        for number in marked_processes(mark):
            os.kill(number, signal.SIGKILL)
        harness.communicate()
