"""From stretches of work to an operation's times, warm-up and fits: pure."""

from __future__ import annotations

from typing import Any

import pytest

from flashrt.bench.profile_times import MIN_WARMUP, busy_ns, operation_times, relative_spread, warmup_end
from flashrt.bench.profile_transfer import fit


@pytest.mark.parametrize(
    ("ranks", "want"),
    [
        # One rank, in one go; two that overlap: from the first beginning to the last end.
        ([[(0, 10)]], 10),
        ([[(0, 10)], [(5, 40)]], 40),
        # The second rank begins late: the group is held meanwhile.
        ([[(0, 10)], [(12, 20)]], 20),
        # A rank that waits within the operation for a value from elsewhere.
        ([[(0, 1), (50, 60)]], 11),
        ([[(0, 1), (50, 60)], [(49, 70)]], 22),
        # Another rank works while it waits.
        ([[(0, 1), (50, 60)], [(0, 55)]], 60),
        ([[], [(3, 4)]], 1),
    ],
)
def test_a_group_is_busy_from_the_first_beginning_to_the_last_end(ranks: Any, want: int) -> None:
    assert busy_ns(ranks) == want
    assert busy_ns(reversed(ranks)) == want


def span(name: str, worker: str, device: str, start_ms: float, end_ms: float, batch: int = 0) -> dict[str, Any]:
    return {
        "kind": "span", "name": name, "worker": worker, "device": device, "batch": batch,
        "start_ns": int(start_ms * 1e6), "end_ns": int(end_ms * 1e6),
    }  # fmt: skip


def test_ranks_are_told_apart_by_worker_even_on_one_device() -> None:
    spans = [span("a", "g", "cpu-0", 0, 1), span("a", "g#1", "cpu-0", 0, 7), span("a", "g", "cpu-0", 10, 12, batch=1)]
    assert [one.time_ms for one in operation_times(spans)["a"]] == [7, 2]


def test_another_group_s_work_on_the_same_device_disturbs_and_on_another_does_not() -> None:
    spans = [
        span("a", "g", "cpu-0", 0, 10), span("a", "g#1", "cpu-1", 0, 10), span("b", "h", "cpu-0", 5, 8),
        span("c", "i", "cpu-2", 0, 10),
    ]  # fmt: skip
    found = operation_times(spans)
    assert {path: samples[0].disturbed_by for path, samples in found.items()} == {"a": "b", "b": "a", "c": None}
    after = [span("a", "g", "cpu-0", 0, 10), span("b", "h", "cpu-0", 10, 18)]
    assert all(samples[0].disturbed_by is None for samples in operation_times(after).values())


@pytest.mark.parametrize(
    ("times", "want"),
    [
        ([10.0] * 12, (MIN_WARMUP, True)),
        ([900.0] + [10.0] * 11, (MIN_WARMUP, True)),
        ([900.0, 500.0, 200.0, 90.0, 50.0] + [10.0] * 11, (5, True)),
        # Slow again after a first good batch: three in a row have to be steady.
        ([10.0, 10.0, 10.0, 10.0, 90.0, 10.0] + [10.0] * 10, (5, True)),
        # It never becomes steady: half is cut, and that is said.
        ([float(2**index) for index in range(12)], (6, False)),
        ([50.0] * 6 + [10.0] * 3, (4, False)),
        ([1.0, 1.0, 1.0], (0, True)),
    ],
)
def test_batches_are_cut_until_three_in_a_row_are_steady(times: list[float], want: tuple[int, bool]) -> None:
    assert warmup_end(times) == want


def test_the_spread_is_the_interquartile_range_over_the_median() -> None:
    assert relative_spread([8.0, 9.0, 10.0, 11.0, 12.0]) == pytest.approx(0.2)
    assert relative_spread([0.0, 0.0]) == 0.0


def test_latency_and_bandwidth_are_fitted_and_the_error_is_said() -> None:
    sizes = (1 << 10, 1 << 16, 1 << 20, 1 << 24)
    latency, bandwidth, error = fit({size: 0.25 + size / 8e6 for size in sizes})
    assert (latency, bandwidth, error) == (pytest.approx(0.25), pytest.approx(8.0), pytest.approx(0.0, abs=1e-9))
    worse = {size: 0.25 + size / 8e6 for size in sizes} | {1 << 20: 1.0}
    assert fit(worse)[2] > 0.1
    # Times that do not grow with the size tell no bandwidth; none is made up.
    assert (
        fit(dict.fromkeys(sizes, 0.5)) == (pytest.approx(0.5), None, pytest.approx(0.0, abs=1e-9))
        or (fit(dict.fromkeys(sizes, 0.5))[1] or 1e9) > 1e6
    )
