"""Processes that exchange tensors over a runtime library built here, and how a test steers them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from flashrt.runtime.cuda_driver import LIBRARY

SOURCE = Path(__file__).with_name("fake_cudart.c")
LIBRARIES = {"cuda": "libcudart.so.12", "rocm": "libamdhip64.so.6"}
MIB = 1 << 20

CHILD = """
import ctypes, hashlib, json, os, sys
from contextlib import contextmanager
import torch
from flashrt.errors import FlashrtError, InputError, ResourceMissingError
from flashrt.runtime.cuda import CudaExporter, CudaImporter, Runtime, TorchDevice, hand_over

COUNTS = ("allocated mapped events open_events queued last_error memory_opens event_opens violations").split()


class Watched(Runtime):
    waits = True

    def stream_wait(self, stream, event):
        if self.waits:
            super().stream_wait(stream, event)

    def host_wait(self, event):
        if self.waits:
            if not self.is_complete(event):
                say({"waiting": True})
            super().host_wait(event)


class HostDevice(TorchDevice):
    queue = 0

    @contextmanager
    def active(self):
        before = runtime.current_device()
        runtime.set_device(self.index)
        try:
            yield
        finally:
            runtime.set_device(before)

    def stream(self):
        return 2 * self.index + self.queue

    def owns(self, tensor):
        return tensor.device.type == "cpu"

    def empty(self, shape, dtype):
        return torch.empty(shape, dtype=dtype)

    def give_back_cache(self):
        pass


def say(reply):
    print(json.dumps(reply), flush=True)


def counts():
    return {name: fake.fakeCount(number) for number, name in enumerate(COUNTS)}


def pattern(shape, dtype="uint8", seed=0):
    whole = getattr(torch, dtype)
    generator = torch.Generator().manual_seed(seed)
    nbytes = torch.Size(shape).numel() * whole.itemsize
    raw = torch.randint(0, 2 if whole is torch.bool else 256, (nbytes,), dtype=torch.uint8, generator=generator)
    return raw.view(whole).reshape(shape)


def bits(tensor):
    plain = tensor.resolve_conj().contiguous()
    data = ctypes.string_at(plain.data_ptr(), plain.numel() * plain.element_size()) if plain.numel() else b""
    return [hashlib.sha256(data).hexdigest(), str(plain.dtype), list(plain.shape)]


runtime = Watched.find()
fake = runtime.library
fake.fakeCount.restype = ctypes.c_long
for line in sys.stdin:
    answer = None
    try:
        exec(json.loads(line))
        say({"answer": answer})
    except FlashrtError as error:
        kind = next(kind.__name__ for kind in (InputError, ResourceMissingError) if isinstance(error, kind))
        say({"kind": kind, "text": str(error)})
"""


class RefusedError(Exception):
    """A child answered with an error of ours: its class and its text."""

    def __init__(self, kind: str, text: str) -> None:
        super().__init__(f"{kind}: {text}")
        self.kind = kind
        self.text = text


class Peer:
    """A process of its own that runs statements and answers with what they assign to `answer`."""

    def __init__(self, library: Path, **environment: str) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-c", CHILD],
            env={**os.environ, LIBRARY: str(library), "OMP_NUM_THREADS": "1", **environment},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.pid = self._process.pid

    def send(self, source: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(source) + "\n")
        self._process.stdin.flush()

    def reply(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line, f"the child ended with {self._process.wait()}"
        found: dict[str, Any] = json.loads(line)
        if "kind" in found:
            raise RefusedError(found["kind"], found["text"])
        return found

    def run(self, source: str) -> Any:
        self.send(source)
        found = self.reply()
        return found["answer"] if "answer" in found else self.reply()["answer"]

    def ask(self, expression: str) -> Any:
        return self.run(f"answer = {expression}")

    def refusal(self, source: str) -> RefusedError:
        with pytest.raises(RefusedError) as caught:
            self.run(source)
        return caught.value

    def open(self, descriptor: Mapping[str, Any]) -> None:
        """Open a message; its tensor is kept under its sequence number."""
        self.run(f"kept[{descriptor['sequence']}] = importer.open(json.loads({json.dumps(descriptor)!r}))")

    def environment(self, **values: str | None) -> None:
        for name, value in values.items():
            self.run(f"os.environ.pop({name!r}, 0)" if value is None else f"os.environ[{name!r}] = {value!r}")

    def kill(self) -> None:
        os.kill(self.pid, signal.SIGKILL)
        self.end()

    def end(self) -> None:
        self._process.communicate()


@dataclass(frozen=True)
class Ends:
    """One exporter and two importers, in three processes."""

    vendor: str
    exporter: Peer
    importer: Peer
    second: Peer

    def start(self, options: str = "", device: int = 0, importing: int = 0, importing_options: str = "") -> None:
        for peer in (self.exporter, self.importer, self.second):
            peer.run("kept, before = {}, counts()")
        self.exporter.run(f"exporter = CudaExporter(runtime, {device}, device=HostDevice({device}), {options})")
        for number, peer in enumerate((self.importer, self.second)):
            peer.run(
                f"importer = CudaImporter(runtime, {importing}, device=HostDevice({importing}), consumer={number},"
                f"{importing_options})"
            )

    def share(self, tensor: str) -> dict[str, Any]:
        found: dict[str, Any] = self.exporter.ask(f"exporter.share({tensor})")
        return found

    def release(self, descriptor: Mapping[str, Any]) -> None:
        self.exporter.run(f"exporter.release_through({descriptor['sequence']})")

    def finish(self) -> None:
        """Close everything, and see that nothing is left in any process."""
        for peer in (self.exporter, self.importer, self.second):
            peer.run("fake.fakeDefer(0)")
        for peer, name in ((self.importer, "importer"), (self.second, "importer"), (self.exporter, "exporter")):
            peer.run(f"'{name}' in globals() and {name}.close()")
            left = peer.ask("counts()")
            exist = ("allocated", "mapped", "events", "open_events", "queued", "last_error", "violations")
            assert {key: left[key] for key in exist} == dict.fromkeys(exist, 0)
            # Other tests may run on this machine: what counts is whether these processes have a file there.
            assert peer.ask("'/dev/shm/' in open('/proc/self/maps').read()") is False


def build_library(folder: Path, vendor: str) -> Path:
    library = folder / LIBRARIES[vendor]
    flags = ["-DHIP"] if vendor == "rocm" else []
    command = ["gcc", "-shared", "-fPIC", "-Wall", "-Wextra", "-Werror", *flags, "-o", str(library), str(SOURCE)]
    subprocess.run(command, check=True)
    return library
