"""A discrete-event simulation of one scheduler on a virtual clock: every step of every request is an event."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heappop, heappush

from flashrt.planners.elastic.degrees import RequestClass
from flashrt.planners.elastic.policies import Policy
from flashrt.planners.elastic.request import Decision, Decode, Regroup, Request, Start
from flashrt.planners.elastic.scheduler import GO_ON, Scheduler


@dataclass(frozen=True)
class Simulated:
    """What became of every request.

    Attributes
    ----------
    requests
        In order of arrival, all done.
    num_events
        Arrivals, step ends and VAE ends that the scheduler was told.
    num_decisions
        Starts, regroups, ends of DiT phases and ends of requests among them.
    """

    requests: Sequence[Request]
    num_events: int
    num_decisions: int
    end_ns: int


def simulate(
    classes: Sequence[RequestClass],
    policy: Policy,
    islands: Sequence[Sequence[int]],
    arrivals_ns: Sequence[int],
    kinds: Sequence[int],
    *,
    shares: Sequence[float] | None = None,
    keeps_history: bool = False,
) -> Simulated:
    """Serve requests that come at `arrivals_ns` (ascending), of the classes `kinds`, until all are done."""
    scheduler = Scheduler(classes, policy, islands, shares=shares, keeps_history=keeps_history)
    queue: list[tuple[int, int, Request, int]] = []
    requests: list[Request] = []
    order, num_events, num_decisions, now = 0, 0, 0, 0
    step_done, num = scheduler.step_done, len(arrivals_ns)
    following = 0
    due = arrivals_ns[0] if num else 0
    while following < num or queue:
        if following < num and (not queue or due <= queue[0][0]):
            now = due
            first = following
            while following < num and arrivals_ns[following] == due:
                following += 1
            decisions: list[Decision] = scheduler.arrive(now, *((one, kinds[one]) for one in range(first, following)))
            requests += [scheduler.requests[one] for one in range(first, following)]
            num_events += following - first - 1
            if following < num:
                due = arrivals_ns[following]
        else:
            now, _, request, version = heappop(queue)
            if request.dit_end_ns < 0:
                found = step_done(now, request.number, version, request.step + 1)
                if found is GO_ON:
                    num_events += 1
                    order += 1
                    heappush(queue, (now + request.step_ns, order, request, version))
                    continue
            else:
                found = scheduler.decoded(now, request.number, version)
            assert found is not None, "nothing is stale where nothing is late"
            decisions = found
        num_events += 1
        num_decisions += len(decisions)
        for one in decisions:
            order += 1
            if isinstance(one, Start):
                heappush(queue, (now + one.request.step_ns, order, one.request, one.version))
            elif isinstance(one, Regroup):
                cost = one.request.service.regroup_ns[len(one.devices)]
                heappush(queue, (now + cost + one.request.step_ns, order, one.request, one.version))
            elif isinstance(one, Decode):
                took = scheduler.decode_ns(one.request, len(one.devices))
                heappush(queue, (now + took, order, one.request, one.version))
    return Simulated(requests, num_events, num_decisions, now)
