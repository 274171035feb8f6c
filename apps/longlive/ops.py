"""The operations of the narrated video as program.yaml names them; each keeps its state where FlashRT declares it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, MutableMapping
from typing import Any

import longlive_model as model  # type: ignore[import-not-found]
import torch
from longlive_config import NarratedConfig, load_config  # type: ignore[import-not-found]

from flashrt.apps.shared import recogniser, streaming_vae
from flashrt.apps.shared.causal_dit import Ranks
from flashrt.apps.shared.weights import prepare_device, torch_device

Inputs = Mapping[str, Any]
State = MutableMapping[str, Any]
Op = Callable[[Inputs, State], Inputs]


def load(context: Any) -> dict[str, Op]:
    """Return the operations that `context.operations` asks for (None: all); other weights are not loaded.

    Loading ends with a warm-up on scratch values, so that the first real batch is no slower than the next.
    """
    config = load_config(context.config)
    device = torch_device(context.device)
    prepare_device(config, device)
    ranks = Ranks.of(context, config.video)
    makers: dict[str, Callable[[], Op]] = {
        "listen": lambda: make_listen(config, device),
        "direct": lambda: make_direct(config, device),
        "denoise_step": lambda: make_denoise_step(config, device, ranks),
        "decode": lambda: streaming_vae.make_decode(model.load_decoder(config, device), config.video),
    }
    wanted = makers if context.operations is None else makers.keys() & set(context.operations)
    return {name: make() for name, make in makers.items() if name in wanted}


def make_listen(config: NarratedConfig, device: str) -> Op:
    """Return the op that waits for spoken prompts: `sound` -> `prompts`; state `asr.hearing`."""
    asr = recogniser.load_recogniser(model.source_of(config, device), config.asr, config.prompt_tokens)

    def listen(inputs: Inputs, state: State) -> Inputs:
        hearing = state["asr.hearing"]
        prompts, state["asr.hearing"] = model.listen(
            asr, config, inputs["sound"], model.first_hearing(config) if hearing is None else hearing
        )
        return {"prompts": prompts}

    recogniser.transcribe(asr, torch.zeros(asr.window_samples))
    return listen


def make_direct(config: NarratedConfig, device: str) -> Op:
    """Return the op that begins a batch: `prompts` -> `sample` {latents, context, level 0}; state `dit.scene`."""
    encoder = model.load_text_encoder(config, device)

    def direct(inputs: Inputs, state: State) -> Inputs:
        scene = state["dit.scene"]
        sample, state["dit.scene"] = model.direct(
            encoder, config, inputs["prompts"], model.first_scene(config) if scene is None else scene
        )
        return {"sample": sample}

    direct({"prompts": model.first_hearing(config)["prompts"]}, {"dit.scene": None})
    return direct


def make_denoise_step(config: NarratedConfig, device: str, ranks: Ranks) -> Op:
    """Return the op that takes one denoising step: `sample` -> `latents`, `sample` one level on.

    The level travels with the latents, so all steps are one operation; each has a `dit.kv` of its own.
    """
    dit = model.load_dit(config, device, ranks)

    def denoise_step(inputs: Inputs, state: State) -> Inputs:
        kv = state["dit.kv"]
        sample, state["dit.kv"] = model.denoise_step(dit, inputs["sample"], dit.start_kv if kv is None else kv)
        return {"latents": sample["latents"], "sample": sample}

    sizes = config.video
    latents = torch.zeros((sizes.latent_frames, int(sizes.vae["z_dim"]), sizes.latent_height, sizes.latent_width))
    context = torch.zeros((1, config.prompt_tokens, dit.text_dim))
    denoise_step({"sample": {"latents": latents, "context": context, "level": 0}}, {"dit.kv": None})
    return denoise_step
