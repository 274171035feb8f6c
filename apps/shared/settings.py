"""Configurations of applications: a JSON file, options over it, checked all at once; never imports torch."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, TypeVar

from flashrt.errors import Finding, InputError, input_error

FRAMES_PER_LATENT = 4
"""The causal VAE of Wan turns each latent frame after the first into four displayed frames."""

SHIPPED = ("tiny", "medium", "full")


@dataclass(frozen=True)
class VideoSizes:
    """Sizes of an autoregressive video model: a causal transformer and a streaming VAE."""

    latent_frames: int
    """Latent frames of one batch, or of one chunk where batches are generated chunk by chunk."""
    latent_height: int
    latent_width: int
    window_frames: int
    """Latent frames that attention sees, those being made included."""
    num_steps: int
    """Denoising steps."""
    shift: float
    """Shift of the flow-matching schedule towards high noise."""
    transformer: Mapping[str, Any]
    """Arguments of `WanTransformer3DModel`."""
    vae: Mapping[str, Any]
    """Arguments of `AutoencoderKLWan`."""

    @property
    def frames_per_batch(self) -> int:
        """Displayed frames that `latent_frames` become."""
        return self.latent_frames * FRAMES_PER_LATENT

    @property
    def pixel_scale(self) -> int:
        """Pixels along one side of a latent pixel."""
        scale = 2 ** (len(self.vae["dim_mult"]) - 1)
        return int(scale * (self.vae.get("patch_size") or 1))


@dataclass(frozen=True)
class BaseConfig:
    """What every application's configuration has."""

    name: str
    """`tiny`, `medium`, `full`, or the path that was read."""
    seed: int
    """Seeds the weights (where there is no checkpoint) and every generator."""
    threads: int
    """CPU threads: another count sums in another order, so it is part of the configuration."""
    dtype: str
    """Element type of the models; values between operations are float32 always."""
    checkpoint_dir: Path | None
    """Folder with the trained parts, or None for seeded random weights."""
    gain: float | None
    """Fan-in gain of random weights; None with a checkpoint."""


Config = TypeVar("Config", bound=BaseConfig)
Check = Callable[[Mapping[str, Any], str], list[Finding]]


def load_settings(
    app: str,
    folder: Path,
    kind: type[Config],
    options: Mapping[str, Any] | None = None,
    *,
    check: Check = lambda document, where: [],
    paths: tuple[str, ...] = ("checkpoint_dir",),
    parts: Mapping[str, type] | None = None,
) -> Config:
    """Return the configuration that `options` asks for.

    Parameters
    ----------
    app
        The application's name, for messages.
    folder
        Where ``tiny.json``, ``full.json`` and others lie.
    kind
        Frozen dataclass; its fields are the keys of the file, but for `name`.
    options
        ``{"config": "tiny" | "full" | path to a JSON file, ...}``; every other key replaces the key of that
        file (mappings are merged). None or an empty mapping: the tiny configuration.
    check
        Gets the merged document and how messages call it; returns what is wrong with its values.
    paths
        Keys that name files or folders, relative to the file that was read.
    parts
        Keys whose mappings become dataclasses.

    Raises
    ------
    InputError
        For an unknown or missing key, or a value that cannot be; every finding at once.
    """
    overrides = dict(options or {})
    name = str(overrides.pop("config", "tiny"))
    path = folder / f"{name}.json" if name in SHIPPED else Path(name)
    document = _merge(_read(app, path, name), overrides)
    where = f"{app} configuration '{name}'"
    findings = _check_keys(document, kind, where)
    for key, part in (parts or {}).items():
        if isinstance(document.get(key), Mapping):
            findings += _check_keys(document[key], part, f"{where}, key '{key}'")
    findings = findings or [*check_base(document, where), *check(document, where)]
    if findings:
        raise InputError(findings)
    for key in paths:
        document[key] = None if document[key] is None else (path.parent / document[key]).resolve()
    for key, part in (parts or {}).items():
        document[key] = part(**document[key])
    return kind(name=name, **document)


def check_base(document: Mapping[str, Any], where: str) -> list[Finding]:
    """Return what is wrong with the keys that every configuration has."""
    findings = check_counts(document, ("threads",), where)
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


def check_counts(document: Mapping[str, Any], keys: tuple[str, ...], where: str) -> list[Finding]:
    """Return a finding for each of `keys` that is no whole number of at least 1."""
    return [
        Finding(f"{where}, key '{key}'", "a whole number of at least 1", repr(document[key]), "correct it")
        for key in keys
        if type(document[key]) is not int or document[key] < 1
    ]


def check_video(document: Mapping[str, Any], where: str) -> list[Finding]:
    """Return what is wrong with the sizes of a video model."""
    keys = ("latent_frames", "latent_height", "latent_width", "window_frames", "num_steps")
    findings = check_counts(document, keys, where)
    if not findings and document["window_frames"] < document["latent_frames"] + 1:
        findings.append(
            Finding(
                f"{where}, key 'window_frames'",
                f"more than the {document['latent_frames']} latent frames of a batch",
                str(document["window_frames"]),
                "raise it: without a past frame the world forgets itself at each batch",
            )
        )
    return findings


def _check_keys(document: Mapping[str, Any], kind: type, where: str) -> list[Finding]:
    known = [field.name for field in fields(kind) if field.name != "name"]
    findings = [
        input_error(
            where, "a key of the configuration", f"'{key}'", "remove it or correct its spelling",
            rule="unknown-key", valid=known, name=key,
        ).findings[0]
        for key in document
        if key not in known
    ]  # fmt: skip
    return findings + [
        Finding(where, f"key '{key}'", "nothing", "add it", rule="missing-key") for key in known if key not in document
    ]


def _read(app: str, path: Path, name: str) -> dict[str, Any]:
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        shipped = [one for one in SHIPPED if (path.parent / f"{one}.json").exists()] or ["tiny", "full"]
        raise input_error(
            f"{app} option 'config'",
            "'tiny', 'full' or the path of a JSON file",
            f"'{name}' ({error})",
            "correct the option",
            valid=shipped,
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
