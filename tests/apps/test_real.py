"""Trained weights: what can be checked without them. The packages that ship them are on no test's path."""

from __future__ import annotations

import struct
from importlib.util import find_spec
from typing import Any

import numpy as np
import pytest
import torch

from flashrt.errors import InputError
from flashrt.ir import build_file
from tests.apps.applications import ROOT, load_file

models: Any = load_file("conversation/real", "real_models")


def test_missing_packages_are_named_all_at_once() -> None:
    missing = [module for module in models.PACKAGES if find_spec(module) is None]
    if not missing:
        models.check_packages()
        return
    with pytest.raises(InputError) as caught:
        models.check_packages()
    assert len(caught.value.findings) == len(missing)
    for module, finding in zip(missing, caught.value.findings, strict=True):
        assert models.PACKAGES[module] in str(finding)
        assert "README.md" in finding.fix


def test_every_package_has_a_licence_in_the_readme() -> None:
    readme = (ROOT / "conversation" / "README.md").read_text()
    for text in models.PACKAGES.values():
        assert text.rpartition("; ")[2].removesuffix(")").removesuffix("-or-later") in readme


def test_the_documents_are_a_program_and_a_deployment_of_it() -> None:
    from flashrt.analysis import read_deployment

    folder = ROOT / "conversation" / "real"
    built = build_file(folder / "program.yaml")
    assert [operation.path for operation in built.flat.operations] == ["asr", "llm", "tts"]
    read_deployment(folder / "split.yaml", built)


def written(tensors: dict[str, torch.Tensor]) -> bytes:
    """Return a CTranslate2 file of float16 variables."""

    def text(name: str) -> bytes:
        return struct.pack("<H", len(name) + 1) + name.encode() + b"\0"

    parts = [struct.pack("<I", 6), text("WhisperSpec"), struct.pack("<I", 3), struct.pack("<I", len(tensors))]
    for name, tensor in tensors.items():
        values = tensor.half().numpy()
        shape = struct.pack(f"<B{values.ndim}I", values.ndim, *values.shape)
        parts += [text(name), shape, struct.pack("<BI", 4, values.nbytes), values.tobytes()]
    return b"".join(parts)


def ctranslate2_of(state: dict[str, torch.Tensor], layers: int) -> dict[str, torch.Tensor]:
    """Return a Whisper model's weights as CTranslate2 names and joins them."""
    found: dict[str, torch.Tensor] = {}
    norm = (("gamma", "weight"), ("beta", "bias"))
    for side in ("encoder", "decoder"):
        here = f"model.{side}"
        found[f"{side}/position_encodings/encodings"] = state[f"{here}.embed_positions.weight"]
        found |= {f"{side}/layer_norm/{theirs}": state[f"{here}.layer_norm.{ours}"] for theirs, ours in norm}
        for layer in range(layers):
            mine, theirs = f"{here}.layers.{layer}", f"{side}/layer_{layer}"
            for number, name in enumerate(("fc1", "fc2")):
                for kind in ("weight", "bias"):
                    found[f"{theirs}/ffn/linear_{number}/{kind}"] = state[f"{mine}.{name}.{kind}"]
            found |= {f"{theirs}/ffn/layer_norm/{a}": state[f"{mine}.final_layer_norm.{b}"] for a, b in norm}
            kinds = [("self_attention", "self_attn", (("q", "k", "v"), ("out",)))]
            if side == "decoder":
                kinds.append(("attention", "encoder_attn", (("q",), ("k", "v"), ("out",))))
            for block, own, groups in kinds:
                found |= {f"{theirs}/{block}/layer_norm/{a}": state[f"{mine}.{own}_layer_norm.{b}"] for a, b in norm}
                for number, group in enumerate(groups):
                    for kind in ("weight", "bias"):
                        width = state[f"{mine}.{own}.q_proj.bias"]
                        pieces = [state.get(f"{mine}.{own}.{p}_proj.{kind}", torch.zeros_like(width)) for p in group]
                        found[f"{theirs}/{block}/linear_{number}/{kind}"] = torch.cat(pieces)
    for name in ("conv1", "conv2"):
        for kind in ("weight", "bias"):
            found[f"encoder/{name}/{kind}"] = state[f"model.encoder.{name}.{kind}"]
    found["decoder/embeddings/weight"] = state["model.decoder.embed_tokens.weight"]
    return found


def test_whisper_s_weights_are_found_under_the_names_of_the_other_library() -> None:
    from transformers import WhisperConfig, WhisperForConditionalGeneration

    sizes = {"encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 2, "decoder_attention_heads": 2}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = WhisperForConditionalGeneration(
            WhisperConfig(vocab_size=64, d_model=16, encoder_ffn_dim=32, decoder_ffn_dim=32, pad_token_id=0,
                          bos_token_id=1, eos_token_id=2, decoder_start_token_id=3, **sizes)
        ).half()  # fmt: skip
    state = model.state_dict()
    data = written(ctranslate2_of(state, 2))
    read = dict(models._translate(dict(models._read_ctranslate2(data))))
    assert set(read) == set(state) - {"proj_out.weight"}
    for name, tensor in read.items():
        assert torch.equal(tensor, state[name].float()), name


def test_questions_are_heard_at_the_recogniser_s_rate() -> None:
    tone = np.sin(2 * np.pi * 440 * np.arange(22_050) / 22_050).astype(np.float32)
    heard = models.to_hearing(tone, 22_050)
    assert (len(heard), heard.dtype) == (16_000, np.float32)
    wanted = np.sin(2 * np.pi * 440 * np.arange(16_000) / 16_000)
    assert np.abs(heard - wanted)[:-2].max() < 0.02
