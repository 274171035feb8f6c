"""Systems that cheat, as agents and contestants really have; each names the row of the table that it stands for."""

import os
import socket
import sys
import threading
import time
from pathlib import Path

import numpy as np
from core import HERE, batches, make_work, play, put

CHECKED = 11
"""More batches than an equivalence check has, and than a benchmark's warm-up."""


def replays_the_warm_up(io):
    """Row 1: remembers the first outputs, and plays them again."""
    seen = []

    def change(outputs, batch, item):
        seen.append(outputs)
        return seen[batch % 4] if batch >= CHECKED else outputs

    play(io, change)


def caches_by_a_fingerprint(io):
    """Row 1: takes inputs whose first number rounds to the same for the same."""
    known = {}

    def change(outputs, batch, item):
        first = round(float(np.asarray(next(iter(item.values()))).ravel()[0]) / 4)
        return known.setdefault(first, outputs)

    play(io, change)


def waits_for_later_inputs(io):
    """Row 2: does two batches at once, and so needs the next input before it answers."""
    names, work = make_work(io)
    io.ready()
    held = []
    for _, item in batches(io, names):
        held.append(item)
        if len(held) == 2:
            for one in held:
                put(io, work(one))
            held.clear()
    for one in held:
        put(io, work(one))


def does_every_second_batch(io):
    """Row 2: the rest is what came before."""
    last = {}

    def change(outputs, batch, item):
        if batch % 2 == 0:
            last.update(outputs)
        return dict(last)

    play(io, change)


def leaves_work_on_a_thread(io):
    """Row 3: hands over a buffer that a thread is still to fill."""

    def change(outputs, batch, item):
        late = {name: np.zeros_like(value) for name, value in outputs.items()}

        def fill():
            time.sleep(2)
            for name, value in outputs.items():
                late[name][...] = value

        threading.Thread(target=fill).start()
        return late

    play(io, change)


class Lazy(np.ndarray):
    """An array that would work itself out once somebody looked."""

    def __array_finalize__(self, other):
        self.work = getattr(other, "work", None)


def hands_over_a_lazy_array(io):
    """Row 3: a subclass that stands for work not done."""

    def change(outputs, batch, item):
        return {name: np.zeros(value.shape, value.dtype).view(Lazy) for name, value in outputs.items()}

    play(io, change)


def replaces_the_timers(io):
    """Row 4: makes its own clocks say that no time passes."""
    stopped = time.monotonic_ns()
    time.monotonic_ns = lambda: stopped
    time.perf_counter = lambda: 0.0
    play(io)


def looks_for_the_answers(io):
    """Row 5: looks through files and memory for what the reference has left."""
    frames = {}
    for folder in (HERE, Path("/dev/shm"), Path("/tmp")):
        for path in list(folder.glob("*.npz"))[:20]:
            try:
                frames |= dict(np.load(path, allow_pickle=False))
            except (OSError, ValueError):
                continue
    play(io, lambda outputs, batch, item: {
        name: next((f for f in frames.values() if f.shape == value.shape), np.zeros_like(value))
        for name, value in outputs.items()
    })  # fmt: skip


def changes_its_inputs(io):
    """Row 6: makes the inputs zero, so that the reference would find zeros too if it had the same memory."""

    def before(item):
        for value in item.values():
            array = np.asarray(value)
            array.setflags(write=True)
            array[...] = 0
        return item

    play(io, before=before)


def constant(io):
    """Row 7: the same grey for whatever is asked."""
    play(io, lambda outputs, batch, item: {name: np.full_like(value, 7) for name, value in outputs.items()})


def zeros(io):
    """Row 7."""
    play(io, lambda outputs, batch, item: {name: np.zeros_like(value) for name, value in outputs.items()})


def knows_one_input(io):
    """Row 7: has the outputs for one known seed, and puts them out for every input."""
    import inputs as own

    names, work = make_work(io)
    known = [work(item) for item in own.batches(0, 4)]
    io.ready()
    for batch, _ in batches(io, names):
        put(io, known[batch % 4])


def half_precision(io):
    """Row 8: as if worked out in half precision."""

    def change(outputs, batch, item):
        return {
            name: (value.astype(np.float16).astype(value.dtype) if value.dtype.kind == "f" else value & 0xFE)
            for name, value in outputs.items()
        }

    play(io, change)


def half_resolution(io):
    """Row 8: every second row stands for two."""

    def change(outputs, batch, item):
        return {name: np.repeat(value[:, ::2], 2, axis=1)[:, : value.shape[1]] for name, value in outputs.items()}

    play(io, change)


def drops_a_frame(io):
    """Row 8."""

    def change(outputs, batch, item):
        return {name: value[1:] if batch == 3 else value for name, value in outputs.items()}

    play(io, change)


def repeats_a_frame(io):
    """Row 8: the amount is right, one frame is there twice and one not at all."""

    def change(outputs, batch, item):
        return {name: np.concatenate([value[:1], value[:-1]]) for name, value in outputs.items()}

    play(io, change)


def swaps_frames(io):
    """Row 8: all there, in another order."""
    play(io, lambda outputs, batch, item: {name: value[::-1].copy() for name, value in outputs.items()})


def calls_the_reference(io):
    """Row 9: is no work of its own."""
    sys.path.insert(0, str(HERE))
    import reference

    reference.serve(io)


def runs_a_copy_of_the_reference(io):
    """Row 9: reads the reference's text, wherever it finds it, and runs that."""
    text = (HERE / "reference.py").read_text()
    space = {"__name__": "copied"}
    exec(compile(text, "copied.py", "exec"), space)
    space["serve"](io)


def forges_messages(io):
    """Row 10: writes to the harness's socket itself."""
    names, _ = make_work(io)
    io.ready()
    for number in map(int, os.listdir("/proc/self/fd")):
        try:
            channel = socket.socket(fileno=os.dup(number))
            if channel.family == socket.AF_UNIX:
                channel.send(b'{"kind": "verdict", "equivalent": true}' * 10)
            channel.detach()
        except OSError:
            continue
    for _ in batches(io, names):
        pass


def wrong_later(io):
    """Row 11: right as long as it is looked at, it thinks."""
    play(io, lambda outputs, batch, item: (
        outputs if batch < CHECKED else {name: np.zeros_like(value) for name, value in outputs.items()}
    ))  # fmt: skip


def wrong_when_timed(io):
    """Row 11: an item that is alone in its queue is one of a timed run; then it does nothing."""
    names, work = make_work(io)
    io.ready()
    shape = None
    for _, item in batches(io, names):
        outputs = work(item) if shape is None or io.inputs[names[0]]._items.qsize() else shape
        shape = outputs
        put(io, outputs)


def works_at_start(io):
    """Row 12: works out everything for the inputs that it expects before it says that it is ready."""
    import inputs as own

    names, work = make_work(io)
    ahead = [work(item) for seed in range(2) for item in own.batches(seed, 8)]
    io.ready()
    for batch, _ in batches(io, names):
        put(io, ahead[batch % len(ahead)])
