"""The configuration of the world model: which sizes, which weights, which seed; never imports torch."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from flashrt.errors import Finding, InputError, input_error

CONFIG_DIR = Path(__file__).resolve().parent / "config"

NUM_KEYS = 8
"""Keys of one action row: W, A, S, D, up, left, down, right."""

FRAMES_PER_LATENT = 4
"""The causal VAE of Wan turns each latent frame after the first into four displayed frames."""


@dataclass(frozen=True)
class WorldConfig:
    """Everything that fixes the values of a run; equal configurations give equal bits on one device kind."""

    name: str
    """`tiny`, `full`, or the path that was read."""
    seed: int
    """Seeds the weights (where there is no checkpoint), the start of the world, and the noise."""
    threads: int
    """CPU threads: another count sums in another order, so it is part of the configuration."""
    dtype: str
    """Element type of the transformer; latents between operations are float32 always."""
    checkpoint_dir: Path | None
    """Folder with the trained parts, or None for seeded random weights."""
    start_latent: Path | None
    """Safetensors file with the encoded first image; None: the checkpoint's, or a seeded one."""
    gain: float | None
    """Fan-in gain of random weights; None with a checkpoint."""
    latent_frames: int
    """Latent frames of one batch."""
    latent_height: int
    latent_width: int
    window_frames: int
    """Latent frames that attention sees, those of the current batch included."""
    num_steps: int
    """Denoising steps of one batch."""
    shift: float
    """Shift of the flow-matching schedule towards high noise."""
    transformer: Mapping[str, Any]
    """Arguments of `WanTransformer3DModel`."""
    vae: Mapping[str, Any]
    """Arguments of `AutoencoderKLWan`."""

    @property
    def frames_per_batch(self) -> int:
        """Displayed frames of one batch; also the number of action rows."""
        return self.latent_frames * FRAMES_PER_LATENT


def load_config(options: Mapping[str, Any] | None = None) -> WorldConfig:
    """Return the configuration that `options` asks for.

    Parameters
    ----------
    options
        ``{"config": "tiny" | "full" | path to a JSON file, ...}``; every other key replaces the key of that
        file (mappings are merged). None or an empty mapping: the tiny configuration.

    Raises
    ------
    InputError
        For an unknown or missing key, or a value that cannot be; every finding at once.
    """
    overrides = dict(options or {})
    name = str(overrides.pop("config", "tiny"))
    path = CONFIG_DIR / f"{name}.json" if name in ("tiny", "full") else Path(name)
    document = _merge(_read(path, name), overrides)
    known = [field.name for field in fields(WorldConfig) if field.name != "name"]
    findings = [
        input_error(
            f"worldplay configuration '{name}'",
            "a key of the configuration",
            f"'{key}'",
            "remove it or correct its spelling",
            rule="unknown-key",
            valid=known,
            name=key,
        ).findings[0]
        for key in document
        if key not in known
    ]
    findings += [
        Finding(f"worldplay configuration '{name}'", f"key '{key}'", "nothing", "add it", rule="missing-key")
        for key in known
        if key not in document
    ]
    if not findings:
        findings = _check_sizes(document, name)
    if findings:
        raise InputError(findings)
    for key in ("checkpoint_dir", "start_latent"):
        document[key] = None if document[key] is None else (path.parent / document[key]).resolve()
    return WorldConfig(name=name, **document)


def _read(path: Path, name: str) -> dict[str, Any]:
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise input_error(
            "worldplay option 'config'",
            "'tiny', 'full' or the path of a JSON file",
            f"'{name}' ({error})",
            "correct the option",
            valid=("tiny", "full"),
            name=name,
        ) from error
    if not isinstance(document, dict):
        raise input_error(f"file '{path}'", "a JSON object", type(document).__name__, "correct the file")
    return document


def _merge(base: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(base)
    for key, value in overrides.items():
        both_maps = isinstance(value, Mapping) and isinstance(base.get(key), Mapping)
        merged[key] = _merge(base[key], value) if both_maps else value
    return merged


def _check_sizes(document: Mapping[str, Any], name: str) -> list[Finding]:
    where = f"worldplay configuration '{name}'"
    findings = [
        Finding(f"{where}, key '{key}'", "a whole number of at least 1", repr(document[key]), "correct it")
        for key in ("threads", "latent_frames", "latent_height", "latent_width", "window_frames", "num_steps")
        if type(document[key]) is not int or document[key] < 1
    ]
    if not findings and document["window_frames"] < document["latent_frames"] + 1:
        findings.append(
            Finding(
                f"{where}, key 'window_frames'",
                f"more than the {document['latent_frames']} latent frames of a batch",
                str(document["window_frames"]),
                "raise it: without a past frame the world forgets itself at each batch",
            )
        )
    if document["checkpoint_dir"] is None and document["gain"] is None:
        findings.append(
            Finding(
                f"{where}, key 'gain'",
                "a number, since there is no checkpoint_dir",
                "null",
                "name a checkpoint folder, or a gain (0.6) for seeded random weights",
            )
        )
    return findings
