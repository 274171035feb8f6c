"""Tensors in a GPU's memory on an endpoint's channels: they stay there, and a small description travels."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import Any

from flashrt.ir.flattening import OUTPUT
from flashrt.runtime.channels.endpoint import Endpoint
from flashrt.runtime.cuda import CudaExporter, CudaImporter, Runtime

TENSORS_PER_MESSAGE = 4


class DeviceChannels:
    """The GPU side of one worker's channels; connects itself to the endpoint.

    Parameters
    ----------
    device_index
        The worker's device, as torch counts them in its process.

    Raises
    ------
    InputError
        The GPU runtime's library is not there.
    """

    def __init__(self, endpoint: Endpoint, device_index: int = 0) -> None:
        self._endpoint = endpoint
        self._runtime = Runtime.find()
        self._index = device_index
        self._exporters: dict[int, CudaExporter] = {}
        self._importers: dict[int, CudaImporter] = {}
        self._shared: dict[int, deque[tuple[int, int]]] = {}
        endpoint.on_device = self._encoder
        endpoint.from_device = self._decoder

    def _encoder(self, channel: int) -> Any:
        if OUTPUT in self._endpoint.channels[channel].targets:
            # What leaves the deployment becomes bytes in host memory.
            return None
        return lambda tensor: self._share(channel, tensor)

    def _decoder(self, channel: int) -> Any:
        return lambda descriptor: self._open(channel, descriptor)

    def _share(self, channel: int, tensor: Any) -> dict[str, Any]:
        plan, board = self._endpoint.channels[channel], self._endpoint.board
        exporter = self._exporters.get(channel)
        if exporter is None:
            exporter = self._exporters[channel] = CudaExporter(
                self._runtime, self._index, name=plan.label, num_consumers=len(plan.targets),
                max_in_flight=TENSORS_PER_MESSAGE * (plan.capacity + 2),
            )  # fmt: skip
            self._shared[channel] = deque()
        shared = self._shared[channel]
        # A reader counts a message as taken just before it opens it: only the one before is surely open.
        opened = min(board.taken(channel, place) for place in range(len(plan.targets))) - 1
        done = None
        while shared and shared[0][0] < opened:
            done = shared.popleft()[1]
        if done is not None:
            exporter.release_through(done)
        descriptor = exporter.share(tensor)
        shared.append((board.published(channel), int(descriptor["sequence"])))
        return descriptor

    def _open(self, channel: int, descriptor: Mapping[str, Any]) -> Any:
        importer = self._importers.get(channel)
        if importer is None:
            plan = self._endpoint.channels[channel]
            place = plan.targets.index(self._endpoint.name)
            importer = self._importers[channel] = CudaImporter(
                self._runtime, self._index, consumer=place, name=plan.label
            )  # fmt: skip
        return importer.open(descriptor)

    def close(self) -> None:
        """Close what was opened here, then what was shared."""
        for importer in self._importers.values():
            importer.close()
        for exporter in self._exporters.values():
            exporter.close()
