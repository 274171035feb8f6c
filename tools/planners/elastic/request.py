"""A request on its way, what a policy makes of its class, and what the scheduler decides."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from flashrt.planners.elastic.degrees import RequestClass, largest
from flashrt.planners.elastic.policies import Policy

WAITING, DENOISING, DECODING, DONE, FAILED = "waiting", "denoising", "decoding", "done", "failed"


@dataclass(frozen=True)
class Service:
    """A class under a policy, as tables over degrees; unprofiled degrees have 0.

    Attributes
    ----------
    cap, least
        The largest degree that a request gets, and the smallest.
    fit
        Number of devices -> degree that a request runs at with so many; the last holds for more.
    vae_keep
        Degree of the group at the end of the DiT phase -> devices that it keeps.
    """

    name: str
    steps: int
    cap: int
    least: int
    fit: tuple[int, ...]
    step_ns: tuple[int, ...]
    regroup_ns: tuple[int, ...]
    vae_ns: tuple[int, ...]
    vae_keep: tuple[int, ...]
    is_elastic: bool


def make_service(request_class: RequestClass, policy: Policy, num_devices: int) -> Service:
    """Return the tables of a class under a policy on so many devices in the largest island."""
    one = request_class
    degrees = sorted(degree for degree in one.step_ns if degree <= num_devices)
    wanted = one.best if policy.degree is None or not one.is_profiled else policy.degree
    cap = max([degree for degree in degrees if degree <= wanted], default=degrees[0] if degrees else 0)
    fit = [max([degree for degree in degrees if degree <= number], default=0) for number in range(cap + 1)]
    rows = range(cap + 1)
    vae = [min(degree, one.vae_degree) if policy.releases else degree for degree in rows]
    kept = [largest(one.vae_ns, limit) if limit >= min(one.vae_ns) else limit for limit in vae]
    return Service(
        one.name, one.steps, cap, next((degree for degree in fit if degree), cap), tuple(fit),
        tuple(one.step_ns.get(degree, 0) for degree in rows),
        tuple(one.regroup_ns.get(degree, 0) for degree in rows),
        tuple(one.vae_ns.get(degree, 0) for degree in kept),
        tuple(kept) if policy.releases else tuple(rows), policy.promotes and one.is_profiled,
    )  # fmt: skip


class Request:
    """One request, in the scheduler's hands.

    Attributes
    ----------
    version
        Of its allocation; grows with every change. A message of another version is not for this one.
    step
        Steps done.
    pending
        The larger group that it changes to at the next boundary.
    step_ns
        Time of a step with the devices that it has.
    starvation_ns
        What steps below B cost until `counted_step`.
    gpu_ns
        Device time until `since_ns`.
    """

    __slots__ = (
        "arrival",
        "arrived_ns",
        "counted_step",
        "devices",
        "dit_end_ns",
        "ended_ns",
        "gpu_ns",
        "history",
        "kind",
        "number",
        "pending",
        "phase",
        "promotions",
        "restarts",
        "service",
        "since_ns",
        "started_ns",
        "starvation_ns",
        "step",
        "step_ns",
        "version",
    )  # fmt: skip

    def __init__(self, number: int, arrival: int, kind: int, service: Service, now_ns: int) -> None:
        self.number = number
        self.arrival = arrival
        self.kind = kind
        self.service = service
        self.phase = WAITING
        self.version = 0
        self.step = 0
        self.devices: tuple[int, ...] = ()
        self.pending: tuple[int, ...] | None = None
        self.step_ns = 0
        self.starvation_ns = 0
        self.counted_step = 0
        self.arrived_ns = self.since_ns = now_ns
        self.started_ns = self.dit_end_ns = self.ended_ns = -1
        self.gpu_ns = 0
        self.promotions = 0
        self.restarts = 0
        self.history: list[tuple[int, tuple[int, ...], str]] = []

    @property
    def held(self) -> tuple[int, ...]:
        """The devices that nobody else may have: the group's, or those that it is about to have."""
        return self.pending or self.devices

    def starvation_at(self, step: int) -> int:
        """Return the extra DiT time below B after `step` steps, in ns.

        *Source*: DDiT, section 4. The sum over releases is the same as over all steps since the last allocation, as
        the time of a step only changes with the allocation.
        """
        gap = self.step_ns - self.service.step_ns[self.service.cap]
        return self.starvation_ns + (step - self.counted_step) * gap


@dataclass(frozen=True, slots=True)
class Start:
    """Begin a request on a group."""

    request: Request
    devices: Sequence[int]
    version: int


@dataclass(frozen=True, slots=True)
class Regroup:
    """At this step boundary: go on with a larger group; `source` are the devices that have the latent."""

    request: Request
    devices: Sequence[int]
    version: int
    source: Sequence[int]


@dataclass(frozen=True, slots=True)
class Decode:
    """Run the VAE on what is kept of the group; the rest is released."""

    request: Request
    devices: Sequence[int]
    version: int
    released: Sequence[int]


@dataclass(frozen=True, slots=True)
class Finish:
    """A request is done and all its devices are released."""

    request: Request


@dataclass(frozen=True, slots=True)
class Abort:
    """A device is lost: its request leaves the others, and begins again or fails."""

    request: Request
    survivors: Sequence[int]
    lost: int
    version: int
    restarts: bool


Decision = Start | Regroup | Decode | Finish | Abort
