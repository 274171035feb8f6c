"""Period, latency and action-to-visible latency of a constraint graph, exactly, in ticks."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fractions import Fraction

from flashrt.analysis.constraints import Arc, Constraints
from flashrt.analysis.ratio import CycleRatio, Walks, longest_walks, max_cycle_ratio, sort_arcs
from flashrt.errors import Finding, InputError


@dataclass(frozen=True)
class Visible:
    """The frame that is latest against its schedule, and how late it is, in ticks."""

    d0: Fraction
    output: str
    frame: int
    part: int


@dataclass(frozen=True)
class Figures:
    """What a constraint graph sustains; times in ticks."""

    ratio: CycleRatio
    latency: Fraction
    """From the batch being ready to its last output, at the smallest period."""
    latency_part: int | None
    first_output: Fraction
    """From the batch being ready to the first chunk of the main output, at the smallest period."""
    by_output: dict[str, tuple[Fraction, Fraction]]
    """Output -> when its first chunk and its last are there, from the batch being ready, at the smallest period."""
    visible: Visible
    """At the smallest period."""

    @property
    def rank(self) -> tuple[Fraction, Fraction, Fraction]:
        """What the best order minimises: the period, then the latency, then d0."""
        return (self.ratio.ratio, self.latency, self.visible.d0)


def num_frames(constraints: Constraints, frames_per_batch: int | None) -> int:
    """Return N; where nobody says it, every chunk of the output with most chunks counts as a frame."""
    return frames_per_batch or max((len(output.parts) for output in constraints.outputs), default=1)


def releasing_chunk(frame: int, num_chunks: int, frames: int) -> int:
    """Return the chunk whose completion shows a frame: ⌊k·c/N⌋, or the frame's last where it spans several."""
    if frames >= num_chunks:
        return frame * num_chunks // frames
    return -(-(frame + 1) * num_chunks // frames) - 1


def first_frames(num_chunks: int, frames: int) -> Iterable[int]:
    """Return the first frame that each chunk releases: the later ones of a chunk are due later and come with it."""
    if frames < num_chunks:
        return range(frames)
    return (-(-chunk * frames // num_chunks) for chunk in range(num_chunks))


def completion(constraints: Constraints, walks: Walks, part: int) -> Fraction:
    """Return ℓ_T of a part: the longest walk from an entry to it, its own time included, in ticks."""
    value = walks.values[part]
    assert value is not None, "every operation is an entry or follows one"
    return Fraction(value, walks.scale) + constraints.times[part]


def visible_latency(constraints: Constraints, walks: Walks, period: Fraction, frames: int) -> Visible:
    """Return d0 = max over outputs and frames k of T + ℓ_T(o(k)) − k·T/N.

    *Source*: ``spec/cost-model.md``, "Going past the bounds".
    """
    best = Visible(Fraction(0), "", 0, -1)
    for output in constraints.outputs:
        for frame in first_frames(len(output.parts), frames):
            part = output.parts[releasing_chunk(frame, len(output.parts), frames)]
            late = period + completion(constraints, walks, part) - frame * period / frames
            if best.part < 0 or late > best.d0:
                best = Visible(late, output.label, frame, part)
    return best


def find_figures(constraints: Constraints, arcs: Sequence[Arc], frames_per_batch: int | None) -> Figures:
    """Return the figures of H = constraints + resource arcs, which must be free of cycles of height 0."""
    num_parts = len(constraints.parts)
    numbers = sort_arcs(num_parts, arcs)
    ratio = max_cycle_ratio(num_parts, arcs, numbers)
    walks = longest_walks(num_parts, arcs, constraints.entries, ratio.ratio, numbers)
    assert walks is not None, "there is no positive cycle at the largest cycle ratio"
    ends = {output.parts[-1]: completion(constraints, walks, output.parts[-1]) for output in constraints.outputs}
    by_output = {
        output.label: (completion(constraints, walks, output.parts[0]), ends[output.parts[-1]])
        for output in constraints.outputs
    }
    # The main output, as a benchmark run chooses it: frames before samples before tokens; else what comes last.
    main = max(constraints.outputs, key=lambda output: (output.num_axes, ends[output.parts[-1]]), default=None)
    latest = max(ends, key=lambda part: ends[part], default=None)
    return Figures(
        ratio,
        ends[latest] if latest is not None else Fraction(0),
        latest,
        by_output[main.label][0] if main is not None else Fraction(0),
        by_output,
        visible_latency(constraints, walks, ratio.ratio, num_frames(constraints, frames_per_batch)),
    )


def deadlock_error(constraints: Constraints, arcs: Sequence[Arc], cycle: Sequence[int]) -> InputError:
    """Return the error that names a cycle of height 0."""
    steps = [f"{constraints.label(arcs[n].source)} -[{arcs[n].cause}]->" for n in cycle]
    text = " ".join([*steps, constraints.label(arcs[cycle[0]].source)])
    devices = sorted({arcs[n].cause for n in cycle if arcs[n].kind == "device"})
    return InputError(
        Finding(
            f"deployment, order ({', '.join(devices)})", "orders that agree with the dataflow",
            f"a deadlock, each waiting for the one before: {text}",
            "swap the operations on one of these devices, or leave out 'order' and 'interleave' to have the best found",
            rule="deadlock",
        )
    )  # fmt: skip
