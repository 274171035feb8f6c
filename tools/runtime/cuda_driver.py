"""The runtime library of CUDA or ROCm, as far as handing memory to another process needs it, through ctypes.

ROCm's HIP has the same functions, argument lists, flags and error numbers under another prefix, so one table of names
serves both. Importing this module loads neither torch nor a library.
"""

from __future__ import annotations

import ctypes
import os
from ctypes import POINTER, byref, c_char_p, c_int, c_size_t, c_uint, c_void_p
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from flashrt.errors import Finding, ResourceMissingError, input_error

LIBRARY = "FLASHRT_CUDART"
"""Environment variable that names the library to use instead of the one that torch brings."""
HANDLE_BYTES = 64
BUS_ID_BYTES = 32
OUT_OF_MEMORY = 2
INVALID_CONTEXT = 201
MAP_FAILED = 205
PEER_UNSUPPORTED = 217
INVALID_HANDLE = 400
NOT_READY = 600
# The numbers are those of cudaEventDisableTiming | cudaEventInterprocess, cudaIpcMemLazyEnablePeerAccess and
# cudaMemcpyDefault; HIP has the same.
_EVENT_FLAGS = 0x2 | 0x4
_LAZY_PEER_ACCESS = 0x1
_COPY_DEFAULT = 4


class _Handle(ctypes.Structure):
    """An interprocess handle: opaque bytes, which the library takes by value."""

    _fields_ = (("reserved", ctypes.c_ubyte * HANDLE_BYTES),)


FUNCTIONS: dict[str, tuple[Any, ...]] = {
    "GetLastError": (),
    "GetDevice": (POINTER(c_int),),
    "SetDevice": (c_int,),
    "DeviceGetPCIBusId": (c_char_p, c_int, c_int),
    "DeviceGetByPCIBusId": (POINTER(c_int), c_char_p),
    "DeviceCanAccessPeer": (POINTER(c_int), c_int, c_int),
    "Malloc": (POINTER(c_void_p), c_size_t),
    "Free": (c_void_p,),
    "IpcGetMemHandle": (POINTER(_Handle), c_void_p),
    "IpcOpenMemHandle": (POINTER(c_void_p), _Handle, c_uint),
    "IpcCloseMemHandle": (c_void_p,),
    "EventCreateWithFlags": (POINTER(c_void_p), c_uint),
    "EventDestroy": (c_void_p,),
    "EventRecord": (c_void_p, c_void_p),
    "EventQuery": (c_void_p,),
    "EventSynchronize": (c_void_p,),
    "IpcGetEventHandle": (POINTER(_Handle), c_void_p),
    "IpcOpenEventHandle": (POINTER(c_void_p), _Handle),
    "StreamWaitEvent": (c_void_p, c_void_p, c_uint),
    "MemcpyAsync": (c_void_p, c_void_p, c_size_t, c_int, c_void_p),
}
"""Argument types by name without its prefix (``cuda`` or ``hip``); every function returns an error number."""


@dataclass(frozen=True)
class Vendor:
    """What differs between CUDA and ROCm.

    Parameters
    ----------
    kind
        As devices are called elsewhere: ``cuda`` or ``rocm``.
    prefix
        What the library's functions start with.
    rerecords
        Whether an interprocess event may be recorded anew while waits for its earlier record are pending. CUDA says so:
        a wait keeps what it saw. HIP's events are one signal (ROCm 7) or a ring of 32 signals (before).
    records_per_event
        After how many records a wait in another process goes wrong: HIP before ROCm 7 leaves its ring after 32.
    """

    kind: Literal["cuda", "rocm"]
    prefix: str
    rerecords: bool
    records_per_event: int | None


CUDA = Vendor("cuda", "cuda", rerecords=True, records_per_event=None)
ROCM = Vendor("rocm", "hip", rerecords=False, records_per_event=32)


class DriverError(ResourceMissingError):
    """A call to the library failed; `code` is its error number."""

    def __init__(self, finding: Finding, code: int) -> None:
        super().__init__(finding)
        self.code = code
        self.words = finding.got


class Runtime:
    """The library of one vendor: calls that fail raise, pointers and handles are plain values.

    Pointers, events and streams are integers; handles are bytes. Calls act on the calling thread's current device, as
    the library has it.

    Parameters
    ----------
    library
        File or soname to load.

    Raises
    ------
    InputError
        The file cannot be loaded, or is no CUDA or ROCm runtime.
    """

    def __init__(self, library: str | Path) -> None:
        where = f"runtime library '{library}'"
        try:
            loaded = ctypes.CDLL(str(library))
        except OSError as error:
            raise input_error(
                where, "a library that can be loaded", str(error),
                f"unset {LIBRARY} or let it name libcudart.so or libamdhip64.so, and run again", rule="gpu-library",
            ) from error  # fmt: skip
        vendor = next((vendor for vendor in (CUDA, ROCM) if hasattr(loaded, f"{vendor.prefix}Malloc")), None)
        absent = [name for name in FUNCTIONS if vendor and not hasattr(loaded, vendor.prefix + name)]
        if vendor is None or absent:
            raise input_error(
                where, "the functions of libcudart or libamdhip64",
                f"a library without {', '.join(absent)}" if absent else "neither cudaMalloc nor hipMalloc",
                f"let {LIBRARY} name another release of the library and run again", rule="gpu-library",
            )  # fmt: skip
        self.vendor = vendor
        self.library = loaded
        self._functions = {}
        for name, arguments in FUNCTIONS.items():
            function = getattr(loaded, vendor.prefix + name)
            function.argtypes, function.restype = arguments, c_int
            self._functions[name] = function
        self._words = getattr(loaded, f"{vendor.prefix}GetErrorString")
        self._words.argtypes, self._words.restype = (c_int,), c_char_p

    @classmethod
    def find(cls) -> Runtime:
        """Return the library that `FLASHRT_CUDART` names, else the one that this process's torch uses.

        Raises
        ------
        InputError
            The environment names something else than such a library.
        ResourceMissingError
            Torch is built for neither CUDA nor ROCm, or its library cannot be found.
        """
        named = os.environ.get(LIBRARY)
        if named:
            return cls(named)
        import torch

        hip, cuda = torch.version.hip, torch.version.cuda
        if not hip and not cuda:
            raise missing(
                "runtime library", "torch built for CUDA or ROCm", f"torch {torch.__version__}",
                "install such a build, or give the deployment 'devices: cpu' and run again", rule="gpu-library",
            )  # fmt: skip
        stem, version = ("libamdhip64.so", str(hip)) if hip else ("libcudart.so", str(cuda))
        # The copy that torch has loaded comes first: wheels rename it, and another copy may be of another release.
        names = [*_loaded(stem.removesuffix(".so")), f"{stem}.{version.split('.')[0]}"]
        for name in names:
            try:
                ctypes.CDLL(name)
            except OSError:
                continue
            return cls(name)
        raise missing(
            "runtime library", " or ".join(names), "no such library",
            f"let {LIBRARY} name the file and run again", rule="gpu-library",
        )  # fmt: skip

    def _call(self, name: str, *arguments: Any) -> None:
        code = self._functions[name](*arguments)
        if code:
            raise self._error(name, code)

    def _error(self, name: str, code: int) -> DriverError:
        # The library remembers the error, and torch would report it at its next kernel as if that had failed.
        self._functions["GetLastError"]()
        words = (self._words(code) or b"unknown").decode(errors="replace")
        full = self.vendor.prefix + name
        return DriverError(
            Finding(
                f"{full} on device {self._device_or_none()}", "success", f"error {code} ({words})",
                "see what the device says with gpu_status, and start the run again", rule="gpu-call",
            ),
            code,
        )  # fmt: skip

    def _device_or_none(self) -> int | None:
        device = c_int()
        return None if self._functions["GetDevice"](byref(device)) else device.value

    def current_device(self) -> int:
        """Return the calling thread's current device."""
        device = c_int()
        self._call("GetDevice", byref(device))
        return device.value

    def set_device(self, index: int) -> None:
        """Make a device the calling thread's current one; the first time costs a context of some 500 MiB."""
        self._call("SetDevice", index)

    def bus_of(self, index: int) -> str:
        """Return a device's PCI bus id: the same in every process, whatever devices that process sees."""
        text = ctypes.create_string_buffer(BUS_ID_BYTES)
        self._call("DeviceGetPCIBusId", text, len(text), index)
        return text.value.decode()

    def device_at(self, bus: str) -> int | None:
        """Return the index of the device at a PCI bus id, or None where this process does not see it."""
        device = c_int()
        try:
            self._call("DeviceGetByPCIBusId", byref(device), bus.encode())
        except DriverError:
            return None
        return device.value

    def can_access_peer(self, index: int, peer: int) -> bool:
        """Return whether device `index` can read the memory of device `peer`."""
        answer = c_int()
        self._call("DeviceCanAccessPeer", byref(answer), index, peer)
        return bool(answer.value)

    def malloc(self, nbytes: int) -> int:
        """Allocate device memory; return its address."""
        return self._pointer("Malloc", nbytes)

    def free(self, address: int) -> None:
        """Free device memory; waits for the work that uses it."""
        self._call("Free", address)

    def memory_handle(self, address: int) -> bytes:
        """Return the handle by which another process opens memory that this one allocated."""
        return self._handle("IpcGetMemHandle", address)

    def open_memory(self, handle: bytes) -> int:
        """Map another process's memory for the current device; return its address here."""
        return self._pointer("IpcOpenMemHandle", _Handle.from_buffer_copy(handle), _LAZY_PEER_ACCESS)

    def close_memory(self, address: int) -> None:
        """Unmap memory that `open_memory` mapped."""
        self._call("IpcCloseMemHandle", address)

    def create_event(self) -> int:
        """Create an event on the current device that other processes can open."""
        return self._pointer("EventCreateWithFlags", _EVENT_FLAGS)

    def destroy_event(self, event: int) -> None:
        """Destroy an event, or this process's view of another one's."""
        self._call("EventDestroy", event)

    def event_handle(self, event: int) -> bytes:
        """Return the handle by which another process opens an event."""
        return self._handle("IpcGetEventHandle", event)

    def open_event(self, handle: bytes) -> int:
        """Open another process's event for the current device."""
        return self._pointer("IpcOpenEventHandle", _Handle.from_buffer_copy(handle))

    def record(self, event: int, stream: int) -> None:
        """Let an event be complete once everything now in the stream is."""
        self._call("EventRecord", event, stream)

    def stream_wait(self, stream: int, event: int) -> None:
        """Let what comes later in the stream wait for an event's last record; the host goes on."""
        self._call("StreamWaitEvent", stream, event, 0)

    def host_wait(self, event: int) -> None:
        """Return once an event's last record is complete."""
        self._call("EventSynchronize", event)

    def is_complete(self, event: int) -> bool:
        """Return whether an event's last record is complete, or it has none."""
        code = self._functions["EventQuery"](event)
        if code == NOT_READY:
            self._functions["GetLastError"]()
            return False
        if code:
            raise self._error("EventQuery", code)
        return True

    def copy(self, target: int, source: int, nbytes: int, stream: int) -> None:
        """Copy bytes in the stream's order; the addresses tell from which device to which."""
        self._call("MemcpyAsync", target, source, nbytes, _COPY_DEFAULT, stream)

    def _pointer(self, name: str, *arguments: Any) -> int:
        pointer = c_void_p()
        self._call(name, byref(pointer), *arguments)
        return pointer.value or 0

    def _handle(self, name: str, argument: int) -> bytes:
        handle = _Handle()
        self._call(name, byref(handle), argument)
        return bytes(handle)


def missing(where: str, expected: str, got: str, fix: str, *, rule: str) -> ResourceMissingError:
    """Build a `ResourceMissingError` with one finding."""
    return ResourceMissingError(Finding(where, expected, got, fix, rule=rule))


def _loaded(stem: str) -> list[str]:
    """Return the files of this process's memory map whose name starts with `stem`."""
    lines = Path("/proc/self/maps").read_text(errors="replace").splitlines()
    paths = [line.split(maxsplit=5)[5] for line in lines if "/" in line]
    return list(dict.fromkeys(path for path in paths if Path(path).name.startswith(stem)))
