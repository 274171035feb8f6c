"""The request-level simulator and the Monte Carlo estimate: plain functions over arrays, which numba compiles.

Arrays that both take, of one plan:

- ``tab`` [engines, types, batch sizes, quantiles]: latency of a request in a batch of its kind, in ms;
- ``engine_of``, ``batch_of``, ``static_of`` [executors]; ``keeps`` [executors, types]: how long a request keeps its
  place, over its latency; ``cpu`` [engines, types]: preprocessing, in ms;
- ``route_of`` [types, paths]: number of the route, or -1; ``path_cum`` [types, paths]: cumulated shares;
- ``route_len`` [routes]; ``route_node``, ``route_before`` [routes, places]: the nodes that a request passes, in order,
  and for each, as bits, the places that it waits for;
- ``first_of`` [nodes + 1]: where a node's executors begin; ``exec_cum`` [types, executors]: cumulated shares in a node.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

ARRIVE, DONE, FREE = 0, 1, 2


def pick(cumulated: Any, begin: int, end: int, draw: float) -> int:
    """Return the first of begin … end - 1 whose cumulated share is above the draw."""
    for index in range(begin, end - 1):
        if draw < cumulated[index]:
            return index
    return end - 1


def latency_at(tab: Any, engine: int, kind: int, batch: float, draw: float) -> float:
    """Return a sampled latency at a batch size that need not be whole, in ms."""
    quantile = min(int(draw * tab.shape[3]), tab.shape[3] - 1)
    low = min(max(int(batch), 1), tab.shape[2])
    high = min(low + 1, tab.shape[2])
    below = tab[engine, kind, low - 1, quantile]
    above = tab[engine, kind, high - 1, quantile]
    if math.isnan(above):
        above = below
    return float(below + (above - below) * min(max(batch - low, 0.0), 1.0))


def push(times: Any, what: Any, who: Any, size: int, time: float, kind: int, number: int) -> int:
    """Add an event to the heap; return its new size."""
    index = size
    while index > 0:
        parent = (index - 1) >> 1
        if times[parent] <= time:
            break
        times[index], what[index], who[index] = times[parent], what[parent], who[parent]
        index = parent
    times[index], what[index], who[index] = time, kind, number
    return size + 1


def drop_first(times: Any, what: Any, who: Any, size: int) -> int:
    """Remove the earliest event of the heap; return its new size."""
    size -= 1
    time, kind, number = times[size], what[size], who[size]
    index = 0
    while True:
        child = 2 * index + 1
        if child >= size:
            break
        if child + 1 < size and times[child + 1] < times[child]:
            child += 1
        if times[child] >= time:
            break
        times[index], what[index], who[index] = times[child], what[child], who[child]
        index = child
    times[index], what[index], who[index] = time, kind, number
    return size


def simulate(
    arrivals: Any, kinds: Any, draws: Any, tab: Any, engine_of: Any, batch_of: Any, static_of: Any, keeps: Any,
    cpu: Any, route_of: Any, path_cum: Any, route_len: Any, route_node: Any, route_before: Any, first_of: Any,
    exec_cum: Any, transfer_ms: float, finish: Any, busy_ms: Any,
) -> None:  # fmt: skip
    """Serve every request, first come first served at each executor.

    Parameters
    ----------
    arrivals, kinds : [requests]
        When each comes, in ms and in order, and its type.
    draws : [requests, 1 + 2 × places]
        Uniform numbers: for the path; for executor and latency at each place of the route.
    finish : [requests]
        Receives when each is done, in ms.
    busy_ms : [executors]
        Receives how long each was busy, places counted alike.
    """
    num, places = arrivals.shape[0], route_node.shape[1]
    num_executors = engine_of.shape[0]
    # One visit a (request, place).
    waits_for = np.zeros(num * places, np.int64)
    executor = np.zeros(num * places, np.int64)
    follower = np.zeros(num * places, np.int64)
    route, left = np.zeros(num, np.int64), np.zeros(num, np.int64)
    head, tail = np.full(num_executors, -1, np.int64), np.full(num_executors, -1, np.int64)
    queued, flying = np.zeros(num_executors, np.int64), np.zeros(num_executors, np.int64)
    room = num * places + num_executors * 512 + 64
    times = np.zeros(room)
    what, who = np.zeros(room, np.int64), np.zeros(room, np.int64)
    size, next_request = 0, 0
    while size > 0 or next_request < num:
        if next_request < num and (size == 0 or arrivals[next_request] <= times[0]):
            now, kind, number = arrivals[next_request], -1, next_request
            next_request += 1
            own = route_of[kinds[number], pick(path_cum[kinds[number]], 0, path_cum.shape[1], draws[number, 0])]
            route[number] = own
            sinks = (1 << route_len[own]) - 1
            for place in range(route_len[own]):
                visit = number * places + place
                before = route_before[own, place]
                waits_for[visit] = 0
                for bit in range(place):
                    waits_for[visit] += before >> bit & 1
                sinks &= ~before
                node = route_node[own, place]
                executor[visit] = pick(
                    exec_cum[kinds[number]], first_of[node], first_of[node + 1], draws[number, 1 + 2 * place]
                )
            left[number] = 0
            for place in range(route_len[own]):
                left[number] += sinks >> place & 1
                if waits_for[number * places + place] == 0:
                    size = push(times, what, who, size, now, ARRIVE, number * places + place)
            continue
        now, kind, number = times[0], what[0], who[0]
        size = drop_first(times, what, who, size)
        chosen = number
        arrived_idle = False
        if kind == ARRIVE:
            chosen = executor[number]
            follower[number] = -1
            arrived_idle = flying[chosen] == 0 and queued[chosen] == 0
            if queued[chosen] == 0:
                head[chosen] = number
            else:
                follower[tail[chosen]] = number
            tail[chosen] = number
            queued[chosen] += 1
        elif kind == DONE:
            request, place = number // places, number % places
            own = route[request]
            is_sink = True
            for after in range(place + 1, route_len[own]):
                if route_before[own, after] >> place & 1:
                    is_sink = False
                    visit = request * places + after
                    waits_for[visit] -= 1
                    if waits_for[visit] == 0:
                        size = push(times, what, who, size, now + transfer_ms, ARRIVE, visit)
            if is_sink:
                left[request] -= 1
                if left[request] == 0:
                    finish[request] = now
            continue
        else:
            flying[chosen] -= 1
            if static_of[chosen]:
                flying[chosen] = 0
        engine, most = engine_of[chosen], batch_of[chosen]
        if static_of[chosen]:
            if flying[chosen] == 0 and queued[chosen] > 0:
                batch = min(queued[chosen], most)
                total, kept, ahead = 0.0, 0.0, 0.0
                visit = head[chosen]
                for _ in range(batch):
                    request, place = visit // places, visit % places
                    took = latency_at(tab, engine, kinds[request], batch, draws[request, 2 + 2 * place])
                    total += took
                    kept += took * keeps[chosen, kinds[request]]
                    ahead = max(ahead, cpu[engine, kinds[request]])
                    visit = follower[visit]
                total, kept = total / batch, kept / batch
                if not arrived_idle:
                    ahead = 0.0
                for _ in range(batch):
                    visit = head[chosen]
                    head[chosen] = follower[visit]
                    size = push(times, what, who, size, now + ahead + total, DONE, visit)
                queued[chosen] -= batch
                flying[chosen] = 1
                busy_ms[chosen] += kept
                size = push(times, what, who, size, now + ahead + kept, FREE, chosen)
        else:
            while flying[chosen] < most and queued[chosen] > 0:
                visit = head[chosen]
                head[chosen] = follower[visit]
                queued[chosen] -= 1
                flying[chosen] += 1
                request, place = visit // places, visit % places
                took = latency_at(tab, engine, kinds[request], flying[chosen], draws[request, 2 + 2 * place])
                kept = took * keeps[chosen, kinds[request]]
                ahead = cpu[engine, kinds[request]] if arrived_idle else 0.0
                busy_ms[chosen] += kept / most
                size = push(times, what, who, size, now + ahead + took, DONE, visit)
                size = push(times, what, who, size, now + ahead + kept, FREE, chosen)


def estimate(
    kinds: Any, draws: Any, tab: Any, engine_of: Any, batch_of: Any, at_batch: Any, wait_ms: Any, busy: Any, cpu: Any,
    route_of: Any, path_cum: Any, route_len: Any, route_node: Any, route_before: Any, first_of: Any, exec_cum: Any,
    transfer_ms: float, latency_ms: Any,
) -> None:  # fmt: skip
    """Send requests through a plan one by one, each as if alone, at the batch sizes that executors work at.

    Parameters
    ----------
    draws : [requests, 1 + 3 × places]
        Uniform numbers: for the path; for executor, latency and waiting at each place of the route.
    at_batch, wait_ms, busy : [executors]
        The batch size that each works at, the mean time before a place is free, and how likely it is not idle.
    latency_ms : [requests]
        Receives the latency of each.
    """
    num, places = kinds.shape[0], route_node.shape[1]
    done = np.zeros(places)
    for request in range(num):
        kind = kinds[request]
        own = route_of[kind, pick(path_cum[kind], 0, path_cum.shape[1], draws[request, 0])]
        last = 0.0
        for place in range(route_len[own]):
            node = route_node[own, place]
            chosen = pick(exec_cum[kind], first_of[node], first_of[node + 1], draws[request, 1 + 3 * place])
            begin = 0.0
            for before in range(place):
                if route_before[own, place] >> before & 1:
                    begin = max(begin, done[before] + transfer_ms)
            took = latency_at(tab, engine_of[chosen], kind, at_batch[chosen], draws[request, 2 + 3 * place])
            draw = draws[request, 3 + 3 * place]
            if draw < busy[chosen]:
                # Exponential, given that it is busy at all.
                begin += -math.log(1 - draw / busy[chosen] * 0.999999) * wait_ms[chosen]
            else:
                begin += cpu[engine_of[chosen], kind]
            done[place] = begin + took
            last = max(last, done[place])
        latency_ms[request] = last


def work(
    rate_per_ms: float, fractions: Any, path_share: Any, exec_share: Any, count_of: Any, node_of: Any, means: Any,
    engine_of: Any, batch_of: Any, static_of: Any, keeps: Any, route_of: Any, route_len: Any, route_node: Any,
    load: Any, at_batch: Any, wait_ms: Any, busy: Any,
) -> None:  # fmt: skip
    """Find how executors work at a total rate, by the fixed point of Little's law.

    The batch is where as many come during one as it has. Waiting beyond the batch under way is Sakasegawa's (1977)
    approximation for as many servers as an executor has places, scaled by how much times differ between types.

    Parameters
    ----------
    exec_share : [types, rows]
        A node's requests of a type that go to each row, which is `count_of` executors alike.
    means : [engines, types, batch sizes]
        Mean latencies, in ms.
    load, at_batch, wait_ms, busy : [rows]
        Receive the share of an executor's places in use, the requests in a batch or in flight, the mean wait of those
        that do not find it idle, and how likely that is.
    """
    num_types, num_paths = path_share.shape
    num_rows = engine_of.shape[0]
    coming = np.zeros((num_types, node_of[num_rows - 1] + 1))
    for kind in range(num_types):
        for path in range(num_paths):
            own = route_of[kind, path]
            if own >= 0:
                for place in range(route_len[own]):
                    coming[kind, route_node[own, place]] += fractions[kind] * path_share[kind, path]
    for row in range(num_rows):
        engine, most = engine_of[row], batch_of[row]
        total, size, below, took = 0.0, 1.0, 0.0, 0.0
        for kind in range(num_types):
            total += coming[kind, node_of[row]] * exec_share[kind, row] / count_of[row] * rate_per_ms
        load[row], at_batch[row], wait_ms[row], busy[row] = 0.0, 1.0, 0.0, 0.0
        if total <= 0:
            continue
        last, squared = 0.0, 0.0
        found = False
        for batch in range(1, most + 1):
            kept, squared = 0.0, 0.0
            for kind in range(num_types):
                own_rate = coming[kind, node_of[row]] * exec_share[kind, row] / count_of[row] * rate_per_ms
                if own_rate > 0:
                    one = keeps[row, kind] * means[engine, kind, batch - 1]
                    kept += own_rate / total * one
                    squared += own_rate / total * one * one
            excess = total * kept - batch
            if not found and excess <= 0:
                share = below / (below - excess) if batch > 1 else 1.0
                size = batch - 1 + share if batch > 1 else 1.0
                took = last + (kept - last) * share if batch > 1 else kept
                found = True
            last, below = kept, excess
        if not found:
            size, took = float(most), last
        used = min(total * last / most, 0.999)
        queue = last / most * used ** (math.sqrt(2.0 * (most + 1)) - 1) / (1 - used)
        load[row], at_batch[row] = used, size
        if static_of[row]:
            busy[row] = min(total * took / size, 1.0)
            wait_ms[row] = took / 2 + queue / 2
        else:
            busy[row] = min(1.0, used ** math.sqrt(most))
            wait_ms[row] = queue / max(used, 1e-9) * squared / (last * last) / 2


def fill(
    paths: Any, fractions: Any, capacity: Any, configurations: Any, gpus: Any, num_gpus: int, route_of: Any,
    route_len: Any, route_node: Any, counts: Any,
) -> float:  # fmt: skip
    """Give each node of one configuration its executors: the next one goes where the load is highest.

    What is left when the fullest node cannot have another goes to the others: less load is less latency.

    Parameters
    ----------
    paths : [types]
        The path that each type takes.
    configurations, gpus, counts : [nodes]
        Each node's configuration and what an executor of it takes; receives how many it has.

    Returns
    -------
    The rate at which the first node is overloaded; 0 where GPUs do not suffice, or a node is not used or cannot serve.
    """
    num_nodes = configurations.shape[0]
    load = np.zeros(num_nodes)
    for kind in range(paths.shape[0]):
        own = route_of[kind, paths[kind]]
        for place in range(route_len[own]):
            node = route_node[own, place]
            able = capacity[configurations[node], kind]
            if able <= 0:
                return 0.0
            load[node] += fractions[kind] / able
    left = num_gpus
    for node in range(num_nodes):
        counts[node] = 1
        left -= gpus[node]
        if load[node] <= 0:
            return 0.0
    if left < 0:
        return 0.0
    while True:
        best = -1
        for node in range(num_nodes):
            if gpus[node] <= left and (best < 0 or load[node] / counts[node] > load[best] / counts[best]):
                best = node
        if best < 0:
            break
        counts[best] += 1
        left -= gpus[best]
    worst = 0.0
    for node in range(num_nodes):
        worst = max(worst, load[node] / counts[node])
    return 1 / worst
