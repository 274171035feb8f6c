"""Text in, codec frames out: the talker of Qwen3-Omni, frame by frame.

The loop is that of the library's `generate`, written out so that frames leave as they are made.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from flashrt.apps.shared.weights import Source

NUM_SPECIAL_CODES = 1024
"""The top of the talker's vocabulary: control codes, which are never spoken."""
TEMPERATURE = 0.9


@dataclass(frozen=True)
class Talker:
    """The loaded talker."""

    device: str
    model: Any

    @property
    def num_groups(self) -> int:
        """Codes of one frame."""
        return int(self.model.config.num_code_groups)


@dataclass(frozen=True)
class Script:
    """What is to be spoken, in the talker's width."""

    prompt: Tensor
    """[1, heard + 5, width], read at once."""
    trailing: Tensor
    """[1, tokens, width], heard frame by frame; "speech ends" last."""
    pad: Tensor
    """[1, 1, width]: what a frame hears when the text is used up."""


def load_talker(source: Source, sizes: Mapping[str, Any], seed: int = 20) -> Talker:
    """Load `Qwen3OmniMoeTalkerForConditionalGeneration`.

    Parameters
    ----------
    sizes
        Arguments of `Qwen3OmniMoeTalkerConfig`.

    Raises
    ------
    InputError
        The checkpoint folder, or its part ``talker/``, is not there.
    """
    from transformers.models.qwen3_omni_moe.configuration_qwen3_omni_moe import Qwen3OmniMoeTalkerConfig
    from transformers.models.qwen3_omni_moe.modeling_qwen3_omni_moe import Qwen3OmniMoeTalkerForConditionalGeneration

    kind = Qwen3OmniMoeTalkerForConditionalGeneration
    build = lambda: kind(talker_config(Qwen3OmniMoeTalkerConfig, sizes))  # noqa: E731
    model = source.load("talker", kind, build, seed)
    return Talker(source.device, model)


def talker_config(kind: Any, sizes: Mapping[str, Any]) -> Any:
    """Return the talker's configuration; the library forgets `spatial_merge_size`, which the model wants."""
    config = kind(**sizes)
    config.spatial_merge_size = 2
    return config


class TextEmbedding(nn.Module):
    """A table of text tokens, where the talker speaks for a text model whose embeddings it does not see."""

    def __init__(self, vocab_size: int, width: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocab_size, width)

    def forward(self, tokens: Tensor) -> Tensor:
        """Map tokens [tokens] to [1, tokens, width]."""
        return self.tokens(tokens)[None]


def script_of(talker: Talker, heard: Tensor, text: Tensor, special: Tensor) -> Script:
    """Return what the talker reads at once, and what it hears frame by frame.

    Parameters
    ----------
    heard
        What the user said, in the talker's width: [1, tokens, width].
    text
        Embeddings of what is to be spoken: [1, tokens, text width].
    special
        Embeddings of "speech begins", "speech ends" and "no more text", [1, 3, text width].
    """
    model, config = talker.model, talker.model.config
    spoken = model.text_projection(text.to(talker.device, model.dtype))
    begin, end, pad = model.text_projection(special.to(talker.device, model.dtype)).chunk(3, dim=1)
    control = torch.tensor(
        [[config.codec_nothink_id, config.codec_think_bos_id, config.codec_think_eos_id, config.codec_pad_id,
          config.codec_bos_id]], device=talker.device,
    )  # fmt: skip
    texts = torch.cat([pad.expand(-1, 3, -1), begin, spoken[:, :1]], dim=1)
    prompt = texts + model.get_input_embeddings()(control)
    whole = torch.cat([heard.to(talker.device, model.dtype), prompt], dim=1)
    return Script(whole, torch.cat([spoken[:, 1:], end], dim=1), pad)


def speak(talker: Talker, script: Script, num_frames: int, generator: torch.Generator) -> Iterator[Tensor]:
    """Yield `num_frames` codec frames, int64 [groups], each as soon as it is made.

    Parameters
    ----------
    generator
        On the CPU; draws the first code of each frame, and moves on.
    """
    from transformers import DynamicCache

    model = talker.model
    table = model.get_input_embeddings()
    cache = DynamicCache(config=model.config.text_config)
    embeds = script.prompt
    for frame in range(num_frames):
        positions = torch.arange(cache.get_seq_length(), cache.get_seq_length() + embeds.shape[1], device=talker.device)
        hidden = model.model(
            inputs_embeds=embeds, position_ids=positions.expand(3, 1, -1), past_key_values=cache, use_cache=True
        ).last_hidden_state[:, -1:]
        code = _draw(model.codec_head(hidden)[0, -1], generator).to(talker.device).view(1, 1)
        codes, codec = _residuals(model.code_predictor, hidden, code, table(code))
        yield codes.cpu()
        heard = script.trailing[:, frame : frame + 1]
        embeds = codec + (heard if heard.shape[1] else script.pad)


def _draw(logits: Tensor, generator: torch.Generator) -> Tensor:
    logits = logits.float().cpu()[: max(1, logits.shape[0] - NUM_SPECIAL_CODES)]
    return torch.multinomial((logits / TEMPERATURE).softmax(dim=0), 1, generator=generator)


def _residuals(predictor: Any, hidden: Tensor, code: Tensor, embedded: Tensor) -> tuple[Tensor, Tensor]:
    """Return a frame's codes, int64 [groups], and the sum of their embeddings, [1, 1, width]."""
    from transformers import DynamicCache

    cache = DynamicCache(config=predictor.config)
    tables = predictor.get_input_embeddings()
    codes, total = [code], embedded
    inputs = torch.cat([hidden, embedded], dim=1)
    for group, head in enumerate(predictor.lm_head):
        out = predictor.model(inputs_embeds=inputs, past_key_values=cache, use_cache=True).last_hidden_state
        codes.append(head(out[:, -1:]).argmax(dim=-1))
        inputs = tables[group](codes[-1])
        total = total + inputs
    return torch.cat(codes, dim=1)[0], total
