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
    """The loaded talker and what says that there is no more text."""

    device: str
    model: Any
    pad: Tensor
    """[1, 1, width]: what a frame hears when the text is used up."""
    bos: Tensor
    eos: Tensor

    @property
    def num_groups(self) -> int:
        """Codes of one frame."""
        return int(self.model.config.num_code_groups)


def load_talker(source: Source, sizes: Mapping[str, Any], special: Tensor, seed: int = 20) -> Talker:
    """Load `Qwen3OmniMoeTalkerForConditionalGeneration`.

    Parameters
    ----------
    sizes
        Arguments of `Qwen3OmniMoeTalkerConfig`.
    special
        The text model's embeddings of "speech begins", "speech ends" and "no more text", [1, 3, text width].

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
    bos, eos, pad = model.text_projection(special.to(source.device, model.dtype)).chunk(3, dim=1)
    return Talker(source.device, model, pad, bos, eos)


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


def prompt_of(talker: Talker, heard: Tensor, text: Tensor) -> tuple[Tensor, Tensor]:
    """Return what the talker reads at once, and what it hears frame by frame.

    Parameters
    ----------
    heard
        What the user said, in the talker's width: [1, tokens, width].
    text
        What is to be spoken: [1, tokens, text width].

    Returns
    -------
    Prompt [1, heard + 10, width] and trailing text [1, tokens, width], "speech ends" last.
    """
    model, config = talker.model, talker.model.config
    spoken = model.text_projection(text.to(model.dtype))
    control = torch.tensor(
        [[config.codec_nothink_id, config.codec_think_bos_id, config.codec_think_eos_id, config.codec_pad_id,
          config.codec_bos_id]], device=talker.device,
    )  # fmt: skip
    texts = torch.cat([talker.pad.expand(-1, 3, -1), talker.bos, spoken[:, :1]], dim=1)
    prompt = texts + model.get_input_embeddings()(control)
    return torch.cat([heard.to(model.dtype), prompt], dim=1), torch.cat([spoken[:, 1:], talker.eos], dim=1)


def speak(
    talker: Talker, prompt: Tensor, trailing: Tensor, num_frames: int, generator: torch.Generator
) -> Iterator[Tensor]:
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
    embeds = prompt
    for frame in range(num_frames):
        positions = torch.arange(cache.get_seq_length(), cache.get_seq_length() + embeds.shape[1], device=talker.device)
        hidden = model.model(
            inputs_embeds=embeds, position_ids=positions.expand(3, 1, -1), past_key_values=cache, use_cache=True
        ).last_hidden_state[:, -1:]
        code = _draw(model.codec_head(hidden)[0, -1], generator).to(talker.device).view(1, 1)
        codes, codec = _residuals(model.code_predictor, hidden, code, table(code))
        yield codes.cpu()
        text = trailing[:, frame : frame + 1] if frame < trailing.shape[1] else talker.pad
        embeds = codec + text


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
