"""Which points of a front are worth showing, and which streaming edges the search did not try to run whole."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction

from flashrt.analysis.cost import to_ms
from flashrt.analysis.search.layout import Found
from flashrt.analysis.search.model import MAX_BLOCKING_CHOICES, blocking_variants
from flashrt.analysis.search.result import LeftOut
from flashrt.analysis.structure import find_edges
from flashrt.errors import listed
from flashrt.ir import BuiltProgram


def thin_front(found: Sequence[Found], min_gain: float) -> tuple[list[Found], list[LeftOut]]:
    """Return the points to keep, and those for which one that is kept stands.

    A point is left out only where one that is kept has at most `min_gain` (a share) more period and more latency. Taken
    by their product of period and latency, the least first, a point that is much better in one figure is kept before
    those that are slightly better in the other.
    """
    share = 1 + Fraction(str(min_gain))
    instead: dict[int, int] = {}
    kept: list[int] = []
    for index in sorted(range(len(found)), key=lambda i: (found[i].period * found[i].latency, found[i].period)):
        point = found[index]
        covering = [
            other
            for other in kept
            if found[other].period <= point.period * share and found[other].latency <= point.latency * share
        ]
        if covering:
            instead[index] = covering[0]
        else:
            kept.append(index)
    kept.sort()
    left = [_left_out(found[index], found[other], kept.index(other)) for index, other in sorted(instead.items())]
    return [found[index] for index in kept], left


def _left_out(point: Found, other: Found, place: int) -> LeftOut:
    return LeftOut(
        to_ms(point.period), to_ms(point.latency), point.placement.num_devices, place,
        _percent(other.period, point.period), _percent(other.latency, point.latency),
    )  # fmt: skip


def _percent(new: Fraction, old: Fraction) -> float:
    return round(float(new / old - 1) * 100, 6) if old else 0.0


def untried_edges(built: BuiltProgram) -> list[str]:
    """Return the streaming edges that might be better run whole, and that the search leaves streaming.

    It tries at most `MAX_BLOCKING_CHOICES` of them: those whose consumer's own outputs are cut into other chunks.
    """
    tried = {label for variant in blocking_variants(built) for label in variant}
    if len(tried) < MAX_BLOCKING_CHOICES:
        return []
    streaming = {placed.edge.label for placed in find_edges(built) if placed.edge.mode == "streaming"}
    worth: set[str] = set()
    for path, flows in built.flat.incoming.items():
        taken = {flow.target_chunks for flow in flows} - {1}
        made = {flow.source_chunks for flow in built.flat.outgoing.get(path, ())} - {1}
        if taken and made and taken != made:
            worth |= {label for flow in flows for label in flow.labels if label in streaming}
    return sorted(worth - tried)


def scope_of(untried: Sequence[str]) -> str | None:
    """Return which deployments were searched, where some streaming edges were not tried whole."""
    if not untried:
        return None
    return f"among deployments in which {listed(untried)} stream{'s' if len(untried) == 1 else ''}"


def untried_note(untried: Sequence[str]) -> str:
    """Return what to say of streaming edges that were not tried whole, and what to do about it."""
    return (
        f"at most {MAX_BLOCKING_CHOICES} streaming edges are tried whole as well; {listed(untried)} "
        f"{'was' if len(untried) == 1 else 'were'} searched streaming only: where that may be worse, write "
        "mode: blocking into the program and plan again"
    )
