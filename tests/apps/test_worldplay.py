"""The world model: real architectures, the same bits however it is cut, and alive."""

from __future__ import annotations

import dataclasses
import gc
import importlib.util
import os
import shutil
import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import yaml

import flashrt.apps
from flashrt.apps.shared import streaming_vae
from flashrt.apps.shared.causal_dit import predict_velocity
from flashrt.apps.shared.weights import Source
from flashrt.errors import InputError

APP = Path(flashrt.apps.__path__[0]) / "worldplay"
NUM_BATCHES = 8
SEED = 11


def load_file(name: str) -> ModuleType:
    """Load a file of the application as FlashRT does: from its path, with its folder importable."""
    if str(APP) not in sys.path:
        sys.path.insert(0, str(APP))
    spec = importlib.util.spec_from_file_location(f"_test_worldplay_{name}", APP / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


ops = load_file("ops")
reference = load_file("reference")
inputs = load_file("inputs")
config_module = sys.modules["worldplay_config"]
model: Any = sys.modules["worldplay_model"]


class ListOutput(list[Any]):
    """An output buffer that is a list."""

    write = list.append


class ListIo:
    """The buffers of a system under test, as lists."""

    def __init__(self, batches: list[dict[str, Any]], **config: Any) -> None:
        self.inputs = {"actions": [batch["actions"] for batch in batches]}
        self.outputs = {"frames": ListOutput()}
        self.devices = ["cpu"]
        self.config = config
        self.num_ready = 0

    def ready(self) -> None:
        """Note that the system is ready, before its first output."""
        assert not self.outputs["frames"]
        self.num_ready += 1


def play(batches: list[dict[str, Any]], **config: Any) -> torch.Tensor:
    """Run the reference; frames [batches, 12, 64, 64, 3]."""
    io = ListIo(batches, **config)
    reference.serve(io)
    assert io.num_ready == 1
    return torch.stack(io.outputs["frames"])


def context(**changes: Any) -> SimpleNamespace:
    """What `load` is told."""
    told = {"device": "cpu", "config": {}, "operations": None, "rank": 0, "degree": 1, "group": None, "seed": 0}
    return SimpleNamespace(**{**told, **changes})


@pytest.fixture(scope="module", autouse=True)
def _threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def start_latent(config: Any) -> torch.Tensor:
    return streaming_vae.start_latent(Source("worldplay", config, "cpu"), config)


@pytest.fixture(scope="module")
def config() -> Any:
    return config_module.load_config()


@pytest.fixture(scope="module")
def dit(config: Any) -> Any:
    return model.load_dit(config, "cpu")


@pytest.fixture(scope="module")
def decoder(config: Any) -> Any:
    return model.load_decoder(config, "cpu")


@pytest.fixture(scope="module")
def batches() -> list[dict[str, Any]]:
    return list(inputs.batches(SEED, NUM_BATCHES))


@pytest.fixture(scope="module")
def played(batches: list[dict[str, Any]]) -> torch.Tensor:
    return play(batches)


def same_state(left: Any, right: Any) -> bool:
    """Whether two states hold the same bits."""
    if isinstance(left, torch.Tensor):
        return isinstance(right, torch.Tensor) and torch.equal(left, right)
    if isinstance(left, list):
        return len(left) == len(right) and all(map(same_state, left, right))
    if isinstance(left, dict):
        return left.keys() == right.keys() and all(same_state(left[key], right[key]) for key in left)
    return bool(left == right)


# --- the reference -------------------------------------------------------------------------------------------


def test_every_batch_is_twelve_frames(played: torch.Tensor) -> None:
    assert played.dtype == torch.uint8
    assert tuple(played.shape) == (NUM_BATCHES, 12, 64, 64, 3)


def test_reference_gives_the_same_bits_in_another_process(played: torch.Tensor, tmp_path: Path) -> None:
    script = (
        "import sys, torch, importlib.util\n"
        "spec = importlib.util.spec_from_file_location('_other', sys.argv[1])\n"
        "other = importlib.util.module_from_spec(spec); spec.loader.exec_module(other)\n"
        "batches = list(other.inputs.batches(other.SEED, other.NUM_BATCHES))\n"
        "torch.save(other.play(batches), sys.argv[2])\n"
    )
    target = tmp_path / "frames.pt"
    # More threads on offer must not matter: the configuration says how many are used.
    environment = {**os.environ, "OMP_NUM_THREADS": "2"}
    command = [sys.executable, "-P", "-c", script, __file__, str(target)]
    subprocess.run(command, check=True, timeout=600, env=environment)
    assert torch.equal(torch.load(target), played)


def test_ops_in_sequence_give_the_bits_of_the_reference(batches: list[dict[str, Any]], played: torch.Tensor) -> None:
    loaded = ops.load(context())
    states: dict[str, dict[str, Any]] = {"rng": {"dit.rng": None}, "vae": {"vae.cache": None}}
    kv_states: list[dict[str, Any]] = [{"dit.kv": None} for _ in range(4)]
    for batch, expected in zip(batches, played, strict=True):
        actions = batch["actions"].copy()
        sample = loaded["noise"]({"actions": actions}, states["rng"])["sample"]
        for kv_state in kv_states:
            given = {"latents": sample["latents"].clone(), "level": sample["level"]}
            made = loaded["denoise_step"]({"actions": actions, "sample": sample}, kv_state)
            assert same_state(sample, given), "an input was changed in place"
            sample = made["sample"]
        chunks = made["latents"].split(1)
        frames = torch.cat([loaded["decode"]({"latents": chunk}, states["vae"])["frames"] for chunk in chunks])
        assert np.array_equal(actions, batch["actions"])
        assert torch.equal(frames, expected)


def test_the_program_document_means_the_reference(batches: list[dict[str, Any]], played: torch.Tensor) -> None:
    from flashrt.ir.flattening import flatten
    from flashrt.ir.interpreter import Interpreter
    from flashrt.ir.model import Program

    program = Program.model_validate(yaml.safe_load((APP / "program.yaml").read_text(encoding="utf-8")))
    interpreter = Interpreter(flatten(program), APP)
    paths = [operation.path for operation in interpreter.flat.operations]
    assert paths == ["dit/step[0]", "dit/step[1]", "dit/step[2]", "dit/step[3]", "vae"]
    for batch, expected in zip(batches[:3], played[:3], strict=True):
        assert torch.equal(interpreter.run_batch(batch)["frames"], expected)


def test_a_copied_folder_works(tmp_path: Path) -> None:
    copy = tmp_path / "my game"
    shutil.copytree(APP, copy, ignore=shutil.ignore_patterns("__pycache__"))
    script = (
        "import sys, types, torch\n"
        "sys.path.insert(0, sys.argv[1])\n"
        "import inputs, ops, worldplay_model\n"
        "assert worldplay_model.__file__.startswith(sys.argv[1])\n"
        "load = ops.load(types.SimpleNamespace(device='cpu', config={}, operations={'noise'}))\n"
        "sample = load['noise']({}, {'dit.rng': None})['sample']\n"
        "assert sample['latents'].shape == (3, 16, 8, 8) and set(load) == {'noise'}\n"
        "assert 'diffusers' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-P", "-c", script, str(copy)], check=True, timeout=600, cwd=tmp_path)


# --- the streaming decoder -----------------------------------------------------------------------------------


@pytest.mark.parametrize("cut", [[1, 1, 1], [2, 1], [1, 2]])
def test_chunked_decoding_is_whole_decoding(decoder: Any, cut: list[int]) -> None:
    latents = torch.randn((5, 3, 16, 8, 8), generator=torch.Generator().manual_seed(1))
    whole_cache = chunk_cache = decoder.start_cache
    for batch in latents:
        whole, whole_cache = model.decode(decoder, batch, whole_cache)
        parts = []
        for chunk in batch.split(cut):
            frames, chunk_cache = model.decode(decoder, chunk, chunk_cache)
            assert frames.shape[0] == 4 * chunk.shape[0]
            parts.append(frames)
        assert torch.equal(torch.cat(parts), whole)
        assert same_state(chunk_cache, whole_cache)


def test_decoding_continues_as_the_library_decodes_at_once(config: Any, decoder: Any) -> None:
    """AutoencoderKLWan.decode on the whole world, first image included, gives the frames of the stream."""
    latents = torch.randn((6, 16, 8, 8), generator=torch.Generator().manual_seed(2))
    first, cache = model.decode(decoder, latents[:3], decoder.start_cache)
    second, _ = model.decode(decoder, latents[3:], cache)
    world = torch.cat([start_latent(config), latents]) * decoder.std + decoder.mean
    with torch.no_grad():
        video = decoder.vae.decode(world.transpose(0, 1)[None]).sample[0]
    frames = ((video + 1.0) * 127.5).round().to(torch.uint8).permute(1, 2, 3, 0)
    assert frames.shape[0] == 1 + 24
    difference = (frames[1:].int() - torch.cat([first, second]).int()).abs()
    assert difference.max() <= 1


def test_a_cache_is_left_as_it_is(decoder: Any) -> None:
    before = [part.clone() if isinstance(part, torch.Tensor) else part for part in decoder.start_cache]
    model.decode(decoder, torch.ones((3, 16, 8, 8)), decoder.start_cache)
    assert same_state(decoder.start_cache, before)


# --- the causal transformer ----------------------------------------------------------------------------------


def test_without_a_cache_it_is_the_library_model(config: Any, dit: Any) -> None:
    from diffusers.models.transformers.transformer_wan import WanAttnProcessor

    latents = torch.randn((3, 16, 8, 8), generator=torch.Generator().manual_seed(3))
    tokens = dit.actions(torch.ones((12, 8)))
    ours, _ = predict_velocity(dit.transformer, latents, 500.0, tokens, None, num_past=0)
    stock = model.load_dit(config, "cpu").transformer
    for block in stock.blocks:
        block.attn1.set_processor(WanAttnProcessor())
    with torch.no_grad():
        theirs = stock(latents.transpose(0, 1)[None], torch.tensor([500.0]), tokens).sample[0].transpose(0, 1)
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


def test_cached_chunks_are_block_causal_attention(config: Any, dit: Any) -> None:
    """Chunk by chunk with the cache equals the whole sequence under a block-causal mask."""
    from diffusers.models.transformers.transformer_wan import WanAttnProcessor

    latents = torch.randn((6, 16, 8, 8), generator=torch.Generator().manual_seed(4))
    tokens = dit.actions(torch.ones((12, 8)))
    first, kv = predict_velocity(dit.transformer, latents[:3], 500.0, tokens, None, num_past=0)
    second, _ = predict_velocity(dit.transformer, latents[3:], 500.0, tokens, kv, num_past=3)

    chunk = torch.arange(6 * 64) // (3 * 64)
    mask = chunk[:, None] >= chunk[None, :]

    class Masked(WanAttnProcessor):
        def __call__(self, attn: Any, hidden: Any, *rest: Any) -> Any:
            return super().__call__(attn, hidden, None, mask, rest[-1])

    stock = model.load_dit(config, "cpu").transformer
    for block in stock.blocks:
        block.attn1.set_processor(Masked())
    with torch.no_grad():
        whole = stock(latents.transpose(0, 1)[None], torch.tensor([500.0]), tokens).sample[0].transpose(0, 1)
    torch.testing.assert_close(torch.cat([first, second]), whole, rtol=1e-5, atol=1e-5)


def test_the_window_bounds_the_cache(config: Any, dit: Any) -> None:
    kv = dit.start_kv
    num_frames = [kv["keys"][0].shape[1] // 64]
    for _ in range(5):
        latents = torch.ones((3, 16, 8, 8))
        _, kv = model.denoise_step(dit, latents, 0, torch.zeros((12, 8)), kv)
        num_frames.append(kv["keys"][0].shape[1] // 64)
    assert num_frames == [1, 4, 7, 9, 9, 9]
    stored = [part for parts in kv.values() for part in parts]
    declared = yaml.safe_load((APP / "program.yaml").read_text(encoding="utf-8"))["states"]["dit.kv"]["bytes"]
    assert sum(part.untyped_storage().nbytes() for part in stored) == declared


def test_the_declared_cache_of_the_decoder_is_what_it_holds(decoder: Any) -> None:
    _, cache = model.decode(decoder, torch.ones((3, 16, 8, 8)), decoder.start_cache)
    size = sum(part.untyped_storage().nbytes() for part in cache if isinstance(part, torch.Tensor))
    declared = yaml.safe_load((APP / "program.yaml").read_text(encoding="utf-8"))["states"]["vae.cache"]["bytes"]
    assert size == declared


def test_the_past_matters_to_each_step(dit: Any) -> None:
    latents = torch.randn((3, 16, 8, 8), generator=torch.Generator().manual_seed(5))
    actions = torch.zeros((12, 8))
    other_past = {name: [part.flip(1) for part in parts] for name, parts in dit.start_kv.items()}
    for level in range(4):
        usual, _ = model.denoise_step(dit, latents, level, actions, dit.start_kv)
        other, _ = model.denoise_step(dit, latents, level, actions, other_past)
        assert (usual - other).abs().max() > 1e-3


# --- alive ---------------------------------------------------------------------------------------------------


def test_frames_are_neither_flat_nor_saturated(played: torch.Tensor) -> None:
    pixels = played.float()
    assert pixels.std(dim=(2, 3)).min() > 10
    assert ((played == 0) | (played == 255)).float().mean() < 0.05
    assert (pixels[1:] - pixels[:-1]).abs().mean(dim=(1, 2, 3, 4)).min() > 5


def test_a_changed_action_changes_the_frames(batches: list[dict[str, Any]], played: torch.Tensor) -> None:
    changed = [dict(batch) for batch in batches[:4]]
    changed[1] = {"actions": 1.0 - batches[1]["actions"]}
    frames = play(changed)
    difference = (frames.float() - played[:4].float()).abs()
    assert difference[0].max() == 0
    assert difference[1].max() > 10
    assert difference[1].mean() > 1
    assert difference[2].mean() > 0.5
    one_key = [dict(batch) for batch in batches[:2]]
    one_key[1] = {"actions": batches[1]["actions"].copy()}
    one_key[1]["actions"][0, 0] = 1.0 - one_key[1]["actions"][0, 0]
    assert (play(one_key)[1] != played[1]).any()


def test_the_seed_changes_the_world(batches: list[dict[str, Any]], played: torch.Tensor) -> None:
    assert (play(batches[:1], seed=21)[0].float() - played[0].float()).abs().mean() > 5


def test_an_encoded_image_starts_another_world(
    config: Any, batches: list[dict[str, Any]], played: torch.Tensor, tmp_path: Path
) -> None:
    from safetensors.torch import save_file

    image = torch.arange(64).view(64, 1, 1).expand(64, 64, 3).mul(4).to(torch.uint8)
    latent = model.encode_start(config, image)
    assert tuple(latent.shape) == (1, 16, 8, 8)
    save_file({"latent": latent.contiguous()}, tmp_path / "start.safetensors")
    frames = play(batches[:1], start_latent=str(tmp_path / "start.safetensors"))
    assert (frames[0].float() - played[0].float()).abs().mean() > 1


def test_inputs_are_seeded_distinct_and_held() -> None:
    once = [batch["actions"] for batch in inputs.batches(5, 60)]
    again = [batch["actions"] for batch in inputs.batches(5, 60)]
    assert all(map(np.array_equal, once, again))
    assert len({actions.tobytes() for actions in once}) == 60
    assert {batch.shape for batch in once} == {(12, 8)}
    assert {batch.dtype for batch in once} == {np.dtype("float32")}
    rows = np.concatenate(once)
    assert rows.any(axis=0).all(), "every key is pressed at some time"
    assert not (rows[:, 0] * rows[:, 2]).any(), "W and S are never held together"
    assert (rows[1:] != rows[:-1]).any(axis=1).mean() < 0.6
    assert not np.array_equal(rows[:12], next(inputs.batches(6, 1))["actions"])


# --- loading and configuration -------------------------------------------------------------------------------


def num_alive(kind: type) -> int:
    """How many objects of a class exist in this process."""
    gc.collect()
    return sum(issubclass(type(thing), kind) for thing in gc.get_objects())


def test_only_the_wanted_weights_are_loaded() -> None:
    from diffusers.models.autoencoders.autoencoder_kl_wan import AutoencoderKLWan
    from diffusers.models.transformers.transformer_wan import WanTransformer3DModel

    kinds = (WanTransformer3DModel, AutoencoderKLWan)
    before = [num_alive(kind) for kind in kinds]
    added = {}
    for names in ({"decode"}, {"denoise_step", "noise"}, {"noise"}):
        loaded = ops.load(context(operations=frozenset(names)))
        assert set(loaded) == names
        added[min(names)] = [num_alive(kind) - count for kind, count in zip(kinds, before, strict=True)]
        del loaded
    assert added == {"decode": [0, 1], "denoise_step": [1, 0], "noise": [0, 0]}


def test_loading_leaves_the_global_generator_alone() -> None:
    torch.manual_seed(0)
    expected = torch.rand(1)
    torch.manual_seed(0)
    ops.load(context())
    assert torch.equal(torch.rand(1), expected)


@pytest.mark.parametrize("operations", [None, frozenset({"decode"}), frozenset({"denoise_step"})])
def test_the_full_configuration_names_its_missing_checkpoint(operations: Any, tmp_path: Path) -> None:
    options = {"config": "full", "checkpoint_dir": str(tmp_path / "absent")}
    with pytest.raises(InputError, match=r"checkpoint_dir.*absent.*nothing is downloaded"):
        ops.load(context(config=options, operations=operations))


def test_a_checkpoint_folder_is_loaded(
    config: Any, batches: list[dict[str, Any]], played: torch.Tensor, tmp_path: Path
) -> None:
    from diffusers.models.autoencoders.autoencoder_kl_wan import AutoencoderKLWan
    from safetensors.torch import save_file

    dit = model.load_dit(config, "cpu")
    dit.transformer.save_pretrained(tmp_path / "transformer")
    vae = streaming_vae.load_vae(Source("worldplay", config, "cpu"), config)
    assert isinstance(vae, AutoencoderKLWan)
    vae.save_pretrained(tmp_path / "vae")
    with pytest.raises(InputError, match=r"action_embedding\.safetensors"):
        play(batches[:1], checkpoint_dir=str(tmp_path))
    save_file(dit.actions.state_dict(), tmp_path / "action_embedding.safetensors")
    save_file({"latent": start_latent(config)}, tmp_path / "start_latent.safetensors")
    assert torch.equal(play(batches[:2], checkpoint_dir=str(tmp_path), seed=config.seed), played[:2])


def test_the_full_configuration_has_the_real_sizes() -> None:
    full = config_module.load_config({"config": "full"})
    assert (full.transformer["num_layers"], full.transformer["ffn_dim"], full.vae["base_dim"]) == (30, 8960, 96)
    assert full.frames_per_batch == 12


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"config": "tinny"}, r"did you mean 'tiny'"),
        ({"sead": 1}, r"'sead' \(did you mean 'seed'\?\)"),
        ({"window_frames": 3}, "window_frames"),
        ({"threads": 0, "num_steps": 1.5}, r"threads[\s\S]*num_steps"),
        ({"gain": None}, "gain"),
    ],
)
def test_a_wrong_option_is_named(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        config_module.load_config(options)


def test_overrides_are_merged(config: Any) -> None:
    changed = config_module.load_config({"transformer": {"num_layers": 2}})
    assert changed.transformer == {**config.transformer, "num_layers": 2}
    assert dataclasses.replace(changed, transformer=config.transformer) == config


def test_actions_of_another_shape_are_refused(dit: Any) -> None:
    read_only = np.zeros((12, 8), np.float32)
    read_only.flags.writeable = False
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model.check_actions(dit.config, read_only, "cpu")
    with pytest.raises(InputError, match=r"actions.*\[12, 8\].*\[11, 8\]"):
        model.denoise_step(dit, torch.zeros((3, 16, 8, 8)), 0, np.zeros((11, 8), np.float32), dit.start_kv)


# --- the documents -------------------------------------------------------------------------------------------


def test_the_profile_holds_the_published_figures() -> None:
    profile = yaml.safe_load((APP / "profiles" / "paper.yaml").read_text(encoding="utf-8"))
    dit_ms = {"1": 387.1, "2": 303.8, "4": 270.88}
    vae_ms = {"1": 201.14, "2": 166.79, "4": 133.16}
    assert profile["operations"]["vae"] == vae_ms
    assert {degree: 4 * ms for degree, ms in profile["operations"]["dit/step[*]"].items()} == pytest.approx(dit_ms)
    assert (profile["frames_per_batch"], profile["provenance"], profile["device"]) == (12, "inferred", "emulated")
