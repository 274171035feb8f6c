"""Executors as Ray actors: Ray places them on the nodes of a cluster, requests go over TCP and not through Ray."""

from __future__ import annotations

import hmac
import os
import secrets
import socket
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

from flashrt.errors import input_error
from flashrt.planners.serving.executor import DONE, make_engine, serve

JOIN_S = 60.0
TOKEN_BYTES = 16
CPUS_EACH = 0.05
"""An emulated executor sleeps nearly always."""


class ExecutorActor:
    """One executor; `run` returns when the driver has closed its connection."""

    def run(self, address: tuple[str, int], token: bytes, settings: Mapping[str, Any]) -> None:
        """Connect to the driver and serve."""
        with socket.create_connection(address, timeout=JOIN_S) as end:
            end.settimeout(None)
            end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            end.sendall(token + DONE.pack(-1))
            with suppress(OSError):
                serve(make_engine(settings), end)


@contextmanager
def executors_on_cluster(rows: Sequence[Mapping[str, Any]]) -> Iterator[list[socket.socket]]:
    """Start an actor for every executor, spread over the nodes; yield the sockets to them, in order.

    Raises
    ------
    InputError
        No Ray, no cluster at ``RAY_ADDRESS``, or actors that do not come within a minute. All are ended then.
    """
    try:
        import ray
        import ray.util
    except ImportError:
        raise input_error(
            "serving plan on a cluster", "Ray", "it is not installed", "pip install 'flashrt[ray]' and call again",
            rule="no-ray",
        ) from None  # fmt: skip
    address = os.environ.get("RAY_ADDRESS")
    if not address and not ray.is_initialized():
        raise input_error(
            "serving plan on a cluster", "RAY_ADDRESS, the address of its head", "nothing",
            "export it, or run without the cluster", rule="no-cluster",
        )  # fmt: skip
    was_there = ray.is_initialized()
    if not was_there:
        ray.init(address=address, log_to_driver=False, configure_logging=False)
    with ExitStack() as stack:
        if not was_there:
            stack.callback(ray.shutdown)
        listener = stack.enter_context(socket.create_server(("", 0), backlog=len(rows)))
        listener.settimeout(1.0)
        here = ray.util.get_node_ip_address(), listener.getsockname()[1]
        remote = ray.remote(num_cpus=CPUS_EACH, max_restarts=0, scheduling_strategy="SPREAD")(ExecutorActor)
        actors: list[Any] = []
        tokens: list[bytes] = []
        running: list[Any] = []
        stack.callback(lambda: [ray.kill(actor) for actor in actors])
        for settings in rows:
            actors.append(remote.remote())
            tokens.append(secrets.token_bytes(TOKEN_BYTES))
            running.append(actors[-1].run.remote(here, tokens[-1], dict(settings)))
        ends: dict[int, socket.socket] = {}
        until = time.monotonic() + JOIN_S
        while len(ends) < len(rows):
            if time.monotonic() > until:
                raise input_error(
                    "serving plan on a cluster", f"{len(rows)} executors within {JOIN_S:.0f} s", f"{len(ends)}",
                    "look at `ray status`, and call again", rule="executors-missing",
                )  # fmt: skip
            with suppress(TimeoutError):
                end, _ = listener.accept()
                stack.enter_context(end)
                end.settimeout(None)
                end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                said = end.recv(TOKEN_BYTES, socket.MSG_WAITALL)
                for row, token in enumerate(tokens):
                    if hmac.compare_digest(said, token):
                        ends[row] = end
        yield [ends[row] for row in range(len(rows))]
