"""A process sees only its own devices, under the numbers that its framework gives them then."""

from __future__ import annotations

import pytest

from flashrt.gpu.exports import mask_devices


@pytest.mark.parametrize(
    ("names", "variables", "inside"),
    [
        ([], {}, []),
        (["cpu-1", "cpu-0"], {}, ["cpu-1", "cpu-0"]),
        (["emulated-5"], {}, ["emulated-5"]),
        (
            ["cuda:3", "cuda:1"],
            {"CUDA_DEVICE_ORDER": "PCI_BUS_ID", "CUDA_VISIBLE_DEVICES": "3,1"},
            ["cuda:0", "cuda:1"],
        ),
        (["rocm:2"], {"ROCR_VISIBLE_DEVICES": "2"}, ["rocm:0"]),
    ],
)
def test_masks(names: list[str], variables: dict[str, str], inside: list[str]) -> None:
    assert mask_devices(names) == (variables, inside)
