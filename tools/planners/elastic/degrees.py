"""The degree that pays: B(r) from the gains of each doubling, and the times of a class in integers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from flashrt.errors import Finding, InputError, nearest
from flashrt.planners.elastic.documents import RETRY, ElasticProfile, ElasticWorkload

NS_PER_MS = 1_000_000


def gains(time_ms: Mapping[int, float]) -> dict[int, float]:
    """Return z of every doubling that was profiled, by the larger degree; without gaps from 1 on.

    *Source*: DDiT, section 9: z(i, r) = 1 − t(i, r) / t(i/2, r).
    """
    found, degree = {}, 2
    while degree in time_ms and degree // 2 in time_ms:
        found[degree] = 1 - time_ms[degree] / time_ms[degree // 2]
        degree *= 2
    return found


def optimal_degree(time_ms: Mapping[int, float], threshold: float) -> int:
    """Return B(r): the largest degree whose doublings all gained at least `threshold`; 1 where the first did not.

    *Source*: DDiT, sections 3 and 9; ``spec/planners.md``, section 3.
    """
    best = 1
    for degree, gain in gains(time_ms).items():
        if gain < threshold:
            break
        best = degree
    return best


@dataclass(frozen=True)
class RequestClass:
    """One class of requests as the scheduler sees it; times in ns.

    Attributes
    ----------
    best
        B(r).
    step_ns, vae_ns
        Degree -> time.
    vae_degree
        The VAE's own degree.
    regroup_ns
        Degree -> what changing to it costs: group set-up and latent broadcast.
    is_profiled
        False: it runs at the declared conservative degree.
    """

    name: str
    steps: int
    best: int
    step_ns: Mapping[int, int]
    vae_ns: Mapping[int, int]
    vae_degree: int
    regroup_ns: Mapping[int, int]
    is_profiled: bool = True

    def held_ns(self, degree: int) -> int:
        """Return the device time of a request that keeps all its devices until the VAE's end."""
        return degree * (self.steps * self.step_ns[degree] + self.vae_ns[largest(self.vae_ns, degree)])

    def work_ns(self, degree: int) -> int:
        """Return the device time of a request that keeps only the VAE's devices when the DiT phase ends."""
        kept = largest(self.vae_ns, min(degree, self.vae_degree))
        return degree * self.steps * self.step_ns[degree] + kept * self.vae_ns[kept]


def largest(times: Mapping[int, int], limit: int) -> int:
    """Return the largest profiled degree up to `limit`; where there is none, the smallest."""
    return max([degree for degree in times if degree <= limit], default=min(times))


def make_classes(profile: ElasticProfile, workload: ElasticWorkload) -> tuple[list[RequestClass], list[str]]:
    """Return the workload's classes with the profile's times, and what to say of those that were not profiled.

    Raises
    ------
    InputError
        A class without times where the profile declares no conservative degree: all of them.
    """
    classes, notes, findings = [], [], []
    for name, wanted in workload.classes.items():
        times = profile.classes.get(name)
        where = f"workload '{workload.name}', class '{name}'"
        why = ""
        if times is None:
            why = f"profile '{profile.name}' has no such class"
        else:
            key = times.key.model_dump()
            unknown = sorted(set(wanted.key) - set(key))
            findings += [
                Finding(f"{where}, key '{one}'", "a name of the profile's key", "another", RETRY, rule="unknown-key",
                        nearest=nearest(one, key))
                for one in unknown
            ]  # fmt: skip
            other = [one for one in wanted.key if one in key and wanted.key[one] != key[one]]
            why = "; ".join(f"{one} is {wanted.key[one]!r}, profiled was {key[one]!r}" for one in other)
        if times is not None and not why:
            classes.append(_profiled(profile, name))
        elif profile.conservative is not None:
            one = profile.conservative
            classes.append(
                RequestClass(
                    name, one.steps, one.degree, {one.degree: _ns(one.step_ms)}, {one.degree: _ns(one.vae_ms)},
                    one.degree, {}, is_profiled=False,
                )
            )  # fmt: skip
            notes.append(f"class '{name}' was not profiled ({why}): it runs at the declared conservative degree "
                         f"{one.degree}, is never promoted, and its times are declared, not measured")  # fmt: skip
        else:
            findings.append(
                Finding(where, "a class whose times were profiled", why,
                        f"profile it, or declare 'conservative' in the profile; {RETRY}", rule="unprofiled-class",
                        nearest=nearest(name, profile.classes) if times is None else None)
            )  # fmt: skip
    if findings:
        raise InputError(findings)
    return classes, notes


def _profiled(profile: ElasticProfile, name: str) -> RequestClass:
    times = profile.classes[name]
    regroup = {
        degree: _ns(profile.setup_ms[degree] + times.broadcast_ms) for degree in times.step_ms if degree > 1
    }  # fmt: skip
    return RequestClass(
        name, times.key.steps, optimal_degree(times.step_ms, profile.threshold),
        {degree: _ns(time) for degree, time in sorted(times.step_ms.items())},
        {degree: _ns(time) for degree, time in sorted(times.vae_ms.items())},
        optimal_degree(times.vae_ms, profile.threshold), regroup,
    )  # fmt: skip


def _ns(time_ms: float) -> int:
    return max(1, round(time_ms * NS_PER_MS))
