"""The parts that applications share: streams equal the library's whole, ranks equal one, prompts keep logical time."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn

from flashrt.apps.shared import causal_dit, recogniser, streaming_vae, talker, vocoder, weights
from flashrt.apps.shared.causal_dit import Ranks, VideoDit
from flashrt.apps.shared.weights import Source
from tests.apps.applications import load_file

conversation = load_file("conversation", "ops")
omni = load_file("omni", "ops")
editor = load_file("background_editor", "ops")
longlive = load_file("longlive", "ops")
worldplay = load_file("worldplay", "ops")


@pytest.fixture(scope="module", autouse=True)
def _one_thread_no_grad() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    with torch.no_grad():
        yield
    torch.set_num_threads(before)


def drawn(*shape: int, seed: int = 1) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


# --- voice ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def code2wav() -> Any:
    config = omni.load_config()
    return vocoder.load_vocoder(Source("omni", config, "cpu"), config.vocoder)


@pytest.mark.parametrize("cut", [[1] * 30, [2] * 15, [7, 23], [29, 1]])
def test_streamed_samples_are_those_of_the_library_s_whole_decoding(code2wav: Any, cut: list[int]) -> None:
    codes = torch.randint(0, 64, (30, 4), generator=torch.Generator().manual_seed(2))
    whole, end = vocoder.vocode(code2wav, codes, code2wav.start)
    memory, parts = code2wav.start, []
    for chunk in codes.split(cut):
        samples, memory = vocoder.vocode(code2wav, chunk, memory)
        assert len(samples) == len(chunk) * code2wav.samples_per_frame
        parts.append(samples)
    assert torch.equal(torch.cat(parts), whole)
    assert memory["position"] == end["position"] == 31
    silence = torch.zeros((1, 4), dtype=torch.int64)
    library = code2wav.model(torch.cat([silence, codes]).T[None])[0, 0]
    first = len(library) - len(whole)
    torch.testing.assert_close(whole, library[first:], rtol=1e-4, atol=1e-5)


def test_the_vocoder_forgets_what_is_beyond_its_window(code2wav: Any) -> None:
    codes = torch.zeros((40, 4), dtype=torch.int64)
    _, memory = vocoder.vocode(code2wav, codes, code2wav.start)
    assert {keys.shape[2] for keys in memory["keys"]} == {24}
    assert len(code2wav.start["keys"][0][0, 0]) == 1, "the start was changed"


def test_the_talker_s_loop_is_the_library_s() -> None:
    """The library's own step, from the same past, makes the same residual codes and the same next input."""
    config = omni.load_config()
    speaker = talker.load_talker(Source("omni", config, "cpu"), config.talker)
    model = speaker.model
    hidden, code = drawn(1, 1, 64), torch.tensor([[5]])
    codes, total = talker._residuals(model.code_predictor, hidden, code, model.get_input_embeddings()(code))
    model.code_predictor.generation_config.do_sample = False
    made = model.prepare_inputs_for_generation(
        code, inputs_embeds=hidden, hidden_states=((hidden,), None), generation_step=0, use_cache=True,
        attention_mask=torch.ones((1, 2)), trailing_text_hidden=torch.zeros((1, 1, 64)),
        tts_pad_embed=torch.zeros((1, 1, 64)), past_key_values=None,
    )  # fmt: skip
    assert torch.equal(made["residual_codes"][0], codes)
    torch.testing.assert_close(made["inputs_embeds"], total, rtol=1e-5, atol=1e-5)


def test_features_are_those_of_the_library_s_extractor() -> None:
    from transformers import WhisperFeatureExtractor

    samples = drawn(16_000) * 0.1
    ours = recogniser.log_mel(samples, recogniser.mel_filters(80))
    library = WhisperFeatureExtractor(feature_size=80, chunk_length=1)
    theirs = library(samples.numpy(), sampling_rate=16_000, return_tensors="pt").input_features[0]
    torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-3)


# --- video ---------------------------------------------------------------------------------------------------


def test_encoding_continues_as_the_library_encodes_at_once() -> None:
    config = editor.load_config()
    model = editor.model
    encoder = model.load_encoder(config, "cpu")
    frames = torch.randint(0, 256, (24, 32, 32, 3), generator=torch.Generator().manual_seed(3), dtype=torch.uint8)
    whole, _ = streaming_vae.encode(encoder, frames, encoder.start_cache)
    cache, parts = encoder.start_cache, []
    for chunk in frames.split([4, 12, 8]):
        latents, cache = streaming_vae.encode(encoder, chunk, cache)
        parts.append(latents)
    assert torch.equal(torch.cat(parts), whole)
    vae = streaming_vae.load_vae(Source("background_editor", config, "cpu"), config.video)
    stream = torch.cat([model.blank_image(config)[None], frames])
    video = stream.permute(3, 0, 1, 2)[None].float() / 127.5 - 1.0
    mean, std = streaming_vae.latent_statistics(vae, "cpu")
    library = (vae.encode(video).latent_dist.mode()[0].transpose(0, 1) - mean) / std
    torch.testing.assert_close(whole, library[1:], rtol=1e-4, atol=1e-4)


def steps_of(ranks: Ranks) -> tuple[torch.Tensor, torch.Size]:
    """Return what four batches' steps make of noise, and the shape of a layer's cached keys."""
    dit: VideoDit = longlive.model.load_dit(longlive.load_config(), "cpu", ranks)
    kv, outputs = dit.start_kv, []
    for number in range(4):
        latents, kv = causal_dit.denoise(dit, drawn(3, 16, 4, 4, seed=number), 0.9, 0.5, drawn(1, 6, 64), kv)
        outputs.append(latents)
    return torch.cat(outputs), kv["keys"][0].shape


def tiles_of(ranks: Ranks) -> torch.Tensor:
    """Return the frames of two batches, decoded in tiles."""
    config, model = worldplay.load_config(), worldplay.model
    decoder = model.load_decoder(config, "cpu")
    cache, frames = model.tile_start(decoder, config, ranks), []
    for number in range(2):
        part, cache = model.decode_tile(decoder, drawn(3, 16, 8, 8, seed=number), cache, ranks, config.pixel_scale)
        frames.append(part)
    return torch.cat(frames)


def _be_one_of_two(rank: int, path: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{path}.rendezvous", rank=rank, world_size=2)
    told = SimpleNamespace(rank=rank, degree=2, group=dist.group.WORLD)
    with torch.no_grad():
        made = {
            "steps": steps_of(Ranks.of(told, longlive.load_config().video)),
            "tiles": tiles_of(Ranks(rank, 2, dist.group.WORLD)),
        }
    torch.save(made, f"{path}.{rank}")
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What two processes make together, as each sees it."""
    path = tmp_path_factory.mktemp("ranks") / "made"
    mp.spawn(_be_one_of_two, args=(str(path),), nprocs=2)
    return [torch.load(f"{path}.{rank}") for rank in range(2)]


@pytest.mark.slow
def test_two_ranks_that_share_tokens_and_heads_compute_what_one_does(two_ranks: list[dict[str, Any]]) -> None:
    one, shape = steps_of(Ranks())
    for made in two_ranks:
        two, share = made["steps"]
        torch.testing.assert_close(two, one, rtol=1e-5, atol=1e-5)
        assert (share[1], share[2]) == (shape[1], shape[2] // 2), "each rank keeps its own heads only"


@pytest.mark.slow
def test_two_tiles_look_like_the_whole_but_for_the_seam(two_ranks: list[dict[str, Any]]) -> None:
    config, model = worldplay.load_config(), worldplay.model
    decoder = model.load_decoder(config, "cpu")
    whole, _ = model.decode(decoder, torch.cat([drawn(3, 16, 8, 8, seed=n) for n in range(2)]), decoder.start_cache)
    tiled, other = (made["tiles"] for made in two_ranks)
    assert torch.equal(tiled, other)
    apart = (tiled.float() - whole.float()).abs().mean(dim=(0, 1, 3))
    assert tiled.shape == whole.shape
    assert apart.mean() < 0.5 * whole.float().std()
    assert apart[:8].mean() < 0.5 * apart[28:36].mean(), "it differs at the seam most"
    assert apart.max() > 0, "perceptual only: were it equal, it could be declared so"


def test_where_a_degree_divides_nothing_every_rank_computes_everything() -> None:
    sizes = longlive.load_config().video
    context = SimpleNamespace(rank=1, degree=3, group=None)
    assert Ranks.of(context, sizes).degree == 1


def test_the_composite_has_the_camera_s_own_pixels_where_the_person_is() -> None:
    model = editor.model
    camera = torch.randint(0, 256, (4, 8, 8, 3), generator=torch.Generator().manual_seed(4), dtype=torch.uint8)
    restyled = 255 - camera
    masks = drawn(4, 8, 8) > 0
    mixed = model.composite(camera.numpy(), restyled, masks)
    assert mixed.dtype == torch.uint8
    assert torch.equal(mixed[masks], camera[masks])
    assert torch.equal(mixed[~masks], restyled[~masks])


# --- logical time --------------------------------------------------------------------------------------------


def test_a_prompt_counts_from_its_batch_whenever_it_is_known_within_its_delay() -> None:
    config, model = longlive.load_config(), longlive.model
    encoder = model.load_text_encoder(config, "cpu")
    early = model.first_hearing(config)["prompts"]
    tokens = torch.cat([early["tokens"][1:], torch.full((1, config.prompt_tokens), 7)])
    late = {"from": torch.cat([early["from"][1:], torch.tensor([4])]), "tokens": tokens}

    def contexts(known_from: int) -> list[torch.Tensor]:
        scene, found = model.first_scene(config), []
        for batch in range(7):
            sample, scene = model.direct(encoder, config, late if batch >= known_from else early, scene)
            found.append(sample["context"])
        return found

    first = contexts(2)
    for known_from in (3, 4):
        assert all(map(torch.equal, contexts(known_from), first))
    assert torch.equal(first[0], first[3])
    assert not torch.equal(first[3], first[4])


def test_an_utterance_is_one_prompt_however_many_batches_it_takes() -> None:
    config, model = longlive.load_config(), longlive.model
    asr = recogniser.load_recogniser(model.source_of(config, "cpu"), config.asr, config.prompt_tokens)
    loud, quiet = drawn(7680) * 0.1, torch.zeros(7680)
    hearing, froms = model.first_hearing(config), []
    for sound in (loud, loud, quiet, quiet, loud, quiet):
        prompts, hearing = model.listen(asr, config, sound, hearing)
        froms.append(int(prompts["from"][-1]))
    assert froms == [0, 0, 2 + config.prompt_delay, 2 + config.prompt_delay, 4, 5 + config.prompt_delay]
    assert len(hearing["speech"]) == 0


class Experts(nn.Module):
    """A part as libraries write them: memory that its constructor leaves as it is."""

    def __init__(self, *, scale: bool) -> None:
        super().__init__()
        self.experts = nn.Parameter(torch.empty(4, 8, 8))
        self.norm = nn.Parameter(torch.ones(8, 1))
        if scale:
            self.scale = nn.Parameter(torch.empty(8))


def test_every_weight_is_drawn_whatever_the_memory_held() -> None:
    with weights.marked_memory():
        part = Experts(scale=False)
    assert part.experts.isnan().all(), "unset memory shows"
    weights.draw_weights(part, 1.0, 3)
    assert 0.2 < float(part.experts.std()) < 0.5
    assert torch.equal(part.norm, torch.ones(8, 1)), "what the library set to one value stays"
    with weights.marked_memory():
        again = Experts(scale=False)
    weights.draw_weights(again, 1.0, 3)
    assert torch.equal(part.experts, again.experts)
    assert not torch.are_deterministic_algorithms_enabled()


def test_a_weight_that_nobody_sets_is_named() -> None:
    with weights.marked_memory():
        part = Experts(scale=True)
    with pytest.raises(AssertionError, match="scale"):
        weights.draw_weights(part, 1.0, 3)
