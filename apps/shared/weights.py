"""Loading parts of an application: from a checkpoint folder, or with random weights drawn from the seed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from flashrt.apps.shared.settings import BaseConfig
from flashrt.errors import Finding, InputError


def torch_device(name: str) -> str:
    """Return torch's name of a FlashRT device: ROCm devices are `cuda` to torch, all others compute on the CPU."""
    kind, _, index = name.partition(":")
    return f"cuda:{index or 0}" if kind in ("cuda", "rocm") else "cpu"


def prepare_device(config: BaseConfig, device: str) -> None:
    """Fix what changes bits and is global to the process: the number of threads, and deterministic kernels."""
    if device == "cpu":
        torch.set_num_threads(config.threads)
    else:
        torch.backends.cudnn.benchmark = False


@dataclass(frozen=True)
class Source:
    """Where the parts of one application come from, and where they go."""

    app: str
    config: BaseConfig
    device: str

    @property
    def dtype(self) -> torch.dtype:
        """Element type of the models."""
        dtype: torch.dtype = getattr(torch, self.config.dtype)
        return dtype

    def part(self, *names: str) -> Path | None:
        """Return the checkpoint folder, or None where weights are drawn.

        Raises
        ------
        InputError
            The folder, or one of the files and folders `names` in it, is not there.
        """
        folder = self.config.checkpoint_dir
        if folder is None:
            return None
        missing = [folder] if not folder.is_dir() else [folder / name for name in names if not (folder / name).exists()]
        if missing:
            raise InputError(
                Finding(
                    f"{self.app} configuration '{self.config.name}', key 'checkpoint_dir'",
                    f"a local folder with the parts that the README of '{self.app}' lists",
                    f"no '{path}'",
                    "put the trained parts there, name another folder in the option 'checkpoint_dir', "
                    'or use the option {"config": "tiny"} for seeded weights; nothing is downloaded',
                    rule="missing-checkpoint",
                )
                for path in missing
            )
        return folder

    def load(
        self, part: str, kind: Any, build: Callable[[], Any], seed: int, *, keep_float32: bool = False,
        louder: Mapping[str, float] | None = None,
    ) -> Any:  # fmt: skip
        """Return a model of a library, frozen, on the device.

        Parameters
        ----------
        part
            Its folder below the checkpoint's, as `save_pretrained` writes it.
        kind
            Its class.
        build
            Makes it where there is no checkpoint; its weights are then drawn.
        seed
            Added to the configuration's.
        keep_float32
            Whether its element type is float32 whatever the configuration says.
        louder
            Part of a parameter's name -> by how much more than `gain` it is drawn: what has to be heard beside
            position tables, which training leaves as loud as they are.
        """
        folder = self.part(part)
        dtype = torch.float32 if keep_float32 else self.dtype
        with untouched_global_random():
            if folder is not None:
                model = kind.from_pretrained(folder / part, torch_dtype=dtype, local_files_only=True)
            else:
                with marked_memory():
                    model = build()
                draw_weights(model, self.config.gain or 1.0, self.config.seed + seed)
                for name, parameter in model.named_parameters():
                    factor = next((factor for pattern, factor in (louder or {}).items() if pattern in name), None)
                    if factor is not None:
                        parameter.data.mul_(factor)
                if dtype != torch.float32:
                    model.to(dtype)
        return model.eval().requires_grad_(False).to(self.device)

    def load_layers(self, file: str, build: Callable[[], nn.Module], seed: int, loudness: float = 1.0) -> Any:
        """Return layers of ours with the weights of a safetensors file of the checkpoint, or drawn."""
        folder = self.part(file)
        with untouched_global_random(), marked_memory():
            layers = build()
        if folder is not None:
            layers.load_state_dict(read_tensors(folder / file))
        else:
            draw_weights(layers, (self.config.gain or 1.0) * loudness, self.config.seed + seed)
        return layers.eval().requires_grad_(False).to(self.device, self.dtype)


def read_tensors(path: Path) -> dict[str, Tensor]:
    """Return the tensors of a safetensors file by name."""
    from safetensors.torch import load_file

    return load_file(path)


def draw_weights(module: nn.Module, gain: float, seed: int) -> None:
    """Draw the weights of a module that was made in `marked_memory`: normal, by fan-in, times `gain`; biases zero.

    The libraries' own initialisation leaves gates and outputs near zero: a dead model would equal any other. Some
    parameters it leaves to whatever the memory held.
    """
    generator = torch.Generator().manual_seed(seed)
    drawn: set[int] = set()
    for child in module.modules():
        weight = getattr(child, "weight", None)
        if isinstance(child, nn.Linear | nn.Conv1d | nn.Conv2d | nn.Conv3d):
            std = gain / child.weight[0].numel() ** 0.5
        elif isinstance(child, nn.ConvTranspose1d | nn.ConvTranspose2d):
            std = gain / (child.weight[:, 0].numel() / child.stride[0]) ** 0.5
        elif isinstance(child, nn.Embedding):
            std = 1.0
        else:
            continue
        nn.init.normal_(child.weight, std=std, generator=generator)
        drawn.add(id(weight))
        if getattr(child, "bias", None) is not None:
            nn.init.zeros_(child.bias)
    for name, parameter in module.named_parameters():
        if name.endswith(("scale_shift_table", "position")):
            nn.init.normal_(parameter, std=gain, generator=generator)
        elif name.endswith("layer_scale.scale") or (name.endswith(".gamma") and parameter.ndim == 1):
            # Residual branches begin training at a hundredth or a millionth: nothing would be heard of them.
            nn.init.constant_(parameter, gain)
        elif parameter.ndim >= 2 and id(parameter) not in drawn and not _is_constant(parameter):
            # Routers, experts (one tensor [expert, out, in]) and tables; scales of norms are all alike and stay.
            nn.init.normal_(parameter, std=gain / parameter.shape[-1] ** 0.5, generator=generator)
    held = [*module.named_parameters(), *module.named_buffers()]
    unset = [name for name, value in held if value.is_floating_point() and bool(value.isnan().any())]
    assert not unset, f"nobody set {', '.join(unset)}"


def _is_constant(parameter: Tensor) -> bool:
    """Whether the library gave all elements one value; memory that nobody set is not a number."""
    return bool((parameter == parameter.reshape(-1)[0]).all())


@contextmanager
def marked_memory() -> Iterator[None]:
    """Make new tensors not-a-number until they are set: what a constructor leaves unset then shows."""
    before, warned = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before, warn_only=warned)


@contextmanager
def untouched_global_random() -> Iterator[None]:
    """Leave torch's global generator as it was: constructors of modules draw from it.

    Meanwhile it has one seed: what a constructor drew and nobody draws again is then the same in every process.
    """
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0)
        yield
