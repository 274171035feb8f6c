"""Thousands of generated calls through a real server: each is answered in words, and nothing is left of them.

`FLASHRT_FUZZ_CALLS` and `FLASHRT_FUZZ_SEED` say how many and which; the counts are printed (`pytest -s`).
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import time
from collections import Counter, deque
from pathlib import Path
from typing import Any

import psutil
import pytest
from hypothesis import HealthCheck, Phase, given, seed, settings

from flashrt.mcp_server.table import TABLE
from tests.conftest import flashrt_processes, unowned_memory, wait_until
from tests.server.connection import RawServer, raw_server
from tests.server.fuzzing import ID, MUTANT, Call, CallMaker, lay_out

NUM_CALLS = int(os.environ.get("FLASHRT_FUZZ_CALLS", "300"))
SEED = int(os.environ.get("FLASHRT_FUZZ_SEED", "20261130"))
IN_FLIGHT = 12
NUM_FILES = 24
INTERNAL_ERROR = -32603
MAX_GROWTH_BYTES = 300 * 2**20
PREFIXES = {"program": "prog-", "job": "job-", "variant": "var-", "run": "run-", "equivalence": "eq-", "parent": "var-",
            "lease": "lease-", "devices": "lease-"}  # fmt: skip


class Driver:
    """Sends calls, several at once, and looks at every answer."""

    def __init__(self, server: RawServer, workspace: Path) -> None:
        self.server = server
        self.workspace = workspace
        self.outcomes: Counter[tuple[str, str]] = Counter()
        self.problems: list[str] = []
        self.ids: dict[str, str] = {}
        self._waiting: deque[tuple[int, Call]] = deque()
        self._number = 0

    def send(self, call: Call) -> None:
        """Send one, and take the oldest answer when enough are on their way."""
        params = json.loads(json.dumps(call.params), object_hook=lambda found: found)
        if call.method == "tools/call":
            params["arguments"] = {name: self._filled(value) for name, value in params["arguments"].items()}
        if call.mutant is not None:
            self._write(call.mutant)
        self._waiting.append((self.server.send(call.method, params), Call(call.method, params)))
        while len(self._waiting) >= IN_FLIGHT:
            self._take()

    def drain(self) -> None:
        """Wait for every answer."""
        while self._waiting:
            self._take()

    def _write(self, document: Any) -> None:
        path = self.workspace / self._file()
        path.with_suffix(".part").write_text(json.dumps(document))
        path.with_suffix(".part").replace(path)

    def _file(self) -> str:
        return f"mutants/{self._number % NUM_FILES}.yaml"

    def _filled(self, value: Any) -> Any:
        if value == MUTANT:
            self._number += 1
            return self._file()
        if isinstance(value, str) and value.startswith(ID):
            return self.ids.get(PREFIXES[value.removeprefix(ID)], "prog-0")
        return value

    def _take(self) -> None:
        number, call = self._waiting.popleft()
        try:
            answer = self.server.message(number)
        except AssertionError as error:
            self.problems.append(f"{_shown(call)}: no answer: {error}")
            raise
        self.outcomes[call.name, self._outcome(call, answer)] += 1

    def _outcome(self, call: Call, answer: dict[str, Any]) -> str:
        if "error" in answer:
            if answer["error"]["code"] == INTERNAL_ERROR:
                self.problems.append(f"{_shown(call)}: {answer['error']}")
            return "protocol error"
        if call.method != "tools/call":
            return "answered"
        record = answer["result"]["structuredContent"]
        text = json.dumps(record)
        for word in ("failed inside FlashRT", "Traceback (most recent", "of-the-neighbour"):
            if word in text:
                self.problems.append(f"{_shown(call)}: {text[:2000]}")
                return "internal error"
        for key in ("program", "job", "variant", "lease"):
            found = record.get(key)
            if isinstance(found, str) and found.startswith(PREFIXES[key]):
                self.ids[PREFIXES[key]] = found
        if record.get("state") in {"queued", "running"} and call.name in JOBS:
            self.server.send("tools/call", {"name": "job_cancel", "arguments": {"job": record["job"]}})
            return "job"
        if record["ok"]:
            return "ok"
        if (record.get("error_detail") or {}).get("kind") == "fault":
            self.problems.append(f"{_shown(call)}: {text[:2000]}")
            return "fault of a job"
        return "missing" if "retry_after_s" in record else "refused"


JOBS = {tool.name for tool in TABLE if tool.job}


def _shown(call: Call) -> str:
    return f"{call.name} {json.dumps(call.params)[:1500]}"


def _outside(folder: Path, workspace: Path) -> dict[str, str]:
    """Return what lies beside the workspace, apart from leases."""
    found = {}
    for path in sorted(folder.rglob("*")):
        if path.is_relative_to(workspace) or path.is_relative_to(folder / "leases"):
            continue
        found[str(path)] = hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else ""
    return found


def _clean_up(server: RawServer) -> None:
    """Cancel what runs and give back what is leased, as a client that leaves would."""
    for lease in server.call("gpu_status")["leases"]:
        server.call("gpu_release", lease=lease["lease"])
    for resource in server.request("resources/list", {})["resources"]:
        if resource["uri"].startswith("job://"):
            server.call("job_cancel", job=resource["name"])


@pytest.mark.timeout(36_000)
def test_generated_calls_are_answered_in_words_and_leave_nothing(workspace: Path, tmp_path: Path) -> None:
    lay_out(workspace, tmp_path / "outside.yaml")
    (tmp_path / "outside.py").write_text(
        "from pathlib import Path\nPath(__file__).with_suffix('.ran').write_text('')\n"
    )
    outside = _outside(tmp_path, workspace)
    shared = unowned_memory()
    before = flashrt_processes()
    began = time.monotonic()
    with raw_server(workspace) as server:
        driver = Driver(server, workspace)
        driver.ids["prog-"] = server.call("ir_build", document="program.yaml")["program"]
        maker = CallMaker(server.request("tools/list", {})["tools"], JOBS, workspace)
        process = psutil.Process(server.process.pid)
        for _ in range(3):
            server.call("gpu_status")
        descriptors, memory = process.num_fds(), process.memory_info().rss

        @seed(SEED)
        @settings(
            max_examples=NUM_CALLS, phases=[Phase.generate], database=None, deadline=None,
            suppress_health_check=list(HealthCheck),
        )  # fmt: skip
        @given(CallMaker.calls(maker))
        def send(call: Call) -> None:
            driver.send(call)

        try:
            send()
            driver.drain()
            _clean_up(server)
        finally:
            _report(driver, time.monotonic() - began)
        assert not driver.problems, "\n".join([*driver.problems[:10], server.log()[-20_000:]])
        wait_until(lambda: flashrt_processes() - before <= {process.pid}, "what the calls started has ended", 60)
        wait_until(lambda: process.num_fds() <= descriptors + 2, "the server's descriptors are closed", 30)
        assert process.memory_info().rss - memory < MAX_GROWTH_BYTES
        assert server.call("ir_build", document="program.yaml")["ok"] is True
        assert "Traceback" not in server.log()
    assert _outside(tmp_path, workspace) == outside
    # What is not ours by its name may be another test's, and goes with that.
    wait_until(lambda: unowned_memory() <= shared, "shared memory is as it was", 60)
    with contextlib.suppress(FileNotFoundError):
        assert not list((tmp_path / "leases").glob("*.lease")), "no lease is left"
    assert sum(driver.outcomes.values()) >= NUM_CALLS


def _report(driver: Driver, seconds: float) -> None:
    kinds = sorted({outcome for _, outcome in driver.outcomes})
    print(f"\n{sum(driver.outcomes.values())} calls, seed {SEED}, {seconds:.0f} s")
    print(" " * 22, *(kind.rjust(15) for kind in kinds))
    for name in sorted({name for name, _ in driver.outcomes}):
        print(name.ljust(22), *(str(driver.outcomes[name, kind] or "").rjust(15) for kind in kinds))
