"""Mapping files into memory without Python's `mmap`, which keeps a descriptor for each mapping."""

from __future__ import annotations

import ctypes
import mmap
import os
from typing import Any

MAP_FAILED = ctypes.c_void_p(-1).value

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (
    ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_int64,
)  # fmt: skip
_libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)


class Mapping:
    """Part of a file in memory, shared with all that map it; unmapped when the last reference is gone.

    Parameters
    ----------
    writable
        Whether this process may write to it; a write to one that is not ends the process (SIGSEGV).

    Attributes
    ----------
    address, num_bytes
        Where it is.

    Raises
    ------
    OSError
        The kernel does not map it.
    """

    def __init__(self, descriptor: int, offset: int, num_bytes: int, *, writable: bool) -> None:
        access = mmap.PROT_READ | mmap.PROT_WRITE if writable else mmap.PROT_READ
        flags = mmap.MAP_SHARED | mmap.MAP_POPULATE
        address = _libc.mmap(None, num_bytes, access, flags, descriptor, offset)
        if address == MAP_FAILED:
            code = ctypes.get_errno()
            raise OSError(code, os.strerror(code))
        self.address = int(address)
        self.num_bytes = num_bytes

    def view(self) -> Any:
        """Return its bytes as a memory view; only for as long as the mapping is held on to."""
        return memoryview((ctypes.c_uint8 * self.num_bytes).from_address(self.address)).cast("B")

    def __del__(self) -> None:
        if hasattr(self, "address"):
            _libc.munmap(self.address, self.num_bytes)
