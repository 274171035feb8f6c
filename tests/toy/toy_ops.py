import time

import numpy as np


def make_ops(delay_s=0.0):
    def drift(inputs, state):
        seen = state.get("drift.seen", 0)
        seen = 0 if seen is None else seen
        state["drift.seen"] = seen + 1
        time.sleep(delay_s)
        return {"latents": np.cumsum(inputs["actions"], axis=0) + np.float32(seen)}

    def render(inputs, state):
        last = state.get("render.last", None)
        frames = np.empty((len(inputs["latents"]), 4, 4), np.float32)
        for index, latent in enumerate(inputs["latents"]):
            last = np.float32(0) if last is None else last
            last = np.float32(0.5) * last + latent.sum(dtype=np.float32)
            frames[index] = last + np.arange(16, dtype=np.float32).reshape(4, 4)
        state["render.last"] = last
        time.sleep(delay_s * len(frames) / 6)
        return {"frames": frames}

    return {"drift": drift, "render": render}


def load(context):
    return make_ops(float(context.config.get("delay_s", 0.0)))
