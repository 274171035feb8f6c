"""The thinker of Qwen3-Omni, and how its answer reaches the talker.

The loops are those of the library's `generate`, written out so that parts can be placed apart; all functions are pure.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from omni_config import OmniConfig  # type: ignore[import-not-found]
from torch import Tensor

from flashrt.apps.shared import talker
from flashrt.apps.shared.recogniser import LOUDER, log_mel, mel_filters
from flashrt.apps.shared.talker import Talker
from flashrt.apps.shared.weights import Source

LOUDER_SIGHT = {"visual.patch_embed": 4.0, "visual.merger": 3.0, "visual.deepstack": 3.0}
"""Random weights alone: a picture has to be seen beside the encoder's position table."""

Thoughts = dict[str, Tensor]
"""What the thinker tells the talker.

``embeds`` and ``hidden`` float32 [prompt + reply, width]: of every token, its embedding and what the accepted layer
made of it; ``media`` bool [prompt + reply]: which tokens are sound or picture; ``special`` float32 [3, width].
"""


@dataclass(frozen=True)
class Thinker:
    """The loaded thinker."""

    config: OmniConfig
    device: str
    model: Any
    filters: Tensor
    """Mel filters of the features of sound."""


def source_of(config: OmniConfig, device: str) -> Source:
    """Return where the parts come from."""
    return Source("omni", config, device)


def load_thinker(config: OmniConfig, device: str) -> Thinker:
    """Load `Qwen3OmniMoeThinkerForConditionalGeneration`."""
    from transformers.models.qwen3_omni_moe.configuration_qwen3_omni_moe import Qwen3OmniMoeThinkerConfig
    from transformers.models.qwen3_omni_moe.modeling_qwen3_omni_moe import Qwen3OmniMoeThinkerForConditionalGeneration

    kind = Qwen3OmniMoeThinkerForConditionalGeneration

    def build() -> Any:
        sizes = Qwen3OmniMoeThinkerConfig(**config.thinker)
        # The library's configuration drops it, its positions want it.
        sizes.vision_start_token_id = config.thinker["vision_start_token_id"]
        return kind(sizes)

    model = source_of(config, device).load("thinker", kind, build, 10, louder={**LOUDER, **LOUDER_SIGHT})
    return Thinker(config, device, model, mel_filters(int(model.config.audio_config.num_mel_bins)).to(device))


def patches_of(image: Tensor, patch: int, merge: int, repeat: int) -> tuple[Tensor, Tensor]:
    """Cut a picture into patches in the order in which the vision encoder merges them.

    Parameters
    ----------
    image
        uint8 [height, width, 3]; sides that are multiples of patch * merge.
    patch, merge, repeat
        Pixels of a patch's side; patches that become one token, along a side; frames that a still picture stands for.

    Returns
    -------
    float32 [patches, 3 * repeat * patch * patch], and the grid int64 [1, 3]: (1, rows, columns).
    """
    pixels = (image.permute(2, 0, 1).float() / 127.5 - 1.0)[None].expand(repeat, -1, -1, -1)
    rows, columns = image.shape[0] // patch, image.shape[1] // patch
    cut = pixels.reshape(repeat, 3, rows // merge, merge, patch, columns // merge, merge, patch)
    flat = cut.permute(2, 5, 3, 6, 1, 0, 4, 7).reshape(rows * columns, -1)
    return flat, torch.tensor([[1, rows, columns]])


def think(thinker: Thinker, text: Any, audio: Any, image: Any) -> Thoughts:
    """Read a request and write an answer of `reply_tokens` tokens, greedily.

    Parameters
    ----------
    text
        int64 [tokens].
    audio
        float32 [samples] at 16 kHz.
    image
        uint8 [height, width, 3].
    """
    from transformers import DynamicCache

    model, config, device = thinker.model, thinker.config, thinker.device
    sizes = model.config
    sound = log_mel(torch.as_tensor(audio).to(device, torch.float32), thinker.filters)
    vision = sizes.vision_config
    merge = int(vision.spatial_merge_size)
    patches, grid = patches_of(torch.as_tensor(image), int(vision.patch_size), merge, int(vision.temporal_patch_size))
    tokens = _request(config, torch.as_tensor(text), _sound_tokens(sound.shape[1]), patches.shape[0] // merge**2)
    tokens = tokens[None].to(device)
    cache = DynamicCache(config=sizes.text_config)
    out = model(
        input_ids=tokens, input_features=sound[None].to(model.dtype), pixel_values=patches.to(device, model.dtype),
        feature_attention_mask=torch.ones((1, sound.shape[1]), dtype=torch.long, device=device),
        image_grid_thw=grid.to(device), attention_mask=torch.ones_like(tokens), past_key_values=cache, use_cache=True,
        output_hidden_states=True,
    )  # fmt: skip
    layer = int(config.talker["accept_hidden_layer"])
    embeds, hidden = [out.hidden_states[0]], [out.hidden_states[layer]]
    written: list[int] = []
    while len(written) < config.reply_tokens:
        written.append(int(out.logits[0, -1].argmax()))
        last = torch.tensor([written[-1:]], device=device)
        mask = torch.ones((1, cache.get_seq_length() + 1), dtype=torch.long, device=device)
        position = (mask.sum() - 1 + model.model.rope_deltas.sum()).view(1, 1, 1).expand(3, 1, 1)
        out = model(
            input_ids=last, position_ids=position, past_key_values=cache, use_cache=True, output_hidden_states=True
        )
        embeds.append(out.hidden_states[0])
        hidden.append(out.hidden_states[layer])
    media = (tokens[0] == sizes.audio_token_id) | (tokens[0] == sizes.image_token_id)
    marks = config.markers
    special = torch.tensor([marks["speech_begins"], marks["speech_ends"], marks["no_more_text"]], device=device)
    return {
        "embeds": torch.cat(embeds, dim=1)[0].float(),
        "hidden": torch.cat(hidden, dim=1)[0].float(),
        "media": torch.cat([media.cpu(), torch.zeros(config.reply_tokens, dtype=torch.bool)]),
        "special": model.get_input_embeddings()(special).float(),
    }


def _sound_tokens(num_frames: int) -> int:
    from transformers.models.qwen3_omni_moe.modeling_qwen3_omni_moe import _get_feat_extract_output_lengths

    return int(_get_feat_extract_output_lengths(torch.tensor(num_frames)))


def _request(config: OmniConfig, text: Tensor, num_sound: int, num_picture: int) -> Tensor:
    """Return a request's tokens: the user's text, sound and picture between their marks, then the assistant's turn."""
    sizes, marks = config.thinker, config.markers
    return torch.cat(
        [
            torch.tensor([marks["user"]]), text, torch.tensor([sizes["audio_start_token_id"]]),
            torch.full((num_sound,), sizes["audio_token_id"]), torch.tensor([marks["audio_end"]]),
            torch.tensor([sizes["vision_start_token_id"]]), torch.full((num_picture,), sizes["image_token_id"]),
            torch.tensor([marks["vision_end"], marks["assistant"]]),
        ]
    )  # fmt: skip


def load_talker(config: OmniConfig, device: str) -> Talker:
    """Load the talker."""
    return talker.load_talker(source_of(config, device), config.talker)


def first_voice_state(config: OmniConfig) -> Tensor:
    """Return the generator state from which the first answer draws its sound."""
    return torch.Generator().manual_seed(config.seed + 23).get_state()


def speak(speaker: Talker, config: OmniConfig, thoughts: Thoughts, generator: torch.Generator) -> Iterator[Tensor]:
    """Yield the codes of an answer chunk by chunk, int64 [frames, groups], each as soon as it is made."""
    model = speaker.model
    embeds, hidden = (thoughts[name].to(speaker.device, model.dtype)[None] for name in ("embeds", "hidden"))
    prompt = embeds.shape[1] - config.reply_tokens
    media = thoughts["media"][:prompt].to(speaker.device)[None, :, None]
    heard = torch.where(media, model.hidden_projection(hidden[:, :prompt]), model.text_projection(embeds[:, :prompt]))
    script = talker.script_of(speaker, heard, embeds[:, prompt:], thoughts["special"][None])
    size = config.codec_frames_per_chunk
    frames = talker.speak(speaker, script, config.num_chunks * size, generator)
    for first in frames:
        yield torch.stack([first, *(next(frames) for _ in range(size - 1))])
