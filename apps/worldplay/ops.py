"""The operations of the world model as program.yaml names them; each keeps its state where FlashRT declares it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, MutableMapping
from typing import Any

import worldplay_model as model  # type: ignore[import-not-found]
from worldplay_config import WorldConfig, load_config  # type: ignore[import-not-found]

from flashrt.apps.shared.causal_dit import Ranks
from flashrt.apps.shared.weights import prepare_device, torch_device

Op = Callable[[Mapping[str, Any], MutableMapping[str, Any]], Mapping[str, Any]]


def load(context: Any) -> dict[str, Op]:
    """Return the operations that `context.operations` asks for (None: all); other weights are not loaded.

    Loading ends with a warm-up on scratch values, so that the first real batch is no slower than the next.
    """
    config = load_config(context.config)
    device = torch_device(context.device)
    prepare_device(config, device)
    ranks = Ranks.of(context, config)
    num_tiles = getattr(context, "tiles", {}).get("decode")
    tiles = Ranks(context.rank, num_tiles, context.group) if num_tiles else None
    makers: dict[str, Callable[[], Op]] = {
        "noise": lambda: make_noise(config, device),
        "denoise_step": lambda: make_denoise_step(config, device, ranks),
        "decode": lambda: make_decode(config, device, tiles),
    }
    wanted = makers if context.operations is None else makers.keys() & set(context.operations)
    return {name: make() for name, make in makers.items() if name in wanted}


def make_noise(config: WorldConfig, device: str) -> Op:
    """Return the op that draws a batch's noise: state `dit.rng` -> `sample` {latents, level 0}."""

    def noise(inputs: Mapping[str, Any], state: MutableMapping[str, Any]) -> Mapping[str, Any]:
        rng = state["dit.rng"]
        latents, state["dit.rng"] = model.draw_noise(
            config, model.first_noise_state(config) if rng is None else rng, device
        )
        return {"sample": {"latents": latents, "level": 0}}

    return noise


def make_denoise_step(config: WorldConfig, device: str, ranks: Ranks) -> Op:
    """Return the op that takes one denoising step: `actions`, `sample` -> `latents`, `sample` one level on.

    The level travels with the latents, so all steps are one operation; each has a `dit.kv` of its own. In a group of
    several devices each holds its share of the tokens, and of the heads within attention (Ulysses).
    """
    dit = model.load_dit(config, device, ranks)

    def denoise_step(inputs: Mapping[str, Any], state: MutableMapping[str, Any]) -> Mapping[str, Any]:
        latents, level = inputs["sample"]["latents"], int(inputs["sample"]["level"])
        kv = state["dit.kv"]
        latents, state["dit.kv"] = model.denoise_step(
            dit, latents.to(device), level, inputs["actions"], dit.start_kv if kv is None else kv
        )
        return {"latents": latents, "sample": {"latents": latents, "level": level + 1}}

    model.warm_up_dit(dit)
    return denoise_step


def make_decode(config: WorldConfig, device: str, tiles: Ranks | None) -> Op:
    """Return the op that decodes any number of latent frames: `latents` -> `frames`.

    Parameters
    ----------
    tiles
        Who decodes which columns; None: this rank decodes all of them.
    """
    decoder = model.load_decoder(config, device)
    start_cache = decoder.start_cache if tiles is None else model.tile_start(decoder, config, tiles)

    def decode(inputs: Mapping[str, Any], state: MutableMapping[str, Any]) -> Mapping[str, Any]:
        cache = state["vae.cache"]
        cache = start_cache if cache is None else cache
        latents = inputs["latents"].to(device)
        if tiles is None:
            frames, state["vae.cache"] = model.decode(decoder, latents, cache)
        else:
            frames, state["vae.cache"] = model.decode_tile(decoder, latents, cache, tiles, config.pixel_scale)
        return {"frames": frames}

    model.warm_up_decoder(decoder, config)
    return decode
