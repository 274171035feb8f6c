"""Serving a deployment through input and output buffers: what makes a deployment document a system."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from math import ceil
from pathlib import Path
from typing import Any, Protocol

from flashrt.analysis.constraints import build_constraints, flow_lag
from flashrt.analysis.cost import DeploymentCost, evaluate_placement
from flashrt.analysis.deployment import Deployment, Placement, read_deployment
from flashrt.analysis.profile import TICKS_PER_MS, Profile, read_profile
from flashrt.analysis.profile_key import Use, check_profile_key
from flashrt.errors import Finding, InputError, input_error, listed
from flashrt.ir.building import BuiltProgram, find_operations
from flashrt.ir.flattening import INPUT, OUTPUT
from flashrt.runtime.channels.errors import ChannelClosedError
from flashrt.runtime.launch import Run
from flashrt.runtime.layout import Emulation, Layout, Strategy, lay_out
from flashrt.runtime.supervisor import Event, Supervisor

PATIENCE, MIN_PATIENCE_S = 1.5, 0.02


class Buffers(Protocol):
    """What serving needs of a system's buffers (see `flashrt.bench.io.SystemIO`)."""

    devices: list[str]
    config: dict[str, Any]

    @property
    def inputs(self) -> Mapping[str, Any]:
        """Input buffers by name."""

    @property
    def outputs(self) -> Mapping[str, Any]:
        """Output buffers by name."""

    def ready(self) -> None:
        """Say that everything is loaded and warm."""

    def batch_done(self, batch: int) -> None:
        """Say that all outputs of a batch have been written."""

    def note(self, event: dict[str, Any]) -> None:
        """Send an event beside the outputs."""

    def on_where(self, ask: Callable[[], None]) -> None:
        """Say whom to ask where the system is, when it is silent for too long."""


def serve_deployment(
    built: BuiltProgram,
    program: Path,
    deployment: Path,
    io: Buffers,
    profile: Path | None = None,
    measured: Mapping[str, Any] | None = None,
) -> None:
    """Run a deployment until the inputs are closed.

    Parameters
    ----------
    program, deployment
        The documents' paths.
    profile
        The times that emulated devices take; needed when the deployment's devices are ``emulated``.
    measured
        What a profile asks of the workers, see `flashrt.runtime.measuring`; absent: nothing is measured.

    Raises
    ------
    InputError
        The deployment does not fit the program or the devices, its profile is out of date, or a worker fails.
    """
    placement = read_deployment(deployment, built)
    layout = plan_workers(built, placement, io.devices, profile, io.config)
    if measured:
        layout = replace(layout, workers=tuple(replace(worker, measured=measured) for worker in layout.workers))
    with start_workers(built, program, placement, layout, io.config, _noting(io)) as supervisor:
        io.on_where(supervisor.ask_where)
        supervisor.wait_ready()
        io.ready()
        _Pump(supervisor, io, list(built.program.graphs[built.program.entry].inputs), layout.window).run()
        for name, usage in supervisor.usage.items():
            io.note({"kind": "usage", "group": name, **usage})


def start_workers(
    built: BuiltProgram,
    program: Path,
    placement: Placement,
    layout: Layout,
    config: Mapping[str, Any],
    on_event: Event,
) -> Supervisor:
    """Start the workers of a layout; see `plan_workers`.

    Parameters
    ----------
    program
        The program document's path.
    config
        Options that come before the deployment's own.

    Raises
    ------
    InputError
        The transport is not installed, or there is no memory for the channels.
    """
    document = placement.document
    transport = "shared_memory" if document.transport == "auto" else document.transport
    run = Run(
        program, built.folder, built.flat, layout, {**document.config, **config}, transport, document.spin_us,
        document.operation_timeout_s, _patience_s(document, layout),
    )  # fmt: skip
    if document.cluster == "ray":
        from flashrt.runtime.cluster import RayLauncher

        return Supervisor(run, on_event, RayLauncher())
    return Supervisor(run, on_event)


def _noting(io: Buffers) -> Any:
    return lambda event: io.note({key: value for key, value in event.items() if key != "value"})


def _patience_s(document: Deployment, layout: Layout) -> float:
    """Return after how long a batch counts as missing: half as long again as the period, where that is known."""
    period_s = max(layout.period_s, (document.period_ms or 0.0) / 1e3)
    return max(PATIENCE * period_s, MIN_PATIENCE_S)


def plan_workers(
    built: BuiltProgram,
    placement: Placement,
    devices: Sequence[str],
    profile: Path | None = None,
    config: Mapping[str, Any] | None = None,
) -> Layout:
    """Return the workers of a placement on named devices.

    Parameters
    ----------
    config
        Options of the run, which come before the deployment's own.

    Raises
    ------
    InputError
        Too few devices, groups that overlap in part, emulated devices without a profile, or one that was measured of
        another program or on another kind of device.
    """
    document = placement.document
    emulated = document.devices == "emulated"
    names = list(devices) or [f"{'emulated' if emulated else 'cpu'}-{n}" for n in range(_highest(placement) + 1)]
    if _highest(placement) >= len(names):
        raise input_error(
            "deployment, key 'groups'", f"device numbers below {len(names)}, the devices given: {listed(names)}",
            f"device {_highest(placement)}", "acquire more devices with gpu_acquire and pass them as 'devices'",
            rule="too-few-devices",
        )  # fmt: skip
    by_devices: dict[tuple[int, ...], str] = {}
    place: dict[str, str] = {}
    for path, numbers in placement.devices.items():
        label = next(name for name, group in document.groups.items() if group == numbers)
        place[path] = by_devices.setdefault(numbers, label)
    _refuse_overlaps(by_devices)
    groups = {label: [names[number] for number in numbers] for numbers, label in by_devices.items()}
    emulation = None
    if emulated and profile is None:
        raise input_error(
            "deployment, key 'profile'", "the profile whose times emulated devices take", "nothing",
            "add profile: PATH to the deployment", rule="no-profile",
        )  # fmt: skip
    if profile is not None:
        times = read_profile(profile, built)
        if findings := check_times(built, document, times, profile.name, names, config):
            raise InputError(findings)
        cost = evaluate_placement(built, times, placement)
        # What the analysis predicts is the best order; without one in the document, run that.
        placement = read_deployment(cost.deployment, built)
        emulation = _emulate(built, times, placement, cost) if emulated else None
    document = placement.document
    tiles = {
        path: count for name, count in document.tiles.items() for path in find_operations(built.flat, name)
    }  # fmt: skip
    strategy = Strategy(
        _group_orders(placement, by_devices), document.blocking, document.interleave is not False,
        placement.asynchronous, tiles, document.in_flight, document.nan, placement.stagger,
    )  # fmt: skip
    return lay_out(built.flat, place, groups, strategy, emulation)


def check_times(
    built: BuiltProgram,
    document: Deployment,
    profile: Profile,
    name: str,
    devices: Sequence[str],
    config: Mapping[str, Any] | None = None,
) -> list[Finding]:
    """Return why a measured profile is not that of a deployment as it would run now; see `check_profile_key`.

    Parameters
    ----------
    name
        The profile's, for the findings.
    devices
        Names of the devices; empty: any of the deployment's kind.
    config
        Options of the run, which come before the deployment's own.
    """
    kind = document.devices or "cpu"
    use = Use(kind, () if kind == "emulated" else tuple(devices), {**document.config, **(config or {})})
    return check_profile_key(profile, built, use, f"profile '{name}'")


def _emulate(built: BuiltProgram, profile: Profile, placement: Placement, cost: DeploymentCost) -> Emulation:
    """Return the times that the analysis counts with, for emulated devices to take."""
    constraints = build_constraints(built, profile, placement)
    part_ns = {
        path: [round(constraints.times[part] * 1e6 / TICKS_PER_MS) for part in constraints.parts_of(path)]
        for path in constraints.first
    }
    lag_ns = {}
    for number, flow in enumerate(built.flat.dataflow):
        if flow.source != INPUT and flow.target != OUTPUT:
            lag = flow_lag(built, profile, placement, flow)
            if lag:
                lag_ns[number] = round(lag * 1e6 / TICKS_PER_MS)
    batches = ceil(cost.latency_ms / cost.t_min_ms) if cost.t_min_ms else 1
    return Emulation(part_ns, lag_ns, batches, cost.t_min_ms / 1e3)


def _group_orders(placement: Placement, by_devices: Mapping[tuple[int, ...], str]) -> dict[str, tuple[str, ...]]:
    """Return group -> its order: all devices of a group run the same operations, so in the same order."""
    found: dict[str, tuple[str, ...]] = {}
    for numbers, label in by_devices.items():
        given = {number: placement.order[number] for number in numbers if number in placement.order}
        if len(set(given.values())) > 1:
            raise input_error(
                f"deployment, order of devices {sorted(given)}", f"one order for the devices of group '{label}'",
                "; ".join(f"{number}: {listed(order)}" for number, order in given.items()),
                "write the same order, or only one", rule="orders-differ",
            )  # fmt: skip
        if given:
            found[label] = next(iter(given.values()))
    return found


def _highest(placement: Placement) -> int:
    return max(number for numbers in placement.devices.values() for number in numbers)


def _refuse_overlaps(by_devices: Mapping[tuple[int, ...], str]) -> None:
    for numbers, label in by_devices.items():
        for others, other in by_devices.items():
            if label < other and set(numbers) & set(others):
                raise input_error(
                    f"deployment, groups '{label}' and '{other}'", "the same devices, or none in common",
                    f"{list(numbers)} and {list(others)}", "make the groups equal or disjoint",
                    rule="overlapping-groups",
                )  # fmt: skip


class _Pump:
    """Moves items in and outputs out: one thread reads and submits, this one takes what the workers say."""

    def __init__(self, supervisor: Supervisor, io: Buffers, names: list[str], window: int) -> None:
        self._supervisor = supervisor
        self._io = io
        self._names = names
        self._free = threading.Semaphore(window)
        self._num_submitted = 0
        self._closed = threading.Event()
        self._failed: BaseException | None = None

    def run(self) -> None:
        threading.Thread(target=self._feed, daemon=True).start()
        num_done = 0
        while not (self._closed.is_set() and num_done == self._num_submitted):
            output = self._supervisor.next_output()
            if self._failed is not None:
                break
            if output is None:
                continue
            for value in output.value:
                self._io.outputs[output.name].write(value, output.batch)
            if output.completes_batch:
                self._io.batch_done(output.batch)
                num_done += 1
                self._free.release()
        if self._failed is not None:
            raise self._failed
        self._supervisor.stop(num_done)

    def _feed(self) -> None:
        try:
            for batch, item in enumerate(self._items()):
                self._free.acquire()
                self._num_submitted = batch + 1
                self._supervisor.submit(batch, item)
        except ChannelClosedError:
            # A worker has ended; the other thread hears why.
            return
        except BaseException as error:  # noqa: BLE001 - raised again in the other thread
            self._failed = error
        self._closed.set()
        self._supervisor.close_inputs()

    def _items(self) -> Iterator[dict[str, Any]]:
        while True:
            try:
                yield {name: self._io.inputs[name].read() for name in self._names}
            except EOFError:
                return
