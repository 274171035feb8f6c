"""The world model: Wan's video transformer made causal, and Wan's VAE decoder with its cache kept outside.

All functions that compute are pure: they take the state of the world (noise generator, attention cache, feature
cache) as plain values and return the next one; nothing is changed in place. No weight takes a gradient, so none is
recorded.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from worldplay_config import NUM_KEYS, WorldConfig  # type: ignore[import-not-found]

from flashrt.errors import input_error

KvCache = dict[str, list[Tensor]]
"""``{"keys": [layer], "values": [layer]}``, each [1, tokens, width]; keys are kept before rotation."""

FeatureCache = list[Any]
"""What the causal convolutions of the decoder remember: a tensor, None or the marker ``"Rep"`` for each."""


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
class AttentionWindow:
    """What one layer's self-attention needs besides its tokens; travels in the place of `rotary_emb`."""

    past_keys: Tensor | None
    past_values: Tensor | None
    cos: Tensor
    sin: Tensor
    kept: list[tuple[Tensor, Tensor]]
    """Receives this layer's keys and values of the whole window."""


class CausalAttention:
    """Attention processor: the tokens of a chunk see each other and the cached window, never the future.

    Keys are cached unrotated and rotated at their place within the window: rotary scores depend on differences of
    positions only, so positions stay bounded however long the world runs.
    """

    def __call__(
        self,
        attn: Any,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor | None,
        attention_mask: Tensor | None,
        window: AttentionWindow,
    ) -> Tensor:
        """Attend from hidden_states [1, tokens, width] to the window; same shape out."""
        query = attn.norm_q(attn.to_q(hidden_states))
        keys = attn.norm_k(attn.to_k(hidden_states))
        values = attn.to_v(hidden_states)
        if window.past_keys is not None:
            keys = torch.cat([window.past_keys, keys], dim=1)
            values = torch.cat([window.past_values, values], dim=1)
        window.kept.append((keys, values))
        query, key, value = (x.unflatten(2, (attn.heads, -1)) for x in (query, keys, values))
        num_tokens = query.shape[1]
        query = _rotate(query, window.cos[:, -num_tokens:], window.sin[:, -num_tokens:])
        key = _rotate(key, window.cos, window.sin)
        query, key, value = (x.transpose(1, 2) for x in (query, key, value))
        mixed = F.scaled_dot_product_attention(query, key, value).transpose(1, 2).flatten(2)
        return attn.to_out[0](mixed)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    even, odd = x.unflatten(-1, (-1, 2)).unbind(-1)
    cos, sin = cos[..., 0::2], sin[..., 1::2]
    return torch.stack((even * cos - odd * sin, even * sin + odd * cos), dim=-1).flatten(-2).type_as(x)


@dataclass(frozen=True)
class Dit:
    """The loaded transformer and the attention cache of a world that has shown only its first image."""

    config: WorldConfig
    device: str
    transformer: Any
    actions: ActionEmbedding
    start_kv: KvCache


@dataclass(frozen=True)
class Decoder:
    """The loaded VAE decoder and its feature cache after the first image."""

    config: WorldConfig
    device: str
    vae: Any
    mean: Tensor
    std: Tensor
    start_cache: FeatureCache


def first_noise_state(config: WorldConfig) -> Tensor:
    """Return the generator state, uint8 [bytes], from which the first batch draws its noise."""
    return torch.Generator().manual_seed(config.seed + 4).get_state()


def draw_noise(config: WorldConfig, noise_state: Tensor, device: str) -> tuple[Tensor, Tensor]:
    """Return a batch's noise, float32 [latent_frames, channels, height, width], and the next generator state.

    The generator is the CPU's on every device, so that a device change does not change the world.
    """
    generator = torch.Generator()
    generator.set_state(noise_state)
    shape = (config.latent_frames, int(config.vae["z_dim"]), config.latent_height, config.latent_width)
    return torch.randn(shape, generator=generator).to(device), generator.get_state()


def noise_level(config: WorldConfig, level: int) -> float:
    """Return the share of noise before step `level` (after the last step: 0).

    Source: flow matching with a timestep shift, as in Wan's flow-match schedulers.
    """
    linear = 1.0 - level / config.num_steps
    return config.shift * linear / (1.0 + (config.shift - 1.0) * linear)


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
    config = dit.config
    context = dit.actions(check_actions(config, actions, dit.device))
    now, after = noise_level(config, level), noise_level(config, level + 1)
    num_past = config.window_frames - latents.shape[0]
    velocity, kv = predict_velocity(dit.transformer, latents, 1000.0 * now, context, kv, num_past)
    return latents + (after - now) * velocity, kv


def predict_velocity(
    model: Any, latents: Tensor, timestep: float, context: Tensor, kv: KvCache | None, num_past: int
) -> tuple[Tensor, KvCache]:
    """Run `WanTransformer3DModel` on a chunk that continues the cached frames.

    The body is that of the model's own `forward`, with the attention window in the place of the rotary table.

    Parameters
    ----------
    latents
        float32 [frames, channels, height, width].
    context
        [1, tokens, text_dim].
    num_past
        At most so many latent frames of the cache are used and kept.

    Returns
    -------
    Velocity, float32, of the latents' shape, and the cache of at most num_past + frames latent frames.
    """
    x = latents.transpose(0, 1).unsqueeze(0).to(model.dtype)
    num_frames, height, width = x.shape[2:]
    patch_t, patch_h, patch_w = model.config.patch_size
    tokens_per_frame = (height // patch_h) * (width // patch_w) // patch_t
    layers = _trim(kv, num_past * tokens_per_frame, len(model.blocks))
    past_frames = 0 if layers[0][0] is None else layers[0][0].shape[1] // tokens_per_frame
    cos, sin = model.rope(x.new_empty((1, 1, past_frames + num_frames, height, width)))

    hidden = model.patch_embedding(x).flatten(2).transpose(1, 2).contiguous()
    time = torch.tensor([timestep], device=x.device)
    temb, time_proj, context, _ = model.condition_embedder(time, context, None)
    time_proj = time_proj.unflatten(1, (6, -1))
    kept: list[tuple[Tensor, Tensor]] = []
    for block, (past_keys, past_values) in zip(model.blocks, layers, strict=True):
        window = AttentionWindow(past_keys, past_values, cos, sin, kept)
        hidden = block(hidden, context, time_proj, window)

    shift, scale = (model.scale_shift_table + temb.unsqueeze(1)).chunk(2, dim=1)
    hidden = (model.norm_out(hidden.float()) * (1 + scale) + shift).type_as(hidden)
    patches = model.proj_out(hidden).reshape(
        num_frames // patch_t, height // patch_h, width // patch_w, patch_t, patch_h, patch_w, -1
    )
    velocity = patches.permute(0, 3, 6, 1, 4, 2, 5).reshape(num_frames, -1, height, width).float()
    return velocity, {"keys": [keys for keys, _ in kept], "values": [values for _, values in kept]}


def _trim(
    kv: KvCache | None, num_tokens: int, num_layers: int
) -> list[tuple[Tensor, Tensor]] | list[tuple[None, None]]:
    if kv is None or num_tokens == 0:
        return [(None, None)] * num_layers
    return [
        (keys[:, -num_tokens:], values[:, -num_tokens:]) for keys, values in zip(kv["keys"], kv["values"], strict=True)
    ]


def decode(decoder: Decoder, latents: Tensor, cache: FeatureCache) -> tuple[Tensor, FeatureCache]:
    """Decode the next latent frames of the world.

    One decoder call a latent frame, as the causal VAE was trained: so any cut of a latent stream into calls gives
    the same bits.

    Parameters
    ----------
    latents
        float32 [n, channels, height, width], n at least 1.
    cache
        What the convolutions remember of the frames before; left as it is.

    Returns
    -------
    Frames, uint8 [4 n, height, width, 3], and the next cache.
    """
    vae = decoder.vae
    cache = list(cache)
    videos = []
    for latent in latents.split(1):
        z = (latent * decoder.std + decoder.mean).transpose(0, 1).unsqueeze(0).to(vae.dtype)
        videos.append(vae.decoder(vae.post_quant_conv(z), feat_cache=cache, feat_idx=[0])[0])
    video = torch.cat(videos, dim=1).clamp(-1.0, 1.0)
    frames = ((video + 1.0) * 127.5).round().to(torch.uint8)
    return frames.permute(1, 2, 3, 0).contiguous(), cache


def warm_up_dit(dit: Dit) -> None:
    """Run the steps of two batches on scratch values: kernels and memory are then ready, no state is touched."""
    config = dit.config
    actions = torch.zeros(config.frames_per_batch, NUM_KEYS)
    kv = dit.start_kv
    for _ in range(2):
        latents, _ = draw_noise(config, first_noise_state(config), dit.device)
        _, kv = denoise_step(dit, latents, 0, actions, kv)


def warm_up_decoder(decoder: Decoder) -> None:
    """Decode two latent frames on scratch values: the first ones after the start take other kernels than the rest."""
    latents, _ = draw_noise(decoder.config, first_noise_state(decoder.config), decoder.device)
    decode(decoder, latents[:2], decoder.start_cache)
