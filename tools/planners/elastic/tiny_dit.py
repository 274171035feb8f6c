"""A tiny diffusion transformer in the style of Wan: adaLN blocks over video tokens, three-axis rotary positions, text
by cross-attention, Euler steps of a flow; and a VAE's decoder. Its weights are drawn from a seed. Imported by
engines alone.

Sequence parallel: each rank has a part of the tokens; keys and values are gathered, so every rank computes attention
of its own queries.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

DIM, HEADS, LAYERS, CHANNELS, TEXT, PATCH, COMPRESSION = 96, 4, 2, 8, 16, 2, 8
SHIFT = 3.0
Gather = Callable[[Any], Any]
"""A rank's part [tokens/ranks, ...] -> all ranks' parts in order [tokens, ...]."""


@dataclass(frozen=True)
class Geometry:
    """A class of videos: latent frames, height and width, and denoising steps."""

    frames: int
    height: int
    width: int
    steps: int

    @classmethod
    def of(cls, key: Mapping[str, Any]) -> Geometry:
        """Return the geometry of a class key; its resolution is ``WIDTHxHEIGHT``, multiples of 16."""
        width, _, height = str(key["resolution"]).partition("x")
        return cls(int(key["frames"]), int(height) // COMPRESSION, int(width) // COMPRESSION, int(key["steps"]))

    @property
    def grid(self) -> tuple[int, int, int]:
        """Tokens by frame, row and column."""
        return self.frames, self.height // PATCH, self.width // PATCH


class TinyDit:
    """The model, whole on every rank."""

    def __init__(self, seed: int = 0) -> None:
        import torch

        self._torch = torch
        generator = torch.Generator().manual_seed(seed)

        def weight(*shape: int) -> Any:
            return torch.randn(*shape, generator=generator) / math.sqrt(shape[-1])

        self._embed = weight(DIM, CHANNELS * PATCH * PATCH)
        self._time = weight(DIM, DIM), weight(6 * DIM, DIM)
        self._blocks = [
            {
                "qkv": weight(3 * DIM, DIM), "out": weight(DIM, DIM), "cross_q": weight(DIM, DIM),
                "cross_kv": weight(2 * DIM, DIM), "cross_out": weight(DIM, DIM), "up": weight(4 * DIM, DIM),
                "down": weight(DIM, 4 * DIM), "modulation": weight(6, DIM),
            }
            for _ in range(LAYERS)
        ]  # fmt: skip
        self._head = weight(CHANNELS * PATCH * PATCH, DIM)
        self._decoder = weight(32, CHANNELS, 3, 3, 3) / 3, weight(3 * COMPRESSION**2, 32, 3, 3) / 2

    def noise(self, geometry: Geometry, seed: int) -> Any:
        """Return the latent that a request begins from: [channels, frames, height, width]."""
        generator = self._torch.Generator().manual_seed(seed)
        return self._torch.randn(CHANNELS, geometry.frames, geometry.height, geometry.width, generator=generator)

    def prompt(self, seed: int) -> Any:
        """Return the text that a request's seed stands for: [words, dim]."""
        return self._torch.randn(TEXT, DIM, generator=self._torch.Generator().manual_seed(seed + 1))

    def step(self, latent: Any, text: Any, geometry: Geometry, step: int, rank: int, ranks: int, gather: Gather) -> Any:
        """Return the latent after Euler step `step` (from 0); all ranks return the same whole latent."""
        torch = self._torch
        tokens = self._patchify(latent, geometry)
        part = slice(rank * len(tokens) // ranks, (rank + 1) * len(tokens) // ranks)
        now, then = (self._sigma(place / geometry.steps) for place in (step, step + 1))
        velocity = self._velocity(tokens[part], text, geometry, part, now, gather)
        moved = tokens[part] + (then - now) * velocity
        whole = gather(moved) if ranks > 1 else moved
        assert torch.isfinite(whole).all(), "the flow stays finite"
        return self._unpatchify(whole, geometry)

    def decode(self, latent: Any) -> Any:
        """Return the frames of a latent: [frames, 3, height, width], from −1 to 1."""
        functional = self._torch.nn.functional
        hidden = functional.silu(functional.conv3d(latent[None], self._decoder[0], padding=1))[0].transpose(0, 1)
        pixels = functional.pixel_shuffle(functional.conv2d(hidden, self._decoder[1], padding=1), COMPRESSION)
        return self._torch.tanh(pixels)

    @staticmethod
    def _sigma(place: float) -> float:
        left = 1 - place
        return SHIFT * left / (1 + (SHIFT - 1) * left)

    def _velocity(self, x: Any, text: Any, geometry: Geometry, part: slice, sigma: float, gather: Gather) -> Any:
        functional = self._torch.nn.functional
        angles = self._angles(geometry)[part]
        hidden = functional.linear(x, self._embed)
        time = functional.linear(
            functional.silu(functional.linear(self._sinusoid(sigma), self._time[0])), self._time[1]
        )
        for block in self._blocks:
            shift_a, scale_a, gate_a, shift_b, scale_b, gate_b = (time.view(6, DIM) + block["modulation"]) * 0.2
            inner = functional.layer_norm(hidden, (DIM,)) * (1 + scale_a) + shift_a
            query, key, value = functional.linear(inner, block["qkv"]).chunk(3, -1)
            query, key = self._rotate(query, angles), self._rotate(key, angles)
            both = gather(self._torch.cat([key, value], -1))
            attended = self._attend(query, *both.chunk(2, -1))
            hidden = hidden + (1 + gate_a) * functional.linear(attended, block["out"])
            words = functional.linear(text, block["cross_kv"]).chunk(2, -1)
            asked = functional.linear(functional.layer_norm(hidden, (DIM,)), block["cross_q"])
            hidden = hidden + functional.linear(self._attend(asked, *words), block["cross_out"])
            inner = functional.layer_norm(hidden, (DIM,)) * (1 + scale_b) + shift_b
            wide = functional.gelu(functional.linear(inner, block["up"]), approximate="tanh")
            hidden = hidden + (1 + gate_b) * functional.linear(wide, block["down"])
        return functional.linear(functional.layer_norm(hidden, (DIM,)), self._head)

    def _attend(self, query: Any, key: Any, value: Any) -> Any:
        heads = [one.view(len(one), HEADS, DIM // HEADS).transpose(0, 1) for one in (query, key, value)]
        found = self._torch.nn.functional.scaled_dot_product_attention(*heads)
        return found.transpose(0, 1).reshape(len(query), DIM)

    def _sinusoid(self, sigma: float) -> Any:
        torch = self._torch
        rates = torch.exp(-math.log(10_000) * torch.arange(DIM // 2) / (DIM // 2))
        return torch.cat([torch.cos(1000 * sigma * rates), torch.sin(1000 * sigma * rates)])

    def _angles(self, geometry: Geometry) -> Any:
        """Return the rotary angles of all tokens: [tokens, head dim / 2], a third of them for each axis."""
        torch = self._torch
        axes = torch.meshgrid(*(torch.arange(size, dtype=torch.float32) for size in geometry.grid), indexing="ij")
        half = DIM // HEADS // 2
        sizes = [half - 2 * (half // 3), half // 3, half // 3]
        parts = [
            axis.reshape(-1, 1) * 10_000 ** (-torch.arange(size) / size)
            for axis, size in zip(axes, sizes, strict=True)
        ]  # fmt: skip
        return torch.cat(parts, -1)

    def _rotate(self, x: Any, angles: Any) -> Any:
        pairs = x.view(len(x), HEADS, -1, 2)
        cos, sin = angles.cos()[:, None], angles.sin()[:, None]
        first, second = pairs[..., 0], pairs[..., 1]
        return self._torch.stack([first * cos - second * sin, first * sin + second * cos], -1).reshape(len(x), DIM)

    def _patchify(self, latent: Any, geometry: Geometry) -> Any:
        frames, rows, columns = geometry.grid
        cut = latent.view(CHANNELS, frames, rows, PATCH, columns, PATCH).permute(1, 2, 4, 0, 3, 5)
        return cut.reshape(frames * rows * columns, CHANNELS * PATCH * PATCH)

    def _unpatchify(self, tokens: Any, geometry: Geometry) -> Any:
        frames, rows, columns = geometry.grid
        cut = tokens.view(frames, rows, columns, CHANNELS, PATCH, PATCH).permute(3, 0, 1, 4, 2, 5)
        return cut.reshape(CHANNELS, geometry.frames, geometry.height, geometry.width)
