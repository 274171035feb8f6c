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

from flashrt.clock import monotonic_ns
from flashrt.errors import input_error
from flashrt.gpu.exports import mask_devices
from flashrt.ir.flatten import INPUT, OUTPUT, FlatProgram
from flashrt.runtime.layout import Layout, WorkerPlan
from flashrt.runtime.lifeline import exit_words
from flashrt.runtime.wire import Connection

Event = Callable[[Mapping[str, Any]], None]
LOAD_TIMEOUT_S = 300
CULPRIT_TIMEOUT_S = 2
JOIN_TIMEOUT_S = 5


@dataclass(frozen=True)
class Output:
    """A part of a batch's output; `value` is empty where a batch only turned out to be complete."""

    name: str
    value: tuple[Any, ...]
    batch: int
    completes_batch: bool


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
        self._orphans: dict[str, str] = {}
        self._threads: list[threading.Thread] = []
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
                # torch=False: values pass through here as bytes, so that the supervisor needs no torch.
                control = self._controls[worker.group] = Connection(ours, torch=False)
                # In our own process group: whoever ends the system's group ends the workers too.
                process = self._processes[worker.group] = subprocess.Popen(
                    [sys.executable, "-P", "-m", "flashrt.runtime.worker", "--fd", str(theirs.fileno())],
                    stdin=subprocess.DEVNULL,
                    pass_fds=descriptors,
                    env={**os.environ, **mask_devices(worker.devices)[0]},
                )
                _pin(process.pid, worker)
                hello = {
                    "program": str(program),
                    "folder": str(folder),
                    "plan": worker.as_dict(),
                    "place": self._place,
                    "config": dict(config),
                    "links": {group: end.fileno() for group, end in links.items()},
                    "supervisor": os.getpid(),
                }
                self._tell(worker.group, {"kind": "hello"}, hello)
                self._run(self._receive, worker.group, control)
                self._run(self._watch, process, control)

    def _run(self, target: Callable[..., None], *arguments: Any) -> None:
        thread = threading.Thread(target=target, args=arguments, daemon=True)
        self._threads.append(thread)
        thread.start()

    def _watch(self, process: subprocess.Popen[bytes], control: Connection) -> None:
        """Make a worker's death known even where a process that it forked still holds its connection."""
        process.wait()
        control.stop_reading()

    def _receive(self, group: str, control: Connection) -> None:
        try:
            while (message := control.receive()) is not None:
                if message["kind"] in {"span", "note", "overrun"}:
                    self._on_event(message)
                elif message["kind"] == "at":
                    self._on_event({"kind": "at", "text": f"{self._describe(group)}: {message['text']}"})
                else:
                    self._said.put(_Said(group, message))
        except (OSError, ValueError, KeyError, MemoryError) as error:
            text = f"its process sent bytes that are no message: {type(error).__name__}: {error}"
            self._said.put(_Said(group, {"kind": "failed", "text": text, "traceback": ""}))
        self._said.put(_Said(group, None))

    def wait_ready(self) -> None:
        """Wait until every worker has loaded its operations.

        Raises
        ------
        InputError
            A worker failed or died, or did not finish in time; names its group.
        """
        self._wait_all("ready", "to load its operations", LOAD_TIMEOUT_S)

    def ask_where(self) -> None:
        """Ask every worker where it is; the answers come as ``at`` events."""
        for group in self._controls:
            self._tell(group, {"kind": "where"})

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

    def next_output(self, timeout_s: float | None = None) -> Output | None:
        """Return what came next of the outputs, or None when nothing came in time.

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
            if message is None or message["kind"] not in {"output", "output_end"}:
                continue
            batch = int(message["batch"])
            missing = self._missing[batch]
            if message["last"]:
                missing.discard(message["name"])
            if not missing:
                del self._missing[batch]
            value = () if message["kind"] == "output_end" else (message["value"],)
            return Output(message["name"], value, batch, not missing)

    def stop(self, num_batches: int) -> None:
        """Let every worker end after `num_batches` and wait until all have."""
        for group in self._controls:
            self._tell(group, {"kind": "stop", "count": num_batches})
        self._wait_all("done", "to end after the last batch", LOAD_TIMEOUT_S)

    def _wait_all(self, kind: str, expected: str, timeout_s: float) -> None:
        waiting = set(self._processes)
        deadline_ns = monotonic_ns() + int(timeout_s * 1e9)
        while waiting:
            said = self._poll(max((deadline_ns - monotonic_ns()) / 1e9, 0))
            if said is None:
                raise input_error(
                    f"deployment, {', '.join(self._describe(group) for group in sorted(waiting))}",
                    f"{expected} within {timeout_s:.0f} s", "no word from it", "correct the operation and call again",
                    rule="worker-silent",
                )  # fmt: skip
            if said.message is not None and said.message["kind"] == kind:
                waiting.discard(said.group)
                if kind == "done":
                    self.usage[said.group] = said.message["usage"]

    def _poll(self, timeout_s: float | None) -> _Said | None:
        try:
            said = self._said.get(timeout=timeout_s)
        except queue.Empty:
            return None
        message = said.message
        if message is not None and message["kind"] == "orphaned":
            self._orphans[said.group] = message["text"]
        self._raise_if_broken(said)
        if message is None and said.group in self._orphans:
            self._blame_another(said.group)
        return said

    def _raise_if_broken(self, said: _Said) -> None:
        message = said.message
        if message is not None and message["kind"] == "failed":
            raise self._broken(said.group, f"{message['text']}\n{message['traceback']}".strip())
        if message is None and said.group not in self.usage and said.group not in self._orphans:
            raise self._broken(said.group, f"its process ended with {exit_words(self._processes[said.group].wait())}")

    def _blame_another(self, orphan: str) -> None:
        """Raise for the worker that broke first: it is about to say so, or has died without a word."""
        deadline_ns = monotonic_ns() + int(CULPRIT_TIMEOUT_S * 1e9)
        while (left_ns := deadline_ns - monotonic_ns()) > 0:
            try:
                self._raise_if_broken(self._said.get(timeout=left_ns / 1e9))
            except queue.Empty:
                break
        raise self._broken(orphan, self._orphans[orphan])

    def _describe(self, group: str) -> str:
        worker = next(worker for worker in self.layout.workers if worker.group == group)
        return f"group '{group}' ({', '.join(worker.operations)} on {', '.join(worker.devices) or 'cpu'})"

    def _broken(self, group: str, got: str) -> Exception:
        return input_error(
            self._describe(group), "a worker that runs", got, "correct the operation and call again",
            rule="worker-failed",
        )  # fmt: skip

    def end(self) -> None:
        """End every worker and reap it."""
        for process in self._processes.values():
            process.kill()
        for process in self._processes.values():
            process.wait()
        for control in self._controls.values():
            control.shutdown()
        for thread in self._threads:
            thread.join(timeout=JOIN_TIMEOUT_S)
        for control in self._controls.values():
            control.close()


def _pin(pid: int, worker: WorkerPlan) -> None:
    cores = [int(name.removeprefix("cpu-")) for name in worker.devices if name.startswith("cpu-")]
    if cores:
        # A core that this machine does not have: the worker runs where it may.
        with suppress(OSError):
            os.sched_setaffinity(pid, cores)
