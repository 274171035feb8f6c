"""The Ray backend (``cluster: ray``): workers as actors on the nodes of a Ray cluster.

Ray places: a placement group with a bundle for each worker, an actor in each. Values never go through its object store:
between workers of one node they go through shared memory, between nodes over torch.distributed. The supervisor speaks
to each actor over a TCP connection of its own, and hears a beat from it each second: a node that is lost shows within
`SILENCE_S` seconds, or `LOAD_SILENCE_S` while operations are loaded, since loading a library holds Python's lock.

Every node needs FlashRT installed and the program's folder under the same path.
"""

from __future__ import annotations

import os
import secrets
import socket
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Any

from flashrt.clock import monotonic_ns
from flashrt.errors import InputError, input_error
from flashrt.ir.flattening import INPUT, OUTPUT
from flashrt.runtime import messages
from flashrt.runtime.channels.hub import Hub, Remote, open_endpoint, split_by_host
from flashrt.runtime.hosts import HubServer
from flashrt.runtime.launch import Handle, Run, Started, end_all, make_hello
from flashrt.runtime.layout import WorkerPlan
from flashrt.runtime.lifeline import MARK
from flashrt.runtime.wire import Connection

PLACE_TIMEOUT_S = 60
REACH_TIMEOUT_S = 10
JOIN_TIMEOUT_S = 120
BEAT_S = 1.0
SILENCE_S = 4.0
LOAD_SILENCE_S = 60.0
LOOK_S = 0.1


class ActorHandle:
    """A worker that is a Ray actor.

    Parameters
    ----------
    place
        Where it runs, for messages.
    """

    def __init__(self, actor: Any, place: str, control: Connection) -> None:
        self._actor = actor
        self._control = control
        self._ended = threading.Event()
        self._limit_s = LOAD_SILENCE_S
        self._silence_s = 0.0
        self._words = "its process ended"
        self.place = place

    def beat(self) -> None:
        """Note that it lives."""
        self._silence_s = 0.0

    def loaded(self) -> None:
        """See `flashrt.runtime.launch.Handle.loaded`."""
        self._limit_s = SILENCE_S

    def wait(self, timeout_s: float | None = None) -> bool:
        """Return whether it is gone: its connection has closed, or it has said nothing for too long.

        Without a limit, silence is listened for, in looks of `LOOK_S`: while this process gets no time to look, it
        could not have heard either.
        """
        if timeout_s is not None:
            return self._ended.wait(timeout_s)
        while not self._ended.wait(LOOK_S):
            self._silence_s += LOOK_S
            if self._silence_s > self._limit_s:
                self._words = f"nothing was heard from it for {self._limit_s:g} s: the node is lost, or hangs"
                self._ended.set()
        return True

    def closed(self) -> None:
        """Note that its connection has closed."""
        self._ended.set()

    def ending(self) -> str:
        """Return how it ended and where it ran."""
        return f"{self._words} on {self.place}"

    def is_stopped(self) -> bool:
        """Return False: one that is stopped says nothing, and is lost by that."""
        return False

    def kill(self) -> None:
        """End the actor; its process goes with it."""
        import ray

        # The cluster may be gone too.
        with suppress(Exception):
            ray.kill(self._actor, no_restart=True)
        self._control.shutdown()
        self._ended.set()


class RayLauncher:
    """Starts workers as Ray actors.

    Parameters
    ----------
    address
        Of the cluster's head; absent: ``RAY_ADDRESS``, or a cluster on this host.
    """

    def __init__(self, address: str | None = None) -> None:
        self._address = address or os.environ.get("RAY_ADDRESS") or "auto"

    def start(self, run: Run) -> Started:
        """See `flashrt.runtime.launch.Launcher.start`."""
        ray = _import_ray()
        token = secrets.token_hex(16)
        close: list[Callable[[], None]] = []
        controls: dict[str, Connection] = {}
        handles: dict[str, Handle] = {}
        try:
            self._connect(ray, close)
            actors = self._place(ray, run, close)
            nodes = self._nodes(ray, run, actors)
            return _Starter(run, actors, nodes, token, controls, handles, close).start()
        except BaseException:
            end_all(controls, handles, close)
            raise

    def _connect(self, ray: Any, close: list[Callable[[], None]]) -> None:
        if ray.is_initialized():
            return
        try:
            _reach(self._address)
            ray.init(address=self._address, log_to_driver=False, logging_level="ERROR", include_dashboard=False)
        except (OSError, RuntimeError, ValueError, ray.exceptions.RayError) as error:
            raise input_error(
                "deployment, key 'cluster'", f"a Ray cluster at {self._address}", f"{type(error).__name__}: {error}",
                "start one with ray start --head, or set RAY_ADDRESS; or leave cluster out", rule="no-cluster",
            ) from error  # fmt: skip
        close.append(ray.shutdown)

    def _place(self, ray: Any, run: Run, close: list[Callable[[], None]]) -> dict[str, Any]:
        from ray.util.placement_group import placement_group, remove_placement_group
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        bundles = [_resources(worker) for worker in run.layout.workers]
        group = placement_group(bundles, strategy="PACK")
        close.append(lambda: _quietly(remove_placement_group, group))
        if not group.wait(PLACE_TIMEOUT_S):
            have = {key: value for key, value in ray.cluster_resources().items() if key in {"CPU", "GPU"}}
            raise input_error(
                "deployment, key 'groups'", f"free resources for {len(bundles)} workers: {bundles}",
                f"the cluster has {have}, and they were not free within {PLACE_TIMEOUT_S} s",
                "use fewer devices, or add nodes", rule="no-resources",
            )  # fmt: skip
        from flashrt.runtime.actor import WorkerActor

        remote = ray.remote(WorkerActor)
        environment = {MARK: os.environ[MARK]} if MARK in os.environ else {}
        actors = {}
        for index, worker in enumerate(run.layout.workers):
            resources = bundles[index]
            actors[worker.name] = remote.options(
                num_cpus=resources["CPU"],
                num_gpus=resources.get("GPU", 0),
                max_restarts=0,
                max_concurrency=2,
                runtime_env={"env_vars": environment} if environment else None,
                scheduling_strategy=PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=index),
            ).remote()
        return actors

    def _nodes(self, ray: Any, run: Run, actors: Mapping[str, Any]) -> dict[str, tuple[str, str]]:
        """Return worker -> (node id, address)."""
        try:
            found = ray.get([actor.where.remote(str(run.program)) for actor in actors.values()], timeout=JOIN_TIMEOUT_S)
        except Exception as error:
            raise input_error(
                "deployment, key 'cluster'", f"{len(actors)} actors that start within {JOIN_TIMEOUT_S} s",
                f"{type(error).__name__}: {' '.join(str(error).split())[:500]}",
                "see that FlashRT is installed on every node, and ray's logs", rule="actors-do-not-start",
            ) from error  # fmt: skip
        nodes = {}
        for name, (node, address, has_program) in zip(actors, found, strict=True):
            if not has_program:
                raise input_error(
                    f"node {address}", f"the program at {run.program}", "no such file",
                    "put the program's folder under the same path on every node", rule="no-program-on-node",
                )  # fmt: skip
            nodes[name] = (node, address)
        return nodes


class _Starter:
    """Wires actors that have been placed."""

    def __init__(
        self,
        run: Run,
        actors: Mapping[str, Any],
        nodes: Mapping[str, tuple[str, str]],
        token: str,
        controls: dict[str, Connection],
        handles: dict[str, Handle],
        close: list[Callable[[], None]],
    ) -> None:
        import ray

        self._actors = actors
        self._nodes = nodes
        self._token = token
        self._controls = controls
        self._handles = handles
        self._close = close
        self._own = ray.get_runtime_context().get_node_id()
        self._address = ray.util.get_node_ip_address()
        names = [INPUT, OUTPUT, *actors]
        self._host = {name: self._own if name in (INPUT, OUTPUT) else nodes[name][0] for name in names}
        channels = split_by_host(run.layout.channels, self._host)
        self._run = replace(run, layout=replace(run.layout, channels=channels))
        self._far = [c for c in channels if any(self._host[target] != self._host[c.source] for target in c.targets)]
        ends = dict.fromkeys(name for c in self._far for name in (c.source, *c.targets))
        self._ranks = {name: rank for rank, name in enumerate(ends)}

    def start(self) -> Started:
        """Bring everything up and return it."""
        run, close = self._run, self._close
        store = self._open_store()
        hub = Hub(
            [INPUT, OUTPUT, *self._actors], run.layout.channels, run.transport, run.spin_us,
            here=[name for name, host in self._host.items() if host == self._own],
        )  # fmt: skip
        close.append(hub.close)
        server = HubServer(hub, self._socket_name(self._own), self._token)
        close.append(server.close)
        listener = socket.create_server((self._address, 0))
        close.append(listener.close)
        for name, actor in self._actors.items():
            actor.run.remote(self._orders(name, store, listener.getsockname()[1]))
        self._accept(listener)
        ends = self._open_ends(hub, store)
        for name, handle in self._handles.items():
            assert isinstance(handle, ActorHandle)
            control = self._controls[name]
            control.on_receive = handle.beat
            control.on_close = handle.closed
        close += [end.close for end in ends]
        far = frozenset(name for name in self._actors if self._host[name] != self._own)
        return Started(ends[0], ends[1], self._controls, self._handles, run.layout.channels, far, close)

    def _open_store(self) -> str:
        import torch.distributed as dist

        store = dist.TCPStore(self._address, 0, None, True, wait_for_workers=False)
        self._close.append(lambda: _keep_until_now(store))
        return f"{self._address}:{store.port}"

    def _socket_name(self, node: str) -> str:
        return f"flashrt-{self._token[:12]}-{node[:16]}"

    def _remote(self, store: str, address: str) -> Remote:
        return Remote(tuple(c.number for c in self._far), store, self._ranks, address)

    def _orders(self, name: str, store: str, port: int) -> dict[str, Any]:
        """Return what an actor needs to become a worker."""
        run, node = self._run, self._host[name]
        here = [other for other, host in self._host.items() if host == node]
        # The first worker of a node that the supervisor is not on makes its shared memory.
        leads = node != self._own and here[0] == name
        worker = next(worker for worker in run.layout.workers if worker.name == name)
        meeting = store if worker.degree > 1 else None
        return {
            "name": name,
            "token": self._token,
            "supervisor": (self._address, port),
            "socket": self._socket_name(node),
            "hub": {
                "endpoints": [INPUT, OUTPUT, *self._actors],
                "channels": [channel.as_dict() for channel in run.layout.channels],
                "transport": run.transport,
                "spin_us": run.spin_us,
                "here": here,
            }
            if leads
            else None,
            "remote": self._remote(store, self._nodes[name][1])._asdict(),
            "hello": vars(make_hello(run, worker, {}, meeting)),
            "is_first": next(other for other in here if other in self._actors) == name,
            "beat_s": BEAT_S,
        }

    def _accept(self, listener: socket.socket) -> None:
        listener.settimeout(JOIN_TIMEOUT_S)
        deadline_ns = monotonic_ns() + JOIN_TIMEOUT_S * 10**9
        while len(self._controls) < len(self._actors):
            try:
                stream, _ = listener.accept()
            except TimeoutError:
                stream = None
            if stream is None or monotonic_ns() > deadline_ns:
                missing = sorted(self._actors.keys() - self._controls.keys())
                raise input_error(
                    "deployment, key 'cluster'", f"workers that reach {self._address} within {JOIN_TIMEOUT_S} s",
                    f"none from {missing}", "see that the nodes reach this host on any port",
                    rule="workers-do-not-join",
                )  # fmt: skip
            stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            control = Connection(stream, torch=False)
            with suppress(ValueError, OSError):
                joined = messages.Message.receive(control)
                if isinstance(joined, messages.Join) and joined.token == self._token and joined.worker in self._actors:
                    node, address = self._nodes[joined.worker]
                    place = f"node {address} ({node[:8]})"
                    self._controls[joined.worker] = control
                    self._handles[joined.worker] = ActorHandle(self._actors[joined.worker], place, control)
                    continue
            control.close()

    def _open_ends(self, hub: Hub, store: str) -> list[Any]:
        """Open the supervisor's two ends at once: each waits for all others that reach across hosts."""
        found: dict[str, Any] = {}
        failed: list[InputError] = []

        def open_end(name: str) -> None:
            remote = self._remote(store, self._address) if name in self._ranks else None
            try:
                found[name] = open_endpoint(hub.wiring(name), torch=False, inherited=False, remote=remote)
            except InputError as error:
                failed.append(error)

        threads = [threading.Thread(target=open_end, args=(name,)) for name in (INPUT, OUTPUT)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if failed:
            raise failed[0]
        return [found[INPUT], found[OUTPUT]]


def _reach(address: str) -> None:
    """Raise OSError where nobody listens at ``HOST:PORT``: Ray would try for minutes."""
    host, _, port = address.rpartition(":")
    if port.isdigit() and "/" not in host:
        socket.create_connection((host, int(port)), REACH_TIMEOUT_S).close()


def _resources(worker: WorkerPlan) -> dict[str, float]:
    """Return what one worker needs of its node."""
    return {"CPU": 1.0, "GPU": 1.0} if any(":" in name for name in worker.devices) else {"CPU": 1.0}


def _quietly(call: Callable[[Any], Any], value: Any) -> None:
    # The cluster may be gone.
    with suppress(Exception):
        call(value)


def _keep_until_now(store: Any) -> None:
    """Hold on to a store until the list of things to close is worked off."""


def _import_ray() -> Any:
    try:
        import ray
        import ray.exceptions
        import ray.util
    except ImportError as error:
        raise input_error(
            "deployment, key 'cluster'", "Ray installed for cluster: ray", str(error),
            "pip install 'flashrt[ray]', or leave cluster out to run on this host", rule="no-ray",
        ) from error  # fmt: skip
    return ray
