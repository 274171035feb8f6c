"""What an operation keeps in memory: every tensor and array that it reaches, once, and nothing of the rest."""

from __future__ import annotations

import importlib.util
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

from flashrt.ir import Context
from flashrt.runtime.holdings import find_storages, track_peak
from flashrt.runtime.measuring import _watch_files, _within

KB = 1 << 10
OPS = """
import numpy as np

import other

TABLE = np.zeros(1 << 10, np.uint8)
UNUSED = np.zeros(1 << 20, np.uint8)


class Model:
    def __init__(self):
        self.layers = [np.zeros(2 << 10, np.uint8)]

    def call(self, inputs, state):
        return self.layers[0]


def plain(inputs, state):
    return [TABLE for _ in range(2)], other.MORE
"""


def load(folder: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    (folder / "other.py").write_text("import numpy as np\nMORE = np.zeros(4 << 10, np.uint8)\nLESS = np.ones(9)\n")
    (folder / "ops.py").write_text(OPS)
    monkeypatch.syspath_prepend(str(folder))
    spec = importlib.util.spec_from_file_location("holdings_ops", folder / "ops.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def held(folder: Path, *roots: Any) -> int:
    return sum(find_storages(roots, folder).values())


def test_globals_count_where_a_function_of_the_program_names_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ops = load(tmp_path, monkeypatch)
    assert held(tmp_path, ops.plain) == 5 * KB
    assert held(tmp_path, partial(ops.plain, state={})) == 5 * KB
    # Of functions from elsewhere, only what they hold themselves.
    assert held(tmp_path / "elsewhere", ops.plain) == 0
    assert held(tmp_path, ops.Model().call) == 2 * KB
    assert held(tmp_path, ops.Model) == 0


def test_storage_counts_once_whole_and_wherever_it_is_held(tmp_path: Path) -> None:
    tensor = torch.zeros(KB, dtype=torch.uint8)
    array = np.zeros((4, KB), np.uint8)
    assert held(tmp_path, {"a": tensor, "b": [tensor[:10], tensor.view(2, -1)]}) == KB
    # A view keeps all of what it looks at.
    assert held(tmp_path, array[1], array[2:3]) == 4 * KB
    layer = torch.nn.Linear(8, 16, bias=False)
    layer.weight.grad = torch.zeros(16, 8)
    assert held(tmp_path, lambda: layer) == 2 * 16 * 8 * 4
    assert held(tmp_path, np.array([array, None], dtype=object)[0]) == 4 * KB
    assert held(tmp_path, b"x" * 4096, b"short", 3, None, "text" * 4096) == 4096
    assert held(tmp_path, torch.zeros(8, device="meta")) == 0


def test_what_operations_were_loaded_with_is_not_theirs(tmp_path: Path) -> None:
    big = torch.zeros(KB)
    context = Context(loan=lambda port, shape, dtype: big)

    def op() -> Any:
        return context

    assert held(tmp_path, op) == 0


@pytest.mark.parametrize("make", [lambda n: torch.ones(n, dtype=torch.uint8), lambda n: np.ones(n, np.uint8)])
def test_the_peak_is_what_was_in_use_at_once_beyond_the_beginning(make: Any) -> None:
    size = 1 << 20
    before = make(8 * size)
    with track_peak("cpu") as peak:
        for _ in range(3):
            kept = make(size)
            kept = kept + kept
        del kept
    assert 2 * size <= peak.num_bytes < 4 * size
    assert before.nbytes == 8 * size


def test_files_that_are_read_are_the_program_s_and_those_that_it_writes_are_not(tmp_path: Path) -> None:
    folder, outside = tmp_path / "program", tmp_path / "outside"
    for place in (folder / "data", folder / ".venv", outside):
        place.mkdir(parents=True)
    for path in (folder / "data" / "table.json", folder / ".venv" / "x.json", outside / "x.json", outside / "w.pt"):
        path.write_text("1")
    (folder / "linked.json").symlink_to(outside / "x.json")
    found = _watch_files(folder)
    for path in (*folder.rglob("*.json"), *outside.iterdir()):
        path.read_text()
    (folder / "log").write_text("1")
    (folder / "log").read_text()
    assert found == {"data/table.json", "linked.json", str(outside / "w.pt")}
    with (folder / "data" / "table.json").open("a") as file:
        file.write("2")
    assert found == {"linked.json", str(outside / "w.pt")}
    assert _within(str(folder / "absent"), folder) == set()
