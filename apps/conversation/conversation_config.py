"""The configuration of the conversation: which sizes, which weights, which seed; never imports torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flashrt.apps.shared.settings import BaseConfig, VideoSizes, check_counts, check_video, load_settings
from flashrt.errors import Finding

CONFIG_DIR = Path(__file__).resolve().parent / "config"

CODEC_FRAMES_PER_LATENT = 2
"""A latent frame is four frames at 25 a second, 160 ms: two codec frames of 80 ms."""
FRAME_RATE_HZ = 25


@dataclass(frozen=True)
class ConversationConfig(BaseConfig):
    """Everything that fixes the values of a run; equal configurations give equal bits on one device kind."""

    num_chunks: int
    """Chunks of an answer; each is one latent frame, 160 ms of sound and picture."""
    heard_tokens: int
    """Tokens of what the user said."""
    reply_tokens: int
    """Tokens of an answer."""
    memory_tokens: int
    """Tokens of the dialogue so far that the language model reads again."""
    asr: Mapping[str, Any]
    """Arguments of `Qwen3ASRConfig`."""
    llm: Mapping[str, Any]
    """Arguments of `Qwen3Config`."""
    talker: Mapping[str, Any]
    """Arguments of `Qwen3OmniMoeTalkerConfig`."""
    vocoder: Mapping[str, Any]
    """Arguments of `Qwen3OmniMoeCode2WavConfig`."""
    video: VideoSizes


def load_config(options: Mapping[str, Any] | None = None) -> ConversationConfig:
    """Return the configuration that `options` asks for; see `flashrt.apps.shared.settings.load_settings`."""
    return load_settings(
        "conversation", CONFIG_DIR, ConversationConfig, options, check=_check, parts={"video": VideoSizes}
    )


def _check(document: Mapping[str, Any], where: str) -> list[Finding]:
    findings = check_counts(document, ("num_chunks", "heard_tokens", "reply_tokens", "memory_tokens"), where)
    return findings + check_video(document["video"], f"{where}, key 'video'")
