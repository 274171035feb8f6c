"""Systems that go wrong, each in its own way; honest ones beside them."""

import os
import subprocess
import sys
import threading
import time

import numpy as np
import toy_ops


def run(io, change=lambda frames, batch: frames, after=None):
    ops = toy_ops.make_ops()
    drift, render = {}, {}
    io.ready()
    for batch, actions in enumerate(io.inputs["actions"]):
        latents = ops["drift"]({"actions": actions}, drift)["latents"]
        frames = change(ops["render"]({"latents": latents}, render)["frames"], batch)
        if frames is not None:
            io.outputs["frames"].write(frames)
        if after:
            after(batch)


def honest_chunks(io):
    ops = toy_ops.make_ops()
    drift, render = {}, {}
    io.ready()
    for actions in io.inputs["actions"]:
        latents = ops["drift"]({"actions": actions}, drift)["latents"]
        for part in np.split(latents, 3):
            io.outputs["frames"].write(ops["render"]({"latents": part}, render)["frames"])


def honest_reader(io):
    """Reads with a time-out instead of iterating."""
    run_io = io.inputs["actions"]
    ops = toy_ops.make_ops()
    drift, render = {}, {}
    io.ready()
    while True:
        try:
            actions = run_io.read(0.05)
        except TimeoutError:
            continue
        latents = ops["drift"]({"actions": actions}, drift)["latents"]
        io.outputs["frames"].write(ops["render"]({"latents": latents}, render)["frames"])


def one_value(io):
    def change(frames, batch):
        if batch == 5:
            frames = frames.copy()
            frames[2, 1, 3] += 1e-3
        return frames

    run(io, change)


def drops_a_frame(io):
    run(io, lambda frames, batch: frames[1:] if batch == 3 else frames)


def repeats_a_frame(io):
    run(io, lambda frames, batch: np.concatenate([frames[:1], frames]) if batch == 3 else frames)


def zeros(io):
    run(io, lambda frames, batch: np.zeros_like(frames))


def writes_nothing(io):
    run(io, lambda frames, batch: None)


def other_output(io):
    io.ready()
    for _ in io.inputs["actions"]:
        io.outputs["frame"].write(np.zeros((6, 4, 4), np.float32))


def unknown_input(io):
    io.ready()
    io.inputs["action"].read()


def unwritable_value(io):
    io.ready()
    io.outputs["frames"].write(object())


def raises(io):
    def after(batch):
        if batch == 2:
            raise RuntimeError("boom in batch 2")

    run(io, after=after)


def dies(io):
    def after(batch):
        if batch == 2:
            os.kill(os.getpid(), 9)

    run(io, after=after)


def never_ready(io):
    while True:
        time.sleep(60)


def hangs(io):
    io.ready()
    while True:
        time.sleep(60)


def returns_early(io):
    io.ready()
    io.inputs["actions"].read()


def prints_a_lot(io):
    for _ in range(2000):
        print("x" * 100)
    run(io)


def leaves_a_child(io):
    """Leaves a process behind in a session of its own, and a thread that never ends."""
    subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
    threading.Thread(target=time.sleep, args=(600,)).start()
    run(io)


def not_ready_first(io):
    io.outputs["frames"].write(np.zeros((6, 4, 4), np.float32))


not_callable = 3


def shows_devices(io):
    io.ready()
    for _ in io.inputs["actions"]:
        io.outputs["devices"].write([*io.devices, os.environ.get("CUDA_VISIBLE_DEVICES", "")])


def reads_before_ready(io):
    io.inputs["actions"].read()


def two_outputs(io):
    """Frames, and samples that come a little later."""
    io.ready()
    for actions in io.inputs["actions"]:
        io.outputs["frames"].write(np.zeros((6, 4, 4), np.float32) + actions.sum())
        io.outputs["words"].write(["a", "b"])
        io.outputs["samples"].write(np.zeros(100, np.float32) + actions.sum())


def edits_itself(io):
    def after(batch):
        if batch == 0:
            with open(__file__, "a") as file:
                file.write("\n# changed\n")

    run(io, after=after)


def surplus(io):
    """Writes ten times what a batch owes, after a first calibration."""
    io.ready()
    for batch, actions in enumerate(io.inputs["actions"]):
        times = 1 if batch < 3 else 10
        io.outputs["frames"].write(np.zeros((6 * times, 4, 4), np.float32) + actions.sum())


def ahead(io):
    """Writes everything before it reads anything."""
    io.ready()
    for batch in range(33):
        io.outputs["frames"].write(np.zeros((6, 4, 4), np.float32), batch)
    for batch, _ in enumerate(io.inputs["actions"]):
        io.batch_done(batch)


def empty(io):
    io.ready()
    for _ in io.inputs["actions"]:
        io.outputs["frames"].write(np.zeros((0, 4, 4), np.float32))


def edits_the_reference(io):
    with open(os.path.join(os.path.dirname(os.path.abspath(__file__)), "reference.py"), "a") as file:
        file.write("\n# changed\n")
    run(io)


def odd_message(io):
    io.ready()
    io.note({"kind": "span"})
    io.inputs["actions"].read()
    time.sleep(600)
