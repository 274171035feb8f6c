"""A second opinion on a deployment: its graph, period and latency derived anew, by other algorithms and no shared code.

Only the program's flattening, the profile's numbers and the document are taken over. The graph is written as a list of
(source, target, weight, height, cause) between (operation, chunk) pairs; the period comes from Howard's policy
iteration and the latency from longest walks, all in fractions of milliseconds. What is said to bind them, step by step
as JSON has it, is held against that graph too: `check_cycle` and `check_path`.
"""

from __future__ import annotations

import itertools
import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import Any

from flashrt.analysis import Profile
from flashrt.ir import BuiltProgram, matches

Part = tuple[str, int]
Arc = tuple[Part, Part, Fraction, int, str]
Steps = Sequence[Mapping[str, Any]]


def _best(patterns: Any, path: str) -> Any:
    """Return the most specific pattern that names a path."""
    if path in patterns:
        return path
    return max((p for p in patterns if matches(p, path)), key=len, default=None)


def _exact(value: float) -> Fraction:
    """Return milliseconds to the picosecond, as the model counts them."""
    return Fraction(round(value * 10**9), 10**9)


class Checker:
    """Figures of deployments of one program under one profile."""

    def __init__(self, built: BuiltProgram, profile: Profile, blocking: Sequence[str] = ()) -> None:
        self.built, self.profile, self.blocking = built, profile, set(blocking)
        self.paths = [operation.path for operation in built.flat.operations]
        self.flows = []
        for flow in built.flat.dataflow:
            head = bool(flow.labels) and flow.labels[0] in self.blocking
            tail = bool(flow.labels) and flow.labels[-1] in self.blocking
            cut = any(label in self.blocking for label in flow.labels)
            made = 1 if head else flow.source_chunks
            taken = 1 if tail or flow.prologue else flow.target_chunks
            self.flows.append((flow, made, taken, flow.chunked and not cut and not flow.prologue))
        self.count = {}
        for path in self.paths:
            into = max([1, *(taken for flow, _, taken, _ in self.flows if flow.target == path)])
            out = max([1, *(made for flow, made, _, _ in self.flows if flow.source == path)])
            self.count[path] = into if into > 1 else out
        self.size = {flow.label: self._bytes(flow) for flow in built.flat.dataflow}

    def _bytes(self, flow: Any) -> int | None:
        sizes = {"float32": 4, "uint8": 1}
        ends = []
        if flow.source in self.built.flat.by_path:
            ends.append(self.built.flat.by_path[flow.source].outputs.get(flow.source_port))
        if flow.target in self.built.flat.by_path:
            ends.append(self.built.flat.by_path[flow.target].inputs.get(flow.target_port))
        for port in ends:
            if port is not None and port.dtype and port.shape and all(isinstance(a, int) for a in port.shape):
                total = sizes[port.dtype]
                for axis in port.shape:
                    total *= axis
                return total
        return None

    def time(self, path: str, degree: int) -> Fraction:
        operations = self.profile.operations
        return _exact(operations[_best(operations, path)][degree])

    def chunk_times(self, path: str, degree: int) -> list[Fraction]:
        """Return the time of each chunk; a chunk ends where its share of the sum does, to the picosecond."""
        whole, count = self.time(path, degree), self.count[path]
        pattern = _best(self.profile.chunks, path)
        shares = list(self.profile.chunks[pattern]) if pattern and count > 1 else [1.0] * count
        if len(shares) == 3 and count != 3:
            shares = [shares[0], *[shares[1]] * (count - 2), shares[2]]
        ends = [0]
        ticks = int(whole * 10**9)
        for index in range(1, count):
            ends.append(
                min(
                    ticks,
                    round(
                        ticks * (list(itertools.accumulate(shares))[index - 1] / list(itertools.accumulate(shares))[-1])
                    ),
                )
            )
        ends.append(ticks)
        return [Fraction(max(0, b - a), 10**9) for a, b in itertools.pairwise(ends)]

    def lag(self, devices: Mapping[str, tuple[int, ...]], source: str, target: str, size: int | None,
            pieces: int) -> Fraction:  # fmt: skip
        if all(device in devices[source] for device in devices[target]):
            return Fraction(0)
        transfer = self.profile.transfer
        if size is None or transfer.gigabytes_per_s is None:
            return _exact(transfer.latency_ms)
        return _exact(transfer.latency_ms + size / pieces / (transfer.gigabytes_per_s * 1e6))

    def graph(self, devices: Mapping[str, tuple[int, ...]]) -> tuple[dict[Part, Fraction], list[Arc], set[Part],
                                                                      list[Part], set[tuple[str, str]]]:  # fmt: skip
        """Return times, arcs without those of devices, entries, last parts of outputs, and who streams to whom."""
        times: dict[Part, Fraction] = {}
        arcs: list[Arc] = []
        for path in self.paths:
            for index, value in enumerate(self.chunk_times(path, len(devices[path]))):
                times[path, index] = value
                if index:
                    arcs.append(((path, index - 1), (path, index), times[path, index - 1], 0, f"next chunk of {path}"))

        def last(path: str) -> Part:
            return path, self.count[path] - 1

        entries, outputs, streams = set(), [], set()
        for flow, _, taken, chunked in self.flows:
            if flow.source == "<input>":
                if flow.target != "<output>":
                    entries.add((flow.target, 0))
                continue
            if flow.target == "<output>":
                outputs.append(last(flow.source))
                continue
            size = self.size[flow.label]
            if not chunked:
                lag = self.lag(devices, flow.source, flow.target, size, 1)
                arcs.append((last(flow.source), (flow.target, 0), times[last(flow.source)] + lag, 0, flow.label))
                continue
            streams.add((flow.source, flow.target))
            lag = self.lag(devices, flow.source, flow.target, size, taken)
            for chunk in range(taken):
                wanted = min(chunk + flow.lookahead, taken - 1)
                part = (flow.source, wanted) if self.count[flow.source] == taken else last(flow.source)
                arcs.append((part, (flow.target, chunk), times[part] + lag, 0, flow.label))
        fed = {flow.target for flow, *_ in self.flows}
        entries |= {(path, 0) for path in self.paths if path not in fed}
        for state in self.built.flat.state_instances:
            declared = self.built.program.states[state.split("[")[0]].bytes or 0
            users = [o for o in self.built.flat.operations if state in o.accesses]
            for first, second in itertools.product(users, users):
                a, b = first.accesses[state], second.accesses[state]
                later = users.index(first) >= users.index(second)
                if not ("w" in a or "w" in b) or (first is second and "w" not in a):
                    continue
                raw = "w" in a and "r" in b
                lag = self.lag(devices, first.path, second.path, declared if raw else 0, 1)
                weight = times[last(first.path)] + lag
                arcs.append((last(first.path), (second.path, 0), weight, int(later), f"state {state}"))
        return times, arcs, entries, outputs, streams

    def figures(
        self,
        devices: Mapping[str, tuple[int, ...]],
        order: Mapping[int, Sequence[str]],
        stagger: Mapping[str, int],
        turns: bool,
        prepared: Any = None,
    ) -> tuple[Fraction, Fraction] | None:
        """Return period and latency in milliseconds, or None for a deadlock."""
        times, arcs, entries, outputs, streams = prepared or self.graph(devices)
        everything, seen = list(arcs), set()
        for device, sequence in order.items():
            parts = self.parts_on(sequence, stagger, streams, arcs, turns=turns)
            if tuple(parts) not in seen:
                seen.add(tuple(parts))
                everything += cyclic_arcs(parts, times, stagger, device)
        if has_stuck_cycle(list(times), everything):
            return None
        period = howard(list(times), everything)
        walks = longest(list(times), everything, entries, period)
        return period, max((walks[part] + times[part] for part in outputs), default=Fraction(0))

    def parts_on(
        self, sequence: Sequence[str], stagger: Mapping[str, int], streams: set[tuple[str, str]], arcs: Sequence[Arc],
        *, turns: bool,
    ) -> list[Part]:  # fmt: skip
        """Return a device's parts in the order in which it runs them."""
        if turns:
            return self.parts_in_turn(sequence, stagger, streams, arcs)
        return [(path, index) for path in sequence for index in range(self.count[path])]

    def parts_in_turn(
        self, sequence: Sequence[str], stagger: Mapping[str, int], streams: set[tuple[str, str]], arcs: Sequence[Arc]
    ) -> list[Part]:
        """Return a device's parts where neighbours that stream to each other take turns."""
        before: dict[Part, set[Part]] = defaultdict(set)
        zero = [(a, b) for a, b, _, height, _ in arcs if height == 0]
        changed = True
        while changed:
            changed = False
            for a, b in zero:
                gained = before[a] | {a}
                if not gained <= before[b]:
                    before[b] |= gained
                    changed = True
        runs: list[list[str]] = []
        for path in sequence:
            joins = runs and stagger.get(path, 0) == stagger.get(runs[-1][-1], 0)
            if joins and any((other, path) in streams for other in runs[-1]):
                runs[-1].append(path)
            else:
                runs.append([path])
        parts: list[Part] = []
        for run in runs:
            pending = {path: [(path, index) for index in range(self.count[path])] for path in run}
            own = {part for listing in pending.values() for part in listing}
            done: set[Part] = set()
            while len(done) < len(own):
                ready = [p for p in reversed(run) if pending[p] and before[pending[p][0]] & own <= done]
                path = ready[0] if ready else next(p for p in run if pending[p])
                part = pending[path].pop(0)
                parts.append(part)
                done.add(part)
        return parts

    def read(
        self, document: Mapping[str, Any]
    ) -> tuple[dict[str, tuple[int, ...]], dict[int, Sequence[str]], dict[str, int], bool]:
        """Return devices, orders, staggers and whether neighbours take turns, of a document as it would be written."""
        document = json.loads(json.dumps(document))
        devices = {}
        for path in self.paths:
            pattern = _best(document["place"], path)
            devices[path] = tuple(document["groups"][document["place"][pattern]])
        order = {int(device): paths for device, paths in document["order"].items()}
        for device, listing in order.items():
            assert sorted(listing) == sorted(path for path in self.paths if device in devices[path])
        stagger = {path: document.get("stagger", {}).get(path, 0) for path in self.paths}
        return devices, order, stagger, bool(document.get("interleave"))

    def check_document(self, document: Mapping[str, Any]) -> tuple[Fraction, Fraction]:
        """Return period and latency of a deployment as it would be written, every figure derived from the document."""
        found = self.figures(*self.read(document))
        assert found is not None, "a point is no deadlock"
        return found

    def check_cycle(self, document: Mapping[str, Any], steps: Steps, period: Fraction) -> None:
        """Check that the steps are a cycle of the graph of `document` whose length a batch is the period, exactly."""
        if not steps:
            assert period == 0, "only where nothing takes time, nothing binds the period"
            return
        self._check_steps(document, [*steps, steps[0]])
        height = sum(step["batches"] for step in steps)
        assert height > 0, "a cycle leads to a later batch"
        length = sum(_exact(step["time_ms"]) + _exact(step["lag_ms"]) for step in steps)
        assert length / height == period, f"{length} ms over {height} batches are not {period} ms a batch"

    def check_path(self, document: Mapping[str, Any], steps: Steps, period: Fraction, latency: Fraction) -> None:
        """Check that the steps lead from an entry to the end of an output, and take exactly the latency."""
        *_, entries, outputs, _ = self.graph(self.read(document)[0])
        if not steps:
            assert not outputs, "where something is shown, a path leads to it"
            assert latency == 0
            return
        self._check_steps(document, steps)
        assert self._part(steps[0]) in entries, f"{steps[0]} is no entry"
        assert self._part(steps[-1]) in outputs, f"{steps[-1]} is not the end of an output"
        assert (steps[-1]["lag_ms"], steps[-1]["batches"], steps[-1]["cause"]) == (0, 0, None), "nothing follows"
        length = sum(
            _exact(step["time_ms"]) + _exact(step["lag_ms"]) - period * step["batches"] for step in steps
        )  # fmt: skip
        assert length == latency, f"{length} ms are not {latency} ms"

    def _part(self, step: Mapping[str, Any]) -> Part:
        path, chunk = step["operation"], step["chunk"]
        assert path in self.count, f"no operation '{path}'"
        assert (chunk is None) == (self.count[path] == 1), f"'{path}' has {self.count[path]} chunks, not {chunk}"
        return path, 0 if chunk is None else chunk - 1

    def _check_steps(self, document: Mapping[str, Any], steps: Steps) -> None:
        """Check each step's time, and that an arc of that length, height and cause joins it to the one after it."""
        devices, order, stagger, turns = self.read(document)
        times, arcs, _, _, streams = self.graph(devices)
        known = set(arcs)
        for device, sequence in order.items():
            parts = self.parts_on(sequence, stagger, streams, arcs, turns=turns)
            known |= set(cyclic_arcs(parts, times, stagger, device))
        for step in steps:
            assert times.get(self._part(step)) == _exact(step["time_ms"]), f"{step} takes another time"
        for step, follower in itertools.pairwise(steps):
            weight = _exact(step["time_ms"]) + _exact(step["lag_ms"])
            # Of a state the analysis also says which hazard it is.
            cause = step["cause"].rpartition(" (")[0] if step["cause"].startswith("state ") else step["cause"]
            arc = (self._part(step), self._part(follower), weight, step["batches"], cause)
            assert arc in known, f"nothing makes {follower} wait for {step}"

    def memory(self, devices: Mapping[str, tuple[int, ...]]) -> dict[int, int]:
        """Return what lives on each device, in bytes."""
        total: dict[int, int] = defaultdict(int)
        for path, group in devices.items():
            pattern = _best(self.profile.memory, path)
            value: Any = self.profile.memory[pattern] if pattern else 0
            for device in group:
                total[device] += value if isinstance(value, int) else value[len(group)]
        for state in self.built.flat.state_instances:
            size = self.built.program.states[state.split("[")[0]].bytes or 0
            users = [o.path for o in self.built.flat.operations if state in o.accesses]
            for device in {device for path in users for device in devices[path]}:
                total[device] += size
        return total


def cyclic_arcs(
    parts: Sequence[Part], times: Mapping[Part, Fraction], stagger: Mapping[str, int], device: int
) -> list[Arc]:
    """Return what the order of a device asks: each part after the one before it, and the first of the next cycle."""
    arcs = []
    for index, part in enumerate(parts):
        follower = parts[(index + 1) % len(parts)]
        height = stagger.get(part[0], 0) - stagger.get(follower[0], 0) + int(index + 1 == len(parts))
        arcs.append((part, follower, times[part], height, f"device {device}"))
    return arcs


def has_stuck_cycle(parts: Sequence[Part], arcs: Sequence[Arc]) -> bool:
    """Return whether a cycle's heights add up to 0 or less (Floyd and Warshall, on heights alone)."""
    index = {part: number for number, part in enumerate(parts)}
    far = 10**6
    least = [[far] * len(parts) for _ in parts]
    for a, b, _, height, _ in arcs:
        least[index[a]][index[b]] = min(least[index[a]][index[b]], height)
    for middle in range(len(parts)):
        row = least[middle]
        for own in least:
            if own[middle] < far:
                base = own[middle]
                for at, value in enumerate(row):
                    if base + value < own[at]:
                        own[at] = base + value
    return any(least[at][at] <= 0 for at in range(len(parts)))


def howard(parts: Sequence[Part], arcs: Sequence[Arc]) -> Fraction:
    """Return the largest ratio of weight to height over all cycles, by policy iteration.

    *Source*: J. Cochet-Terrasson et al., "Numerical computation of spectral elements in max-plus algebra" (1998).
    """
    leaving: dict[Part, list[Arc]] = defaultdict(list)
    for arc in arcs:
        leaving[arc[0]].append(arc)
    # Every part lies on a cycle: its device's.
    policy = {part: leaving[part][0] for part in parts}
    while True:
        ratio: dict[Part, Fraction] = {}
        value: dict[Part, Fraction] = {}
        for root in parts:
            trail: list[Part] = []
            node = root
            while node not in ratio and node not in trail:
                trail.append(node)
                node = policy[node][1]
            if node not in ratio:
                cycle = trail[trail.index(node) :]
                weight = sum(policy[part][2] for part in cycle)
                ratio[node] = Fraction(weight) / sum(policy[part][3] for part in cycle)
                value[node] = Fraction(0)
                for part in reversed(cycle[1:]):
                    _, following, cost, height, _ = policy[part]
                    ratio[part], value[part] = ratio[node], cost - ratio[node] * height + value[following]
                trail = trail[: trail.index(node)]
            for part in reversed(trail):
                _, following, cost, height, _ = policy[part]
                ratio[part] = ratio[following]
                value[part] = cost - ratio[part] * height + value[following]
        improved = False
        for part in parts:
            for arc in leaving[part]:
                if ratio[arc[1]] > ratio[part]:
                    policy[part], ratio[part], improved = arc, ratio[arc[1]], True
        if not improved:
            for part in parts:
                for arc in leaving[part]:
                    gained = arc[2] - ratio[part] * arc[3] + value[arc[1]]
                    if ratio[arc[1]] == ratio[part] and gained > value[part]:
                        policy[part], value[part], improved = arc, gained, True
        if not improved:
            return max(ratio.values())


def longest(parts: Sequence[Part], arcs: Sequence[Arc], entries: set[Part], period: Fraction) -> dict[Part, Fraction]:
    """Return the longest walks from the entries, in milliseconds."""
    walks = dict.fromkeys(entries, Fraction(0))
    for _ in range(len(parts) + 1):
        changed = False
        for a, b, weight, height, _ in arcs:
            if a in walks and (b not in walks or walks[a] + weight - period * height > walks[b]):
                walks[b], changed = walks[a] + weight - period * height, True
        if not changed:
            return walks
    raise AssertionError("a cycle is positive at the largest ratio")
