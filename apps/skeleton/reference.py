"""The reference: plain, synchronous, one device, nothing streamed."""

from __future__ import annotations

from typing import Any

import model  # type: ignore[import-not-found]


def serve(io: Any) -> None:
    """For each batch of knob positions, float32 [8, 4], write frames, uint8 [8, 16, 16]."""
    weights = model.load_weights()
    memories: list[Any] = [None] * model.NUM_STEPS
    ink = model.first_ink()
    io.ready()
    for knobs in io.inputs["knobs"]:
        field = knobs
        for step in range(model.NUM_STEPS):
            before = model.first_memory(len(field)) if memories[step] is None else memories[step]
            field, memories[step] = model.refine(weights, field, before)
        frames, ink = model.draw(field, ink)
        io.outputs["frames"].write(frames)
