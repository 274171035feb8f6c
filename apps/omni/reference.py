"""The reference: plain, synchronous, one device; thinker, talker and vocoder one after the other."""

from __future__ import annotations

from typing import Any

import omni_model as model  # type: ignore[import-not-found]
import torch
from omni_config import load_config  # type: ignore[import-not-found]

from flashrt.apps.shared import vocoder
from flashrt.apps.shared.weights import prepare_device, torch_device


def serve(io: Any) -> None:
    """Answer requests: for each text, sound and picture write speech, float32 [samples] at 24 kHz."""
    config = load_config(io.config)
    device = torch_device(io.devices[0]) if io.devices else "cpu"
    prepare_device(config, device)
    thinker = model.load_thinker(config, device)
    speaker = model.load_talker(config, device)
    code2wav = vocoder.load_vocoder(model.source_of(config, device), config.vocoder)

    generator = torch.Generator()
    generator.set_state(model.first_voice_state(config))
    memory = code2wav.start
    io.ready()

    for text, sound, image in zip(io.inputs["text"], io.inputs["sound"], io.inputs["image"], strict=True):
        thoughts = model.think(thinker, text, sound, image)
        codes = torch.cat(list(model.speak(speaker, config, thoughts, generator)))
        speech, memory = vocoder.vocode(code2wav, codes, memory)
        io.outputs["speech"].write(speech)
