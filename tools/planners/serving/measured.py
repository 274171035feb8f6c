"""A serving profile from measured profiles of an application's operations.

Each component of the model is some operations of the program; each request type was measured with inputs of its own, at
some batch sizes. Components that an executor runs together run one after the other on its devices, so that their times
add up: that part is inferred, and the profile says so.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Literal

import networkx as nx
import numpy as np
from pydantic import Field

from flashrt.analysis.patterns import matches
from flashrt.analysis.profile import Profile
from flashrt.errors import Finding, InputError, listed, nearest
from flashrt.ir import Frozen, read_document, validate
from flashrt.planners.serving.documents import (
    RETRY,
    Engine,
    ServingKey,
    ServingModel,
    ServingProfile,
    read_model,
    read_workload,
)

MOST_TOGETHER = 6


class ServingOperations(Frozen):
    """What the operations of an application are in a serving model, and where they were measured."""

    schema_: Literal["flashrt/serving-operations@1"] = Field(default="flashrt/serving-operations@1", alias="schema")
    model: str
    """The model document, beside this one."""
    workload: str
    """The workload document, beside this one: which components each type passes."""
    operations: dict[str, tuple[str, ...]]
    """Component -> operation paths or globs."""
    profiles: dict[str, dict[int, str]]
    """Type -> batch size -> measured profile, beside this document; the inputs of a batch hold so many requests."""
    batching: dict[str, Literal["static", "continuous"]] = Field(default_factory=dict)
    """Component -> how its executors batch; static when absent."""


def serving_profile(path: Path) -> ServingProfile:
    """Return the serving profile of a `ServingOperations` document.

    Raises
    ------
    InputError
        With every component, profile or operation that does not fit.
    """
    document = validate(
        ServingOperations, read_document(path, retry=RETRY), noun=f"serving operations '{path.name}'", retry=RETRY
    )
    model = read_model(path.parent / document.model)
    workload = read_workload(path.parent / document.workload)
    profiles = {
        (kind, batch): validate(
            Profile, read_document(path.parent / name, retry=RETRY), noun=f"profile '{name}'", retry=RETRY
        )
        for kind, by_batch in document.profiles.items() for batch, name in by_batch.items()
    }  # fmt: skip
    where = f"serving operations '{path.name}'"
    findings = list(_check(document, model, profiles, where))
    findings += [
        Finding(f"{where}, profiles, '{kind}'", f"a type of the workload: {listed(workload.types)}", f"'{kind}'", RETRY,
                rule="unknown-type", nearest=nearest(kind, workload.types))
        for kind in document.profiles if kind not in workload.types
    ]  # fmt: skip
    if findings:
        raise InputError(findings)
    samples = {
        (kind, batch, component, degree): found
        for (kind, batch), profile in profiles.items()
        for component, patterns in document.operations.items()
        for degree, found in samples_by_degree(profile, patterns).items()
    }
    needs = {kind: set(one.components) for kind, one in workload.types.items()}
    engines = list(_engines(document, model, samples, needs))
    devices = {profile.device for profile in profiles.values()}
    measured = all(profile.provenance == "measured" for profile in profiles.values())
    together = any(len(engine.components) > 1 for engine in engines)
    return ServingProfile(
        name=path.stem,
        provenance="measured" if measured and not together else "inferred",
        key=ServingKey(model=model.digest, device=devices.pop() if len(devices) == 1 else None),
        engines=tuple(engines),
    )


def samples_by_degree(profile: Profile, patterns: tuple[str, ...]) -> dict[int, np.ndarray]:
    """Return by degree the times of all operations that match, added up, in ms: samples where there are any.

    Operations without samples, or with fewer, count with their time.
    """
    paths = [path for path in profile.operations if any(matches(pattern, path) for pattern in patterns)]
    if not paths:
        return {}
    degrees = set.intersection(*(set(profile.operations[path]) for path in paths))
    found = {}
    for degree in degrees:
        rows = [np.asarray((profile.samples or {}).get(path, {}).get(degree, ()), float) for path in paths]
        size = min((len(row) for row in rows), default=0)
        parts = [
            row[:size] if size else np.array([float(profile.operations[path][degree])])
            for path, row in zip(paths, rows, strict=True)
        ]
        found[degree] = np.sum(parts, axis=0)
    return {degree: total for degree, total in found.items() if (total > 0).all()}


def _check(
    document: ServingOperations, model: ServingModel, profiles: Mapping[tuple[str, int], Profile], where: str
) -> Iterator[Finding]:
    for name in [*document.operations, *document.batching]:
        if name not in model.components:
            yield Finding(f"{where}, '{name}'", f"a component of the model: {listed(model.components)}", f"'{name}'",
                          RETRY, rule="unknown-component")  # fmt: skip
    if missing := [name for name in model.components if name not in document.operations]:
        yield Finding(f"{where}, operations", "every component of the model", f"none for {listed(missing)}", RETRY,
                      rule="missing-component")  # fmt: skip
    matched = dict.fromkeys(document.operations, False)
    for profile in profiles.values():
        for name, patterns in document.operations.items():
            matched[name] |= bool(samples_by_degree(profile, patterns))
    for name, found in matched.items():
        if not found:
            yield Finding(f"{where}, operations, '{name}'", "operations that a profile has at a common degree",
                          listed(document.operations[name]), RETRY, rule="no-operations")  # fmt: skip


def _engines(
    document: ServingOperations,
    model: ServingModel,
    samples: Mapping[tuple[str, int, str, int], np.ndarray],
    needs: Mapping[str, set[str]],
) -> Iterator[Engine]:
    joints = nx.Graph([(edge.source, edge.target) for edge in model.edges if edge.colocatable])
    degrees = sorted({key[3] for key in samples})
    for size in range(1, min(len(model.components), MOST_TOGETHER) + 1):
        for names in itertools.combinations(model.components, size):
            part = nx.Graph(joints.subgraph(names))
            part.add_nodes_from(names)
            if not nx.is_connected(part):
                continue
            batching: Literal["static", "continuous"] = "static"
            if any(document.batching.get(name) == "continuous" for name in names):
                batching = "continuous"
            for degree in degrees:
                if not all(any(key[2:] == (name, degree) for key in samples) for name in names):
                    continue
                latency: dict[int, dict[str, tuple[float, ...]]] = {}
                for kind, by_batch in document.profiles.items():
                    for batch in by_batch:
                        rows = [samples.get((kind, batch, name, degree)) for name in names if name in needs[kind]]
                        known = [row for row in rows if row is not None]
                        if known and len(known) == len(rows):
                            shortest = min(len(row) for row in known)
                            total = np.sum([row[:shortest] for row in known], axis=0)
                            latency.setdefault(batch, {})[kind] = tuple(float(one) for one in total)
                kinds = set.intersection(*(set(by_kind) for by_kind in latency.values())) if latency else set()
                rows_of = {b: {kind: by_kind[kind] for kind in kinds} for b, by_kind in latency.items() if kinds}
                if rows_of:
                    yield Engine(
                        components=names, gpus=degree, degree=degree, batching=batching, latency_ms=rows_of
                    )  # fmt: skip
