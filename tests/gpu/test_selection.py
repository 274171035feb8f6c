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
    for moment in (0.0, *sorted({left for left, _ in leases})):
        back = {uuid for left, uuids in leases if left <= moment for uuid in uuids}
        if could_ever_have([d for d in devices if d.uuid not in taken - back], back, request_):
            moments.append(moment)
    if choose(devices, taken, request_) is not None:
        assert estimate == 0
    else:
        assert estimate == next((moment for moment in moments if moment > 0 or moment in left_s), None)


@given(MACHINES, REQUESTS, st.lists(st.tuples(REQUESTS, st.floats(1, 100)), max_size=4))
def test_nobody_in_the_queue_makes_the_wait_shorter(
    rows: list[tuple[int, int | None, bool]], request_: Request, waiting: list[tuple[Request, float]]
) -> None:
    devices, taken = machine(rows)
    leases = [(10.0 * number, {uuid}) for number, uuid in enumerate(sorted(taken), 1)]
    candidates = [device.uuid for device in devices]
    ahead = [(before, hold_s, candidates) for before, hold_s in waiting]
    alone, behind = (seconds_until_free(devices, leases, request_, queue) for queue in ((), ahead))
    assert (alone is None) == (behind is None)
    if alone is not None and behind is not None:
        assert behind >= alone


def test_wait_estimate_counts_the_queue() -> None:
    devices, _ = machine([(0, 4, True)] * 4)
    leases = [(30.0, [device.uuid for device in devices[:2]]), (50.0, [device.uuid for device in devices[2:]])]
    candidates = [device.uuid for device in devices]
    gang, small = Request(4, "cuda"), Request(1, "cuda")
    assert seconds_until_free(devices, leases, small) == 30
    assert seconds_until_free(devices, leases, small, [(gang, 100.0, candidates)]) == 150
    assert seconds_until_free(devices, leases, small, [(small, 5.0, candidates), (small, 9.0, candidates)]) == 35


def test_whole_devices_and_instances_are_never_mixed() -> None:
    whole = [Device(f"GPU-{index}", "cuda", index, "fake", 4, 4, "a") for index in range(2)]
    parts = [Device(f"MIG-{index}", "cuda", 2, "fake", 1, 1, f"m{index}", parent="GPU-2") for index in range(3)]
    assert choose([*parts, *whole], (), Request(2, "cuda")) == tuple(whole)
    assert choose([*whole, *parts], ("GPU-0",), Request(2, "cuda")) == tuple(parts[:2])
    assert choose([*whole, *parts], ("GPU-0", "MIG-1", "MIG-2"), Request(2, "cuda")) is None
    assert impossible([*whole, *parts], Request(3, "cuda"), "x") == []
    assert impossible([*whole, *parts], Request(4, "cuda"), "x")[0].rule == "too-many-devices"


def test_tightest_island_is_filled_first() -> None:
    devices, _ = machine([(0, 4, False)] * 4 + [(1, 4, False)] * 2)
    chosen = choose(devices, (), Request(2, "cuda"))
    assert chosen is not None
    assert {device.island for device in chosen} == {"island-1"}
