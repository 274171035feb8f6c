"""The operations with trained weights as program.yaml names them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import real_models as models  # type: ignore[import-not-found]
import torch

Op = Callable[[Mapping[str, Any], Any], Mapping[str, Any]]


def load(context: Any) -> dict[str, Op]:
    """Return the operations that `context.operations` asks for (None: all); other models are not loaded."""
    models.check_packages()
    torch.set_num_threads(1)
    makers: dict[str, Callable[[], Op]] = {"hear": make_hear, "respond": make_respond, "speak": make_speak}
    wanted = makers if context.operations is None else makers.keys() & set(context.operations)
    return {name: make() for name, make in makers.items() if name in wanted}


def make_hear() -> Op:
    """Return the op of Whisper base: `question` -> `text`."""
    recogniser = models.load_recogniser()
    return lambda inputs, state: {"text": models.transcribe(*recogniser, inputs["question"])}


def make_respond() -> Op:
    """Return the op of SmolLM2: `text` -> `answer`."""
    llm = models.load_llm()
    return lambda inputs, state: {"answer": models.respond(*llm, inputs["text"])}


def make_speak() -> Op:
    """Return the op of Piper's voice: `answer` -> `speech`."""
    voice = models.load_voice()
    return lambda inputs, state: {"speech": torch.from_numpy(models.speak(voice, inputs["answer"]))}
