"""The long reliability runs: ``soak.py --kills 100 --programs 200 --cheats 10 --leases 60`` (``make soak``)."""

from __future__ import annotations

import argparse
import collections
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from tests.gpu.contention import contend  # noqa: E402 - the tests are no installed package
from tests.runtime.kills import kill_one  # noqa: E402 - the tests are no installed package


def kill_many(count: int, seed: int) -> int:
    """Kill a process of a running deployment `count` times; return how often something was wrong."""
    with tempfile.TemporaryDirectory(prefix="flashrt-soak-") as folder:
        rounds = []
        for number in range(count):
            rounds.append(kill_one(Path(folder), seed + number))
            for problem in rounds[-1].problems:
                print(f"seed {seed + number}: {rounds[-1].victim} after {rounds[-1].after_s:.2f} s: {problem}")
    victims = collections.Counter(found.victim for found in rounds)
    ended = [found.ended_s for found in rounds]
    failed = sum(bool(found.problems) for found in rounds)
    print(
        f"{count} kills ({', '.join(f'{name} {number}' for name, number in sorted(victims.items()))}): {failed} wrong; "
        f"everything had ended after {statistics.median(ended):.2f} s (median), {max(ended):.2f} s (longest)"
    )
    return failed


def contend_for_leases(seconds: float, seed: int) -> int:
    """Let 50 processes contend for random gangs while they and keepers are killed; return how much was wrong."""
    with tempfile.TemporaryDirectory(prefix="flashrt-soak-") as folder:
        outcome = contend(Path(folder), num_workers=50, seconds=seconds, kill_every_s=0.3, seed=seed)
    for problem in outcome.problems:
        print(problem)
    print(outcome)
    return len(outcome.problems)


def main() -> int:
    """Run what is asked for; return the exit status."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--programs", type=int, default=0, help="random programs under random deployments")
    parser.add_argument("--cheats", type=int, default=0, help="how often each cheat and twin runs, on two applications")
    parser.add_argument("--leases", type=float, default=0, metavar="SECONDS", help="50 processes contend for gangs")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    failed = kill_many(arguments.kills, arguments.seed) if arguments.kills else 0
    if arguments.leases:
        failed += contend_for_leases(arguments.leases, arguments.seed)
    if arguments.programs:
        command = [sys.executable, "-m", "pytest", "-q", "tests/runtime/test_random_programs.py"]
        environment = {**os.environ, "FLASHRT_RANDOM_PROGRAMS": str(arguments.programs)}
        done = subprocess.run(command, cwd=ROOT, env=environment, check=False)
        failed += done.returncode != 0
    for application in ("toy", "worldplay") if arguments.cheats else ():
        command = [sys.executable, "-m", "pytest", "-q", "--timeout", "7200", "tests/adversarial"]
        wanted = {"FLASHRT_ADVERSARIAL_APP": application, "FLASHRT_ADVERSARIAL_TIMES": str(arguments.cheats)}
        failed += subprocess.run(command, cwd=ROOT, env={**os.environ, **wanted}, check=False).returncode != 0
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
