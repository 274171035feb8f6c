"""An engine's work with the tiny DiT on a CPU core: groups of gloo ranks that are made once and used again."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from statistics import median
from typing import Any

from flashrt.clock import monotonic_ns
from flashrt.planners.elastic.tiny_dit import Geometry, TinyDit

MEET_TIMEOUT_S = 60
NUM_MEASURED = 9


@dataclass
class Held:
    """A request on this rank: its latent is whole on every member of its group at each step boundary."""

    geometry: Geometry
    latent: Any
    text: Any


class TinyWork:
    """The model with its weights resident, the groups of this rank, and the requests that it takes part in.

    Groups have no common world: each is a process group of its own, named by its members and how often their processes
    were started. So a process that is started again meets the others in new groups, and groups without it go on.
    """

    def __init__(self, settings: Mapping[str, Any]) -> None:
        import torch
        import torch.distributed as dist

        torch.set_num_threads(1)
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        self._torch, self._dist = torch, dist
        self._device = settings["device"]
        self._geometries = {name: Geometry.of(key) for name, key in settings["classes"].items()}
        self._store = dist.FileStore(f"/proc/self/fd/{settings['store']}", -1)
        self._groups: dict[str, Any] = {}
        self._held: dict[int, Held] = {}
        self._model = TinyDit()

    def run(self, command: Mapping[str, Any]) -> int:
        """Do one step with the other members of the group."""
        request, devices = command["request"], command["devices"]
        with self._torch.inference_mode():
            if command["begin"]:
                geometry = self._geometries[command["kind"]]
                seed = command["seed"]
                self._held[request] = Held(geometry, self._model.noise(geometry, seed), self._model.prompt(seed))
            if command["source"] is not None:
                self._hand_over(command)
            held = self._held[request]
            rank, ranks = devices.index(self._device), len(devices)
            gather = (lambda part: self._gather(command, part)) if ranks > 1 else (lambda part: part)
            held.latent = self._model.step(
                held.latent, held.text, held.geometry, command["step"] - 1, rank, ranks, gather
            )  # fmt: skip
        return monotonic_ns()

    def decode(self, command: Mapping[str, Any]) -> tuple[int, Any]:
        """Run the VAE on the first member; return the frames as an array."""
        held = self._held.pop(command["request"])
        if command["devices"][0] != self._device:
            return monotonic_ns(), None
        with self._torch.inference_mode():
            frames = self._model.decode(held.latent).numpy()
        return monotonic_ns(), frames

    def drop(self, request: int) -> None:
        """Forget a request's latent."""
        self._held.pop(request, None)

    def prepare(self, groups: list[Mapping[str, Any]]) -> None:
        """Meet the other members of each group."""
        for one in groups:
            self._group(one)

    def measure(self, command: Mapping[str, Any]) -> dict[str, Any]:
        """Return the medians of a group's set-up, when it was made ahead, and of broadcasting each class's latent."""
        group = self._group(command)
        setup, broadcast = [], {}
        for _ in range(NUM_MEASURED):
            begin = time.perf_counter()
            group.barrier().wait()
            setup.append((time.perf_counter() - begin) * 1e3)
        for name, geometry in self._geometries.items():
            latent, took = self._model.noise(geometry, 0), []
            for _ in range(NUM_MEASURED):
                group.barrier().wait()
                begin = time.perf_counter()
                group.broadcast(latent, 0).wait()
                took.append((time.perf_counter() - begin) * 1e3)
            broadcast[name] = median(took)
        return {"setup_ms": median(setup), "broadcast_ms": broadcast}

    def _group(self, command: Mapping[str, Any]) -> Any:
        """Return the process group of a command; it is made when first asked for."""
        name = command["group"]
        if name not in self._groups:
            devices = command["devices"]
            store = self._dist.PrefixStore(f"group {name}", self._store)
            self._groups[name] = self._dist.ProcessGroupGloo(
                store, devices.index(self._device), len(devices), timedelta(seconds=MEET_TIMEOUT_S)
            )
        return self._groups[name]

    def _gather(self, command: Mapping[str, Any], part: Any) -> Any:
        parts = [self._torch.empty_like(part) for _ in command["devices"]]
        self._group(command).allgather([parts], [part.contiguous()]).wait()
        return self._torch.cat(parts)

    def _hand_over(self, command: Mapping[str, Any]) -> None:
        """Broadcast the latent from a member of the old group to all of the new one."""
        request, devices = command["request"], command["devices"]
        if request not in self._held:
            geometry, seed = self._geometries[command["kind"]], command["seed"]
            empty = self._torch.empty(self._model.noise(geometry, 0).shape)
            self._held[request] = Held(geometry, empty, self._model.prompt(seed))
        held = self._held[request]
        held.latent = held.latent.contiguous()
        self._group(command).broadcast(held.latent, devices.index(command["source"])).wait()
