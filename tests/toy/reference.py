"""A toy world: drift (with state) -> render (with state), synchronous."""

import numpy as np
import toy_ops


def serve(io):
    ops = toy_ops.make_ops()
    drift, render = {}, {}
    io.ready()
    for actions in io.inputs["actions"]:
        latents = ops["drift"]({"actions": actions}, drift)["latents"]
        frames = ops["render"]({"latents": latents}, render)["frames"]
        io.outputs["frames"].write(np.asarray(frames))
