"""What the argument ``devices`` may name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from flashrt.bench import resolve_system
from flashrt.errors import InputError
from flashrt.ir import read_document
from flashrt.mcp_server.devices import default_devices, device_names
from flashrt.mcp_server.work import device_warnings


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (["cpu-0", "cpu-0"], "every device once"),
        (["cpu-4096"], "devices of this machine"),
        (["cuda:77"], "gpu_acquire"),
        ("gpu-0", "lease id"),
        (["cpu-x"], "lease id"),
        ([3], "lease id"),
        ("lease-999-abc", "lease"),
    ],
)
def test_wrong_devices_are_refused(given: Any, expected: str) -> None:
    with pytest.raises(InputError, match=expected):
        device_names(given)


def test_right_devices_pass() -> None:
    assert device_names(None) == ()
    assert device_names("cpu-0") == ("cpu-0",)
    assert device_names(["emulated-7", "emulated-3"]) == ("emulated-7", "emulated-3")


def test_a_deployment_without_a_lease_takes_the_first_devices_of_its_kind() -> None:
    assert default_devices({"groups": {"a": [0]}}, "x") == ("cpu-0",)
    assert default_devices({"groups": {"a": [0, 9999]}, "devices": "emulated"}, "x") == ()
    with pytest.raises(InputError, match=r"x, key 'groups'.*device 9999"):
        default_devices({"groups": {"a": [0], "b": [9999]}}, "x")


def test_a_kind_that_is_not_here_is_refused_and_a_check_beside_it_says_so(toy: Path) -> None:
    document = read_document(toy / "split.yaml")
    with pytest.raises(InputError, match="it has no rocm device"):
        default_devices({**document, "devices": "rocm"}, "deployment 'split.yaml'")
    assert device_warnings(resolve_system("split.yaml", toy), ()) == []
    (toy / "far.yaml").write_text((toy / "split.yaml").read_text().replace("devices: cpu", "devices: rocm"))
    far = resolve_system("far.yaml", toy)
    (warning,) = device_warnings(far, ())
    assert "'far.yaml' is for rocm devices" in warning
    assert device_warnings(far, ("rocm:0",)) == []
