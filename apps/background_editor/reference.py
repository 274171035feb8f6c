"""The reference: plain, synchronous, one device; restyling and segmentation one after the other."""

from __future__ import annotations

from typing import Any

import editor_model as model  # type: ignore[import-not-found]
from editor_config import load_config  # type: ignore[import-not-found]

from flashrt.apps.shared import streaming_vae
from flashrt.apps.shared.weights import prepare_device, torch_device


def serve(io: Any) -> None:
    """Edit a stream: for each batch of camera frames, uint8 [12, height, width, 3], write as many edited ones."""
    config = load_config(io.config)
    device = torch_device(io.devices[0]) if io.devices else "cpu"
    prepare_device(config, device)
    encoder = model.load_encoder(config, device)
    dit = model.load_dit(config, device)
    decoder = model.load_decoder(config, device)
    segmenter = model.load_segmenter(config, device)

    encoded, noise_state = encoder.start_cache, model.first_noise_state(config)
    kv_of_step = [dit.start_kv] * (config.video.num_steps - config.first_level)
    decoded = decoder.start_cache
    io.ready()

    for camera in io.inputs["camera"]:
        sample, encoded, noise_state = model.encode(encoder, config, camera, encoded, noise_state)
        for step in range(len(kv_of_step)):
            sample, kv_of_step[step] = model.denoise_step(dit, sample, kv_of_step[step])
        restyled, decoded = streaming_vae.decode(decoder, sample["latents"], decoded)
        masks = model.segment(segmenter, camera)
        io.outputs["frames"].write(model.composite(camera, restyled, masks))
