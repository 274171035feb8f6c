"""Flattening, hazards, streams and the interpreter: what a program means."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flashrt.errors import InputError
from flashrt.ir import (
    build,
    find_dependencies,
    find_operations,
    interpret,
    reduce_dependencies,
    summarize,
    to_mermaid,
    to_svg,
)
from flashrt.ir.values import join, length, split

from .documents import WORLD_OPS, edge, flat_graph, world


def write_ops(folder: Path, text: str = WORLD_OPS) -> Path:
    (folder / "ops.py").write_text(text)
    return folder


def actions(batch: int) -> dict[str, Any]:
    return {"actions": np.full((12, 8), batch, np.float32)}


def expected_frames(num_batches: int) -> np.ndarray:
    """Compute the world program by hand."""
    cache, found = 0, []
    for batch in range(num_batches):
        latents = np.full((3, 2), batch, np.float32)
        for _ in range(4):
            latents = latents + np.float32(96 * batch) + np.float32(batch)
        offsets = cache + np.arange(3, dtype=np.float32)
        cache += 3
        found.append(np.repeat(latents + offsets[:, None], 4, axis=0))
    return np.concatenate(found)


def test_the_interpreter_computes_what_the_document_says(tmp_path: Path) -> None:
    built = build(world(), write_ops(tmp_path))
    outputs, notes = interpret(built.flat, built.folder, [actions(batch) for batch in range(5)])
    assert notes == []
    assert np.array_equal(np.concatenate([item["frames"] for item in outputs]), expected_frames(5))


def test_operations_have_the_paths_of_the_interface(tmp_path: Path) -> None:
    flat = build(world(), write_ops(tmp_path)).flat
    assert [operation.path for operation in flat.operations] == [*(f"dit/step[{n}]" for n in range(4)), "vae"]
    assert flat.operations[2].template == "dit/step[*]"
    assert flat.state_instances == ("dit.kv[0]", "dit.kv[1]", "dit.kv[2]", "dit.kv[3]", "rng", "vae.cache")
    steps = [f"dit/step[{n}]" for n in range(4)]
    for pattern in ("dit", "dit/*", "dit/step", "dit/step[*]", "dit/step[?]"):
        assert find_operations(flat, pattern) == steps, pattern
    assert find_operations(flat, "dit/step[1]") == ["dit/step[1]"]


def test_state_hazards_follow_the_table_of_the_cost_model(tmp_path: Path) -> None:
    table = {
        ("w", "r"): {("a", "b", 0, "RAW"), ("b", "a", 1, "WAR"), ("a", "a", 1, "WAW")},
        ("r", "w"): {("a", "b", 0, "WAR"), ("b", "a", 1, "RAW"), ("b", "b", 1, "WAW")},
        ("w", "w"): {("a", "b", 0, "WAW"), ("b", "a", 1, "WAW"), ("a", "a", 1, "WAW"), ("b", "b", 1, "WAW")},
        ("r", "r"): set(),
    }
    write_ops(tmp_path, "def load(context):\n    return {}\n")
    for (first, second), wanted in table.items():
        nodes = {
            name: {"op": name, "reads": ["s"] * ("r" in how), "writes": ["s"] * ("w" in how)}
            for name, how in (("a", first), ("b", second))
        }
        document = flat_graph(nodes, [edge("x", "a.x"), edge("a.y", "b.x"), edge("b.y", "y")], states={"s": {}})
        dependencies = find_dependencies(build(document, tmp_path).flat)
        assert {(d.source, d.target, d.lam, d.kind) for d in dependencies if d.state} == wanted, (first, second)


def test_implied_dependencies_leave_the_report_but_ties_to_itself_stay(tmp_path: Path) -> None:
    write_ops(tmp_path, "def load(context):\n    return {}\n")
    nodes = {name: {"op": name, "reads": ["s"], "writes": ["s"]} for name in "abc"}
    edges = [edge("x", "a.x"), edge("a.y", "b.x"), edge("b.y", "c.x"), edge("a.y", "c.z"), edge("c.y", "y")]
    flat = build(flat_graph(nodes, edges, states={"s": {}}), tmp_path).flat
    kept = {(d.source, d.target, d.lam) for d in reduce_dependencies(find_dependencies(flat))}
    assert kept == {("a", "b", 0), ("b", "c", 0), ("c", "a", 1), ("a", "a", 1), ("b", "b", 1), ("c", "c", 1)}


def stream_program(producer: str, chunks: int = 3) -> tuple[dict[str, Any], str]:
    document = flat_graph(
        {"u": {"op": "u"}, "v": {"op": "v"}},
        [
            edge("x", "u.x"),
            edge("u.y", "v.x", "streaming", chunks=chunks),
            edge("v.y", "y", "streaming", chunks=chunks),
        ],
    )
    ops = f"""
def load(context):
    def u(inputs, state):
        {producer}
    def v(inputs, state):
        return {{"y": [("seen", item) for item in inputs["x"]]}}
    return {{"u": u, "v": v}}
"""
    return document, ops


@pytest.mark.parametrize(
    "producer",
    [
        'return {"y": list(inputs["x"])}',
        'return iter([{"y": [item]} for item in inputs["x"]])',
        'return ({"y": [item]} for item in inputs["x"])',
    ],
)
def test_a_producer_may_return_the_whole_or_its_chunks(tmp_path: Path, producer: str) -> None:
    document, ops = stream_program(producer)
    built = build(document, write_ops(tmp_path, ops))
    outputs, _ = interpret(built.flat, tmp_path, [{"x": [1, 2, 3]}])
    assert outputs == [{"y": [("seen", 1), ("seen", 2), ("seen", 3)]}]


@pytest.mark.parametrize(
    ("producer", "expected"),
    [
        ('return iter([{"y": [1]}])', "3 chunks"),
        ('return iter([{"y": [1]}] * 4)', "3 chunks"),
        ('return {"z": 1}', "outputs 'y'"),
        ("return 7", "mapping"),
        ("return iter([7, 7, 7])", "mappings"),
        ('raise ValueError("boom")', "boom"),
        ('state["q"] = 1', "declared states"),
        ('state["q"]', "declared states"),
    ],
)
def test_an_op_that_misbehaves_is_named(tmp_path: Path, producer: str, expected: str) -> None:
    document, ops = stream_program(producer)
    built = build(document, write_ops(tmp_path, ops))
    with pytest.raises(InputError, match=expected) as caught:
        interpret(built.flat, tmp_path, [{"x": [1, 2, 3]}])
    assert "operation 'u'" in str(caught.value)
    assert "batch 0" in str(caught.value)


def test_a_value_that_cannot_be_cut_travels_whole_and_says_so(tmp_path: Path) -> None:
    document, ops = stream_program('return {"y": [5]}')
    built = build(document, write_ops(tmp_path, ops))
    outputs, notes = interpret(built.flat, tmp_path, [{"x": 0}])
    assert outputs == [{"y": [("seen", 5)]}]
    assert any("cannot be cut" in note for note in notes)


def test_look_ahead_gives_the_consumer_the_later_chunks(tmp_path: Path) -> None:
    document = flat_graph(
        {"u": {"op": "u"}, "v": {"op": "v"}},
        [edge("x", "u.x"), edge("u.y", "v.x", "streaming", chunks=3, lookahead=1), edge("v.y", "y")],
    )
    ops = """
def load(context):
    return {"u": lambda i, s: {"y": list(i["x"])}, "v": lambda i, s: {"y": [tuple(i["x"])]}}
"""
    built = build(document, write_ops(tmp_path, ops))
    assert interpret(built.flat, tmp_path, [{"x": [1, 2, 3]}])[0] == [{"y": [(1, 2), (2, 3), (3,)]}]


@pytest.mark.parametrize(
    ("item", "expected"),
    [
        ({}, "input 'actions'"),
        ({"actions": np.zeros((12, 8), np.float32), "more": 1}, "'more'"),
        ({"actions": np.zeros((12, 9), np.float32)}, r"float32 \[12, 9\]"),
        ({"actions": np.zeros((12, 8), np.float64)}, "float64"),
    ],
)
def test_wrong_inputs_are_refused_by_name(tmp_path: Path, item: dict[str, Any], expected: str) -> None:
    built = build(world(), write_ops(tmp_path))
    with pytest.raises(InputError, match=expected):
        interpret(built.flat, tmp_path, [item])


def test_a_wrong_output_shape_names_port_and_both_shapes(tmp_path: Path) -> None:
    document = world()
    document["graphs"]["denoise"]["nodes"]["step"]["outputs"]["latents"] = {"dtype": "float32", "shape": [3, 16]}
    built = build(document, write_ops(tmp_path))
    with pytest.raises(InputError, match=r"port 'latents'.*float32 \[3, 16\].*float32 \[3, 2\]"):
        interpret(built.flat, tmp_path, [actions(0)])


def test_missing_ops_are_all_named(tmp_path: Path) -> None:
    built = build(world(), write_ops(tmp_path, "def load(context):\n    return {'decode': print}\n"))
    with pytest.raises(InputError, match=r"'denoise_step', 'noise'"):
        interpret(built.flat, tmp_path, [actions(0)])


@st.composite
def random_programs(draw: st.DrawFn) -> tuple[dict[str, Any], list[list[int]]]:
    """A random DAG of summing nodes, some with a counter as state; returns document and predecessors."""
    size = draw(st.integers(1, 6))
    before = [sorted(draw(st.sets(st.integers(0, n - 1), max_size=3))) if n else [] for n in range(size)]
    order = draw(st.permutations(range(size)))
    nodes = {f"n{n}": {"op": f"n{n}", "reads": [f"s{n}"], "writes": [f"s{n}"]} for n in order}
    edges = [edge("x", f"n{n}.x") for n in range(size)]
    edges += [edge(f"n{m}.y", f"n{n}.p{m}") for n in range(size) for m in before[n]]
    edges.append(edge(f"n{size - 1}.y", "y"))
    states = {f"s{n}": {} for n in range(size)}
    return flat_graph(nodes, draw(st.permutations(edges)), states=states), before


SUMMING_OPS = """
def load(context):
    def make(number):
        def op(inputs, state):
            count = state.get(f"s{number}", 0)
            state[f"s{number}"] = count + 1
            return {"y": 3 * sum(inputs.values()) + number + count}
        return op
    return {f"n{number}": make(number) for number in range(6)}
"""


@settings(max_examples=60, deadline=None)
@given(random_programs())
def test_random_programs_mean_what_their_equations_say(
    tmp_path_factory: pytest.TempPathFactory, case: tuple[dict[str, Any], list[list[int]]]
) -> None:
    document, before = case
    folder = tmp_path_factory.mktemp("random")
    built = build(document, write_ops(folder, SUMMING_OPS))
    position = {operation.path: place for place, operation in enumerate(built.flat.operations)}
    assert all(position[f"n{m}"] < position[f"n{n}"] for n, sources in enumerate(before) for m in sources)
    outputs, _ = interpret(built.flat, folder, [{"x": 5}, {"x": 7}])
    for batch, (x, got) in enumerate(zip((5, 7), outputs, strict=True)):
        values: list[int] = []
        for n, sources in enumerate(before):
            values.append(3 * (x + sum(values[m] for m in sources)) + n + batch)
        assert got == {"y": values[-1]}


@given(st.lists(st.integers(), max_size=20), st.integers(1, 6))
def test_joining_what_was_split_gives_it_back(items: list[int], chunks: int) -> None:
    parts = split(items, chunks)
    assert join(parts) == items
    sizes = [len(part) for part in parts]
    assert max(sizes) - min(sizes) <= 1
    array = np.asarray(items)
    assert np.array_equal(join(split(array, chunks)), array)
    assert length(array) == len(items)


GOLDEN = Path(__file__).parent / "golden"


@pytest.mark.parametrize("name", ["summary.txt", "world.mmd"])
def test_rendered_text_is_golden(tmp_path: Path, name: str) -> None:
    built = build(world(), write_ops(tmp_path))
    text = summarize(built) if name == "summary.txt" else to_mermaid(built.program)
    assert text.replace(built.id, "prog-ID") == (GOLDEN / name).read_text()


def test_the_drawing_is_xml_and_names_every_node(tmp_path: Path) -> None:
    from xml.etree import ElementTree

    text = to_svg(build(world(), write_ops(tmp_path)).program)
    root = ElementTree.fromstring(text)
    words = {element.text for element in root.iter() if element.text}
    assert {"dit", "vae", "step", "actions", "frames"} <= words


def test_importing_the_library_does_not_import_torch() -> None:
    import subprocess
    import sys

    modules = "flashrt.ir, flashrt.gpu, flashrt.analysis, flashrt.mcp_server.server"
    code = f"import sys, {modules}; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


@pytest.mark.parametrize(("declared", "passes"), [(12, True), (11, False), ("frames", True)])
def test_the_joined_chunks_must_have_the_declared_length(tmp_path: Path, declared: int | str, passes: bool) -> None:
    document = world()
    document["graphs"]["app"]["nodes"]["vae"]["outputs"]["frames"] = {"shape": [declared, 2]}
    built = build(document, write_ops(tmp_path))
    if passes:
        assert interpret(built.flat, tmp_path, [actions(0)])[0][0]["frames"].shape == (12, 2)
        return
    with pytest.raises(InputError, match=r"port 'frames'.*11 along axis 0, all chunks joined, got 12"):
        interpret(built.flat, tmp_path, [actions(0)])
