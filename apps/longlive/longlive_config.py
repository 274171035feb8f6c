"""The configuration of the narrated video: which sizes, which weights, which seed; never imports torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flashrt.apps.shared.settings import BaseConfig, VideoSizes, check_counts, check_video, load_settings
from flashrt.errors import Finding

CONFIG_DIR = Path(__file__).resolve().parent / "config"


@dataclass(frozen=True)
class NarratedConfig(BaseConfig):
    """Everything that fixes the values of a run; equal configurations give equal bits on one device kind."""

    prompt_tokens: int
    """Tokens of a prompt."""
    prompt_delay: int
    """A prompt takes effect so many batches after the one in which it ended: the recogniser has that long."""
    num_prompts: int
    """How many of the last prompts the recogniser hands on: a consumer that sees only its last value misses none."""
    loudness: float
    """Root mean square above which sound is speech."""
    asr: Mapping[str, Any]
    """Arguments of `Qwen3ASRConfig`."""
    text_encoder: Mapping[str, Any]
    """Arguments of `UMT5Config`."""
    video: VideoSizes


def load_config(options: Mapping[str, Any] | None = None) -> NarratedConfig:
    """Return the configuration that `options` asks for; see `flashrt.apps.shared.settings.load_settings`."""
    return load_settings("longlive", CONFIG_DIR, NarratedConfig, options, check=_check, parts={"video": VideoSizes})


def _check(document: Mapping[str, Any], where: str) -> list[Finding]:
    findings = check_counts(document, ("prompt_tokens", "prompt_delay", "num_prompts"), where)
    return findings + check_video(document["video"], f"{where}, key 'video'")
