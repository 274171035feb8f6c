"""The reference: plain, synchronous, one device, nothing streamed between the components."""

from __future__ import annotations

from typing import Any

import worldplay_model as model  # type: ignore[import-not-found]
from worldplay_config import load_config  # type: ignore[import-not-found]

from flashrt.apps.shared.weights import prepare_device, torch_device


def serve(io: Any) -> None:
    """Play the world: for each batch of actions [frames, 8], write frames uint8 [frames, height, width, 3]."""
    config = load_config(io.config)
    device = torch_device(io.devices[0]) if io.devices else "cpu"
    prepare_device(config, device)
    dit = model.load_dit(config, device)
    decoder = model.load_decoder(config, device)
    model.warm_up_dit(dit)
    model.warm_up_decoder(decoder, config)

    noise_state = model.first_noise_state(config)
    kv_of_step = [dit.start_kv] * config.num_steps
    feature_cache = decoder.start_cache
    io.ready()

    for actions in io.inputs["actions"]:
        latents, noise_state = model.draw_noise(config, noise_state, device)
        for step in range(config.num_steps):
            latents, kv_of_step[step] = model.denoise_step(dit, latents, step, actions, kv_of_step[step])
        frames, feature_cache = model.decode(decoder, latents, feature_cache)
        io.outputs["frames"].write(frames)
