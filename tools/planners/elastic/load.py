"""Requests of a workload: when they come and of which class.

What a rate means is not said in the paper's text that we have. Here a rate of 1 in the unit ``nominal`` is what a
monolithic deployment can sustain in which every request has its B from its beginning to the end of the VAE: at 1.0
such a deployment is saturated, and what is better in use has room. At the edge of the method's own capacity, the
figures of a finite number of requests would say how long was looked at.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from flashrt.bench.arrivals import read_trace
from flashrt.planners.elastic.degrees import RequestClass
from flashrt.planners.elastic.documents import ElasticWorkload

NS_PER_S = 1_000_000_000


@dataclass(frozen=True)
class Load:
    """The requests of one repeat.

    Attributes
    ----------
    arrivals_ns
        Ascending.
    kinds
        Place of each request's class.
    """

    arrivals_ns: Sequence[int]
    kinds: Sequence[int]


def nominal_per_s(classes: Sequence[RequestClass], shares: Sequence[float], num_devices: int) -> float:
    """Return the requests a second that keep all devices busy when each has its B until its end."""
    work = sum(share * one.held_ns(one.best) for one, share in zip(classes, shares, strict=True)) / sum(shares)
    return num_devices * NS_PER_S / work


def draw_loads(
    workload: ElasticWorkload, classes: Sequence[RequestClass], num_devices: int, folder: Path
) -> tuple[list[Load], float]:
    """Return every repeat's requests, and the mean rate in requests a second.

    Raises
    ------
    InputError
        A trace that cannot be read.
    """
    shares = [one.share for one in workload.classes.values()]
    arrivals = workload.arrivals
    trace_s = None
    if arrivals.process == "trace":
        assert arrivals.trace is not None, "checked when read"
        trace_s = read_trace(folder, arrivals.trace)
    nominal = nominal_per_s(classes, shares, num_devices)
    own = 0.0 if trace_s is None or trace_s[-1] <= 0 else (len(trace_s) - 1) / float(trace_s[-1])
    rate = own or nominal
    if arrivals.rate is not None:
        rate = arrivals.rate * (nominal if arrivals.unit == "nominal" else 1.0)
    loads = []
    for repeat in range(workload.repeats):
        generator = np.random.default_rng([workload.seed, repeat])
        if trace_s is not None:
            moments = trace_s[: workload.num_requests] * (own / rate if own else 1.0)
        elif arrivals.process == "burst":
            count = -(-workload.num_requests // arrivals.burst_size)
            moments = np.cumsum(generator.exponential(arrivals.burst_size / rate, count)).repeat(arrivals.burst_size)
            moments = moments[: workload.num_requests] - moments[0]
        else:
            moments = np.cumsum(generator.exponential(1 / rate, workload.num_requests))
        kinds = generator.choice(len(shares), len(moments), p=np.asarray(shares) / sum(shares))
        loads.append(Load((moments * NS_PER_S).astype(np.int64).tolist(), kinds.tolist()))
    return loads, rate
