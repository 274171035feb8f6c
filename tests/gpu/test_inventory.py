"""What is found: on this machine, and through NVIDIA's own binding on a driver library built here."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from flashrt import gpu
from flashrt.errors import InputError
from flashrt.gpu.devices import island_numbers
from tests.gpu.fakes import BINDINGS, INSTANCE, UUID, ask, build_amd_driver, build_driver

EMULATED: tuple[gpu.Kind, ...] = ("emulated",)


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_driver(tmp_path_factory.mktemp("driver") / "lib")


def test_eight_devices_in_two_islands(driver: Path) -> None:
    found = ask(driver, "answer = gpu.inventory(kinds=('cuda',)).as_dict()")
    devices = found["devices"]
    assert [device["uuid"] for device in devices] == [UUID(index) for index in range(8)]
    assert [device["index"] for device in devices] == list(range(8))
    assert devices[3]["memory_free_bytes"] == 700
    assert devices[3]["pci_bus_id"] == "00000000:04:00.0"
    assert devices[3]["link_bandwidth_bytes_s"] == 18 * 25_000_000_000
    assert [island["devices"] for island in found["islands"]] == [
        [UUID(index) for index in range(start, start + 4)] for start in (0, 4)
    ]
    assert {island["link"] for island in found["islands"]} == {"nvlink"}


def test_what_the_driver_cannot_say_degrades_field_by_field(driver: Path) -> None:
    devices = ask(driver, "answer = gpu.inventory(kinds=('cuda',)).as_dict()")["devices"]
    assert all(device["temperature_c"] is None for device in devices)
    assert [device["sm_clock_mhz"] for device in devices] == [1980, 1980, 1980, 900, 1980, 1980, 1980, 1980]
    assert {device["max_sm_clock_mhz"] for device in devices} == {1980}
    assert devices[3]["throttle_reasons"] == ["HwThermalSlowdown", "SwPowerCap"]
    assert not any(device["throttle_reasons"] for device in devices if device["index"] != 3)
    assert all(any("temperature_c is not readable" in note for note in device["notes"]) for device in devices)
    assert [device["uuid"] for device in devices if device["memory_total_bytes"] is None] == [UUID(5)]
    assert "memory is not readable: Not Supported" in devices[5]["notes"]


def test_without_peer_status_every_device_is_an_island(tmp_path: Path) -> None:
    bare = build_driver(tmp_path / "bare", "-DWITHOUT_P2P")
    found = ask(bare, "answer = gpu.inventory(kinds=('cuda',)).as_dict()")
    assert [len(island["devices"]) for island in found["islands"]] == [1] * 8
    assert [note for note in found["notes"] if "NVLink" in note] == found["notes"]
    assert len(found["notes"]) == 1


def test_process_on_a_device_is_foreign_unless_its_lease_explains_it(driver: Path) -> None:
    stranger = subprocess.Popen([sys.executable, "-P", "-c", "input()"], stdin=subprocess.PIPE)
    try:
        foreign = ask(driver, "answer = gpu.status()", FAKE_NVML_PID=str(stranger.pid))["foreign_processes"]
    finally:
        stranger.communicate(b"\n")
    assert [(process["device"], process["pid"]) for process in foreign] == [(UUID(2), stranger.pid)]
    assert foreign[0]["reason"] == "the device is not leased"
    assert foreign[0]["memory_bytes"] == 77

    own = """
lease = gpu.acquire(8, 'alice', holder_pid=os.getpid())
os.environ['FAKE_NVML_PID'] = str(os.getpid())
import ctypes; ctypes.CDLL(None).setenv(b'FAKE_NVML_PID', str(os.getpid()).encode(), 1)
answer = gpu.status()
gpu.release(lease)
"""
    status = ask(driver, own)
    assert status["foreign_processes"] == []
    assert {device["holder"] for device in status["devices"] if device["kind"] == "cuda"} == {"alice"}


def test_cuda_is_the_default_and_exports_its_mask(driver: Path) -> None:
    source = """
lease = gpu.acquire(3, 'alice', same_island=True, min_free_bytes=301)
other = gpu.acquire(3, 'bob')
answer = [lease.as_dict(), other.as_dict()]
gpu.release(lease), gpu.release(other)
"""
    lease, other = ask(driver, source)
    # Device 5 does not tell its memory and 7 has too little: only the first island has three.
    assert lease["environment"] == {
        "FLASHRT_LEASE": lease["lease"],
        "FLASHRT_LEASE_TOKEN": str(lease["token"]),
        "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
        "CUDA_VISIBLE_DEVICES": "0,1,2",
    }
    assert other["environment"]["CUDA_VISIBLE_DEVICES"] == "4,5,6"


def test_gang_larger_than_an_island_is_refused_for_that_reason(driver: Path) -> None:
    source = """
from flashrt.errors import InputError
try:
    gpu.acquire(5, 'alice', same_island=True)
except InputError as error:
    answer = str(error)
"""
    assert "a count of at most 4, the largest island" in ask(driver, source)


def test_request_that_waits_for_foreign_memory_holds_nobody_up(driver: Path) -> None:
    source = """
import threading
refused = []
def wait():
    try:
        gpu.acquire(2, 'greedy', min_free_bytes=1000, wait_s=5)  # only device 0 has that much free
    except Exception as error:
        refused.append(str(error))
thread = threading.Thread(target=wait)
thread.start()
while not gpu.status()['waiting'] and not refused:
    pass
answer = [gpu.acquire(1, 'modest', holder_pid=os.getpid()).as_dict()['holder']]
gpu.release(gpu.holders()[0])
thread.join()
answer += refused
"""
    holder, refusal = ask(driver, source)
    assert holder == "modest"
    assert "see foreign_processes in gpu_status" in refusal


def test_amd_devices_through_their_own_binding(tmp_path: Path) -> None:
    driver = build_amd_driver(tmp_path / "amd")
    source = """
lease = gpu.acquire(2, 'alice', kind='rocm', same_island=True, min_free_bytes=1)
answer = [gpu.status(), lease.environment]
gpu.release(lease)
"""
    status, environment = ask(driver, source, FAKE_AMD_PID="4194400", PYTHONPATH=str(BINDINGS))
    devices = [device for device in status["devices"] if device["kind"] == "rocm"]
    # In the order of the runtime, which masks count by, and not in that of the management library.
    assert [device["index"] for device in devices] == [0, 1, 2, 3]
    assert [device["uuid"][:2] for device in devices] == ["03", "02", "01", "00"]
    assert [device["island"] for device in devices] == ["xgmi-0", "xgmi-0", "xgmi-1", "xgmi-1"]
    assert [device["temperature_c"] for device in devices] == [43, 42, 41, 40]
    assert devices[1]["memory_free_bytes"] == 800 * 1024**2
    assert devices[0]["memory_total_bytes"] is None
    assert any("memory is not readable" in note for note in devices[0]["notes"])
    assert any("utilization_percent is not readable" in note for note in devices[0]["notes"])
    assert "not visible from here" in status["foreign_processes"][0]["reason"]
    assert status["foreign_processes"][0]["device"] == devices[2]["uuid"]
    # The island of device 0 has only one whose memory is known: both come from the other one.
    assert environment["ROCR_VISIBLE_DEVICES"] == "2,3"
    assert not {"HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES"} & set(environment)


def test_amd_library_that_is_absent_or_lacks_a_function_is_a_note(tmp_path: Path) -> None:
    for folder in (build_amd_driver(tmp_path / "old", without="amdsmi_get_gpu_driver_info"), tmp_path):
        # What the binding prints must not reach standard output, where a protocol may be spoken.
        found = ask(folder, "answer = [gpu.inventory().as_dict() for _ in range(2)]", PYTHONPATH=str(BINDINGS))
        assert found[0]["notes"] == found[1]["notes"]
        assert any("amdsmi does not load" in note for note in found[0]["notes"])
        assert {device["kind"] for device in found[0]["devices"]} == {"cpu", "emulated"}


@pytest.fixture(scope="module")
def mig(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_driver(tmp_path_factory.mktemp("mig") / "lib", "-DWITH_MIG")


def test_instances_of_mig_are_devices_and_their_gpu_is_none(mig: Path) -> None:
    found = ask(mig, "answer = gpu.inventory(kinds=('cuda',)).as_dict()")
    assert [device["uuid"] for device in found["devices"]] == [
        *(UUID(index) for index in range(6)),
        *map(INSTANCE, (8, 9)),
    ]
    instances = found["devices"][6:]
    assert {device["parent"] for device in instances} == {UUID(6)}
    assert [device["memory_total_bytes"] for device in instances] == [500, 500]
    assert {device["name"] for device in instances} == {"Fake H200 MIG 3g.71gb"}
    assert any(f"{UUID(7)} has MIG enabled and no instance" in note for note in found["notes"])
    # Between instances there is no fast link.
    assert [island["devices"] for island in found["islands"]][-2:] == [[INSTANCE(8)], [INSTANCE(9)]]


def test_a_lease_of_instances_exports_their_uuids_and_says_how_to_use_them(mig: Path) -> None:
    source = """
from flashrt.errors import InputError
from flashrt.gpu.exports import mask_devices
whole = gpu.acquire(6, 'alice')
parts = gpu.acquire(2, 'bob')
try:
    mask_devices([device.run_name for device in parts.devices])
except InputError as error:
    refusal = str(error)
one = mask_devices([parts.devices[1].run_name])
answer = [whole.as_dict(), parts.as_dict(), refusal, one]
gpu.release(whole), gpu.release(parts)
"""
    whole, parts, refusal, one = ask(mig, source)
    assert whole["environment"]["CUDA_VISIBLE_DEVICES"] == "0,1,2,3,4,5"
    assert parts["environment"]["CUDA_VISIBLE_DEVICES"] == f"{INSTANCE(8)},{INSTANCE(9)}"
    assert parts["names"] == [f"cuda:{INSTANCE(8)}", f"cuda:{INSTANCE(9)}"]
    assert "start a process an instance" in parts["notes"][0]
    assert "one MIG instance" in refusal
    assert one == [{"CUDA_DEVICE_ORDER": "PCI_BUS_ID", "CUDA_VISIBLE_DEVICES": INSTANCE(9)}, ["cuda:0"]]


def test_without_a_driver_it_says_so_and_offers_cpu_cores(tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    broken.mkdir()
    (broken / "libnvidia-ml.so.1").write_text("not a library")
    found = ask(broken, "answer = gpu.inventory().as_dict()")
    cores = sorted(os.sched_getaffinity(0))
    cpus = [device for device in found["devices"] if device["kind"] == "cpu"]
    assert [device["uuid"] for device in cpus] == [f"cpu-{core}" for core in cores]
    if len(cpus) + 6 == len(found["devices"]):
        assert any("no NVIDIA driver answers" in note for note in found["notes"])
        assert any("no GPU here" in note for note in found["notes"])


def test_cpu_lease_exports_its_cores() -> None:
    lease = gpu.acquire(1, "alice", kind="cpu")
    core = str(lease.devices[0].index)
    assert lease.environment["FLASHRT_CPUS"] == core
    assert lease.environment["OMP_NUM_THREADS"] == "1"
    gpu.release(lease)


def test_rocm_sets_one_mask_only() -> None:
    device = gpu.Device("GPU-a", "rocm", 3, "AMD", None, None, "xgmi-0")
    assert gpu.environment([device], "lease-1") == {"FLASHRT_LEASE": "lease-1", "ROCR_VISIBLE_DEVICES": "3"}


def test_emulated_devices_by_environment_and_argument(monkeypatch: pytest.MonkeyPatch) -> None:
    assert len(gpu.inventory(kinds=EMULATED).devices) == 6
    islands = gpu.inventory(kinds=EMULATED, emulated_island_sizes=[4, 2]).islands
    assert [len(island.devices) for island in islands] == [4, 2]
    assert gpu.inventory(kinds=EMULATED, num_emulated=0).devices == ()
    monkeypatch.setenv("FLASHRT_EMULATED_DEVICES", "eight")
    with pytest.raises(InputError, match="FLASHRT_EMULATED_DEVICES"):
        gpu.inventory(kinds=EMULATED)
    with pytest.raises(InputError, match="add up"):
        gpu.inventory(kinds=EMULATED, num_emulated=5, emulated_island_sizes=[4, 2])


def test_status_is_json_and_names_every_part() -> None:
    status = gpu.status()
    assert set(status) == {"devices", "topology", "leases", "waiting", "quarantined", "foreign_processes", "notes"}
    json.dumps(status)


def test_islands_are_connected_components() -> None:
    assert island_numbers(5, [(3, 1), (4, 3)]) == [0, 1, 2, 1, 1]
    assert island_numbers(0, []) == []


def test_import_loads_no_framework_and_no_driver() -> None:
    heavy = "{'torch', 'numpy', 'scipy', 'networkx', 'pynvml', 'amdsmi', 'pydantic'}"
    script = f"import sys, flashrt.gpu; print(sorted({heavy} & set(sys.modules)))"
    answer = subprocess.run([sys.executable, "-P", "-c", script], capture_output=True, text=True, check=True)
    assert answer.stdout.strip() == "[]"
