"""Element-wise comparison: what differs is named by output, position and batch."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from flashrt.bench.equality import Tolerance, compare_output
from flashrt.errors import InputError
from flashrt.runtime.wire import Tensor

BIT = Tolerance()
NUMERIC = Tolerance("numeric")


def stream(num_batches: int = 8, per_batch: int = 3) -> list[np.ndarray]:
    generator = np.random.default_rng(0)
    return [generator.standard_normal((per_batch, 4, 4)).astype(np.float32) for _ in range(num_batches)]


def compare(want: list[Any], got: list[Any], tolerance: Tolerance = BIT, **more: Any) -> Any:
    return compare_output("frames", want, got, tolerance, 8, **more)


def test_the_same_stream_in_other_pieces_is_equal() -> None:
    whole = np.concatenate(stream())
    assert compare(stream(), [whole]).equal
    assert compare(stream(), list(np.split(whole, 24))).equal


def test_one_changed_value_is_named_by_position_and_batch() -> None:
    changed = stream()
    changed[4][2, 1, 3] += 1e-6
    result = compare(stream(), changed)
    assert not result.equal
    assert result.mismatched == 1
    assert result.first_mismatch.position == [14, 1, 3]
    assert result.first_mismatch.batch == 4
    assert "output 'frames' differs first at [14, 1, 3] (batch 4)" in result.reasons[0]


def test_a_dropped_frame_is_named_as_lost() -> None:
    got = np.delete(np.concatenate(stream()), 7, axis=0)
    result = compare(stream(), [got])
    assert not result.equal
    assert any("element 7 (batch 2) is lost" in reason for reason in result.reasons)
    assert any("got 23 (too few)" in reason for reason in result.reasons)


def test_a_frame_dropped_at_the_end_is_found() -> None:
    result = compare(stream(), [np.concatenate(stream())[:-1]])
    assert not result.equal
    assert result.first_mismatch.position == [23]
    assert result.first_mismatch.got == "end of stream"


def test_repeated_and_reordered_frames_are_named() -> None:
    whole = np.concatenate(stream())
    repeated = whole.copy()
    repeated[5] = repeated[4]
    assert any("element 4 is repeated at 5" in reason for reason in compare(stream(), [repeated]).reasons)
    swapped = whole.copy()
    swapped[[8, 9]] = swapped[[9, 8]]
    assert any("reordered" in reason for reason in compare(stream(), [swapped]).reasons)
    assert any("too many" in r for r in compare(stream(), [np.concatenate([whole, whole[:1]])]).reasons)


@pytest.mark.parametrize("tolerance", [BIT, NUMERIC])
def test_zeros_and_nothing_never_pass(tolerance: Tolerance) -> None:
    zeros = [np.zeros_like(part) for part in stream()]
    tiny = [part * np.float32(1e-6) for part in stream()]
    assert not compare(stream(), zeros, tolerance).equal
    assert not compare(tiny, zeros, tolerance).equal
    assert not compare(stream(), [], tolerance).equal


def test_numeric_tolerance_is_relative_to_the_scale() -> None:
    near = [part * np.float32(1 + 1e-7) for part in stream()]
    far = [part * np.float32(1 + 1e-3) for part in stream()]
    assert not compare(stream(), near).equal
    assert compare(stream(), near, NUMERIC).equal
    assert not compare(stream(), far, NUMERIC).equal
    assert compare(stream(), far, Tolerance("numeric", 1e-2)).equal


def test_nan_never_matches() -> None:
    broken = stream()
    broken[3][0, 0, 0] = np.nan
    for tolerance in (BIT, NUMERIC):
        assert not compare(stream(), broken, tolerance).equal
        both = compare(broken, [part.copy() for part in broken], tolerance)
        assert not both.equal
        assert "NaN" in " ".join(both.reasons)


def test_signed_zero_differs_bit_for_bit() -> None:
    assert not compare([np.zeros((8, 1), np.float32)], [-np.zeros((8, 1), np.float32)]).equal


def test_another_type_or_element_shape_differs() -> None:
    assert "float64" in compare(stream(), [part.astype(np.float64) for part in stream()]).reasons[0]
    assert "[4, 2]" in compare(stream(), [part[:, :, :2] for part in stream()]).reasons[0]
    assert not compare([Tensor("float32", stream()[0])], [stream()[0]]).equal


def test_bfloat16_is_compared_as_numbers() -> None:
    bits = np.arange(0x3F80, 0x3F80 + 8, dtype=np.uint16)
    off = bits.copy()
    off[3] += 1
    result = compare([Tensor("bfloat16", bits)], [Tensor("bfloat16", off)])
    assert result.mismatched == 1
    assert result.max_abs == pytest.approx(2**-7)
    assert compare([Tensor("bfloat16", bits)], [Tensor("bfloat16", off)], NUMERIC).equal


@pytest.mark.parametrize(
    ("want", "got"),
    [
        (["ab", "cd"], ["ab", "ce"]),
        (["ab"], ["abc"]),
        ([b"ab"], [b"ac"]),
        ([1, 2, 3], [1, 2, 4]),
        ([{"a": np.zeros(3), "b": "x"}], [{"a": np.zeros(3), "b": "y"}]),
        ([{"a": 1}], [{"b": 1}]),
        ([["x", 1]], [["x", 2]]),
        ([1.5], ["1.5"]),
    ],
)
def test_other_values_are_compared_too(want: list[Any], got: list[Any]) -> None:
    assert compare(want, list(want)).equal
    result = compare(want, got)
    assert not result.equal
    assert result.mismatched


@pytest.mark.parametrize(
    "value",
    ["loose", -1, 2, True, {"tier": "bit", "x": 1}, [1], float("nan"), {"relative": 1e9}, {"relative": float("nan")},
     {"relative": -1}, {"relative": True}, {"tier": "bit", "relative": 0.1}],
)  # fmt: skip
def test_a_wrong_tolerance_is_refused(value: Any) -> None:
    with pytest.raises(InputError, match="tolerance"):
        Tolerance.parse(value)


def test_tolerances_are_read() -> None:
    assert Tolerance.parse(None) == Tolerance.parse("bit") == Tolerance.parse(0) == BIT
    assert Tolerance.parse(1e-3) == Tolerance.parse({"relative": 1e-3}) == Tolerance("numeric", 1e-3)


def test_a_baseline_that_does_not_repeat_itself_excuses_nothing() -> None:
    zeros = [np.zeros_like(part) for part in stream()]
    for noise in (stream()[:-1], [part * np.float32(-50) for part in stream()]):
        assert not compare(stream(), zeros, NUMERIC, noise=noise).equal
    assert not compare(stream(), stream(), NUMERIC, noise=stream()[:-1]).equal
