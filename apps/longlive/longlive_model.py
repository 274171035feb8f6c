"""Prompts in logical time, and a video that follows them.

All functions are pure: what outlives a call (sound heard so far, generators, caches) comes in and goes out as plain
values.
"""

from __future__ import annotations

from typing import Any

import torch
from longlive_config import NarratedConfig  # type: ignore[import-not-found]
from torch import Tensor

from flashrt.apps.shared import causal_dit, recogniser, streaming_vae
from flashrt.apps.shared.causal_dit import ALONE, KvCache, Ranks, VideoDit
from flashrt.apps.shared.recogniser import Recogniser
from flashrt.apps.shared.streaming_vae import Decoder
from flashrt.apps.shared.weights import Source

Prompts = dict[str, Tensor]
"""The last prompts, oldest first: ``{"from": int64 [prompts], "tokens": int64 [prompts, tokens]}``.

``from`` is the batch from which each counts.
"""
Hearing = dict[str, Any]
"""``{"batch": batches heard, "speech": float32 [samples] of an unfinished utterance, "prompts": Prompts}``."""
Scene = dict[str, Any]
"""``{"batch": batches made, "rng": generator state, "from": the prompt's first batch, "context": its tokens}``."""


def source_of(config: NarratedConfig, device: str) -> Source:
    """Return where the parts come from."""
    return Source("longlive", config, device)


def first_hearing(config: NarratedConfig) -> Hearing:
    """Return what the recogniser knows before the first sound: an empty prompt that counts from batch 0."""
    shape = (config.num_prompts, config.prompt_tokens)
    prompts = {"from": torch.zeros(shape[0], dtype=torch.int64), "tokens": torch.zeros(shape, dtype=torch.int64)}
    return {"batch": 0, "speech": torch.zeros(0), "prompts": prompts}


def listen(asr: Recogniser, config: NarratedConfig, sound: Any, hearing: Hearing) -> tuple[Prompts, Hearing]:
    """Hear one batch's sound; transcribe once an utterance has ended.

    Parameters
    ----------
    sound
        float32 [samples] at 16 kHz.

    Returns
    -------
    The last prompts, and what is known now.
    """
    sound = torch.as_tensor(sound).to(torch.float32)
    speaking = float(sound.square().mean().sqrt()) > config.loudness
    prompts, speech = hearing["prompts"], hearing["speech"]
    if speaking:
        speech = torch.cat([speech, sound])
    elif len(speech):
        tokens = recogniser.transcribe(asr, speech).cpu()[None]
        counts_from = torch.tensor([hearing["batch"] + config.prompt_delay])
        prompts = {
            "from": torch.cat([prompts["from"][1:], counts_from]),
            "tokens": torch.cat([prompts["tokens"][1:], tokens]),
        }
        speech = torch.zeros(0)
    return prompts, {"batch": hearing["batch"] + 1, "speech": speech, "prompts": prompts}


def load_text_encoder(config: NarratedConfig, device: str) -> Any:
    """Load `UMT5EncoderModel`, which reads prompts for Wan's transformer."""
    from transformers import UMT5Config, UMT5EncoderModel

    build = lambda: UMT5EncoderModel(UMT5Config(**config.text_encoder))  # noqa: E731
    return source_of(config, device).load("text_encoder", UMT5EncoderModel, build, 5)


def first_scene(config: NarratedConfig) -> Scene:
    """Return the state of the video before its first batch."""
    return {"batch": 0, "rng": causal_dit.first_noise_state(config.seed + 4), "from": -1, "context": None}


def direct(encoder: Any, config: NarratedConfig, prompts: Prompts, scene: Scene) -> tuple[dict[str, Any], Scene]:
    """Return what the next batch is made from: noise, and the prompt that counts in this batch.

    Which prompt that is depends on batch numbers alone, not on when the recogniser was done: as long as it is done
    within `prompt_delay` batches, the video is the same.
    """
    counting = [index for index, first in enumerate(prompts["from"].tolist()) if first <= scene["batch"]]
    index = counting[-1] if counting else 0
    context, since = scene["context"], int(prompts["from"][index])
    if context is None or since != scene["from"]:
        tokens = prompts["tokens"][index : index + 1].to(encoder.device)
        context = encoder(input_ids=tokens).last_hidden_state.float()
    device = str(encoder.device)
    latents, rng = causal_dit.draw_noise(config.video, scene["rng"], device)
    sample = {"latents": latents, "context": context, "level": 0}
    return sample, {"batch": scene["batch"] + 1, "rng": rng, "from": since, "context": context}


def load_dit(config: NarratedConfig, device: str, ranks: Ranks = ALONE) -> VideoDit:
    """Load the video transformer, and show it the first image."""
    source = source_of(config, device)
    transformer = causal_dit.load_transformer(source, config.video)
    start = streaming_vae.start_latent(source, config.video).to(device)
    nothing = torch.zeros((1, 1, transformer.config.text_dim), device=device, dtype=source.dtype)
    return VideoDit(
        config.video, device, transformer, causal_dit.show_first_image(transformer, start, nothing, ranks), ranks
    )


def denoise_step(dit: VideoDit, sample: dict[str, Any], kv: KvCache) -> tuple[dict[str, Any], KvCache]:
    """Take one Euler step of flow matching on a batch's latent frames."""
    level = int(sample["level"])
    now, after = causal_dit.noise_level(dit.sizes, level), causal_dit.noise_level(dit.sizes, level + 1)
    context = sample["context"].to(dit.device, dit.transformer.dtype)
    latents, kv = causal_dit.denoise(dit, sample["latents"].to(dit.device), now, after, context, kv)
    return {**sample, "latents": latents, "level": level + 1}, kv


def load_decoder(config: NarratedConfig, device: str) -> Decoder:
    """Load the VAE's decoder and let it decode the first image."""
    source = source_of(config, device)
    return streaming_vae.load_decoder(source, config.video, streaming_vae.start_latent(source, config.video))
