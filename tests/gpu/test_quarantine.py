"""A GPU that is not free when its lease ends: quarantined with the evidence, back by the documented command only."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from flashrt.gpu.lease_directory import LeaseDirectory
from tests.gpu.fakes import UUID, ask, build_driver

CUDA_0 = UUID(0)
LEASE_0 = """
from flashrt.errors import FlashrtError, InputError, ResourceMissingError
lease = gpu.acquire(1, 'alice')
assert CUDA_0 in lease.uuids
def state():
    return {device['run_name']: device['state'] for device in gpu.status()['devices'] if device['kind'] == 'cuda'}
def write(name, text):
    open(os.path.join(os.environ['FAKE_NVML_DIR'], name), 'w').write(text)
"""


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_driver(tmp_path_factory.mktemp("driver") / "lib")


def run(driver: Path, folder: Path, source: str, limit_s: str = "30") -> object:
    prelude = f"CUDA_0 = {CUDA_0!r}\n{LEASE_0}"
    folder.mkdir(exist_ok=True)
    return ask(driver, prelude + source, FAKE_NVML_DIR=str(folder), FLASHRT_CHECK_LIMIT_S=limit_s)


def test_a_device_that_is_free_again_is_leased_again(driver: Path, tmp_path: Path) -> None:
    source = """
write('used-0', '9')  # within the tolerance of its 1000
gpu.release(lease)
answer = [gpu.quarantined(), state()['cuda:0']]
"""
    assert run(driver, tmp_path / "state", source) == [{}, "free"]
    assert LeaseDirectory().used_mark(CUDA_0) is None


def test_memory_that_does_not_come_back_is_quarantine_until_restored(driver: Path, tmp_path: Path) -> None:
    source = """
write('used-0', '640')
write('processes-0', '4194303')
gpu.release(lease)
status = gpu.status()
answer = [status['quarantined'], state()['cuda:0']]
others = gpu.acquire(3, 'bob', same_island=True)
answer.append(CUDA_0 in others.uuids)
gpu.release(others)
try:
    gpu.acquire(8, 'carol')
except ResourceMissingError as error:
    answer.append(str(error))
try:
    gpu.restore('cuda:0')
except InputError as error:
    answer.append(str(error))
answer.append(gpu.quarantined()[CUDA_0].evidence['used_bytes'])
"""
    records, state, got_it, busy, refusal, used = run(driver, tmp_path / "state", source, "12")  # type: ignore[misc]
    assert [record["device"] for record in records] == [CUDA_0]
    assert "640 bytes of its memory are in use, 0 were before" in records[0]["reason"]
    assert records[0]["evidence"]["processes"][0]["pid"] == 4194303
    assert records[0]["evidence"]["probe"] == "passed"
    assert records[0]["holder"] == "alice"
    assert records[0]["restore"] == f"flashrt gpu restore {CUDA_0}"
    assert (state, got_it, used) == ("quarantined", False, 640)
    assert f"flashrt gpu restore {CUDA_0}" in busy
    assert "process 4194303 (not visible from here)" in refusal
    # It is written down, so a new process finds it; it comes back when its memory has.
    command = [sys.executable, "-P", "-m", "flashrt.mcp_server", "gpu"]
    environment = {**os.environ, "LD_LIBRARY_PATH": str(driver), "FAKE_NVML_DIR": str(tmp_path / "state")}
    shown = subprocess.run([*command, "--once"], env=environment, capture_output=True, text=True, check=True)
    assert "quarantined" in shown.stdout
    (tmp_path / "state" / "used-0").unlink()
    restored = subprocess.run(
        [*command, "restore", "cuda:0"], env=environment, capture_output=True, text=True, check=False
    )
    assert restored.returncode == 0, restored.stderr
    assert "can be leased again" in restored.stdout
    again = "answer = [gpu.quarantined(), list(gpu.release(gpu.acquire(4, 'dave', same_island=True)).uuids)]"
    assert ask(driver, again, FAKE_NVML_DIR=str(tmp_path / "state")) == [{}, [UUID(index) for index in range(4)]]


@pytest.mark.parametrize(
    ("mode", "expected"),
    [
        ("crash", "the device probe ended with signal SIGABRT"),
        ("wrong", "1 of 1048576 bytes came back wrong"),
        ("fail", "cuMemAlloc_v2 failed with status 2"),
    ],
)
def test_a_probe_that_does_not_pass_is_quarantine(driver: Path, tmp_path: Path, mode: str, expected: str) -> None:
    source = f"""
write('cuda-0', {mode!r})
gpu.release(lease)
answer = {{uuid: record.reason for uuid, record in gpu.quarantined().items()}}
"""
    found = run(driver, tmp_path / "state", source)
    assert list(found) == [CUDA_0]  # type: ignore[call-overload]
    assert expected in found[CUDA_0]  # type: ignore[index]


def test_a_device_that_fell_off_the_bus_is_quarantine(driver: Path, tmp_path: Path) -> None:
    source = """
write('lost-0', '')
gpu.release(lease)
answer = gpu.quarantined()[CUDA_0].reason
"""
    assert "the driver does not answer for it" in str(run(driver, tmp_path / "state", source))


def test_a_killed_keeper_s_device_is_looked_over_before_anybody_gets_it(driver: Path, tmp_path: Path) -> None:
    source = """
lease.keeper.kill()
while lease.keeper.runs():
    pass
write('used-0', '640')
others = gpu.acquire(4, 'bob', same_island=True, wait_s=30)
answer = [CUDA_0 in others.uuids, gpu.quarantined()[CUDA_0].as_dict()]
gpu.release(others)
"""
    got_it, record = run(driver, tmp_path / "state", source, "12")  # type: ignore[misc]
    assert not got_it
    assert record["evidence"]["baseline_bytes"] == 0
    assert (record["holder"], "640 bytes" in record["reason"]) == ("alice", True)


def test_a_lease_has_ended_for_its_holder_while_the_device_is_looked_over(driver: Path, tmp_path: Path) -> None:
    source = """
import threading
write('cuda-0', 'hang')
thread = threading.Thread(target=lambda: gpu.release(lease))
thread.start()
while state()['cuda:0'] == 'leased':
    pass
answer = [state()['cuda:0'], [held.lease for held in gpu.holders()]]
try:
    gpu.check(lease)
except InputError as error:
    answer.append(str(error))
try:
    gpu.acquire(8, 'bob')
except ResourceMissingError as error:
    answer.append(str(error))
thread.join()
answer += [state()['cuda:0'], gpu.quarantined()[CUDA_0].reason]
"""
    state, holders, ended, busy, after, reason = run(driver, tmp_path / "state", source, "8")  # type: ignore[misc]
    assert (state, holders, after) == ("checking", [], "quarantined")
    assert "has ended: released" in ended
    assert "looked over after the lease of alice" in busy
    assert reason == "the device probe gave no answer within 8 s and was killed"


def test_only_a_device_in_quarantine_that_nobody_holds_is_restored(driver: Path, tmp_path: Path) -> None:
    source = """
from flashrt.gpu.quarantine import Quarantine, put_away
answer = []
put_away(Quarantine(CUDA_0, 'cuda', 'its memory did not come back after a run', {'baseline_bytes': 0}))
for name in ('cuda:0', 'cuda:1', 'GPU-x'):
    try:
        gpu.restore(name)
    except InputError as error:
        answer.append(str(error))
gpu.release(lease)
answer.append(gpu.quarantined()[CUDA_0].reason)
answer.append(gpu.restore('cuda:0').reason)
answer.append(list(gpu.quarantined()))
"""
    held, not_apart, unknown, reason, restored, left = run(driver, tmp_path / "state", source)  # type: ignore[misc]
    assert "leased or being looked over" in held
    assert "not quarantined" in not_apart
    assert "not quarantined" in unknown
    assert (reason, restored, left) == ("its memory did not come back after a run", "", [])


def test_a_damaged_record_keeps_its_device_apart(driver: Path, tmp_path: Path, lease_directory: Path) -> None:
    (lease_directory / "quarantine").mkdir(parents=True)
    (lease_directory / "quarantine" / f"{CUDA_0}.json").write_text("{")
    found = ask(driver, "answer = [record['reason'] for record in gpu.status()['quarantined']]")
    assert "not readable" in found[0]
    assert ask(driver, f"answer = [gpu.restore({CUDA_0!r}).reason, list(gpu.quarantined())]") == ["", []]
