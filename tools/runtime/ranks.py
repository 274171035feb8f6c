"""The ranks of a sequence-parallel group: how its workers meet."""

from __future__ import annotations

import os
from datetime import timedelta
from typing import Any

from flashrt.errors import input_error
from flashrt.runtime.layout import WorkerPlan

MEET_TIMEOUT_S = 120


def join_group(plan: WorkerPlan, store: int | str | None, device: str) -> Any:
    """Meet the other ranks of this worker's group; return the torch.distributed process group.

    NCCL (RCCL on AMD) for GPUs, gloo for CPU devices. On one host the ranks meet in an anonymous file that they have
    inherited; between hosts, in the supervisor's store.

    Parameters
    ----------
    store
        The file's descriptor, or ``HOST:PORT``.

    Raises
    ------
    InputError
        The ranks do not meet in time, or the backend is not there; names the group.
    """
    import torch.distributed as dist

    backend = "nccl" if device.startswith("cuda") else "gloo"
    timeout = timedelta(seconds=MEET_TIMEOUT_S)
    try:
        if isinstance(store, int):
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
            meeting: Any = dist.FileStore(f"/proc/self/fd/{store}", plan.degree)
        else:
            host, _, port = str(store).rpartition(":")
            shared = dist.TCPStore(host, int(port), None, False, timeout, wait_for_workers=False)
            meeting = dist.PrefixStore(f"group {plan.group}", shared)
        dist.init_process_group(
            backend, store=meeting, rank=plan.rank, world_size=plan.degree, timeout=timeout
        )  # fmt: skip
        return dist.group.WORLD
    except (RuntimeError, ValueError, OSError) as error:
        text = " ".join(str(error).split())[:500]
        raise input_error(
            plan.title, f"{plan.degree} ranks that meet over {backend}", f"{type(error).__name__}: {text}",
            "see that all devices of the group are there and that torch has the backend; then call again",
            rule="ranks-do-not-meet",
        ) from error  # fmt: skip
