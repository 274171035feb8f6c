"""Serving a deployment through input and output buffers: what makes a deployment document a system."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

from flashrt.analysis.cost import evaluate_placement
from flashrt.analysis.deployment import Placement, read_deployment
from flashrt.analysis.profile import read_profile
from flashrt.errors import input_error, listed
from flashrt.ir.build import BuiltProgram
from flashrt.runtime.layout import Layout, lay_out
from flashrt.runtime.supervisor import Supervisor


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
    built: BuiltProgram, program: Path, deployment: Path, io: Buffers, profile: Path | None = None
) -> None:
    """Run a deployment until the inputs are closed.

    Parameters
    ----------
    program, deployment
        The documents' paths.
    profile
        The times that emulated devices take; needed when the deployment's devices are ``emulated``.

    Raises
    ------
    InputError
        The deployment does not fit the program or the devices, or a worker fails.
    """
    placement = read_deployment(deployment, built)
    layout, place = plan_workers(built, placement, io.devices, profile)
    config = {**placement.document.config, **io.config}
    with Supervisor(program, built.folder, built.flat, place, layout, config, _noting(io)) as supervisor:
        io.on_where(supervisor.ask_where)
        supervisor.wait_ready()
        io.ready()
        _Pump(supervisor, io, list(built.program.graphs[built.program.entry].inputs), layout.window).run()
        for group, usage in supervisor.usage.items():
            io.note({"kind": "usage", "group": group, **usage})


def _noting(io: Buffers) -> Any:
    return lambda event: io.note({key: value for key, value in event.items() if key != "value"})


def plan_workers(
    built: BuiltProgram, placement: Placement, devices: list[str], profile: Path | None = None
) -> tuple[Layout, dict[str, str]]:
    """Return the workers of a placement on named devices, and operation path -> group.

    Raises
    ------
    InputError
        Too few devices, groups that overlap in part, or emulated devices without a profile.
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
    hold_ms: dict[str, float] = {}
    if emulated:
        if profile is None:
            raise input_error(
                "deployment, key 'profile'", "the profile whose times emulated devices take", "nothing",
                "add profile: PATH to the deployment", rule="no-profile",
            )  # fmt: skip
        times = read_profile(profile, built)
        hold_ms = {path: times.time_ms(path, len(numbers)) for path, numbers in placement.devices.items()}
        if not placement.order:
            # What the analysis predicts is the best order; without one in the document, run that.
            placement = read_deployment(evaluate_placement(built, times, placement).deployment, built)
    document = placement.document
    order = _group_orders(placement, by_devices)
    layout = lay_out(
        built.flat, place, groups, order, hold_ms, document.blocking, emulated=emulated,
        interleave=document.interleave is not False,
    )  # fmt: skip
    return layout, place


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
                self._supervisor.submit(batch, item)
                self._num_submitted = batch + 1
        except BaseException as error:  # noqa: BLE001 - raised again in the other thread
            self._failed = error
        self._closed.set()
        self._supervisor.wake()

    def _items(self) -> Iterator[dict[str, Any]]:
        while True:
            try:
                yield {name: self._io.inputs[name].read() for name in self._names}
            except EOFError:
                return
