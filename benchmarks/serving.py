"""The serving planner at full size: six components, eight types, 16 GPUs; and what its plans are worth when they run.

Prints the counts and seconds of every phase, the time against the number of GPUs, how far the predicted throughput is
from the simulated one for several shares of the largest rate, and what the plan reaches on emulated executors.
"""

from __future__ import annotations

import argparse
import resource
import sys
import time
from dataclasses import replace
from pathlib import Path

import flashrt.planners.serving as serving
from flashrt.errors import InputError
from flashrt.planners.serving import Evaluator, Load, Settings, make_problem, plan_serving
from flashrt.planners.serving.emulate import run_emulated
from flashrt.planners.serving.flat import load_kernels
from flashrt.planners.serving.search import Answer

FOLDER = Path(serving.__file__).parent / "examples" / "qwen3-omni-like"
TARGET_S, TARGET_BYTES, TARGET_CANDIDATES = 10.0, 2 << 30, 5e8
MAX_THROUGHPUT_ERROR, MAX_EMULATED_ERROR = 0.02, 0.05


def problem() -> serving.Problem:
    """Return the shipped problem of six components and eight types."""
    return make_problem(
        serving.read_model(FOLDER / "model.yaml"), serving.read_workload(FOLDER / "audio-third.yaml"),
        serving.read_serving_profile(FOLDER / "profile.yaml"),
    )  # fmt: skip


def at_full_size() -> tuple[bool, Answer]:
    """Plan for 16 GPUs; return whether time, memory and candidates are as they must be, and the answer."""
    begin = time.perf_counter()
    answer = plan_serving(problem(), 16)
    seconds = time.perf_counter() - begin
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    candidates = answer.counts["physical_candidates"]
    print(f"16 GPUs: {seconds:.1f} s (target below {TARGET_S:.0f}), peak memory {peak / 2**30:.2f} GiB (below 2), "
          f"{candidates:.1e} physical candidates (at least {TARGET_CANDIDATES:.0e}), none of them listed")  # fmt: skip
    print("  counts:  " + ", ".join(f"{name} {count:,.0f}" for name, count in answer.counts.items()))
    print("  seconds: " + ", ".join(f"{name} {value:.2f}" for name, value in answer.seconds.items()))
    good = seconds < TARGET_S and peak < TARGET_BYTES and candidates >= TARGET_CANDIDATES
    return good, answer


def by_gpus() -> None:
    """Print the time and the goodput against the number of GPUs."""
    for num_gpus in (4, 8, 16, 32):
        begin = time.perf_counter()
        try:
            answer = plan_serving(problem(), num_gpus)
        except InputError as error:
            print(f"  {num_gpus:3} GPUs: {error}")
            continue
        shown = answer.best.simulated
        assert shown is not None
        print(f"  {num_gpus:3} GPUs: {time.perf_counter() - begin:5.1f} s, "
              f"{answer.counts['physical_candidates']:.1e} candidates, {answer.counts['estimated']:,.0f} estimated, "
              f"{answer.counts['simulated']:.0f} simulated; good {shown.goodput_per_s.sum():.3g}/s")  # fmt: skip


def throughput(answer: Answer) -> bool:
    """Print how far the predicted throughput is from the simulated one; return whether all are within 2 %."""
    worst = 0.0
    for alpha in (0.8, 0.85, 0.9, 0.95, 1.0):
        evaluator = Evaluator(answer.problem, replace(answer.settings.load, alpha=alpha))
        shown = evaluator.simulate(answer.best.plan, answer.best.routes, num=60_000)
        error = shown.throughput_per_s / (alpha * answer.best.plan.rate_per_s) - 1
        worst = max(worst, abs(error))
        print(f"  α {alpha:4}: predicted {alpha * answer.best.plan.rate_per_s:.3f}, simulated "
              f"{shown.throughput_per_s:.3f} requests/s ({error:+.2%})")  # fmt: skip
    print(f"throughput: at worst {worst:.2%} off (target {MAX_THROUGHPUT_ERROR:.0%})")
    return worst <= MAX_THROUGHPUT_ERROR


def emulated(answer: Answer, speedup: float) -> bool:
    """Run the plan; print what it reaches, and return whether it is within 5 % of what was predicted."""
    evaluator = Evaluator(answer.problem, answer.settings.load)
    found = run_emulated(evaluator, answer.best.plan, answer.best.routes, num_requests=1500, speedup=speedup)
    reached, predicted = float(found.reached.goodput_per_s.sum()), float(found.predicted.goodput_per_s.sum())
    print(f"EMULATED, {found.num_executors} executors, {found.num_requests} requests, {speedup:g} times life: "
          f"{reached:.3f} of {predicted:.3f} requests/s predicted ({reached / predicted - 1:+.2%}, "
          f"target {MAX_EMULATED_ERROR:.0%})")  # fmt: skip
    return abs(reached / predicted - 1) <= MAX_EMULATED_ERROR


def main() -> int:
    """Print the figures; the exit status says whether the targets hold."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="without the time against the number of GPUs")
    quick = parser.parse_args().quick
    begin = time.perf_counter()
    load_kernels()
    plan_serving(problem(), 4 + 4, Settings(time_limit_s=0.5, load=Load(num_simulated=1000)))
    print(f"kernels compiled or loaded in {time.perf_counter() - begin:.1f} s, not counted below")
    good, answer = at_full_size()
    good &= throughput(answer)
    good &= emulated(answer, 1.0)
    if not quick:
        by_gpus()
    return int(not good)


if __name__ == "__main__":
    sys.exit(main())
