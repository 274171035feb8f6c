"""Classes and profiles that the tests share."""

from __future__ import annotations

from flashrt.planners.elastic import DATA, RequestClass, make_classes, read_elastic_profile
from flashrt.planners.elastic.documents import Arrivals, ElasticProfile, ElasticWorkload, WorkloadClass


def make_class(
    name: str = "one",
    *,
    steps: int = 3,
    times: dict[int, int] | None = None,
    vae: dict[int, int] | None = None,
    best: int = 1,
    regroup: int = 0,
) -> RequestClass:
    """Return a class with times in ns."""
    times = times or {1: 100}
    return RequestClass(name, steps, best, times, vae or {1: 50}, 1, dict.fromkeys(times, regroup))


def shipped(name: str) -> ElasticProfile:
    """Return a shipped profile."""
    return read_elastic_profile(DATA / f"{name}.yaml")


def workload_of(
    profile: ElasticProfile, *, num_requests: int = 60, repeats: int = 1, **arrivals: object
) -> ElasticWorkload:
    """Return a workload with equal shares of a profile's classes."""
    return ElasticWorkload(
        classes={name: WorkloadClass(share=1) for name in profile.classes},
        arrivals=Arrivals.model_validate(arrivals or {"rate": 0.5}), num_requests=num_requests, repeats=repeats,
    )  # fmt: skip


def classes_of(name: str) -> list[RequestClass]:
    """Return a shipped profile's classes."""
    profile = shipped(name)
    return make_classes(profile, workload_of(profile))[0]
