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
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from flashrt import gpu
from flashrt.errors import InputError, ResourceMissingError
from flashrt.gpu.lease_directory import LeaseDirectory
from flashrt.gpu.processes import ProcessIdentity, boottime_ns
from tests.gpu.contention import contend

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
    lease = gpu.acquire(5, "alice", kind="emulated", purpose="training", ttl_s=200)
    with pytest.raises(ResourceMissingError) as caught:
        gpu.acquire(2, "bob", kind="emulated")
    text = str(caught.value)
    assert "alice for training" in text
    assert lease.lease in text
    assert len(caught.value.holders) == 1
    assert caught.value.retry_after_s is not None
    assert 1 <= caught.value.retry_after_s <= 200
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
    lease = gpu.acquire(6, "alice", kind="emulated", ttl_s=2)
    wait_until(lambda: not keepers())
    with pytest.raises(InputError, match="its time ran out"):
        gpu.renew(lease, 60)
    gpu.release(gpu.acquire(6, "bob", kind="emulated"))


def test_stopped_keeper_loses_the_lease_too(wait_until: WaitUntil) -> None:
    lease = gpu.acquire(6, "alice", kind="emulated", ttl_s=4)
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
    keeper.wait(100)
    assert gpu.holders() == ()
    gpu.release(gpu.acquire(6, "bob", kind="emulated"))


def test_queue_is_first_come_first_served(wait_until: WaitUntil) -> None:
    first, second = (gpu.acquire(3, name, kind="emulated") for name in ("alice", "bob"))
    given: list[gpu.Lease] = []
    thread = threading.Thread(target=lambda: given.append(gpu.acquire(6, "carol", kind="emulated", wait_s=250)))
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


def test_contended_gangs_are_never_held_twice_and_nobody_starves(tmp_path: Path) -> None:
    outcome = contend(tmp_path, num_workers=12, seconds=9, kill_every_s=0.25, seed=1)
    assert outcome.problems == []
    assert outcome.kills["workers"] > 0
    assert outcome.kills["keepers"] > 0
    assert outcome.grants_by_count[8] > 0, "the largest gang is served among small ones"


def test_a_record_of_an_earlier_boot_is_no_lease(wait_until: WaitUntil) -> None:
    lease = gpu.acquire(1, "alice", kind="emulated", ttl_s=1000)
    record = json.loads(LeaseDirectory().record_path(lease.lease).read_text())
    lease.keeper.kill()
    wait_until(lambda: not lease.keeper.runs())
    assert gpu.holders() == ()
    # As a power cut leaves it: on disk, with a time that this boot has not reached yet, and a keeper's number that by
    # now is another's.
    record |= {"expires_ns": boottime_ns() + 10**15, "keeper": {"pid": os.getpid(), "start_ticks": 1}}
    LeaseDirectory().record_path(lease.lease).write_text(json.dumps(record))
    assert gpu.holders() == ()
    again = gpu.acquire(6, "bob", kind="emulated")
    assert again.token > lease.token
    gpu.release(again)


JUMP = """
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdlib.h>
#include <time.h>
#include <unistd.h>
int clock_gettime(clockid_t clock, struct timespec *now) {
    static int (*real)(clockid_t, struct timespec *);
    if (!real) real = (int (*)(clockid_t, struct timespec *))dlsym(RTLD_NEXT, "clock_gettime");
    int status = real(clock, now);
    const char *file = getenv("JUMPED");
    if (clock == CLOCK_REALTIME && file && access(file, F_OK) == 0) now->tv_sec += atol(getenv("JUMP_S"));
    return status;
}
time_t time(time_t *result) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    if (result) *result = now.tv_sec;
    return now.tv_sec;
}
"""


@pytest.mark.parametrize("seconds", [86_400, -86_400])
def test_a_clock_that_jumps_frees_no_lease_and_keeps_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wait_until: WaitUntil, keepers: Keepers, seconds: int
) -> None:
    source, library, jumped = (tmp_path / name for name in ("jump.c", "jump.so", "jumped"))
    source.write_text(JUMP)
    subprocess.run(["gcc", "-shared", "-fPIC", "-o", str(library), str(source), "-ldl"], check=True)
    for name, value in (("LD_PRELOAD", library), ("JUMPED", jumped), ("JUMP_S", seconds)):
        monkeypatch.setenv(name, str(value))
    lease = gpu.acquire(1, "alice", kind="emulated", ttl_s=600)
    short = gpu.acquire(1, "bob", kind="emulated", ttl_s=2)
    jumped.touch()
    clock = [sys.executable, "-P", "-c", "import time; print(time.time())"]
    assert abs(float(subprocess.check_output(clock)) - time.time() - seconds) < 3600, "the clock has jumped"
    # The keeper of the short one ends it in its time; a renewal of the long one is carried out by the moved clock.
    wait_until(lambda: [held.lease for held in gpu.holders()] == [lease.lease])
    assert 500 < gpu.renew(lease, 600).remaining_s <= 600
    with pytest.raises(InputError, match="its time ran out"):
        gpu.check(short)
    script = "from flashrt import gpu; print([held.holder for held in gpu.holders()])"
    assert subprocess.check_output([sys.executable, "-P", "-c", script], text=True).strip() == "['alice']"
    gpu.release(lease)


def test_the_refusal_says_when_the_devices_are_free_at_the_latest(wait_until: WaitUntil) -> None:
    begin_ns = boottime_ns()
    lease = gpu.acquire(6, "alice", kind="emulated", ttl_s=300)

    def free_in(error: ResourceMissingError, rest: str, most_s: int) -> None:
        said = re.search(rf"free in (\d+) s {rest}", str(error))
        assert said, str(error)
        assert most_s - (boottime_ns() - begin_ns) / 1e9 - 1 < int(said[1]) <= most_s

    with pytest.raises(ResourceMissingError) as refused:
        gpu.acquire(1, "bob", kind="emulated")
    free_in(refused.value, "at the latest if nobody renews; call", 300)
    arguments = "6, 'carol', kind='emulated', wait_s=300, ttl_s=1000"
    waiting = run_python(f"from flashrt import gpu; gpu.release(gpu.acquire({arguments}))")
    wait_until(lambda: LeaseDirectory().live_tickets())
    with pytest.raises(ResourceMissingError) as busy:
        gpu.acquire(1, "bob", kind="emulated")
    free_in(busy.value, ".*, with 1 in the queue before you", 1300)
    assert busy.value.retry_after_s == 30
    gpu.release(lease)
    waiting.communicate(timeout=200)
    assert waiting.returncode == 0
