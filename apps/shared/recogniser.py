"""Speech in, tokens out: Qwen3-ASR, one utterance a call."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from flashrt.apps.shared.weights import Source

SAMPLE_RATE_HZ = 16_000
FFT_SAMPLES = 400
HOP_SAMPLES = 160
LOUDER = {"audio_tower.conv": 4.0, "audio_tower.proj": 3.0, "multi_modal_projector": 3.0}
"""Random weights alone: sound has to be heard beside the encoder's position table."""


@dataclass(frozen=True)
class Recogniser:
    """The loaded model, and the filters that turn samples into its features."""

    device: str
    model: Any
    filters: Tensor
    """Mel filters, float32 [bins, frequencies]."""
    num_tokens: int
    """Tokens of a transcript."""

    @property
    def window_samples(self) -> int:
        """The encoder works in windows of so many samples; an utterance is padded to a multiple."""
        return int(self.model.config.audio_config.n_window) * 2 * HOP_SAMPLES


def load_recogniser(source: Source, sizes: Mapping[str, Any], num_tokens: int, seed: int = 10) -> Recogniser:
    """Load `Qwen3ASRForConditionalGeneration`.

    Parameters
    ----------
    sizes
        ``{"audio_config": …, "text_config": …, "audio_token_id": …}``: arguments of `Qwen3ASRConfig`.
    num_tokens
        How many tokens a transcript has: each utterance gets as many, so that shapes do not vary.

    Raises
    ------
    InputError
        The checkpoint folder, or its part ``asr/``, is not there.
    """
    from transformers import Qwen3ASRConfig, Qwen3ASRForConditionalGeneration

    build = lambda: Qwen3ASRForConditionalGeneration(Qwen3ASRConfig(**sizes))  # noqa: E731
    model = source.load("asr", Qwen3ASRForConditionalGeneration, build, seed, louder=LOUDER)
    filters = mel_filters(int(model.config.audio_config.num_mel_bins))
    return Recogniser(source.device, model, filters.to(source.device), num_tokens)


def mel_filters(num_bins: int) -> Tensor:
    """Return triangular filters on the Slaney mel scale, float32 [bins, FFT_SAMPLES / 2 + 1], each of area one."""
    frequencies = torch.linspace(0, SAMPLE_RATE_HZ / 2, FFT_SAMPLES // 2 + 1)
    edges = torch.tensor([_mel_to_hz(mel) for mel in torch.linspace(0, _hz_to_mel(8000.0), num_bins + 2).tolist()])
    slopes = edges[:, None] - frequencies[None]
    rising = -slopes[:-2] / (edges[1:-1] - edges[:-2])[:, None]
    falling = slopes[2:] / (edges[2:] - edges[1:-1])[:, None]
    return torch.minimum(rising, falling).clamp_min(0) * (2.0 / (edges[2:] - edges[:-2]))[:, None]


def _hz_to_mel(hz: float) -> float:
    return hz * 3 / 200 if hz < 1000 else 15 + math.log(hz / 1000) * 27 / math.log(6.4)


def _mel_to_hz(mel: float) -> float:
    return mel * 200 / 3 if mel < 15 else 1000 * math.exp((mel - 15) * math.log(6.4) / 27)


def log_mel(samples: Tensor, filters: Tensor) -> Tensor:
    """Return log-mel features of samples at 16 kHz: float32 [samples] -> [bins, samples / 160].

    Source: Whisper's features, which Qwen3-ASR takes too.
    """
    window = torch.hann_window(FFT_SAMPLES, device=samples.device)
    spectrum = torch.stft(samples, FFT_SAMPLES, HOP_SAMPLES, window=window, return_complex=True)[..., :-1].abs() ** 2
    logarithm = (filters @ spectrum).clamp_min(1e-10).log10()
    return (torch.maximum(logarithm, logarithm.max() - 8.0) + 4.0) / 4.0


def transcribe(recogniser: Recogniser, samples: Any) -> Tensor:
    """Return the tokens of an utterance, int64 [num_tokens], greedily.

    Parameters
    ----------
    samples
        float32 [samples] at 16 kHz; padded with silence to whole windows of the encoder.
    """
    from transformers import DynamicCache

    model = recogniser.model
    samples = samples if isinstance(samples, Tensor) else torch.tensor(samples)
    samples = samples.to(recogniser.device, torch.float32)
    samples = torch.nn.functional.pad(samples, (0, -samples.shape[0] % recogniser.window_samples))
    features = log_mel(samples, recogniser.filters)[None]
    mask = torch.ones((1, features.shape[2]), dtype=torch.long, device=recogniser.device)
    heard = model.model.get_audio_features(features.to(model.dtype), mask, return_dict=True).pooler_output
    cache = DynamicCache(config=model.config.text_config)
    hidden = model.model.language_model(inputs_embeds=heard[None], past_key_values=cache).last_hidden_state
    tokens = [int(model.lm_head(hidden[0, -1]).argmax())]
    while len(tokens) < recogniser.num_tokens:
        last = torch.tensor([tokens[-1:]], device=recogniser.device)
        hidden = model.model.language_model(input_ids=last, past_key_values=cache).last_hidden_state
        tokens.append(int(model.lm_head(hidden[0, -1]).argmax()))
    return torch.tensor(tokens)
