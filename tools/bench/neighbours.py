"""Whether a measurement had its devices to itself: who else was there before, while it was timed, and after.

A GPU is leased whole, so any foreign process there makes a run invalid. A core cannot be kept from the operating system
and its other users: there the share that they took is recorded and said, and invalidates a run that asks for that.
"""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from types import TracebackType
from typing import Any, Literal, get_args

from flashrt import gpu
from flashrt.errors import Finding
from flashrt.gpu.checking import keep_apart, look_over, memory_in_use
from flashrt.gpu.lease_directory import LeaseDirectory

Rule = Literal["refuse", "record"]
RULES: tuple[str, ...] = get_args(Rule)
ALLOWED_SHARE = 0.05
"""Of the cores' time; the operating system's own work stays below."""
_NAMED = 5
_ANSWER_S = 60.0
_WINDOW_S = 900.0
"""How long a measurement waits for another one on the same GPU to end."""
_FIRST_NAMESPACE = "pid:[4026531836]"


def rule_for(devices: Sequence[str], rule: Rule | None) -> Rule:
    """Return what neighbours do to a run on these devices: what is asked for, else by the kind of device."""
    return rule or ("refuse" if any(":" in name for name in devices) else "record")


class NeighbourWatch:
    """Watches the devices of one restart, from before its system starts until after it has ended.

    On GPUs it first waits for other measurements there to end, and keeps new ones waiting.

    Parameters
    ----------
    devices
        As runs name them; without any, nothing is watched.
    rule
        ``refuse``: neighbours make the run invalid; ``record``: they are noted; None: by the kind of device.
    share
        Of the cores' time that others may take, from 0 to 1.

    Attributes
    ----------
    problems, notes
        Sentences with the evidence.
    found
        The record: devices, cores, and each process that was seen, with what it used.
    """

    def __init__(self, devices: Sequence[str], rule: Rule | None = None, share: float = ALLOWED_SHARE) -> None:
        self.rule = rule_for(devices, rule)
        self.share = share
        self.problems: list[str] = []
        self.notes: list[str] = []
        self.found: dict[str, Any] = {}
        self._devices = tuple(devices)
        self._process: subprocess.Popen[bytes] | None = None
        self._lost = ""
        self._windows: list[int] = []

    def __enter__(self) -> NeighbourWatch:
        if not self._devices:
            return self
        gpus = [name for name in self._devices if ":" in name]
        known = gpu.inventory().devices if gpus else ()
        watched = [{"uuid": device.uuid, "kind": device.kind} for device in known if device.run_name in gpus]
        cores = [int(name.removeprefix("cpu-")) for name in self._devices if name.startswith("cpu-")]
        if not gpus and not cores:
            cores = sorted(os.sched_getaffinity(0))
        self._names = {device.uuid: device.run_name for device in known}
        # In one order for all, so that two measurements never wait for each other.
        for device in sorted(watched, key=lambda one: one["uuid"]):
            self._open_window(device["uuid"])
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", "flashrt.gpu.sampler"],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, bufsize=0,
        )  # fmt: skip
        self._write({"root": os.getpid(), "devices": watched, "cores": cores})
        if gpus:
            # Who is there before the system can be nobody of the system.
            self._answer("before")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._process is None:
            self._close_windows()
            return
        try:
            if error is None:
                self._judge(self._turn("after"))
        finally:
            self._process.kill()
            self._process.wait()
            for stream in (self._process.stdin, self._process.stdout):
                if stream is not None:
                    stream.close()
            self._close_windows()

    def _open_window(self, uuid: str) -> None:
        directory, deadline = LeaseDirectory(), time.monotonic() + _WINDOW_S
        while (window := directory.open_window(uuid)) is None:
            if time.monotonic() > deadline:
                self.problems.append(
                    f"another measurement has been on {self._names[uuid]} for {_WINDOW_S:.0f} s: run again when it ends"
                )
                return
            time.sleep(0.05)
        self._windows.append(window)

    def _close_windows(self) -> None:
        while self._windows:
            os.close(self._windows.pop())

    def begin(self, mark: str) -> None:
        """Say that the timed part begins, and the mark that all processes of the system carry."""
        self._turn("begin", mark=mark)

    def end(self) -> None:
        """Say that the timed part is over."""
        self._turn("end")

    def _turn(self, turn: str, **more: Any) -> Mapping[str, Any]:
        if self._process is None:
            return {}
        self._write({"turn": turn, **more})
        return self._answer(turn)

    def _write(self, message: Mapping[str, Any]) -> None:
        assert self._process is not None
        assert self._process.stdin is not None
        with suppress(OSError):
            self._process.stdin.write(json.dumps(message).encode() + b"\n")

    def _answer(self, turn: str) -> Mapping[str, Any]:
        """Return the sampler's answer to a turn; nothing, and the reason noted, where it gives none."""
        assert self._process is not None
        assert self._process.stdout is not None
        deadline, data = time.monotonic() + _ANSWER_S, b""
        while not self._lost:
            left_s = deadline - time.monotonic()
            if left_s <= 0 or not select.select([self._process.stdout], [], [], left_s)[0]:
                self._lost = f"it gave no answer within {_ANSWER_S:.0f} s"
                break
            chunk = self._process.stdout.read(65536)
            if not chunk:
                self._lost = f"it ended with status {self._process.wait()}"
                break
            data += chunk
            while b"\n" in data:
                line, _, data = data.partition(b"\n")
                said: Mapping[str, Any] = json.loads(line)
                if "error" in said:
                    self._lost = str(said["error"])
                elif said["turn"] == turn:
                    return said
        return {}

    def _judge(self, said: Mapping[str, Any]) -> None:
        self.found = {"rule": self.rule, "allowed_share": self.share, "gpus": [], "cores": None}
        found: list[str] = []
        if self._lost:
            found.append(f"whether others used the devices is not known: the watch of them failed ({self._lost})")
        else:
            found += self._judge_gpus(said["gpus"])
            found += self._judge_cores(said["cores"])
        (self.problems if self.rule == "refuse" else self.notes).extend(found)

    def _judge_gpus(self, processes: Sequence[Mapping[str, Any]]) -> list[str]:
        """Return a sentence for each foreign process; who cannot be told from the run's own is noted."""
        # In a container the driver may number processes as the host does: then numbers do not tell whose they are, but
        # who is there without the system is none of it.
        telling = pid_namespace_is_first() or any(process["own"] for process in processes)
        found = []
        for process in processes:
            if process["own"]:
                continue
            name, place = process["name"] or "not visible from here", self._names.get(process["device"])
            words = (
                f"{place}: process {process['pid']} ({name}, {process['memory_bytes'] or 0} bytes) was there "
                f"{' and '.join(process['seen'])} the run"
            )
            self.found["gpus"].append({**process, "run_name": place})
            if telling or {"before", "after"} & set(process["seen"]):
                found.append(f"neighbour on {words}: end it, or lease other devices, and run again")
            else:
                self.notes.append(f"{words}: whether it is the run's own is not known, numbers being the host's here")
        return found

    def _judge_cores(self, cores: Mapping[str, Any]) -> list[str]:
        if not cores["cores"]:
            return []
        named = [process for process in cores["processes"] if process["share"] >= self.share / 10][:_NAMED]
        self.found["cores"] = {**cores, "processes": named}
        if cores["share"] <= self.share:
            return []
        who = ", ".join(f"{process['pid']} ({process['name']}) {process['share']:.0%}" for process in named)
        return [
            f"neighbours took {cores['share']:.0%} of the time of core{'s' if len(cores['cores']) > 1 else ''} "
            f"{', '.join(map(str, cores['cores']))} while it was timed: {who}; at most {self.share:.0%} leaves it alone"
        ]


def pid_namespace_is_first() -> bool:
    """Return whether process numbers here are the machine's own, as the driver gives them."""
    try:
        return os.readlink("/proc/self/ns/pid") == _FIRST_NAMESPACE
    except OSError:
        return False


class Leftovers:
    """Sees to it that the GPUs of a system are free again when it has ended, and quarantines those that are not.

    Parameters
    ----------
    devices
        As runs name them; their memory in use now is the baseline.
    """

    def __init__(self, devices: Sequence[str]) -> None:
        names = {name for name in devices if ":" in name}
        self._devices = [device for device in gpu.inventory().devices if device.run_name in names] if names else []
        self._baselines = memory_in_use(self._devices)

    def settle(self, system: str, *, probe: bool) -> list[Finding]:
        """Return what is wrong, once all processes of the system have been ended."""
        records = keep_apart(look_over(self._devices, self._baselines, probe=probe), holder=f"a run of {system}")
        names = {device.uuid: device.run_name for device in self._devices}
        return [
            Finding(
                f"device {names[record.device]} after system '{system}'",
                "memory back at its baseline, and a device that answers", record.reason,
                f"it is quarantined: see gpu_status, and when it is free run: flashrt gpu restore {record.device}",
                rule="device-quarantined",
            )
            for record in records
        ]  # fmt: skip
