"""Handing tensors on CUDA or ROCm devices to other processes of this host, and to other streams of this process.

An exporter copies each tensor into a slot of a pool whose handle the importer opens once. A message is then a small
descriptor; an event orders the two devices' work, and the host waits for neither.

Who waits for whom, per message: the importer's copy waits for the slot's ``ready`` event, which follows the exporter's
copy. The exporter's next copy into the slot waits for its ``done`` events, which follow the importers' copies. So an
importer may give a message back as soon as `CudaImporter.open` has returned, before the device has done anything: what
it gives back carries no promise about the device, the event does.
"""

from __future__ import annotations

from typing import Any

from flashrt.runtime.cuda_driver import Runtime
from flashrt.runtime.cuda_exporter import CudaExporter
from flashrt.runtime.cuda_importer import CudaImporter
from flashrt.runtime.cuda_message import TorchDevice

__all__ = ["CudaExporter", "CudaImporter", "Runtime", "TorchDevice", "hand_over"]


def hand_over(tensor: Any, from_stream: Any, to_stream: Any) -> None:
    """Let `to_stream` use a tensor that `from_stream` makes, within one process and without a copy.

    Work put into `to_stream` from now on waits for what is in `from_stream` now, and torch does not reuse the tensor's
    memory while `to_stream` may read it.

    Parameters
    ----------
    from_stream, to_stream
        Torch's streams, on one device or on two that can read each other.
    """
    if from_stream == to_stream:
        return
    to_stream.wait_event(from_stream.record_event())
    tensor.record_stream(to_stream)
