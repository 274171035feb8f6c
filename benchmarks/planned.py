"""Whether the deployment that the search calls best is best when deployments really run.

    python benchmarks/planned.py [--quick] [--json FILE] [--only SEED] [--stagger N]

For each of 10 random programs (streaming edges, repeated graphs, state, transfers, operations of one or two ranks) with
a random profile, `search_deployments` finds the least period on up to 6 emulated devices. That point, and 10 other
deployments of the same program on up to as many devices, run through the real system process, host, workers and
channels; only the operations' time is emulated (see `pipeline.py`). Half of the others are drawn at large, half are one
change away from the point: an operation moved, a group of another size, two operations swapped, an edge run whole. All
are accepted by `read_deployment`, the analysis and the runtime before one starts. With `--stagger`, planned and other
deployments may interleave batches as well.

- The point's period, measured, is at most 3 % away from the predicted one.
- None of the others is more than 1 % faster than the point, both measured.

A sample that is predicted to be far slower runs for fewer batches: it could only win by a margin that these show. What
misses is measured once more, since others may have used the machine; the second figures stand. How far each sample's
own period is from its prediction is printed beside, the largest of a program. The exit status is 1 when a claim fails.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from peers_programs import Program, draw_deployment
from pipeline import MAX_OTHERS, NUM_FILL, NUM_STEADY, TIMEOUT_S, OtherWork, saturate

from flashrt.analysis import DeploymentCost, Profile, evaluate_placement, read_deployment, read_profile
from flashrt.analysis.search import Point, SearchRequest, search_deployments
from flashrt.bench import resolve_system
from flashrt.bench.drive import Recorder, drain
from flashrt.bench.process import SystemProcess
from flashrt.errors import FlashrtError, InputError
from flashrt.ir import BuiltProgram, build_file
from flashrt.runtime.serve import plan_workers

NUM_PROGRAMS, NUM_SAMPLES = 10, 10
NUM_DEVICES = 6
NAMES = [f"emulated-{number}" for number in range(NUM_DEVICES)]
MAX_OFF, MAX_GAIN = 0.03, 0.01
MIN_PERIOD_MS, MAX_PERIOD_MS = 20.0, 50.0
"""Of the point: long enough for two cores, short enough for a run of all."""
FAR = 1.3
"""A sample that is predicted to take so much longer than the point runs for fewer batches."""
FAR_FILL, FAR_STEADY = 5, 6
MAX_DRAWS = 400


@dataclass(frozen=True)
class Sample:
    """One of the other deployments."""

    how: str
    predicted_ms: float
    period_ms: float
    """Measured."""
    deployment: dict[str, Any]

    @property
    def off(self) -> float:
        """How far the measured period is from the predicted one, as a share."""
        return self.period_ms / self.predicted_ms - 1


@dataclass(frozen=True)
class Row:
    """One program: the point that was planned, and those that it was held against."""

    seed: int
    num_operations: int
    proof: str
    num_devices: int
    predicted_ms: float
    period_ms: float
    """Measured."""
    deployment: dict[str, Any]
    samples: tuple[Sample, ...]
    note: str = ""

    @property
    def off(self) -> float:
        """How far the point's measured period is from the predicted one, as a share."""
        return self.period_ms / self.predicted_ms - 1

    @property
    def best(self) -> Sample:
        """The fastest of the others, as measured."""
        return min(self.samples, key=lambda sample: sample.period_ms)

    @property
    def gain(self) -> float:
        """By which share the fastest of the others beats the point; negative where none does."""
        return 1 - self.best.period_ms / self.period_ms

    @property
    def held(self) -> bool:
        """Whether both claims hold."""
        return abs(self.off) <= MAX_OFF and self.gain <= MAX_GAIN

    def __str__(self) -> str:
        worst = max((sample.off for sample in self.samples), key=abs)
        return (
            f"{self.seed:>4}{self.num_operations:5}{self.num_devices:5}  {self.proof:<9}{self.predicted_ms:9.2f}"
            f"{self.period_ms:9.2f}{self.off:+8.2%}{self.best.period_ms:10.2f}{-self.gain:+9.1%}{worst:+10.2%}  "
            f"{'PASS' if self.held else 'FAIL'}  {self.note}"
        )


@dataclass(frozen=True)
class Case:
    """One drawn program with its profile, the point of least period, and inputs."""

    folder: Path
    built: BuiltProgram
    profile: Profile
    accesses: Mapping[str, set[str]]
    streaming: list[str]
    max_stagger: int
    point: Point
    items: Sequence[Mapping[str, Any]]


def draw_case(seed: int, folder: Path, max_stagger: int) -> Case:
    """Write a random program, and a profile under which its best period suits two cores."""
    program = Program(seed)
    program.write(folder)
    built = build_file(folder / "program.yaml")
    paths = [operation.path for operation in built.flat.operations]
    accesses = {operation.path: set(operation.accesses) for operation in built.flat.operations}
    streaming = [
        edge.label for graph in built.program.graphs.values() for edge in graph.edges if edge.mode == "streaming"
    ]
    generator = random.Random(f"profile {seed}")
    request = SearchRequest(
        NUM_DEVICES, objective="rate", max_stagger=max_stagger, device_kind="emulated", profile_name="profile.yaml"
    )
    for _ in range(MAX_DRAWS):
        _, document = draw_deployment(generator, paths, accesses, streaming)
        (folder / "profile.yaml").write_text(yaml.safe_dump(document, sort_keys=False))
        profile = read_profile(folder / "profile.yaml", built)
        (point,) = search_deployments(built, profile, request).points
        if MIN_PERIOD_MS <= point.period_ms <= MAX_PERIOD_MS:
            values = np.random.default_rng(seed)
            items = [
                {"x": values.standard_normal((program.rows, 3)).astype(np.float32)}
                for _ in range(NUM_FILL + NUM_STEADY + max_stagger)
            ]
            return Case(folder, built, profile, accesses, streaming, max_stagger, point, items)
    raise RuntimeError(f"seed {seed}: no profile with a fitting period in {MAX_DRAWS} draws")


def draw_at_large(case: Case, generator: random.Random) -> dict[str, Any]:
    """Return a deployment with random groups and places, often with random orders, staggers and whole edges."""
    paths = [operation.path for operation in case.built.flat.operations]
    while True:
        document, _ = draw_deployment(generator, paths, case.accesses, case.streaming)
        used = {device for devices in document["groups"].values() for device in devices}
        if len(used) <= NUM_DEVICES:
            break
    numbers = {device: index for index, device in enumerate(sorted(used))}
    document["groups"] = {name: [numbers[device] for device in devices] for name, devices in document["groups"].items()}
    if generator.random() < 0.6:
        listing = draw_extension(case.built, generator)
        document["order"] = orders_by_device(document, listing)
        document["interleave"] = generator.random() < 0.5
        if case.max_stagger and generator.random() < 0.5:
            document["stagger"] = {
                path: generator.randint(1, case.max_stagger) for path in paths if generator.random() < 0.3
            }
    return document


def draw_extension(built: BuiltProgram, generator: random.Random) -> list[str]:
    """Return all operations in a random order that respects the dataflow."""
    before = {
        operation.path: {flow.source for flow in built.flat.incoming[operation.path]} & set(built.flat.by_path)
        for operation in built.flat.operations
    }
    listing: list[str] = []
    while len(listing) < len(before):
        listing.append(generator.choice([p for p in before if p not in listing and before[p] <= set(listing)]))
    return listing


def orders_by_device(document: Mapping[str, Any], listing: Sequence[str]) -> dict[int, list[str]]:
    """Return each device's operations in the order of `listing`."""
    return {
        device: [path for path in listing if document["place"][path] == name]
        for name, devices in document["groups"].items()
        for device in devices
        if name in document["place"].values()
    }


def draw_near(case: Case, generator: random.Random) -> dict[str, Any]:
    """Return a deployment that is one change away from the point."""
    placement = read_deployment(case.point.deployment, case.built)
    names = {devices: f"g{index}" for index, devices in enumerate(dict.fromkeys(placement.devices.values()))}
    document = {
        "schema": "flashrt/deployment@1", "program": "program.yaml", "profile": "profile.yaml", "devices": "emulated",
        "groups": {name: list(devices) for devices, name in names.items()},
        "place": {path: names[devices] for path, devices in placement.devices.items()},
        "blocking": list(placement.document.blocking),
    }  # fmt: skip
    kept = {
        "order": {device: list(paths) for device, paths in placement.order.items()},
        "interleave": placement.document.interleave, "stagger": dict(placement.stagger),
    }  # fmt: skip
    change = generator.choice(["move", "move", "size", "swap", "whole"])
    free = sorted(set(range(NUM_DEVICES)) - {device for devices in names for device in devices})
    if change == "move":
        if free:
            document["groups"]["new"] = free[: generator.choice([1, 2])]
        moved = generator.choice(list(placement.devices))
        target = generator.choice([name for name in document["groups"] if name != document["place"][moved]] or ["g0"])
        for path, states in case.accesses.items():
            if path == moved or states & case.accesses[moved]:
                document["place"][path] = target
        document["groups"] = {n: g for n, g in document["groups"].items() if n in document["place"].values()}
        return document
    if change == "size":
        group = generator.choice(list(document["groups"].values()))
        if len(group) == 1 and free:
            group.append(free[0])
        else:
            del group[1:]
        return document
    if change == "whole" and case.streaming:
        document["blocking"] = sorted({*document["blocking"], generator.choice(case.streaming)})
        return {**document, **kept}
    group = generator.choice(list(document["groups"].values()))
    listing = kept["order"][group[0]]
    if len(listing) > 1:
        at = generator.randrange(len(listing) - 1)
        listing[at : at + 2] = listing[at + 1], listing[at]
    kept["order"] |= dict.fromkeys(group, listing)
    return {**document, **kept}


def accept(case: Case, document: Mapping[str, Any]) -> DeploymentCost | None:
    """Return what a deployment costs, or None where reading, analysis or runtime refuses it."""
    try:
        placement = read_deployment(document, case.built)
        plan_workers(case.built, placement, NAMES, case.folder / "profile.yaml")
        return evaluate_placement(case.built, case.profile, placement)
    except InputError:
        return None


def identity(cost: DeploymentCost) -> Any:
    """Return what makes a deployment differ from others, device numbers aside."""
    placement = cost.constraints.placement
    orders = {(paths, len(placement.devices[paths[0]])) for paths in cost.order.values()}
    turns = cost.interleave and any(
        placement.devices[source] == placement.devices[target] for source, target in cost.constraints.streams
    )
    return frozenset(orders), frozenset(placement.stagger.items()), frozenset(placement.document.blocking), turns


def draw_samples(case: Case, count: int, seed: int) -> Iterator[tuple[str, dict[str, Any], DeploymentCost]]:
    """Yield deployments that differ from the point and from each other, at large and near in turn."""
    generator = random.Random(f"samples {seed}")
    seen = {identity(case.point.cost)}
    for number in range(count):
        how, draw = (("at large", draw_at_large), ("near", draw_near))[number % 2]
        for attempt in range(MAX_DRAWS):
            # A program of few operations may have few neighbours.
            document = (draw if attempt < MAX_DRAWS // 2 else draw_at_large)(case, generator)
            cost = accept(case, document)
            if cost is not None and identity(cost) not in seen:
                seen.add(identity(cost))
                yield how, document, cost
                break
        else:
            raise RuntimeError(f"seed {seed}: no further deployment in {MAX_DRAWS} draws")


def measure(case: Case, document: Mapping[str, Any], *, far: bool = False) -> tuple[float, float]:
    """Run a deployment; return its period in ms and the share of the cores that others used."""
    (case.folder / "deployment.yaml").write_text(yaml.safe_dump(dict(document), sort_keys=False))
    fill, steady = (FAR_FILL, FAR_STEADY) if far else (NUM_FILL, NUM_STEADY)
    items = case.items[: fill + steady + case.max_stagger]
    recorder = Recorder(keep_values=False)
    system = resolve_system("deployment.yaml", case.folder)
    with SystemProcess(system, list(case.items[0]), log_path=case.folder / "system.log") as process:
        process.wait_ready(TIMEOUT_S)
        others = OtherWork(process)
        period_ms = saturate(process, items, recorder, fill, case.max_stagger)
        share = others.share()
        drain(process, recorder, TIMEOUT_S)
    return period_ms, share


def measure_program(seed: int, folder: Path, num_samples: int, max_stagger: int) -> Row:
    """Plan, run and sample one program."""
    case = draw_case(seed, folder, max_stagger)
    point = case.point
    planned = {**point.deployment, "program": "program.yaml"}
    if accept(case, planned) is None:
        raise RuntimeError(f"seed {seed}: the runtime refuses the point that was planned: {planned}")
    period_ms, busiest = measure(case, planned)
    if abs(period_ms / point.period_ms - 1) > MAX_OFF:
        print(f"{seed:>4}  the point took {period_ms:.2f} ms for {point.period_ms:.2f}  (again)", flush=True)
        period_ms, busiest = measure(case, planned)
    samples = []
    for how, document, cost in draw_samples(case, num_samples, seed):
        far = cost.t_min_ms > FAR * point.period_ms
        sample_ms, share = measure(case, document, far=far)
        if sample_ms < period_ms * (1 - MAX_GAIN):
            print(f"{seed:>4}  a sample took {sample_ms:.2f} ms, the point {period_ms:.2f}  (again)", flush=True)
            period_ms, _ = measure(case, planned)
            sample_ms, share = measure(case, document)
        busiest = max(busiest, share)
        samples.append(Sample(how, cost.t_min_ms, sample_ms, document))
    note = f"others used up to {busiest:.0%} of the cores" if busiest > MAX_OTHERS else ""
    return Row(
        seed, len(case.built.flat.operations), point.proof.status, point.num_devices, point.period_ms, period_ms,
        planned, tuple(samples), note,
    )  # fmt: skip


def main() -> int:
    """Print a row for each program; the exit status says whether all claims hold."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="two programs with three samples each")
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    parser.add_argument("--only", type=int, metavar="SEED", help="one program")
    parser.add_argument("--stagger", type=int, default=1, metavar="N", help="interleave batches up to N apart as well")
    arguments = parser.parse_args()
    seeds = range(2 if arguments.quick else NUM_PROGRAMS) if arguments.only is None else [arguments.only]
    begin = time.monotonic()
    print("seed  ops  dev  proof     predicted measured  off     best other  to it  worst off of others   (ms)")
    rows = []
    with tempfile.TemporaryDirectory() as name:
        for seed in seeds:
            folder = Path(name) / f"program-{seed}"
            folder.mkdir()
            num_samples = 3 if arguments.quick else NUM_SAMPLES
            rows.append(measure_program(seed, folder, num_samples, arguments.stagger))
            print(rows[-1], flush=True)
    num_held = sum(row.held for row in rows)
    met = num_held == len(rows)
    off = max((row.off for row in rows), key=abs)
    others = [sample for row in rows for sample in row.samples]
    print(
        f"{'PASS' if met else 'FAIL'}  {num_held} of {len(rows)} points within {MAX_OFF:.0%} of their predicted period "
        f"(worst {off:+.2%}) and beaten by none of {len(others)} others by more than {MAX_GAIN:.0%} (largest gain "
        f"{max(row.gain for row in rows):+.2%}); the others are up to "
        f"{max((sample.off for sample in others), key=abs):+.2%} off their own predictions"
    )
    print(f"{time.monotonic() - begin:.0f} s")
    if arguments.json:
        record = [{**asdict(row), "off": row.off, "gain": row.gain, "held": row.held} for row in rows]
        arguments.json.write_text(json.dumps({"programs": record, "met": met}, indent=1))
    return int(not met)


if __name__ == "__main__":
    try:
        sys.exit(main())
    except FlashrtError as error:
        sys.exit(f"benchmark stopped: {error}")
    except KeyboardInterrupt:
        sys.exit(130)
