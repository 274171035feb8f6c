"""What is asked of the search: devices, topology, memory, pins, and what counts as best."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

Objective = Literal["front", "rate", "latency", "devices"]
Overlap = Literal["disjoint", "aligned"]


@dataclass(frozen=True)
class Pins:
    """What the caller has decided already; operations are named by path, glob or node."""

    place: Mapping[str, Sequence[int]] = field(default_factory=dict)
    """Operations -> the devices that they run on."""
    together: Sequence[Sequence[str]] = ()
    """Operations that share a group, list by list."""
    apart: Sequence[Sequence[str]] = ()
    """Names whose operations share no device with those of the other names of the same list."""
    degree: Mapping[str, int] = field(default_factory=dict)
    """Operations -> their degree."""


@dataclass(frozen=True)
class SearchRequest:
    """One question to the search."""

    num_devices: int
    """G: at most so many devices, numbered from 0."""
    objective: Objective = "front"
    """``front``: all that is best in period and latency; ``rate``: the least period (of those the least latency);
    ``latency``: the least latency (of those the least period); ``devices``: the fewest that keep the limits below."""
    max_period_ms: float | None = None
    """Only deployments that sustain this period."""
    min_fps: float | None = None
    """The same, as frames per second; needs the profile's `frames_per_batch`."""
    max_latency_ms: float | None = None
    """Only deployments whose latency (from a batch being ready to its last output) is at most this."""
    islands: Sequence[Sequence[int]] = ()
    """Device numbers between which a group may span; absent: all devices are one island."""
    memory_bytes: int | None = None
    """Memory of a device; None: unlimited."""
    pins: Pins = field(default_factory=Pins)
    overlap: Overlap = "disjoint"
    """``aligned``: groups may also lie inside one another ([0, 1, 2, 3] and [0, 1]); the runtime refuses these."""
    max_stagger: int = 0
    """Modulo interleaving: by how many batches operations of one device may be apart; the runtime obeys the `stagger`
    of such deployments."""
    split_states: bool = False
    """Whether operations that share a written state may be in different groups and pay for moving it; the runtime
    refuses these."""
    min_gain: float = 0.0
    """A point is left out where one that is kept is at most this share worse in period and in latency; the result's
    `left_out` says which."""
    time_limit_s: float = 10.0
    """After it the search stops and says how far from the best its points can be."""
    device_kind: Literal["cpu", "cuda", "rocm", "emulated"] | None = None
    """Written into the deployments as `devices`."""
    profile_name: str | None = None
    """Written into the deployments as `profile`."""
