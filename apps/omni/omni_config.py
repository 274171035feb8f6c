"""The configuration of the assistant: which sizes, which weights, which seed; never imports torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flashrt.apps.shared.settings import BaseConfig, check_counts, load_settings
from flashrt.errors import Finding

CONFIG_DIR = Path(__file__).resolve().parent / "config"


@dataclass(frozen=True)
class OmniConfig(BaseConfig):
    """Everything that fixes the values of a run; equal configurations give equal bits on one device kind."""

    reply_tokens: int
    """Tokens of an answer."""
    num_chunks: int
    """Chunks of an answer's speech."""
    codec_frames_per_chunk: int
    """Codec frames of a chunk, 80 ms each."""
    markers: Mapping[str, int]
    """Text tokens that mark parts of a request: `user`, `assistant`, `audio_end`, `vision_end`, and of speech:
    `speech_begins`, `speech_ends`, `no_more_text`. The others are in `thinker`."""
    thinker: Mapping[str, Any]
    """Arguments of `Qwen3OmniMoeThinkerConfig`."""
    talker: Mapping[str, Any]
    """Arguments of `Qwen3OmniMoeTalkerConfig`."""
    vocoder: Mapping[str, Any]
    """Arguments of `Qwen3OmniMoeCode2WavConfig`."""


def load_config(options: Mapping[str, Any] | None = None) -> OmniConfig:
    """Return the configuration that `options` asks for; see `flashrt.apps.shared.settings.load_settings`."""
    return load_settings("omni", CONFIG_DIR, OmniConfig, options, check=_check)


def _check(document: Mapping[str, Any], where: str) -> list[Finding]:
    return check_counts(document, ("reply_tokens", "num_chunks", "codec_frames_per_chunk"), where)
