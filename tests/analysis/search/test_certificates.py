"""What is said to bind a point is refused where it is wrong: every certificate, corrupted in every step and way."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from fractions import Fraction
from functools import partial
from typing import Any

import pytest

from flashrt.analysis.search import search_deployments
from flashrt.errors import InputError

from .checker import Checker, Part
from .instances import random_instance

Record = dict[str, Any]
NO_ARC = "nothing makes|nothing follows"
WAYS = {
    "time": "takes another time",
    "lag": NO_ARC,
    "batches": f"{NO_ARC}|ms",
    "cause": NO_ARC,
    "missing": f"{NO_ARC}|ms|no entry|not the end|nothing binds|a path leads",
    "chunk": "takes another time|chunks, not",
    "renamed": f"takes another time|chunks, not|{NO_ARC}",
    "replaced": f"{NO_ARC}|ms|no entry|not the end",
    "exchanged": f"takes another time|chunks, not|{NO_ARC}",
}
"""A way of being wrong -> what the checker says of it."""
SEEDS = range(200, 260)


def corrupt(
    steps: Sequence[Record], times: Mapping[Part, Fraction], period: Fraction
) -> Iterator[tuple[str, list[Record]]]:
    """Yield (way, steps) for each way of being wrong at each step; not where what comes out would be true as well."""
    for at, step in enumerate(steps):

        def changed(number: int = at, **changes: Any) -> list[Record]:
            return [{**one, **changes} if index == number else one for index, one in enumerate(steps)]

        yield "time", changed(time_ms=step["time_ms"] + 1e-6)
        yield "lag", changed(lag_ms=step["lag_ms"] + 1e-6)
        for change in (-1, 1):
            yield "batches", changed(batches=step["batches"] + change)
        if step["cause"] is not None:
            yield "cause", changed(cause="device 61")
        own = Fraction(str(step["time_ms"])) + Fraction(str(step["lag_ms"])) - period * step["batches"]
        if own or len(steps) == 1:
            yield "missing", [*steps[:at], *steps[at + 1 :]]
        yield "chunk", changed(chunk=7)
        for (path, index), time in times.items():
            if path != step["operation"] and index == 0 and float(time) != step["time_ms"]:
                yield "renamed", changed(operation=path)
                if step["chunk"] is None and (path, 1) not in times:
                    yield "replaced", changed(operation=path, time_ms=float(time))
        other = steps[(at + 1) % len(steps)]
        if step["operation"] != other["operation"] and step["time_ms"] != other["time_ms"]:
            names = {id(step): other["operation"], id(other): step["operation"]}
            yield "exchanged", [{**one, "operation": names.get(id(one), one["operation"])} for one in steps]


def test_every_corrupted_certificate_is_refused() -> None:
    tried: Counter[tuple[str, str]] = Counter()
    for seed in SEEDS:
        instance = random_instance(seed)
        try:
            points = search_deployments(instance.built, instance.profile, instance.request).points
        except InputError:
            continue
        for point in points[:2]:
            document = point.deployment
            checker = Checker(instance.built, instance.profile, document.get("blocking", ()))
            period, latency = checker.check_document(document)
            if not period:
                continue
            times = checker.graph(checker.read(document)[0])[0]
            record = json.loads(json.dumps(point.as_dict()))
            checks: dict[str, Callable[[list[Record]], None]] = {
                "critical_cycle": partial(checker.check_cycle, document, period=period),
                "latency_path": partial(checker.check_path, document, period=period, latency=latency),
            }
            for name, check in checks.items():
                check(record[name])
                for way, steps in corrupt(record[name], times, period):
                    with pytest.raises(AssertionError, match=WAYS[way]):
                        check(steps)
                    tried[name, way] += 1
    assert len(tried) == 2 * len(WAYS), tried
    assert min(tried.values()) >= 10, tried


def test_a_certificate_of_other_figures_is_refused() -> None:
    """A true cycle that is not critical, or a true walk that is not the longest, proves nothing."""
    refused = 0
    for seed in SEEDS:
        instance = random_instance(seed)
        try:
            points = search_deployments(instance.built, instance.profile, instance.request).points
        except InputError:
            continue
        for point in points:
            checker = Checker(instance.built, instance.profile, point.deployment.get("blocking", ()))
            period, latency = checker.check_document(point.deployment)
            record = point.as_dict()
            if not period:
                continue
            with pytest.raises(AssertionError, match="ms a batch"):
                checker.check_cycle(point.deployment, record["critical_cycle"], period + Fraction(1, 10**9))
            if latency:
                with pytest.raises(AssertionError, match="ms are not"):
                    checker.check_path(
                        point.deployment, record["latency_path"], period, latency - Fraction(1, 10**9)
                    )  # fmt: skip
                refused += 1
    assert refused > 20
