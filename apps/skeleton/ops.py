"""The operations as program.yaml names them; each keeps its state where FlashRT declares it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, MutableMapping
from typing import Any

import model  # type: ignore[import-not-found]

Inputs = Mapping[str, Any]
State = MutableMapping[str, Any]
Op = Callable[[Inputs, State], Inputs]


def load(context: Any) -> dict[str, Op]:
    """Return the operations that `context.operations` asks for (None: all), with their weights loaded and warm."""
    makers: dict[str, Callable[[], Op]] = {"refine": make_refine, "draw": make_draw}
    wanted = makers if context.operations is None else makers.keys() & set(context.operations)
    return {name: make() for name, make in makers.items() if name in wanted}


def make_refine() -> Op:
    """Return the op that takes one step: `field` -> `field`; each step has a `think.memory` of its own."""
    weights = model.load_weights()

    def refine(inputs: Inputs, state: State) -> Inputs:
        field, before = inputs["field"], state["think.memory"]
        refined, state["think.memory"] = model.refine(
            weights, field, model.first_memory(len(field)) if before is None else before
        )
        return {"field": refined}

    return refine


def make_draw() -> Op:
    """Return the op that draws any number of rows: `field` -> `frames`."""

    def draw(inputs: Inputs, state: State) -> Inputs:
        before = state["draw.ink"]
        frames, state["draw.ink"] = model.draw(inputs["field"], model.first_ink() if before is None else before)
        return {"frames": frames}

    return draw
