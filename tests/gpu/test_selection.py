"""The choice of devices against brute force."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from flashrt.gpu.devices import Device
from flashrt.gpu.selection import Request, choose, could_ever_have, impossible, seconds_until_free

MACHINES = st.lists(st.tuples(st.integers(0, 2), st.one_of(st.none(), st.integers(0, 4)), st.booleans()), max_size=6)
REQUESTS = st.builds(Request, st.integers(1, 4), st.just("cuda"), st.integers(0, 4), st.booleans())


def machine(rows: Sequence[tuple[int, int | None, bool]]) -> tuple[list[Device], set[str]]:
    devices = [
        Device(f"GPU-{index}", "cuda", index, "fake", 4, free, f"island-{island}")
        for index, (island, free, _) in enumerate(rows)
    ]
    return devices, {device.uuid for device, row in zip(devices, rows, strict=True) if row[2]}


def fits(gang: tuple[Device, ...], taken: set[str], request: Request) -> bool:
    return (
        all(device.uuid not in taken for device in gang)
        and all(
            not request.min_free_bytes or (device.memory_free_bytes or 0) >= request.min_free_bytes for device in gang
        )
        and (not request.same_island or len({device.island for device in gang}) == 1)
    )


@given(MACHINES, REQUESTS)
def test_choice_is_valid_and_exists_when_any_does(rows: list[tuple[int, int | None, bool]], request_: Request) -> None:
    devices, taken = machine(rows)
    valid = [gang for gang in itertools.combinations(devices, request_.count) if fits(gang, taken, request_)]
    chosen = choose(devices, taken, request_)
    assert (chosen is not None) == bool(valid)
    if chosen is not None:
        assert chosen in valid, "in the fixed device order, without repetition"
        if any(len({device.island for device in gang}) == 1 for gang in valid):
            assert len({device.island for device in chosen}) == 1, "one island is preferred"


@given(MACHINES, REQUESTS)
def test_impossible_means_not_even_on_an_idle_machine(
    rows: list[tuple[int, int | None, bool]], request_: Request
) -> None:
    devices, _ = machine(rows)
    everything = {device.uuid for device in devices}
    if impossible(devices, request_, "test"):
        assert not could_ever_have(devices, everything, request_)
    else:
        assert could_ever_have(devices, everything, request_) or request_.same_island


@given(MACHINES, REQUESTS, st.lists(st.floats(0, 100), min_size=6, max_size=6))
def test_wait_estimate_is_the_first_moment_that_suffices(
    rows: list[tuple[int, int | None, bool]], request_: Request, left_s: list[float]
) -> None:
    devices, taken = machine(rows)
    leases = [(left, {uuid}) for left, uuid in zip(left_s, sorted(taken), strict=False)]
    estimate = seconds_until_free(devices, leases, request_)
    moments = []
    for moment in sorted({left for left, _ in leases}):
        back = {uuid for left, uuids in leases if left <= moment for uuid in uuids}
        if could_ever_have([d for d in devices if d.uuid not in taken - back], back, request_):
            moments.append(moment)
    assert estimate == (moments[0] if moments else None)


def test_tightest_island_is_filled_first() -> None:
    devices, _ = machine([(0, 4, False)] * 4 + [(1, 4, False)] * 2)
    chosen = choose(devices, (), Request(2, "cuda"))
    assert chosen is not None
    assert {device.island for device in chosen} == {"island-1"}
