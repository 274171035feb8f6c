"""The three documents together: checked against each other, and as arrays."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import networkx as nx
import numpy as np

from flashrt.errors import Finding, InputError, listed, nearest
from flashrt.planners.serving.documents import RETRY, Engine, ServingModel, ServingProfile, Workload

NUM_QUANTILES = 64
FRACTION_SLACK = 1e-6
REMEASURE = "measure the profile again for it, or correct the document, and call plan_serving again"


@dataclass(frozen=True)
class Configuration:
    """An engine with the batch size that it may fill: what an executor is configured as.

    Attributes
    ----------
    engine
        Its number in the profile.
    mask
        The components, as bits.
    """

    engine: int
    batch: int
    mask: int
    gpus: int


@dataclass(frozen=True, eq=False)
class ConfigurationArrays:
    """Engine, batch size, GPUs, and whether batches begin and end together; each [configurations]."""

    engine: np.ndarray
    batch: np.ndarray
    gpus: np.ndarray
    static: np.ndarray


@dataclass(frozen=True, eq=False)
class Problem:
    """What a plan is made for.

    Attributes
    ----------
    fractions : [types]
    needs
        Type -> its components, as bits.
    latency_ms : [engines, types, batch sizes, quantiles]
        Latency of one request in a batch of 1, 2, … of its kind; NaN where the profile has none.
    capacity : [configurations, types]
        Requests a second of that type alone; 0 where the profile has none.
    occupancy : [configurations, types]
        How long a request keeps its place, over its latency: 1 unless the profile declares a throughput.
    cpu_ms : [engines, types]
    targets_ms : [types]
        NaN where nothing is said yet.
    """

    model: ServingModel
    workload: Workload
    profile: ServingProfile
    types: tuple[str, ...]
    fractions: np.ndarray
    needs: tuple[int, ...]
    configurations: tuple[Configuration, ...]
    latency_ms: np.ndarray
    capacity: np.ndarray
    occupancy: np.ndarray
    cpu_ms: np.ndarray
    targets_ms: np.ndarray
    notes: tuple[str, ...] = field(default=())

    @cached_property
    def mean_ms(self) -> np.ndarray:
        """Mean latencies; [engines, types, batch sizes], in ms."""
        return np.asarray(self.latency_ms.mean(axis=-1))

    @cached_property
    def settings_of_configurations(self) -> ConfigurationArrays:
        """The configurations as arrays."""
        return ConfigurationArrays(
            np.array([one.engine for one in self.configurations], np.int64),
            np.array([one.batch for one in self.configurations], np.int64),
            np.array([one.gpus for one in self.configurations], np.int64),
            np.array([self.is_static(k) for k in range(len(self.configurations))]),
        )

    @cached_property
    def _by_mask(self) -> dict[int, list[int]]:
        found: dict[int, list[int]] = {}
        for number, one in enumerate(self.configurations):
            found.setdefault(one.mask, []).append(number)
        return found

    def names(self, mask: int) -> tuple[str, ...]:
        """Return the components of a mask."""
        return tuple(name for bit, name in enumerate(self.model.components) if mask >> bit & 1)

    def configurations_of(self, mask: int) -> list[int]:
        """Return the configurations that run exactly these components."""
        return self._by_mask.get(mask, [])

    def is_static(self, configuration: int) -> bool:
        """Return whether batches begin and end together."""
        return self.profile.engines[self.configurations[configuration].engine].batching == "static"


def mask_of(names: Sequence[str], components: Sequence[str]) -> int:
    """Return components as bits."""
    return sum(1 << components.index(name) for name in set(names))


def make_problem(
    model: ServingModel, workload: Workload, profile: ServingProfile, *, device: str | None = None
) -> Problem:
    """Return the documents as one problem.

    Parameters
    ----------
    device
        The GPUs that the plan is for; None: those of the profile.

    Raises
    ------
    InputError
        With every finding about each document and about how they fit.
    """
    findings = [
        *_check_model(model), *_check_workload(model, workload), *_check_profile(model, workload, profile, device)
    ]  # fmt: skip
    if findings:
        raise InputError(findings)
    types = tuple(workload.types)
    fractions = np.array([one.fraction for one in workload.types.values()])
    largest = max(max(engine.latency_ms) for engine in profile.engines)
    shape = (len(profile.engines), len(types), largest, NUM_QUANTILES)
    latency, cpu = np.full(shape, np.nan), np.zeros(shape[:2])
    configurations: list[Configuration] = []
    capacity: list[list[float]] = []
    occupancy: list[list[float]] = []
    for number, engine in enumerate(profile.engines):
        for place, name in enumerate(types):
            table = latency_table(engine, name)
            if table is not None:
                latency[number, place, : len(table)] = table
            cpu[number, place] = engine.cpu_ms.get(name, 0.0)
        mask = mask_of(engine.components, model.components)
        for batch in sorted(engine.latency_ms):
            means = latency[number, :, batch - 1].mean(axis=-1)
            derived = 1e3 * batch / means
            declared = engine.throughput_per_s.get(batch, {})
            found = np.array([declared.get(name, derived[place]) for place, name in enumerate(types)])
            found = np.where(np.isfinite(derived), found, 0.0)
            configurations.append(Configuration(number, batch, mask, engine.gpus))
            capacity.append(list(found))
            occupancy.append([float(d / f) if f else 1.0 for d, f in zip(derived, found, strict=True)])
    targets = [np.nan if one.target_ms is None else one.target_ms for one in workload.types.values()]
    unused = sorted({name for engine in profile.engines for by in engine.latency_ms.values() for name in by} - {*types})
    return Problem(
        model, workload, profile, types, fractions / fractions.sum(),
        tuple(mask_of(one.components, model.components) for one in workload.types.values()),
        tuple(configurations), latency, np.array(capacity), np.array(occupancy), cpu, np.array(targets),
        (f"the profile has types that the workload has not: {listed(unused)}",) if unused else (),
    )  # fmt: skip


def latency_table(engine: Engine, name: str) -> np.ndarray | None:
    """Return an engine's latencies of a type, or None; shape [largest batch, quantiles], in ms.

    Quantiles at a batch size that was profiled keep its mean; those between are interpolated, those below the smallest
    are the smallest's.
    """
    sizes = [size for size in sorted(engine.latency_ms) if name in engine.latency_ms[size]]
    if not sizes:
        return None
    at = (np.arange(NUM_QUANTILES) + 0.5) / NUM_QUANTILES
    rows = []
    for size in sizes:
        samples = np.asarray(engine.latency_ms[size][name], float)
        row = np.quantile(samples, at)
        rows.append(row * samples.mean() / row.mean())
    every = np.arange(1, sizes[-1] + 1)
    return np.stack([np.interp(every, sizes, column) for column in np.array(rows).T], axis=-1)


def _check_model(model: ServingModel) -> Iterator[Finding]:
    where = f"model '{model.name}'"
    for name in sorted({name for name in model.components if model.components.count(name) > 1}):
        yield Finding(f"{where}, components", f"'{name}' once", "twice", f"remove one; {RETRY}", rule="component-twice")
    known = True
    for number, edge in enumerate(model.edges):
        place = f"{where}, edge {number} '{edge.source} -> {edge.target}'"
        for end in (edge.source, edge.target):
            if end not in model.components:
                known = False
                yield _unknown_component(place, end, model)
        if edge.source == edge.target:
            yield Finding(place, "two components", "one", f"remove it; {RETRY}", rule="self-edge")
    graph = nx.DiGraph([(edge.source, edge.target) for edge in model.edges if edge.source != edge.target])
    if known and not nx.is_directed_acyclic_graph(graph):
        path = " -> ".join([a for a, _ in nx.find_cycle(graph)])
        yield Finding(where, "edges without a cycle", path, f"remove one of these edges; {RETRY}", rule="cycle")


def _unknown_component(where: str, name: str, model: ServingModel) -> Finding:
    return Finding(
        where, f"a component of the model: {listed(model.components)}", f"'{name}'", RETRY, rule="unknown-component",
        nearest=nearest(name, model.components),
    )  # fmt: skip


def _check_workload(model: ServingModel, workload: Workload) -> Iterator[Finding]:
    where = f"workload '{workload.name}'"
    total = sum(one.fraction for one in workload.types.values())
    if abs(total - 1) > FRACTION_SLACK:
        yield Finding(
            f"{where}, fractions", "a sum of 1", f"{total:.6g}", f"change the fractions; {RETRY}", rule="fractions"
        )
    links = nx.Graph([(edge.source, edge.target) for edge in model.edges])
    for name, one in workload.types.items():
        place = f"{where}, type '{name}'"
        unknown = [component for component in one.components if component not in model.components]
        yield from (_unknown_component(place, component, model) for component in unknown)
        if len(set(one.components)) < len(one.components):
            yield Finding(place, "each component once", listed(one.components), RETRY, rule="component-twice")
        if not unknown and len(set(one.components)) > 1:
            part = nx.Graph(links.subgraph(one.components))
            part.add_nodes_from(one.components)
            if not nx.is_connected(part):
                parts = "; ".join(listed(sorted(group)) for group in nx.connected_components(part))
                yield Finding(
                    place, "components that the model's edges join to one path", f"parts: {parts}",
                    f"add the components between them, or the edges to the model; {RETRY}", rule="no-path",
                )  # fmt: skip
    if (workload.arrivals.process == "trace") != (workload.arrivals.trace is not None):
        yield Finding(
            f"{where}, arrivals", "a file with process 'trace', and with no other",
            f"process '{workload.arrivals.process}', trace {workload.arrivals.trace!r}", RETRY, rule="trace",
        )  # fmt: skip


def _check_profile(
    model: ServingModel, workload: Workload, profile: ServingProfile, device: str | None
) -> Iterator[Finding]:
    where = f"serving profile '{profile.name}'"
    if profile.key.model is not None and profile.key.model != model.digest:
        yield Finding(
            f"{where}, key", f"the model that it was measured with ({profile.key.model})",
            f"'{model.name}' ({model.digest}): its components or edges are others", REMEASURE, rule="stale-profile",
        )  # fmt: skip
    if device is not None and profile.key.device is not None and profile.key.device != device:
        yield Finding(
            f"{where}, key", f"the devices that it was measured on, '{profile.key.device}'", f"'{device}'", REMEASURE,
            rule="foreign-profile",
        )  # fmt: skip
    merged = nx.Graph([(edge.source, edge.target) for edge in model.edges if edge.colocatable])
    seen: dict[tuple[object, ...], int] = {}
    for number, engine in enumerate(profile.engines):
        place = f"{where}, engine {number} ({' + '.join(engine.components)})"
        unknown = [name for name in engine.components if name not in model.components]
        yield from (_unknown_component(place, name, model) for name in unknown)
        if not unknown and len(engine.components) > 1:
            part = nx.Graph(merged.subgraph(engine.components))
            part.add_nodes_from(engine.components)
            if not nx.is_connected(part):
                yield Finding(
                    place, "components that colocatable edges join", "some that none joins",
                    f"mark the edges colocatable, or split the engine; {RETRY}", rule="not-colocatable",
                )  # fmt: skip
        same = (frozenset(engine.components), engine.gpus, engine.degree, engine.batching)
        if same in seen:
            yield Finding(place, "one engine of a kind", f"the same as engine {seen[same]}",
                          f"join their batch sizes; {RETRY}", rule="engine-twice")  # fmt: skip
        seen.setdefault(same, number)
        yield from _check_sizes(engine, place)
    for name, one in workload.types.items():
        known: Mapping[str, object] | None = profile.types.get(name)
        if known is not None and one.characteristics and dict(known) != dict(one.characteristics):
            yield Finding(
                f"workload, type '{name}', characteristics", f"what the profile was measured with: {dict(known)}",
                str(dict(one.characteristics)), REMEASURE, rule="stale-profile",
            )  # fmt: skip
        if not any(name in by_type for engine in profile.engines for by_type in engine.latency_ms.values()):
            yield Finding(
                f"workload, type '{name}'", f"a type that the profile has: {listed(_types_of(profile))}", "none of it",
                REMEASURE, rule="unprofiled-type", nearest=nearest(name, _types_of(profile)),
            )  # fmt: skip


def _types_of(profile: ServingProfile) -> list[str]:
    return sorted({name for engine in profile.engines for by_type in engine.latency_ms.values() for name in by_type})


def _check_sizes(engine: Engine, place: str) -> Iterator[Finding]:
    everywhere = {name for by_type in engine.latency_ms.values() for name in by_type}
    for size, by_type in engine.latency_ms.items():
        if missing := sorted(everywhere - {*by_type}):
            yield Finding(
                f"{place}, latency_ms, batch size {size}", f"the types of all sizes: {listed(sorted(everywhere))}",
                f"{listed(missing)} missing", f"add them; {RETRY}", rule="missing-type",
            )  # fmt: skip
    for size, declared in engine.throughput_per_s.items():
        if size not in engine.latency_ms or not set(declared) <= everywhere:
            yield Finding(
                f"{place}, throughput_per_s, batch size {size}", "sizes and types of latency_ms", listed(declared),
                RETRY, rule="unknown-size",
            )  # fmt: skip
    for name in sorted(everywhere):
        means = [float(np.mean(engine.latency_ms[size][name])) for size in sorted(engine.latency_ms)
                 if name in engine.latency_ms[size]]  # fmt: skip
        if any(later < 0.999 * earlier for earlier, later in itertools.pairwise(means)):
            yield Finding(
                f"{place}, latency_ms, type '{name}'", "latencies that do not fall as batches grow",
                ", ".join(f"{mean:g}" for mean in means), f"measure again; {RETRY}", rule="falling-latency",
            )  # fmt: skip
