"""The reference: plain, synchronous, one device; the video waits for the recogniser in every batch."""

from __future__ import annotations

from typing import Any

import longlive_model as model  # type: ignore[import-not-found]
from longlive_config import load_config  # type: ignore[import-not-found]

from flashrt.apps.shared import recogniser, streaming_vae
from flashrt.apps.shared.weights import prepare_device, torch_device


def serve(io: Any) -> None:
    """Play the video: for the sound of each batch, float32 [samples], write frames uint8 [12, height, width, 3]."""
    config = load_config(io.config)
    device = torch_device(io.devices[0]) if io.devices else "cpu"
    prepare_device(config, device)
    asr = recogniser.load_recogniser(model.source_of(config, device), config.asr, config.prompt_tokens)
    encoder = model.load_text_encoder(config, device)
    dit = model.load_dit(config, device)
    decoder = model.load_decoder(config, device)

    hearing = model.first_hearing(config)
    scene = model.first_scene(config)
    kv_of_step = [dit.start_kv] * config.video.num_steps
    feature_cache = decoder.start_cache
    io.ready()

    for sound in io.inputs["sound"]:
        prompts, hearing = model.listen(asr, config, sound, hearing)
        sample, scene = model.direct(encoder, config, prompts, scene)
        for step in range(config.video.num_steps):
            sample, kv_of_step[step] = model.denoise_step(dit, sample, kv_of_step[step])
        frames, feature_cache = streaming_vae.decode(decoder, sample["latents"], feature_cache)
        io.outputs["frames"].write(frames)
