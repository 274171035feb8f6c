"""What the runtime does when: chunks that leave early, turns, bounded batches, emulated devices."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from flashrt.bench.drive import run_all
from flashrt.errors import InputError
from flashrt.ir import build_file, interpret
from tests.ir.documents import edge, flat_graph
from tests.runtime.running import assert_same, outputs_by_batch, run, start, write_application

OPS = """
import time
from pathlib import Path

import numpy as np


def note(config, text):
    with open(config["log"], "a") as file:
        file.write(text + "\\n")


def lines(config):
    path = Path(config["log"])
    return path.read_text().split() if path.exists() else []


def wait_for(config, text):
    deadline = time.monotonic() + 100
    while text not in lines(config):
        if time.monotonic() > deadline:
            raise TimeoutError(f"{text} did not come")
        time.sleep(0.002)


def load(context):
    config = context.config
    batches = {"p": 0, "q": 0}

    def p(inputs, state):
        note(config, f"P{batches['p']}")
        batches["p"] += 1
        for index, part in enumerate(np.array_split(inputs["x"], 3)):
            note(config, f"p{index}")
            yield {"y": part}
            if config.get("rendezvous") and batches["p"] == 1 and index == 0:
                wait_for(config, "q0")
        note(config, "ended")

    def q(inputs, state):
        if config.get("gate") and batches["q"] == 0:
            wait_for(config, f"P{config['gate'] - 1}")
        ahead = sum(line.startswith("P") for line in lines(config)) - batches["q"] // 3
        note(config, f"q{batches['q'] % 3}")
        batches["q"] += 1
        return {"y": inputs["x"] * 2, "ahead": np.full(len(inputs["x"]), ahead)}

    return {"p": p, "q": q}
"""
SPLIT = {"groups": {"a": [0], "b": [1]}, "place": {"p": "a", "q": "b"}}
TOGETHER = {"groups": {"a": [0]}, "place": {"p": "a", "q": "a"}}


def program(**outputs: str) -> dict[str, Any]:
    """Return x -> p -> (streaming) -> q -> the outputs, by port of q."""
    edges = [edge("x", "p.x"), edge("p.y", "q.x", "streaming", chunks=3)]
    edges += [edge(f"q.{port}", name, "streaming", chunks=3) for name, port in outputs.items()]
    return flat_graph({"p": {"op": "p"}, "q": {"op": "q"}}, edges, outputs={name: {} for name in outputs})


def items(count: int, rows: int = 6) -> list[dict[str, Any]]:
    return [{"x": np.full((rows, 2), float(batch))} for batch in range(count)]


def logged(folder: Path, count: int, deployment: dict[str, Any], **config: Any) -> tuple[list[str], Any]:
    """Run a deployment; return what its operations noted, in order, and what came out."""
    log = folder / "log.txt"
    config["log"] = str(log)
    write_application(folder, program(y="y", ahead="ahead"), OPS, it={**deployment, "config": config})
    recorder = run(folder, "it.yaml", items(count))
    return log.read_text().split(), recorder


def test_a_consumer_has_the_first_chunk_before_its_producer_has_ended(tmp_path: Path) -> None:
    log, recorder = logged(tmp_path, 2, SPLIT, rendezvous=True)
    assert log.index("q0") < log.index("p1") < log.index("ended")
    assert recorder.batches_done == 2


def test_a_blocking_edge_hands_over_only_when_the_producer_has_ended(tmp_path: Path) -> None:
    log, _ = logged(tmp_path, 1, {**SPLIT, "blocking": ["p.y -> q.x"]})
    assert log.index("ended") < log.index("q0")


@pytest.mark.parametrize(
    ("deployment", "expected"),
    [
        (TOGETHER, "P0 p0 q0 p1 q1 p2 q2 ended"),
        ({**TOGETHER, "interleave": False}, "P0 p0 p1 p2 ended q0 q1 q2"),
        ({**TOGETHER, "blocking": ["p.y -> q.x"]}, "P0 p0 p1 p2 ended q0 q1 q2"),
    ],
    ids=["turns", "interleave-false", "blocking"],
)
def test_neighbours_on_one_device_take_turns_where_they_may(
    tmp_path: Path, deployment: dict[str, Any], expected: str
) -> None:
    log, _ = logged(tmp_path, 1, deployment)
    assert log == expected.split()


def test_no_more_batches_are_in_flight_than_fill_the_workers(tmp_path: Path) -> None:
    window = 2 * 2 + 1
    log, recorder = logged(tmp_path, 30, SPLIT, gate=window)
    ahead = [int(value.max()) for batch in outputs_by_batch(recorder, 30) for value in [batch["ahead"]]]
    assert ahead[0] == window
    assert max(ahead) == window
    assert sum(line.startswith("P") for line in log) == 30


def test_a_value_with_fewer_elements_than_chunks_travels_in_fewer_and_ends_its_batch(tmp_path: Path) -> None:
    ops = "def load(context):\n    return {'p': lambda i, s: {'y': i['x'] + 1}, 'q': lambda i, s: {'y': i['x'] * 2}}\n"
    write_application(tmp_path, program(y="y"), ops, split=SPLIT, together=TOGETHER)
    batches = [item for rows in (2, 6, 1, 3, 2) for item in items(1, rows)]
    want, notes = interpret(build_file(tmp_path / "program.yaml").flat, tmp_path, batches)
    assert any("cannot be cut into 3" in note for note in notes)
    for document in ("split.yaml", "together.yaml"):
        recorder = run(tmp_path, document, batches)
        assert recorder.batches_done == 5
        assert_same(outputs_by_batch(recorder, 5), want)


def test_a_streamed_input_is_cut_as_the_interpreter_cuts_it(tmp_path: Path) -> None:
    ops = (
        "import numpy as np\n"
        "def load(context):\n"
        "    def p(inputs, state):\n"
        "        state['calls'] = (state['calls'] or 0) + 1\n"
        "        return {'y': inputs['x'] + inputs['z'] + state['calls']}\n"
        "    return {'p': p, 'q': lambda inputs, state: {'y': inputs['x'] * 2}}\n"
    )
    edges = [
        edge("x", "p.x", "streaming", chunks=3),
        edge("q.y", "p.z", "streaming", chunks=3),
        edge("x", "q.x"),
        edge("p.y", "y"),
        edge("x", "same", "streaming", chunks=3),
    ]
    nodes = {"p": {"op": "p", "reads": ["calls"], "writes": ["calls"]}, "q": {"op": "q"}}
    document = flat_graph(nodes, edges, states={"calls": {}}, outputs={"y": {}, "same": {}})
    write_application(tmp_path, document, ops, split=SPLIT)
    batches = items(5)
    want, _ = interpret(build_file(tmp_path / "program.yaml").flat, tmp_path, batches)
    assert_same(outputs_by_batch(run(tmp_path, "split.yaml", batches), 5), want)


def test_a_detour_through_another_group_does_not_lock_up(tmp_path: Path) -> None:
    ops = (
        "def load(context):\n"
        "    add = lambda inputs, state: {'y': sum(inputs.values())}\n"
        "    gate = lambda inputs, state: {'y': inputs['x'] + inputs['z'].sum()}\n"
        "    return {'p': add, 'far': add, 'q': gate}\n"
    )
    edges = [
        edge("x", "p.x"),
        edge("p.y", "q.x", "streaming", chunks=3),
        edge("p.y", "far.x"),
        edge("far.y", "q.z"),
        edge("q.y", "y", "streaming", chunks=3),
    ]
    document = flat_graph({name: {"op": name} for name in ("p", "far", "q")}, edges)
    deployment = {"groups": {"a": [0], "b": [1]}, "place": {"p": "a", "far": "b", "q": "a"}}
    write_application(tmp_path, document, ops, it=deployment)
    batches = items(5)
    want, _ = interpret(build_file(tmp_path / "program.yaml").flat, tmp_path, batches)
    assert_same(outputs_by_batch(run(tmp_path, "it.yaml", batches), 5), want)


def test_large_values_cross_both_ways_at_once(tmp_path: Path) -> None:
    ops = (
        "import numpy as np\n"
        "def load(context):\n"
        "    big = lambda inputs, state: {'y': np.full(1 << 23, inputs['x'][0, 0])}\n"
        "    end = lambda inputs, state: {'y': inputs['x'][:4] + 1}\n"
        "    return {'p': big, 'r': big, 'q': end, 's': end}\n"
    )
    edges = [
        edge("x", "p.x"), edge("x", "r.x"), edge("p.y", "q.x"), edge("r.y", "s.x"), edge("q.y", "y"), edge("s.y", "z"),
    ]  # fmt: skip
    document = flat_graph({name: {"op": name} for name in "pqrs"}, edges, outputs={"y": {}, "z": {}})
    deployment = {"groups": {"a": [0], "b": [1]}, "place": {"p": "a", "s": "a", "r": "b", "q": "b"}}
    write_application(tmp_path, document, ops, it=deployment)
    batches = outputs_by_batch(run(tmp_path, "it.yaml", items(3)), 3)
    assert [(batch["y"][0], batch["z"][3]) for batch in batches] == [(1, 1), (2, 2), (3, 3)]


def test_not_a_number_passes_through_unchanged(tmp_path: Path) -> None:
    ops = "def load(context):\n    same = lambda i, s: {'y': i['x']}\n    return {'p': same, 'q': same}\n"
    write_application(tmp_path, program(y="y"), ops, split={**SPLIT, "nan": "pass"})
    bits = np.array([[0x7FF8000000000001, 0xFFF0000000000000], [0x7FF0000000000001, 1 << 63]] * 3, np.uint64)
    (batch,) = outputs_by_batch(run(tmp_path, "split.yaml", [{"x": bits.view(np.float64)}]), 1)
    assert np.array_equal(batch["y"].view(np.uint64), bits)


def test_an_emulated_device_is_held_for_both_of_two_operations_that_take_turns(tmp_path: Path) -> None:
    ops = "def load(context):\n    same = lambda i, s: {'y': i['x']}\n    return {'p': same, 'q': same}\n"
    (tmp_path / "profile.yaml").write_text(
        "schema: flashrt/profile@1\ndevice: emulated\nprovenance: declared\noperations: {p: {1: 60}, q: {1: 90}}\n"
    )
    emulated = {"devices": "emulated", "profile": "profile.yaml"}
    write_application(tmp_path, program(y="y"), ops, it={**TOGETHER, **emulated})
    recorder = run(tmp_path, "it.yaml", items(4))
    last_ns = recorder.written[recorder.ends[3] - 1].at_ns
    # The harness may look late at any output, but never early.
    assert last_ns - recorder.sent_ns[0] >= 4 * 150e6


def test_a_value_is_there_a_transfer_later_for_each_emulated_device_by_its_own_way(tmp_path: Path) -> None:
    ops = "def load(context):\n    same = lambda i, s: {'y': i['x']}\n    return {name: same for name in 'pqr'}\n"
    edges = [edge("x", "p.x"), edge("p.y", "q.x"), edge("p.y", "r.x"), edge("q.y", "y"), edge("r.y", "z")]
    document = flat_graph({name: {"op": name} for name in "pqr"}, edges, outputs={"y": {}, "z": {}})
    (tmp_path / "profile.yaml").write_text(
        "schema: flashrt/profile@1\ndevice: emulated\nprovenance: declared\n"
        "operations: {p: {1: 30}, q: {1: 1500}, r: {1: 1500}}\ntransfer: {edges: {p -> q: 40, p -> r: 0}}\n"
    )
    place = {"groups": {"a": [0], "b": [1], "c": [2]}, "place": {"p": "a", "q": "b", "r": "c"}}
    emulated = {"devices": "emulated", "profile": "profile.yaml"}
    write_application(tmp_path, document, ops, it={**place, **emulated})
    # Held for so long that a process which gets no time for a while is not behind its device's clock.
    batches = items(2)
    with start(tmp_path, "it.yaml", batches) as process:
        process.wait_ready(120)
        run_all(process, batches, 120)
        spans = {(event["name"], event["batch"]): event for event in process.events if event["kind"] == "span"}
    for name, transfer_ns in (("q", 40_000_000), ("r", 0)):
        free_ns = 0
        for batch in range(2):
            assert spans[name, batch]["start_ns"] == max(spans["p", batch]["end_ns"] + transfer_ns, free_ns)
            free_ns = spans[name, batch]["end_ns"]
    assert all(span["end_ns"] - span["start_ns"] >= 30_000_000 for span in spans.values())


STAGGERED = """
def load(context):
    def op(inputs, state):
        state["n"] = (state["n"] or 0) + 1
        return {"y": inputs["x"] * 2 + state["n"]}
    return {name: op for name in "pqr"}
"""


def staggered(tmp_path: Path, **more: Any) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Write p -> q -> r with q elsewhere and r a batch behind p; return items and what they give."""
    edges = [edge("x", "p.x"), edge("p.y", "q.x"), edge("q.y", "r.x"), edge("r.y", "y")]
    nodes = {name: {"op": name, "reads": [f"{name}n"], "writes": [f"{name}n"]} for name in "pqr"}
    ops = (
        STAGGERED.replace('"n"', 'f"{name}n"')
        .replace("def op(", "def op(name, ")
        .replace("name: op", "name: functools.partial(op, name)")
    )
    document = flat_graph(nodes, edges, states={f"{name}n": {} for name in "pqr"})
    place = {"groups": {"a": [0], "b": [1]}, "place": {"p": "a", "q": "b", "r": "a"}}
    write_application(tmp_path, document, f"import functools\n{ops}", it={**place, "order": {0: ["p", "r"]}, **more})
    batches = items(7)
    want, _ = interpret(build_file(tmp_path / "program.yaml").flat, tmp_path, batches)
    return batches, want


def test_an_operation_that_is_staggered_works_on_the_batch_before(tmp_path: Path) -> None:
    # With so long a period no batch counts as missing, however slow the machine is.
    batches, want = staggered(tmp_path, stagger={"r": 1}, period_ms=60_000)
    recorder = run(tmp_path, "it.yaml", batches)
    assert_same(outputs_by_batch(recorder, 7), want)
    with start(tmp_path, "it.yaml", batches) as process:
        process.wait_ready(120)
        run_all(process, batches, 120)
        spans = sorted(
            (event["start_ns"], event["name"], event["batch"])
            for event in process.events
            if event["kind"] == "span" and event["device"] == "cpu-0"
        )
    order = list(dict.fromkeys((name, batch) for _, name, batch in spans))
    # All items were there from the start: each r comes after the next batch's p.
    assert order == [("p", 0), *(pair for batch in range(6) for pair in (("p", batch + 1), ("r", batch))), ("r", 6)]


def test_a_staggered_batch_is_done_without_a_next_one(tmp_path: Path) -> None:
    batches, want = staggered(tmp_path, stagger={"r": 1})
    got = []
    with start(tmp_path, "it.yaml", batches) as process:
        process.wait_ready(120)
        for item in batches:
            process.send(item)
            while (message := process.next_arrival(120, "an output").message)["kind"] != "batch_done":
                got.append({"y": message["value"]})
    assert_same(got, want)


def test_a_stagger_that_waits_for_itself_is_refused(tmp_path: Path) -> None:
    batches, _ = staggered(tmp_path, stagger={"p": 1})
    with pytest.raises(InputError, match=r"order of group 'a'.*each waits for the next.*stagger"):
        run(tmp_path, "it.yaml", batches)
