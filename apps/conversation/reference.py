"""The reference: plain, synchronous, one device; the whole answer is there before any of it is shown."""

from __future__ import annotations

from typing import Any

import conversation_model as model  # type: ignore[import-not-found]
import torch
from conversation_config import load_config  # type: ignore[import-not-found]

from flashrt.apps.shared import recogniser, streaming_vae, vocoder
from flashrt.apps.shared.weights import prepare_device, torch_device


def serve(io: Any) -> None:
    """Talk: for each utterance, float32 [samples] at 16 kHz, write the answer's sound and frames.

    `audio` is float32 [3840 chunks] at 24 kHz, `frames` uint8 [4 chunks, height, width, 3] at 25 a second.
    """
    config = load_config(io.config)
    device = torch_device(io.devices[0]) if io.devices else "cpu"
    prepare_device(config, device)
    source = model.source_of(config, device)
    asr = recogniser.load_recogniser(source, config.asr, config.heard_tokens)
    llm = model.load_llm(config, device)
    voice = model.load_voice(config, device)
    code2wav = vocoder.load_vocoder(source, config.vocoder)
    sound = model.load_sound(config, device)
    dit = model.load_dit(config, device)
    decoder = model.load_decoder(config, device)

    dialogue = None
    generator = torch.Generator()
    generator.set_state(model.first_voice_state(config))
    memory = code2wav.start
    noise_state = model.first_noise_state(config)
    kv_of_step = [dit.start_kv] * config.video.num_steps
    feature_cache = decoder.start_cache
    io.ready()

    for speech in io.inputs["speech"]:
        heard = recogniser.transcribe(asr, speech)
        reply, dialogue = model.respond(llm, config, heard, dialogue)
        codes = torch.cat(list(model.speak(voice, config, reply, generator)))
        audio, memory = vocoder.vocode(code2wav, codes, memory)
        sample, noise_state = model.prepare(sound, config, audio, noise_state, device)
        for step in range(config.video.num_steps):
            sample, kv_of_step[step] = model.denoise_step(dit, sample, kv_of_step[step])
        frames, feature_cache = streaming_vae.decode(decoder, sample["latents"], feature_cache)
        io.outputs["audio"].write(audio)
        io.outputs["frames"].write(frames)
