"""How long handing a tensor from one process to another takes, ours beside other ways, in one run.

    python benchmarks/transport.py [--quick] [--json FILE]

One way, in µs: from just before the producer sends until the consumer has the tensor. Both processes have a core of
their own and stamp with the same monotonic clock. The consumer sleeps when a value comes: after each answer the
producer waits until the kernel says so. All ways take turns, in small blocks of sends in a random order, in the same
two processes (Ray's are its own), so that drift of the machine hits all alike; a figure is the median of the blocks'
medians (p50) or of their 90th percentiles (p90).

The floor is what waking the consumer's core takes with nothing carried, by an eventfd, which is what channels ring; a
pipe and a futex stand beside it.
``in place`` writes the tensor into memory of the channel, as an operation does that loans its output; ``copied in``
hands over a tensor from elsewhere. Filling the tensor is the operation's work and not timed.

Throughput: the producer writes 16 MB, the consumer reads them, over and over; with 5 ms of arithmetic on top in each,
as an operation has it (the target), and without (then memory is the limit, and what one core wrote is far from the
other). The ideal has both work at the same time on memory of their own, with nothing handed over; rates are relative
to it.

Targets, as ratios within the run: 16 MB in place at most 1.4 × the floor; 64 MB within 10 % of 1 KB; at least 100 ×
faster than torch.multiprocessing and Ray at 16 MB; throughput at least 75 % of the ideal. The exit status is 1 when one
is missed. The figures mean something on a quiet machine with two cores or more.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import mmap
import os
import random
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing import Pipe as make_pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
from peers_transport import CAPACITY, Channels, Way, make_ways, open_all

from flashrt.runtime.lifeline import die_with_parent

KB, MB = 1 << 10, 1 << 20
SIZES = {"1 KB": KB, "1 MB": MB, "16 MB": 16 * MB, "64 MB": 64 * MB}
THROUGHPUT_SIZE = 16 * MB
FLOOR = "wake-up: eventfd"
IN_PLACE, TORCH, RAY = "ours, in place", "torch.multiprocessing", "Ray actor call"
QUICK_WAYS = {IN_PLACE, "ours, copied in", "ours, iceoryx2", TORCH, "pyzmq ipc"}
PIPELINED = [IN_PLACE, "ours, iceoryx2", "ours, copied in", "pyzmq ipc", TORCH]
MAX_FLOOR_RATIO, MAX_SIZE_RATIO, MIN_SPEEDUP, MIN_THROUGHPUT = 1.4, 1.1, 100.0, 0.75
WORK, PASS_ONLY = "5 ms and a pass over it", "a pass over it alone"
OPERATION_S = 5e-3
SMALL_FLOATS = 1 << 15
NUM_TRIAL_PASSES = 200
MAX_PAUSE_NS = 3_000_000
SLOW_US = 200.0
"""Ways and sizes slower than this get fewer blocks: their figures need less precision."""
NUM_WARMUP = 4
BLOCK_SENDS = 40
BLOCK_S = 0.15
ANSWER_TIMEOUT_S = 30
SENT, RECEIVED, WRONG, WORD, NUM_WORDS = 0, 1, 2, 3, 8


@dataclass
class Blocks:
    """Latencies in µs, block by block."""

    p50: list[float] = field(default_factory=list)
    p90: list[float] = field(default_factory=list)

    def add(self, block: Sequence[float]) -> None:
        """Take one block."""
        self.p50.append(float(np.median(block)))
        self.p90.append(float(np.percentile(block, 90)))

    def figures(self) -> tuple[float, float]:
        """Return the medians of the blocks' p50 and p90."""
        return float(np.median(self.p50)), float(np.median(self.p90))


class Operation:
    """A producing and a consuming operation: one pass over the value, and passes over something small of its own."""

    def __init__(self, size: int) -> None:
        import torch

        self._source = torch.ones(size // 4)
        self._small = torch.rand(SMALL_FLOATS)

    def produce(self, output: Any, number: int, num_passes: int) -> None:
        """Write the value."""
        import torch

        torch.add(self._source, float(number % 5), out=output.view(torch.float32))
        self._compute(num_passes)

    def consume(self, value: Any, num_passes: int) -> None:
        """Read the value."""
        import torch

        float(value.view(torch.float32).sum())
        self._compute(num_passes)

    def _compute(self, num_passes: int) -> None:
        for _ in range(num_passes):
            self._small.sin_()

    def passes_for(self, seconds: float) -> int:
        """Return how many passes take about `seconds` here."""
        begin = time.perf_counter()
        self._compute(NUM_TRIAL_PASSES)
        return max(round(seconds * NUM_TRIAL_PASSES / (time.perf_counter() - begin)), 1)


class Consumer:
    """The other process: obeys one command after the other."""

    def __init__(self, ways: list[Way], commands: Connection, words: np.ndarray, answer: int, parent: int) -> None:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        die_with_parent(parent)
        self._commands = commands
        self._words = words
        self._answer = answer
        failed = open_all(ways, commands, producer=False)
        self._ways = {way.name: way for way in ways if way.name not in failed}
        self._operation = Operation(THROUGHPUT_SIZE)

    def run(self) -> None:
        """Obey until there is nobody left to obey."""
        with suppress(EOFError):
            while True:
                verb, *arguments = self._commands.recv()
                if verb == "close":
                    break
                getattr(self, verb)(*arguments)
        for way in self._ways.values():
            way.close()

    def take(self, name: str, size: int, count: int) -> None:
        """Receive `count` values one by one, stamp each and answer."""
        way, words, now = self._ways[name], self._words, time.monotonic_ns
        own = way.make(size) if way.is_floor else None
        for number in range(count):
            value = way.receive(size)
            words[RECEIVED] = now()
            if own is not None:
                # A floor carries nothing, but its consumer does the same between two wake-ups.
                value = own
                value[0] = value[-1] = number % 250
            if not (value[0] == value[-1] == number % 250 and value.numel() == size):
                words[WRONG] += 1
            del value
            os.eventfd_write(self._answer, 1)

    def pipeline(self, name: str, count: int, num_passes: int) -> None:
        """Receive values and work on each; answer when the last is done."""
        for _ in range(count):
            self._operation.consume(self._ways[name].receive(THROUGHPUT_SIZE), num_passes)
        self._finish()

    def alone(self, count: int, num_passes: int) -> None:
        """Work on values of this process's own."""
        import torch

        values = [torch.ones(THROUGHPUT_SIZE, dtype=torch.uint8) for _ in range(CAPACITY)]
        self._commands.send("ready")
        self._commands.recv()
        for number in range(count):
            self._operation.consume(values[number % CAPACITY], num_passes)
        self._finish()

    def _finish(self) -> None:
        self._words[RECEIVED] = time.monotonic_ns()
        os.eventfd_write(self._answer, 1)


class Pair:
    """The two processes, this one the producer; a context manager that leaves nothing behind."""

    def __init__(self, folder: Path, sizes: list[int], cores: tuple[int, int]) -> None:
        self._memory = mmap.mmap(-1, mmap.PAGESIZE)
        self.words = np.frombuffer(self._memory, np.int64)[:NUM_WORDS]
        word = ctypes.c_int32.from_buffer(self._memory, WORD * 8)
        self.ways, self.missing = make_ways(folder, sizes, word)
        self._answer = os.eventfd(0)
        self._commands, theirs = make_pipe()
        parent = os.getpid()
        self.consumer = os.fork()
        if self.consumer == 0:
            code = 1
            try:
                self._commands.close()
                os.sched_setaffinity(0, {cores[1]})
                Consumer(self.ways, theirs, self.words, self._answer, parent).run()
                code = 0
            finally:
                sys.stdout.flush()
                os._exit(code)
        theirs.close()
        self._stat = os.open(f"/proc/{self.consumer}/stat", os.O_RDONLY)
        os.sched_setaffinity(0, {cores[0]})
        self._operation = Operation(THROUGHPUT_SIZE)
        self._answered = select.poll()
        self._answered.register(self._answer, select.POLLIN)

    def __enter__(self) -> Pair:
        self.missing |= open_all(self.ways, self._commands, producer=True)
        self.ways = [way for way in self.ways if way.name not in self.missing]
        return self

    def __exit__(self, *error: object) -> None:
        ended = False
        if error[0] is None:
            self._commands.send(("close",))
            for way in self.ways:
                way.close()
            ended = self._await_end(5.0)
        if not ended:
            with suppress(ProcessLookupError):
                os.kill(self.consumer, signal.SIGKILL)
            with suppress(ChildProcessError):
                os.waitpid(self.consumer, 0)
        for way in self.ways:
            if isinstance(way, Channels):
                way.hub.close()

    def _await_end(self, seconds: float) -> bool:
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            if os.waitpid(self.consumer, os.WNOHANG)[0]:
                return True
            time.sleep(0.01)
        return False

    def _await_answer(self) -> None:
        deadline = time.monotonic() + ANSWER_TIMEOUT_S
        while not self._answered.poll(1000):
            if os.waitpid(self.consumer, os.WNOHANG)[0]:
                raise RuntimeError("the consumer has ended")
            if time.monotonic() > deadline:
                raise TimeoutError(f"no answer within {ANSWER_TIMEOUT_S} s")
        os.eventfd_read(self._answer)

    def _let_it_sleep(self) -> None:
        """Keep this core busy until the consumer's thread sleeps."""
        start = time.monotonic_ns()
        while time.monotonic_ns() - start < MAX_PAUSE_NS:
            if os.pread(self._stat, 512, 0).rsplit(b")", 1)[1][1:2] == b"S":
                return

    def latencies_us(self, way: Way, size: int, count: int) -> list[float]:
        """Return the one-way latencies of `count` values after warm-up."""
        words, now = self.words, time.monotonic_ns
        self._commands.send(("take", way.name, size, count + NUM_WARMUP))
        found = []
        for number in range(count + NUM_WARMUP):
            value = way.make(size)
            value[0] = value[-1] = number % 250
            self._let_it_sleep()
            words[SENT] = now()
            way.send(value)
            del value
            self._await_answer()
            found.append((words[RECEIVED] - words[SENT]) / 1e3)
        if words[WRONG]:
            raise AssertionError(f"{way.name}, {size} bytes: {words[WRONG]} values came wrong")
        return found[NUM_WARMUP:]

    def pipeline_s(self, way: Way, count: int, num_passes: int) -> float:
        """Return how long the two take over `count` values that are handed over, in seconds a value."""
        self._commands.send(("pipeline", way.name, count, num_passes))
        start_ns = time.monotonic_ns()
        for number in range(count):
            value = way.make(THROUGHPUT_SIZE)
            self._operation.produce(value, number, num_passes)
            way.send(value)
            del value
        self._await_answer()
        return int(self.words[RECEIVED] - start_ns) / 1e9 / count

    def ideal_s(self, count: int, num_passes: int) -> float:
        """Return how long the slower of the two takes when each has memory of its own, in seconds a value."""
        import torch

        self._commands.send(("alone", count, num_passes))
        values = [torch.ones(THROUGHPUT_SIZE, dtype=torch.uint8) for _ in range(CAPACITY)]
        self._commands.recv()
        self._commands.send("go")
        start_ns = time.monotonic_ns()
        for number in range(count):
            self._operation.produce(values[number % CAPACITY], number, num_passes)
        end_ns = time.monotonic_ns()
        self._await_answer()
        return (max(end_ns, int(self.words[RECEIVED])) - start_ns) / 1e9 / count

    def passes(self) -> int:
        """Return how many passes make an operation take about `OPERATION_S`."""
        self._operation.passes_for(OPERATION_S)
        return self._operation.passes_for(OPERATION_S)


def measure_latencies(pair: Pair, num_rounds: int, num_slow_rounds: int) -> dict[tuple[str, int], Blocks]:
    """Return (way, bytes) -> latencies; floors have 1 KB only."""
    cases: list[tuple[Way, int]] = []
    for way in pair.ways:
        cases += [(way, size) for size in ([KB] if way.is_floor else SIZES.values())]
    counts: dict[tuple[str, int], int] = {}
    slow: set[tuple[str, int]] = set()
    for way, size in cases:
        begin = time.monotonic()
        first = pair.latencies_us(way, size, 4)
        each_s = (time.monotonic() - begin) / (4 + NUM_WARMUP)
        counts[way.name, size] = int(np.clip(BLOCK_S / each_s, 3, BLOCK_SENDS))
        if np.median(first) > SLOW_US:
            slow.add((way.name, size))
    order = random.Random(0)
    found: dict[tuple[str, int], Blocks] = defaultdict(Blocks)
    for number in range(num_rounds):
        with_slow = number * num_slow_rounds // num_rounds != (number + 1) * num_slow_rounds // num_rounds
        chosen = [case for case in cases if with_slow or (case[0].name, case[1]) not in slow]
        order.shuffle(chosen)
        for way, size in chosen:
            found[way.name, size].add(pair.latencies_us(way, size, counts[way.name, size]))
    return found


def measure_throughput(pair: Pair, num_rounds: int) -> dict[str, dict[str, tuple[float, float]]]:
    """Return operations -> way -> (share of the ideal rate, ms a value); the ideal itself under ``''``."""
    found = {}
    ways = [way for way in pair.ways if way.name in PIPELINED]
    for label, num_passes, count in ((WORK, pair.passes(), 24), (PASS_ONLY, 0, 40)):
        for way in ways:
            pair.pipeline_s(way, count // 2, num_passes)
        ideal: list[float] = []
        times: dict[str, list[float]] = defaultdict(list)
        for _ in range(num_rounds):
            for way in ways:
                ideal.append(pair.ideal_s(count, num_passes))
                times[way.name].append(pair.pipeline_s(way, count, num_passes))
        best = float(np.median(ideal))
        found[label] = {"": (1.0, best * 1e3)} | {
            name: (best / float(np.median(each)), float(np.median(each)) * 1e3) for name, each in times.items()
        }
    return found


def measure_ray(folder: Path, cores: tuple[int, int], num_blocks: int) -> dict[int, Blocks] | str:
    """Return bytes -> latencies of a Ray actor call, or why there are none."""
    import importlib.util

    if importlib.util.find_spec("ray") is None:
        return "not installed"
    counts = {str(size): 12 if size <= 16 * MB else 5 for size in SIZES.values()}
    request = {"folder": str(folder / "ray"), "cores": cores, "num_blocks": num_blocks, "counts": counts}
    script = Path(__file__).with_name("peers_ray.py")
    process = subprocess.Popen(
        [sys.executable, str(script), json.dumps(request)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        start_new_session=True, preexec_fn=lambda: os.sched_setaffinity(0, set(cores)),
    )  # fmt: skip
    try:
        output, errors = process.communicate(timeout=90)
    except subprocess.TimeoutExpired:
        return "does not answer within 90 s"
    finally:
        end_session(process)
    if process.returncode:
        return f"does not start: {errors.strip().splitlines()[-1] if errors.strip() else process.returncode}"
    found: dict[int, Blocks] = defaultdict(Blocks)
    for size, blocks in json.loads(output.splitlines()[-1]).items():
        for block in blocks:
            found[int(size)].add(block)
    return found


def end_session(process: subprocess.Popen[str]) -> None:
    """End a process with everything that it started, and wait until all of it is gone."""
    import psutil

    members = []
    with suppress(psutil.NoSuchProcess):
        members = psutil.Process(process.pid).children(recursive=True)
    if process.poll() is None:
        process.terminate()
        with suppress(subprocess.TimeoutExpired):
            process.wait(10)
    process.kill()
    process.wait()
    for member in members:
        with suppress(psutil.NoSuchProcess):
            member.kill()
    psutil.wait_procs(members, timeout=5)


@dataclass(frozen=True)
class Target:
    """One ratio and its bound."""

    text: str
    ratio: float
    bound: float
    at_most: bool

    @property
    def met(self) -> bool:
        """Whether the bound holds."""
        return self.ratio <= self.bound if self.at_most else self.ratio >= self.bound

    def __str__(self) -> str:
        sign = "at most" if self.at_most else "at least"
        return f"{'PASS' if self.met else 'FAIL'}  {self.text}: {self.ratio:.2f} (target {sign} {self.bound:g})"


def judge(
    figures: dict[str, dict[int, tuple[float, float]]], floor: tuple[str, float], throughput: dict[str, Any]
) -> list[Target]:
    """Return the targets with this run's ratios."""
    ours = {size: p50 for size, (p50, _) in figures[IN_PLACE].items()}
    targets = [
        Target(f"16 MB in place over the floor ({floor[0]})", ours[16 * MB] / floor[1], MAX_FLOOR_RATIO, True),
        Target("64 MB in place over 1 KB in place", ours[64 * MB] / ours[KB], MAX_SIZE_RATIO, True),
    ]
    for name in (TORCH, RAY):
        if name in figures:
            ratio = figures[name][16 * MB][0] / ours[16 * MB]
            targets.append(Target(f"16 MB, {name} over ours in place", ratio, MIN_SPEEDUP, False))
    return [
        *targets,
        Target("throughput at 16 MB in place, of the ideal", throughput[WORK][IN_PLACE][0], MIN_THROUGHPUT, False),
    ]


def show(
    figures: dict[str, dict[int, tuple[float, float]]],
    missing: dict[str, str],
    floor: tuple[str, float],
    throughput: dict[str, dict[str, tuple[float, float]]],
) -> None:
    """Print the tables."""
    print(
        f"\none way, µs{'':14}"
        + "".join(f"{label + ' p50':>12}{'p90':>9}" for label in SIZES)
        + f"{'16 MB / floor':>15}"
    )
    for name, by_size in figures.items():
        cells = [by_size.get(size) for size in SIZES.values()]
        row = "".join(f"{cell[0]:12.1f}{cell[1]:9.1f}" if cell else f"{'':21}" for cell in cells)
        whole = by_size.get(16 * MB) or by_size[KB]
        print(f"{name:<25}{row}{whole[0] / floor[1]:15.2f}")
    for name, why in missing.items():
        print(f"{name:<25}{why}")
    print(f"\nthroughput at 16 MB{'':6}" + "".join(f"{label:>27}" for label in throughput))
    for name in throughput[WORK]:
        cells = [by_way[name] for by_way in throughput.values()]
        row = "".join(f"{each_ms:17.2f} ms{share:7.0%}" for share, each_ms in cells)
        print(f"{name or 'ideal, no transport':<25}{row}")
    print()


def run(folder: Path, cores: tuple[int, int], *, quick: bool) -> tuple[dict[str, Any], list[Target]]:
    """Measure everything; return a JSON-ready record and the targets."""
    with Pair(folder, list(SIZES.values()), cores) as pair:
        if quick:
            pair.ways = [way for way in pair.ways if way.is_floor or way.name in QUICK_WAYS]
        blocks = measure_latencies(pair, 8 if quick else 20, 2 if quick else 4)
        throughput = measure_throughput(pair, 3 if quick else 5)
        missing = dict(pair.missing)
    ray = measure_ray(folder, cores, 1 if quick else 3)
    figures: dict[str, dict[int, tuple[float, float]]] = {}
    for (name, size), each in blocks.items():
        figures.setdefault(name, {})[size] = each.figures()
    names = [way.name for way in pair.ways]
    figures = {name: dict(sorted(figures[name].items())) for name in names}
    if isinstance(ray, str):
        missing[RAY] = ray
    else:
        figures[RAY] = {size: each.figures() for size, each in ray.items()}
    floor = (FLOOR, figures[FLOOR][KB][0])
    show(figures, missing, floor, throughput)
    targets = judge(figures, floor, throughput)
    record = {
        "one_way_us": {
            name: {str(size): {"p50": p50, "p90": p90} for size, (p50, p90) in by_size.items()}
            for name, by_size in figures.items()
        },
        "missing": missing,
        "floor": {"name": floor[0], "us": floor[1]},
        "throughput": {
            label: {name or "ideal": {"share": share, "ms_per_value": each} for name, (share, each) in by_way.items()}
            for label, by_way in throughput.items()
        },
        "targets": [{"text": t.text, "ratio": t.ratio, "bound": t.bound, "met": t.met} for t in targets],
    }
    return record, targets


def stop_on_signal(number: int, frame: Any) -> None:
    """End as Ctrl-C does, so that everything is cleaned up."""
    raise KeyboardInterrupt


def main() -> int:
    """Print the figures; the exit status says whether all targets hold."""
    import torch

    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="fewer ways and fewer blocks")
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    arguments = parser.parse_args()
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 2:
        print("two cores are needed")
        return 1
    torch.set_num_threads(1)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, stop_on_signal)
    begin = time.monotonic()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as name:
        try:
            record, targets = run(Path(name), (cores[0], cores[1]), quick=arguments.quick)
        except KeyboardInterrupt:
            print("\nstopped")
            return 130
    for target in targets:
        print(target)
    print(f"{time.monotonic() - begin:.0f} s")
    if arguments.json:
        arguments.json.write_text(json.dumps(record, indent=1))
    return int(not all(target.met for target in targets))


if __name__ == "__main__":
    sys.exit(main())
