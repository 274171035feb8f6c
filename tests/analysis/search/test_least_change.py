"""A refusal heals: the change that it names is made on the request, which is then met, and by less it is not."""

from __future__ import annotations

import random
import re
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from flashrt.analysis.search import Pins, SearchRequest, search_deployments
from flashrt.errors import Finding, InputError

from .instances import Instance, random_instance

Change = Callable[[], SearchRequest]
"""Makes the changed request."""
SEEDS = range(300, 600)
KINDS = ("devices", "memory", "pin", "states", "period", "rate", "latency", "several")
LIMITS = {"rate-not-reached", "latency-not-reached"}
NAMED_BY_THEMSELVES = {"degree", "no-time-at-degree", "no-memory-at-degree"}
"""Contradictions between the profile and a pin, which say which value would do."""


def refused(instance: Instance, request: SearchRequest) -> list[Finding]:
    """Return why a request is refused; empty where it is met."""
    try:
        search_deployments(instance.built, instance.profile, request)
    except InputError as error:
        return list(error.findings)
    return []


def tighten(instance: Instance, rng: random.Random) -> SearchRequest:
    """Return a request of the same program that is likely to ask for too much."""
    paths = [operation.path for operation in instance.built.flat.operations]
    request = SearchRequest(rng.choice([1, 1, 2, 2, 3]), split_states=rng.random() < 0.4)
    if rng.random() < 0.3 and request.num_devices > 1:
        cut = rng.randrange(1, request.num_devices)
        request = replace(request, islands=(tuple(range(cut)), tuple(range(cut, request.num_devices))))
    kind = rng.choice(["memory", "devices", "pins", "period", "latency", "mixed"])
    pins = Pins()
    if kind in ("memory", "mixed"):
        request = replace(request, memory_bytes=rng.choice([1, 2, 4, 7, 11]))
    if kind == "devices":
        pins = Pins(apart=[rng.sample(paths, min(len(paths), rng.choice([2, 3])))])
    if kind in ("pins", "mixed"):
        place = {}
        for path in rng.sample(paths, rng.choice([0, 1, 2])):
            degree = rng.choice(instance.built.flat.by_path[path].degrees)
            if degree <= request.num_devices:
                place[path] = sorted(rng.sample(range(request.num_devices), degree))
        chosen = rng.sample(paths, rng.choice([0, 1]))
        degree_of = {path: rng.choice(instance.built.flat.by_path[path].degrees) for path in chosen}
        together = [rng.sample(paths, 2)] if rng.random() < 0.6 else []
        apart = [rng.sample(paths, 2)] if rng.random() < 0.8 else []
        pins = Pins(place, together, apart, degree_of)
    request = replace(request, pins=pins)
    if kind == "period":
        wanted = rng.choice([0.5, 2.0, 5.0, 11.3])
        limit = {"max_period_ms": wanted} if rng.random() < 0.5 else {"min_fps": 7000 / wanted}
        request = replace(request, **limit)
    if kind == "latency":
        request = replace(request, max_latency_ms=rng.choice([0.5, 2.0, 7.0, 13.3]))
    return request


def without_pin(pins: Pins, name: str) -> Pins:
    """Return the pins without the one that a finding names, as `place 'n0'` or `apart ['n0', 'n1']`."""
    kind, _, what = name.partition(" ")
    held = getattr(pins, kind)
    if kind in ("place", "degree"):
        left: Any = {key: value for key, value in held.items() if f"'{key}'" != what}
    else:
        left = [names for names in held if str(list(names)) != what]
    assert len(left) < len(held), f"there is no pin {name}"
    return replace(pins, **{kind: left})


def named_changes(request: SearchRequest, finding: Finding) -> Iterator[tuple[str, Change, Change | None]]:
    """Yield (kind, the change that a finding names, a smaller one of its kind), each as what it makes of a request."""
    if match := re.search(r"give (\d+) more devices?( in island \[.*?\]| in an island of their own)?[, ]", finding.fix):
        count, where = int(match[1]), match[2] or ""

        def more(number: int) -> SearchRequest:
            devices = tuple(range(request.num_devices, request.num_devices + number))
            islands = list(request.islands)
            if "own" in where:
                islands.append(devices)
            elif where:
                islands = [(*one, *devices) if where == f" in island {list(one)}" else one for one in islands]
                assert islands != list(request.islands), f"there is no island {where}"
            return replace(request, num_devices=request.num_devices + number, islands=islands)

        yield "devices", lambda: more(count), (lambda: more(count - 1)) if count > 1 else None
    if match := re.search(r"with (\d+) % more memory", finding.fix):
        percent, held = int(match[1]), request.memory_bytes or 0

        def larger(by: int) -> SearchRequest:
            return replace(request, memory_bytes=held * (100 + by) // 100)

        yield "memory", lambda: larger(percent), lambda: larger(percent - 1)
    if finding.fix.startswith("drop this pin"):
        pins = without_pin(request.pins, finding.where.removeprefix("search, pins, "))
        yield "pin", lambda: replace(request, pins=pins), None
    if finding.where == "search, split_states":
        yield "states", lambda: replace(request, split_states=True), None
    if match := re.match(r"(\S+) ms(?: \((\S+) elements a second\))? at best", finding.got):
        figure, name = float(match[1]), "period" if finding.rule == "rate-not-reached" else "latency"
        limit = f"max_{name}_ms"

        def settled(value: float) -> SearchRequest:
            return replace(request, **{limit: value}, **({"min_fps": None} if name == "period" else {}))

        yield name, lambda: settled(figure), lambda: settled(figure * (1 - 1e-5))
        if match[2]:
            yield "rate", lambda: replace(request, min_fps=float(match[2]), max_period_ms=None), None


def other_changes(request: SearchRequest) -> Iterator[SearchRequest]:
    """Yield requests with one change that a refusal might have named."""
    for more in (1, 2, 5):
        islands = [*request.islands, tuple(range(request.num_devices, request.num_devices + more))]
        yield replace(request, num_devices=request.num_devices + more, islands=islands if request.islands else ())
    yield replace(request, memory_bytes=None)
    yield replace(request, split_states=True)
    for kind in ("place", "degree"):
        for key in getattr(request.pins, kind):
            yield replace(request, pins=without_pin(request.pins, f"{kind} '{key}'"))
    for kind in ("together", "apart"):
        for names in getattr(request.pins, kind):
            yield replace(request, pins=without_pin(request.pins, f"{kind} {list(names)}"))


def test_each_change_that_a_refusal_names_heals_it_and_a_smaller_one_does_not() -> None:
    tried: Counter[str] = Counter()
    for seed in SEEDS:
        instance = random_instance(seed)
        instance = replace(instance, profile=instance.profile.model_copy(update={"frames_per_batch": 7}))
        request = tighten(instance, random.Random(seed))
        findings = refused(instance, request)
        rules = {finding.rule for finding in findings}
        if not findings or rules & NAMED_BY_THEMSELVES:
            continue
        if "infeasible" in rules:
            tried["several"] += 1
            for other in other_changes(request):
                assert refused(instance, other), f"{seed}: one change is enough: {other}"
            continue
        if not rules & LIMITS:
            # Whether a limit can be kept is a question to a request that something meets.
            request = replace(request, max_period_ms=None, min_fps=None, max_latency_ms=None)
        changes = [change for finding in findings for change in named_changes(request, finding)]
        text = "; ".join(map(str, findings))
        assert changes, f"{seed}: {text}"
        for kind, change, smaller in changes:
            tried[kind] += 1
            assert not refused(instance, change()), f"{seed}: '{kind}' does not help: {text}"
            if smaller is not None:
                assert refused(instance, smaller()), f"{seed}: less of '{kind}' helps too: {text}"
    assert all(tried[kind] >= 2 for kind in KINDS), tried
