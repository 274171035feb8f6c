"""Honest systems that look like the cheats; every one has to pass."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
from core import HERE, batches, make_work, play, put, put_one


def plain(io):
    play(io)


def caches_by_the_whole_content(io):
    """Beside `caches_by_a_fingerprint`: what it remembers is right, because the whole history is the key."""
    known, history = {}, b""

    def change(outputs, batch, item):
        nonlocal history
        history += b"".join(np.asarray(value).tobytes() for value in item.values())
        return known.setdefault(history, outputs)

    play(io, change)


def works_on_a_thread(io):
    """Beside `leaves_work_on_a_thread`: it waits for the thread."""
    names, work = make_work(io)
    io.ready()
    with ThreadPoolExecutor(1) as pool:
        for _, item in batches(io, names):
            put(io, pool.submit(work, item).result())


def pipelines_over_threads(io):
    """Beside `waits_for_later_inputs`: batch by batch on one thread, written by another, nothing held back."""
    import queue

    names, work = make_work(io)
    done = queue.Queue()

    def write():
        while (outputs := done.get()) is not None:
            put(io, outputs)

    writer = threading.Thread(target=write)
    writer.start()
    io.ready()
    try:
        for _, item in batches(io, names):
            done.put(work(item))
    finally:
        done.put(None)
        writer.join()


def writes_chunks(io):
    """Beside `drops_a_frame`: frame by frame."""
    names, work = make_work(io)
    io.ready()
    for _, item in batches(io, names):
        for name, value in work(item).items():
            for frame in range(len(value)):
                put_one(io, name, value[frame : frame + 1])


def writes_strided_views(io):
    """Beside `hands_over_a_lazy_array`: exact arrays, laid out oddly in memory."""

    def change(outputs, batch, item):
        wide = {name: np.repeat(value, 2, axis=-1) for name, value in outputs.items()}
        return {name: value[..., ::2] for name, value in wide.items()}

    play(io, change)


def measures_itself(io):
    """Beside `replaces_the_timers`: it reads the clocks, and leaves them as they are."""
    spent = 0.0

    def change(outputs, batch, item):
        nonlocal spent
        spent += time.perf_counter() - time.monotonic()
        return outputs

    play(io, change)


def keeps_weights_in_a_file(io):
    """Beside `looks_for_the_answers`: a cache of its own making, of what does not depend on the inputs."""
    path = HERE / ".flashrt" / "weights.npy"
    path.parent.mkdir(exist_ok=True)
    np.save(path, np.arange(16))
    assert np.load(path).sum() == 120
    play(io)


def copies_its_inputs(io):
    """Beside `changes_its_inputs`: scratch memory of its own."""

    def before(item):
        copies = {name: np.array(value) for name, value in item.items()}
        scratch = {name: value * 0 for name, value in copies.items()}
        assert all(not value.any() for value in scratch.values())
        return copies

    play(io, before=before)


def warms_up_at_start(io):
    """Beside `works_at_start`: a first batch of made-up inputs, on a state that it throws away."""
    import inputs as own

    _, warm = make_work(io)
    for item in own.batches(0, 1):
        warm(item)
    play(io)


def falls_back_to_itself(io):
    """Beside `calls_the_reference`: it would take a faster kernel if there were one."""
    try:
        import a_kernel_that_is_not_installed as kernel
    except ImportError:
        kernel = None
    assert kernel is None
    play(io)


def prints_and_notes(io):
    """Beside `forges_messages`: a line a batch."""
    play(io, lambda outputs, batch, item: (print(f"batch {batch}"), outputs)[1])
