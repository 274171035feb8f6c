"""What streaming edges claim, and which blocking ones could: calls on the whole, on chunks, on changed later chunks."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from flashrt.analysis.claims import CONFIRMED, REFUTED, UNCHECKED, stream_claim, streaming_labels
from flashrt.analysis.parallel import judge_stream
from flashrt.analysis.structure import PlacedEdge, find_edges
from flashrt.bench.audit.findings import Findings
from flashrt.bench.audit.forks import ForkFailedError, in_fork
from flashrt.bench.audit.record import ObservingView, Tape
from flashrt.bench.audit.replay import Loaded, arrived_at, states_before, states_differ
from flashrt.bench.audit.values import Difference, compare, perturb, thaw
from flashrt.ir import INPUT, OUTPUT, Dataflow, Operation, OperationRunner
from flashrt.ir.interpreter import gather
from flashrt.ir.values import join, length, split

MAX_PERTURBED = 6
"""Of one value, how many chunks are changed, one by one."""
HINT_CHUNKS = 4


@dataclass(frozen=True)
class _Case:
    """One recorded call, set up to be run again in this process."""

    runner: OperationRunner
    store: dict[str, Any]
    whole: dict[str, Any]
    chunks: dict[str, list[Any]]
    first: dict[str, Any]
    made: list[Mapping[str, Any]]


def _set_up(loaded: Loaded, tape: Tape, batch: int, path: str) -> _Case:
    operation = loaded.flat.by_path[path]
    store = states_before(tape, batch, path)
    runner = OperationRunner(loaded.flat, operation, loaded.ops, store, ObservingView(loaded.flat, operation, store))
    values, first = gather(loaded.flat, runner, arrived_at(tape, batch, path))
    chunks = {port: list(values[port]) for port in runner.streamed_inputs}
    whole = {
        port: join(chunks[port], runner.streamed_inputs[port].axis) if port in chunks else value
        for port, value in values.items()
    }
    made = [thaw(data) for data, _ in tape.calls[batch, path].pieces]
    return _Case(runner, store, whole, chunks, first, made)


def _joined(runner: OperationRunner, parts: Sequence[Mapping[str, Any]], axis: int) -> dict[str, Any]:
    return {port: join([part[port] for part in parts], axis) for port in sorted(runner.needed)}


def _consumers(loaded: Loaded, findings: Findings) -> list[Operation]:
    """Return the first and last operation of every node, once each."""
    chosen: dict[str, list[Operation]] = {}
    for operation in loaded.flat.operations:
        chosen.setdefault(findings.template(operation.path), []).append(operation)
    paths = [path for same in chosen.values() for path in dict.fromkeys((same[0].path, same[-1].path))]
    return [loaded.flat.by_path[path] for path in paths]


def check_streams(loaded: Loaded, tape: Tape, findings: Findings, batches: Sequence[int]) -> None:
    """Check every streaming edge into an operation on these batches."""
    for operation in _consumers(loaded, findings):
        flows = [flow for flow in loaded.flat.incoming.get(operation.path, ())
                 if flow.target_chunks > 1 and not flow.prologue]  # fmt: skip
        if flows:
            _check_consumer(loaded, tape, findings, operation, flows, batches)


def _check_consumer(
    loaded: Loaded,
    tape: Tape,
    findings: Findings,
    operation: Operation,
    flows: Sequence[Dataflow],
    batches: Sequence[int],
) -> None:
    path = operation.path
    streaming = streaming_labels(findings.built)
    claims = [stream_claim(label) for flow in flows for label in flow.labels if label in streaming]
    sources = [flow.source for flow in flows if flow.source != INPUT]
    broken = [source for source in sources if findings.has(findings.template(source), ("shared-storage",))]
    if broken:
        why = f"'{broken[0]}' changes what it has handed over"
        for claim in claims:
            findings.claim(claim, UNCHECKED, why)
        findings.skip(f"streaming into '{path}'", why)
        return
    if any(flow.lookahead for flow in flows):
        _check_lookahead(loaded, tape, findings, operation, flows, batches)
        return
    for batch in batches:
        try:
            told = in_fork(functools.partial(_whole_differs, loaded, tape, batch, path), loaded.timeout_s)
        except (ForkFailedError, LookupError) as error:
            for claim in claims:
                findings.claim(claim, UNCHECKED, f"'{path}' cannot work on the whole: {error}"[:300])
            findings.skip(f"streaming into '{path}'", f"the op fails on the whole value: {error}"[:300])
            return
        if told is None:
            continue
        difference, needed, culprits = told
        for flow in flows:
            if culprits and flow.target_port not in culprits:
                continue
            _refute(findings, operation, flow, difference, needed, batch)
        return
    for claim in claims:
        findings.claim(claim, CONFIRMED, f"'{path}': chunk results joined equal the whole over {len(batches)} batches")


def _refute(findings: Findings, operation: Operation, flow: Dataflow, difference: str, needed: int, batch: int) -> None:
    label = flow.labels[-1]
    node = findings.node(operation.path)
    graph = next(
        (placed.graph for placed in find_edges(findings.built) if placed.edge.label == label), node.graph
    )  # fmt: skip
    for name in streaming_labels(findings.built) & set(flow.labels):
        findings.claim(stream_claim(name), REFUTED, difference)
    whole = {"edge": label, "graph": graph, "set": {"mode": "blocking"}, "remove": ["chunks", "lookahead", "axis"]}
    if needed:
        enough = needed < flow.target_chunks - 1
        findings.add(
            "streaming-lookahead", operation.path, label,
            f"write lookahead: {needed} on edge '{label}'" if enough else f"write mode: blocking on edge '{label}'",
            {"edge": label, "graph": graph, "set": {"lookahead": needed}} if enough else whole,
            declared=flow.lookahead, needed=needed, difference=difference, batch=batch,
            how="changing a later chunk of the input changes an earlier chunk of the output on the whole value",
        )  # fmt: skip
        return
    findings.add(
        "streaming-differs", operation.path, label,
        f"write mode: blocking on edge '{label}', or keep what '{node.name}' needs of earlier chunks in a declared "
        "state", whole, difference=difference, batch=batch, chunks=flow.target_chunks,
        how="one call on the whole value gives something else than calls on its chunks, joined",
    )  # fmt: skip


def _whole_differs(loaded: Loaded, tape: Tape, batch: int, path: str) -> tuple[str, int, list[str]] | None:
    """Return (difference, by how many chunks an output depends on later ones, through which ports), or None."""
    case = _set_up(loaded, tape, batch, path)
    axis = case.runner.axis
    before = {instance: thaw(data) for instance, data in tape.before[batch, path].items() if data is not None}
    whole = _joined(case.runner, case.runner.run_cut(case.whole, {}, case.first), axis)
    want = _joined(case.runner, case.made, axis)
    difference: Difference | None = next(
        (found for port in want if (found := compare(want[port], whole[port], f"output '{port}'")) is not None
         and not found.bits_only), None,
    )  # fmt: skip
    if difference is None:
        found = states_differ(tape, tape.calls[batch, path], case.store)
        difference = None if found is None or found.bits_only else found
        return None if difference is None else (str(difference), 0, [])
    num_chunks = max(len(chunks) for chunks in case.chunks.values())
    if len(case.made) != num_chunks:
        return str(difference), 0, []
    sizes = [{port: length(part[port], axis) or 0 for port in part} for part in case.made]
    needed, culprits = 0, []
    chosen = sorted({*range(max(1, num_chunks - MAX_PERTURBED), num_chunks)})
    for port, chunks in case.chunks.items():
        for late in chosen:
            changed = [perturb(chunk) if index == late else chunk for index, chunk in enumerate(chunks)]
            case.store.clear()
            case.store.update({name: thaw(_again(tape, batch, path, name)) for name in before
                               if name in tape.touched(path)})  # fmt: skip
            given = {**case.whole, port: join(changed, case.runner.streamed_inputs[port].axis)}
            try:
                other = _joined(case.runner, case.runner.run_cut(given, {}, case.first), axis)
            except Exception:  # noqa: BLE001 - user code may refuse a strange value; another chunk may do
                continue
            first = _first_changed(whole, other, sizes, axis)
            if first is not None and first < late:
                needed = max(needed, late - first)
                culprits.append(port)
    return str(difference), needed, sorted(set(culprits))


def _again(tape: Tape, batch: int, path: str, instance: str) -> bytes:
    data = tape.before[batch, path][instance]
    assert data is not None, f"state '{instance}' was copied once"
    return data


def _first_changed(
    whole: Mapping[str, Any], other: Mapping[str, Any], sizes: Sequence[Mapping[str, int]], axis: int
) -> int | None:
    """Return the first chunk of the outputs that differs."""
    from flashrt.ir.values import cut

    earliest: int | None = None
    for port, value in whole.items():
        start = 0
        for number, size in enumerate(sizes):
            stop = start + size[port]
            if size[port] and length(other[port], axis) == length(value, axis):
                found = compare(cut(value, start, stop, axis), cut(other[port], start, stop, axis))
                if found is not None and not found.bits_only:
                    earliest = number if earliest is None else min(earliest, number)
                    break
            start = stop
    return earliest


def _check_lookahead(
    loaded: Loaded,
    tape: Tape,
    findings: Findings,
    operation: Operation,
    flows: Sequence[Dataflow],
    batches: Sequence[int],
) -> None:
    """An operation that is given just its window cannot depend on more; whether it uses the window is looked at."""
    path = operation.path
    for flow in flows:
        for label in streaming_labels(findings.built) & set(flow.labels):
            findings.claim(
                stream_claim(label), CONFIRMED,
                f"'{path}' was given chunks up to {flow.lookahead} later ones and no more, also alone; its result on "
                "the whole is not comparable, because it is called on windows",
            )  # fmt: skip
        if not flow.lookahead:
            continue
        try:
            used = any(
                in_fork(functools.partial(_uses_window, loaded, tape, batch, path, flow), loaded.timeout_s)
                for batch in batches
            )
        except (ForkFailedError, LookupError) as error:
            findings.skip(f"whether '{path}' uses its look-ahead", str(error))
            continue
        if not used:
            label = flow.labels[-1]
            graph = next((p.graph for p in find_edges(findings.built) if p.edge.label == label), "")
            findings.add(
                "lookahead-unused", path, label, f"write lookahead: 0 on edge '{label}', so that outputs come earlier",
                {"edge": label, "graph": graph, "set": {"lookahead": 0}}, declared=flow.lookahead,
                batches=len(batches), how="changing the later chunks of each window changed no output",
            )  # fmt: skip


def _uses_window(loaded: Loaded, tape: Tape, batch: int, path: str, flow: Dataflow) -> bool:
    case = _set_up(loaded, tape, batch, path)
    windows: dict[str, list[Any]] = {}
    for port, chunks in case.chunks.items():
        own = case.runner.streamed_inputs[port]
        windows[port] = [
            join([perturb(chunk) if later and port == flow.target_port else chunk
                  for later, chunk in enumerate(chunks[number : number + own.lookahead + 1])], own.axis)
            for number in range(len(chunks))
        ]  # fmt: skip
    made = case.runner.run_cut(case.whole, windows, case.first)
    want = _joined(case.runner, case.made, case.runner.axis)
    got = _joined(case.runner, made, case.runner.axis)
    return any(compare(want[port], got[port]) is not None for port in want)


def find_streamable(loaded: Loaded, tape: Tape, findings: Findings, batches: Sequence[int]) -> None:
    """Find blocking edges whose consumer gives the same when it is fed chunk by chunk."""
    edges: dict[str, list[PlacedEdge]] = {}
    for placed in find_edges(findings.built):
        if placed.edge.mode == "streaming" or not judge_stream(findings.built, placed)[0]:
            continue
        targets = {flow.target for flow in placed.flows if flow.source != INPUT and not flow.prologue} - {OUTPUT}
        if len(targets) == 1:
            edges.setdefault(next(iter(targets)), []).append(placed)
    for path, candidates in edges.items():
        ports = {flow.target_port: placed for placed in candidates for flow in placed.flows if flow.target == path}
        if tape.flat.by_path[path].opaque or _streams_in(loaded, path):
            continue
        tries = [list(ports)] + ([[port] for port in ports] if len(ports) > 1 else [])
        for chosen in tries[:HINT_CHUNKS]:
            try:
                counts = [in_fork(functools.partial(_in_chunks, loaded, tape, batch, path, chosen), loaded.timeout_s)
                          for batch in batches]  # fmt: skip
            except (ForkFailedError, LookupError):
                # An op that refuses chunks needs the whole: that is what the document says.
                continue
            if counts and all(counts):
                _hint(findings, path, [ports[port] for port in chosen], min(counts), len(batches))
                break


def _streams_in(loaded: Loaded, path: str) -> bool:
    """Return whether an operation has streaming inputs already."""
    return any(flow.target_chunks > 1 for flow in loaded.flat.incoming.get(path, ()))


def _in_chunks(loaded: Loaded, tape: Tape, batch: int, path: str, ports: Sequence[str]) -> int:
    """Return into how many chunks the ports' values were cut with the same result, or 0."""
    case = _set_up(loaded, tape, batch, path)
    lengths = [length(case.whole[port]) or 0 for port in ports]
    count = min([HINT_CHUNKS, *lengths])
    if count < 2 or not case.runner.needed:
        return 0
    made = case.runner.run_cut(case.whole, {port: split(case.whole[port], count) for port in ports}, case.first, axis=0)
    got, want = _joined(case.runner, made, 0), _joined(case.runner, case.made, case.runner.axis)
    same = all(compare(want[port], got[port]) is None for port in want)
    return count if same and states_differ(tape, tape.calls[batch, path], case.store) is None else 0


def _hint(findings: Findings, path: str, edges: Sequence[PlacedEdge], count: int, num_batches: int) -> None:
    for placed in edges:
        label = placed.edge.label
        others = [edge.edge.label for edge in edges if edge is not placed]
        findings.add(
            "could-stream", path, label,
            f"write mode: streaming, chunks: {count} on edge '{label}'"
            + (f" (together with {', '.join(others)})" if others else ""),
            {"edge": label, "graph": placed.graph, "set": {"mode": "streaming", "chunks": count}}, chunks=count,
            batches=num_batches, together_with=others, how="its consumer's results on chunks, joined, equal the whole",
        )  # fmt: skip
