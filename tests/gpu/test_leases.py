"""Leases among real processes: kill -9, contention, expiry, fencing."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from flashrt import gpu
from flashrt.errors import InputError, ResourceMissingError
from flashrt.gpu.lease_directory import LeaseDirectory
from flashrt.gpu.processes import ProcessIdentity

WaitUntil = Callable[..., None]
Keepers = Callable[[], list[ProcessIdentity]]


def run_python(source: str, *arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-P", "-c", source, *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def end(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.communicate()


def test_lease_carries_what_a_holder_needs_and_release_frees_it() -> None:
    lease = gpu.acquire(2, "alice", kind="emulated", purpose="profile", ttl_s=60)
    assert [device.uuid for device in lease.devices] == ["emulated-0", "emulated-1"]
    assert lease.environment == {
        "FLASHRT_LEASE": lease.lease,
        "FLASHRT_LEASE_TOKEN": str(lease.token),
        "FLASHRT_EMULATED": "0,1",
    }
    assert gpu.lease_devices(lease.lease) == lease.devices
    assert 0 < lease.remaining_s <= 60
    json.dumps(lease.as_dict())
    assert [held.lease for held in gpu.holders()] == [lease.lease]
    gpu.release(lease)
    assert gpu.holders() == ()
    assert not lease.keeper.runs()
    again = gpu.acquire(6, "bob", kind="emulated")
    assert again.token > lease.token
    gpu.release(again.lease)


def test_default_kind_is_never_emulated() -> None:
    lease = gpu.acquire(1, "alice")
    assert {device.kind for device in lease.devices} != {"emulated"}
    gpu.release(lease)


def test_refused_acquire_names_the_holder_and_when_to_retry() -> None:
    lease = gpu.acquire(5, "alice", kind="emulated", purpose="training", ttl_s=20)
    with pytest.raises(ResourceMissingError) as caught:
        gpu.acquire(2, "bob", kind="emulated")
    text = str(caught.value)
    assert "alice for training" in text
    assert lease.lease in text
    assert len(caught.value.holders) == 1
    assert caught.value.retry_after_s is not None
    assert 1 <= caught.value.retry_after_s <= 20
    other = gpu.acquire(1, "bob", kind="emulated")
    gpu.release(other)
    gpu.release(lease)


def test_released_and_unknown_leases_name_the_live_ones() -> None:
    lease, other = (gpu.acquire(1, name, kind="emulated") for name in ("alice", "bob"))
    gpu.release(lease)
    calls: list[Callable[[], object]] = [
        lambda: gpu.release(lease),
        lambda: gpu.check(lease),
        lambda: gpu.renew(lease, 5),
    ]
    for refuse in calls:
        with pytest.raises(InputError, match=f"live: '{other.lease}'.*has ended: released"):
            refuse()
    with pytest.raises(InputError, match="not known here"):
        gpu.release("lease-never")
    with pytest.raises(InputError, match=f"did you mean '{other.lease}'"):
        gpu.lease_devices(other.lease[:-1])
    gpu.release(other)


def test_stale_token_is_refused_and_changes_nothing() -> None:
    lease = gpu.acquire(1, "alice", kind="emulated")
    stale = dataclasses.replace(lease, token=lease.token - 1)
    calls: list[Callable[[], object]] = [
        lambda: gpu.release(stale),
        lambda: gpu.release(lease.lease, token=lease.token - 1),
        lambda: gpu.renew(stale, 5),
        lambda: gpu.check(stale),
    ]
    for refuse in calls:
        with pytest.raises(InputError, match="out of date"):
            refuse()
    assert gpu.check(lease) == lease
    gpu.release(lease)


def test_renew_moves_the_end_both_ways(wait_until: WaitUntil) -> None:
    lease = gpu.acquire(1, "alice", kind="emulated", ttl_s=1000)
    longer = gpu.renew(lease, 5000)
    assert longer.remaining_s > 4000
    assert longer.token == lease.token
    gpu.renew(lease, 0.05)
    wait_until(lambda: gpu.holders() == ())


def test_expired_lease_is_lost_and_says_so(wait_until: WaitUntil, keepers: Keepers) -> None:
    lease = gpu.acquire(6, "alice", kind="emulated", ttl_s=0.2)
    wait_until(lambda: not keepers())
    with pytest.raises(InputError, match="its time ran out"):
        gpu.renew(lease, 60)
    gpu.release(gpu.acquire(6, "bob", kind="emulated"))


def test_stopped_keeper_loses_the_lease_too(wait_until: WaitUntil) -> None:
    lease = gpu.acquire(6, "alice", kind="emulated", ttl_s=0.3)
    os.kill(lease.keeper.pid, signal.SIGSTOP)
    wait_until(lambda: gpu.holders() == ())
    wait_until(lambda: not lease.keeper.runs())
    gpu.release(gpu.acquire(6, "bob", kind="emulated"))


def test_release_ends_a_stopped_keeper() -> None:
    lease = gpu.acquire(1, "alice", kind="emulated")
    os.kill(lease.keeper.pid, signal.SIGSTOP)
    gpu.release(lease)
    assert not lease.keeper.runs()


def test_kill_9_of_the_keeper_frees_the_devices(lease_directory: Path, wait_until: WaitUntil) -> None:
    lease = gpu.acquire(6, "alice", kind="emulated")
    lease.keeper.kill()
    wait_until(lambda: not lease.keeper.runs())
    assert gpu.holders() == ()
    assert list((lease_directory / "leases").iterdir()) == []
    assert list((lease_directory / "control").iterdir()) == []
    gpu.release(gpu.acquire(6, "bob", kind="emulated"))
    with pytest.raises(InputError, match="its keeper died"):
        gpu.release(lease)


def test_kill_9_of_the_holder_frees_the_devices(wait_until: WaitUntil, keepers: Keepers) -> None:
    holder = run_python("input()")
    lease = gpu.acquire(6, "alice", kind="emulated", holder_pid=holder.pid)
    assert lease.holder_process is not None
    holder.send_signal(signal.SIGKILL)
    wait_until(lambda: not keepers())
    assert gpu.holders() == ()
    end(holder)
    with pytest.raises(InputError, match="holder's process died"):
        gpu.release(lease)
    with pytest.raises(InputError, match="does not run"):
        gpu.acquire(1, "alice", kind="emulated", holder_pid=holder.pid)


def test_lease_without_holder_process_outlives_a_killed_acquirer(wait_until: WaitUntil) -> None:
    acquirer = run_python(
        "from flashrt import gpu; print(gpu.acquire(2, 'alice', kind='emulated').lease, flush=True); input()"
    )
    assert acquirer.stdout is not None
    name = acquirer.stdout.readline().strip()
    acquirer.send_signal(signal.SIGKILL)
    acquirer.wait()
    assert gpu.check(name).holder == "alice"
    gpu.release(name)
    end(acquirer)


def test_acquirer_killed_in_the_queue_leaves_nothing(wait_until: WaitUntil, keepers: Keepers) -> None:
    lease = gpu.acquire(6, "alice", kind="emulated")
    waiting = run_python("from flashrt import gpu; gpu.acquire(1, 'bob', kind='emulated', wait_s=300)")
    wait_until(lambda: LeaseDirectory().live_tickets())
    waiting.send_signal(signal.SIGKILL)
    wait_until(lambda: keepers() == [lease.keeper])
    assert LeaseDirectory().live_tickets() == ()
    end(waiting)
    gpu.release(lease)


@pytest.mark.parametrize("confirmation", [b"", b"o", b"no\n"])
def test_keeper_ends_when_the_acquirer_dies_before_it_confirms(
    confirmation: bytes, lease_directory: Path, wait_until: WaitUntil
) -> None:
    acquirer = ProcessIdentity.of(os.getpid())
    assert acquirer is not None
    devices = gpu.inventory().of_kind("emulated")
    order = {
        "directory": str(lease_directory),
        "request": {"count": 6, "kind": "emulated", "min_free_bytes": 0, "same_island": False},
        "holder": "alice",
        "purpose": "",
        "ttl_s": 600,
        "wait_s": 0,
        "devices": [device.as_dict() for device in devices],
        "acquirer": dataclasses.asdict(acquirer),
        "holder_process": None,
    }
    keeper = subprocess.Popen(
        [sys.executable, "-P", "-m", "flashrt.gpu.keeper"], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert keeper.stdin is not None
    assert keeper.stdout is not None
    with keeper.stdin, keeper.stdout:
        keeper.stdin.write(json.dumps(order).encode() + b"\n")
        keeper.stdin.flush()
        assert "granted" in json.loads(keeper.stdout.readline())
        keeper.stdin.write(confirmation)
    keeper.wait(20)
    assert gpu.holders() == ()
    gpu.release(gpu.acquire(6, "bob", kind="emulated"))


def test_queue_is_first_come_first_served(wait_until: WaitUntil) -> None:
    first, second = (gpu.acquire(3, name, kind="emulated") for name in ("alice", "bob"))
    given: list[gpu.Lease] = []
    thread = threading.Thread(target=lambda: given.append(gpu.acquire(6, "carol", kind="emulated", wait_s=60)))
    thread.start()
    wait_until(lambda: gpu.status()["waiting"])
    gpu.release(first)
    with pytest.raises(ResourceMissingError, match="carol waits for 6 emulated"):
        gpu.acquire(1, "dave", kind="emulated")
    assert not given
    gpu.release(second)
    thread.join()
    assert [lease.holder for lease in given] == ["carol"]
    gpu.release(given[0])


def test_waiting_ends_with_the_holders_named() -> None:
    lease = gpu.acquire(6, "alice", kind="emulated")
    with pytest.raises(ResourceMissingError, match="alice holds"):
        gpu.acquire(1, "bob", kind="emulated", wait_s=0.1)
    assert LeaseDirectory().live_tickets() == ()
    gpu.release(lease)


def test_removed_record_revokes_the_lease(wait_until: WaitUntil) -> None:
    lease = gpu.acquire(1, "alice", kind="emulated")
    LeaseDirectory().record_path(lease.lease).unlink()
    wait_until(lambda: not lease.keeper.runs())


def test_damaged_files_hold_nobody_up(lease_directory: Path) -> None:
    before = gpu.acquire(1, "alice", kind="emulated")
    gpu.release(before)
    (lease_directory / "counter").write_text("garbage")
    for folder in ("leases", "queue"):
        (lease_directory / folder / "000000000001.json").write_text("{")
    after = gpu.acquire(6, "bob", kind="emulated")
    assert after.token > before.token
    gpu.release(after)
    assert list((lease_directory / "leases").iterdir()) == []


def test_foreign_lock_on_a_device_is_respected(lease_directory: Path) -> None:
    directory = LeaseDirectory()
    with directory.exclusive():
        descriptor = directory.lock_device("emulated-0")
    assert descriptor is not None
    with pytest.raises(ResourceMissingError, match="emulated-0 is locked"):
        gpu.acquire(6, "alice", kind="emulated")
    lease = gpu.acquire(5, "alice", kind="emulated")
    assert "emulated-0" not in lease.uuids
    gpu.release(lease)
    os.close(descriptor)


def test_current_folder_cannot_shadow_the_keeper(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("flashrt.py", "json.py", "tools/__init__.py"):
        path = tmp_path / "hostile" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("raise SystemExit('hostile module imported')")
    monkeypatch.chdir(tmp_path / "hostile")
    gpu.release(gpu.acquire(1, "alice", kind="emulated"))


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ({"count": 0}, "count: expected a whole number of at least 1"),
        ({"count": -1}, "count: expected a whole number of at least 1"),
        ({"count": True}, "count: expected a whole number"),
        ({"count": 7}, "count: expected at most 6"),
        ({"holder": " "}, "holder: expected a name"),
        ({"kind": "tpu"}, "kind: expected one of 'cuda'"),
        ({"ttl_s": 0}, "ttl_s: expected seconds above 0"),
        ({"ttl_s": float("nan")}, "ttl_s"),
        ({"wait_s": -1}, "wait_s"),
        ({"min_free_bytes": 10**15}, "min_free_bytes: expected at most"),
        ({"holder_pid": 2**22 + 1}, "which does not run"),
    ],
)
def test_wrong_arguments_are_named(arguments: dict[str, object], expected: str, lease_directory: Path) -> None:
    with pytest.raises(InputError, match=re.escape(expected)):
        gpu.acquire(**{"count": 1, "holder": "alice", "kind": "emulated", **arguments})  # type: ignore[arg-type]


def test_all_wrong_arguments_are_named_at_once() -> None:
    with pytest.raises(InputError) as caught:
        gpu.acquire(0, "", ttl_s=-1)
    assert len(caught.value.findings) == 3


WORKER = """
import os, random, signal, sys
from pathlib import Path
from flashrt import gpu

folder, seed, rounds, dies = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4] == "dies"
draw = random.Random(seed)

def runs(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False

for turn in range(rounds):
    lease = gpu.acquire(draw.randint(1, 4), f"worker-{seed}", kind="emulated", holder_pid=os.getpid(), wait_s=100)
    markers = [folder / device.uuid for device in lease.devices]
    for marker in markers:
        if marker.exists() and not runs(marker.read_text()):
            marker.unlink()  # left by a worker that was killed while it held the device
        descriptor = os.open(marker, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
        os.write(descriptor, str(os.getpid()).encode())
        os.close(descriptor)
    if dies and turn == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    for marker in markers:
        marker.unlink()
    gpu.release(lease)
"""


def test_contended_gangs_are_never_held_twice(tmp_path: Path, keepers: Keepers, wait_until: WaitUntil) -> None:
    folder = tmp_path / "markers"
    folder.mkdir()
    workers = [run_python(WORKER, str(folder), str(seed), "4", "dies" if seed < 3 else "lives") for seed in range(10)]
    codes = []
    for worker in workers:
        worker.communicate(timeout=120)
        codes.append(worker.returncode)
    assert codes == [-signal.SIGKILL] * 3 + [0] * 7
    wait_until(lambda: not keepers())
    gpu.release(gpu.acquire(6, "last", kind="emulated"))
    assert LeaseDirectory().live_tickets() == ()
