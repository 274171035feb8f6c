"""Deployments that go wrong: each names what broke, none hangs, nothing is left."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from flashrt.bench import resolve_system
from flashrt.bench.drive import run_all
from flashrt.bench.process import SystemProcess
from flashrt.errors import InputError
from flashrt.runtime import supervisor
from tests.conftest import flashrt_processes, wait_until
from tests.ir.documents import edge, flat_graph
from tests.runtime.running import outputs_by_batch, run, start, write_application

OPS = """
import os, signal, subprocess, sys, threading, time

import numpy as np


def spoil(fault, batch, mark=None):
    if fault == "hangs-in-load":
        if mark is not None:
            open(mark, "w").close()
        while True:
            time.sleep(60)
    if batch == 3 and fault == "raises":
        raise KeyError("gone")
    if batch == 3 and fault == "exits":
        sys.exit(7)
    if batch == 3 and fault == "dies":
        os.kill(os.getpid(), signal.SIGKILL)
    if batch == 3 and fault == "kills-host":
        os.kill(os.getppid(), signal.SIGKILL)
        time.sleep(60)
    if batch == 3 and fault == "never-returns":
        while True:
            time.sleep(60)
    if batch == 1 and fault == "closes-low-descriptors":
        os.closerange(3, 200)
    if batch == 1 and fault == "closes-all-descriptors":
        os.closerange(3, 4096)
    if batch == 1 and fault == "prints":
        print("x" * 100_000, flush=True)
        print("y" * 100_000, file=sys.stderr, flush=True)
    if batch == 1 and fault in {"forks", "forks-and-dies"}:
        if os.fork() == 0:
            time.sleep(600)
    if batch == 1 and fault == "starts-a-session":
        subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
        threading.Thread(target=time.sleep, args=(600,)).start()
    if batch == 2 and fault == "forks-and-dies":
        os.kill(os.getpid(), signal.SIGKILL)
    if batch == 3 and fault == "no-value":
        return {"y": object()}
    if batch == 3 and fault == "wrong-port":
        return {"why": 1}


def load(context):
    fault = context.config.get("fault")
    batches = {"p": 0, "q": 0}
    if fault == "hangs-in-load" and "q" in context.operations:
        spoil(fault, None, context.config.get("mark"))

    def p(inputs, state):
        return {"y": inputs["x"] + 1}

    def q(inputs, state):
        batch, batches["q"] = batches["q"], batches["q"] + 1
        wrong = spoil(fault, batch)
        return wrong or {"y": inputs["x"] * 2}

    return {"p": p, "q": q}
"""
PROGRAM = flat_graph({"p": {"op": "p"}, "q": {"op": "q"}}, [edge("x", "p.x"), edge("p.y", "q.x"), edge("q.y", "y")])
SPLIT: dict[str, Any] = {"groups": {"a": [0], "b": [1]}, "place": {"p": "a", "q": "b"}}
ITEMS = [{"x": np.full((4, 2), float(batch))} for batch in range(8)]


def write_faulty(folder: Path, fault: str) -> None:
    write_application(folder, PROGRAM, OPS, it={**SPLIT, "config": {"fault": fault}})


@pytest.mark.parametrize(
    ("fault", "expected"),
    [
        ("raises", r"group 'b' \(q on cpu-1\).*batch 3, operation 'q' \(op 'q'\).*KeyError.*gone.*ops.py:\d+"),
        ("exits", r"group 'b'.*SystemExit: 7"),
        ("dies", r"group 'b' \(q on cpu-1\).*signal SIGKILL"),
        ("kills-host", r"system 'it.yaml'.*the process ended with signal SIGKILL"),
        ("wrong-port", r"group 'b'.*batch 3, operation 'q'.*only 'why'"),
        ("no-value", r"group 'b'.*batch 3, operation 'q', port 'y'.*object"),
        ("forks-and-dies", r"group 'b'.*signal SIGKILL"),
        ("closes-all-descriptors", r"group 'b'|system 'it.yaml'"),
    ],
)
def test_a_worker_that_breaks_is_named_with_its_reason(tmp_path: Path, fault: str, expected: str) -> None:
    write_faulty(tmp_path, fault)
    with pytest.raises(InputError) as caught:
        run(tmp_path, "it.yaml", ITEMS)
    text = " ".join(str(caught.value).split())
    assert caught.match("(?s)" + expected), text


@pytest.mark.parametrize("fault", ["closes-low-descriptors", "prints", "forks", "starts-a-session"])
def test_what_operations_do_on_the_side_does_not_matter(tmp_path: Path, fault: str) -> None:
    write_faulty(tmp_path, fault)
    with start(tmp_path, "it.yaml", ITEMS) as process:
        process.wait_ready(120)
        recorder = run_all(process, ITEMS, 120)
        members = process.members()
    got = [batch["y"][0, 0] for batch in outputs_by_batch(recorder, 8)]
    assert got == [2 * (batch + 1) for batch in range(8)]
    wait_until(lambda: not any(psutil.pid_exists(number) for number in members), "what was started on the side to end")


@pytest.mark.parametrize(
    ("fault", "expected"),
    [
        (
            "hangs-in-load",
            r"io\.ready\(\) within 3 s, got nothing; it is at .*group 'b' \(q on cpu-1\): .*ops\.py:\d+ in spoil",
        ),
        ("never-returns", r"group 'b' \(q on cpu-1\): batch 3, ops\.py:\d+ in spoil"),
    ],
)
def test_a_worker_that_is_silent_for_too_long_is_named_with_the_place(
    tmp_path: Path, fault: str, expected: str
) -> None:
    # Silence counts from when the worker is where it hangs, however long it took to start.
    mark = tmp_path / "hangs"
    write_application(tmp_path, PROGRAM, OPS, it={**SPLIT, "config": {"fault": fault, "mark": str(mark)}})
    with start(tmp_path, "it.yaml", ITEMS) as process:
        if fault == "hangs-in-load":
            wait_until(mark.exists, "the operations to be loaded", 120)
        else:
            process.wait_ready(120)
        with pytest.raises(InputError, match=expected) as caught:
            wait_in_vain(process, fault)
    assert caught.value.findings[0].rule == "hang"


def wait_in_vain(process: SystemProcess, fault: str) -> None:
    if fault == "hangs-in-load":
        process.wait_ready(3)
    run_all(process, ITEMS, 6)


def test_a_worker_that_never_loads_is_named_by_the_supervisor_too(tmp_path: Path) -> None:
    write_faulty(tmp_path, "hangs-in-load")
    code = (
        "from pathlib import Path\n"
        "from flashrt.runtime import supervisor\n"
        "supervisor.LOAD_TIMEOUT_S = 10\n"
        "from flashrt.bench.io import Inputs, Outputs, SystemIO\n"
        "from flashrt.ir import build_file\n"
        "from flashrt.runtime.serve import serve_deployment\n"
        "io = SystemIO(Inputs(['x']), Outputs(print), [], {}, lambda: None)\n"
        "serve_deployment(build_file(Path('program.yaml')), Path('program.yaml'), Path('it.yaml'), io)\n"
    )
    done = subprocess.run(
        [sys.executable, "-P", "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=200, check=False
    )
    assert done.returncode == 1
    assert "group 'b' (q on cpu-1): expected to load its operations within 10 s" in done.stderr.splitlines()[-1]
    assert supervisor.LOAD_TIMEOUT_S > 10


def test_an_input_that_the_program_needs_and_nobody_gives_is_named(tmp_path: Path) -> None:
    write_faulty(tmp_path, "none")
    with pytest.raises(InputError, match=r"program's input 'x'.*yields 'other'; rename 'other' to 'x'"):
        run(tmp_path, "it.yaml", [{"other": np.zeros(3)}])


def test_an_input_of_another_shape_is_refused_as_the_interpreter_does(tmp_path: Path) -> None:
    document = {**PROGRAM, "graphs": {"app": {**PROGRAM["graphs"]["app"], "inputs": {"x": {"shape": [4, 2]}}}}}
    write_application(tmp_path, document, OPS, it=SPLIT)
    for reference in ("it.yaml", "program.yaml"):
        with pytest.raises(InputError, match=r"batch 1, input 'x': expected any dtype \[4, 2\], got float64 \[3\]"):
            run(tmp_path, reference, [ITEMS[0], {"x": np.zeros(3)}])


@pytest.mark.parametrize(
    ("deployment", "program", "expected"),
    [
        ({**SPLIT, "groups": {"a": [0, 1], "b": [1]}}, PROGRAM, "degree|in common"),
        ({**SPLIT, "devices": "emulated"}, PROGRAM, "profile"),
        ({**SPLIT, "place": {"p": "a", "q": "a"}, "order": {0: ["q", "p"]}}, PROGRAM, "each waits for the next: "),
        (
            SPLIT,
            flat_graph(
                {"p": {"op": "p", "writes": ["s"]}, "q": {"op": "q", "reads": ["s"]}},
                [edge("x", "p.x"), edge("p.y", "q.x"), edge("q.y", "y")],
                states={"s": {}},
            ),
            "state 's'.*group 'a': 'p'; group 'b': 'q'",
        ),
    ],
    ids=["overlapping", "no-profile", "order", "shared-state"],
)
def test_a_deployment_that_cannot_run_is_refused_before_any_worker_starts(
    tmp_path: Path, deployment: dict[str, Any], program: dict[str, Any], expected: str
) -> None:
    write_application(tmp_path, program, OPS, it=deployment)
    with pytest.raises(InputError, match=expected):
        run(tmp_path, "it.yaml", ITEMS)


def test_groups_that_overlap_in_part_are_refused_by_name(tmp_path: Path) -> None:
    nodes = {"p": {"op": "p", "degrees": [1, 2]}, "q": {"op": "q"}}
    program = flat_graph(nodes, [edge("x", "p.x"), edge("p.y", "q.x"), edge("q.y", "y")])
    write_application(tmp_path, program, OPS, it={**SPLIT, "groups": {"a": [0, 1], "b": [1]}})
    with pytest.raises(InputError, match="groups 'a' and 'b'"):
        run(tmp_path, "it.yaml", ITEMS)


def test_the_host_killed_takes_its_workers_with_it(tmp_path: Path) -> None:
    before = flashrt_processes()
    write_faulty(tmp_path, "none")
    with start(tmp_path, "it.yaml", ITEMS) as process:
        process.wait_ready(120)
        assert len(flashrt_processes() - before) == 3
        os.kill(process.pid, 9)
        wait_until(lambda: not flashrt_processes() - before, "the workers to end with their host", 60)


def test_many_runs_leave_no_descriptor_and_no_thread(tmp_path: Path) -> None:
    (tmp_path / "null.py").write_text(
        "def serve(io):\n    io.ready()\n    for x in io.inputs['x']:\n        io.outputs['x'].write(x)\n"
    )
    me = psutil.Process()

    def cycle(number: int) -> None:
        with start(tmp_path, "null.py:serve", ITEMS[:1]) as process:
            # Ended in every state: just started, ready, with an item on its way, finished.
            if number % 4:
                process.wait_ready(120)
            if number % 4 == 2:
                process.send(ITEMS[0])
            if number % 4 == 3:
                run_all(process, ITEMS[:1], 120)

    cycle(3)
    descriptors, threads = me.num_fds(), me.num_threads()
    runs = 30
    for number in range(runs):
        cycle(number)
    # Threads of libraries that other tests have loaded come and go; a leak would show with every fourth run.
    assert me.num_fds() - descriptors < runs // 8
    assert me.num_threads() - threads < runs // 8


@pytest.mark.parametrize(
    ("executable", "rule"), [("/nonexistent/python", "not-started"), ("/bin/false", "crash")], ids=["absent", "dies"]
)
def test_a_process_that_cannot_start_is_an_error_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, executable: str, rule: str
) -> None:
    write_faulty(tmp_path, "none")
    before = psutil.Process().num_fds(), psutil.Process().num_threads()
    system = resolve_system("it.yaml", tmp_path)
    monkeypatch.setattr(sys, "executable", executable)
    with (
        pytest.raises(InputError) as caught,
        SystemProcess(system, ["x"], log_path=tmp_path / "log") as process,
    ):
        process.wait_ready(120)
    assert caught.value.findings[0].rule == rule
    # A thread that has been joined may still have to leave the kernel.
    wait_until(lambda: (psutil.Process().num_fds(), psutil.Process().num_threads()) == before, "all of it to be gone")


def test_options_that_cannot_be_sent_are_refused_before_anything_starts(tmp_path: Path) -> None:
    write_faulty(tmp_path, "none")
    before = psutil.Process().num_fds()
    with pytest.raises(InputError, match=r"config\['config'\]\['option'\]"):
        start(tmp_path, "it.yaml", ITEMS, config={"option": object()})
    assert psutil.Process().num_fds() == before


def test_the_harness_never_imports_torch(toy: Path) -> None:
    code = (
        "import sys; from pathlib import Path\n"
        "from flashrt.bench import *\n"
        f"toy = Path({str(toy)!r})\n"
        "out = toy / '.flashrt'; out.mkdir()\n"
        "system = resolve_system('split.yaml', toy)\n"
        "settings = RunSettings('max_rate', runs=1, duration_s=0.2, timeout_s=120)\n"
        "assert run_benchmark(system, 'inputs.py:batches', toy, out, settings)['fps'] > 0\n"
        "check_equivalence(system, system, 'inputs.py:batches', toy, out, CheckSettings(timeout_s=120))\n"
        "assert 'torch' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-P", "-c", code], check=True, timeout=280)
