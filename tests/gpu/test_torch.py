"""What torch makes of the environments that leases export, asked of torch itself."""

from __future__ import annotations

from pathlib import Path

from tests.gpu.fakes import BINDINGS, INSTANCE, UUID, ask, build_amd_driver, build_driver

SEEN = """
import torch.cuda
def seen(environment):
    for name in ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES"):
        os.environ.pop(name, None)
    os.environ.update(environment)
    return torch.cuda._parse_visible_devices()
"""


def test_torch_sees_exactly_the_leased_nvidia_devices(tmp_path: Path) -> None:
    driver = build_driver(tmp_path / "lib", "-DWITH_MIG")
    source = f"""
first = gpu.acquire(2, 'alice')
second = gpu.acquire(3, 'bob')
parts = gpu.acquire(2, 'carol')
{SEEN}
answer = []
for lease in (first, second):
    numbers = seen(lease.environment)
    uuids = torch.cuda._raw_device_uuid_nvml()
    found = [[uuids[number] for number in numbers], torch.cuda._device_count_nvml()]
    # The same devices by UUID, which torch takes too.
    by_uuid = seen({{'CUDA_VISIBLE_DEVICES': ','.join(lease.uuids)}})
    found.append([uuids[number] for number in torch.cuda._transform_uuid_to_ordinals(by_uuid, uuids)])
    answer.append([*found, list(lease.uuids)])
answer.append(seen(parts.environment))
for lease in (first, second, parts):
    gpu.release(lease)
"""
    first, second, parts = ask(driver, source)
    # Device 4 and 5 are the only two of their island that are whole: the tightest fit.
    assert first == [[UUID(4), UUID(5)], 2, [UUID(4), UUID(5)], [UUID(4), UUID(5)]]
    expected = [UUID(index) for index in range(3)]
    assert second == [expected, 3, expected, expected]
    assert parts == [INSTANCE(8), INSTANCE(9)]


def test_torch_sees_exactly_the_leased_amd_devices(tmp_path: Path) -> None:
    driver = build_amd_driver(tmp_path / "lib")
    source = f"""
lease = gpu.acquire(2, 'alice', kind='rocm', min_free_bytes=1)
{SEEN}
# This build of torch is for processors: told that it is one for ROCm, it reads the masks as that one does.
import amdsmi
torch.version.hip, torch.cuda._HAS_AMDSMI, torch.cuda.amdsmi = '7.0', True, amdsmi
answer = [seen(lease.environment), torch.cuda._device_count_amdsmi(), len(torch.cuda._raw_device_uuid_amdsmi())]
gpu.release(lease)
"""
    # Inside the ROCR mask the runtime numbers what is left from 0.
    assert ask(driver, source, PYTHONPATH=str(BINDINGS)) == [[0, 1], 2, 4]
