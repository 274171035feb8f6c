"""What a deployment refuses and bounds while it runs, and how it is given up: NaNs, writes, silence, cancelling."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from flashrt.analysis import read_deployment
from flashrt.errors import InputError
from flashrt.ir import build_file, interpret
from flashrt.runtime import supervisor as supervisor_module
from flashrt.runtime.channels.errors import ChannelClosedError
from flashrt.runtime.checks import nan_flag
from flashrt.runtime.launch import LocalLauncher, Run, Started
from flashrt.runtime.serve import plan_workers
from flashrt.runtime.supervisor import Supervisor
from tests.conftest import own_memory, wait_until
from tests.ir.documents import edge, flat_graph
from tests.runtime.running import outputs_by_batch, run, write_application
from tests.runtime.test_codec import DTYPES
from tests.runtime.test_groups import STREAM, assert_bits, tensors
from tests.runtime.test_strategies import OPS, SPLIT, TOGETHER, items, program

CHAIN = flat_graph({"p": {"op": "p"}, "q": {"op": "q"}}, [edge("x", "p.x"), edge("p.y", "q.x"), edge("q.y", "y")])

MAKE_NAN = """
import numpy as np
import torch


def load(context):
    batches = {"p": 0, "q": 0}
    made = {
        "half": lambda: torch.full((3,), float("nan"), dtype=torch.bfloat16),
        "nested": lambda: {"a": [1, {"b": (torch.ones(3), torch.full((9, 9), float("nan")))}]},
        "none": lambda: [np.array([np.inf, -np.inf]), torch.tensor([65504.0] * 9).half(), "nan", None, np.int64(3)],
    }

    def p(inputs, state):
        batches["p"] += 1
        return {"y": made[context.config["kind"]]() if batches["p"] == 3 else 0.5}

    return {"p": p, "q": lambda inputs, state: {"y": [inputs["x"], 1]}}
"""


def test_a_not_a_number_is_refused_where_it_is_made(tmp_path: Path) -> None:
    write_application(tmp_path, CHAIN, MAKE_NAN, it={**SPLIT, "config": {"kind": "nested"}})
    with pytest.raises(InputError, match=r"batch 2, operation 'p' \(op 'p'\), port 'y': expected numbers, got a NaN"):
        run(tmp_path, "it.yaml", items(5))


@pytest.mark.parametrize(("kind", "more"), [("half", {"nan": "pass"}), ("none", {})])
def test_a_not_a_number_that_is_wanted_and_what_only_looks_like_one_travels_on(
    tmp_path: Path, kind: str, more: dict[str, Any]
) -> None:
    write_application(tmp_path, CHAIN, MAKE_NAN, it={**SPLIT, "config": {"kind": kind}, **more})
    recorder = run(tmp_path, "it.yaml", items(5))
    assert recorder.batches_done == 5
    assert outputs_by_batch(recorder, 5)[3]["y"] == [0.5, 1]


@pytest.mark.parametrize("dtype", [dtype for dtype in DTYPES if dtype.is_floating_point or dtype.is_complex], ids=str)
def test_one_not_a_number_is_found_in_tensors_of_every_type_and_infinities_are_none(dtype: torch.dtype) -> None:
    for shape in ((3,), (40, 70)):
        tensor = torch.ones(shape).to(dtype)
        assert nan_flag(tensor) is False
        assert nan_flag([tensor, {"a": (tensor.t(), "nan", None, 3, np.ones(3))}]) is False
        tensor[-1] = float("nan")
        with_gradient = tensor.clone().requires_grad_()
        for value in (tensor, tensor.t(), tensor[1:], {"a": [1, (tensor,)]}, tensor[-1], with_gradient):
            assert nan_flag(value) is True
    if dtype is not torch.float8_e4m3fn:
        assert nan_flag(torch.tensor([float("inf"), -float("inf")]).to(dtype)) is False


@pytest.mark.parametrize(
    ("value", "flag"),
    [
        (float("nan"), True),
        (float("inf"), False),
        (np.float32("nan"), True),
        (np.array(complex(1, float("nan"))), True),
        (np.full(9, 6e4, np.float16), False),
        (np.full(9, np.inf), False),
        (np.array([np.inf, -np.inf]), False),
        (np.array(["nan"]), False),
        (np.zeros((0, 3)), False),
        (torch.zeros(0, 3), False),
        (torch.full((9, 9), 6e4).half(), False),
        (torch.tensor([1, 2]), False),
        (torch.eye(3).to_sparse() * float("nan"), True),
        ([], False),
        ("nan", False),
    ],
)
def test_what_is_no_number_and_what_only_looks_so(value: Any, flag: bool) -> None:
    assert nan_flag(value) is flag


WRITES = """
def load(context):
    def q(inputs, state):
        if context.config["how"] == "at-once":
            inputs["x"].mul_(2)
        elif state["kept"] is None:
            state["kept"] = inputs["x"]
        else:
            # Begins anew after two.
            state["kept"] += inputs["x"]
            state["kept"] = None
        return {"y": inputs["x"].clone()}

    return {"p": lambda inputs, state: {"y": inputs["x"] + 1}, "q": q}
"""
KEEPING = flat_graph(
    {"p": {"op": "p"}, "q": {"op": "q", "reads": ["kept"], "writes": ["kept"]}},
    [edge("x", "p.x"), edge("p.y", "q.x"), edge("q.y", "y")],
    states={"kept": {}},
)


def test_an_operation_that_writes_to_its_input_is_named(tmp_path: Path) -> None:
    write_application(tmp_path, KEEPING, WRITES, it={**SPLIT, "config": {"how": "at-once"}})
    with pytest.raises(InputError, match=r"SIGSEGV in operation 'q', batch 0.*writing in place to an input \(clone it"):
        run(tmp_path, "it.yaml", tensors(3))


def test_a_state_that_keeps_an_input_and_is_changed_later_is_right_or_refused(tmp_path: Path) -> None:
    write_application(tmp_path, KEEPING, WRITES, it={**SPLIT, "config": {"how": "later"}})
    batches = tensors(12)
    try:
        got = outputs_by_batch(run(tmp_path, "it.yaml", batches), 12)
    except InputError as error:
        # That is right too; values that are wrong are not.
        if "operation 'q'" in str(error) and "clone" in str(error):
            return
        raise
    for item, batch in zip(batches, got, strict=True):
        np.testing.assert_array_equal(batch["y"].data, item["x"].numpy() + 1)


EMPTY = """
import torch


def load(context):
    def p(inputs, state):
        for part in inputs["x"].chunk(4):
            out = context.empty("y", part.shape, part.dtype)
            torch.mul(part, 3, out=out)
            unused = context.empty("y", (7, 70), torch.bfloat16)
            side = context.empty("z", (2, *part.shape), torch.float64)
            side[0], side[1] = part, -part
            yield {"y": out, "z": side[1:].view(part.shape)}

    def q(inputs, state):
        # What was put out before may still be read.
        before = state["last"]
        out = context.empty("y", inputs["x"].shape, torch.float32)
        torch.add(inputs["x"], 0 if before is None else before, out=out)
        state["last"] = out
        return {"y": out}

    return {"p": p, "q": q}
"""


def test_outputs_written_in_place_are_those_of_the_interpreter(tmp_path: Path) -> None:
    nodes = {"p": {"op": "p"}, "q": {"op": "q", "reads": ["last"], "writes": ["last"]}}
    edges = [
        edge("x", "p.x"), edge("p.y", "q.x", **STREAM), edge("p.z", "z", **STREAM), edge("q.y", "y", **STREAM),
        edge("p.y", "raw"),
    ]  # fmt: skip
    document = flat_graph(nodes, edges, outputs={"y": {}, "z": {}, "raw": {}}, states={"last": {}})
    write_application(tmp_path, document, EMPTY, it=SPLIT)
    batches = tensors(9, columns=3000)
    want, _ = interpret(build_file(tmp_path / "program.yaml").flat, tmp_path, batches)
    assert_bits(outputs_by_batch(run(tmp_path, "it.yaml", batches), 9), want)


def test_no_more_batches_are_in_flight_than_the_deployment_allows(tmp_path: Path) -> None:
    config = {"log": str(tmp_path / "log.txt"), "gate": 2}
    write_application(tmp_path, program(y="y", ahead="ahead"), OPS, it={**SPLIT, "in_flight": 2, "config": config})
    recorder = run(tmp_path, "it.yaml", items(20))
    ahead = [int(batch["ahead"].max()) for batch in outputs_by_batch(recorder, 20)]
    assert ahead[0] == max(ahead) == 2


HANGS = """
import time


def load(context):
    def p(inputs, state):
        yield {"y": inputs["x"][:2]}
        if inputs["x"][0, 0] == 1:
            while True:
                time.sleep(60)
        yield {"y": inputs["x"][2:4]}
        yield {"y": inputs["x"][4:]}

    return {"p": p, "q": lambda inputs, state: {"y": inputs["x"]}}
"""


@pytest.mark.parametrize("deployment", [SPLIT, TOGETHER], ids=["split", "turns"])
def test_an_operation_that_does_not_return_is_named_with_its_line(tmp_path: Path, deployment: dict[str, Any]) -> None:
    write_application(tmp_path, program(y="y"), HANGS, it={**deployment, "operation_timeout_s": 3})
    with pytest.raises(
        InputError,
        match=r"(?s)operation 'p', batch 1: expected to return within 3 s.*it is at group 'a'.*ops.py:\d+ in p",
    ):
        run(tmp_path, "it.yaml", items(3))


SAME = "def load(context):\n    same = lambda i, s: {'y': i['x']}\n    return {'p': same, 'q': same}\n"


def emulated(folder: Path, p_ms: float, q_ms: float) -> dict[str, Any]:
    """Write a profile; return what a deployment on emulated devices says."""
    (folder / "profile.yaml").write_text(
        "schema: flashrt/profile@1\ndevice: emulated\nprovenance: declared\n"
        f"operations: {{p: {{1: {p_ms}}}, q: {{1: {q_ms}}}}}\n"
    )
    return {"devices": "emulated", "profile": "profile.yaml"}


def test_a_held_device_is_no_operation_that_does_not_return(tmp_path: Path) -> None:
    more = emulated(tmp_path, 6500, 3)
    write_application(tmp_path, program(y="y"), SAME, it={**TOGETHER, **more, "operation_timeout_s": 4})
    assert run(tmp_path, "it.yaml", items(1)).batches_done == 1


class Keeping(LocalLauncher):
    """Starts workers and remembers them."""

    def start(self, run: Run) -> Started:
        self.started = super().start(run)
        return self.started


def started(folder: Path, launcher: LocalLauncher) -> Supervisor:
    """Start the workers of it.yaml in `folder`."""
    built = build_file(folder / "program.yaml")
    placement = read_deployment(folder / "it.yaml", built)
    profile = folder / "profile.yaml"
    layout = plan_workers(built, placement, [], profile if profile.exists() else None)
    config = placement.document.config
    run = Run(folder / "program.yaml", built.folder, built.flat, layout, config)
    return Supervisor(run, lambda event: None, launcher)


MARKS = """
import time
from pathlib import Path


def load(context):
    config = context.config
    count = {"p": 0}

    def p(inputs, state):
        Path(config["mark"]).touch()
        if config.get("stuck"):
            while True:
                time.sleep(60)
        return {"y": inputs["x"]}

    return {"p": p, "q": lambda inputs, state: {"y": inputs["x"]}}
"""


@pytest.mark.parametrize("state", ["idle", "waiting", "held", "stuck"])
def test_a_cancelled_deployment_ends_every_worker_wherever_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, state: str
) -> None:
    memory, mark = own_memory(), tmp_path / "mark"
    # Its memory has names; the other transport's has none.
    more = {"transport": "iceoryx2", **(emulated(tmp_path, 3_600_000, 1) if state == "held" else {})}
    config = {"mark": str(mark), "stuck": state == "stuck"}
    write_application(tmp_path, CHAIN, MARKS, it={**SPLIT, **more, "config": config})
    launcher = Keeping()
    with started(tmp_path, launcher) as supervisor:
        supervisor.wait_ready()
        if state != "idle":
            supervisor.submit(0, items(1)[0])
            wait_until(mark.exists, "the first operation to work")
        if state == "waiting":
            output = supervisor.next_output(120)
            assert output is not None
            assert output.completes_batch
        # Only the one that does not come back is not waited for until it has ended.
        monkeypatch.setattr(supervisor_module, "CANCEL_TIMEOUT_S", 10 if state == "stuck" else 120)
        supervisor.cancel("somebody asked")
        ends = {name: handle.ending() for name, handle in launcher.started.handles.items()}
        # Both give up by themselves, but for an operation that does not come back.
        by_itself = "its process ended with exit status 4"
        assert ends == {"a": "its process ended with signal SIGKILL" if state == "stuck" else by_itself, "b": by_itself}
        supervisor.cancel()
    assert own_memory() == memory


def submit_many(supervisor: Supervisor) -> None:
    for batch in range(10_000):
        supervisor.submit(batch, items(1)[0])


def test_whoever_submits_to_workers_that_have_ended_hears_of_it(tmp_path: Path) -> None:
    config = {"mark": str(tmp_path / "mark"), "stuck": True}
    write_application(tmp_path, CHAIN, MARKS, it={**SPLIT, "config": config})
    launcher = Keeping()
    with started(tmp_path, launcher) as supervisor:
        supervisor.wait_ready()
        launcher.started.handles["a"].kill()
        with pytest.raises(ChannelClosedError, match=r"group 'a' \(p on cpu-0\) has ended"):
            submit_many(supervisor)
        with pytest.raises(InputError, match=r"group 'a'.*SIGKILL"):
            supervisor.next_output(120)
