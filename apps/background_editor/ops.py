"""The operations of the background editor as program.yaml names them; each keeps its state where that declares it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, MutableMapping
from typing import Any

import editor_model as model  # type: ignore[import-not-found]
import torch
from editor_config import EditorConfig, load_config  # type: ignore[import-not-found]

from flashrt.apps.shared import streaming_vae
from flashrt.apps.shared.causal_dit import Ranks
from flashrt.apps.shared.settings import FRAMES_PER_LATENT
from flashrt.apps.shared.weights import prepare_device, torch_device

Inputs = Mapping[str, Any]
State = MutableMapping[str, Any]
Op = Callable[[Inputs, State], Any]


def load(context: Any) -> dict[str, Op]:
    """Return the operations that `context.operations` asks for (None: all); other weights are not loaded.

    Loading ends with a warm-up on scratch values, so that the first real batch is no slower than the next.
    """
    config = load_config(context.config)
    device = torch_device(context.device)
    prepare_device(config, device)
    ranks = Ranks.of(context, config.video)
    makers: dict[str, Callable[[], Op]] = {
        "encode": lambda: make_encode(config, device),
        "denoise_step": lambda: make_denoise_step(config, device, ranks),
        "decode": lambda: streaming_vae.make_decode(
            model.load_decoder(config, device), config.video, output="restyled", remembered="decoder.cache"
        ),
        "segment": lambda: make_segment(config, device),
        "composite": lambda: composite,
    }
    wanted = makers if context.operations is None else makers.keys() & set(context.operations)
    return {name: make() for name, make in makers.items() if name in wanted}


def make_encode(config: EditorConfig, device: str) -> Op:
    """Return the op that turns camera frames into noisy latents: `camera` -> `sample` {latents, level}."""
    encoder = model.load_encoder(config, device)

    def encode(inputs: Inputs, state: State) -> Inputs:
        cache, rng = state["encoder.cache"], state["encoder.rng"]
        sample, state["encoder.cache"], state["encoder.rng"] = model.encode(
            encoder, config, inputs["camera"], encoder.start_cache if cache is None else cache,
            model.first_noise_state(config) if rng is None else rng,
        )  # fmt: skip
        return {"sample": sample}

    frames = model.blank_image(config)[None].repeat(config.video.frames_per_batch, 1, 1, 1)
    encode({"camera": frames}, {"encoder.cache": None, "encoder.rng": None})
    return encode


def make_denoise_step(config: EditorConfig, device: str, ranks: Ranks) -> Op:
    """Return the op that takes one denoising step: `sample` -> `latents`, `sample` one level on.

    The level travels with the latents, so all steps are one operation; each has a `dit.kv` of its own.
    """
    dit = model.load_dit(config, device, ranks)

    def denoise_step(inputs: Inputs, state: State) -> Inputs:
        kv = state["dit.kv"]
        sample, state["dit.kv"] = model.denoise_step(dit, inputs["sample"], dit.start_kv if kv is None else kv)
        return {"latents": sample["latents"], "sample": sample}

    denoise_step({"sample": {"latents": _blank_latents(config), "level": config.first_level}}, {"dit.kv": None})
    return denoise_step


def make_segment(config: EditorConfig, device: str) -> Op:
    """Return the op that finds the person, four frames a chunk: `camera` -> `masks`."""
    segmenter = model.load_segmenter(config, device)

    def segment(inputs: Inputs, state: State) -> Iterator[Inputs]:
        for frames in torch.as_tensor(inputs["camera"]).split(FRAMES_PER_LATENT):
            yield {"masks": model.segment(segmenter, frames)}

    list(segment({"camera": model.blank_image(config)[None]}, {}))
    return segment


def composite(inputs: Inputs, state: State) -> Inputs:
    """Put the person before the restyled background: `camera`, `restyled`, `masks` -> `frames`."""
    return {"frames": model.composite(inputs["camera"], inputs["restyled"], inputs["masks"])}


def _blank_latents(config: EditorConfig) -> torch.Tensor:
    sizes = config.video
    return torch.zeros((sizes.latent_frames, int(sizes.vae["z_dim"]), sizes.latent_height, sizes.latent_width))
