"""Ways to hand a tensor from one process to another, all with the same few verbs, for `transport.py`.

A way that is not installed, or does not start, gives the reason instead of itself. Everything is made before the
consumer is forked; each process then opens its own end.
"""

from __future__ import annotations

import ctypes
import importlib.util
import os
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from flashrt.runtime.channels.hub import Hub, Transport, open_endpoint
from flashrt.runtime.channels.plan import ChannelPlan

CAPACITY = 4
"""Values that may wait between the two, where a way lets one choose; the runtime's channels have at least as many."""
TIMEOUT_S = 30
FUTEX_WAIT, FUTEX_WAKE = 0, 1
SYS_FUTEX = {"x86_64": 202, "aarch64": 98}


class Way(ABC):
    """One way from the producer to the consumer.

    Attributes
    ----------
    name
        As the table calls it.
    is_floor
        Whether it only wakes the consumer and carries nothing.
    """

    is_floor = False

    def __init__(self, name: str) -> None:
        self.name = name

    def open_producer(self) -> None:  # noqa: B027 - most have nothing to open
        """Open the producer's end, in its process."""

    def open_consumer(self) -> None:  # noqa: B027 - most have nothing to open
        """Open the consumer's end, in its process."""

    @abstractmethod
    def make(self, size: int) -> Any:
        """Return a tensor of `size` bytes as a producing operation would have it, ready to be written."""

    @abstractmethod
    def send(self, value: Any) -> None:
        """Hand over what `make` returned."""

    @abstractmethod
    def receive(self, size: int) -> Any:
        """Return the next tensor; sleeps until it is there."""

    def close(self) -> None:  # noqa: B027 - most have nothing to close
        """Let go of this process's end."""


class Wakeup(Way):
    """A wake-up between the two cores and nothing else."""

    is_floor = True

    def make(self, size: int) -> Any:
        """See `Way.make`: a value that stays here."""
        import torch

        return torch.empty(size, dtype=torch.uint8)


class Eventfd(Wakeup):
    """A blocking read of an eventfd."""

    def __init__(self) -> None:
        super().__init__("wake-up: eventfd")
        self._bell = os.eventfd(0)

    def send(self, value: Any) -> None:
        """See `Way.send`."""
        os.eventfd_write(self._bell, 1)

    def receive(self, size: int) -> Any:
        """See `Way.receive`."""
        os.eventfd_read(self._bell)


class Pipe(Wakeup):
    """A blocking read of one byte."""

    def __init__(self) -> None:
        super().__init__("wake-up: pipe")
        self._read, self._write = os.pipe()

    def send(self, value: Any) -> None:
        """See `Way.send`."""
        os.write(self._write, b"x")

    def receive(self, size: int) -> Any:
        """See `Way.receive`."""
        os.read(self._read, 1)


class Futex(Wakeup):
    """A futex on a word of shared memory."""

    def __init__(self, word: Any) -> None:
        super().__init__("wake-up: futex")
        self._word = word
        self._address = ctypes.addressof(word)
        self._call = ctypes.CDLL(None).syscall
        self._number = SYS_FUTEX[os.uname().machine]

    def send(self, value: Any) -> None:
        """See `Way.send`."""
        self._word.value = 1
        self._call(self._number, ctypes.c_void_p(self._address), FUTEX_WAKE, 1, None, None, 0)

    def receive(self, size: int) -> Any:
        """See `Way.receive`."""
        while self._word.value == 0:
            self._call(self._number, ctypes.c_void_p(self._address), FUTEX_WAIT, 0, None, None, 0)
        self._word.value = 0


class Channels(Way):
    """FlashRT's channels; one for each size, as a deployment has one for each edge."""

    def __init__(self, name: str, sizes: list[int], transport: Transport, *, in_place: bool) -> None:
        super().__init__(name)
        plans = [
            ChannelPlan(number, "producer", ("consumer",), (number,), f"{size} bytes", CAPACITY)
            for number, size in enumerate(sizes)
        ]
        self.hub = Hub(["producer", "consumer"], plans, transport)
        self._channel = {size: number for number, size in enumerate(sizes)}
        self._in_place = in_place
        self._made = 0
        self._end: Any = None

    def open_producer(self) -> None:
        """See `Way.open_producer`."""
        self._end = open_endpoint(self.hub.wiring("producer"), torch=True, inherited=False)

    def open_consumer(self) -> None:
        """See `Way.open_consumer`."""
        self._end = open_endpoint(self.hub.wiring("consumer"), torch=True, inherited=False)

    def make(self, size: int) -> Any:
        """See `Way.make`."""
        import torch

        self._made = self._channel[size]
        if not self._in_place:
            return torch.empty(size, dtype=torch.uint8)
        return torch.frombuffer(self._end.loan(self._made, size, "the benchmark"), dtype=torch.uint8, count=size)

    def send(self, value: Any) -> None:
        """See `Way.send`."""
        self._end.send(self._made, value, 0)

    def receive(self, size: int) -> Any:
        """See `Way.receive`."""
        return self._end.receive(self._channel[size]).value

    def close(self) -> None:
        """See `Way.close`."""
        if self._end is not None:
            self._end.close()


class TorchQueue(Way):
    """`torch.multiprocessing`: the tensor moves into a file in shared memory, whose name travels."""

    def __init__(self) -> None:
        super().__init__("torch.multiprocessing")
        import torch.multiprocessing as multiprocessing

        multiprocessing.set_sharing_strategy("file_system")
        self._queue: Any = multiprocessing.get_context("fork").Queue(CAPACITY)

    def make(self, size: int) -> Any:
        """See `Way.make`."""
        import torch

        return torch.empty(size, dtype=torch.uint8)

    def send(self, value: Any) -> None:
        """See `Way.send`."""
        self._queue.put(value)

    def receive(self, size: int) -> Any:
        """See `Way.receive`."""
        return self._queue.get()

    def close(self) -> None:
        """See `Way.close`."""
        self._queue.cancel_join_thread()
        self._queue.close()


class PlainQueue(Way):
    """`multiprocessing.Queue`: bytes through a pipe."""

    def __init__(self) -> None:
        super().__init__("multiprocessing.Queue")
        self._queue: Any = get_context("fork").Queue(CAPACITY)

    def make(self, size: int) -> Any:
        """See `Way.make`."""
        import torch

        return torch.empty(size, dtype=torch.uint8)

    def send(self, value: Any) -> None:
        """See `Way.send`."""
        self._queue.put(value.numpy())

    def receive(self, size: int) -> Any:
        """See `Way.receive`."""
        import torch

        return torch.from_numpy(self._queue.get())

    def close(self) -> None:
        """See `Way.close`."""
        self._queue.cancel_join_thread()
        self._queue.close()


class Zmq(Way):
    """pyzmq over a UNIX socket, without copies of its own on either side."""

    def __init__(self, folder: Path) -> None:
        super().__init__("pyzmq ipc")
        self._address = f"ipc://{folder}/zmq"

    def _open(self, kind: str) -> Any:
        import zmq

        self._context = zmq.Context()
        end = self._context.socket(getattr(zmq, kind))
        end.setsockopt(zmq.LINGER, 0)
        end.set_hwm(CAPACITY)
        return end

    def open_producer(self) -> None:
        """See `Way.open_producer`."""
        self._end = self._open("PUSH")
        self._end.bind(self._address)

    def open_consumer(self) -> None:
        """See `Way.open_consumer`."""
        self._end = self._open("PULL")
        self._end.connect(self._address)

    def make(self, size: int) -> Any:
        """See `Way.make`."""
        import torch

        return torch.empty(size, dtype=torch.uint8)

    def send(self, value: Any) -> None:
        """See `Way.send`."""
        self._end.send(value.numpy(), copy=False)

    def receive(self, size: int) -> Any:
        """See `Way.receive`."""
        import torch

        return torch.frombuffer(self._end.recv(copy=False).buffer, dtype=torch.uint8)

    def close(self) -> None:
        """See `Way.close`."""
        self._end.close()
        self._context.term()


class Gloo(Way):
    """`torch.distributed` over gloo; the consumer receives into the same tensor again and again."""

    def __init__(self, folder: Path) -> None:
        super().__init__("gloo send/recv")
        self._store = folder / "gloo"
        self._kept: dict[int, Any] = {}

    def _open(self, rank: int) -> None:
        import torch.distributed as dist

        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        dist.init_process_group(
            "gloo", init_method=f"file://{self._store}", rank=rank, world_size=2, timeout=timedelta(seconds=TIMEOUT_S)
        )  # fmt: skip
        self._dist = dist

    def open_producer(self) -> None:
        """See `Way.open_producer`."""
        self._open(0)

    def open_consumer(self) -> None:
        """See `Way.open_consumer`."""
        self._open(1)

    def make(self, size: int) -> Any:
        """See `Way.make`."""
        import torch

        return torch.empty(size, dtype=torch.uint8)

    def send(self, value: Any) -> None:
        """See `Way.send`."""
        self._dist.send(value, 1)

    def receive(self, size: int) -> Any:
        """See `Way.receive`."""
        import torch

        if size not in self._kept:
            self._kept[size] = torch.empty(size, dtype=torch.uint8)
        self._dist.recv(self._kept[size], 0)
        return self._kept[size]

    def close(self) -> None:
        """See `Way.close`."""
        with suppress(RuntimeError):
            self._dist.destroy_process_group()


class VllmQueue(Way):
    """vLLM's `MessageQueue`: a ring in shared memory that its reader spins on."""

    def __init__(self, largest: int) -> None:
        super().__init__("vLLM MessageQueue")
        if importlib.util.find_spec("vllm") is None:
            raise ImportError("vllm")
        self._largest = largest
        self._theirs, self._ours = get_context("fork").Pipe(duplex=False)

    def open_producer(self) -> None:
        """See `Way.open_producer`."""
        from vllm.distributed.device_communicators.shm_broadcast import MessageQueue

        self._queue: Any = MessageQueue(1, 1, max_chunk_bytes=self._largest + (1 << 16), max_chunks=CAPACITY)
        self._ours.send(self._queue.export_handle())
        self._queue.wait_until_ready()

    def open_consumer(self) -> None:
        """See `Way.open_consumer`."""
        from vllm.distributed.device_communicators.shm_broadcast import MessageQueue

        self._queue = MessageQueue.create_from_handle(self._theirs.recv(), 0)
        self._queue.wait_until_ready()

    def make(self, size: int) -> Any:
        """See `Way.make`."""
        import torch

        return torch.empty(size, dtype=torch.uint8)

    def send(self, value: Any) -> None:
        """See `Way.send`."""
        self._queue.enqueue(value.numpy())

    def receive(self, size: int) -> Any:
        """See `Way.receive`."""
        import torch

        return torch.from_numpy(self._queue.dequeue())


def make_ways(folder: Path, sizes: list[int], word: Any) -> tuple[list[Way], dict[str, str]]:
    """Return the ways that this machine has, and the others with the reason.

    Parameters
    ----------
    folder
        For sockets and rendezvous files.
    word
        A 32-bit word (ctypes) of memory that both processes share.
    """
    plain, iceoryx2 = "ours, in place", "ours, iceoryx2"
    makers: dict[str, Callable[[], Way]] = {
        "wake-up: eventfd": Eventfd,
        "wake-up: pipe": Pipe,
        "wake-up: futex": lambda: Futex(word),
        plain: lambda: Channels(plain, sizes, "shared_memory", in_place=True),
        iceoryx2: lambda: Channels(iceoryx2, sizes, "iceoryx2", in_place=True),
        "ours, copied in": lambda: Channels("ours, copied in", sizes, "shared_memory", in_place=False),
        "vLLM MessageQueue": lambda: VllmQueue(max(sizes)),
        "pyzmq ipc": lambda: Zmq(folder),
        "gloo send/recv": lambda: Gloo(folder),
        "torch.multiprocessing": TorchQueue,
        "multiprocessing.Queue": PlainQueue,
    }
    needs = {iceoryx2: "iceoryx2", "vLLM MessageQueue": "vllm", "pyzmq ipc": "zmq"}
    made: list[Way] = []
    missing: dict[str, str] = {}
    for name, make in makers.items():
        if name in needs and importlib.util.find_spec(needs[name]) is None:
            missing[name] = "not installed"
            continue
        try:
            made.append(make())
        except (ImportError, OSError, RuntimeError, KeyError) as error:
            missing[name] = f"does not start: {type(error).__name__}: {error}"
    return made, missing


def open_all(ways: list[Way], peer: Connection, *, producer: bool) -> dict[str, str]:
    """Open this process's ends, each in step with the other process; return way -> why it does not open.

    A way is left out in both processes when it fails in one.
    """
    failed: dict[str, str] = {}
    for way in ways:
        mine = ""
        try:
            way.open_producer() if producer else way.open_consumer()
        except Exception as error:  # noqa: BLE001 - an optional peer never ends the benchmark
            mine = f"does not start: {type(error).__name__}: {error}".splitlines()[0]
        peer.send(mine)
        other = peer.recv()
        if mine or other:
            failed[way.name] = mine or other
    return failed
