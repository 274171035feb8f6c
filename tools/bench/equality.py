"""Comparing two streams element by element. Pure: values in, findings out.

Source: ``spec/measuring.md``, "Equality".
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

import numpy as np

from flashrt.errors import input_error
from flashrt.runtime.wire import Tensor

Tier = Literal["bit", "numeric"]
# Scale-relative error allowed by default in the numeric tier: what another order of reductions does in that type.
DEFAULT_RELATIVE = {"float16": 4e-3, "bfloat16": 2e-2, "float32": 1e-5, "float64": 1e-12}
NOISE_FACTOR = 4.0
MAX_NOISE = 0.02


@dataclass(frozen=True)
class Tolerance:
    """How equal is equal.

    ``bit``: every element the same. ``numeric``: the largest error is at most `relative` times the baseline's scale
    (its root mean square), or `NOISE_FACTOR` times the baseline's own noise, whichever is larger.
    """

    tier: Tier = "bit"
    relative: float | None = None

    @classmethod
    def parse(cls, value: Any) -> Tolerance:
        """Read the argument ``tolerance``: absent, a tier, a number, or {tier, relative}."""
        if value is None:
            return cls()
        if isinstance(value, str) and value in {"bit", "numeric"}:
            return cls("numeric" if value == "numeric" else "bit")
        if isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < 1 and math.isfinite(value):
            return cls("numeric", float(value)) if value else cls()
        if isinstance(value, Mapping) and set(value) <= {"tier", "relative"}:
            tier = value.get("tier", "numeric")
            relative = value.get("relative")
            number = isinstance(relative, int | float) and not isinstance(relative, bool)
            if tier == "bit" and relative is None:
                return cls()
            if tier == "numeric" and (relative is None or (number and 0 < relative < 1)):
                return cls("numeric", None if relative is None else float(relative))
        raise input_error(
            "argument 'tolerance'", "'bit', 'numeric', a relative error below 1, or {tier, relative}", repr(value),
            "leave it out for bit equality", rule="tolerance",
        )  # fmt: skip


@dataclass(frozen=True)
class Difference:
    """The first place where two streams differ."""

    position: list[int]
    batch: int | None
    expected: Any
    got: Any


@dataclass(frozen=True)
class OutputEquality:
    """One output compared: counts, errors, and where it first goes wrong.

    `max_abs` and `max_rel` (relative to the baseline's scale) are None where values are not numbers.
    """

    name: str
    equal: bool
    total: int
    mismatched: int
    max_abs: float | None
    max_rel: float | None
    first_mismatch: Difference | None
    noise_floor: float | None
    reasons: list[str] = field(default_factory=list)

    def as_dict(self) -> dict[str, Any]:
        """Return a JSON-ready record."""
        return asdict(self)


def flatten_stream(values: Sequence[Any]) -> Any:
    """Join everything written to an output along its first axis; numbers become the elements of a list.

    Mappings are joined key by key.
    """
    if not values:
        return []
    first = values[0]
    if all(isinstance(value, Tensor) for value in values):
        arrays = [value.data if value.data.ndim else value.data.reshape(1) for value in values]
        if _join_fits(arrays) and len({value.dtype for value in values}) == 1:
            return Tensor(first.dtype, np.concatenate(arrays))
        return list(values)
    if all(isinstance(value, np.ndarray) for value in values):
        arrays = [value if value.ndim else value.reshape(1) for value in values]
        return np.concatenate(arrays) if _join_fits(arrays) and len({a.dtype for a in arrays}) == 1 else list(values)
    if all(isinstance(value, str) for value in values):
        return "".join(values)
    if all(isinstance(value, bytes) for value in values):
        return b"".join(values)
    if all(isinstance(value, dict) for value in values) and len({tuple(value) for value in values}) == 1:
        return {key: flatten_stream([value[key] for value in values]) for key in first}
    if all(isinstance(value, list | tuple) for value in values):
        return [item for value in values for item in value]
    return list(values)


def _join_fits(arrays: Sequence[np.ndarray]) -> bool:
    return len({array.shape[1:] for array in arrays}) == 1


def stream_length(value: Any) -> int:
    """Return how many elements along the first axis a written value has: frames, samples, tokens; 1 for a number."""
    if isinstance(value, Tensor):
        return int(value.data.shape[0]) if value.data.ndim else 1
    if isinstance(value, np.ndarray):
        return int(value.shape[0]) if value.ndim else 1
    if isinstance(value, str | bytes | list | tuple):
        return len(value)
    if isinstance(value, dict) and value:
        return stream_length(next(iter(value.values())))
    return 1


def compare_output(
    name: str,
    expected: Sequence[Any],
    got: Sequence[Any],
    tolerance: Tolerance,
    num_batches: int,
    noise: Sequence[Any] | None = None,
    floor: float | None = None,
) -> OutputEquality:
    """Compare what two systems wrote to one output.

    Parameters
    ----------
    expected, got
        The values written, in order, in whatever pieces.
    noise
        What the baseline wrote in another process, for the noise floor.
    floor
        The noise floor, where it is known already.
    """
    again = floor if noise is None else flatten_stream(noise)
    return _compare(name, flatten_stream(expected), flatten_stream(got), tolerance, num_batches, again)


def _compare(name: str, expected: Any, got: Any, tolerance: Tolerance, num_batches: int, noise: Any) -> OutputEquality:
    if isinstance(expected, dict) and isinstance(got, dict) and set(expected) == set(got):
        parts = [
            _compare(f"{name}.{key}", expected[key], got[key], tolerance, num_batches,
                     noise.get(key) if isinstance(noise, dict) else noise)
            for key in expected
        ]  # fmt: skip
        return _merge(name, parts)
    if _is_numeric(expected) and _is_numeric(got):
        return _compare_arrays(name, expected, got, tolerance, num_batches, noise)
    return _compare_items(name, expected, got, num_batches)


def _merge(name: str, parts: Sequence[OutputEquality]) -> OutputEquality:
    wrong = [part for part in parts if not part.equal]
    first = [part.first_mismatch for part in wrong if part.first_mismatch is not None]
    numbers = [part.max_abs for part in parts if part.max_abs is not None]
    relative = [part.max_rel for part in parts if part.max_rel is not None]
    floors = [part.noise_floor for part in parts if part.noise_floor is not None]
    return OutputEquality(
        name, not wrong, sum(p.total for p in parts), sum(p.mismatched for p in parts),
        max(numbers, default=None), max(relative, default=None), min(first, key=_batch_of, default=None),
        max(floors, default=None), [reason for part in parts for reason in part.reasons],
    )  # fmt: skip


def _batch_of(difference: Difference) -> float:
    return math.inf if difference.batch is None else difference.batch


def _is_numeric(value: Any) -> bool:
    if isinstance(value, Tensor | np.ndarray):
        return True
    return isinstance(value, list) and bool(value) and all(isinstance(v, int | float | np.generic) for v in value)


def _typed(value: Any) -> tuple[str, np.ndarray, np.ndarray]:
    """Return (dtype name, bits or data, data as numbers)."""
    if isinstance(value, Tensor):
        return f"torch.{value.dtype}", value.data, value.as_float()
    array = np.asarray(value)
    return str(array.dtype), array, array


def _compare_arrays(
    name: str, expected: Any, got: Any, tolerance: Tolerance, num_batches: int, noise: Any
) -> OutputEquality:
    want_type, want_bits, want = _typed(expected)
    got_type, got_bits, have = _typed(got)
    per_batch = want.shape[0] / num_batches if num_batches and want.ndim else 0
    reasons: list[str] = []
    if want_type != got_type:
        reasons.append(f"output '{name}': expected {want_type}, got {got_type}")
    if want.shape[1:] != have.shape[1:]:
        reasons.append(
            f"output '{name}': expected elements of shape {list(want.shape[1:])}, got {list(have.shape[1:])}"
        )
    if reasons:
        return OutputEquality(name, False, int(want.size), int(want.size), None, None, None, None, reasons)
    shared = min(len(want), len(have))
    reasons += conservation(name, want_bits, got_bits, per_batch)
    differs = _differing(want_bits[:shared], got_bits[:shared])
    numbers = want.dtype.kind in "fiub"
    errors = _errors(want[:shared], have[:shared]) if numbers else None
    largest = float(errors.max()) if errors is not None and errors.size else 0.0
    scale = _scale(want)
    floor = _noise_floor(want, noise)
    bad = differs
    if tolerance.tier == "numeric" and errors is not None:
        relative = tolerance.relative
        if relative is None:
            relative = DEFAULT_RELATIVE.get(want_type.removeprefix("torch."), 0.0)
        # A baseline that does not repeat itself must not excuse everything: its noise counts up to a bound.
        own_noise = floor if floor is not None and math.isfinite(floor) else 0.0
        allowed = max(relative * scale, min(NOISE_FACTOR * own_noise, MAX_NOISE * scale))
        bad = ~(errors <= allowed)
    if floor == math.inf:
        reasons.append(f"output '{name}': the baseline does not repeat its own stream in another process")
    not_numbers = want.dtype.kind == "f" and bool(np.isnan(want).any())
    if not_numbers:
        at = _place(np.isnan(want), per_batch)
        reasons.append(
            f"output '{name}': the baseline holds NaN at {at.position} (batch {at.batch}); nothing equals it"
        )
    missing = (len(want) - shared) * math.prod(want.shape[1:])
    surplus = (len(have) - shared) * math.prod(have.shape[1:])
    mismatched = int(bad.sum()) + missing + surplus
    first = None
    if bad.any():
        first = _difference(bad, want, have, per_batch)
    elif len(want) != len(have):
        first = Difference(
            [shared], int(shared / per_batch) if per_batch else None,
            _shown(want[shared]) if len(want) > shared else "end of stream",
            _shown(have[shared]) if len(have) > shared else "end of stream",
        )  # fmt: skip
    if first is not None and bad.any():
        batch = f" (batch {first.batch})" if first.batch is not None else ""
        reasons.insert(
            0, f"output '{name}' differs first at {first.position}{batch}: expected {first.expected}, got {first.got}"
        )
    equal = mismatched == 0 and not not_numbers and not reasons
    return OutputEquality(
        name, equal, int(want.size), mismatched, largest if numbers else None,
        largest / scale if numbers and scale else (0.0 if numbers and largest == 0 else None), first, floor, reasons,
    )  # fmt: skip


def _differing(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    if a.dtype.kind == "f":
        # Bits, not values: 0.0 and -0.0 differ, and equal NaN bits are reported by the NaN rule instead.
        bits = {2: np.uint16, 4: np.uint32, 8: np.uint64}.get(a.dtype.itemsize)
        if bits is not None:
            return np.asarray(np.ascontiguousarray(a).view(bits) != np.ascontiguousarray(b).view(bits))
    return np.asarray(a != b)


def _errors(want: np.ndarray, have: np.ndarray) -> np.ndarray:
    with np.errstate(invalid="ignore", over="ignore"):
        errors = np.abs(have.astype(np.float64) - want.astype(np.float64))
    same = want == have
    errors[same] = 0.0
    errors[np.isnan(errors)] = np.inf
    return errors


def _scale(want: np.ndarray) -> float:
    if want.dtype.kind not in "fiub" or not want.size:
        return 0.0
    values = want.astype(np.float64)
    values = values[np.isfinite(values)]
    return float(np.sqrt(np.mean(values**2))) if values.size else 0.0


def _noise_floor(want: np.ndarray, noise: Any) -> float | None:
    if isinstance(noise, float):
        return noise
    if noise is None or not _is_numeric(noise):
        return None
    _, _, again = _typed(noise)
    if again.shape != want.shape or want.dtype.kind not in "fiub":
        return math.inf
    errors = _errors(want, again)
    return float(errors.max()) if errors.size else 0.0


def _place(mask: np.ndarray, per_batch: float) -> Difference:
    position = [int(index) for index in np.unravel_index(int(np.argmax(mask)), mask.shape)]
    return Difference(position, int(position[0] / per_batch) if per_batch else None, None, None)


def _difference(mask: np.ndarray, want: np.ndarray, have: np.ndarray, per_batch: float) -> Difference:
    place = _place(mask, per_batch)
    index = tuple(place.position)
    return Difference(place.position, place.batch, _shown(want[index]), _shown(have[index]))


def _shown(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return f"{value.dtype} {list(value.shape)}"
    return value.item() if isinstance(value, np.generic) else value


def conservation(name: str, want: np.ndarray, have: np.ndarray, per_batch: float) -> list[str]:
    """Name lost, repeated, stale and reordered elements along the first axis of a stream, by position.

    Elements are matched by their bytes; elements that occur more than once in the baseline identify nothing.
    """
    if want.ndim == 0 or (len(want) == len(have) and np.array_equal(want, have)):
        return []
    reasons = []
    if len(want) != len(have):
        what = "too few" if len(have) < len(want) else "too many"
        reasons.append(f"output '{name}': expected {len(want)} elements along axis 0, got {len(have)} ({what})")
    if want.ndim < 2:
        return reasons
    keys = [np.ascontiguousarray(element).tobytes() for element in want]
    home = {key: index for index, key in enumerate(keys) if keys.count(key) == 1} if len(keys) <= 4096 else {}
    seen: dict[int, int] = {}
    last = -1
    for position, element in enumerate(have):
        origin = home.get(np.ascontiguousarray(element).tobytes())
        if origin is None:
            continue
        if origin in seen:
            reasons.append(f"output '{name}': element {origin} is repeated at {position} (first at {seen[origin]})")
        elif origin < last:
            reasons.append(f"output '{name}': element {origin} comes at {position}, after element {last} (reordered)")
        seen.setdefault(origin, position)
        last = max(last, origin)
    lost = [origin for origin in sorted(home.values()) if origin not in seen] if seen else []
    if len(have) < len(want) and lost:
        first = lost[0]
        batch = f" (batch {int(first / per_batch)})" if per_batch else ""
        reasons.append(f"output '{name}': element {first}{batch} is lost" + (f", {len(lost)} in all" * (len(lost) > 1)))
    return reasons[:8]


def _compare_items(name: str, expected: Any, got: Any, num_batches: int) -> OutputEquality:
    want = list(expected) if isinstance(expected, list | tuple | str | bytes) else [expected]
    have = list(got) if isinstance(got, list | tuple | str | bytes) else [got]
    bad = [index for index, (a, b) in enumerate(zip(want, have, strict=False)) if not same(a, b)]
    extra = abs(len(want) - len(have))
    reasons: list[str] = []
    if type(expected) is not type(got):
        reasons.append(f"output '{name}': expected {type(expected).__name__}, got {type(got).__name__}")
    if extra:
        reasons.append(f"output '{name}': expected {len(want)} elements along axis 0, got {len(have)}")
    first = None
    if bad or extra:
        at = bad[0] if bad else min(len(want), len(have))
        per_batch = len(want) / num_batches if num_batches else 0
        first = Difference(
            [at], int(at / per_batch) if per_batch else None,
            repr(want[at])[:80] if at < len(want) else "end of stream",
            repr(have[at])[:80] if at < len(have) else "end of stream",
        )  # fmt: skip
        if bad:
            reasons.insert(0, f"output '{name}' differs first at {at}: expected {first.expected}, got {first.got}")
    return OutputEquality(name, not reasons, len(want), len(bad) + extra, None, None, first, None, reasons)


def same(a: Any, b: Any) -> bool:
    """Return whether two values are the same, bit for bit, whatever they are made of."""
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return a.dtype == b.dtype and a.shape == b.shape and a.data.tobytes() == b.data.tobytes()
    if isinstance(a, np.ndarray) and isinstance(b, np.ndarray):
        return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()
    if type(a) is not type(b):
        return False
    if isinstance(a, dict):
        return list(a) == list(b) and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))
    return bool(a == b)
