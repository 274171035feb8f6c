"""A process at one end of channels, ``python -P passing.py ROLE WIRING``: what tests start, feed and kill."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np

from flashrt.runtime.channels.hub import Hub, open_endpoint

LARGE = 1 << 18


def numbered(index: int) -> list[Any]:
    """Return a value that says which it is, in places far apart."""
    return [index, np.full(LARGE, index), f"{index} " * 1000, {"small": np.arange(index % 7)}]


def check_numbered(value: Any, index: int) -> None:
    """Compare with what `numbered` makes."""
    number, large, text, small = value
    assert (number, text) == (index, f"{index} " * 1000)
    assert large.shape == (LARGE,)
    assert (large == index).all()
    assert small["small"].tolist() == list(range(index % 7))


@contextmanager
def started(hub: Hub, name: str, role: str) -> Iterator[subprocess.Popen[bytes]]:
    """Start a process that is an endpoint of a hub; kill it at the end, whatever it does."""
    process = subprocess.Popen(
        [sys.executable, "-P", __file__, role, json.dumps(hub.wiring(name))],
        pass_fds=hub.descriptors(name),
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parents[2])},
    )
    try:
        yield process
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()


def main() -> None:
    """Send numbered values for ever; take them for ever; or send back what comes, as it came."""
    role, wiring = sys.argv[1], json.loads(sys.argv[2])
    with_torch = role == "returns"
    end = open_endpoint(wiring, torch=with_torch, inherited=True)
    if role == "sends":
        for index in count():
            end.send(0, numbered(index), index)
    elif role == "takes":
        for index in count():
            check_numbered(end.receive(0).value, index)
    else:
        for index in count():
            received = end.receive(0)
            value = received.value
            if with_torch and hasattr(value, "element_size"):
                import torch

                memory = end.loan(1, value.nbytes, "back") if value.numel() else None
                if memory is not None:
                    there = torch.frombuffer(memory, dtype=value.dtype, count=value.numel()).view(value.shape)
                    value = there.copy_(value)
            end.send(1, value, index)


if __name__ == "__main__":
    main()
