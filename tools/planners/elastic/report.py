"""What a policy did to the requests: figures by class, of all, and against the offline bound."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from flashrt.planners.elastic.request import DONE, Request

NS_PER_MS = 1e6
NS_PER_S = 1e9


def figures(requests: Sequence[Request]) -> dict[str, Any]:
    """Return the figures of some requests; latency is from arrival to the end of the VAE.

    *Source*: DDiT, section 18: by request, not by step.
    """
    done = [one for one in requests if one.phase is DONE]
    if not done:
        return {"num_requests": len(requests), "num_failed": len(requests)}
    latency = np.array([one.ended_ns - one.arrived_ns for one in done]) / NS_PER_MS
    queued = np.array([one.started_ns - one.arrived_ns for one in done]) / NS_PER_MS
    return {
        "num_requests": len(requests),
        "mean_ms": _round(latency.mean()),
        "p50_ms": _round(np.percentile(latency, 50)),
        "p99_ms": _round(np.percentile(latency, 99)),
        "queue_mean_ms": _round(queued.mean()),
        "queue_p99_ms": _round(np.percentile(queued, 99)),
        "gpu_s": _round(sum(one.gpu_ns for one in requests) / NS_PER_S),
        "promotions": sum(one.promotions for one in requests),
        "num_failed": len(requests) - len(done),
        "num_restarts": sum(one.restarts for one in requests),
    }


def figures_by_class(requests: Sequence[Request], names: Sequence[str]) -> dict[str, Any]:
    """Return ``all`` and every class's figures."""
    kinds: dict[str, list[Request]] = {name: [] for name in names}
    for one in requests:
        kinds[one.service.name].append(one)
    return {"all": figures(requests), "classes": {name: figures(of) for name, of in kinds.items() if of}}


def change_percent(ours: Mapping[str, Any], theirs: Mapping[str, Any], key: str) -> float:
    """Return by how much a figure is larger than another's; negative: smaller."""
    return _round((ours[key] / theirs[key] - 1) * 100)


def _round(value: Any) -> float:
    return round(float(value), 3)
