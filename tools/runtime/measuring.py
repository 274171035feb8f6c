"""What a worker does beside its work while a profile is measured: see `flashrt.bench.profile`.

The ranks of a group begin every operation together and end it with their device idle, so that an operation's time is
that of the group. One batch is written down, for its values to be handed over again; one is weighed.
"""

from __future__ import annotations

import gc
import os
import sys
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flashrt.ir.flattening import OUTPUT, FlatProgram, Operation
from flashrt.ir.ops import Call
from flashrt.ir.values import join
from flashrt.runtime.batch import OperationRun
from flashrt.runtime.holdings import Storages, find_storages, track_peak
from flashrt.runtime.wire import write_message

FOREIGN_FOLDERS = {".flashrt", ".git", ".venv", "__pycache__", "node_modules", "site-packages"}
WEIGHT_SUFFIXES = (".safetensors", ".pt", ".pth", ".ckpt", ".bin", ".npy", ".npz", ".onnx", ".gguf", ".h5")
Row = tuple[str, str, int, int, int, int]


@dataclass(frozen=True)
class Loaded:
    """What a worker has loaded."""

    flat: FlatProgram
    folder: Path
    operations: tuple[Operation, ...]
    ops: Mapping[str, Call]
    store: Mapping[str, Any]
    """State instance -> value."""
    reload: Callable[[frozenset[str]], Mapping[str, Call]]
    """Loads the ops of these names anew, alone."""


class Measuring:
    """The measurements of one worker.

    Parameters
    ----------
    told
        What the profile asks for: ``weigh``, the batch in which memory is measured; ``write``, the one whose values
        are written to the folder ``values``, where that is not empty.
    name, rank, group
        The worker, and its process group (None: it is alone).
    tell
        Takes rows for the supervisor: ``memory`` (an operation: bytes in all, of a call, of weights), ``held`` (a
        state instance: bytes), ``file`` (a file that the operations were made of).
    """

    def __init__(
        self, told: Mapping[str, Any], folder: Path, device: str, name: str, rank: int, group: Any,
        tell: Callable[[Row], None],
    ) -> None:  # fmt: skip
        self._weigh, self._write = int(told["weigh"]), int(told["write"])
        self._values = Path(told["values"]) / f"{name}.values" if told["values"] and rank == 0 else None
        self._device = device
        self._group = group
        self._tell = tell
        self._folder = folder
        self._peaks: dict[str, int] = {}
        self._at_load: dict[frozenset[str], Storages] = {}
        self._loans: set[str] = set()
        self.notes: list[str] = []
        self._files = _watch_files(folder)

    def loaded(self, what: Loaded) -> None:
        """Take note of what the operations hold before the first batch."""
        self._what = what
        for operation in what.operations:
            names = _names(operation)
            self._at_load.setdefault(names, self._reach(what.ops[name] for name in names))

    def settle(self) -> None:
        """Wait until the device has done what it was given."""
        if self._device != "cpu":
            import torch

            torch.cuda.synchronize()

    def run(self, run: OperationRun, batch: int) -> None:
        """Run an operation on a batch to its end; all ranks of the group begin together.

        Its outputs leave when all ranks have ended: only then has the operation, and may its consumers begin.
        """
        run.settle, run.on_end = self.settle, self._meet
        self._loans.clear()
        self._meet()
        if batch == self._weigh:
            with track_peak(self._device) as peak:
                run.drain()
            self._peaks[run.path] = peak.num_bytes
        elif batch == self._write and self._values is not None:
            self._write_values(run)
        else:
            run.drain()

    def _meet(self) -> None:
        """Wait for the other ranks."""
        if self._group is not None:
            import torch.distributed as dist

            dist.barrier(self._group)
        self.settle()

    def loaned(self, port: str) -> None:
        """Take note that the running operation makes a port's value in a channel's memory."""
        self._loans.add(port)

    def _write_values(self, run: OperationRun) -> None:
        parts: dict[str, list[Any]] = defaultdict(list)

        def keep(outputs: Mapping[str, Any]) -> None:
            for port, value in outputs.items():
                parts[port].append(value)

        run.on_outputs = keep
        run.drain()
        assert self._values is not None
        with self._values.open("ab") as file:
            for flow in self._what.flat.outgoing.get(run.path, ()):
                if flow.target != OUTPUT:
                    value = join(parts[flow.source_port], flow.axis, where=flow.label)
                    head = {"source": flow.source, "target": flow.target, "port": flow.source_port}
                    write_message(file, {**head, "in_place": flow.source_port in self._loans}, value)

    def finish(self, batch: int) -> None:
        """Say what the operations keep in memory, once the batch that was weighed is done."""
        if batch != self._weigh:
            return
        weights: dict[frozenset[str], int | None] = {}
        for operation in self._what.operations:
            names = _names(operation)
            if names not in weights:
                weights[names] = self._weigh_ops(operation, names)
            own = self._reach(self._what.ops[name] for name in names)
            states: Storages = {}
            for instance in operation.accesses:
                held = self._reach([self._what.store.get(instance)])
                states |= held
                self._tell(("held", instance, batch, 0, 0, sum(held.values())))
            bytes_of_ops = weights[names]
            if bytes_of_ops is None:
                continue
            state = sum(size for key, size in states.items() if key not in own)
            call = self._peaks.get(operation.path, 0)
            self._tell(("memory", operation.path, batch, bytes_of_ops + state + call, call, bytes_of_ops))
        for name in sorted(self._read_files()):
            self._tell(("file", name, batch, 0, 0, 0))

    def _reach(self, roots: Any) -> Storages:
        return find_storages(roots, self._folder, self._device)

    def _weigh_ops(self, operation: Operation, names: frozenset[str]) -> int | None:
        """Return what a process that loads this operation alone holds of it: weights, and what calls have kept."""
        everything = set().union(*map(_names, self._what.operations))
        if names == everything:
            return sum(self._reach(self._what.ops.values()).values())
        before = self._at_load[names]
        kept = self._reach(self._what.ops[name] for name in names)
        grown = sum(size for key, size in kept.items() if key not in before)
        alone: Mapping[str, Call] = {}
        allocated = self._allocated()
        try:
            alone = self._what.reload(names)
            loaded = max(sum(self._reach(alone.values()).values()), self._allocated() - allocated)
        except Exception as error:  # noqa: BLE001 - the user's code, whose figure is then left out
            text = " ".join(str(error).split())[:300]
            self.notes.append(
                f"operation '{operation.path}': its memory is left out, because loading it alone a second time "
                f"failed: {type(error).__name__}: {text}"
            )
            return None
        finally:
            alone = {}
            gc.collect()
            if self._device != "cpu":
                import torch

                torch.cuda.empty_cache()
        return loaded + grown

    def _allocated(self) -> int:
        """Return what torch has allocated on this worker's GPU; on the CPU nobody counts."""
        if self._device == "cpu":
            return 0
        import torch

        gc.collect()
        return int(torch.cuda.memory_allocated())

    def _read_files(self) -> set[str]:
        """Return the files that the operations were made of; those in the program's folder relative to it."""
        found = set(self._files)
        for name, module in list(sys.modules.items()):
            file = getattr(module, "__file__", None)
            # What applications share is part of them, though it is installed beside the library.
            found |= {file} if file and name.startswith("flashrt.apps.") else _within(file, self._folder)
        with Path("/proc/self/maps").open(encoding="utf-8", errors="replace") as maps:
            for line in maps:
                found |= _within(line.partition("/")[1] + line.partition("/")[2].strip() or None, self._folder)
        return found


def _names(operation: Operation) -> frozenset[str]:
    return frozenset({operation.op, *(prologue.op for prologue in operation.prologues)})


def _within(name: object, folder: Path) -> set[str]:
    """Return the path of a file that operations are made of, in a set: of one in `folder` relative to it.

    Of files elsewhere, only those whose name says that they are weights.
    """
    if not isinstance(name, str) or not os.path.isabs(name) or not os.path.isfile(name):
        return set()
    # A link in the folder is the program's, wherever it leads.
    for path in (os.path.abspath(name), os.path.realpath(name)):
        for root in (os.path.abspath(folder), os.path.realpath(folder)):
            if path.startswith(root + os.sep):
                inside = path[len(root) + 1 :]
                return set() if FOREIGN_FOLDERS & set(Path(inside).parts) else {inside}
    return {os.path.abspath(name)} if name.endswith(WEIGHT_SUFFIXES) else set()


def _watch_files(folder: Path) -> set[str]:
    """Return a set to which every file is added that this process opens to read from now on; see `_within`."""
    found: set[str] = set()
    opened: set[str] = set()
    written: set[str] = set()

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        if event != "open" or not isinstance(arguments[0], str | os.PathLike):
            return
        name = os.path.abspath(os.fspath(arguments[0]))
        _, mode, flags = arguments
        writes = set(mode) & set("wax+") if isinstance(mode, str) else flags & (os.O_WRONLY | os.O_RDWR)
        if writes and name not in written:
            # What a program writes itself is no part of it, also where it reads it again.
            written.add(name)
            found.difference_update(_within(name, folder))
        elif not writes and name not in opened | written:
            opened.add(name)
            found.update(_within(name, folder))

    sys.addaudithook(hook)
    return found
