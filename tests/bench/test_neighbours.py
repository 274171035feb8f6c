"""A measurement has its devices to itself, or says who else was there; what it leaves on a GPU is found."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from flashrt.bench import RunSettings, resolve_system, run_benchmark
from flashrt.bench.neighbours import NeighbourWatch, pid_namespace_is_first, rule_for
from tests.conftest import wait_until
from tests.gpu.fakes import UUID, ask, build_driver

BUSY = "import time\nend = time.monotonic() + 280\nwhile time.monotonic() < end: pass"
UNKNOWN = 4194303


@contextmanager
def stranger(core: int) -> Iterator[psutil.Process]:
    """Run a busy process that no process of this test is above: its parent has ended."""
    command = f"{sys.executable} -P -c '{BUSY}' >/dev/null 2>&1 & echo $!"
    shell = subprocess.run(
        ["taskset", "-c", str(core), "sh", "-c", command], stdout=subprocess.PIPE, text=True, check=True,
        start_new_session=True,
    )  # fmt: skip
    process = psutil.Process(int(shell.stdout))
    try:
        yield process
    finally:
        process.kill()


def has_used(process: psutil.Process, seconds: float) -> None:
    begin = process.cpu_times().user
    wait_until(lambda: process.cpu_times().user > begin + seconds, f"{seconds} s of processor time used", 200)


@pytest.mark.parametrize(("rule", "is_problem"), [("refuse", True), (None, False)])
def test_a_busy_neighbour_on_the_cores_is_named_with_its_share(rule: Any, is_problem: bool) -> None:
    core = min(os.sched_getaffinity(0))
    with stranger(core) as process:
        own = subprocess.Popen([sys.executable, "-P", "-c", BUSY])
        try:
            with NeighbourWatch((f"cpu-{core}",), rule) as watch:
                watch.begin("no-mark")
                has_used(process, 0.4)
                watch.end()
        finally:
            own.kill()
            own.wait()
    sentences = watch.problems if is_problem else watch.notes
    assert len(sentences) == 1
    assert f"of the time of core {core} while it was timed" in sentences[0]
    assert f"{process.pid} (" in sentences[0]
    assert not (watch.notes if is_problem else watch.problems)
    found = {entry["pid"]: entry["share"] for entry in watch.found["cores"]["processes"]}
    assert 0.05 < found[process.pid] <= 1
    assert own.pid not in found
    assert os.getpid() not in found


def test_neighbours_before_and_after_the_timed_part_do_not_count_on_cores() -> None:
    core = min(os.sched_getaffinity(0))
    with stranger(core) as process, NeighbourWatch((f"cpu-{core}",), "refuse", share=1.0) as watch:
        has_used(process, 0.1)
        watch.begin("no-mark")
        watch.end()
    assert watch.problems == []
    assert watch.found["cores"]["window_s"] < 30


def test_what_neighbours_do_depends_on_the_kind_of_device() -> None:
    assert rule_for(("cuda:0",), None) == "refuse"
    assert rule_for(("cpu-0",), None) == "record"
    assert rule_for(("emulated-0",), None) == "record"
    assert rule_for(("cuda:0",), "record") == "record"
    assert NeighbourWatch(()).__enter__().found == {}


def test_a_run_invalidated_by_a_busy_neighbour(toy: Path) -> None:
    core = min(os.sched_getaffinity(0))
    settings = RunSettings(
        "realtime", runs=1, duration_s=1.2, period_ms=10, devices=(f"cpu-{core}",), neighbours="refuse", timeout_s=60
    )
    with stranger(core) as process:
        result = run_benchmark(resolve_system("reference.py:serve", toy), "inputs.py:batches", toy, toy, settings)
    assert not result["valid"]
    assert any(f"{process.pid} (" in reason and "neighbours took" in reason for reason in result["reasons"])
    assert result["neighbours"][0]["cores"]["share"] > 0.05


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_driver(tmp_path_factory.mktemp("driver") / "lib")


WATCH = """
import signal, subprocess, sys
from pathlib import Path
from flashrt.bench.neighbours import NeighbourWatch
folder = Path(os.environ['FAKE_NVML_DIR'])
other = int(os.environ['OTHER'])
def there(*pids):
    (folder / 'processes-2').write_text(' '.join(map(str, pids)))
def watched(before, during, after):
    there(*before)
    with NeighbourWatch(('cuda:2',)) as watch:
        there(*during)
        watch.begin('no-mark')
        watch.end()
        there(*after)
    return {'problems': watch.problems, 'notes': watch.notes, 'gpus': (watch.found or {}).get('gpus')}
me = os.getpid()
"""


def test_a_foreign_process_on_a_gpu_is_named_with_when_it_was_there(driver: Path, tmp_path: Path) -> None:
    source = f"""{WATCH}
answer = [
    watched([], [me], []),
    watched([other], [me, other], [other]),
    watched([], [me, other], []),
    watched([{UNKNOWN}], [], []),
    watched([], [{UNKNOWN}], []),
]
(folder / 'lost-2').write_text('')
answer.append(watched([], [], []))
"""
    with stranger(min(os.sched_getaffinity(0))) as process:
        own, all_along, during, unknown_before, unknown_during, lost = ask(
            driver, source, FAKE_NVML_DIR=str(tmp_path), OTHER=str(process.pid)
        )
    assert own == {"problems": [], "notes": [], "gpus": []}
    assert f"neighbour on cuda:2: process {process.pid} (" in all_along["problems"][0]
    assert "77 bytes) was there before and during and after the run" in all_along["problems"][0]
    assert all_along["gpus"][0]["device"] == UUID(2)
    assert "was there during the run" in during["problems"][0]
    assert f"{UNKNOWN} (not visible from here" in unknown_before["problems"][0]
    # A number that means nothing here: a neighbour's only where numbers are the machine's own.
    assert len(unknown_during["problems"]) == int(pid_namespace_is_first())
    assert len(unknown_during["notes"]) == int(not pid_namespace_is_first())
    assert "whether others used the devices is not known" in lost["problems"][0]


def test_measurements_on_one_gpu_wait_for_each_other(driver: Path, tmp_path: Path) -> None:
    source = f"""{WATCH}
import threading
order = []
first = NeighbourWatch(('cuda:2', 'cuda:1'))
first.__enter__()
def measure(devices):
    with NeighbourWatch(devices):
        order.append(devices[0])
waiting = threading.Thread(target=measure, args=(['cuda:1', 'cuda:2'],))
waiting.start()
measure(['cuda:3'])
order.append('first ends')
first.__exit__(None, None, None)
waiting.join()
answer = order
"""
    assert ask(driver, source, FAKE_NVML_DIR=str(tmp_path), OTHER="1") == ["cuda:3", "first ends", "cuda:1"]


LEAVES = """
import os
from pathlib import Path
import reference

def politely(io):
    (Path(os.environ["FAKE_NVML_DIR"]) / "used-2").write_text("640")
    reference.serve(io)

def crashes(io):
    io.ready()
    (Path(os.environ["FAKE_NVML_DIR"]) / "used-2").write_text("640")
    (Path(os.environ["FAKE_NVML_DIR"]) / "cuda-2").write_text("crash")
    os.abort()
"""
RUN = """
import sys
from pathlib import Path
from flashrt.bench import RunSettings, resolve_system, run_benchmark
from flashrt.errors import InputError
toy = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(os.environ['TOY'])
settings = RunSettings(runs=1, duration_s=0.2, devices=('cuda:2',), timeout_s=30, elements_per_batch={'frames': 6})
try:
    result = run_benchmark(resolve_system(os.environ['SYSTEM'], toy), 'inputs.py:batches', toy, toy, settings)
    reasons = result['reasons']
except InputError as error:
    reasons = [str(error)]
answer = [reasons, {uuid: record.as_dict() for uuid, record in gpu.quarantined().items()}]
"""


@pytest.mark.parametrize(
    ("function", "probe"), [("politely", "not made"), ("crashes", "the device probe ended with signal SIGABRT")]
)
def test_a_gpu_that_a_system_leaves_in_use_is_quarantined(
    driver: Path, toy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, function: str, probe: str
) -> None:
    state = tmp_path / "state"
    state.mkdir()
    (toy / "leaves.py").write_text(LEAVES)
    monkeypatch.setenv("FLASHRT_LEASE_DIR", str(tmp_path / "leases"))
    reasons, apart = ask(
        driver, RUN, FAKE_NVML_DIR=str(state), TOY=str(toy), SYSTEM=f"leaves.py:{function}", FLASHRT_CHECK_LIMIT_S="20"
    )
    assert any("device cuda:2 after system" in reason and "640 bytes" in reason for reason in reasons)
    assert list(apart) == [UUID(2)]
    assert probe in apart[UUID(2)]["evidence"]["probe"]
    assert f"flashrt gpu restore {UUID(2)}" in "".join(reasons)
