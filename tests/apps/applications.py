"""Running shipped applications in this process and in others, at a size that tests can afford."""

from __future__ import annotations

import importlib.util
import multiprocessing
import shutil
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import cache
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
import yaml

import flashrt.apps
from flashrt.ir.building import build
from flashrt.ir.interpreter import Interpreter
from flashrt.ir.ops import Context

ROOT = Path(flashrt.apps.__path__[0])
APPS = ("background_editor", "conversation", "longlive", "omni")
"""WorldPlay has tests of its own."""
NUM_BATCHES = 12
NUM_BLOCKING = 3
SEED = 7
NUM_CHUNKS = {"conversation": (24, 3), "omni": (12, 3)}
"""Chunks of a shipped answer, and of one here."""


def options(app: str) -> dict[str, Any]:
    """Return options that keep an application small."""
    return {"num_chunks": NUM_CHUNKS[app][1]} if app in NUM_CHUNKS else {}


def load_file(app: str, name: str) -> ModuleType:
    """Load a file of an application as FlashRT does: from its path, with its folder importable."""
    folder = ROOT / app
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))
    spec = importlib.util.spec_from_file_location(f"_test_{app}_{name}", folder / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def program(app: str, *, blocking: bool = False) -> dict[str, Any]:
    """Return an application's program with fewer chunks; `blocking`: with no edge that streams."""
    document: dict[str, Any] = yaml.safe_load((ROOT / app / "program.yaml").read_text(encoding="utf-8"))
    shipped, wanted = NUM_CHUNKS.get(app, (0, 0))
    for graph in document["graphs"].values():
        for edge in graph["edges"]:
            if edge["mode"] == "streaming" and blocking:
                edge["mode"] = "blocking"
                del edge["chunks"]
            elif edge.get("chunks") == shipped:
                edge["chunks"] = wanted
    return document


def copy(app: str, folder: Path, deployment: str) -> None:
    """Copy an application with fewer chunks, and one of its deployments with the options of `options`."""
    shutil.copytree(ROOT / app, folder, ignore=shutil.ignore_patterns("__pycache__"))
    (folder / "program.yaml").write_text(yaml.safe_dump(program(app), sort_keys=False))
    path = folder / "deployments" / deployment
    document = yaml.safe_load(path.read_text(encoding="utf-8"))
    path.write_text(yaml.safe_dump({**document, "config": options(app)}, sort_keys=False))


def context(app: str, **changes: Any) -> SimpleNamespace:
    """What `load` is told."""
    told = {"device": "cpu", "config": options(app), "operations": None, "rank": 0, "degree": 1, "group": None}
    return SimpleNamespace(**{**told, **changes})


@cache
def items(app: str) -> Sequence[Mapping[str, Any]]:
    """Return the batches that all tests play."""
    return list(load_file(app, "inputs").batches(SEED, NUM_BATCHES))


def play(app: str, batches: Sequence[Mapping[str, Any]], **config: Any) -> list[dict[str, torch.Tensor]]:
    """Run the reference; return each batch's outputs."""
    written: dict[str, list[Any]] = {}
    ready: list[bool] = []

    def buffer(name: str) -> SimpleNamespace:
        return SimpleNamespace(write=written.setdefault(name, []).append)

    io = SimpleNamespace(
        inputs={name: [batch[name] for batch in batches] for name in batches[0]},
        outputs={name: buffer(name) for name in program(app)["graphs"]["app"]["outputs"]},
        devices=["cpu"], config={**options(app), **config}, ready=lambda: ready.append(not any(written.values())),
    )  # fmt: skip
    load_file(app, "reference").serve(io)
    assert ready == [True]
    return [dict(zip(written, values, strict=True)) for values in zip(*written.values(), strict=True)]


@cache
def played(app: str) -> Sequence[Mapping[str, torch.Tensor]]:
    """Return what the reference makes of all batches."""
    return play(app, items(app))


def interpret(app: str, batches: Sequence[Mapping[str, Any]], *, blocking: bool = False) -> list[dict[str, Any]]:
    """Run the program document; return each batch's outputs."""
    flat = build(program(app, blocking=blocking), ROOT / app).flat
    interpreter = Interpreter(flat, ROOT / app, Context(config=options(app)))
    return [dict(outputs) for outputs in interpreter.run(batches)]


def _interpreted(app: str) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    torch.set_num_threads(1)
    found = interpret(app, items(app)), interpret(app, items(app)[:NUM_BLOCKING], blocking=True)
    streamed, whole = (
        [{name: torch.as_tensor(value).numpy() for name, value in batch.items()} for batch in batches]
        for batches in found
    )
    return streamed, whole


@cache
def interpret_apart(app: str) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Return what the interpreter makes of an application in a process of its own, as FlashRT interprets.

    All batches as the program has it, then `NUM_BLOCKING` with no edge that streams.
    """
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        return pool.submit(_interpreted, app).result(timeout=800)
