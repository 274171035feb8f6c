"""Running a plan: a process for every executor, on emulated GPUs, with the requests that the simulator had.

What it adds to the simulation is all that it leaves out: processes, sockets, a clock that does not stop.
"""

from __future__ import annotations

import heapq
import json
import os
import selectors
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import numpy as np

from flashrt.errors import input_error
from flashrt.planners.serving import kernels
from flashrt.planners.serving.evaluate import Evaluator, Simulated, judge
from flashrt.planners.serving.executor import DONE, REQUEST
from flashrt.planners.serving.flat import Flat, flatten_plan
from flashrt.planners.serving.plans import Plan, Routes
from flashrt.planners.serving.problem import Problem
from flashrt.runtime.lifeline import MARK, kill_marked

START_S = 30.0
GRACE_S = 60.0


@dataclass(frozen=True, eq=False)
class Emulated:
    """What a plan reached, beside what the simulator says of the same requests.

    Attributes
    ----------
    speedup
        By how much faster than life requests came and executors worked.
    """

    reached: Simulated
    predicted: Simulated
    num_executors: int
    num_requests: int
    seconds: float
    speedup: float


def run_emulated(
    evaluator: Evaluator,
    plan: Plan,
    routes: Routes,
    *,
    num_requests: int = 1000,
    speedup: float = 1.0,
    seed: int = 2,
    cluster: bool = False,
) -> Emulated:
    """Serve requests at α·R by processes that are busy for as long as the profile says.

    Parameters
    ----------
    cluster
        Executors are actors that Ray spreads over the nodes of the cluster at ``RAY_ADDRESS``, not processes here.

    Raises
    ------
    InputError
        An executor that ended, or requests that are not done in time; all processes are ended first.
    """
    problem = evaluator.problem
    flat = flatten_plan(problem, routes, plan)
    rate = evaluator.load.alpha * plan.rate_per_s
    unit, kinds, draws = evaluator.requests(flat.places, num_requests, seed)
    arrivals_ms = unit * (1e3 / rate)
    begin = time.monotonic()
    with ExitStack() as stack:
        mark = uuid.uuid4().hex
        stack.callback(kill_marked, mark)
        rows = [executor_settings(problem, flat, row, speedup) for row in range(len(flat.engine_of))]
        if cluster:
            from flashrt.planners.serving.cluster import executors_on_cluster

            ends = stack.enter_context(executors_on_cluster(rows))
        else:
            ends = [stack.enter_context(_executor(settings, mark)) for settings in rows]
        finish_ms = _Driver(flat, ends, arrivals_ms, kinds, draws, evaluator.load.transfer_ms, speedup).run()
    reached = judge(problem, arrivals_ms, kinds, finish_ms, np.zeros(len(ends)))
    predicted = evaluator.simulate(plan, routes, num=num_requests, seed=seed)
    return Emulated(reached, predicted, len(ends), num_requests, time.monotonic() - begin, speedup)


def executor_settings(problem: Problem, flat: Flat, row: int, speedup: float) -> dict[str, Any]:
    """Return what an executor is told: its batching, and latencies in seconds of the clock."""
    k = int(flat.configuration_of[row])
    one = problem.configurations[k]
    tables = problem.latency_ms[one.engine, :, : one.batch]
    return {
        "batch": one.batch,
        "static": bool(flat.static_of[row]),
        "latency_s": (np.where(np.isfinite(tables), tables, 0) / 1e3 / speedup).tolist(),
        "keeps": problem.occupancy[k].tolist(),
        "cpu_s": (problem.cpu_ms[one.engine] / 1e3 / speedup).tolist(),
    }


@contextmanager
def _executor(settings: Mapping[str, Any], mark: str) -> Iterator[socket.socket]:
    """Start an executor, and yield the socket to it; it is ended and reaped however this is left."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", "flashrt.planners.serving.executor", "--fd", str(theirs.fileno())],
            stdin=subprocess.PIPE, pass_fds=[theirs.fileno()], env={**os.environ, MARK: mark}, start_new_session=True,
        )  # fmt: skip
        try:
            theirs.close()
            assert process.stdin is not None
            with suppress(BrokenPipeError), process.stdin as stdin:
                stdin.write(json.dumps(settings).encode())
            yield ours
        finally:
            ours.close()
            process.kill()
            process.wait()


class _Driver:
    """Sends requests when they are due and passes them on from node to node."""

    def __init__(
        self, flat: Flat, ends: list[socket.socket], arrivals_ms: np.ndarray, kinds: np.ndarray, draws: np.ndarray,
        transfer_ms: float, speedup: float,
    ) -> None:  # fmt: skip
        self._flat, self._ends, self._kinds, self._draws = flat, ends, kinds, draws
        self._arrivals_s = arrivals_ms / 1e3 / speedup
        self._transfer_s = transfer_ms / 1e3 / speedup
        self._speedup = speedup
        self._places = flat.places
        num = len(kinds)
        self._left = np.zeros(num, int)
        self._waits = np.zeros((num, self._places), int)
        self._route = np.zeros(num, int)
        self._finish_s = np.full(num, np.inf)
        self._due: list[tuple[float, int]] = []
        self._begin = 0.0

    def run(self) -> np.ndarray:
        """Serve all requests; return when each was done, in ms of the workload."""
        with selectors.DefaultSelector() as selector:
            for row, end in enumerate(self._ends):
                selector.register(end, selectors.EVENT_READ, row)
            self._await_all(selector)
            self._begin = time.monotonic()
            done, num, following = 0, len(self._kinds), 0
            deadline = self._begin + float(self._arrivals_s[-1]) + GRACE_S
            while done < num:
                now = time.monotonic()
                if now > deadline:
                    raise _failed("every request to be done", f"{num - done} of {num} are not, {GRACE_S:.0f} s later")
                while following < num and self._begin + self._arrivals_s[following] <= now:
                    self._enter(following)
                    following += 1
                while self._due and self._due[0][0] <= now:
                    self._send(heapq.heappop(self._due)[1])
                moments = [self._begin + self._arrivals_s[following]] if following < num else []
                moments += [self._due[0][0]] if self._due else []
                wait = min(moments, default=now + 0.1) - time.monotonic()
                for key, _ in selector.select(max(wait, 0)):
                    done += self._done(self._receive(key.data))
        return self._finish_s * 1e3 * self._speedup

    def _await_all(self, selector: selectors.BaseSelector) -> None:
        waiting, until = set(range(len(self._ends))), time.monotonic() + START_S
        while waiting:
            found = selector.select(max(until - time.monotonic(), 0))
            if not found:
                raise _failed(f"executors that start within {START_S:.0f} s", f"{len(waiting)} did not")
            for key, _ in found:
                self._receive(key.data)
                waiting.discard(key.data)

    def _receive(self, row: int) -> int:
        """Return the visit that an executor has done."""
        with suppress(ConnectionResetError):
            record = self._ends[row].recv(DONE.size, socket.MSG_WAITALL)
            if len(record) == DONE.size:
                return int(DONE.unpack(record)[0])
        raise _failed("executors that run", f"executor {row} ended")

    def _enter(self, request: int) -> None:
        flat, kind = self._flat, int(self._kinds[request])
        path = kernels.pick(flat.path_cum[kind], 0, flat.path_cum.shape[1], self._draws[request, 0])
        own = int(flat.routes.number[kind, path])
        self._route[request] = own
        length = int(flat.routes.length[own])
        sinks = (1 << length) - 1
        for place in range(length):
            before = int(flat.routes.before[own, place])
            self._waits[request, place] = before.bit_count()
            sinks &= ~before
        self._left[request] = sinks.bit_count()
        for place in range(length):
            if self._waits[request, place] == 0:
                self._send(request * self._places + place)

    def _send(self, visit: int) -> None:
        request, place = divmod(visit, self._places)
        flat, kind = self._flat, int(self._kinds[request])
        node = int(flat.routes.node[self._route[request], place])
        row = kernels.pick(
            flat.exec_cum[kind], int(flat.first_of[node]), int(flat.first_of[node + 1]),
            self._draws[request, 1 + 2 * place],
        )  # fmt: skip
        try:
            self._ends[row].sendall(REQUEST.pack(visit, kind, float(self._draws[request, 2 + 2 * place])))
        except OSError as error:
            raise _failed("executors that run", f"executor {row} ended ({error})") from None

    def _done(self, visit: int) -> int:
        request, place = divmod(visit, self._places)
        own = self._route[request]
        now = time.monotonic()
        is_sink = True
        for after in range(place + 1, int(self._flat.routes.length[own])):
            if int(self._flat.routes.before[own, after]) >> place & 1:
                is_sink = False
                self._waits[request, after] -= 1
                if self._waits[request, after] == 0:
                    heapq.heappush(self._due, (now + self._transfer_s, request * self._places + after))
        if not is_sink:
            return 0
        self._left[request] -= 1
        if self._left[request]:
            return 0
        self._finish_s[request] = now - self._begin
        return 1


def _failed(expected: str, got: str) -> Exception:
    return input_error("the plan on emulated executors", expected, got, "run it again", rule="executor-ended")
