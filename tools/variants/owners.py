"""Which process a row of the store belongs to: told apart by boot, start time and number."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from flashrt.gpu.processes import ProcessIdentity


@cache
def boot_id() -> str:
    """Return the kernel's name for this boot; process numbers of an earlier one mean nothing."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return "unknown"


@dataclass(frozen=True)
class Owner:
    """One process, as it is written to the store."""

    pid: int
    start_ticks: int
    boot: str
    namespace: str

    @classmethod
    def of(cls, pid: int) -> Owner | None:
        """Return the owner record of a running process, or None when it does not run (a zombie does not)."""
        # Imported late: the server starts without looking at devices.
        from flashrt.gpu.processes import ProcessIdentity, pid_namespace

        identity = ProcessIdentity.of(pid)
        return None if identity is None else cls(pid, identity.start_ticks, boot_id(), pid_namespace())

    @classmethod
    def this_process(cls) -> Owner:
        """Return the owner record of the calling process."""
        owner = cls.of(os.getpid())
        assert owner is not None, "a running process sees itself in /proc"
        return owner

    @classmethod
    def parse(cls, text: str) -> Owner:
        """Read what `as_text` wrote."""
        return cls(**json.loads(text))

    def as_text(self) -> str:
        """Return the record as one line of JSON."""
        return json.dumps(asdict(self))

    def is_gone(self) -> bool:
        """Say whether this very process is known to have ended; one of another container's numbers is not judged."""
        from flashrt.gpu.processes import pid_namespace

        if self.boot != boot_id():
            return True
        return self.namespace == pid_namespace() and not self.identity().runs()

    def is_visible(self) -> bool:
        """Say whether its number means something here, so that it can be signalled."""
        from flashrt.gpu.processes import pid_namespace

        return self.boot == boot_id() and self.namespace == pid_namespace()

    def identity(self) -> ProcessIdentity:
        """Return number and start time as the device part knows processes."""
        from flashrt.gpu.processes import ProcessIdentity

        return ProcessIdentity(self.pid, self.start_ticks)
