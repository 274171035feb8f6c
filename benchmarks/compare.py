"""What the verdicts of `bench_compare` are worth, measured: false ones between a system and itself, true ones found.

Two equal emulated systems A and C, and B, 5 % faster, take turns in processes of their own, through the harness as
users have it. Their batches wander (autocorrelation 0.7, 5 %) and their processes differ (1 %). Each comparison draws
as many rounds as `bench_compare` has pairs by default, without repetition, from all that were measured; in comparisons
of A with C a coin says, round by round, which of the two is called the baseline.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path

import numpy as np

from flashrt.bench import RunSettings, resolve_system
from flashrt.bench.interleave import DEFAULT_PAIRS, SERIES, SINGLE, figures_of
from flashrt.bench.run import run_once
from flashrt.bench.verdicts import FAMILY_ERROR, decide

TURN_S = 4.0
NUM_EQUAL, NUM_FASTER = 100, 50
MAX_FALSE_SHARE, MIN_FOUND_SHARE = 0.05, 0.9
NAMES = (*SERIES, *SINGLE)
# The figures that the emulated device's speed sets; the others contain what the host does.
PACED = ("period_ms", "latency_ms.mean", "latency_ms.p50", "first_output_ms")
SYSTEMS = """
import time
import numpy as np

def batches(seed, count):
    generator = np.random.default_rng(seed)
    for _ in range(count):
        yield {"x": generator.standard_normal(6)}

def emulate(io, mean_s):
    generator = np.random.default_rng()
    mean_s *= np.exp(0.01 * generator.standard_normal())
    noise = generator.standard_normal()
    io.ready()
    for x in io.inputs["x"]:
        noise = 0.7 * noise + np.sqrt(1 - 0.49) * generator.standard_normal()
        end = time.perf_counter() + mean_s * (1 + 0.05 * noise)
        while (left := end - time.perf_counter()) > 0:
            time.sleep(max(left - 2e-4, 0))
        io.outputs["y"].write(x)

def a(io):
    emulate(io, 20e-3)

def b(io):
    emulate(io, 20e-3 / 1.05)

def c(io):
    emulate(io, 20e-3)
"""


def measure_rounds(folder: Path, num_rounds: int) -> dict[str, list[dict[str, np.ndarray]]]:
    """Return every system's figures, a round each; the order turns round from round to round."""
    (folder / "systems.py").write_text(SYSTEMS)
    systems = {name: resolve_system(f"systems.py:{name}", folder) for name in "abc"}
    settings = RunSettings(duration_s=TURN_S, timeout_s=60)
    found: dict[str, list[dict[str, np.ndarray]]] = {name: [] for name in systems}
    for number in range(num_rounds):
        for name in "abc" if number % 2 == 0 else "cba":
            run = run_once(systems[name], "systems.py:batches", folder, folder / "log", settings, {"y": 6})
            found[name].append(figures_of(run, "y", settings))
    return found


def verdicts(base: list[dict[str, np.ndarray]], other: list[dict[str, np.ndarray]], swap: np.ndarray) -> dict[str, str]:
    """Return the verdict on every figure of one comparison."""
    pairs = [(two, one) if swapped else (one, two) for one, two, swapped in zip(base, other, swap, strict=True)]
    sides = [{name: [pair[side][name] for pair in pairs] for name in NAMES if name in pairs[0][0]} for side in (0, 1)]
    return {name: one["verdict"] for name, one in decide(*sides, dict.fromkeys(NAMES, False)).items()}


def compare(*, quick: bool) -> bool:
    """Measure, print both shares, and return whether they hold."""
    num_rounds = 14 if quick else 48
    begin = time.monotonic()
    with tempfile.TemporaryDirectory() as name:
        rounds = measure_rounds(Path(name), num_rounds)
    generator = np.random.default_rng(20250701)
    false, found = 0, dict.fromkeys(PACED, 0)
    for _ in range(NUM_EQUAL):
        chosen = generator.permutation(num_rounds)[:DEFAULT_PAIRS]
        swap = generator.integers(2, size=DEFAULT_PAIRS).astype(bool)
        said = verdicts([rounds["a"][one] for one in chosen], [rounds["c"][one] for one in chosen], swap)
        false += any(verdict != "inconclusive" for verdict in said.values())
    for _ in range(NUM_FASTER):
        chosen = generator.permutation(num_rounds)[:DEFAULT_PAIRS]
        said = verdicts(
            [rounds["a"][one] for one in chosen], [rounds["b"][one] for one in chosen], np.zeros(DEFAULT_PAIRS, bool)
        )
        for figure in PACED:
            found[figure] += said[figure] == "faster"
    print(f"compare: {num_rounds} rounds of three systems, {TURN_S:g} s a turn, {DEFAULT_PAIRS} pairs a comparison"
          f", {time.monotonic() - begin:.0f} s (EMULATED)")  # fmt: skip
    print(f"  equal systems: {false} of {NUM_EQUAL} comparisons call any figure faster or slower "
          f"(target at most {MAX_FALSE_SHARE:.0%}; by design {FAMILY_ERROR:.0%})")  # fmt: skip
    for figure, count in found.items():
        print(f"  5 % faster: {figure:16} found in {count} of {NUM_FASTER} (target at least {MIN_FOUND_SHARE:.0%})")
    return false <= MAX_FALSE_SHARE * NUM_EQUAL and min(found.values()) >= MIN_FOUND_SHARE * NUM_FASTER


def parse(arguments: list[str]) -> argparse.Namespace:
    """Return the options of the harness benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--compare", action="store_true", help="the verdicts of bench_compare, instead of round trips")
    parser.add_argument(
        "--quick", action="store_true", help="with --compare: fewer rounds, so that comparisons share more of them"
    )
    return parser.parse_args(arguments)
