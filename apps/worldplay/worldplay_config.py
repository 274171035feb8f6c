"""The configuration of the world model: which sizes, which weights, which seed; never imports torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flashrt.apps.shared.settings import BaseConfig, VideoSizes, check_video, load_settings

CONFIG_DIR = Path(__file__).resolve().parent / "config"

NUM_KEYS = 8
"""Keys of one action row: W, A, S, D, up, left, down, right."""


@dataclass(frozen=True)
class WorldConfig(VideoSizes, BaseConfig):
    """Everything that fixes the values of a run; equal configurations give equal bits on one device kind."""

    start_latent: Path | None
    """Safetensors file with the encoded first image; None: the checkpoint's, or a seeded one."""


def load_config(options: Mapping[str, Any] | None = None) -> WorldConfig:
    """Return the configuration that `options` asks for; see `flashrt.apps.shared.settings.load_settings`."""
    return load_settings(
        "worldplay", CONFIG_DIR, WorldConfig, options, check=check_video, paths=("checkpoint_dir", "start_latent")
    )
