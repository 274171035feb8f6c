"""The operations of the assistant as program.yaml names them; each keeps its state where FlashRT declares it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, MutableMapping
from typing import Any

import omni_model as model  # type: ignore[import-not-found]
import torch
from omni_config import OmniConfig, load_config  # type: ignore[import-not-found]

from flashrt.apps.shared import vocoder
from flashrt.apps.shared.weights import prepare_device, torch_device

Inputs = Mapping[str, Any]
State = MutableMapping[str, Any]
Op = Callable[[Inputs, State], Any]


def load(context: Any) -> dict[str, Op]:
    """Return the operations that `context.operations` asks for (None: all); other weights are not loaded."""
    config = load_config(context.config)
    device = torch_device(context.device)
    prepare_device(config, device)
    makers: dict[str, Callable[[], Op]] = {
        "think": lambda: make_think(config, device),
        "speak": lambda: make_speak(config, device),
        "vocode": lambda: make_vocode(config, device),
    }
    wanted = makers if context.operations is None else makers.keys() & set(context.operations)
    return {name: make() for name, make in makers.items() if name in wanted}


def make_think(config: OmniConfig, device: str) -> Op:
    """Return the op that reads a request and writes an answer: `text`, `sound`, `image` -> `thoughts`."""
    thinker = model.load_thinker(config, device)

    def think(inputs: Inputs, state: State) -> Inputs:
        return {"thoughts": model.think(thinker, inputs["text"], inputs["sound"], inputs["image"])}

    side = int(thinker.model.config.vision_config.patch_size) * int(
        thinker.model.config.vision_config.spatial_merge_size
    )
    blank = torch.zeros((side, side, 3), dtype=torch.uint8)
    think({"text": torch.zeros(4, dtype=torch.int64), "sound": torch.zeros(16_000), "image": blank}, {})
    return think


def make_speak(config: OmniConfig, device: str) -> Op:
    """Return the op that speaks an answer chunk by chunk: `thoughts` -> `codes`; state `talker.rng` draws them."""
    speaker = model.load_talker(config, device)

    def speak(inputs: Inputs, state: State) -> Iterator[Inputs]:
        generator = torch.Generator()
        before = state["talker.rng"]
        generator.set_state(model.first_voice_state(config) if before is None else before)
        for codes in model.speak(speaker, config, inputs["thoughts"], generator):
            state["talker.rng"] = generator.get_state()
            yield {"codes": codes}

    width, rows = int(config.talker["thinker_hidden_size"]), config.reply_tokens + 1
    scratch = {
        "embeds": torch.zeros((rows, width)), "hidden": torch.zeros((rows, width)), "special": torch.zeros((3, width)),
        "media": torch.zeros(rows, dtype=torch.bool),
    }  # fmt: skip
    next(speak({"thoughts": scratch}, {"talker.rng": None}))
    return speak


def make_vocode(config: OmniConfig, device: str) -> Op:
    """Return the op that turns any number of codec frames into samples: `codes` -> `speech`."""
    code2wav = vocoder.load_vocoder(model.source_of(config, device), config.vocoder)

    def vocode(inputs: Inputs, state: State) -> Inputs:
        memory = state["vocoder.memory"]
        speech, state["vocoder.memory"] = vocoder.vocode(
            code2wav, inputs["codes"], code2wav.start if memory is None else memory
        )
        return {"speech": speech}

    return vocode
