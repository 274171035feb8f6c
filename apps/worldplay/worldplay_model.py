"""The world model: a causal video transformer that listens to key presses, and a streaming decoder.

All functions that compute are pure: they take the state of the world (noise generator, attention cache, feature
cache) as plain values and return the next one; nothing is changed in place.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from worldplay_config import NUM_KEYS, WorldConfig  # type: ignore[import-not-found]

from flashrt.apps.shared import causal_dit, streaming_vae
from flashrt.apps.shared.causal_dit import ALONE, KvCache, Ranks, VideoDit
from flashrt.apps.shared.streaming_vae import Decoder, FeatureCache
from flashrt.apps.shared.weights import Source
from flashrt.errors import input_error

TILE_OVERLAP = 2
"""Latent columns that a tile sees beyond its own, on each side."""


class ActionEmbedding(nn.Module):
    """Turn key presses into context tokens of the transformer: one token a displayed frame."""

    def __init__(self, num_rows: int, text_dim: int) -> None:
        super().__init__()
        self.keys = nn.Linear(NUM_KEYS, text_dim)
        self.position = nn.Parameter(torch.zeros(num_rows, text_dim))
        self.project = nn.Linear(text_dim, text_dim)

    def forward(self, actions: Tensor) -> Tensor:
        """Map actions [rows, 8] to tokens [1, rows, text_dim]; the last rows of the table serve fewer rows."""
        hidden = self.keys(actions.to(self.keys.weight.dtype)) + self.position[-actions.shape[0] :]
        return self.project(F.silu(hidden)).unsqueeze(0)


@dataclass(frozen=True)
class Dit(VideoDit):
    """The loaded transformer with the embedding of actions."""

    config: WorldConfig | None = None
    actions: Any = None


def load_dit(config: WorldConfig, device: str, ranks: Ranks = ALONE) -> Dit:
    """Load the transformer and the action embedding, and show them the first image.

    Raises
    ------
    InputError
        The checkpoint folder, or a part of it, is not there.
    """
    source = Source("worldplay", config, device)
    source.part("transformer", "action_embedding.safetensors")
    transformer = causal_dit.load_transformer(source, config)
    build = lambda: ActionEmbedding(config.frames_per_batch, transformer.config.text_dim)  # noqa: E731
    # Louder than the rest: a key must be heard through noise, as it is in a trained model.
    embedding = source.load_layers("action_embedding.safetensors", build, 1, loudness=8.0)
    # The first image is clean context for every step, so it is read at noise level 0, with no key held.
    context = embedding(torch.zeros(1, NUM_KEYS, device=device))
    start = streaming_vae.start_latent(source, config, config.start_latent).to(device)
    start_kv = causal_dit.show_first_image(transformer, start, context, ranks)
    return Dit(config, device, transformer, start_kv, ranks, config, embedding)


def load_decoder(config: WorldConfig, device: str) -> Decoder:
    """Load the VAE's decoder half and let it decode the first image (that frame belongs to the start-up)."""
    source = Source("worldplay", config, device)
    return streaming_vae.load_decoder(source, config, streaming_vae.start_latent(source, config, config.start_latent))


def encode_start(config: WorldConfig, image: Tensor) -> Tensor:
    """Encode a first image, uint8 [height, width, 3], to a start latent, float32 [1, channels, height, width].

    Save it with safetensors under the name ``latent`` and name the file in the configuration (`start_latent`).
    """
    return streaming_vae.encode_image(streaming_vae.load_vae(Source("worldplay", config, "cpu"), config), image)


def first_noise_state(config: WorldConfig) -> Tensor:
    """Return the generator state from which the first batch draws its noise."""
    return causal_dit.first_noise_state(config.seed + 4)


def draw_noise(config: WorldConfig, noise_state: Tensor, device: str) -> tuple[Tensor, Tensor]:
    """Return a batch's noise, float32 [latent_frames, channels, height, width], and the next generator state."""
    return causal_dit.draw_noise(config, noise_state, device)


def check_actions(config: WorldConfig, actions: Any, device: str) -> Tensor:
    """Return a batch's actions as float32 [frames, 8] on the device.

    Raises
    ------
    InputError
        When the shape is another one.
    """
    tensor = actions if isinstance(actions, Tensor) else torch.tensor(actions)
    tensor = tensor.to(device, torch.float32)
    expected = [config.frames_per_batch, NUM_KEYS]
    if list(tensor.shape) != expected:
        raise input_error(
            "worldplay input 'actions'",
            f"shape {expected}: one row a displayed frame, one column a key",
            f"shape {list(tensor.shape)}",
            "send one row for each frame of the batch",
        )
    return tensor


def denoise_step(dit: Dit, latents: Tensor, level: int, actions: Any, kv: KvCache) -> tuple[Tensor, KvCache]:
    """Take one Euler step of flow matching from noise level `level` to the next.

    Parameters
    ----------
    latents
        float32 [latent_frames, channels, height, width].
    actions
        float32 [frames, 8].
    kv
        Attention cache of this level: keys and values as this very step saw the past batches.

    Returns
    -------
    The latents one level cleaner, and the cache with this batch in it.
    """
    assert dit.config is not None
    context = dit.actions(check_actions(dit.config, actions, dit.device))
    now, after = causal_dit.noise_level(dit.sizes, level), causal_dit.noise_level(dit.sizes, level + 1)
    return causal_dit.denoise(dit, latents, now, after, context, kv)


def decode(decoder: Decoder, latents: Tensor, cache: FeatureCache) -> tuple[Tensor, FeatureCache]:
    """Decode the next latent frames of the world; see `flashrt.apps.shared.streaming_vae.decode`."""
    return streaming_vae.decode(decoder, latents, cache)


def tile_columns(width: int, tile: int, num_tiles: int) -> tuple[slice, slice]:
    """Return the latent columns that a tile decodes, and which of those are its own."""
    first, last = width * tile // num_tiles, width * (tile + 1) // num_tiles
    low, high = max(0, first - TILE_OVERLAP), min(width, last + TILE_OVERLAP)
    return slice(low, high), slice(first - low, last - low)


def decode_tile(
    decoder: Decoder, latents: Tensor, cache: FeatureCache, ranks: Ranks, scale: int
) -> tuple[Tensor, FeatureCache]:
    """Decode this rank's columns and return the frames of all ranks: equal to the eye only, seams differ.

    Parameters
    ----------
    cache
        What the convolutions remember of this tile.
    scale
        Pixels along one side of a latent pixel.
    """
    seen, own = tile_columns(latents.shape[-1], ranks.rank, ranks.degree)
    frames, cache = streaming_vae.decode(decoder, latents[..., seen], cache)
    part = frames[:, :, own.start * scale : own.stop * scale].contiguous()
    columns = latents.shape[-1] * scale // ranks.degree
    parts = [torch.empty_like(part[:, :, :1]).expand(-1, -1, columns, -1).contiguous() for _ in range(ranks.degree)]
    torch.distributed.all_gather(parts, part, group=ranks.group)
    return torch.cat(parts, dim=2), cache


def tile_start(decoder: Decoder, config: WorldConfig, ranks: Ranks) -> FeatureCache:
    """Return this tile's feature cache after the first image."""
    source = Source("worldplay", config, decoder.device)
    start = streaming_vae.start_latent(source, config, config.start_latent).to(decoder.device)
    seen, _ = tile_columns(config.latent_width, ranks.rank, ranks.degree)
    blank: FeatureCache = [None] * len(decoder.start_cache)
    return streaming_vae.decode(decoder, start[..., seen], blank)[1]


def warm_up_dit(dit: Dit) -> None:
    """Run the steps of two batches on scratch values: kernels and memory are then ready, no state is touched."""
    config = dit.config
    assert config is not None
    actions = torch.zeros(config.frames_per_batch, NUM_KEYS)
    kv = dit.start_kv
    for _ in range(2):
        latents, _ = draw_noise(config, first_noise_state(config), dit.device)
        _, kv = denoise_step(dit, latents, 0, actions, kv)


def warm_up_decoder(decoder: Decoder, config: WorldConfig) -> None:
    """Decode two latent frames on scratch values: the first ones after the start take other kernels than the rest."""
    latents, _ = draw_noise(config, first_noise_state(config), decoder.device)
    decode(decoder, latents[:2], decoder.start_cache)
