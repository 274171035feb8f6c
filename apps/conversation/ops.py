"""The operations of the conversation as program.yaml names them; each keeps its state where FlashRT declares it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, MutableMapping
from typing import Any

import conversation_model as model  # type: ignore[import-not-found]
import torch
from conversation_config import ConversationConfig, load_config  # type: ignore[import-not-found]

from flashrt.apps.shared import recogniser, streaming_vae, vocoder
from flashrt.apps.shared.causal_dit import Ranks
from flashrt.apps.shared.weights import prepare_device, torch_device

Inputs = Mapping[str, Any]
State = MutableMapping[str, Any]
Op = Callable[[Inputs, State], Any]


def load(context: Any) -> dict[str, Op]:
    """Return the operations that `context.operations` asks for (None: all); other weights are not loaded.

    Loading ends with a warm-up on scratch values, so that the first real batch is no slower than the next.
    """
    config = load_config(context.config)
    device = torch_device(context.device)
    prepare_device(config, device)
    ranks = Ranks.of(context, config.video)
    makers: dict[str, Callable[[], Op]] = {
        "transcribe": lambda: make_transcribe(config, device),
        "respond": lambda: make_respond(config, device),
        "speak": lambda: make_speak(config, device),
        "vocode": lambda: make_vocode(config, device),
        "prepare": lambda: make_prepare(config, device),
        "denoise_step": lambda: make_denoise_step(config, device, ranks),
        "decode": lambda: streaming_vae.make_decode(model.load_decoder(config, device), config.video),
        "leave_together": lambda: leave_together,
    }
    wanted = makers if context.operations is None else makers.keys() & set(context.operations)
    return {name: make() for name, make in makers.items() if name in wanted}


def make_transcribe(config: ConversationConfig, device: str) -> Op:
    """Return the op that turns an utterance into tokens: `speech` -> `tokens`."""
    asr = recogniser.load_recogniser(model.source_of(config, device), config.asr, config.heard_tokens)

    def transcribe(inputs: Inputs, state: State) -> Inputs:
        return {"tokens": recogniser.transcribe(asr, inputs["speech"])}

    transcribe({"speech": torch.zeros(asr.window_samples)}, {})
    return transcribe


def make_respond(config: ConversationConfig, device: str) -> Op:
    """Return the op that answers: `tokens` -> `reply`; state `llm.dialogue` has what was said before."""
    llm = model.load_llm(config, device)

    def respond(inputs: Inputs, state: State) -> Inputs:
        reply, state["llm.dialogue"] = model.respond(llm, config, inputs["tokens"], state["llm.dialogue"])
        return {"reply": reply}

    respond({"tokens": torch.zeros(config.heard_tokens, dtype=torch.int64)}, {"llm.dialogue": None})
    return respond


def make_speak(config: ConversationConfig, device: str) -> Op:
    """Return the op that speaks an answer chunk by chunk: `reply` -> `codes`; state `tts.rng` draws them."""
    voice = model.load_voice(config, device)

    def speak(inputs: Inputs, state: State) -> Iterator[Inputs]:
        generator = torch.Generator()
        before = state["tts.rng"]
        generator.set_state(model.first_voice_state(config) if before is None else before)
        for codes in model.speak(voice, config, inputs["reply"], generator):
            state["tts.rng"] = generator.get_state()
            yield {"codes": codes}

    scratch = speak({"reply": torch.zeros(config.reply_tokens, dtype=torch.int64)}, {"tts.rng": None})
    next(scratch)
    return speak


def make_vocode(config: ConversationConfig, device: str) -> Op:
    """Return the op that turns any number of codec frames into samples: `codes` -> `audio`."""
    code2wav = vocoder.load_vocoder(model.source_of(config, device), config.vocoder)

    def vocode(inputs: Inputs, state: State) -> Inputs:
        memory = state["vocoder.memory"]
        audio, state["vocoder.memory"] = vocoder.vocode(
            code2wav, inputs["codes"], code2wav.start if memory is None else memory
        )
        return {"audio": audio}

    return vocode


def make_prepare(config: ConversationConfig, device: str) -> Op:
    """Return the op that draws noise and listens: `audio` -> `sample` {latents, sound, level 0}."""
    sound = model.load_sound(config, device)

    def prepare(inputs: Inputs, state: State) -> Inputs:
        rng = state["dit.rng"]
        sample, state["dit.rng"] = model.prepare(
            sound, config, inputs["audio"], model.first_noise_state(config) if rng is None else rng, device
        )
        return {"sample": sample}

    prepare({"audio": torch.zeros(model.chunk_samples(config))}, {"dit.rng": None})
    return prepare


def make_denoise_step(config: ConversationConfig, device: str, ranks: Ranks) -> Op:
    """Return the op that takes one denoising step: `sample` -> `sample` one level on, `latents`.

    The level travels with the latents, so all steps are one operation; each has a `dit.kv` of its own.
    """
    dit = model.load_dit(config, device, ranks)

    def denoise_step(inputs: Inputs, state: State) -> Inputs:
        kv = state["dit.kv"]
        sample, state["dit.kv"] = model.denoise_step(dit, inputs["sample"], dit.start_kv if kv is None else kv)
        return {"sample": sample, "latents": sample["latents"]}

    sizes = config.video
    latents = torch.zeros((2, int(sizes.vae["z_dim"]), sizes.latent_height, sizes.latent_width))
    scratch = {"latents": latents, "sound": torch.zeros((2, 1, dit.text_dim)), "level": torch.tensor([0, 0])}
    denoise_step({"sample": scratch}, {"dit.kv": None})
    return denoise_step


def leave_together(inputs: Inputs, state: State) -> Inputs:
    """Hold sound until the frames of the same moment are there: `audio`, `frames` -> `audio`, `frames`."""
    return {"audio": inputs["audio"], "frames": inputs["frames"]}
