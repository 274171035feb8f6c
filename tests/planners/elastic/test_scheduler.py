"""The scheduler under random orders of events: what holds after each, whatever comes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from flashrt.planners.elastic import DDIT, ELASTIC, POLICIES, RequestClass, Scheduler, make_islands
from flashrt.planners.elastic.request import DECODING, DENOISING, Abort, Decode, Finish, Regroup, Request, Start
from tests.planners.elastic.classes import make_class

CLASSES = [
    make_class("small", steps=2, times={1: 60, 2: 58, 4: 60}),
    make_class("middle", steps=4, times={1: 180, 2: 105, 4: 90}, best=2, regroup=20),
    make_class("large", steps=5, times={1: 480, 2: 260, 4: 140}, best=4, regroup=20),
]


class Play:
    """Feeds a scheduler with the answers of engines in any order, and checks what must hold after every event."""

    def __init__(self, policy_name: str, num_devices: int, island: int, classes: Sequence[RequestClass]) -> None:
        self.scheduler = Scheduler(classes, POLICIES[policy_name], make_islands(num_devices, island), max_restarts=1)
        self.policy = POLICIES[policy_name]
        self.island_of = self.scheduler.free.island_of
        self.due: list[tuple[str, int, int, int]] = []
        self.leaving: list[int] = []
        self.gone: list[int] = []
        self.now = 0
        self.num_arrived = 0
        self.ended: list[Request] = []
        self.started: list[int] = []
        self.seen: list[Request] = []

    def arrive(self, kind: int) -> None:
        self.now += 1
        self._take(self.scheduler.arrive(self.now, (self.num_arrived, kind)))
        self.num_arrived += 1

    def answer(self, choice: int) -> None:
        """Let one of the engines' outstanding answers come."""
        self.now += 1
        what, number, version, step = self.due.pop(choice % len(self.due))
        before = self.scheduler.num_stale
        if what == "step":
            found = self.scheduler.step_done(self.now, number, version, step)
            current = self.scheduler.requests.get(number)
            if found == [] and current is not None:
                self.due.append(("step", number, version, step + 1))
        else:
            found = self.scheduler.decoded(self.now, number, version)
        if found is None:
            assert self.scheduler.num_stale == before + 1
        else:
            assert self.scheduler.num_stale == before
            self._take(found)

    def stale(self, choice: int) -> None:
        """Send an older version of an outstanding answer: nothing may change."""
        _, number, version, step = self.due[choice % len(self.due)]
        before = self._picture()
        num_stale = self.scheduler.num_stale
        assert self.scheduler.step_done(self.now, number, version - 1, step) is None
        assert self.scheduler.decoded(self.now, number, version - 1) is None
        assert self.scheduler.step_done(self.now, number, version, step + 7) is None
        assert self.scheduler.num_stale == num_stale + 3
        assert self._picture() == before

    def lose(self, device: int) -> None:
        self.now += 1
        if device not in self.gone:
            self.gone.append(device)
            if device in self.leaving:
                self.leaving.remove(device)
        self._take(self.scheduler.lose(self.now, device))

    def leave(self) -> None:
        self.now += 1
        self._take(self.scheduler.left(self.now, self.leaving.pop()))

    def join(self) -> None:
        self.now += 1
        self._take(self.scheduler.join(self.now, self.gone.pop()))

    def finish(self) -> None:
        """Bring everything to its end."""
        while self.leaving or self.gone or self.due:
            if self.leaving:
                self.leave()
            elif self.gone:
                self.join()
            else:
                self.answer(0)

    def _picture(self) -> Any:
        scheduler = self.scheduler
        return (
            [(one.number, one.version, one.step, one.devices, one.pending) for one in scheduler.requests.values()],
            list(scheduler.free.masks), [one.number for one in scheduler.waiting()],
        )  # fmt: skip

    def _take(self, decisions: Sequence[Any]) -> None:
        for one in decisions:
            request = one.request
            if isinstance(one, Start):
                if request not in self.seen:
                    self.seen.append(request)
                    self.started.append(request.arrival)
                assert one.version == request.version
                self.due.append(("step", request.number, one.version, 1))
            elif isinstance(one, Regroup):
                assert set(one.source) < set(one.devices)
                self.due.append(("step", request.number, one.version, request.step + 1))
            elif isinstance(one, Decode):
                whole = sorted((*one.devices, *one.released))
                assert list(one.devices) == whole[: len(one.devices)], "the lowest ids are kept"
                self.due.append(("decoded", request.number, one.version, 0))
            elif isinstance(one, Finish):
                self.ended.append(request)
            elif isinstance(one, Abort):
                assert one.lost not in one.survivors
                self.leaving += one.survivors
                if not one.restarts:
                    self.ended.append(request)
        self.check()

    def check(self) -> None:
        scheduler = self.scheduler
        held: dict[int, Request] = {}
        for request in scheduler.requests.values():
            for device in request.held:
                assert device not in held, "a device serves one group"
                held[device] = request
                assert scheduler.owner[device] is request
            assert set(request.devices) <= set(request.held)
            assert len(request.held) <= request.service.cap, "never above B"
            if self.policy.degree is None:
                assert len(request.held) <= CLASSES[request.kind].best
            assert len({self.island_of[device] for device in request.held}) <= 1
            if request.phase in (DENOISING, DECODING):
                assert request.devices
        free = {device for device in self.island_of if scheduler.free.is_free(device)}
        away = {*self.gone, *self.leaving}
        assert free.isdisjoint(held)
        assert free.isdisjoint(away)
        assert free | set(held) | away == set(self.island_of), "no device is forgotten"
        assert scheduler.free.num_free == len(free) == sum(scheduler.free.counts)
        if not self.policy.waits:
            assert not (free and scheduler.num_waiting), "nobody waits while a device is free"
        if self.policy.partition == "none":
            assert self.started == sorted(self.started), "first come, first served"


ACTIONS = st.lists(
    st.tuples(st.sampled_from(["arrive", "arrive", "answer", "answer", "answer", "stale", "lose", "leave", "join"]),
              st.integers(0, 1000)),
    max_size=120,
)  # fmt: skip
PLACES = st.sampled_from([(1, 1), (2, 2), (3, 2), (8, 8), (8, 4), (6, 3)])


@settings(max_examples=120, deadline=None)
@given(st.sampled_from(sorted(POLICIES)), PLACES, ACTIONS)
def test_what_must_hold_holds_after_every_event(
    policy: str, place: tuple[int, int], actions: list[tuple[str, int]]
) -> None:
    # A fixed part for each class needs as many devices as classes; else the comparison leaves the policy out.
    num_devices, island = place if policy != "static_partition" else (8, 4)
    play = Play(policy, num_devices, island, CLASSES)
    for what, number in actions:
        if what == "arrive":
            play.arrive(number % len(CLASSES))
        elif what == "answer" and play.due:
            play.answer(number)
        elif what == "stale" and play.due:
            play.stale(number)
        elif what == "lose":
            play.lose(number % num_devices)
        elif what == "leave" and play.leaving:
            play.leave()
        elif what == "join" and play.gone:
            play.join()
    play.finish()
    scheduler = play.scheduler
    assert scheduler.free.num_free == num_devices, "everything is released at the end"
    assert not scheduler.requests
    assert not scheduler.hungry
    assert scheduler.num_waiting == 0
    assert len(play.ended) == play.num_arrived, "every request came to its end, once"


def test_the_paper_s_example() -> None:
    # DDiT, section 5: A (B = 4) starts on the two devices that are free; C ends and A has its devices from the next
    # boundary on; at the end of the DiT phase A keeps its lowest device, and the others serve who waits.
    scheduler = Scheduler(CLASSES, DDIT, make_islands(8))
    for number, kind in enumerate((1, 0, 0, 0, 0, 2)):
        scheduler.arrive(0, (number, kind))
    a = scheduler.requests[5]
    assert (a.devices, list(scheduler.hungry)) == ((6, 7), [5])
    for step in (1, 2, 3, 4):
        scheduler.step_done(step, 0, 1, step)
    scheduler.decoded(9, 0, 2)
    assert (a.devices, a.pending) == ((6, 7), (0, 1, 6, 7)), "C's two: one since its VAE began, one now"
    (change,) = scheduler.step_done(10, 5, 1, 1) or []
    assert isinstance(change, Regroup)
    assert (a.devices, a.promotions, scheduler.hungry) == ((0, 1, 6, 7), 1, {})
    scheduler.arrive(11, (6, 0))
    assert [one.number for one in scheduler.waiting()] == [6]
    for step in (2, 3, 4):
        assert scheduler.step_done(12, 5, 2, step) == []
    decode, start = scheduler.step_done(13, 5, 2, 5) or []
    assert isinstance(decode, Decode)
    assert isinstance(start, Start)
    assert (tuple(decode.devices), tuple(decode.released)) == ((0,), (1, 6, 7))
    assert (start.request.number, start.devices) == (6, (1,))


def test_ddit_serves_hungry_ones_first_and_elastic_waiting_ones() -> None:
    for policy, wanted in ((DDIT, (0, 1)), (ELASTIC, (0,))):
        scheduler = Scheduler([CLASSES[2], CLASSES[0]], policy, make_islands(2))
        scheduler.arrive(0, (0, 1))
        scheduler.arrive(0, (1, 0))
        scheduler.arrive(0, (2, 1))
        assert [one.number for one in scheduler.waiting()] == [2]
        for step in (1, 2):
            scheduler.step_done(step, 0, 1, step)
        scheduler.decoded(5, 0, 2)
        large = scheduler.requests[1]
        assert large.held == ((0, 1) if policy is DDIT else (1,)), wanted
        assert [one.number for one in scheduler.waiting()] == ([2] if policy is DDIT else [])


def test_the_most_starved_is_promoted_first_and_only_where_it_pays() -> None:
    classes = [make_class("x", steps=10, times={1: 100, 2: 50}, best=2, regroup=120), CLASSES[0]]
    scheduler = Scheduler(classes, DDIT, make_islands(3))
    for number, kind in enumerate((1, 0, 0)):
        scheduler.arrive(0, (number, kind))
    first, second = scheduler.requests[1], scheduler.requests[2]
    assert (first.devices, second.devices) == ((1, 2), ())
    scheduler = Scheduler(classes, DDIT, make_islands(3))
    for number, kind in enumerate((1, 1, 0)):
        scheduler.arrive(0, (number, kind))
    one = scheduler.requests[2]
    for step in range(1, 8):
        scheduler.step_done(step, 2, 1, step)
    assert one.starvation_at(one.step) == 7 * 50
    for step in (1, 2):
        scheduler.step_done(10, 0, 1, step)
    scheduler.decoded(11, 0, 2)
    # Two steps remain after the next boundary: they gain 100, the change takes 120.
    assert one.held == (2,)
    scheduler = Scheduler(classes, DDIT, make_islands(4))
    for number, kind in enumerate((1, 1, 1, 0)):
        scheduler.arrive(0, (number, kind))
    one = scheduler.requests[3]
    for step in (1, 2):
        scheduler.step_done(10, 0, 1, step)
    scheduler.decoded(11, 0, 2)
    assert one.held == (0, 3)
    (change,) = scheduler.step_done(12, 3, 1, 1) or []
    assert isinstance(change, Regroup)
    assert (change.source, tuple(change.devices), one.promotions, one.version) == ((3,), (0, 3), 1, 2)
    assert scheduler.step_done(13, 3, 1, 2) is None, "the old version acts no more"
