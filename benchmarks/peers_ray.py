"""The Ray actor of `transport.py`, in a process of its own: Ray starts a dozen processes that must not disturb others.

Prints one JSON line: size in bytes -> one-way latencies in µs, block by block.
"""

from __future__ import annotations

import json
import os
import sys
import time
import warnings
from typing import Any

import numpy as np

OBJECT_STORE_BYTES = 1 << 30
PAUSE_S = 200e-6


class Consumer:
    """Takes arrays; runs in a process of Ray's."""

    def pin(self, core: int) -> int:
        """Stay on one core; return the process id."""
        os.sched_setaffinity(0, {core})
        return os.getpid()

    def take(self, array: Any) -> int:
        """Return the moment at which the tensor is in hand, in ns."""
        import torch

        # What comes from the object store is read-only, which torch mentions once.
        warnings.simplefilter("ignore")
        torch.from_numpy(array)
        return time.monotonic_ns()


def measure(request: dict[str, Any]) -> dict[str, list[list[float]]]:
    """Return size -> blocks of one-way latencies in µs."""
    import ray

    producer_core, consumer_core = request["cores"]
    ray.init(
        num_cpus=2, include_dashboard=False, object_store_memory=OBJECT_STORE_BYTES, log_to_driver=False,
        logging_level="ERROR", _temp_dir=request["folder"],
    )  # fmt: skip
    try:
        actor = ray.remote(Consumer).options(num_cpus=1).remote()
        ray.get(actor.pin.remote(consumer_core))
        os.sched_setaffinity(0, {producer_core})
        found: dict[str, list[list[float]]] = {}
        for _ in range(request["num_blocks"]):
            for size, count in request["counts"].items():
                block = []
                for number in range(count + 2):
                    array = np.empty(int(size), np.uint8)
                    array[0] = array[-1] = number
                    until = time.monotonic() + PAUSE_S
                    while time.monotonic() < until:
                        pass
                    sent_ns = time.monotonic_ns()
                    block.append((ray.get(actor.take.remote(array)) - sent_ns) / 1e3)
                found.setdefault(size, []).append(block[2:])
        return found
    finally:
        ray.shutdown()


if __name__ == "__main__":
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    print(json.dumps(measure(json.loads(sys.argv[1]))))
