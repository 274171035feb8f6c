"""``flashrt deploy``: a deployment document as a service until it is stopped."""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flashrt import gpu
from flashrt.analysis.deployment import Deployment, read_deployment
from flashrt.bench import read_inputs, resolve_system
from flashrt.bench.systems import check_system_times
from flashrt.clock import monotonic_ns
from flashrt.errors import FlashrtError, InputError, input_error
from flashrt.ir import build, read_document
from flashrt.mcp_server.devices import device_names
from flashrt.mcp_server.workspace import Workspace
from flashrt.runtime.lifeline import MARK, kill_marked
from flashrt.runtime.service import Client, Service
from flashrt.runtime.trace import is_emulated, trace_events, utilisation

LEASE_S = 60.0
RENEW_S = 2.0


@dataclass(frozen=True)
class DeployOptions:
    """What the command line says."""

    document: str
    workspace: Path
    socket: Path | None = None
    devices: str | None = None
    """A lease, or names separated by commas; absent: devices of the document's kind are leased."""
    inputs: str | None = None
    """``file.py:function`` whose items are sent, instead of waiting for a client."""
    count: int = 20
    seed: int = 0
    period_ms: float | None = None
    trace: Path | None = None


def run_deploy_command(options: argparse.Namespace) -> int:
    """Carry out the command."""
    return run_deploy(DeployOptions(**{key: value for key, value in vars(options).items() if key != "command"}))


def run_deploy(options: DeployOptions) -> int:
    """Run a deployment until SIGINT or SIGTERM, or until the given inputs are done; return the exit status."""
    workspace = options.workspace.resolve()
    system = resolve_system(options.document, workspace, find_id=Workspace(workspace).find_id)
    if system.kind != "deployment" or system.program is None or system.folder is None:
        raise input_error(
            f"document '{options.document}'", "a deployment (schema flashrt/deployment@1)", f"a {system.kind}",
            "name a deployment document; plan_deployment makes them",
        )  # fmt: skip
    built = build(read_document(system.program), system.folder, f"program '{system.program.name}'")
    deployment = read_deployment(system.path, built).document
    if stale := check_system_times(system):
        raise InputError(stale)
    if options.trace is not None and not options.trace.resolve().parent.is_dir():
        raise input_error(
            f"--trace '{options.trace}'", "a file in a folder that exists", "no such folder", "create it first"
        )  # fmt: skip
    address = options.socket or workspace / ".flashrt" / "services" / f"{system.path.stem}.sock"
    address.parent.mkdir(parents=True, exist_ok=True)
    items = read_inputs(options.inputs, workspace, options.seed, options.count) if options.inputs else None
    ready = threading.Event()
    lost: list[FlashrtError] = []
    with _leased(options, system.path.name, deployment, lost) as (devices, on_loss):
        # All that is started from here on carries the mark, so that it can be found and ended whatever it does.
        os.environ[MARK] = mark = uuid.uuid4().hex
        service = Service(built, devices, address, ready.set)
        on_loss.append(service.stop)
        feeder = _Feeder(service, address, items, options.period_ms)
        threading.Thread(target=_announce, args=(ready, service, address, feeder), daemon=True).start()
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda *_: _stop(service))
        begin_ns = monotonic_ns()
        try:
            service.run(system.program, system.path, system.profile)
        finally:
            kill_marked(mark, keep=os.getpid())
        _summarise(service, options.trace, feeder, begin_ns)
    if lost:
        raise lost[0]
    return 1 if feeder.error else 0


def _stop(service: Service) -> None:
    """Stop politely; the second time, or while it still loads, at once."""
    if service.is_stopping or not service.is_ready:
        raise KeyboardInterrupt
    service.stop()


Leased = tuple[Sequence[str], list[Callable[[], None]]]


@contextmanager
def _leased(options: DeployOptions, name: str, deployment: Deployment, lost: list[FlashrtError]) -> Iterator[Leased]:
    """Yield the devices to run on, and a list of what to call when they are lost.

    Devices that are leased here are returned at the end, whatever happens.
    """
    on_loss: list[Callable[[], None]] = []
    if options.devices:
        given = options.devices
        yield device_names(given if given.startswith("lease") else given.split(",")), on_loss
        return
    kind = deployment.devices or "cpu"
    count = max(number for numbers in deployment.groups.values() for number in numbers) + 1
    if kind == "emulated":
        # They are nobody's: each process emulates its own.
        yield (), on_loss
        return
    lease = gpu.acquire(
        count, f"flashrt deploy {name}", kind=kind, ttl_s=LEASE_S, holder_pid=os.getpid(), purpose="deploy"
    )
    ended = threading.Event()

    def renew() -> None:
        while not ended.wait(RENEW_S):
            try:
                gpu.renew(lease, LEASE_S)
            except FlashrtError as error:
                # The devices may be somebody else's by now.
                lost.append(error)
                for call in on_loss:
                    call()
                return

    threading.Thread(target=renew, daemon=True).start()
    try:
        yield [device.run_name for device in gpu.lease_devices(lease.lease)], on_loss
    finally:
        ended.set()
        if not lost:
            gpu.release(lease)


class _Feeder:
    """Sends items of an inputs function through the service's own socket, and times them."""

    def __init__(
        self, service: Service, address: Path, items: Sequence[dict[str, Any]] | None, period_ms: float | None
    ) -> None:
        self._service = service
        self._address = address
        self.items = items
        self._period_ms = period_ms
        self.latencies_ms: list[float] = []
        self.error: FlashrtError | None = None

    def run(self) -> None:
        """Send all items, then stop the service."""
        assert self.items is not None
        try:
            with Client(self._address, torch=False) as client:
                self._drive(client)
        except FlashrtError as error:
            self.error = error
            print(f"flashrt deploy: {error}", file=sys.stderr)
        except (EOFError, OSError):
            # The service has ended; its own error says why.
            return
        finally:
            self._service.stop()

    def _drive(self, client: Client) -> None:
        assert self.items is not None
        sent_ns: list[int] = []
        begin_ns = monotonic_ns()

        def send() -> None:
            for number, item in enumerate(self.items or ()):
                due_ns = begin_ns + int(number * (self._period_ms or 0) * 1e6)
                time.sleep(max((due_ns - monotonic_ns()) / 1e9, 0))
                sent_ns.append(due_ns if self._period_ms else monotonic_ns())
                client.send(item)

        threading.Thread(target=_until_broken, args=(send,), daemon=True).start()
        while len(self.latencies_ms) < len(self.items):
            name, _, batch = client.receive()
            if name is None:
                self.latencies_ms.append((monotonic_ns() - sent_ns[batch]) / 1e6)


def _until_broken(send: Callable[[], None]) -> None:
    # Whoever receives says why the service is gone.
    with suppress(OSError, FlashrtError):
        send()


def _announce(ready: threading.Event, service: Service, address: Path, feeder: _Feeder) -> None:
    ready.wait()
    record = {
        "ready": True,
        "socket": str(address.absolute()),
        "inputs": list(service.inputs),
        "outputs": list(service.outputs),
        "devices": service.devices,
    }
    print(json.dumps(record), flush=True)
    if feeder.items is not None:
        feeder.run()


def _summarise(service: Service, trace: Path | None, feeder: _Feeder, begin_ns: int) -> None:
    activities = list(service.activities)
    first_ns = min((int(event["start_ns"]) for event in activities), default=begin_ns)
    last_ns = max((int(event["end_ns"]) for event in activities), default=first_ns + 1)
    shares = utilisation(activities, first_ns, last_ns)
    record: dict[str, Any] = {"batches": service.num_done, "seconds": (last_ns - first_ns) / 1e9, "devices": shares}
    record["emulated"] = any(is_emulated(device) for device in shares)
    if feeder.latencies_ms:
        ordered = sorted(feeder.latencies_ms)
        record["latency_ms"] = {"p50": ordered[len(ordered) // 2], "max": ordered[-1]}
    if service.notes:
        record["notes"] = service.notes
    if trace is not None:
        events = trace_events(activities, first_ns, 1)
        trace.write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}))
        record["trace"] = str(trace)
    print(json.dumps(record), flush=True)
