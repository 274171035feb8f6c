"""What may run at the same time: operations within a batch and across batches, and edges that stream or could."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import islice
from typing import Any

from flashrt.analysis.structure import PlacedEdge, find_edges
from flashrt.errors import listed
from flashrt.ir import (
    INPUT,
    OUTPUT,
    BuiltProgram,
    Dependency,
    FlatProgram,
    find_dependencies,
    reduce_dependencies,
)

MAX_GROUPS = 64


def find_parallel(built: BuiltProgram) -> list[dict[str, Any]]:
    """Return the maximal groups of operations that may run at the same time, each with a plain reason.

    ``within a batch``: no dataflow path and so, races being refused, no shared written state between any two.
    ``across batches``: each pair may also overlap when one works on a later batch, because no state makes the later
    batch wait for the earlier one there. At most `MAX_GROUPS` groups of each kind.
    """
    flat = built.flat
    paths = [operation.path for operation in flat.operations]
    # An operation's tie to itself joins no two operations, and implied edges tie nothing that others do not.
    ties = [edge for edge in reduce_dependencies(find_dependencies(flat)) if edge.source != edge.target]
    groups = []
    free = {(a, b) for i, a in enumerate(paths) for b in paths[i + 1 :] if a not in flat.predecessors[b]}
    for members in _maximal_groups(paths, free):
        reason = "no dataflow path joins any two of them and they share no state that one of them writes"
        groups.append({"operations": members, "when": "within a batch", "reason": reason})
    across = {
        (a, b)
        for i, a in enumerate(paths)
        for b in paths[i + 1 :]
        if (a, b) in free or find_tie(flat, ties, a, b) is None
    }
    for members in _maximal_groups(paths, across):
        ordered = [(a, b) for i, a in enumerate(members) for b in members[i + 1 :] if (a, b) not in free]
        if not ordered:
            continue
        a, b = ordered[0]
        reason = f"no state ties the next batch's '{a}' to this batch's '{b}', so batches overlap on different devices"
        groups.append({"operations": members, "when": "across batches", "reason": reason})
    return groups


def find_tie(flat: FlatProgram, dependencies: Iterable[Dependency], first: str, second: str) -> Dependency | None:
    """Return the state dependency that makes the next batch's `first` wait for this batch's `second`, or None.

    `first` comes before `second` in the dataflow of a batch.
    """
    for edge in dependencies:
        if edge.lam != 1:
            continue
        leaves = edge.source == second or second in flat.predecessors[edge.source]
        enters = edge.target == first or edge.target in flat.predecessors[first]
        if leaves and enters:
            return edge
    return None


def _maximal_groups(paths: list[str], pairs: set[tuple[str, str]]) -> list[list[str]]:
    if not pairs:
        return []
    import networkx as nx

    graph: nx.Graph[str] = nx.Graph()
    graph.add_nodes_from(paths)
    graph.add_edges_from(sorted(pairs))
    place = {path: index for index, path in enumerate(paths)}
    found = [sorted(clique, key=lambda path: place[path]) for clique in islice(nx.find_cliques(graph), MAX_GROUPS)]
    return sorted((clique for clique in found if len(clique) > 1), key=lambda clique: (-len(clique), place[clique[0]]))


def find_streaming(built: BuiltProgram) -> list[dict[str, Any]]:
    """Return, for every edge, whether it streams, whether it could, and why or why not."""
    records = []
    for placed in find_edges(built):
        could, reason = judge_stream(built, placed)
        records.append(
            {
                "edge": placed.edge.label,
                "graph": placed.graph,
                "mode": placed.edge.mode,
                "chunks": placed.edge.chunks if placed.edge.mode == "streaming" else None,
                "streams": placed.edge.mode == "streaming" and could,
                "could": could,
                "reason": reason,
            }
        )
    return records


def judge_stream(built: BuiltProgram, placed: PlacedEdge) -> tuple[bool, str]:
    """Return whether chunks on this edge could let both ends overlap, and the reason."""
    edge, flows = placed.edge, placed.flows
    carried = next((flow for flow in flows if flow.carried and not flow.chunked), None)
    if carried is not None:
        return False, f"'{carried.label}' is carried between iterations: the next one starts from the whole value"
    if all(flow.source == INPUT for flow in flows):
        return False, "it comes from the application's input, which is there as a whole when the batch is ready (R_j)"
    tie = next((found for flow in flows if (found := shared_state(built, flow.source, flow.target))), None)
    if tie is not None:
        return (
            False,
            f"both ends use state '{tie.state}' ({tie.source} -> {tie.target}, {tie.kind}): they take turns",
        )
    opaque = [end for flow in flows for end in (flow.target,) if end != OUTPUT and built.flat.by_path[end].opaque]
    if edge.mode == "blocking" and opaque:
        return False, f"'{opaque[0]}' is opaque: nothing shows that it works chunk by chunk"
    if edge.mode == "blocking":
        return True, (
            "declared blocking: it could stream if its ends work chunk by chunk (whole result = joined chunk results); "
            "declare mode: streaming with chunks, then ir_interpret against the baseline shows whether that holds"
        )
    if edge.lookahead >= edge.num_chunks - 1:
        return False, f"look-ahead {edge.lookahead} of {edge.num_chunks} chunks: the consumer waits for all of them"
    whole = [label for flow in flows for label in flow.labels if label != edge.label and not flow.chunked]
    if whole and not any(flow.chunked for flow in flows):
        return True, (
            f"declared streaming in {edge.chunks} chunks; the value also passes {listed(dict.fromkeys(whole))}, whole, "
            "so both ends do not overlap, but the consumer works chunk by chunk"
        )
    return True, f"declared streaming in {edge.chunks} chunks"


def shared_state(built: BuiltProgram, source: str, target: str) -> Dependency | None:
    """Return a state dependency within a batch from `source` to `target`, or None."""
    if source == INPUT or target == OUTPUT:
        return None
    within = [edge for edge in find_dependencies(built.flat) if edge.state and edge.lam == 0]
    return next((edge for edge in within if (edge.source, edge.target) == (source, target)), None)
