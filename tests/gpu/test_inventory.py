"""What is found: on this machine, and through NVIDIA's own binding on a driver library built here."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from flashrt import gpu
from flashrt.errors import InputError
from flashrt.gpu.devices import island_numbers

SOURCE = Path(__file__).with_name("fake_nvml.c")
EMULATED: tuple[gpu.Kind, ...] = ("emulated",)
UUID = "GPU-00000000-0000-0000-0000-{:012d}".format


def build_driver(folder: Path, *flags: str) -> Path:
    folder.mkdir()
    library = folder / "libnvidia-ml.so.1"
    command = ["gcc", "-shared", "-fPIC", "-Wall", "-Werror", *flags, "-o", str(library), str(SOURCE)]
    subprocess.run(command, check=True)
    return folder


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_driver(tmp_path_factory.mktemp("driver") / "lib")


def ask(driver: Path, source: str, **environment: str) -> Any:
    """Run `source`, which sets `answer`, in a process that sees the driver; return the answer."""
    script = f"import json, os\nfrom flashrt import gpu\n{source}\nprint(json.dumps(answer))"
    completed = subprocess.run(
        [sys.executable, "-P", "-c", script],
        env={**os.environ, "LD_LIBRARY_PATH": str(driver), **environment},
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert completed.returncode == 0, completed.stderr
    return json.loads(completed.stdout)


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
        gpu.acquire(2, 'greedy', min_free_bytes=1000, wait_s=2)  # only device 0 has that much free
    except Exception as error:
        refused.append(str(error))
thread = threading.Thread(target=wait)
thread.start()
while not gpu.status()['waiting'] and not refused:
    pass
answer = [gpu.acquire(8, 'modest', holder_pid=os.getpid()).as_dict()['holder']]
gpu.release(gpu.holders()[0])
thread.join()
answer += refused
"""
    holder, refusal = ask(driver, source)
    assert holder == "modest"
    assert "see foreign_processes in gpu_status" in refusal


AMDSMI = """
class AmdSmiException(Exception): pass
def amdsmi_init(): pass
def amdsmi_shut_down(): pass
def amdsmi_get_processor_handles(): return [0, 1, 2]
def amdsmi_get_gpu_device_uuid(handle): return f"00ff{handle}"
def amdsmi_get_gpu_asic_info(handle): return {"market_name": "Fake MI300X"}
def amdsmi_get_gpu_vram_usage(handle):
    if handle == 2:
        raise AmdSmiException("not supported")
    return {"vram_total": 100, "vram_used": 30}
def amdsmi_get_gpu_activity(handle): return {"gfx_activity": "N/A"}
def amdsmi_topo_get_link_type(first, second): return {"hops": 1, "type": 2 if first + second == 1 else 1}
def amdsmi_get_gpu_process_list(handle): return [{"pid": 4194400, "mem": 5}] if handle == 1 else []
"""


def test_amd_devices_through_a_library_that_lacks_functions(tmp_path: Path) -> None:
    (tmp_path / "amdsmi.py").write_text(AMDSMI)
    source = """
lease = gpu.acquire(2, 'alice', kind='rocm', same_island=True)
answer = [gpu.status(), lease.environment]
gpu.release(lease)
"""
    status, environment = ask(tmp_path, source, PYTHONPATH=str(tmp_path))
    devices = [device for device in status["devices"] if device["kind"] == "rocm"]
    assert [device["island"] for device in devices] == ["xgmi-0", "xgmi-0", "xgmi-1"]
    assert devices[0]["memory_free_bytes"] == 70 * 1024**2
    assert devices[2]["memory_total_bytes"] is None
    assert any("pci_bus_id is not readable" in note for note in devices[0]["notes"])
    assert "not visible from here" in status["foreign_processes"][0]["reason"]
    assert environment["ROCR_VISIBLE_DEVICES"] == "0,1"
    assert not {"HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES"} & set(environment)


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
