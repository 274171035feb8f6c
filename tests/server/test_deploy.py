"""``flashrt deploy``: a deployment as a service, its client, its leases, its end."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from flashrt import gpu
from flashrt.errors import InputError
from flashrt.ir import build_file, interpret
from flashrt.runtime.service import Client
from flashrt.runtime.wire import LENGTHS

TOY = Path(__file__).parents[1] / "toy"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the toy application, and a lease directory of its own."""
    shutil.copytree(TOY, tmp_path / "toy", ignore=shutil.ignore_patterns("__pycache__"))
    (tmp_path / "leases").mkdir()
    monkeypatch.setenv("FLASHRT_LEASE_DIR", str(tmp_path / "leases"))
    return tmp_path / "toy"


def start(folder: Path, *arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-P", "-m", "flashrt.mcp_server", "deploy", *arguments], cwd=folder, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip


@contextmanager
def deployed(folder: Path, *arguments: str) -> Iterator[tuple[subprocess.Popen[str], dict[str, Any]]]:
    """Start a service; yield its process and what it says when it is ready."""
    process = start(folder, *arguments)
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        if not line:
            raise AssertionError(process.communicate(timeout=30)[1])
        yield process, json.loads(line)
    finally:
        process.kill()
        process.communicate()


def items(count: int) -> list[dict[str, Any]]:
    generator = np.random.default_rng(5)
    return [{"actions": generator.standard_normal((6, 3)).astype(np.float32)} for _ in range(count)]


def assert_frames(got: Sequence[dict[str, Any]], want: Sequence[dict[str, Any]]) -> None:
    for have, expected in zip(got, want, strict=True):
        np.testing.assert_array_equal(have["frames"], expected["frames"], strict=True)


def test_a_service_serves_client_after_client_until_it_is_told_to_stop(folder: Path) -> None:
    batches = items(9)
    want, _ = interpret(build_file(folder / "program.yaml").flat, folder, batches)
    with deployed(folder, "split.yaml") as (process, ready):
        assert (ready["inputs"], ready["outputs"], len(ready["devices"])) == (["actions"], ["frames"], 2)
        assert [lease.holder for lease in gpu.holders()] == ["flashrt deploy split.yaml"]
        with Client(ready["socket"]) as client:
            assert_frames([client.call(item) for item in batches[:3]], want[:3])
            # One whose outputs nobody reads: its batches count all the same.
            client.send(batches[3])
            client.send(batches[4])
        with Client(ready["socket"]) as client:
            with pytest.raises(InputError, match="a value for each of 'actions', got 'x'"):
                client.call({"x": 1})
            assert_frames([client.call(item) for item in batches[5:8]], want[5:8])
            numbers = [client.send(batches[8])]
            got = [client.receive() for _ in range(3)]
            assert [batch for *_, batch in got] == numbers * 3
            process.send_signal(signal.SIGTERM)
            out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    summary = json.loads(out)
    assert summary["batches"] == 9
    assert set(summary["devices"]) == set(ready["devices"])
    assert summary["emulated"] is False
    assert not Path(ready["socket"]).exists()
    assert not gpu.holders()


def test_it_sends_items_of_its_own_and_writes_a_trace(folder: Path) -> None:
    process = start(folder, "split.yaml", "--inputs", "inputs.py:batches", "--count", "7", "--trace", "t.json")
    out, err = process.communicate(timeout=200)
    assert process.returncode == 0, err
    summary = json.loads(out.splitlines()[-1])
    assert summary["batches"] == 7
    assert summary["latency_ms"]["max"] >= summary["latency_ms"]["p50"] > 0
    events = json.loads((folder / "t.json").read_text())["traceEvents"]
    assert {event["cat"] for event in events if "cat" in event} == {"span", "wait", "transfer"}


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["program.yaml"], "expected a deployment"),
        (["absent.yaml"], "absent.yaml"),
        (["split.yaml", "--devices", "cpu-0"], "device numbers below 1"),
        (["split.yaml", "--socket", "program.yaml"], "no file, or an old socket"),
        (["split.yaml", "--socket", "s" * 120], "at most 107 bytes"),
    ],
)
def test_what_cannot_be_deployed_is_refused_with_what_to_do(folder: Path, arguments: list[str], words: str) -> None:
    out, err = (process := start(folder, *arguments)).communicate(timeout=120)
    assert process.returncode == 2, out
    assert words in err
    assert (folder / "program.yaml").is_file()
    assert not gpu.holders()


def test_an_operation_that_fails_ends_the_service_with_its_reason(folder: Path) -> None:
    with deployed(folder, "split.yaml") as (process, ready):
        with Client(ready["socket"]) as client, pytest.raises(EOFError):
            client.call({"actions": "no array"})
        _, err = process.communicate(timeout=120)
    assert process.returncode == 2
    assert "batch 0" in err
    assert not gpu.holders()


def test_a_client_of_nothing_is_told_how_to_start_it(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"a service that listens.*flashrt deploy DOCUMENT"):
        Client(tmp_path / "absent.sock")


def test_whatever_a_client_sends_the_next_one_is_served(folder: Path) -> None:
    with deployed(folder, "split.yaml") as (_, ready):
        good = items(1)[0]
        for text in (b'{"kind":"input","value":{"d":[["x",{"f":"0x1p99999"}]]}}', b"\x00" * 40, b'{"kind":1}'):
            with socket.socket(socket.AF_UNIX) as garbage:
                garbage.connect(ready["socket"])
                garbage.sendall(LENGTHS.pack(len(text), 0) + text)
                garbage.shutdown(socket.SHUT_WR)
                while garbage.recv(4096):
                    pass
        with Client(ready["socket"]) as client:
            with pytest.raises(InputError, match="float32"):
                client.call({"actions": np.zeros((6, 2))})
            with pytest.raises(InputError, match="another client is connected"):
                Client(ready["socket"])
        with Client(ready["socket"]) as client:
            assert client.call(good)["frames"].shape == (6, 4, 4)


def test_a_socket_at_which_somebody_answers_is_refused(folder: Path) -> None:
    with deployed(folder, "split.yaml", "--devices", "cpu-0,cpu-1", "--socket", "s.sock") as (_, ready):
        second = start(folder, "split.yaml", "--devices", "cpu-0,cpu-1", "--socket", "s.sock")
        assert "another service answers there" in second.communicate(timeout=120)[1]
        with Client(ready["socket"]) as client:
            assert set(client.call(items(1)[0])) == {"frames"}


@pytest.mark.parametrize("groups", ["[0]", "{a: [-1], b: [1]}", "{a: 0, b: [1]}"])
def test_groups_that_are_none_are_named_before_anything_is_leased(folder: Path, groups: str) -> None:
    document = (folder / "split.yaml").read_text().replace("{a: [0], b: [1]}", groups)
    (folder / "split.yaml").write_text(document)
    _, err = (process := start(folder, "split.yaml")).communicate(timeout=120)
    assert process.returncode == 2
    assert "groups" in err
    assert "Traceback" not in err
