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

import yaml

from tests.conftest import unowned_memory

TOY = Path(__file__).parents[1] / "toy"
MARK = "FLASHRT_KILL_ROUND"
LIMIT_S = 30.0
ROLES = {
    "flashrt.bench.host": "host",
    "flashrt.runtime.worker": "worker",
    "flashrt.gpu.keeper": "keeper",
    "flashrt.mcp_server": "service",
}
DEPLOY = ["-m", "flashrt.mcp_server", "deploy"]
FEED = ["--inputs", "inputs.py:batches", "--count", "2000", "--period-ms", "5"]
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


def kill_one(folder: Path, seed: int) -> Round:
    """Run the split toy deployment in `folder` and kill one of its processes at a random moment.

    It runs as a system under a harness of its own, or as a service with leased devices; over either transport.
    """
    generator = random.Random(seed)
    workspace = folder / "toy"
    if not workspace.exists():
        shutil.copytree(TOY, workspace, ignore=shutil.ignore_patterns("__pycache__"))
    transport = generator.choice(["shared_memory", "iceoryx2"])
    document = yaml.safe_load((TOY / "split.yaml").read_text())
    (workspace / "split.yaml").write_text(yaml.safe_dump({**document, "transport": transport}))
    mark, memory, after_s = uuid.uuid4().hex, unowned_memory(), generator.uniform(0, 2.5)
    if generator.random() < 0.5:
        wanted, command = generator.choice(["harness", "host", "worker", "worker"]), ["-c", HARNESS]
    else:
        wanted, command = generator.choice(["service", "keeper", "worker", "worker"]), [*DEPLOY, "split.yaml", *FEED]
    leases = folder / "leases"
    leases.mkdir(exist_ok=True)
    environment = {**os.environ, MARK: mark, "OMP_NUM_THREADS": "1", "FLASHRT_LEASE_DIR": str(leases)}
    first = subprocess.Popen(
        [sys.executable, "-P", *command], cwd=workspace, env=environment,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    problems = []
    try:
        assert first.stdout is not None
        first.stdout.readline()
        time.sleep(after_s)
        there = marked_processes(mark)
        # Early on the wanted one may not have started yet: then whoever is there.
        victims = sorted(number for number, role in there.items() if role == wanted) or sorted(there)
        victim = generator.choice(victims)
        os.kill(victim, signal.SIGKILL)
        begin = time.monotonic()
        try:
            _, said = first.communicate(timeout=LIMIT_S)
        except subprocess.TimeoutExpired:
            problems.append(f"the {wanted}'s first process hangs for {LIMIT_S:.0f} s")
            said = b""
        if victim != first.pid and first.returncode == 0:
            problems.append("nobody saw it")
        named = b"InputError" in said or b"flashrt deploy: " in said
        if victim != first.pid and not named and not problems:
            problems.append(f"no error that names what broke: {said.decode(errors='replace')[-300:]}")
        while (left := marked_processes(mark)) and time.monotonic() < begin + LIMIT_S:
            time.sleep(0.01)
        if left:
            problems.append(f"left after {LIMIT_S:.0f} s: {sorted(left.values())}")
        # What other processes of this machine have there meanwhile goes when they do.
        remains = unowned_memory() - memory
        while remains and time.monotonic() < begin + LIMIT_S:
            time.sleep(0.05)
            remains &= unowned_memory()
        if remains:
            problems.append(f"left in shared memory: {sorted(remains)}")
        if held := held_devices(environment):
            problems.append(f"still leased: {held}")
        return Round(f"{there[victim]} ({transport})", after_s, time.monotonic() - begin, tuple(problems))
    finally:
        for number in marked_processes(mark):
            os.kill(number, signal.SIGKILL)
        first.communicate()


def held_devices(environment: dict[str, str]) -> str:
    """Return what is leased, as a new process sees it."""
    code = "from flashrt import gpu; print(*[lease.holder for lease in gpu.holders()])"
    return subprocess.run(
        [sys.executable, "-P", "-c", code], env=environment, capture_output=True, text=True, check=True
    ).stdout.strip()
