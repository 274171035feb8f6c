"""Loading the world model: from a local checkpoint folder, or with random weights drawn from the seed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from worldplay_config import NUM_KEYS, WorldConfig  # type: ignore[import-not-found]
from worldplay_model import (  # type: ignore[import-not-found]
    ActionEmbedding,
    CausalAttention,
    Decoder,
    Dit,
    decode,
    predict_velocity,
)

from flashrt.errors import Finding, InputError, input_error


def torch_device(name: str) -> str:
    """Return torch's name of a FlashRT device: ROCm devices are `cuda` to torch, all others compute on the CPU."""
    kind, _, index = name.partition(":")
    return f"cuda:{index or 0}" if kind in ("cuda", "rocm") else "cpu"


def prepare_device(config: WorldConfig, device: str) -> None:
    """Fix what changes bits and is global to the process: the number of threads, and deterministic kernels."""
    if device == "cpu":
        torch.set_num_threads(config.threads)
    else:
        torch.backends.cudnn.benchmark = False


def load_dit(config: WorldConfig, device: str) -> Dit:
    """Load the transformer and the action embedding, and show them the first image.

    Raises
    ------
    InputError
        The checkpoint folder, or a part of it, is not there.
    """
    from diffusers.models.transformers.transformer_wan import WanTransformer3DModel

    folder = _checkpoint(config, "transformer", "action_embedding.safetensors")
    dtype = getattr(torch, config.dtype)
    with _untouched_global_random():
        if folder is not None:
            transformer = WanTransformer3DModel.from_pretrained(
                folder / "transformer", torch_dtype=dtype, local_files_only=True
            )
        else:
            transformer = WanTransformer3DModel(**config.transformer)
            _draw_weights(transformer, config, seed=config.seed)
            if dtype != torch.float32:
                transformer.to(dtype)
        embedding = ActionEmbedding(config.frames_per_batch, transformer.config.text_dim)
        if folder is not None:
            embedding.load_state_dict(_read_tensors(folder / "action_embedding.safetensors"))
        else:
            # Louder than the rest: a key must be heard through noise, as it is in a trained model.
            _draw_weights(embedding, config, seed=config.seed + 1, loudness=8.0)
    for block in transformer.blocks:
        block.attn1.set_processor(CausalAttention())
    transformer.eval().requires_grad_(False).to(device)
    embedding.eval().requires_grad_(False).to(device, dtype)
    # The first image is clean context for every step, so it is read at noise level 0, with no key held.
    context = embedding(torch.zeros(1, NUM_KEYS, device=device))
    _, start_kv = predict_velocity(transformer, start_latent(config).to(device), 0.0, context, None, num_past=0)
    return Dit(config, device, transformer, embedding, start_kv)


def load_decoder(config: WorldConfig, device: str) -> Decoder:
    """Load the VAE's decoder half and let it decode the first image (that frame belongs to the start-up).

    Raises
    ------
    InputError
        The checkpoint folder, or a part of it, is not there.
    """
    vae = _load_vae(config).to(device)
    vae.encoder = vae.quant_conv = None
    mean, std = _latent_statistics(vae, device)
    num_caches = vae._cached_conv_counts["decoder"]
    blank = Decoder(config, device, vae, mean, std, start_cache=[None] * num_caches)
    _, start_cache = decode(blank, start_latent(config).to(device), blank.start_cache)
    return Decoder(config, device, vae, mean, std, start_cache)


def encode_start(config: WorldConfig, image: Tensor) -> Tensor:
    """Encode a first image, uint8 [height, width, 3], to a start latent, float32 [1, channels, height, width].

    Save it with safetensors under the name ``latent`` and name the file in the configuration (`start_latent`).
    """
    vae = _load_vae(config)
    pixels = (image.permute(2, 0, 1)[None, :, None].float() / 127.5 - 1.0).to(vae.dtype)
    mean, std = _latent_statistics(vae, "cpu")
    latent = vae.encode(pixels).latent_dist.mode()[0].transpose(0, 1).float()
    return (latent - mean) / std


def start_latent(config: WorldConfig) -> Tensor:
    """Return the latent of the first image, float32 [1, channels, height, width]: from a file, or a seeded one."""
    channels = int(config.vae["z_dim"])
    shape = (1, channels, config.latent_height, config.latent_width)
    folder = _checkpoint(config, "start_latent.safetensors") if config.start_latent is None else None
    path = folder / "start_latent.safetensors" if folder is not None else config.start_latent
    if path is not None:
        latent = _read_tensors(path).get("latent", torch.empty(0))
        if tuple(latent.shape) != shape:
            raise input_error(
                f"start latent '{path}'",
                f"a tensor 'latent' of shape {list(shape)}",
                f"shape {list(latent.shape)}",
                "encode the first image at this configuration's size with worldplay_weights.encode_start",
            )
        return latent.float()
    generator = torch.Generator().manual_seed(config.seed + 2)
    coarse = torch.randn((1, channels, 3, 3), generator=generator)
    return F.interpolate(coarse, shape[2:], mode="bilinear", align_corners=True)


def _load_vae(config: WorldConfig) -> Any:
    from diffusers.models.autoencoders.autoencoder_kl_wan import AutoencoderKLWan

    folder = _checkpoint(config, "vae")
    with _untouched_global_random():
        if folder is not None:
            vae = AutoencoderKLWan.from_pretrained(folder / "vae", local_files_only=True)
        else:
            vae = AutoencoderKLWan(**config.vae)
            _draw_weights(vae, config, seed=config.seed + 3)
    return vae.eval().requires_grad_(False)


def _latent_statistics(vae: Any, device: str) -> tuple[Tensor, Tensor]:
    shape = (1, vae.config.z_dim, 1, 1)
    mean, std = torch.tensor(vae.config.latents_mean), torch.tensor(vae.config.latents_std)
    return mean.view(shape).to(device), std.view(shape).to(device)


def _checkpoint(config: WorldConfig, *parts: str) -> Path | None:
    folder = config.checkpoint_dir
    if folder is None:
        return None
    missing = [folder] if not folder.is_dir() else [folder / part for part in parts if not (folder / part).exists()]
    if missing:
        raise InputError(
            Finding(
                f"worldplay configuration '{config.name}', key 'checkpoint_dir'",
                "a local folder with transformer/, vae/, action_embedding.safetensors, start_latent.safetensors",
                f"no '{path}'",
                "put the trained parts there, name another folder in the option 'checkpoint_dir', "
                'or use the option {"config": "tiny"} for seeded weights; nothing is downloaded',
                rule="missing-checkpoint",
            )
            for path in missing
        )
    return folder


def _read_tensors(path: Path) -> dict[str, Tensor]:
    from safetensors.torch import load_file

    return load_file(path)


def _draw_weights(module: nn.Module, config: WorldConfig, seed: int, loudness: float = 1.0) -> None:
    # The libraries' own initialisation leaves gates and outputs near zero: a dead model would equal any other.
    generator = torch.Generator().manual_seed(seed)
    gain = (config.gain or 1.0) * loudness
    for child in module.modules():
        if isinstance(child, nn.Linear | nn.Conv2d | nn.Conv3d):
            fan_in = child.weight[0].numel()
            nn.init.normal_(child.weight, std=gain / fan_in**0.5, generator=generator)
            if child.bias is not None:
                nn.init.zeros_(child.bias)
    for name, parameter in module.named_parameters():
        if name.endswith(("scale_shift_table", "position")):
            nn.init.normal_(parameter, std=gain, generator=generator)


@contextmanager
def _untouched_global_random() -> Iterator[None]:
    # Constructors of modules draw from torch's global generator; the caller's stream must not notice.
    with torch.random.fork_rng(devices=[]):
        yield
