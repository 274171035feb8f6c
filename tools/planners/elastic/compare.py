"""The method beside all baselines and each half of itself, on the same requests."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flashrt.errors import Finding, InputError, listed
from flashrt.planners.elastic.bound import offline_bound
from flashrt.planners.elastic.degrees import RequestClass, gains, make_classes
from flashrt.planners.elastic.documents import RETRY, ElasticProfile, ElasticWorkload
from flashrt.planners.elastic.load import Load, draw_loads
from flashrt.planners.elastic.policies import DDIT, ELASTIC, HALVES, PARTITIONS, STATIC, Policy
from flashrt.planners.elastic.report import NS_PER_S, change_percent, figures_by_class
from flashrt.planners.elastic.simulate import Simulated, simulate

Progress = Callable[[float, str], None]
MAX_EVENTS = 40_000_000
UNIT_WORDS = (
    "rate 1 is what a monolithic deployment sustains in which every request has its B to the end of the VAE; the "
    "paper's text that we have does not say its unit"
)


@dataclass(frozen=True)
class Question:
    """A profile, a workload and devices, checked against each other.

    Attributes
    ----------
    loads
        The requests of every repeat.
    """

    profile: ElasticProfile
    workload: ElasticWorkload
    classes: Sequence[RequestClass]
    islands: Sequence[Sequence[int]]
    loads: Sequence[Load]
    rate_per_s: float
    notes: tuple[str, ...]

    @property
    def num_devices(self) -> int:
        """Devices in all islands."""
        return sum(len(island) for island in self.islands)

    @property
    def shares(self) -> list[float]:
        """Of the classes."""
        return [one.share for one in self.workload.classes.values()]


def make_question(
    profile: ElasticProfile, workload: ElasticWorkload, islands: Sequence[Sequence[int]], folder: Path
) -> Question:
    """Return a question; `folder` is where a trace lies.

    Raises
    ------
    InputError
        Classes that were not profiled, a degree that no island has room for, a trace that cannot be read, or a
        workload that is too large: all at once.
    """
    classes, notes = make_classes(profile, workload)
    room = max(len(island) for island in islands)
    findings = [
        Finding(f"class '{one.name}'", f"a degree that an island of {room} devices has room for",
                f"degree {min(one.step_ns)} at least", f"give larger islands; {RETRY}", rule="no-room")
        for one in classes
        if min(one.step_ns) > room
    ]  # fmt: skip
    num_events = workload.num_requests * workload.repeats * max(one.steps for one in classes)
    if num_events > MAX_EVENTS:
        findings.append(
            Finding(f"workload '{workload.name}'", f"at most {MAX_EVENTS} steps in all", str(num_events),
                    f"lower num_requests or repeats; {RETRY}", rule="too-large")
        )  # fmt: skip
    if findings:
        raise InputError(findings)
    num_devices = sum(len(island) for island in islands)
    loads, rate = draw_loads(workload, classes, num_devices, folder)
    if not min(len(load.kinds) for load in loads):
        raise InputError(Finding("argument 'workload'", "requests", "none", RETRY, rule="no-requests"))
    return Question(profile, workload, classes, islands, loads, rate, tuple(notes))


def choose_policies(question: Question) -> tuple[list[Policy], list[str]]:
    """Return the method and every baseline that there are degrees and devices for, and what was left out and why."""
    profiled = {degree for one in question.classes for degree in one.step_ns}
    found = [ELASTIC, DDIT, *(one for one in STATIC if one.degree in profiled), *PARTITIONS, *HALVES]
    if question.num_devices >= len(question.classes):
        return found, []
    left_out = [one.name for one in found if one.partition == "static"]
    why = f"{question.num_devices} devices cannot be divided among {len(question.classes)} classes"
    return [one for one in found if one.name not in left_out], [f"{listed(left_out)} left out: {why}"]


def run_policy(question: Question, policy: Policy, *, keeps_history: bool = False) -> list[Simulated]:
    """Simulate a policy on every repeat; the history is that of the first."""
    return [
        simulate(
            question.classes, policy, question.islands, load.arrivals_ns, load.kinds, shares=question.shares,
            keeps_history=keeps_history and number == 0,
        )
        for number, load in enumerate(question.loads)
    ]  # fmt: skip


def describe_classes(question: Question) -> dict[str, Any]:
    """Return each class's B with the gains that it comes from."""
    found = {}
    for one in question.classes:
        record: dict[str, Any] = {"best_degree": one.best, "vae_degree": one.vae_degree, "profiled": one.is_profiled}
        if one.is_profiled:
            times = question.profile.classes[one.name].step_ms
            record["gains"] = {str(degree): round(gain, 4) for degree, gain in gains(times).items()}
        found[one.name] = record
    return found


def compare(
    question: Question, policies: Sequence[Policy], progress: Progress = lambda share, message: None
) -> tuple[dict[str, Any], dict[str, list[Simulated]]]:
    """Return figures by policy with what they are against the best static degree, and the simulations."""
    names = [one.name for one in question.classes]
    bounds = [
        offline_bound(question.classes, [load.kinds.count(kind) for kind in range(len(names))], question.islands)
        for load in question.loads
    ]
    bound_s = None if None in bounds else sum(one.gpu_ns for one in bounds if one is not None) / NS_PER_S
    results: dict[str, Any] = {}
    simulations: dict[str, list[Simulated]] = {}
    for number, policy in enumerate(policies):
        progress(number / len(policies), f"simulating {policy.name}")
        runs = run_policy(question, policy, keeps_history=True)
        simulations[policy.name] = runs
        record = figures_by_class([one for run in runs for one in run.requests], names)
        record["makespan_s"] = round(sum(run.end_ns for run in runs) / len(runs) / NS_PER_S, 3)
        record["cost_ratio"] = None if bound_s is None else round(record["all"]["gpu_s"] / bound_s, 4)
        record["num_events"] = sum(run.num_events for run in runs)
        results[policy.name] = record
    record = {
        "num_devices": question.num_devices,
        "islands": [len(island) for island in question.islands],
        "provenance": question.profile.provenance,
        "figures": "predicted",
        "classes": describe_classes(question),
        "rate_per_s": round(question.rate_per_s, 6),
        "rate_unit": UNIT_WORDS,
        "bound_gpu_s": None if bound_s is None else round(bound_s, 3),
        "policies": results,
        "notes": list(question.notes),
    }
    static = {policy.name for policy in STATIC} & set(results)
    if static:
        record["against_best_static"] = against_best_static(results, static)
    return record, simulations


def against_best_static(results: Mapping[str, Any], static: set[str]) -> dict[str, Any]:
    """Return, for p99 and mean, the static degree that is best in it and what each other policy is against it."""
    found = {}
    for key in ("p99_ms", "mean_ms"):
        best = min(sorted(static), key=lambda name: results[name]["all"][key])
        percent = {
            name: change_percent(one["all"], results[best]["all"], key)
            for name, one in results.items()
            if name not in static
        }
        found[key] = {"best": best, "value": results[best]["all"][key], "change_percent": percent}
    return found
