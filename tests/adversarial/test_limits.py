"""Systems that take too much of the host: each is ended and reaped in time, and the error says what it took."""

from __future__ import annotations

import os
from pathlib import Path

import psutil
import pytest

from flashrt.bench import resolve_system
from flashrt.bench.drive import run_all
from flashrt.bench.limits import Limits
from flashrt.bench.process import SystemProcess
from flashrt.errors import InputError
from tests.conftest import wait_until

SYSTEMS = """
import os, signal, subprocess, sys, tempfile, time

def leaks_memory(io):
    io.ready()
    held = []
    while True:
        held.append(bytearray(32 << 20))
        time.sleep(0.01)

def forks(io):
    io.ready()
    for _ in range(40):
        # Twice, so that nobody is their parent.
        if os.fork() == 0:
            if os.fork() == 0:
                time.sleep(600)
            os._exit(0)
    time.sleep(600)

def fills_the_disk(io):
    io.ready()
    with open(os.path.join(tempfile.gettempdir(), "much"), "wb") as file:
        while True:
            file.write(bytes(8 << 20))
            file.flush()
            time.sleep(0.01)

def never_ends(io):
    io.ready()
    while True:
        io.outputs["y"].write([1])
        time.sleep(0.001)

def ignores_sigterm(io):
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    code = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"
    subprocess.Popen([sys.executable, "-c", code], start_new_session=True)
    io.ready()
    time.sleep(600)
"""


def used_share() -> float:
    return 256 * 2**20 / psutil.virtual_memory().total


@pytest.mark.parametrize(
    ("name", "limits", "words"),
    [
        ("leaks_memory", Limits(memory_share=used_share()), "GiB in use"),
        ("forks", Limits(processes=20), "at most 20 processes"),
        ("fills_the_disk", Limits(disk_bytes=64 << 20), "less free than at its start"),
        ("never_ends", Limits(wall_s=5.0), "an end within 5 s"),
        ("ignores_sigterm", Limits(wall_s=5.0), "an end within 5 s"),
    ],
)
def test_what_takes_too_much_is_ended_and_named(tmp_path: Path, name: str, limits: Limits, words: str) -> None:
    (tmp_path / "greedy.py").write_text(SYSTEMS)
    system = resolve_system(f"greedy.py:{name}", tmp_path)
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    with SystemProcess(
        system, ["x"], limits=limits, environment={"TMPDIR": str(scratch)}, log_path=tmp_path / "log.txt"
    ) as process:
        # Where a start takes as long as all of it may, it is ended before it is ready.
        with pytest.raises(InputError, match=words) as caught:
            drive(process)
        assert caught.value.findings[0].rule == "limit"
        mark = process.mark
    # A process that was killed still has to come to its turn to end.
    wait_until(lambda: not [number for number in os.listdir("/proc") if carries(number, mark)], "all of it to end")


def drive(process: SystemProcess) -> None:
    process.wait_ready(60)
    run_all(process, [{"x": [1]}], 60)


def carries(number: str, mark: str) -> bool:
    try:
        return mark.encode() in Path(f"/proc/{number}/environ").read_bytes()
    except OSError:
        return False
