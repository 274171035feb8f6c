"""Running a deployment: starts the workers, admits batches, gathers outputs, and ends everything together."""

from __future__ import annotations

import os
import queue
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import psutil

from flashrt.errors import input_error
from flashrt.ir.flatten import INPUT, OUTPUT, FlatProgram
from flashrt.runtime.layout import Layout, WorkerPlan
from flashrt.runtime.wire import Connection

Event = Callable[[Mapping[str, Any]], None]
LOAD_TIMEOUT_S = 300


@dataclass(frozen=True)
class _Said:
    """A worker's message, or None when its connection closed."""

    group: str
    message: Mapping[str, Any] | None


class Supervisor:
    """The workers of one deployment; a context manager that leaves none behind.

    Parameters
    ----------
    on_event
        Called with spans and notes as they come.
    """

    def __init__(
        self,
        program: Path,
        folder: Path,
        flat: FlatProgram,
        place: Mapping[str, str],
        layout: Layout,
        config: Mapping[str, Any],
        on_event: Event,
    ) -> None:
        self.flat = flat
        self.layout = layout
        self._on_event = on_event
        self._said: queue.SimpleQueue[_Said] = queue.SimpleQueue()
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self._controls: dict[str, Connection] = {}
        self._place = dict(place)
        self._numbers = {flow: number for number, flow in enumerate(flat.dataflow)}
        self._missing: dict[int, set[str]] = {}
        self.usage: dict[str, Mapping[str, Any]] = {}
        try:
            self._start(program, folder, config)
        except BaseException:
            self.end()
            raise

    def __enter__(self) -> Supervisor:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.end()

    def _start(self, program: Path, folder: Path, config: Mapping[str, Any]) -> None:
        with ExitStack() as opened:
            ends: dict[str, dict[str, socket.socket]] = {worker.group: {} for worker in self.layout.workers}
            for pair in {tuple(sorted(link)) for link in self.layout.links}:
                first, second = (opened.enter_context(end) for end in socket.socketpair())
                ends[pair[0]][pair[1]], ends[pair[1]][pair[0]] = first, second
            for worker in self.layout.workers:
                ours, theirs = socket.socketpair()
                opened.enter_context(theirs)
                links = ends[worker.group]
                descriptors = [theirs.fileno(), *(end.fileno() for end in links.values())]
                # In our own process group: whoever ends the system's group ends the workers too.
                self._processes[worker.group] = subprocess.Popen(
                    [sys.executable, "-P", "-m", "flashrt.runtime.worker", "--fd", str(theirs.fileno())],
                    stdin=subprocess.DEVNULL,
                    pass_fds=descriptors,
                    env={**os.environ, **_visible(worker)},
                )
                _pin(self._processes[worker.group].pid, worker)
                # torch=False: values pass through here as bytes, so that the supervisor needs no torch.
                control = Connection(ours, torch=False)
                self._controls[worker.group] = control
                hello = {
                    "program": str(program),
                    "folder": str(folder),
                    "plan": worker.as_dict(),
                    "place": self._place,
                    "config": dict(config),
                    "links": {group: end.fileno() for group, end in links.items()},
                }
                control.send({"kind": "hello"}, hello)
                threading.Thread(target=self._receive, args=(worker.group, control), daemon=True).start()

    def _receive(self, group: str, control: Connection) -> None:
        with suppress(OSError, ValueError):
            while (message := control.receive()) is not None:
                if message["kind"] in {"span", "note"}:
                    self._on_event(message)
                else:
                    self._said.put(_Said(group, message))
        self._said.put(_Said(group, None))

    def wait_ready(self) -> None:
        """Wait until every worker has loaded its operations.

        Raises
        ------
        InputError
            A worker failed or died.
        """
        waiting = set(self._processes)
        while waiting:
            said = self._next("to load its operations", LOAD_TIMEOUT_S)
            if said.message is not None and said.message["kind"] == "ready":
                waiting.discard(said.group)

    def submit(self, batch: int, inputs: Mapping[str, Any]) -> None:
        """Send a batch's inputs to the workers that use them, and admit the batch everywhere."""
        flows = self.flat.outgoing.get(INPUT, ())
        self._missing[batch] = {flow.target_port for flow in self.flat.incoming.get(OUTPUT, ())}
        for flow in flows:
            head = {"kind": "chunk", "flow": self._numbers[flow], "batch": batch, "last": True}
            if flow.target == OUTPUT:
                passed = {**head, "kind": "output", "name": flow.target_port, "value": inputs[flow.source_port]}
                self._said.put(_Said("", passed))
            else:
                self._tell(self._place[flow.target], head, inputs[flow.source_port])
        for group in self._controls:
            self._tell(group, {"kind": "admit", "count": batch + 1})

    def _tell(self, group: str, head: Mapping[str, Any], value: Any = None) -> None:
        # A dead worker shows as a closed connection in `next_output`, with its reason.
        with suppress(OSError):
            self._controls[group].send(head, value)

    def wake(self) -> None:
        """Make a waiting `next_output` return."""
        self._said.put(_Said("", {"kind": "wake"}))

    def next_output(self, timeout_s: float | None = None) -> tuple[str, Any, int, bool] | None:
        """Return (output, value, batch, whether that batch is now complete), or None when nothing came in time.

        Raises
        ------
        InputError
            A worker failed or died; names the group, its operations and the last traceback.
        """
        while True:
            said = self._poll(timeout_s)
            if said is None:
                return None
            message = said.message
            if message is not None and message["kind"] == "wake":
                return None
            if message is None or message["kind"] != "output":
                continue
            batch = int(message["batch"])
            if message["last"]:
                self._missing[batch].discard(message["name"])
            complete = not self._missing[batch]
            if complete:
                del self._missing[batch]
            return message["name"], message["value"], batch, complete

    def stop(self, num_batches: int) -> None:
        """Let every worker end after `num_batches` and wait until all have."""
        for group in self._controls:
            self._tell(group, {"kind": "stop", "count": num_batches})
        waiting = set(self._processes)
        while waiting:
            said = self._next("to end after the last batch", LOAD_TIMEOUT_S)
            if said.message is not None and said.message["kind"] == "done":
                waiting.discard(said.group)
                self.usage[said.group] = said.message["usage"]

    def _poll(self, timeout_s: float | None) -> _Said | None:
        try:
            said = self._said.get(timeout=timeout_s)
        except queue.Empty:
            return None
        if said.message is not None and said.message["kind"] == "orphaned":
            # The worker that broke first is about to say so, or has died without a word.
            return self._poll(5) or said
        if said.message is not None and said.message["kind"] == "failed":
            text = f"{said.message['text']}\n{said.message['traceback']}".strip()
            raise self._broken(said.group, text)
        if said.message is None and said.group not in self.usage:
            with suppress(subprocess.TimeoutExpired):
                self._processes[said.group].wait(timeout=5)
            code = self._processes[said.group].poll()
            raise self._broken(said.group, f"its process ended with status {code}")
        return said

    def _next(self, expected: str, timeout_s: float) -> _Said:
        said = self._poll(timeout_s)
        if said is None:
            raise input_error("deployment", f"every worker {expected} within {timeout_s} s", "silence", "see the log")
        return said

    def _broken(self, group: str, got: str) -> Exception:
        worker = next(worker for worker in self.layout.workers if worker.group == group)
        where = f"group '{group}' ({', '.join(worker.operations)} on {', '.join(worker.devices) or 'cpu'})"
        return input_error(
            where, "a worker that runs", got, "correct the operation and call again", rule="worker-failed"
        )

    def end(self) -> None:
        """End every worker and reap it."""
        for process in self._processes.values():
            with suppress(ProcessLookupError):
                process.kill()
        for process in self._processes.values():
            process.wait()
        for control in self._controls.values():
            control.shutdown()


def _visible(worker: WorkerPlan) -> dict[str, str]:
    """Return what to export so that a worker sees only its own devices; CPU and emulated ones need nothing."""
    numbers = [name.split(":", 1)[1] for name in worker.devices if ":" in name]
    kind = worker.devices[0].split(":", 1)[0] if numbers else ""
    if kind == "cuda":
        return {"CUDA_DEVICE_ORDER": "PCI_BUS_ID", "CUDA_VISIBLE_DEVICES": ",".join(numbers)}
    return {"ROCR_VISIBLE_DEVICES": ",".join(numbers)} if kind == "rocm" else {}


def _pin(pid: int, worker: WorkerPlan) -> None:
    cores = [int(name.removeprefix("cpu-")) for name in worker.devices if name.startswith("cpu-")]
    if cores:
        with suppress(OSError, psutil.Error, ValueError):
            psutil.Process(pid).cpu_affinity(cores)
