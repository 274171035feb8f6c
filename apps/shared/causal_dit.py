"""Wan's video transformer made causal from chunk to chunk, alone or in sequence parallel.

All functions that compute are pure: caches and generators are plain values that come in and go out.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from flashrt.apps.shared.settings import VideoSizes
from flashrt.apps.shared.weights import Source

KvCache = dict[str, list[Tensor]]
"""``{"keys": [layer], "values": [layer]}``, each [1, tokens, width]; keys are kept before rotation.

In sequence parallel each rank keeps its share of the heads: [1, tokens, width / degree].
"""


@dataclass(frozen=True)
class Ranks:
    """The processes that share one operation's tokens."""

    rank: int = 0
    degree: int = 1
    group: Any = None

    @classmethod
    def of(cls, context: Any, sizes: VideoSizes) -> Ranks:
        """Return who shares the tokens of a video model that is loaded for `context`.

        Where the degree divides neither heads nor tokens equally, nobody shares: every rank computes everything.
        """
        degree = getattr(context, "degree", 1)
        patch = sizes.transformer["patch_size"]
        tokens = (sizes.latent_height // patch[1]) * (sizes.latent_width // patch[2])
        if degree == 1 or tokens % degree or int(sizes.transformer["num_attention_heads"]) % degree:
            return cls()
        return cls(context.rank, degree, context.group)

    def share(self, tokens: Tensor) -> Tensor:
        """Return this rank's part of tokens [1, tokens, width]."""
        if self.degree == 1:
            return tokens
        return tokens.chunk(self.degree, dim=1)[self.rank].contiguous()

    def gather(self, tokens: Tensor) -> Tensor:
        """Return the tokens of all ranks, [1, tokens, width], from this rank's."""
        if self.degree == 1:
            return tokens
        parts = [torch.empty_like(tokens) for _ in range(self.degree)]
        torch.distributed.all_gather(parts, tokens.contiguous(), group=self.group)
        return torch.cat(parts, dim=1)

    def heads_for_tokens(self, x: Tensor) -> Tensor:
        """Turn all heads of this rank's tokens into this rank's heads of all tokens (Ulysses).

        Parameters
        ----------
        x
            [1, own tokens, width].

        Returns
        -------
        [1, all tokens, width / degree].
        """
        if self.degree == 1:
            return x
        parts = torch.stack(x.chunk(self.degree, dim=2)).contiguous()
        return torch.cat(list(self._exchange(parts)), dim=1)

    def tokens_for_heads(self, x: Tensor) -> Tensor:
        """Undo `heads_for_tokens`."""
        if self.degree == 1:
            return x
        parts = torch.stack(x.chunk(self.degree, dim=1)).contiguous()
        return torch.cat(list(self._exchange(parts)), dim=2)

    def _exchange(self, parts: Tensor) -> Tensor:
        received = torch.empty_like(parts)
        torch.distributed.all_to_all_single(received, parts, group=self.group)
        return received


ALONE = Ranks()


@dataclass(frozen=True)
class AttentionWindow:
    """What one layer's self-attention needs besides its tokens; travels in the place of `rotary_emb`."""

    past_keys: Tensor | None
    past_values: Tensor | None
    cos: Tensor
    sin: Tensor
    kept: list[tuple[Tensor, Tensor]]
    """Receives this layer's keys and values of the whole window."""
    ranks: Ranks


class CausalAttention:
    """Attention processor: the tokens of a chunk see each other and the cached window, never the future.

    Keys are cached unrotated and rotated at their place within the window: rotary scores depend on differences of
    positions only, so positions stay bounded however long the stream runs.
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
        ranks = window.ranks
        query = ranks.heads_for_tokens(attn.norm_q(attn.to_q(hidden_states)))
        keys = ranks.heads_for_tokens(attn.norm_k(attn.to_k(hidden_states)))
        values = ranks.heads_for_tokens(attn.to_v(hidden_states))
        if window.past_keys is not None:
            keys = torch.cat([window.past_keys, keys], dim=1)
            values = torch.cat([window.past_values, values], dim=1)
        window.kept.append((keys, values))
        heads = attn.heads // ranks.degree
        query, key, value = (x.unflatten(2, (heads, -1)) for x in (query, keys, values))
        num_tokens = query.shape[1]
        query = _rotate(query, window.cos[:, -num_tokens:], window.sin[:, -num_tokens:])
        key = _rotate(key, window.cos, window.sin)
        query, key, value = (x.transpose(1, 2) for x in (query, key, value))
        mixed = F.scaled_dot_product_attention(query, key, value).transpose(1, 2).flatten(2)
        return attn.to_out[0](ranks.tokens_for_heads(mixed))


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    even, odd = x.unflatten(-1, (-1, 2)).unbind(-1)
    cos, sin = cos[..., 0::2], sin[..., 1::2]
    return torch.stack((even * cos - odd * sin, even * sin + odd * cos), dim=-1).flatten(-2).type_as(x)


@dataclass(frozen=True)
class VideoDit:
    """A loaded transformer, and the attention cache of a video that has shown only its first image."""

    sizes: VideoSizes
    device: str
    transformer: Any
    start_kv: KvCache
    ranks: Ranks = ALONE

    @property
    def text_dim(self) -> int:
        """Width of a context token."""
        return int(self.transformer.config.text_dim)


def load_transformer(source: Source, sizes: VideoSizes, seed: int = 0) -> Any:
    """Load `WanTransformer3DModel` with causal attention.

    Raises
    ------
    InputError
        The checkpoint folder, or its part ``transformer/``, is not there.
    """
    from diffusers.models.transformers.transformer_wan import WanTransformer3DModel

    build = lambda: WanTransformer3DModel(**sizes.transformer)  # noqa: E731
    transformer = source.load("transformer", WanTransformer3DModel, build, seed)
    for block in transformer.blocks:
        block.attn1.set_processor(CausalAttention())
    return transformer


def show_first_image(transformer: Any, image: Tensor, context: Tensor, ranks: Ranks = ALONE) -> KvCache:
    """Return the cache of a video whose only past is `image`, float32 [1, channels, height, width]: clean, level 0."""
    _, kv = predict_velocity(transformer, image, 0.0, context, None, num_past=0, ranks=ranks)
    return kv


def first_noise_state(seed: int) -> Tensor:
    """Return the generator state, uint8 [bytes], from which the first batch draws its noise."""
    return torch.Generator().manual_seed(seed).get_state()


def draw_noise(sizes: VideoSizes, noise_state: Tensor, device: str, num_frames: int = 0) -> tuple[Tensor, Tensor]:
    """Return noise, float32 [frames, channels, height, width], and the next generator state.

    The generator is the CPU's on every device, so that a device change does not change the video.

    Parameters
    ----------
    num_frames
        Latent frames; 0: those of a batch.
    """
    generator = torch.Generator()
    generator.set_state(noise_state)
    shape = (num_frames or sizes.latent_frames, int(sizes.vae["z_dim"]), sizes.latent_height, sizes.latent_width)
    return torch.randn(shape, generator=generator).to(device), generator.get_state()


def noise_level(sizes: VideoSizes, level: float) -> float:
    """Return the share of noise before step `level` (after the last step: 0).

    Source: flow matching with a timestep shift, as in Wan's flow-match schedulers.
    """
    linear = 1.0 - level / sizes.num_steps
    return sizes.shift * linear / (1.0 + (sizes.shift - 1.0) * linear)


def denoise(
    dit: VideoDit, latents: Tensor, now: float, after: float, context: Tensor, kv: KvCache
) -> tuple[Tensor, KvCache]:
    """Take one Euler step of flow matching from noise share `now` to `after`.

    Parameters
    ----------
    latents
        float32 [frames, channels, height, width].
    context
        [1, tokens, text_dim].
    kv
        Attention cache of this step: keys and values as this very step saw the past.

    Returns
    -------
    The cleaner latents, and the cache with these frames in it.
    """
    num_past = dit.sizes.window_frames - latents.shape[0]
    velocity, kv = predict_velocity(dit.transformer, latents, 1000.0 * now, context, kv, num_past, ranks=dit.ranks)
    return latents + (after - now) * velocity, kv


def predict_velocity(
    model: Any, latents: Tensor, timestep: float, context: Tensor, kv: KvCache | None, num_past: int,
    ranks: Ranks = ALONE,
) -> tuple[Tensor, KvCache]:  # fmt: skip
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
    ranks
        Who shares the tokens; every rank returns the whole velocity.

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

    hidden = ranks.share(model.patch_embedding(x).flatten(2).transpose(1, 2).contiguous())
    time = torch.tensor([timestep], device=x.device)
    temb, time_proj, context, _ = model.condition_embedder(time, context, None)
    time_proj = time_proj.unflatten(1, (6, -1))
    kept: list[tuple[Tensor, Tensor]] = []
    for block, (past_keys, past_values) in zip(model.blocks, layers, strict=True):
        window = AttentionWindow(past_keys, past_values, cos, sin, kept, ranks)
        hidden = block(hidden, context, time_proj, window)

    shift, scale = (model.scale_shift_table + temb.unsqueeze(1)).chunk(2, dim=1)
    hidden = (model.norm_out(hidden.float()) * (1 + scale) + shift).type_as(hidden)
    patches = ranks.gather(model.proj_out(hidden)).reshape(
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


def stack_tokens(rows: Iterable[Tensor]) -> Tensor:
    """Return context [1, tokens, width] of rows [tokens, width]."""
    return torch.cat(list(rows)).unsqueeze(0)
