"""The configuration of the background editor: which sizes, which weights, which seed; never imports torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flashrt.apps.shared.settings import BaseConfig, VideoSizes, check_video, load_settings
from flashrt.errors import Finding

CONFIG_DIR = Path(__file__).resolve().parent / "config"


@dataclass(frozen=True)
class EditorConfig(BaseConfig):
    """Everything that fixes the values of a run; equal configurations give equal bits on one device kind."""

    first_level: int
    """Step of the schedule at which the webcam's latents enter: the later, the closer to what the camera saw."""
    prompt: tuple[int, ...]
    """Text tokens that name what is segmented."""
    threshold: float
    """Logit above which a pixel belongs to the person."""
    style_tokens: int
    """Context tokens of the style."""
    segmenter: Mapping[str, Any]
    """Arguments of `Sam3Config`."""
    video: VideoSizes


def load_config(options: Mapping[str, Any] | None = None) -> EditorConfig:
    """Return the configuration that `options` asks for; see `flashrt.apps.shared.settings.load_settings`."""
    return load_settings(
        "background_editor", CONFIG_DIR, EditorConfig, options, check=_check, parts={"video": VideoSizes}
    )


def _check(document: Mapping[str, Any], where: str) -> list[Finding]:
    findings = check_video(document["video"], f"{where}, key 'video'")
    level, steps = document["first_level"], document["video"]["num_steps"]
    if type(level) is not int or not 0 < level < steps:
        findings.append(
            Finding(f"{where}, key 'first_level'", f"a step between 1 and {steps - 1}", repr(level), "correct it")
        )
    return findings
