"""The parts of the conversation that are its own: the language model's turn, and a face that listens to sound.

All functions are pure: what outlives a call (the dialogue, generators, caches) comes in and goes out as plain values.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from conversation_config import CODEC_FRAMES_PER_LATENT, ConversationConfig  # type: ignore[import-not-found]
from torch import Tensor, nn

from flashrt.apps.shared import causal_dit, streaming_vae, talker
from flashrt.apps.shared.causal_dit import ALONE, KvCache, Ranks, VideoDit
from flashrt.apps.shared.streaming_vae import Decoder
from flashrt.apps.shared.talker import Talker, TextEmbedding
from flashrt.apps.shared.weights import Source

Sample = dict[str, Tensor]
"""``{"latents": float32 [n, channels, height, width], "sound": float32 [n, tokens, text_dim], "level": int64 [n]}``."""

SOUND_KERNEL, SOUND_STRIDE = 480, 240
"""Samples at 24 kHz that one sound token sees, and from one to the next: 20 and 10 ms."""


class SoundEmbedding(nn.Module):
    """Turn 160 ms of sound into context tokens of the video transformer, one each 10 ms."""

    def __init__(self, text_dim: int) -> None:
        super().__init__()
        self.filters = nn.Conv1d(1, text_dim, SOUND_KERNEL, SOUND_STRIDE, padding=SOUND_STRIDE // 2)
        self.project = nn.Linear(text_dim, text_dim)

    def forward(self, samples: Tensor) -> Tensor:
        """Map samples [samples] to tokens [samples / 240, text_dim]."""
        hidden = self.filters(samples.to(self.filters.weight.dtype)[None, None])[0].T
        return self.project(F.silu(hidden))


@dataclass(frozen=True)
class Voice:
    """The talker with a text table of its own."""

    talker: Talker
    text: Any
    special: Tensor
    """Embeddings of "speech begins", "speech ends", "no more text", [1, 3, text width]."""


def source_of(config: ConversationConfig, device: str) -> Source:
    """Return where the parts come from."""
    return Source("conversation", config, device)


def load_llm(config: ConversationConfig, device: str) -> Any:
    """Load `Qwen3ForCausalLM`."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    build = lambda: Qwen3ForCausalLM(Qwen3Config(**config.llm))  # noqa: E731
    return source_of(config, device).load("llm", Qwen3ForCausalLM, build, 11)


def respond(llm: Any, config: ConversationConfig, heard: Tensor, dialogue: Tensor | None) -> tuple[Tensor, Tensor]:
    """Answer what was said.

    Parameters
    ----------
    heard
        int64 [heard_tokens].
    dialogue
        The last tokens of both sides, int64 [at most memory_tokens]; None: none yet.

    Returns
    -------
    The answer, int64 [reply_tokens], and the dialogue with this turn in it.
    """
    from transformers import DynamicCache

    so_far = heard if dialogue is None else torch.cat([dialogue, heard])
    cache = DynamicCache(config=llm.config)
    tokens: list[int] = []
    given = so_far[None].to(llm.device)
    while len(tokens) < config.reply_tokens:
        logits = llm(input_ids=given, past_key_values=cache, logits_to_keep=1).logits
        tokens.append(int(logits[0, -1].argmax()))
        given = torch.tensor([tokens[-1:]], device=llm.device)
    reply = torch.tensor(tokens)
    return reply, torch.cat([so_far, reply])[-config.memory_tokens :]


def load_voice(config: ConversationConfig, device: str) -> Voice:
    """Load the talker, and the table of text tokens that it speaks from."""
    source = source_of(config, device)
    source.part("talker", "text_embedding.safetensors")
    build = lambda: TextEmbedding(int(config.llm["vocab_size"]), int(config.talker["thinker_hidden_size"]))  # noqa: E731
    text = source.load_layers("text_embedding.safetensors", build, 22)
    # The last three tokens of the vocabulary stand for "speech begins", "speech ends", "no more text".
    special = text(torch.arange(int(config.llm["vocab_size"]) - 3, int(config.llm["vocab_size"]), device=device))
    return Voice(talker.load_talker(source, config.talker), text, special)


def first_voice_state(config: ConversationConfig) -> Tensor:
    """Return the generator state from which the first answer draws its sound."""
    return torch.Generator().manual_seed(config.seed + 23).get_state()


def speak(voice: Voice, config: ConversationConfig, reply: Tensor, generator: torch.Generator) -> Iterator[Tensor]:
    """Yield the codes of an answer chunk by chunk, int64 [2, groups], each as soon as it is made."""
    speaker = voice.talker
    nothing_heard = torch.zeros((1, 0, int(config.talker["text_config"]["hidden_size"])))
    script = talker.script_of(speaker, nothing_heard, voice.text(reply.to(speaker.device)), voice.special)
    frames = talker.speak(speaker, script, config.num_chunks * CODEC_FRAMES_PER_LATENT, generator)
    for first in frames:
        yield torch.stack([first, *(next(frames) for _ in range(CODEC_FRAMES_PER_LATENT - 1))])


def load_sound(config: ConversationConfig, device: str) -> Any:
    """Load what turns sound into context tokens."""
    source = source_of(config, device)
    build = lambda: SoundEmbedding(int(config.video.transformer["text_dim"]))  # noqa: E731
    # Louder than the rest: sound must be heard through noise, as it is in a trained model.
    return source.load_layers("sound_embedding.safetensors", build, 1, loudness=6.0)


def first_noise_state(config: ConversationConfig) -> Tensor:
    """Return the generator state from which the first chunk draws its noise."""
    return causal_dit.first_noise_state(config.seed + 4)


def prepare(
    sound: Any, config: ConversationConfig, audio: Tensor, noise_state: Tensor, device: str
) -> tuple[Sample, Tensor]:
    """Return what the face is made from, one latent frame a chunk of sound, and the next generator state.

    Parameters
    ----------
    audio
        float32 [3840 n] at 24 kHz.
    """
    latents, tokens = [], []
    for chunk in audio.to(device).split(chunk_samples(config)):
        noise, noise_state = causal_dit.draw_noise(config.video, noise_state, device, num_frames=1)
        latents.append(noise)
        tokens.append(sound(chunk).float()[None])
    level = torch.zeros(len(latents), dtype=torch.int64)
    return {"latents": torch.cat(latents), "sound": torch.cat(tokens), "level": level}, noise_state


def chunk_samples(config: ConversationConfig) -> int:
    """Return the samples of one chunk of sound."""
    factor = 1
    for rate in (*config.vocoder.get("upsample_rates", (8, 5, 4, 3)), *config.vocoder.get("upsampling_ratios", (2, 2))):
        factor *= int(rate)
    return factor * CODEC_FRAMES_PER_LATENT


def load_dit(config: ConversationConfig, device: str, ranks: Ranks = ALONE) -> VideoDit:
    """Load the video transformer, and show it the portrait."""
    source = source_of(config, device)
    transformer = causal_dit.load_transformer(source, config.video)
    portrait = streaming_vae.start_latent(source, config.video).to(device)
    silence = torch.zeros((1, 1, transformer.config.text_dim), device=device, dtype=source.dtype)
    start_kv = causal_dit.show_first_image(transformer, portrait, silence, ranks)
    return VideoDit(config.video, device, transformer, start_kv, ranks)


def denoise_step(dit: VideoDit, sample: Sample, kv: KvCache) -> tuple[Sample, KvCache]:
    """Take one Euler step on each latent frame in turn: a frame sees the frames before, as this step saw them."""
    latents = []
    for latent, sound, level in zip(
        sample["latents"].to(dit.device).split(1), sample["sound"].to(dit.device), sample["level"].tolist(),
        strict=True,
    ):  # fmt: skip
        now, after = causal_dit.noise_level(dit.sizes, level), causal_dit.noise_level(dit.sizes, level + 1)
        context = sound[None].to(dit.transformer.dtype)
        latent, kv = causal_dit.denoise(dit, latent, now, after, context, kv)
        latents.append(latent)
    return {**sample, "latents": torch.cat(latents), "level": sample["level"] + 1}, kv


def load_decoder(config: ConversationConfig, device: str) -> Decoder:
    """Load the VAE's decoder and let it decode the portrait."""
    source = source_of(config, device)
    return streaming_vae.load_decoder(source, config.video, streaming_vae.start_latent(source, config.video))
