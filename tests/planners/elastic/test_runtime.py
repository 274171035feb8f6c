"""The runtime: real engine processes, emulated and with the tiny DiT; kill -9 in the middle of requests."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
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
from flashrt.runtime.lifeline import wait_exit
from tests.planners.elastic.classes import classes_of, shipped

MS = 1_000_000


def pids(engines: Engines) -> list[int]:
    return [engine.process.pid for engine in engines.of.values()]


def alive(numbers: list[int]) -> list[int]:
    return [number for number in numbers if os.path.exists(f"/proc/{number}")]


class Killer:
    """Ends an engine with signal 9 when its request has done a step; remembers every process that there was.

    It is gone when the step is handled: where many want the machine, a killed process may outlive its request.
    """

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
            process = engines.of[victim].process
            os.kill(process.pid, signal.SIGKILL)
            process.wait()


def tiny_classes() -> list[RequestClass]:
    return classes_of("tiny")


def tiny_keys() -> dict[str, Any]:
    return {name: times.key.model_dump() for name, times in shipped("tiny").classes.items()}


def test_emulated_engines_do_what_the_simulator_says() -> None:
    # Figures of a busy machine differ; who had what does not, where decisions are half a second of its time apart.
    # The first two have four devices each; when they decode, the third gets two and the fourth one, then four.
    classes = classes_of("video")
    load = Load([0, 1000 * MS, 1600 * MS, 2000 * MS], [2, 2, 1, 2])
    served, _ = serve_load(classes, ELASTIC, make_islands(8), load, speedup=2)
    run = simulate(classes, ELASTIC, make_islands(8), load.arrivals_ns, load.kinds, keeps_history=True)
    assert served.losses == []
    assert served.num_stale == 0
    for real, expected in zip(served.requests, run.requests, strict=True):
        assert [entry[1:] for entry in real.history] == [entry[1:] for entry in expected.history]
        assert real.promotions == expected.promotions
    assert [one.promotions for one in served.requests] == [0, 0, 0, 1]
    assert set(figures_by_class(served.requests, [one.name for one in classes])["classes"]) == {"240p", "360p"}


@pytest.mark.parametrize("member", [0, 3])
def test_a_killed_engine_restarts_its_request_alone_and_says_which(member: int) -> None:
    classes = [replace(one, steps=10) for one in classes_of("video")]
    load = Load([0, 1, 2], [2, 1, 0])
    killer = Killer(request=0, step=4, member=member)
    served, _ = serve_load(classes, ELASTIC, make_islands(7), load, speedup=20, observe=killer)
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


@pytest.fixture(scope="module")
def alone() -> Mapping[int, Any]:
    """The frames of a large and a small request at degree 1, in one process."""
    served, _ = run_tiny(Load([0, 0], [1, 0]), 1, "static_1")
    assert [frames.shape for _, frames in sorted(served.frames.items())] == [(8, 3, 128, 128), (4, 3, 64, 64)]
    assert all(np.ptp(frames) > 0.1 for frames in served.frames.values())
    return served.frames


def assert_same_frames(expected: Mapping[int, Any], got: Mapping[int, Any]) -> None:
    for number, frames in got.items():
        same = compare_output("frames", [expected[number]], [frames], Tolerance("numeric"), 1)
        assert same.mismatched == 0, same


def test_real_ranks_that_change_degree_within_a_request_make_the_frames_of_one(alone: Mapping[int, Any]) -> None:
    # Each begins alone; the small one is done long before, and the large one goes on with both.
    killer = Killer(request=-1, step=0, member=0)
    both, used = run_tiny(Load([0, 0], [1, 0]), 2, observe=killer)
    assert [one.phase for one in both.requests] == [DONE, DONE]
    large = both.requests[0]
    assert [len(devices) for _, devices, phase in large.history if phase == "denoising"] == [1, 2, 2]
    assert large.promotions == 1
    assert sorted(both.frames) == [0, 1]
    assert_same_frames(alone, both.frames)
    declared = tiny_classes()[1].regroup_ns[2]
    assert used[1].regroup_ns[2] not in (0, declared), "what decides about promotions was measured here"
    assert not alive(sorted(killer.pids))


def test_a_killed_rank_breaks_its_group_alone_and_frames_stay_right(alone: Mapping[int, Any]) -> None:
    # The request has both ranks; the second one dies in the middle, and the first is in a collective with it.
    killer = Killer(request=0, step=9, member=1)
    both, _ = run_tiny(Load([0], [1]), 2, observe=killer)
    (request,) = both.requests
    assert (request.phase, request.restarts) == (DONE, 1)
    (loss,) = both.losses
    for words in ("device 1", "SIGKILL", "request 0", "begins again"):
        assert words in loss
    assert_same_frames(alone, both.frames)
    assert not alive(sorted(killer.pids))


DRIVER = """
import sys
from flashrt.planners.elastic import ELASTIC, make_islands
from flashrt.planners.elastic.load import Load
from flashrt.planners.elastic.serve import serve_load
from flashrt.runtime.lifeline import wait_exit
from tests.planners.elastic.classes import classes_of

def observe(engines, device, message):
    print(*(engine.process.pid for engine in engines.of.values()), flush=True)

serve_load(classes_of("video"), ELASTIC, make_islands(2), Load([0, 0], [2, 2]), observe=observe)
"""


def test_engines_end_with_their_driver() -> None:
    root = Path(__file__).parents[3]
    driver = subprocess.Popen([sys.executable, "-c", DRIVER], stdout=subprocess.PIPE, text=True, cwd=root)
    assert driver.stdout is not None
    with driver.stdout:
        numbers = [int(word) for word in driver.stdout.readline().split()]
        handles = [os.pidfd_open(number) for number in numbers]
        driver.kill()
        driver.wait()
    assert len(numbers) == 2
    for handle in handles:
        assert wait_exit(handle, 30)
        os.close(handle)
