"""The runtime: the simulator's scheduler over engine processes. Events are their answers, decisions become commands.

A command goes to all members of a group; the lowest device answers. The next step is commanded when the last one was
answered, so a group changes only at a boundary. Emulated engines say when a step ended on their own clock, and that
moment counts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations
from typing import Any

from flashrt.clock import monotonic_ns
from flashrt.errors import input_error
from flashrt.planners.elastic.compare import Question
from flashrt.planners.elastic.degrees import NS_PER_MS, RequestClass
from flashrt.planners.elastic.engines import EngineKind, Engines
from flashrt.planners.elastic.load import Load
from flashrt.planners.elastic.policies import Policy
from flashrt.planners.elastic.report import change_percent, figures_by_class
from flashrt.planners.elastic.request import Abort, Decision, Decode, Finish, Regroup, Request, Start
from flashrt.planners.elastic.scheduler import GO_ON, Scheduler
from flashrt.planners.elastic.simulate import simulate

STALL_S = 120.0
SUSPECT_S = 2.0
"""How long a broken group may wait for word of whose end broke it, before the one that says so counts as lost."""
MAX_GROUPS = 64
MAX_STARTS = 6
LEAD_NS = 20_000_000
Observe = Callable[[Engines, int, Mapping[str, Any]], None]


@dataclass
class Served:
    """What became of a load's requests.

    Attributes
    ----------
    frames
        Request -> its frames, where engines make any.
    losses
        What each lost engine meant for which request, in words.
    num_stale
        Messages of allocations that were over: dropped.
    """

    requests: list[Request] = field(default_factory=list)
    frames: dict[int, Any] = field(default_factory=dict)
    losses: list[str] = field(default_factory=list)
    num_stale: int = 0
    num_messages: int = 0


class Server:
    """Serves one load.

    Parameters
    ----------
    speedup
        By how much faster than life requests come and emulated engines work.
    observe
        Called with each message before it is handled.
    """

    def __init__(
        self,
        engines: Engines,
        classes: Sequence[RequestClass],
        policy: Policy,
        islands: Sequence[Sequence[int]],
        load: Load,
        *,
        shares: Sequence[float] | None = None,
        speedup: float = 1.0,
        observe: Observe = lambda engines, device, message: None,
    ) -> None:
        self._engines = engines
        self._load = load
        self._speedup = speedup
        self._observe = observe
        self._scheduler = Scheduler(classes, policy, islands, shares=shares, keeps_history=True)
        self._served = Served()
        self._begin_ns = 0
        self._now_ns = 0
        self._num_ended = 0
        self._suspects: dict[int, tuple[int, int, int]] = {}

    def run(self) -> Served:
        """Serve every request to its end.

        Raises
        ------
        InputError
            Nothing happened for `STALL_S` though requests are under way.
        """
        arrivals = self._load.arrivals_ns
        self._begin_ns = monotonic_ns() + LEAD_NS
        heard_ns, following = monotonic_ns(), 0
        while self._num_ended < len(arrivals):
            moment = monotonic_ns()
            while following < len(arrivals) and self._real_ns(arrivals[following]) <= moment:
                first, due = following, arrivals[following]
                while following < len(arrivals) and arrivals[following] == due:
                    following += 1
                self._now_ns = max(self._now_ns, due)
                together = range(first, following)
                decisions = self._scheduler.arrive(self._now_ns, *((one, self._load.kinds[one]) for one in together))
                for one in together:
                    self._keep(one, due)
                self._act(decisions)
                heard_ns = moment
            until = min(
                [self._real_ns(arrivals[following])] if following < len(arrivals) else [moment + int(1e9)],
                default=moment,
            )  # fmt: skip
            for device, message in self._engines.receive(min(until, moment + int(1e9))):
                heard_ns = monotonic_ns()
                if message is None:
                    self._lose(device)
                else:
                    self._served.num_messages += 1
                    self._observe(self._engines, device, message)
                    self._hear(device, message)
            self._end_suspects()
            if following == len(arrivals) and monotonic_ns() - heard_ns > STALL_S * 1e9:
                raise input_error("elastic runtime", "engines that answer", f"none did for {STALL_S:.0f} s",
                                  "start it again", rule="engines-stalled")  # fmt: skip
        self._served.num_stale = self._scheduler.num_stale
        return self._served

    def _keep(self, number: int, arrived_ns: int) -> None:
        request = self._scheduler.requests[number]
        # It came when it was due, however late it was seen.
        request.arrived_ns = arrived_ns
        self._served.requests.append(request)

    def _real_ns(self, now_ns: int) -> int:
        return self._begin_ns + int(now_ns / self._speedup)

    def _moved(self, real_ns: int) -> int:
        """Move the clock to a moment of the machine's clock, never back; return it."""
        self._now_ns = max(self._now_ns, int((real_ns - self._begin_ns) * self._speedup))
        return self._now_ns

    def _hear(self, device: int, message: Mapping[str, Any]) -> None:
        what = message["did"]
        scheduler = self._scheduler
        if what == "step":
            number = message["request"]
            now = self._moved(message["end_ns"])
            found = scheduler.step_done(now, number, message["version"], message["step"])
            if found is GO_ON:
                self._step(scheduler.requests[number], None, False)
            elif found is not None:
                self._act(found)
        elif what == "decoded":
            found = scheduler.decoded(self._moved(message["end_ns"]), message["request"], message["version"])
            if found is not None:
                if message["value"] is not None:
                    self._served.frames[message["request"]] = message["value"]
                self._act(found)
        elif what == "left":
            self._act(scheduler.left(self._moved(monotonic_ns()), device))
        elif what == "broken":
            self._suspects[device] = (message["request"], message["version"], monotonic_ns() + int(SUSPECT_S * 1e9))
        elif what == "ready":
            self._act(scheduler.join(self._moved(monotonic_ns()), device))

    def _act(self, decisions: Sequence[Decision]) -> None:
        for one in decisions:
            if isinstance(one, Start):
                self._step(one.request, None, True)
            elif isinstance(one, Regroup):
                self._step(one.request, one.source[0], False)
            elif isinstance(one, Decode):
                took = self._scheduler.decode_ns(one.request, len(one.devices))
                self._command("decode", one.request, one.devices, took, {})
                self._drop(one.request, one.version, one.released, answers=False)
            elif isinstance(one, Finish):
                self._num_ended += 1
            elif isinstance(one, Abort):
                self._abort(one)

    def _step(self, request: Request, source: int | None, begin: bool) -> None:
        took = request.step_ns
        if source is not None:
            took += request.service.regroup_ns[len(request.devices)]
        more = {"step": request.step + 1, "source": source, "begin": begin}
        self._command("run", request, request.devices, took, more)

    def _command(
        self, do: str, request: Request, devices: Sequence[int], took_ns: int, more: Mapping[str, Any]
    ) -> None:
        self._engines.send(devices, {
            "do": do, "request": request.number, "version": request.version, "kind": request.service.name,
            "seed": request.number, "devices": list(devices), "group": self._engines.group_name(devices),
            "ready_ns": self._real_ns(self._now_ns), "took_ns": int(took_ns / self._speedup), **more,
        })  # fmt: skip

    def _drop(self, request: Request, version: int, devices: Sequence[int], *, answers: bool) -> None:
        self._engines.send(
            devices, {"do": "drop", "request": request.number, "version": version, "answers": answers}
        )  # fmt: skip

    def _abort(self, one: Abort) -> None:
        then = "it begins again" if one.restarts else "it failed: it had begun again once before"
        self._served.losses.append(
            f"the engine of device {one.lost} ended ({self._engines.ended_words(one.lost)}) with request "
            f"{one.request.number} (class '{one.request.service.name}'); {then}"
        )  # fmt: skip
        if not one.restarts:
            self._num_ended += 1
        self._drop(one.request, one.version, one.survivors, answers=True)

    def _lose(self, device: int) -> None:
        """Do without a device whose process has ended, until another one of it is ready."""
        self._suspects.pop(device, None)
        decisions = self._scheduler.lose(self._moved(monotonic_ns()), device)
        if not any(isinstance(one, Abort) for one in decisions):
            self._served.losses.append(
                f"the engine of device {device} ended ({self._engines.ended_words(device)}) with no request"
            )
        self._act(decisions)
        starts = self._engines.of[device].starts
        if starts < MAX_STARTS:
            self._engines.start(device, starts + 1)
        else:
            self._served.losses.append(f"the engine of device {device} ended {starts} times and is not started again")

    def _end_suspects(self) -> None:
        """End engines whose group broke without any of its members having ended."""
        moment = monotonic_ns()
        for device, (number, version, deadline) in list(self._suspects.items()):
            request = self._scheduler.requests.get(number)
            if request is None or request.version != version:
                del self._suspects[device]
            elif moment > deadline:
                del self._suspects[device]
                self._engines.of[device].process.kill()


def serve_load(
    classes: Sequence[RequestClass],
    policy: Policy,
    islands: Sequence[Sequence[int]],
    load: Load,
    *,
    engine: EngineKind = "emulated",
    keys: Mapping[str, Mapping[str, Any]] | None = None,
    shares: Sequence[float] | None = None,
    speedup: float = 1.0,
    measures: bool = True,
    observe: Observe = lambda engines, device, message: None,
) -> tuple[Served, list[RequestClass]]:
    """Serve a load by one engine process a device; return what became of it, and the classes as they were scheduled.

    Parameters
    ----------
    keys
        Class -> its key, for engines that make frames.
    measures
        Real engines: what a change of group costs is measured before, and decides about promotions.

    Raises
    ------
    InputError
        Engines that do not start, or that stall.
    """
    num_devices = sum(len(island) for island in islands)
    with Engines(engine, num_devices, keys or {}) as engines:
        used = list(classes)
        if engine != "emulated":
            prepare_groups(engines, used, islands)
            if measures and num_devices > 1:
                used = measure_regroup(engines, used, islands)
        server = Server(engines, used, policy, islands, load, shares=shares, speedup=speedup, observe=observe)
        return server.run(), used


def prepare_groups(engines: Engines, classes: Sequence[RequestClass], islands: Sequence[Sequence[int]]) -> None:
    """Make groups ahead: every set of devices that a class may run on, up to `MAX_GROUPS`; others when first needed."""
    degrees = sorted({degree for one in classes for degree in one.step_ns if 1 < degree <= one.best})
    groups = [
        devices for degree in degrees for island in islands for devices in combinations(island, degree)
    ][:MAX_GROUPS]  # fmt: skip
    # One after the other: each is met by its members alone, and all meet them in this order.
    for devices in groups:
        named = {"devices": list(devices), "group": engines.group_name(devices)}
        engines.ask(devices, {"do": "prepare", "groups": [named]}, "prepared")


def measure_regroup(
    engines: Engines, classes: Sequence[RequestClass], islands: Sequence[Sequence[int]]
) -> list[RequestClass]:
    """Return the classes with what a change of group costs here: set-up and latent broadcast."""
    found: dict[int, dict[str, Any]] = {}
    largest = max(islands, key=len)
    for degree in sorted({degree for one in classes for degree in one.step_ns if 1 < degree <= len(largest)}):
        devices = list(largest[:degree])
        named = {"do": "measure", "devices": devices, "group": engines.group_name(devices)}
        found[degree] = engines.ask(devices, named, "measured")[devices[0]]
    return [
        replace(one, regroup_ns={
            degree: int((found[degree]["setup_ms"] + found[degree]["broadcast_ms"][one.name]) * NS_PER_MS)
            if degree in found else cost for degree, cost in one.regroup_ns.items()
        })
        for one in classes
    ]  # fmt: skip


def serve_question(question: Question, policy: Policy, *, engine: EngineKind, speedup: float) -> dict[str, Any]:
    """Serve a question's first repeat, and return its figures beside the simulator's of the same requests."""
    keys = {
        name: times.key.model_dump() for name, times in question.profile.classes.items()
        if name in question.workload.classes
    }  # fmt: skip
    load = question.loads[0]
    emulated = engine == "emulated"
    served, used = serve_load(
        question.classes, policy, question.islands, load, engine=engine, keys=keys, shares=question.shares,
        speedup=speedup if emulated else 1.0,
    )  # fmt: skip
    names = [one.name for one in used]
    record: dict[str, Any] = figures_by_class(served.requests, names)
    record |= {"engine": engine, "emulated": emulated, "num_stale": served.num_stale, "notes": served.losses}
    record["regroup_ms"] = {
        one.name: {str(degree): round(cost / NS_PER_MS, 3) for degree, cost in one.regroup_ns.items()} for one in used
    }
    record["against_simulator"] = None
    if emulated:
        run = simulate(used, policy, question.islands, load.arrivals_ns, load.kinds, shares=question.shares)
        expected = figures_by_class(run.requests, names)
        record["against_simulator"] = {
            key: change_percent(record["all"], expected["all"], key) for key in ("mean_ms", "p99_ms")
        }
    return record
