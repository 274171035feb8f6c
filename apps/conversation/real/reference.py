"""The reference with trained weights: hear, answer, speak, one after the other."""

from __future__ import annotations

from typing import Any

import real_models as models  # type: ignore[import-not-found]
import torch


def serve(io: Any) -> None:
    """For each question, float32 [samples] at 16 kHz, write what was heard, the answer, and its speech at 22 050 Hz."""
    models.check_packages()
    torch.set_num_threads(1)
    recogniser, llm, voice = models.load_recogniser(), models.load_llm(), models.load_voice()
    io.ready()
    for question in io.inputs["question"]:
        heard = models.transcribe(*recogniser, question)
        answer = models.respond(*llm, heard)
        io.outputs["heard"].write(heard)
        io.outputs["answer"].write(answer)
        io.outputs["speech"].write(torch.from_numpy(models.speak(voice, answer)))
