"""Restyling a stream, cutting a person out of it, and putting both together. All functions are pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from editor_config import EditorConfig  # type: ignore[import-not-found]
from torch import Tensor, nn

from flashrt.apps.shared import causal_dit, streaming_vae
from flashrt.apps.shared.causal_dit import ALONE, KvCache, Ranks, VideoDit
from flashrt.apps.shared.streaming_vae import Decoder, Encoder, FeatureCache
from flashrt.apps.shared.weights import Source


class Style(nn.Module):
    """What the background becomes: context tokens that stand for a text."""

    def __init__(self, num_tokens: int, text_dim: int) -> None:
        super().__init__()
        self.position = nn.Parameter(torch.zeros(num_tokens, text_dim))

    def forward(self) -> Tensor:
        """Return the tokens, [1, tokens, text_dim]."""
        return self.position[None]


@dataclass(frozen=True)
class StyledDit(VideoDit):
    """The loaded transformer with the style that it draws in."""

    style: Any = None


@dataclass(frozen=True)
class Segmenter:
    """The loaded SAM 3 and what it looks for."""

    device: str
    model: Any
    text: Any
    mask: Tensor
    threshold: float


def source_of(config: EditorConfig, device: str) -> Source:
    """Return where the parts come from."""
    return Source("background_editor", config, device)


def blank_image(config: EditorConfig) -> Tensor:
    """Return the image before the first frame, uint8 [height, width, 3]: grey."""
    scale = config.video.pixel_scale
    shape = (config.video.latent_height * scale, config.video.latent_width * scale, 3)
    return torch.full(shape, 127, dtype=torch.uint8)


def load_encoder(config: EditorConfig, device: str) -> Encoder:
    """Load the VAE's encoder and let it read a grey image."""
    return streaming_vae.load_encoder(source_of(config, device), config.video, blank_image(config))


def first_noise_state(config: EditorConfig) -> Tensor:
    """Return the generator state from which the first batch draws its noise."""
    return causal_dit.first_noise_state(config.seed + 4)


def encode(
    encoder: Encoder, config: EditorConfig, frames: Any, cache: FeatureCache, noise_state: Tensor
) -> tuple[dict[str, Any], FeatureCache, Tensor]:
    """Return the webcam's latents under as much noise as the first step takes away.

    Parameters
    ----------
    frames
        uint8 [frames, height, width, 3].
    """
    clean, cache = streaming_vae.encode(encoder, torch.as_tensor(frames).to(encoder.device), cache)
    noise, noise_state = causal_dit.draw_noise(config.video, noise_state, encoder.device)
    share = causal_dit.noise_level(config.video, config.first_level)
    return {"latents": (1.0 - share) * clean + share * noise, "level": config.first_level}, cache, noise_state


def load_dit(config: EditorConfig, device: str, ranks: Ranks = ALONE) -> StyledDit:
    """Load the video transformer and the style, and show it an empty image."""
    source = source_of(config, device)
    transformer = causal_dit.load_transformer(source, config.video)
    build = lambda: Style(config.style_tokens, transformer.config.text_dim)  # noqa: E731
    style = source.load_layers("style.safetensors", build, 1, loudness=2.0)
    sizes = config.video
    shape = (1, int(sizes.vae["z_dim"]), sizes.latent_height, sizes.latent_width)
    start_kv = causal_dit.show_first_image(transformer, torch.zeros(shape, device=device), style(), ranks)
    return StyledDit(sizes, device, transformer, start_kv, ranks, style)


def denoise_step(dit: StyledDit, sample: dict[str, Any], kv: KvCache) -> tuple[dict[str, Any], KvCache]:
    """Take one Euler step of flow matching on a batch's latent frames."""
    level = int(sample["level"])
    now, after = causal_dit.noise_level(dit.sizes, level), causal_dit.noise_level(dit.sizes, level + 1)
    latents, kv = causal_dit.denoise(dit, sample["latents"].to(dit.device), now, after, dit.style(), kv)
    return {"latents": latents, "level": level + 1}, kv


def load_decoder(config: EditorConfig, device: str) -> Decoder:
    """Load the VAE's decoder and let it decode an empty image."""
    sizes = config.video
    shape = (1, int(sizes.vae["z_dim"]), sizes.latent_height, sizes.latent_width)
    return streaming_vae.load_decoder(source_of(config, device), sizes, torch.zeros(shape))


def load_segmenter(config: EditorConfig, device: str) -> Segmenter:
    """Load `Sam3Model`, and let it read what to look for."""
    from transformers import Sam3Config, Sam3Model

    build = lambda: Sam3Model(Sam3Config(**config.segmenter))  # noqa: E731
    model = source_of(config, device).load("segmenter", Sam3Model, build, 40)
    tokens = torch.tensor([config.prompt], device=device)
    mask = torch.ones_like(tokens)
    text = model.get_text_features(input_ids=tokens, attention_mask=mask, return_dict=True)
    return Segmenter(device, model, text, mask, config.threshold)


def segment(segmenter: Segmenter, frames: Any) -> Tensor:
    """Return where the person is, bool [frames, height, width]; one call a frame.

    Parameters
    ----------
    frames
        uint8 [frames, height, width, 3].
    """
    model = segmenter.model
    side = int(model.config.vision_config.backbone_config.image_size)
    frames = torch.as_tensor(frames).to(segmenter.device)
    masks = []
    for frame in frames:
        pixels = (frame.permute(2, 0, 1)[None].float() / 127.5 - 1.0).to(model.dtype)
        seen = F.interpolate(pixels, (side, side), mode="bilinear", align_corners=False)
        found = model(pixel_values=seen, text_embeds=segmenter.text, attention_mask=segmenter.mask).semantic_seg
        logits = F.interpolate(found.float(), tuple(frame.shape[:2]), mode="bilinear", align_corners=False)
        masks.append(logits[0, 0] > segmenter.threshold)
    return torch.stack(masks)


def composite(frames: Any, restyled: Tensor, masks: Tensor) -> Tensor:
    """Return the restyled frames with the camera's own pixels where the person is, uint8 [frames, height, width, 3]."""
    return torch.where(masks[..., None], torch.as_tensor(frames).to(restyled.device), restyled)
