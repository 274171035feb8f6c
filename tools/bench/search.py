"""The smallest period that a system sustains: bisection, each period decided by a sequential test of its offset.

Source: Jennison & Turnbull (2000), "Group sequential methods", chapter 2, looks that share the chance of an error. The
slope is that of block means, so that neighbours' correlation is in the noise that it is compared with.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal

import numpy as np

from flashrt.bench.drive import Recorder, completed_ns, open_loop, windowed
from flashrt.bench.process import SystemProcess
from flashrt.bench.scenarios import NOISE_MS, completions_ns, drift_ms, grows, paced
from flashrt.bench.settings import RunSettings
from flashrt.clock import monotonic_ns
from flashrt.errors import input_error

CONFIDENCE = 0.95
# After how many batches a period may be decided; each look takes an equal part of the chance of an error.
LOOKS = (12, 18, 27, 40, 60, 90)
NUM_BLOCKS = 6
SKIPPED = 2
MAX_GROWTH_SHARE = 0.005
RESOLUTION = 1.01
WINDOW = 8
FIRST_STEP = 1.01
NEXT_STEP = 1.04
LOWER_STEP = 0.985
MAX_PROBES = 12
MAX_FINAL_TRIES = 3
MIN_LOOK_MS = 5.0

Verdict = Literal["sustained", "grows", "undecided"]


@dataclass(frozen=True)
class Decision:
    """One period, what was decided of it, and on what evidence.

    Attributes
    ----------
    growth_ms
        Interval of the offset's growth a batch, as wide as the look's share of the error asks for.
    limit_ms
        What it was compared with.
    """

    period_ms: float
    verdict: Verdict
    growth_ms: tuple[float, float]
    limit_ms: float
    num_batches: int
    looks: int

    @property
    def seems_sustained(self) -> bool:
        """Whether it is sustained, or at least the best guess of its growth is no more than noise."""
        low, high = self.growth_ms
        guess = (low + high) / 2 if math.isfinite(low + high) else 0.0
        undecided = self.verdict == "undecided" and (guess <= self.limit_ms or guess * self.num_batches <= NOISE_MS)
        return self.verdict == "sustained" or undecided


@dataclass(frozen=True)
class Bracket:
    """Between which periods the smallest sustainable one lies, and how that was found.

    Attributes
    ----------
    grows_ms
        The largest period whose offset was seen to grow.
    sustained_ms
        The smallest that is sustained, as far as the search could see.
    """

    grows_ms: float | None
    sustained_ms: float | None
    decisions: tuple[Decision, ...]
    ended: str

    @property
    def next_ms(self) -> float:
        """The period to measure at: the smallest that is sustained, else a step above the largest that was tried."""
        if self.sustained_ms is not None:
            return self.sustained_ms
        return max(one.period_ms + max(one.growth_ms[0], 0.0) for one in self.decisions) * NEXT_STEP


def growth_interval(latencies_ms: np.ndarray, error: float) -> tuple[float, float]:
    """Return the interval of a latency's growth a batch, at a two-sided chance of error.

    Slope of the means of six equal blocks. Its error is the larger of two: that of a latency that scatters around a
    line, and that of one that wanders, as a queue's does near its limit, from the steps between blocks (of a random
    walk, neighbouring steps have a correlation of 1/4, so that their mean varies 1.4 times as much). Student's t.
    """
    from scipy import stats

    size = len(latencies_ms) // NUM_BLOCKS
    if size == 0:
        return -math.inf, math.inf
    # What does not fill the blocks is left out at the begin, where a pipeline still fills.
    means = np.asarray(latencies_ms[-size * NUM_BLOCKS :], float).reshape(NUM_BLOCKS, size).mean(axis=1)
    steps = (np.arange(NUM_BLOCKS) - (NUM_BLOCKS - 1) / 2) * size
    growth = float(steps @ means / (steps @ steps))
    left_over = means - means.mean() - growth * steps
    scatter = math.sqrt(float(left_over @ left_over) / (NUM_BLOCKS - 2) / float(steps @ steps))
    wander = math.sqrt(1.4 * float(np.diff(means).var(ddof=1)) / (NUM_BLOCKS - 1)) / size
    width = float(stats.t.ppf(1 - error / 2, NUM_BLOCKS - 2)) * max(scatter, wander)
    return growth - width, growth + width


def decide_growth(latencies_ms: np.ndarray, period_ms: float, looks: int) -> Decision:
    """Return what the latencies so far decide of a period at look number `looks`.

    ``sustained``: the growth is below `MAX_GROWTH_SHARE` of the period; ``grows``: above, and by more than the clock's
    noise. All looks together err with a chance of 1 - `CONFIDENCE`.
    """
    used = np.asarray(latencies_ms[SKIPPED:], float)
    low, high = growth_interval(used, (1 - CONFIDENCE) / len(LOOKS))
    limit = MAX_GROWTH_SHARE * period_ms
    verdict: Verdict = "undecided"
    if low > limit and low * len(used) > NOISE_MS:
        verdict = "grows"
    elif high < limit:
        verdict = "sustained"
    return Decision(period_ms, verdict, (low, high), limit, len(latencies_ms), looks)


def bisect(probe: Callable[[float], Decision], begin_ms: float, may_go_on: Callable[[float], bool]) -> Bracket:
    """Return the bracket of the smallest sustainable period.

    Parameters
    ----------
    probe
        Decides one period. What stays undecided is no evidence that the offset grows.
    begin_ms
        The period of the saturated system: the search begins a little above.
    may_go_on
        Whether the budget allows to probe a period.
    """
    # `below` steers: undecided periods count there too, as the bracket's end only those that were seen to grow.
    below: float | None = None
    high: float | None = None
    grown: float | None = None
    decisions: list[Decision] = []
    period_ms, ended = begin_ms * FIRST_STEP, "resolution"
    while high is None or grown is None or below is None or high / below > RESOLUTION:
        # One probe is always made: without it there is nothing to say.
        if decisions and (len(decisions) >= MAX_PROBES or not may_go_on(period_ms)):
            ended = "budget"
            break
        decision = probe(period_ms)
        decisions.append(decision)
        # An undecided period is good enough to begin with, as the measured part tests it again; not to go lower.
        if decision.verdict == "sustained" or (high is None and decision.seems_sustained):
            high = period_ms
            below = below if below is not None and below < high else None
        else:
            below = max(below or 0.0, period_ms)
        if decision.verdict == "grows":
            grown = max(grown or 0.0, period_ms)
        if high is None:
            # What the offset grew by is missing from the period.
            missing = max(decision.growth_ms[0], 0.0) if math.isfinite(decision.growth_ms[0]) else 0.0
            period_ms = max(period_ms * NEXT_STEP, (period_ms + missing) * FIRST_STEP)
        elif below is not None and high / below > RESOLUTION:
            period_ms = math.sqrt(below * high)
        else:
            period_ms = min(one.period_ms for one in decisions) * LOWER_STEP
    return Bracket(grown, high, tuple(decisions), ended)


@dataclass
class Search:
    """What the search needs of the run that it is part of."""

    process: SystemProcess
    items: Sequence[Mapping[str, Any]]
    per_batch: Mapping[str, float] | None
    settings: RunSettings
    recorder: Recorder
    first: int = field(init=False)

    def __post_init__(self) -> None:
        self.first = len(self.recorder.sent_ns)

    @property
    def left(self) -> Sequence[Mapping[str, Any]]:
        """The items that were not sent yet."""
        return self.items[len(self.recorder.sent_ns) - self.first :]

    def saturated_ms(self) -> float:
        """Keep the system saturated for a while, and return the period at which batches come."""
        begin = len(self.recorder.sent_ns)
        # A fast system must not use up its items here: the open-loop part needs most of them.
        supply = self.items[: max(len(self.items) // 4, WINDOW + 3)]
        until_ns = monotonic_ns() + int(self.settings.duration_s / 3 * 1e9)
        windowed(self.process, supply, self.per_batch, WINDOW, self.settings.timeout_s, until_ns, self.recorder)
        completions = completions_ns(self.recorder, begin)
        if len(completions) < 3:
            raise input_error(
                f"system '{self.process.system.reference}', scenario 'max_rate'",
                "at least 3 batches in the saturated phase", f"{len(completions)}", "raise duration_s",
                rule="too-short",
            )  # fmt: skip
        # The first completions still fill the pipeline; the rest come at the system's own pace.
        tail = completions[min(2, len(completions) - 2) :]
        return float(tail[-1] - tail[0]) / (len(tail) - 1) / 1e6

    def probe_batches(self) -> int:
        """Return how many items a probe may take, so that the measured part keeps most; 0 for too few."""
        share = len(self.left) // 6
        return min(share, LOOKS[-1]) if share >= LOOKS[0] else 0

    def probe(self, period_ms: float) -> Decision:
        """Send items at a period until the test has decided, or the probe's items are used up."""
        count = self.probe_batches()
        looks = [look for look in LOOKS if look <= count] or [count]
        begin, start = monotonic_ns() + int(period_ms * 1e6), len(self.recorder.sent_ns)
        due = [begin + int(index * period_ms * 1e6) for index in range(count)]
        decisions: list[Decision] = []

        def is_decided(num_sent: int) -> bool:
            # At shorter periods a look would hold up the next item: the probe is short anyhow, one look is enough.
            if num_sent not in looks or period_ms < MIN_LOOK_MS:
                return False
            decisions.append(self._look(start, due, period_ms, len(decisions) + 1))
            return decisions[-1].verdict != "undecided"

        open_loop(
            self.process, self.left[:count], self.per_batch, due, self.settings.timeout_s, self.recorder, is_decided
        )
        if decisions and decisions[-1].verdict != "undecided":
            return decisions[-1]
        return self._look(start, due, period_ms, len(decisions) + 1)

    def _look(self, start: int, due: Sequence[int], period_ms: float, number: int) -> Decision:
        completed = completed_ns(self.recorder, self.per_batch)[start:]
        latencies = (completed - np.asarray(due[: len(completed)])) / 1e6
        return decide_growth(latencies, period_ms, number)


def search_rate(
    process: SystemProcess,
    items: Sequence[Mapping[str, Any]],
    per_batch: Mapping[str, float] | None,
    settings: RunSettings,
    recorder: Recorder,
) -> tuple[int, float, dict[str, Any]]:
    """Find the smallest period with a finite offset, and measure at it.

    First the system is kept saturated, which says where to look; then periods are bisected, each until it is decided;
    then items come at the smallest one that is sustained, for two thirds of the duration. The search as a whole may
    take as long as the measured part is asked to.

    Returns
    -------
    (first batch of the measured part, its period in ms, figures of the search)
    """
    search = Search(process, items, per_batch, settings, recorder)
    saturated_ms = search.saturated_ms()
    until_ns = monotonic_ns() + int(settings.duration_s * 1e9)

    def may_go_on(period_ms: float) -> bool:
        least_ns = LOOKS[0] * period_ms * 1e6
        return search.probe_batches() > 0 and monotonic_ns() + least_ns < until_ns

    if search.probe_batches():
        bracket = bisect(search.probe, saturated_ms, may_go_on)
        period_ms = bracket.next_ms
    else:
        bracket = Bracket(None, None, (), "items")
        period_ms = saturated_ms * FIRST_STEP
    for attempt in range(1, MAX_FINAL_TRIES + 1):
        start = len(recorder.sent_ns)
        # What is left must do for another try.
        share = search.left if attempt == MAX_FINAL_TRIES else search.left[: max(len(search.left) * 2 // 3, 8)]
        paced(process, share, per_batch, period_ms, settings, recorder, settings.duration_s * 2 / 3)
        completions = completions_ns(recorder, start)
        drift = drift_ms(completions, period_ms)
        finite = not grows(drift, period_ms, len(completions))
        if finite or len(search.left) <= LOOKS[0]:
            break
        bracket = replace(bracket, grows_ms=period_ms, sustained_ms=None)
        period_ms = max(period_ms * NEXT_STEP, (period_ms + drift) * FIRST_STEP)
    return start, period_ms, _figures(bracket, saturated_ms, period_ms, attempt, drift, finite)


def _figures(
    bracket: Bracket, saturated_ms: float, period_ms: float, attempt: int, drift: float, finite: bool
) -> dict[str, Any]:
    return {
        "saturated_period_ms": saturated_ms,
        "tries": len(bracket.decisions) + attempt - 1,
        "drift_ms": drift,
        "finite": finite,
        # Unknown ends stay open.
        "bracket_ms": [bracket.grows_ms, period_ms if finite else None],
        "confidence": CONFIDENCE,
        "ended": bracket.ended,
        "decisions": [asdict(one) for one in bracket.decisions],
    }
