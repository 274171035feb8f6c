"""Codec frames in, samples out: Qwen3-Omni's code2wav as a stream.

The library decodes whole utterances; cut into chunks it loses samples at each cut. Here every layer remembers what it
needs of the past: attention its window of keys and values, convolutions their last inputs. One call a frame, so that
any cut of a stream of codes into calls gives the same bits.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from flashrt.apps.shared.weights import Source

SAMPLE_RATE_HZ = 24_000

Memory = dict[str, Any]
"""``{"position": frames so far, "keys": [layer], "values": [layer], "past": {layer name: last inputs}}``."""


@dataclass(frozen=True)
class Vocoder:
    """The loaded code2wav, and its memory after one frame of silence."""

    device: str
    model: Any
    start: Memory

    @property
    def samples_per_frame(self) -> int:
        """Samples that a codec frame becomes."""
        return int(self.model.total_upsample)


def load_vocoder(source: Source, sizes: Mapping[str, Any], seed: int = 30) -> Vocoder:
    """Load `Qwen3OmniMoeCode2Wav` and let it decode a frame of silence, so that every later frame is whole.

    Raises
    ------
    InputError
        The checkpoint folder, or its part ``code2wav/``, is not there.
    """
    from transformers.models.qwen3_omni_moe.configuration_qwen3_omni_moe import Qwen3OmniMoeCode2WavConfig
    from transformers.models.qwen3_omni_moe.modeling_qwen3_omni_moe import Qwen3OmniMoeCode2Wav

    build = lambda: Qwen3OmniMoeCode2Wav(Qwen3OmniMoeCode2WavConfig(**sizes))  # noqa: E731
    model = source.load("code2wav", Qwen3OmniMoeCode2Wav, build, seed)
    blank: Memory = {"position": 0, "keys": [], "values": [], "past": {}}
    silence = torch.zeros((1, model.config.num_quantizers), dtype=torch.long)
    _, start = vocode(Vocoder(source.device, model, blank), silence, blank)
    return Vocoder(source.device, model, start)


def vocode(vocoder: Vocoder, codes: Tensor, memory: Memory) -> tuple[Tensor, Memory]:
    """Decode the next frames.

    Parameters
    ----------
    codes
        int64 [frames, groups].
    memory
        What the layers remember; left as it is.

    Returns
    -------
    Samples at 24 kHz, float32 [frames * samples_per_frame] within ±1, and the next memory.
    """
    parts = []
    for frame in codes.to(vocoder.device):
        samples, memory = _decode_frame(vocoder.model, frame, memory)
        parts.append(samples)
    return torch.cat(parts), memory


def _decode_frame(model: Any, codes: Tensor, memory: Memory) -> tuple[Tensor, Memory]:
    past = dict(memory["past"])
    hidden = model.code_embedding(codes[None, :, None] + model.code_offset).mean(1)
    hidden, keys, values = _attend(model.pre_transformer, hidden, memory)
    wave = hidden.permute(0, 2, 1)
    for name, layer in _layers(model):
        wave = _run(layer, wave, name, past)
    samples = wave.clamp(min=-1, max=1)[0, 0].float()
    return samples, {"position": memory["position"] + 1, "keys": keys, "values": values, "past": past}


def _attend(transformer: Any, hidden: Tensor, memory: Memory) -> tuple[Tensor, list[Tensor], list[Tensor]]:
    """Run the transformer on one frame: it sees itself and the frames of its window before."""
    from transformers.models.qwen3_omni_moe.modeling_qwen3_omni_moe import apply_rotary_pos_emb

    position = torch.tensor([[memory["position"]]], device=hidden.device)
    cos, sin = transformer.rotary_emb(hidden, position)
    kept_keys, kept_values = [], []
    for index, layer in enumerate(transformer.layers):
        attention = layer.self_attn
        x = layer.input_layernorm(hidden)
        shape = (1, 1, -1, attention.head_dim)
        query = attention.q_norm(attention.q_proj(x).view(shape)).transpose(1, 2)
        key = attention.k_norm(attention.k_proj(x).view(shape)).transpose(1, 2)
        value = attention.v_proj(x).view(shape).transpose(1, 2)
        query, key = apply_rotary_pos_emb(query, key, cos, sin)
        if memory["keys"]:
            key = torch.cat([memory["keys"][index], key], dim=2)
            value = torch.cat([memory["values"][index], value], dim=2)
        window = int(transformer.window_size)
        key, value = key[:, :, -window:], value[:, :, -window:]
        kept_keys.append(key)
        kept_values.append(value)
        groups = query.shape[1] // key.shape[1]
        mixed = F.scaled_dot_product_attention(
            query, key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
        )
        mixed = attention.o_proj(mixed.transpose(1, 2).flatten(2))
        hidden = hidden + layer.self_attn_layer_scale(mixed)
        hidden = hidden + layer.mlp_layer_scale(layer.mlp(layer.post_attention_layernorm(hidden)))
    return transformer.norm(hidden), kept_keys, kept_values


def _layers(model: Any) -> Iterator[tuple[str, Any]]:
    for index, blocks in enumerate(model.upsample):
        yield from ((f"upsample.{index}.{place}", block) for place, block in enumerate(blocks))
    yield from ((f"decoder.{index}", layer) for index, layer in enumerate(model.decoder))


def _run(layer: Any, x: Tensor, name: str, past: dict[str, Tensor]) -> Tensor:
    """Run a layer on what follows what it has seen; `past` takes note of its last inputs."""
    kind = type(layer).__name__
    if kind.endswith("CausalConvNet"):
        return _convolve(layer, x, name, past)
    if kind.endswith("CausalTransConvNet"):
        return _expand(layer, x, name, past)
    if kind.endswith("ConvNeXtBlock"):
        y = _convolve(layer.dwconv, x, f"{name}.dwconv", past).permute(0, 2, 1)
        y = layer.gamma * layer.pwconv2(layer.act(layer.pwconv1(layer.norm(y))))
        return x + y.permute(0, 2, 1)
    if kind.endswith("DecoderBlock"):
        for index, inner in enumerate(layer.block):
            x = _run(inner, x, f"{name}.{index}", past)
        return x
    if kind.endswith("ResidualUnit"):
        y = _convolve(layer.conv1, layer.act1(x), f"{name}.conv1", past)
        return x + _convolve(layer.conv2, layer.act2(y), f"{name}.conv2", past)
    return layer(x)


def _convolve(layer: Any, x: Tensor, name: str, past: dict[str, Tensor]) -> Tensor:
    width = int(layer.padding)
    before = past.get(name)
    x = torch.cat([x.new_zeros((1, x.shape[1], width)) if before is None else before, x], dim=2)
    if width:
        past[name] = x[:, :, -width:]
    return layer.conv(x)


def _expand(layer: Any, x: Tensor, name: str, past: dict[str, Tensor]) -> Tensor:
    """Run a transposed convolution: where kernels overlap, an output is known once the next input is."""
    if not layer.left_pad:
        return layer(x)
    before = past.get(name)
    x = x if before is None else torch.cat([before, x], dim=2)
    past[name] = x[:, :, -1:]
    return layer(x)
