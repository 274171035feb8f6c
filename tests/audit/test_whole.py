"""A whole audit: its own process, another one started otherwise, ranks, the document, the command."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from flashrt.analysis import all_claims
from flashrt.bench import resolve_system
from flashrt.bench.audit import KINDS, audit_program
from flashrt.errors import InputError
from flashrt.ir import build_file
from tests.ir.documents import edge, flat_graph

from . import programs, test_applications

INPUTS = """
import numpy as np

def batches(seed, count):
    random = np.random.default_rng(seed)
    for _ in range(count):
        yield {"x": random.standard_normal((6, 4)).astype(np.float32)}
"""
RANKED = """
import numpy as np

def load(context):
    def same(inputs, state):
        return {"y": inputs["x"] * 2}

    def scaled(inputs, state):
        return {"y": inputs["x"] * context.degree}

    return {"same": same, "scaled": scaled}
"""


def write(folder: Path, document: dict[str, Any], ops: str) -> Path:
    """Write an application to `folder`."""
    (folder / "ops.py").write_text(ops)
    (folder / "inputs.py").write_text(INPUTS)
    (folder / "program.yaml").write_text(yaml.safe_dump(document, sort_keys=False))
    return folder


def audit(folder: Path, **more: Any) -> dict[str, Any]:
    """Audit the application in `folder`."""
    system, built = resolve_system("program.yaml", folder), build_file(folder / "program.yaml")
    return audit_program(system, built, "inputs.py:batches", folder, folder / "files", count=3, **more)


@pytest.mark.slow
def test_a_degree_that_gives_something_else_is_found_at_its_node(tmp_path: Path) -> None:
    nodes = {"u": {"op": "same", "degrees": [1, 2]}, "v": {"op": "scaled", "degrees": [1, 2, 8]}}
    document = flat_graph(nodes, [edge("x", "u.x"), edge("u.y", "v.x"), edge("v.y", "y")])
    found = audit(write(tmp_path, document, RANKED), other_process=False)
    degrees = [one for one in found["findings"] if one["kind"] == "degree-differs"]
    assert [(one["node"], one["subject"]) for one in degrees] == [("v", "2")]
    assert degrees[0]["edit"] == {"graph": "app", "node": "v", "remove": {"degrees": [2]}}
    status = {name: one["status"] for name, one in found["claims"].items()}
    assert status["degree:u@2"] == "confirmed"
    assert status["degree:v@2"] == "refuted"
    # Not run, and said so.
    assert status["degree:v@8"] == "unchecked"
    assert any(one["what"] == "degree:v@8" and "4" in one["why"] for one in found["unchecked"])


def test_the_document_says_what_it_holds_for_and_what_was_not_checked(tmp_path: Path) -> None:
    case = programs.Case("several", u=programs.COUNT, chunks=3, beside=True)
    folder = write(tmp_path, case.document(), case.ops())
    found = audit(folder, seed=3)
    assert found["schema"] == "flashrt/audit@1"
    assert json.loads(json.dumps(found)) == found
    built = build_file(folder / "program.yaml")
    assert found["program"] == found["key"]["program"] == built.id
    assert found["key"]["files"].keys() == {"ops.py"}
    assert set(all_claims(built)) <= set(found["claims"])
    assert found["audited"] == [name for name, one in found["claims"].items() if one["status"] == "confirmed"]
    assert found["nodes"]["u"]["undeclared_reads"] == found["nodes"]["u"]["undeclared_writes"] == ["s"]
    assert found["claims"]["states:u"]["status"] == "refuted"
    assert not found["clean"]
    # The finding's edit is the smallest change: with it, the program is clean.
    document = case.document()
    for one in found["findings"]:
        if one["severity"] == "error":
            document["states"] |= one["edit"]["states"]
            for verb, names in one["edit"]["add"].items():
                document["graphs"]["app"]["nodes"]["u"].setdefault(verb, []).extend(names)
    mended = tmp_path / "mended"
    mended.mkdir()
    assert audit(write(mended, document, case.ops()), seed=3, other_process=False)["clean"]


def test_a_program_that_fails_is_refused_with_its_place(tmp_path: Path) -> None:
    case = programs.Case("fails", v='raise ValueError("no more")')
    with pytest.raises(InputError, match=r"operation 'v'.*no more"):
        audit(write(tmp_path, case.document(), case.ops()))
    case = programs.Case("dies", v="import os\nos._exit(3)")
    with pytest.raises(InputError, match="ended before it was done"):
        audit(write(tmp_path, case.document(), case.ops()))
    with pytest.raises(InputError, match="at least 3 batches"):
        audit_program(
            resolve_system("program.yaml", tmp_path), build_file(tmp_path / "program.yaml"), "inputs.py:batches",
            tmp_path, tmp_path / "files", count=2,
        )  # fmt: skip


def test_every_kind_of_finding_has_a_program_that_shows_it() -> None:
    shown = {kind for case in programs.LIES for kind, _, _ in case.finds}
    shown |= {kind for case in programs.HONEST for kind in case.hints}
    shown |= {kind for lie in test_applications.LIES if lie.app == "skeleton" for kind, _, _ in lie.finds}
    assert set(KINDS) - shown == {"degree-differs"}


def test_the_command_prints_findings_with_their_repair(tmp_path: Path) -> None:
    case = programs.Case("undeclared", u=programs.COUNT, states=programs.S, reads=programs.READ)
    folder = write(tmp_path, case.document(), case.ops())
    command = [sys.executable, "-P", "-m", "flashrt.mcp_server", "audit", "program.yaml", "inputs.py:batches"]
    done = subprocess.run([*command, "--json", "--count", "3"], capture_output=True, text=True, check=False, cwd=folder)
    assert done.returncode == 1, done.stderr
    assert json.loads(done.stdout)["findings"][0]["fix"] == "add 's' to 'writes' of node 'u'"
    told = subprocess.run([*command, "--count", "3"], capture_output=True, text=True, check=False, cwd=folder)
    assert told.returncode == 1
    assert "undeclared-write" in told.stdout
    wrong = subprocess.run([*command, "--degrees", "two"], capture_output=True, text=True, check=False, cwd=folder)
    assert wrong.returncode == 2
    assert "option --degrees" in wrong.stderr


CHATTY = """
import os
import numpy as np

LARGE = os.path.join(os.path.dirname(os.path.abspath(__file__)), "table.bin")

def load(context):
    print("progress loading weights")
    calls = []

    def u(inputs, state):
        print("progress epoch 3")
        calls.append(1)
        table = np.memmap(LARGE, dtype=np.uint8, mode="r+")
        table[0] = len(calls)
        with open(LARGE, "r+b") as file:
            file.seek(1)
            file.write(bytes([len(calls)]))
        return {"y": inputs["x"] * int(table[0])}

    return {"u": u}
"""


def test_what_ops_print_and_large_files_that_they_write_do_no_harm(tmp_path: Path) -> None:
    document = flat_graph({"u": {"op": "u"}}, [edge("x", "u.x"), edge("u.y", "y")])
    folder = write(tmp_path, document, CHATTY)
    size = 17 << 20
    (folder / "table.bin").write_bytes(b"\x07" * size)
    found = audit(folder, other_process=False)
    assert not found["clean"]
    assert (folder / "table.bin").stat().st_size == size
    assert (folder / "table.bin").read_bytes()[2:] == b"\x07" * (size - 2)
    assert [path.name for path in folder.glob("*.aside-*")] == []
    assert "progress epoch 3" in (folder / "files" / "audit.log").read_text()


def test_ops_that_do_not_load_are_given_up_and_undeclared_degrees_refused(tmp_path: Path) -> None:
    document = flat_graph({"u": {"op": "u"}}, [edge("x", "u.x"), edge("u.y", "y")])
    folder = write(tmp_path, document, "import time\n\ndef load(context):\n    time.sleep(600)\n")
    with pytest.raises(InputError, match="loaded within 2 s"):
        audit(folder, timeout_s=2)
    with pytest.raises(InputError, match="argument 'degrees'"):
        audit(folder, degrees=[2])
