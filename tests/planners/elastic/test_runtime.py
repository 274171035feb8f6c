"""The runtime: real engine processes, emulated and with the tiny DiT; kill -9 in the middle of requests."""

from __future__ import annotations

import os
import signal
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from flashrt.bench.equality import Tolerance, compare_output
from flashrt.planners.elastic import ELASTIC, RequestClass, find_policy, make_islands, simulate
from flashrt.planners.elastic.engines import Engines
from flashrt.planners.elastic.load import Load
from flashrt.planners.elastic.report import figures_by_class
from flashrt.planners.elastic.request import DONE, FAILED
from flashrt.planners.elastic.serve import serve_load
from tests.planners.elastic.classes import classes_of, shipped

MS = 1_000_000


def pids(engines: Engines) -> list[int]:
    return [engine.process.pid for engine in engines.of.values()]


def alive(numbers: list[int]) -> list[int]:
    return [number for number in numbers if os.path.exists(f"/proc/{number}")]


class Killer:
    """Ends an engine with signal 9 when its request has done a step; remembers every process that there was."""

    def __init__(self, request: int, step: int, member: int, times: int = 1) -> None:
        self._at = (request, step)
        self._member = member
        self._left = times
        self.pids: set[int] = set()
        self.victims: list[int] = []

    def __call__(self, engines: Engines, device: int, message: Mapping[str, Any]) -> None:
        self.pids |= set(pids(engines))
        if self._left and message["did"] == "step" and (message["request"], message["step"]) == self._at:
            self._left -= 1
            victim = device if self._member == 0 else self._member
            self.victims.append(victim)
            os.kill(engines.of[victim].process.pid, signal.SIGKILL)


def tiny_classes() -> list[RequestClass]:
    return classes_of("tiny")


def tiny_keys() -> dict[str, Any]:
    return {name: times.key.model_dump() for name, times in shipped("tiny").classes.items()}


def test_emulated_engines_do_what_the_simulator_says() -> None:
    # Figures of a busy machine differ; the order of events, and so who had what, does not while times are far apart.
    classes = classes_of("video")
    load = Load([0, 50 * MS, 100 * MS, 150 * MS, 200 * MS], [2, 2, 2, 1, 0])
    served, _ = serve_load(classes, ELASTIC, make_islands(8), load, speedup=10)
    run = simulate(classes, ELASTIC, make_islands(8), load.arrivals_ns, load.kinds, keeps_history=True)
    assert served.losses == []
    assert served.num_stale == 0
    for real, expected in zip(served.requests, run.requests, strict=True):
        assert [entry[1:] for entry in real.history] == [entry[1:] for entry in expected.history]
        assert real.promotions == expected.promotions
    assert sum(one.promotions for one in served.requests) > 0
    found = figures_by_class(served.requests, [one.name for one in classes])
    assert set(found["classes"]) == {"144p", "240p", "360p"}


@pytest.mark.parametrize("member", [0, 3])
def test_a_killed_engine_restarts_its_request_alone_and_says_which(member: int) -> None:
    classes = classes_of("video")
    load = Load([0, 0, 0], [2, 1, 0])
    killer = Killer(request=0, step=4, member=member)
    served, _ = serve_load(classes, ELASTIC, make_islands(8), load, speedup=40, observe=killer)
    assert [one.phase for one in served.requests] == [DONE] * 3
    assert [one.restarts for one in served.requests] == [1, 0, 0]
    (loss,) = served.losses
    for words in (f"device {killer.victims[0]}", "SIGKILL", "request 0", "'360p'", "begins again"):
        assert words in loss
    assert not alive(sorted(killer.pids)), "every process is reaped"


def test_a_request_whose_engines_die_twice_fails_alone() -> None:
    classes = [replace(classes_of("video")[0], steps=6)]
    killer = Killer(request=1, step=3, member=0, times=2)
    served, _ = serve_load(classes, ELASTIC, make_islands(2), Load([0, 0, 0], [0, 0, 0]), speedup=20, observe=killer)
    assert [one.phase for one in served.requests] == [DONE, FAILED, DONE]
    assert "it failed" in served.losses[-1]
    assert "request 1" in served.losses[-1]
    assert not alive(sorted(killer.pids))


def run_tiny(
    load: Load, num_devices: int, policy: str = "elastic", observe: Any = None, measures: bool = True
) -> tuple[Any, list[RequestClass]]:
    more = {} if observe is None else {"observe": observe}
    return serve_load(
        tiny_classes(), find_policy(policy), make_islands(num_devices), load, engine="tiny", keys=tiny_keys(),
        measures=measures, **more,
    )  # fmt: skip


def test_two_real_ranks_that_change_degree_within_requests_make_the_frames_of_one() -> None:
    kinds = [1, 1, 0, 1]
    load = Load([0] * 4, kinds)
    alone, _ = run_tiny(load, 1, "static_1")
    killer = Killer(request=-1, step=0, member=0)
    both, used = run_tiny(load, 2, observe=killer)
    assert all(one.phase is DONE for one in both.requests)
    degrees = [[len(devices) for _, devices, phase in one.history if phase == "denoising"] for one in both.requests]
    assert any(one[0] == 1 and one[-1] == 2 for one in degrees), degrees
    assert sum(one.promotions for one in both.requests) >= 1
    declared = tiny_classes()[1].regroup_ns[2]
    assert used[1].regroup_ns[2] not in (0, declared), "what decides about promotions was measured here"
    for number in range(4):
        expected, got = alone.frames[number], both.frames[number]
        assert expected.shape == ((4, 3, 64, 64), (8, 3, 128, 128))[kinds[number]]
        assert np.ptp(expected) > 0.1
        same = compare_output("frames", [expected], [got], Tolerance("numeric"), 1)
        assert same.mismatched == 0, same
    assert not np.array_equal(alone.frames[0], alone.frames[1]), "another seed, other frames"
    assert not alive(sorted(killer.pids))


def test_a_killed_rank_restarts_its_requests_and_frames_stay_right() -> None:
    load = Load([0, 0], [1, 1])
    alone, _ = run_tiny(load, 1, "static_1")
    # Request 0 starts alone on device 0 or with both; whichever: its first device dies in the middle.
    killer = Killer(request=0, step=9, member=0)
    both, _ = run_tiny(load, 2, observe=killer)
    assert [one.phase for one in both.requests] == [DONE, DONE]
    assert both.requests[0].restarts == 1
    assert "request 0" in both.losses[0]
    for number in range(2):
        same = compare_output("frames", [alone.frames[number]], [both.frames[number]], Tolerance("numeric"), 1)
        assert same.mismatched == 0, same
    assert not alive(sorted(killer.pids))
