"""Many processes that contend for random gangs and are killed at random; used by the tests and by scripts/soak.py.

Each worker writes when it has devices and when it is about to give them back; its ends come from whoever kills it. From
that, and from the records that all may read, it is worked out afterwards whether a device was ever held twice, how long
a lease outlived its holder, and who waited how long.
"""

from __future__ import annotations

import itertools
import os
import random
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from flashrt import gpu
from flashrt.clock import monotonic_ns
from flashrt.gpu.lease_directory import LeaseDirectory
from flashrt.gpu.processes import ProcessIdentity, command_line, environment_value

NUM_DEVICES = 8
MOST_S = 120.0
"""How much longer a machine may take on which not enough has happened in the time that was asked for."""
MAX_OUTLIVED_S = 15.0
"""A keeper hears of its holder's end at once, but may wait for its turn; one that did not hear would stay for good."""

WORKER = """
import os, random, sys, time
from flashrt import gpu
from flashrt.gpu.devices import Device
name, seed, log, stop = sys.argv[1], int(sys.argv[2]), sys.argv[3], sys.argv[4]
draw = random.Random(seed)
inventory = gpu.inventory(kinds=('emulated',), emulated_island_sizes=[4, 4])
descriptor = os.open(log, os.O_WRONLY | os.O_APPEND)
def note(what, *rest):
    now = time.clock_gettime_ns(time.CLOCK_MONOTONIC)
    os.write(descriptor, (' '.join(map(str, (what, now, name, os.getpid(), *rest))) + chr(10)).encode())
while not os.path.exists(stop):
    count = draw.choice([1, 1, 1, 2, 2, 4, 8])
    note('asks', count)
    lease = gpu.acquire(count, name, kind='emulated', holder_pid=os.getpid(), wait_s=300, inventory=inventory,
                        same_island=count <= 4 and draw.random() < 0.3)
    note('has', count, ','.join(lease.uuids), lease.token)
    time.sleep(draw.random() * 0.05)
    note('gives', count, ','.join(lease.uuids), lease.token)
    gpu.release(lease)
"""


@dataclass
class Outcome:
    """What a contention came to."""

    seconds: float
    num_workers: int
    grants: Counter[str] = field(default_factory=Counter)
    grants_by_count: Counter[int] = field(default_factory=Counter)
    waits_s: dict[int, list[float]] = field(default_factory=dict)
    kills: Counter[str] = field(default_factory=Counter)
    outlived_s: list[float] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        waits = sorted(wait for found in self.waits_s.values() for wait in found)
        by_count = ", ".join(
            f"{count}: {number} (longest wait {max(self.waits_s[count]):.1f} s)"
            for count, number in sorted(self.grants_by_count.items())
        )
        return (
            f"{self.num_workers} processes, {self.seconds:.0f} s, {NUM_DEVICES} devices: {sum(self.grants.values())} "
            f"leases by gang size {{{by_count}}}; leases a worker {min(self.grants.values(), default=0)} to "
            f"{max(self.grants.values(), default=0)}; wait {waits[len(waits) // 2]:.2f} s (median), "
            f"{waits[-1]:.2f} s (longest); kill -9 {dict(self.kills)}; a lease outlived its holder by "
            f"{max(self.outlived_s, default=0.0):.3f} s at most ({len(self.outlived_s)} seen); "
            f"{len(self.problems)} problems"
        )


@dataclass
class _Worker:
    process: subprocess.Popen[bytes]
    name: str


class Contention:
    """Workers on one lease directory, restarted when they are killed, for some seconds."""

    def __init__(self, folder: Path, num_workers: int, seconds: float, seed: int) -> None:
        self._draw = random.Random(seed)
        self._log = folder / "log.txt"
        self._log.touch()
        self._errors = folder / "errors.txt"
        self._environment = {**os.environ, "FLASHRT_LEASE_DIR": str(folder / "leases"), "OMP_NUM_THREADS": "1"}
        self._stop_file = folder / "stop"
        self._until_ns = monotonic_ns() + int(seconds * 1e9)
        self._most_ns = self._until_ns + int(MOST_S * 1e9)
        self._log_bytes = 0
        self._died_ns: dict[int, int] = {}
        self._lost_ns: dict[int, int] = {}
        self._last_seen_ns: dict[int, int] = {}
        self._failed: set[int] = set()
        self._stop = threading.Event()
        self.outcome = Outcome(seconds, num_workers)
        os.environ["FLASHRT_LEASE_DIR"] = self._environment["FLASHRT_LEASE_DIR"]
        self._directory = LeaseDirectory()
        self._workers = [self._start(f"worker-{number}") for number in range(num_workers)]

    def _start(self, name: str) -> _Worker:
        arguments = [name, str(self._draw.randrange(1 << 30)), str(self._log), str(self._stop_file)]
        with self._errors.open("ab") as errors:
            process = subprocess.Popen(
                [sys.executable, "-P", "-c", WORKER, *arguments], env=self._environment, stderr=errors,
                stdin=subprocess.DEVNULL, stdout=errors, start_new_session=True,
            )  # fmt: skip
        return _Worker(process, name)

    def _watch(self) -> None:
        """Note when each holder's lease was last seen."""
        while not self._stop.wait(0.02):
            leases = self._directory.live_leases()
            now = monotonic_ns()
            for lease in leases:
                if lease.holder_process is not None:
                    self._last_seen_ns[lease.holder_process.pid] = now

    def run(self, kill_every_s: float) -> Outcome:
        """Kill workers and keepers at random until the time is over, then let all come to an end."""
        watcher = threading.Thread(target=self._watch)
        watcher.start()
        try:
            while self._goes_on():
                time.sleep(kill_every_s * 2 * self._draw.random())
                # Where nobody got anything since the last kill, the machine is slow: more kills would only stop it.
                if self._log.stat().st_size > self._log_bytes:
                    self._log_bytes = self._log.stat().st_size
                    self._kill_one()
                self._restart()
            self._stop_file.touch()
            self._drain()
        finally:
            for worker in self._workers:
                worker.process.kill()
                worker.process.wait()
            self._stop.set()
            watcher.join()
        self._judge()
        return self.outcome

    def _goes_on(self) -> bool:
        """Return whether the time is not over, or too little has happened in it and there is some left for that."""
        now_ns = monotonic_ns()
        if now_ns < self._until_ns or now_ns > self._most_ns:
            return now_ns < self._until_ns
        kills = self.outcome.kills
        return not (kills["workers"] and kills["keepers"] and f" {NUM_DEVICES} emulated" in self._log.read_text())

    def _kill_one(self) -> None:
        leases = self._directory.live_leases()
        # A busy machine may leave time for few kills: of either kind there is one.
        if leases and (self._draw.random() < 0.3 or not self.outcome.kills["keepers"]):
            lease = self._draw.choice(leases)
            # The moment before: nobody can have got the devices by then.
            self._lost_ns[lease.token] = monotonic_ns()
            lease.keeper.kill()
            self.outcome.kills["keepers"] += 1
            return
        worker = self._draw.choice(self._workers)
        self._died_ns[worker.process.pid] = monotonic_ns()
        worker.process.kill()
        worker.process.wait()
        self.outcome.kills["workers"] += 1

    def _restart(self) -> None:
        for place, worker in enumerate(self._workers):
            if worker.process.poll() is not None:
                if worker.process.returncode:
                    self._failed.add(worker.process.pid)
                if self._goes_on():
                    self._workers[place] = self._start(worker.name)

    def _drain(self) -> None:
        """Give those that wait the time to be served: whoever is not is starved."""
        deadline = time.monotonic() + 120
        for worker in self._workers:
            try:
                if worker.process.wait(max(0.1, deadline - time.monotonic())):
                    self._failed.add(worker.process.pid)
            except subprocess.TimeoutExpired:
                self.outcome.problems.append(f"{worker.name} was not served within 120 s of the others' end")

    def _judge(self) -> None:
        self._judge_log()
        for pid, died_ns in self._died_ns.items():
            if pid in self._last_seen_ns:
                outlived_s = max(0.0, (self._last_seen_ns[pid] - died_ns) / 1e9)
                self.outcome.outlived_s.append(outlived_s)
                if outlived_s > MAX_OUTLIVED_S:
                    self.outcome.problems.append(f"the lease of {pid} outlived it by {outlived_s:.2f} s")
        _until(lambda: not keepers_of(self._directory.path), 60.0)
        if left := keepers_of(self._directory.path):
            self.outcome.problems.append(f"{len(left)} keepers are left")
        inventory = gpu.inventory(kinds=("emulated",), emulated_island_sizes=[4, 4])
        gpu.release(gpu.acquire(NUM_DEVICES, "last", kind="emulated", inventory=inventory))
        if self._directory.live_tickets() or list((self._directory.path / "queue").iterdir()):
            self.outcome.problems.append("tickets are left in the queue")

    def _judge_log(self) -> None:
        """Work out from the workers' own words who had what when."""
        begun: dict[int, tuple[int, int, str, list[str]]] = {}
        asked: dict[int, tuple[int, int]] = {}
        spans: list[tuple[int, int, str, str]] = []
        for line in self._log.read_text().splitlines():
            what, at, name, pid, count, *rest = line.split()
            at_ns, number = int(at), int(pid)
            if what == "asks":
                asked[number] = (at_ns, int(count))
            elif what == "has":
                waited_ns = at_ns - asked.pop(number)[0]
                begun[number] = (at_ns, int(rest[1]), name, rest[0].split(","))
                self.outcome.grants[name] += 1
                self.outcome.grants_by_count[int(count)] += 1
                self.outcome.waits_s.setdefault(int(count), []).append(waited_ns / 1e9)
            else:
                start_ns, token, _, devices = begun.pop(number)
                spans += [(start_ns, min(at_ns, self._lost_ns.get(token, at_ns)), name, device) for device in devices]
        for number, (_, count_asked) in asked.items():
            if number not in self._died_ns and number not in self._failed:
                self.outcome.problems.append(f"process {number} was never given the {count_asked} it asked for")
        for number, (start_ns, token, name, devices) in begun.items():
            # Killed while it had them: it was the holder until then, and no longer.
            ends_ns = [end for end in (self._died_ns.get(number), self._lost_ns.get(token)) if end is not None]
            if not ends_ns:
                self.outcome.problems.append(f"{name} ({number}) ended while it held {devices}")
                continue
            spans += [(start_ns, min(ends_ns), name, device) for device in devices]
        for device in {span[3] for span in spans}:
            own = sorted(span for span in spans if span[3] == device)
            for first, second in itertools.pairwise(own):
                if second[0] < first[1]:
                    self.outcome.problems.append(f"{device} held twice: {first} and {second}")
        self._judge_errors()

    def _judge_errors(self) -> None:
        """A worker may end with an error only because its keeper was killed."""
        for line in self._errors.read_text().splitlines():
            if line.startswith("flashrt.errors.") and "keeper" not in line:
                self.outcome.problems.append(line)


def keepers_of(directory: Path) -> list[ProcessIdentity]:
    """Return the running keepers that were started with this lease directory."""
    found = []
    for entry in os.listdir("/proc"):
        if entry.isdecimal() and "flashrt.gpu.keeper" in command_line(int(entry)):
            identity = ProcessIdentity.of(int(entry))
            if identity and environment_value(int(entry), "FLASHRT_LEASE_DIR") == str(directory):
                found.append(identity)
    return found


def _until(condition: Callable[[], bool], seconds: float) -> None:
    end = time.monotonic() + seconds
    while not condition() and time.monotonic() < end:
        time.sleep(0.01)


def contend(folder: Path, *, num_workers: int, seconds: float, kill_every_s: float, seed: int) -> Outcome:
    """Let workers contend, and return what came of it."""
    return Contention(folder, num_workers, seconds, seed).run(kill_every_s)
