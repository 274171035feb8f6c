"""When requests come, at a rate of one a millisecond: Poisson, gamma, or a recorded trace."""

from __future__ import annotations

import numpy as np

from flashrt.planners.serving.documents import Arrivals


def unit_arrivals(arrivals: Arrivals, num: int, seed: int, trace_s: np.ndarray | None = None) -> np.ndarray:
    """Return the moments of `num` requests whose mean rate is 1; shape [requests].

    Parameters
    ----------
    trace_s
        Moments of a trace; where it is shorter it is gone through again, from a place that the seed says.
    """
    generator = np.random.default_rng(seed)
    if arrivals.process == "trace":
        assert trace_s is not None, "a trace has been read"
        assert len(trace_s) >= 2
        gaps = np.diff(trace_s)
        gaps = np.append(gaps, gaps.mean())
        begin = int(generator.integers(len(gaps)))
        found = np.take(gaps, np.arange(begin, begin + num), mode="wrap") / gaps.mean()
    elif arrivals.process == "gamma":
        shape = 1 / arrivals.cv**2
        found = generator.gamma(shape, 1 / shape, num)
    else:
        found = generator.exponential(1.0, num)
    return np.asarray(np.cumsum(found))
