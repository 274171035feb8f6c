"""Wan's causal VAE as a stream: what its convolutions remember is a value that comes in and goes out."""

from __future__ import annotations

from collections.abc import Callable, Mapping, MutableMapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from flashrt.apps.shared.settings import FRAMES_PER_LATENT, VideoSizes
from flashrt.apps.shared.weights import Source, read_tensors
from flashrt.errors import input_error

FeatureCache = list[Any]
"""What the causal convolutions remember: a tensor, None or the marker ``"Rep"`` for each."""


@dataclass(frozen=True)
class Decoder:
    """The loaded decoder and its feature cache after the first image."""

    device: str
    vae: Any
    mean: Tensor
    std: Tensor
    start_cache: FeatureCache


@dataclass(frozen=True)
class Encoder:
    """The loaded encoder and its feature cache after the first image."""

    device: str
    vae: Any
    mean: Tensor
    std: Tensor
    start_cache: FeatureCache


def load_decoder(source: Source, sizes: VideoSizes, start: Tensor, seed: int = 3) -> Decoder:
    """Load the VAE's decoder half and let it decode the first image (that frame belongs to the start-up).

    Parameters
    ----------
    start
        Latent of the first image, float32 [1, channels, height, width].

    Raises
    ------
    InputError
        The checkpoint folder, or its part ``vae/``, is not there.
    """
    vae = load_vae(source, sizes, seed)
    vae.encoder = vae.quant_conv = None
    mean, std = latent_statistics(vae, source.device)
    blank = Decoder(source.device, vae, mean, std, [None] * vae._cached_conv_counts["decoder"])
    _, start_cache = decode(blank, start.to(source.device), blank.start_cache)
    return Decoder(source.device, vae, mean, std, start_cache)


def load_encoder(source: Source, sizes: VideoSizes, image: Tensor, seed: int = 3) -> Encoder:
    """Load the VAE's encoder half and let it read the first image, uint8 [height, width, 3]."""
    vae = load_vae(source, sizes, seed)
    vae.decoder = vae.post_quant_conv = None
    mean, std = latent_statistics(vae, source.device)
    cache: FeatureCache = [None] * vae._cached_conv_counts["encoder"]
    vae.encoder(_video(vae, image[None].to(source.device)), feat_cache=cache, feat_idx=[0])
    return Encoder(source.device, vae, mean, std, cache)


def load_vae(source: Source, sizes: VideoSizes, seed: int = 3) -> Any:
    """Load the whole `AutoencoderKLWan`; it computes in float32."""
    from diffusers.models.autoencoders.autoencoder_kl_wan import AutoencoderKLWan

    build = lambda: AutoencoderKLWan(**sizes.vae)  # noqa: E731
    return source.load("vae", AutoencoderKLWan, build, seed, keep_float32=True)


def latent_statistics(vae: Any, device: str) -> tuple[Tensor, Tensor]:
    """Return mean and deviation of the latents, each [1, channels, 1, 1]."""
    shape = (1, vae.config.z_dim, 1, 1)
    mean, std = torch.tensor(vae.config.latents_mean), torch.tensor(vae.config.latents_std)
    return mean.view(shape).to(device), std.view(shape).to(device)


def encode_image(vae: Any, image: Tensor) -> Tensor:
    """Encode one image, uint8 [height, width, 3], to a latent, float32 [1, channels, height, width]."""
    mean, std = latent_statistics(vae, str(image.device))
    latent = vae.encode(_video(vae, image[None])).latent_dist.mode()[0].transpose(0, 1).float()
    return (latent - mean) / std


def start_latent(source: Source, sizes: VideoSizes, file: Any = None, seed: int = 2) -> Tensor:
    """Return the latent of the first image, float32 [1, channels, height, width]: from a file, or a seeded one.

    Parameters
    ----------
    file
        Safetensors file with a tensor ``latent``; None: the checkpoint's ``start_latent.safetensors``.
    """
    channels = int(sizes.vae["z_dim"])
    shape = (1, channels, sizes.latent_height, sizes.latent_width)
    folder = source.part("start_latent.safetensors") if file is None else None
    path = folder / "start_latent.safetensors" if folder is not None else file
    if path is not None:
        latent = read_tensors(path).get("latent", torch.empty(0))
        if tuple(latent.shape) != shape:
            raise input_error(
                f"start latent '{path}'",
                f"a tensor 'latent' of shape {list(shape)}",
                f"shape {list(latent.shape)}",
                "encode the first image at this configuration's size with streaming_vae.encode_image",
            )
        return latent.float()
    generator = torch.Generator().manual_seed(source.config.seed + seed)
    coarse = torch.randn((1, channels, 3, 3), generator=generator)
    return F.interpolate(coarse, shape[2:], mode="bilinear", align_corners=True)


def decode(decoder: Decoder, latents: Tensor, cache: FeatureCache) -> tuple[Tensor, FeatureCache]:
    """Decode the next latent frames.

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
    return to_frames(torch.cat(videos, dim=1)), cache


def encode(encoder: Encoder, frames: Tensor, cache: FeatureCache) -> tuple[Tensor, FeatureCache]:
    """Encode the next frames: four become one latent frame, each in one encoder call.

    Parameters
    ----------
    frames
        uint8 [4 n, height, width, 3].
    cache
        What the convolutions remember of the frames before; left as it is.

    Returns
    -------
    Latents, float32 [n, channels, height / 8, width / 8], and the next cache.
    """
    vae = encoder.vae
    cache = list(cache)
    latents = []
    for four in frames.split(FRAMES_PER_LATENT):
        moments = vae.quant_conv(vae.encoder(_video(vae, four), feat_cache=cache, feat_idx=[0]))
        latents.append(moments[0].chunk(2, dim=0)[0].transpose(0, 1).float())
    return (torch.cat(latents) - encoder.mean) / encoder.std, cache


def to_frames(video: Tensor) -> Tensor:
    """Turn video [3, frames, height, width] within ±1 into frames, uint8 [frames, height, width, 3]."""
    frames = ((video.clamp(-1.0, 1.0) + 1.0) * 127.5).round().to(torch.uint8)
    return frames.permute(1, 2, 3, 0).contiguous()


def _video(vae: Any, frames: Tensor) -> Tensor:
    return (frames.permute(3, 0, 1, 2)[None].float() / 127.5 - 1.0).to(vae.dtype)


def make_decode(
    decoder: Decoder, sizes: VideoSizes, *, output: str = "frames", remembered: str = "vae.cache"
) -> Callable[[Mapping[str, Any], MutableMapping[str, Any]], Mapping[str, Any]]:
    """Return the op that decodes any number of latent frames, warmed up: `latents` -> `output`.

    Parameters
    ----------
    remembered
        The state that the convolutions' memory is kept in.
    """

    def decode_latents(inputs: Mapping[str, Any], state: MutableMapping[str, Any]) -> Mapping[str, Any]:
        cache = state[remembered]
        frames, state[remembered] = decode(
            decoder, inputs["latents"].to(decoder.device), decoder.start_cache if cache is None else cache
        )
        return {output: frames}

    latents = torch.zeros((2, int(sizes.vae["z_dim"]), sizes.latent_height, sizes.latent_width))
    decode_latents({"latents": latents}, {remembered: None})
    return decode_latents
