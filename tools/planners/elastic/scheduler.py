"""The scheduler: a state machine without a clock. Events in, decisions out; the simulator and the runtime share it.

Rules: requests begin in order of arrival, with the devices that are free up to B. Whoever has fewer is hungry. When
devices are released, hungry requests are promoted, the most starved first, where the change pays; then waiting ones
begin (`Policy.waiting_first`: the other way round). A promotion takes effect at the request's next step boundary.
Every message carries the version of its allocation; stale ones are dropped and counted.

Source: DDiT, sections 4, 10 and 15; ``spec/planners.md``, section 3.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from flashrt.planners.elastic.degrees import RequestClass
from flashrt.planners.elastic.devices import FreeDevices
from flashrt.planners.elastic.partitions import divide
from flashrt.planners.elastic.policies import Policy
from flashrt.planners.elastic.request import (
    DECODING,
    DENOISING,
    DONE,
    FAILED,
    WAITING,
    Abort,
    Decision,
    Decode,
    Finish,
    Regroup,
    Request,
    Start,
    make_service,
)

GO_ON: list[Decision] = []
"""Answer to a step: the next one, on the same group."""


class Scheduler:
    """Who has which devices.

    Parameters
    ----------
    classes
        Requests name theirs by its place.
    islands
        Devices that fast links join; groups stay within one.
    shares
        Of the classes, for policies that divide devices once.
    max_restarts
        How often a request begins again after a device of its group was lost.
    keeps_history
        Whether requests keep every group that they had, for drawing.
    """

    def __init__(
        self,
        classes: Sequence[RequestClass],
        policy: Policy,
        islands: Sequence[Sequence[int]],
        *,
        shares: Sequence[float] | None = None,
        max_restarts: int = 1,
        keeps_history: bool = False,
    ) -> None:
        largest_island = max(len(island) for island in islands)
        self.policy = policy
        self.services = [make_service(one, policy, largest_island) for one in classes]
        self.free = FreeDevices(islands)
        self.num_devices = self.free.num_free
        self.owner: dict[int, Request | None] = dict.fromkeys(self.free.island_of)
        self.requests: dict[int, Request] = {}
        """Those that are not done."""
        self.hungry: dict[int, Request] = {}
        self.num_stale = 0
        self._max_restarts = max_restarts
        self._keeps_history = keeps_history
        self._num_arrived = 0
        self._lost: set[int] = set()
        self._leaving: dict[int, Request] = {}
        is_divided = policy.partition != "none"
        self._queues: list[deque[Request]] = [deque() for _ in (classes if is_divided else classes[:1])]
        self._work = [float(one.work_ns(service.cap)) for one, service in zip(classes, self.services, strict=True)]
        self._there = [0] * len(classes)
        self._held = [0] * len(classes)
        weights = shares or [1.0] * len(classes)
        self._quota = divide(
            self.num_devices, [share * work for share, work in zip(weights, self._work, strict=True)], at_least=1
        )

    @property
    def num_waiting(self) -> int:
        """Requests that have not begun."""
        return sum(len(queue) for queue in self._queues)

    def waiting(self) -> list[Request]:
        """Return the requests that have not begun, in order of arrival."""
        return sorted((one for queue in self._queues for one in queue), key=lambda one: one.arrival)

    def arrive(self, now_ns: int, *arrivals: tuple[int, int]) -> list[Decision]:
        """Take requests that come at one moment, each as (its number, which is new; its class)."""
        for number, kind in arrivals:
            request = Request(number, self._num_arrived, kind, self.services[kind], now_ns)
            self._num_arrived += 1
            self.requests[number] = request
            self._there[kind] += 1
            self._queue(request).append(request)
        out: list[Decision] = []
        self._start_waiting(now_ns, out)
        return out

    def step_done(self, now_ns: int, number: int, version: int, step: int) -> list[Decision] | None:
        """Count a step; return `GO_ON`, or what happens at this boundary. None: the message was stale."""
        request = self.requests.get(number)
        if request is None or request.version != version or request.step + 1 != step or request.phase is not DENOISING:
            self.num_stale += 1
            return None
        request.step = step
        if step == request.service.steps:
            return self._end_denoising(now_ns, request)
        if request.pending is None:
            return GO_ON
        source, request.devices = request.devices, request.pending
        request.pending = None
        self._change_step_time(request)
        request.version += 1
        request.promotions += 1
        self._note(now_ns, request)
        return [Regroup(request, request.devices, request.version, source)]

    def decoded(self, now_ns: int, number: int, version: int) -> list[Decision] | None:
        """End a request. None: the message was stale."""
        request = self.requests.get(number)
        if request is None or request.version != version or request.phase is not DECODING:
            self.num_stale += 1
            return None
        out: list[Decision] = [Finish(request)]
        devices = request.devices
        self._end(now_ns, request, DONE)
        self._release(now_ns, devices, out)
        return out

    def lose(self, now_ns: int, device: int) -> list[Decision]:
        """Do without a device. The request that had it leaves its other devices, which are free after `left`."""
        if device in self._lost:
            return []
        self._lost.add(device)
        if self._leaving.pop(device, None) is not None:
            self.owner[device] = None
            return []
        request = self.owner[device]
        if request is None:
            self.free.remove(device)
            return []
        survivors = [one for one in request.held if one != device]
        version = request.version
        restarts = request.restarts < self._max_restarts
        self.hungry.pop(request.number, None)
        self._account(now_ns, request)
        self._held[request.kind] -= len(request.held)
        for one in survivors:
            self._leaving[one] = request
        self.owner[device] = None
        request.devices, request.pending = (), None
        request.version += 1
        if restarts:
            request.restarts += 1
            request.phase, request.step = WAITING, 0
            request.starvation_ns = request.counted_step = 0
            self._note(now_ns, request)
            self._put_back(request)
        else:
            self._end(now_ns, request, FAILED)
        out: list[Decision] = [Abort(request, survivors, device, version, restarts)]
        self._start_waiting(now_ns, out)
        return out

    def left(self, now_ns: int, device: int) -> list[Decision]:
        """Take back a device whose request was aborted."""
        if self._leaving.pop(device, None) is None:
            self.num_stale += 1
            return []
        out: list[Decision] = []
        self._release(now_ns, (device,), out)
        return out

    def join(self, now_ns: int, device: int) -> list[Decision]:
        """Have a lost device again."""
        if device not in self._lost:
            self.num_stale += 1
            return []
        self._lost.remove(device)
        out: list[Decision] = []
        self._release(now_ns, (device,), out)
        return out

    def _queue(self, request: Request) -> deque[Request]:
        return self._queues[request.kind if len(self._queues) > 1 else 0]

    def _put_back(self, request: Request) -> None:
        """Put a request where its arrival says."""
        queue = self._queue(request)
        place = next((index for index, one in enumerate(queue) if one.arrival > request.arrival), len(queue))
        queue.insert(place, request)

    def _end_denoising(self, now_ns: int, request: Request) -> list[Decision]:
        request.phase = DECODING
        request.dit_end_ns = now_ns
        request.version += 1
        self.hungry.pop(request.number, None)
        keep = request.service.vae_keep[len(request.devices)]
        if keep < len(request.devices):
            self._account(now_ns, request)
        kept, released = request.devices[:keep], request.devices[keep:]
        request.devices = kept
        self._note(now_ns, request)
        out: list[Decision] = [Decode(request, kept, request.version, released)]
        if released:
            self._held[request.kind] -= len(released)
            self._release(now_ns, released, out)
        return out

    def decode_ns(self, request: Request, num_devices: int) -> int:
        """Return the VAE's time on a request's group."""
        return request.service.vae_ns[num_devices]

    def _end(self, now_ns: int, request: Request, phase: str) -> None:
        self._account(now_ns, request)
        self._held[request.kind] -= len(request.held)
        request.phase, request.ended_ns = phase, now_ns
        request.devices = ()
        request.version += 1
        self._there[request.kind] -= 1
        del self.requests[request.number]
        self._note(now_ns, request)

    def _release(self, now_ns: int, devices: Sequence[int], out: list[Decision]) -> None:
        for device in devices:
            self.owner[device] = None
        self.free.give(devices)
        if self.policy.waiting_first:
            self._start_waiting(now_ns, out)
        if self.hungry and self.free.num_free:
            self._promote(now_ns)
        if self.free.num_free:
            self._start_waiting(now_ns, out)

    def _promote(self, now_ns: int) -> None:
        """Give free devices to hungry requests, the most starved first; they have them from their next boundary on."""
        free = self.free
        # A request that has not done a step since is starved by nothing yet; the earlier one goes first.
        asking = [one for one in self.hungry.values() if free.counts[free.island_of[one.devices[0]]]]
        asking.sort(key=lambda one: (-one.starvation_at(one.step), one.arrival))
        for request in asking:
            island = free.island_of[request.devices[0]]
            service, has = request.service, len(request.held)
            wanted = service.fit[min(has + free.counts[island], service.cap)]
            while wanted > has and not self._pays(request, has, wanted):
                wanted = service.fit[wanted - 1]
            if wanted <= has:
                continue
            more = free.take(island, wanted - has)
            self._account(now_ns, request)
            request.pending = tuple(sorted((*request.held, *more)))
            self._held[request.kind] += len(more)
            for device in more:
                self.owner[device] = request
            self._note(now_ns, request)
            if wanted == service.cap:
                del self.hungry[request.number]
            if not free.num_free:
                return

    def _pays(self, request: Request, has: int, wanted: int) -> bool:
        """Whether the steps after the boundary gain more than group set-up and broadcast take."""
        service = request.service
        remaining = service.steps - request.step - 1
        return remaining * (service.step_ns[has] - service.step_ns[wanted]) > service.regroup_ns[wanted]

    def _start_waiting(self, now_ns: int, out: list[Decision]) -> None:
        if len(self._queues) > 1:
            self._start_divided(now_ns, out)
            return
        free = self.free
        queue = self._queues[0]
        while queue and free.num_free:
            request = queue[0]
            service = request.service
            fit = service.fit
            if self.policy.waiting_first:
                # One device is left for each request behind this one, as far as there are so many.
                fit = fit[: max(free.num_free - len(queue) + 1, service.least) + 1]
            island, degree = free.find_island(fit)
            if not degree or (self.policy.waits and degree < service.cap):
                return
            queue.popleft()
            self._start(now_ns, request, island, degree, out)

    def _start_divided(self, now_ns: int, out: list[Decision]) -> None:
        """Begin requests within their class's part; where parts are no borders, elsewhere too."""
        if self.policy.partition == "dynamic":
            demand = [there * work for there, work in zip(self._there, self._work, strict=True)]
            self._quota = divide(self.num_devices - len(self._lost), demand, at_least=1)
        free = self.free
        for within in (True,) if self.policy.is_isolated else (True, False):
            heads = sorted((queue for queue in self._queues if queue), key=lambda queue: queue[0].arrival)
            for queue in heads:
                while queue and free.num_free:
                    request = queue[0]
                    service, quota = request.service, self._quota[request.kind]
                    # A part smaller than B runs its class at the largest degree that it has room for.
                    degree = service.fit[min(quota if within else service.cap, service.cap)]
                    room = quota - self._held[request.kind] if within else self.num_devices
                    island, possible = free.find_island(service.fit[: degree + 1])
                    if not degree or possible < degree or room < degree:
                        break
                    queue.popleft()
                    self._start(now_ns, request, island, degree, out)

    def _start(self, now_ns: int, request: Request, island: int, degree: int, out: list[Decision]) -> None:
        devices = self.free.take(island, degree)
        for device in devices:
            self.owner[device] = request
        self._account(now_ns, request)
        request.devices = devices
        request.phase = DENOISING
        request.version += 1
        if request.started_ns < 0:
            request.started_ns = now_ns
        self._held[request.kind] += degree
        self._change_step_time(request)
        if degree < request.service.cap and request.service.is_elastic:
            self.hungry[request.number] = request
        self._note(now_ns, request)
        out.append(Start(request, devices, request.version))

    def _change_step_time(self, request: Request) -> None:
        if request.step_ns:
            request.starvation_ns = request.starvation_at(request.step)
        request.counted_step = request.step
        request.step_ns = request.service.step_ns[len(request.devices)]

    def _account(self, now_ns: int, request: Request) -> None:
        request.gpu_ns += len(request.held) * (now_ns - request.since_ns)
        request.since_ns = now_ns

    def _note(self, now_ns: int, request: Request) -> None:
        if self._keeps_history:
            request.history.append((now_ns, request.held, request.phase))
