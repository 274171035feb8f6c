"""Real systems in real processes: equal, different, crashing, hanging; and what is left of them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from flashrt.bench import (
    CheckSettings,
    RunSettings,
    Tolerance,
    check_equivalence,
    read_inputs,
    read_recording,
    resolve_system,
    run_benchmark,
    write_recording,
)
from flashrt.bench.check import collect
from flashrt.bench.process import SystemProcess
from flashrt.errors import InputError
from tests.conftest import flashrt_processes, wait_until

INPUTS = "inputs.py:batches"
QUICK = CheckSettings(timeout_s=120, measure_noise=False)


def check(toy: Path, candidate: str, settings: CheckSettings = QUICK, inputs: str = INPUTS) -> dict[str, Any]:
    baseline = resolve_system("reference.py:serve", toy)
    return check_equivalence(baseline, resolve_system(candidate, toy), inputs, toy, toy, settings)


@pytest.mark.parametrize(
    "candidate",
    [
        "program.yaml",
        "split.yaml",
        "together.yaml",
        "variants.py:honest_chunks",
        "variants.py:honest_reader",
        "variants.py:prints_a_lot",
        "variants.py:leaves_a_child",
    ],
)
def test_honest_systems_are_equal_bit_for_bit(toy: Path, candidate: str) -> None:
    verdict = check(toy, candidate)
    assert verdict["equivalent"], verdict["reasons"]
    assert verdict["outputs"]["frames"]["total"] == 8 * 6 * 16
    assert verdict["elements_per_batch"] == {"frames": 6}


@pytest.mark.parametrize(
    ("candidate", "expected"),
    [
        ("variants.py:one_value", "output 'frames' differs first at [32, 1, 3] (batch 5)"),
        ("variants.py:drops_a_frame", "element 18 (batch 3) is lost"),
        ("variants.py:repeats_a_frame", "is repeated at 19"),
        ("variants.py:zeros", "differs first at"),
        ("variants.py:writes_nothing", "output 'frames': the candidate never writes it"),
        ("variants.py:other_output", "output 'frame': the baseline has no such output"),
    ],
)
@pytest.mark.parametrize("tolerance", [Tolerance(), Tolerance("numeric")], ids=["bit", "numeric"])
def test_wrong_outputs_are_refused_by_name_and_position(
    toy: Path, candidate: str, expected: str, tolerance: Tolerance
) -> None:
    verdict = check(toy, candidate, CheckSettings(timeout_s=120, measure_noise=False, tolerance=tolerance))
    assert not verdict["equivalent"]
    assert any(expected in reason for reason in verdict["reasons"]), verdict["reasons"]


@pytest.mark.parametrize(
    ("candidate", "rule", "expected"),
    [
        ("variants.py:raises", "serve-failed", "boom in batch 2"),
        ("variants.py:dies", "crash", "SIGKILL"),
        ("variants.py:never_ready", "hang", "io.ready() within 8 s"),
        ("variants.py:hangs", "hang", "within 8 s"),
        ("variants.py:unknown_input", "unknown-input", "did you mean 'actions'"),
        ("variants.py:unwritable_value", "value-kind", "output 'frames'"),
        ("variants.py:not_ready_first", "not-ready", "io.ready() before anything else"),
        ("variants.py:reads_before_ready", "read-before-ready", "io.ready() before the first read"),
        ("variants.py:absent", "no-such-function", "'absent'"),
        ("variants.py:not_callable", "no-such-function", "'not_callable'"),
    ],
)
def test_a_system_that_fails_is_named_with_what_it_did(toy: Path, candidate: str, rule: str, expected: str) -> None:
    with pytest.raises(InputError) as caught:
        # Silence is waited for where there is nothing else: any other system may take long to start.
        check(toy, candidate, CheckSettings(timeout_s=8 if rule == "hang" else 120, measure_noise=False))
    assert caught.value.findings[0].rule == rule
    assert f"system '{candidate}'" in str(caught.value)
    assert expected in str(caught.value)


def test_the_traceback_of_a_system_begins_in_its_own_code(toy: Path) -> None:
    with pytest.raises(InputError, match="boom in batch 2") as caught:
        check(toy, "variants.py:raises")
    assert 'variants.py", line' in str(caught.value)
    assert "host.py" not in str(caught.value)


def test_a_file_that_does_not_parse_is_named_with_its_line(toy: Path) -> None:
    (toy / "broken.py").write_text("def serve(io):\n    return (\n")
    with pytest.raises(InputError, match=r"broken\.py, line 2\); correct"):
        check(toy, "broken.py:serve")


@pytest.mark.parametrize(
    ("owed", "timeout_s", "expected"),
    [
        ({"frame": 6}, 120, r"output 'frames'.*did you mean 'frame'"),
        ({"frames": 7}, 8, r"7 of 'frames' a batch.*got 6 of 'frames'"),
    ],
)
def test_a_wrong_amount_a_batch_is_named(toy: Path, owed: dict[str, float], timeout_s: float, expected: str) -> None:
    settings = RunSettings(runs=1, duration_s=0.2, elements_per_batch=owed, timeout_s=timeout_s)
    with pytest.raises(InputError, match=expected):
        run_benchmark(resolve_system("reference.py:serve", toy), INPUTS, toy, toy, settings)


def test_a_system_that_returns_early_is_not_equal(toy: Path) -> None:
    assert not check(toy, "variants.py:returns_early")["equivalent"]
    with pytest.raises(InputError, match="it returned after"):
        run_benchmark(
            resolve_system("variants.py:returns_early", toy), INPUTS, toy, toy,
            RunSettings(runs=1, duration_s=0.2, elements_per_batch={"frames": 6}, timeout_s=120),
        )  # fmt: skip


@pytest.mark.parametrize(
    ("reference", "expected"),
    [
        ("../outside.py:serve", "inside the workspace"),
        ("/etc/passwd.py:serve", "inside the workspace"),
        ("absent.py:serve", "existing file"),
        ("reference.py", "file.py:function"),
        ("program.txt", "document"),
        ("profile.yaml", "existing file"),
    ],
)
def test_a_wrong_reference_is_refused_before_anything_starts(toy: Path, reference: str, expected: str) -> None:
    with pytest.raises(InputError, match=expected):
        resolve_system(reference, toy)


def test_a_link_out_of_the_workspace_is_refused(toy: Path, tmp_path: Path) -> None:
    (tmp_path / "outside.py").write_text("def serve(io): pass\n")
    (toy / "link.py").symlink_to(tmp_path / "outside.py")
    with pytest.raises(InputError, match="inside the workspace"):
        resolve_system("link.py:serve", toy)


def test_the_digest_changes_with_any_code_or_document_beside_it(toy: Path) -> None:
    first = resolve_system("split.yaml", toy).digest
    assert resolve_system("split.yaml", toy).digest == first
    assert resolve_system("together.yaml", toy).digest != first
    (toy / "toy_ops.py").write_text((toy / "toy_ops.py").read_text() + "\n")
    assert resolve_system("split.yaml", toy).digest != first


@pytest.mark.parametrize("scenario", ["single_stream", "realtime", "max_rate"])
@pytest.mark.parametrize("system", ["reference.py:serve", "split.yaml"])
def test_every_scenario_measures_and_leaves_its_artefacts(toy: Path, scenario: str, system: str) -> None:
    period = 20.0 if scenario == "realtime" else None
    settings = RunSettings(scenario, duration_s=0.6, runs=2, period_ms=period, timeout_s=120)  # type: ignore[arg-type]
    result = run_benchmark(resolve_system(system, toy), INPUTS, toy, toy, settings)
    assert result["fps"] > 0
    assert result["latency_ms"]["p50"] <= result["latency_ms"]["p99"] <= result["latency_ms"]["max"]
    assert result["ttfo_ms"] > 0
    assert result["startup_ms"] > 0
    assert result["elements_per_batch"] == 6
    assert (result.get("d0_ms") is not None) == (scenario != "single_stream")
    assert result["confidence_95"]["fps"][0] <= result["fps"] <= result["confidence_95"]["fps"][1]
    assert result["emulated"] is False
    for name in ("result", "samples", "trace", "plot", "page"):
        assert Path(result["artifacts"][name]).stat().st_size > 0
    page = Path(result["artifacts"]["page"]).read_text()
    for words in (system, scenario, "Times between elements", "Worst offset of a batch", "against", "settings"):
        assert words in page, words
    assert "src=" not in page
    assert not result["rechecked"]
    if system == "split.yaml":
        assert set(result["busy_share"]) == {"drift", "render"}


def test_an_offset_below_the_sustainable_period_makes_the_run_invalid(toy: Path) -> None:
    (toy / "slow.yaml").write_text((toy / "together.yaml").read_text() + "config: {delay_s: 0.02}\n")
    settings = RunSettings("realtime", duration_s=0.4, runs=1, period_ms=10, timeout_s=120)
    result = run_benchmark(resolve_system("slow.yaml", toy), INPUTS, toy, toy, settings)
    assert not result["valid"]
    assert any("does not sustain" in reason for reason in result["reasons"])


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        (RunSettings("bursts"), "scenario"),  # type: ignore[arg-type]
        (RunSettings(runs=0), "runs"),
        (RunSettings(duration_s=0), "duration_s"),
        (RunSettings(period_ms=-1), "period_ms"),
    ],
)
def test_wrong_settings_are_refused(toy: Path, settings: RunSettings, expected: str) -> None:
    with pytest.raises(InputError, match=expected):
        run_benchmark(resolve_system("reference.py:serve", toy), INPUTS, toy, toy, settings)


def test_a_killed_worker_is_named_with_its_operations(toy: Path) -> None:
    text = (toy / "toy_ops.py").read_text().replace(
        '        time.sleep(delay_s)\n        return {"latents"',
        '        import os\n        os.kill(os.getpid(), 9)\n        return {"latents"',
    )  # fmt: skip
    (toy / "toy_ops.py").write_text(text)
    settings = CheckSettings(timeout_s=120, measure_noise=False)
    system = resolve_system("split.yaml", toy)
    with pytest.raises(InputError, match=r"group 'a' \(drift on cpu-0\)"):
        check_equivalence(system, system, INPUTS, toy, toy, settings)


def test_an_operation_that_raises_in_a_worker_is_named(toy: Path) -> None:
    text = (toy / "toy_ops.py").read_text()
    (toy / "toy_ops.py").write_text(
        text.replace("        last = state.get", "        raise KeyError('gone')\n        last = state.get")
    )
    system = resolve_system("split.yaml", toy)
    with pytest.raises(InputError, match=r"operation 'render'.*KeyError.*gone"):
        check_equivalence(system, system, INPUTS, toy, toy, QUICK)


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"groups: {a: [0], b: [1]}": "groups: {a: [0], b: [7]}"}, "device numbers below 2"),
        ({"groups: {a: [0], b: [1]}": "groups: {a: [0], b: [0, 1]}"}, "degree"),
        ({"place: {drift: a, render: b}": "place: {drift: a}"}, "render"),
        ({"devices: cpu": "devices: emulated"}, "profile"),
    ],
)
def test_a_deployment_that_does_not_fit_is_refused(toy: Path, change: dict[str, str], expected: str) -> None:
    text = (toy / "split.yaml").read_text()
    for old, new in change.items():
        assert old in text
        text = text.replace(old, new)
    (toy / "wrong.yaml").write_text(text)
    settings = CheckSettings(timeout_s=120, measure_noise=False, devices=("cpu-0", "cpu-1"))
    with pytest.raises(InputError, match=expected):
        check(toy, "wrong.yaml", settings)


def test_emulated_devices_hold_their_operations_for_the_profiled_time(toy: Path) -> None:
    (toy / "profile.yaml").write_text(
        "schema: flashrt/profile@1\ndevice: emulated\nprovenance: declared\n"
        "operations: {drift: {1: 30}, render: {1: 60}}\n"
    )
    (toy / "emulated.yaml").write_text(
        (toy / "split.yaml").read_text().replace("devices: cpu", "devices: emulated\nprofile: profile.yaml")
    )
    system = resolve_system("emulated.yaml", toy)
    assert system.emulated
    assert check(toy, "emulated.yaml")["equivalent"]
    settings = RunSettings("single_stream", duration_s=1.0, runs=1, emulated=True, timeout_s=120)
    result = run_benchmark(system, INPUTS, toy, toy, settings)
    assert result["emulated"]
    assert result["latency_ms"]["p50"] >= 90


def test_the_harness_killed_takes_its_systems_with_it(toy: Path) -> None:
    before = flashrt_processes()
    code = (
        "import sys; from pathlib import Path\n"
        "from flashrt.bench import *\n"
        f"toy = Path({str(toy)!r})\n"
        "system = resolve_system('variants.py:hangs', toy)\n"
        "print('go', flush=True)\n"
        "check_equivalence(system, system, 'inputs.py:batches', toy, toy, CheckSettings(timeout_s=600))\n"
    )
    harness = subprocess.Popen([sys.executable, "-P", "-c", code], stdout=subprocess.PIPE)
    try:
        assert harness.stdout is not None
        harness.stdout.readline()
        wait_until(lambda: bool(flashrt_processes() - before), "the system to start")
        os.kill(harness.pid, signal.SIGKILL)
    finally:
        harness.wait()
        assert harness.stdout is not None
        harness.stdout.close()
    wait_until(lambda: not flashrt_processes() - before, "the system to end with its harness")


def test_a_stray_process_in_another_session_is_ended_with_its_system(toy: Path) -> None:
    items = read_inputs(INPUTS, toy, 1, 2)
    system = resolve_system("variants.py:leaves_a_child", toy)
    with SystemProcess(system, ["actions"], log_path=toy / "log") as process:
        process.wait_ready(120)
        process.send(items[0])
        strays = [number for number in process.members() if number != process.pid]
        assert strays
    wait_until(lambda: not any(psutil.pid_exists(number) for number in strays), "the stray to end")


def test_inputs_are_the_same_for_a_seed_and_recordings_can_be_used_again(toy: Path) -> None:
    first, again, other = (read_inputs(INPUTS, toy, seed, 4) for seed in (1, 1, 2))
    assert np.array_equal(first[3]["actions"], again[3]["actions"])
    assert not np.array_equal(first[3]["actions"], other[3]["actions"])
    write_recording(toy / "items.frec", first)
    assert np.array_equal(read_recording(toy / "items.frec")[2]["actions"], first[2]["actions"])
    assert check(toy, "program.yaml", inputs="items.frec")["equivalent"]


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ("raise ValueError('no data')", "no data"),
        ("return []", "at least one item"),
        ("yield {'a': 1}; yield {'b': 1}", "same input names"),
        ("import time; time.sleep(600); yield {}", "within 1 s"),
        ("yield {'a': object()}", "object"),
        ("yield {'a': 1}; yield 1", r"'bad.py:batches', item 1: expected items {input name: value}, got 1 \(int\)"),
        ("return 1", r"expected an iterable of items {input name: value}, got 1 \(int\)"),
        ("import os; os._exit(9)", "exit status 9"),
        ("import os; os.kill(os.getpid(), 9)", "signal SIGKILL"),
    ],
)
def test_a_bad_inputs_function_is_named(toy: Path, body: str, expected: str) -> None:
    (toy / "bad.py").write_text(f"def batches(seed, count):\n    {body}\n")
    with pytest.raises(InputError, match=expected) as caught:
        read_inputs("bad.py:batches", toy, 0, 4, timeout_s=1 if "sleep" in body else 120)
    assert "inputs" in str(caught.value)


@pytest.mark.parametrize("system", ["program.yaml", "split.yaml"])
def test_inputs_under_another_name_than_the_programs_are_to_be_renamed(toy: Path, system: str) -> None:
    (toy / "misnamed.py").write_text("def batches(seed, count):\n    yield {'actons': 1}\n")
    items = read_inputs("misnamed.py:batches", toy, 0, 1)
    with pytest.raises(InputError) as caught:
        collect(resolve_system(system, toy), items, QUICK, toy / "log")
    (found,) = caught.value.findings
    assert found.where == f"system '{system}', the program's input 'actions'"
    assert found.message.startswith("expected an inputs function that yields 'actions', got one that yields 'actons'")
    assert found.fix == "rename 'actons' to 'actions' in the inputs function, and call again"


def test_what_an_inputs_function_leaves_running_is_ended_and_not_waited_for(toy: Path) -> None:
    (toy / "leaving.py").write_text(
        "import subprocess, sys, threading, time\n"
        "def batches(seed, count):\n"
        "    threading.Thread(target=time.sleep, args=(600,)).start()\n"
        "    code = 'import time; time.sleep(600)'\n"
        "    child = subprocess.Popen([sys.executable, '-c', code], start_new_session=True)\n"
        "    print('said on the side')\n"
        "    for _ in range(count):\n"
        "        yield {'child': child.pid}\n"
    )
    items = read_inputs("leaving.py:batches", toy, 0, 2, timeout_s=120)
    assert len(items) == 2
    wait_until(lambda: not psutil.pid_exists(items[0]["child"]), "what the inputs function started to end")


def test_a_file_that_is_no_recording_is_refused(toy: Path) -> None:
    (toy / "bad.frec").write_bytes(b"\x00" * 100)
    with pytest.raises(InputError, match="recording"):
        read_inputs("bad.frec", toy, 0, 4)


def test_a_system_on_gpus_sees_its_own_and_no_others(toy: Path) -> None:
    settings = CheckSettings(num_batches=1, devices=("cuda:3", "cuda:1"), timeout_s=120)
    items = read_inputs(INPUTS, toy, 1, 1)
    streams = collect(resolve_system("variants.py:shows_devices", toy), items, settings, toy / "log")
    assert streams.values["devices"] == [["cuda:0", "cuda:1", "3,1"]]


def test_the_main_output_is_the_one_with_most_axes(toy: Path) -> None:
    settings = RunSettings(runs=1, duration_s=0.2, timeout_s=120)
    result = run_benchmark(resolve_system("variants.py:two_outputs", toy), INPUTS, toy, toy, settings)
    assert result["output"] == "frames"
    assert set(result["outputs"]) == {"frames", "words", "samples"}
    assert result["elements_per_batch"] == 6


def test_files_that_change_meanwhile_void_a_run_and_a_check(toy: Path) -> None:
    system = resolve_system("variants.py:edits_itself", toy)
    settings = RunSettings(runs=1, duration_s=0.2, elements_per_batch={"frames": 6}, timeout_s=120)
    result = run_benchmark(system, INPUTS, toy, toy, settings)
    assert not result["valid"]
    assert any("variants.py changed" in reason for reason in result["reasons"])
    with pytest.raises(InputError, match=r"variants\.py changed"):
        check(toy, "variants.py:edits_itself")


def test_real_work_that_outlasts_its_emulated_time_voids_the_run(toy: Path) -> None:
    (toy / "profile.yaml").write_text(
        "schema: flashrt/profile@1\ndevice: emulated\nprovenance: declared\noperations: {drift: 5, render: 5}\n"
    )
    text = (toy / "split.yaml").read_text().replace("devices: cpu", "devices: emulated\nprofile: profile.yaml")
    (toy / "emulated.yaml").write_text(text + "config: {delay_s: 0.02}\n")
    settings = RunSettings(runs=1, duration_s=0.4, emulated=True, timeout_s=120)
    result = run_benchmark(resolve_system("emulated.yaml", toy), INPUTS, toy, toy, settings)
    assert not result["valid"]
    assert any("operation 'drift' took" in reason for reason in result["reasons"])


def test_too_few_inputs_are_named_as_the_cause(toy: Path) -> None:
    (toy / "few.py").write_text(
        "import inputs\n\ndef batches(seed, count):\n    yield from inputs.batches(seed, min(count, 4))\n"
    )
    settings = RunSettings(runs=1, duration_s=0.2, elements_per_batch={"frames": 6}, timeout_s=120)
    result = run_benchmark(resolve_system("reference.py:serve", toy), "few.py:batches", toy, toy, settings)
    assert not result["valid"]
    assert any("the inputs yield 4 batches" in reason for reason in result["reasons"])


@pytest.mark.parametrize(
    ("system", "expected"),
    [("variants.py:surplus", "6 elements a batch are owed"), ("variants.py:ahead", "came before its input was due")],
)
def test_amounts_and_order_that_no_honest_system_has_void_a_run(toy: Path, system: str, expected: str) -> None:
    # Inputs come by the clock: outputs that are there at once are then early on any machine.
    settings = RunSettings(
        scenario="realtime", period_ms=20, runs=1, duration_s=2, max_batches=30,
        elements_per_batch={"frames": 6}, timeout_s=120,
    )  # fmt: skip
    result = run_benchmark(resolve_system(system, toy), INPUTS, toy, toy, settings)
    assert not result["valid"]
    assert any(expected in reason for reason in result["reasons"]), result["reasons"]


def test_streams_without_elements_prove_nothing(toy: Path) -> None:
    system = resolve_system("variants.py:empty", toy)
    verdict = check_equivalence(system, system, INPUTS, toy, toy, QUICK)
    assert not verdict["equivalent"]
    assert any("nothing is proved" in reason for reason in verdict["reasons"])


@pytest.mark.parametrize("hides", [True, False])
def test_a_candidate_that_edits_the_reference_changes_nothing_or_is_caught(
    toy: Path, hides: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = (toy / "reference.py").read_text()
    if not hides:
        monkeypatch.setattr("flashrt.bench.check.reference_files", lambda *systems: [])
    try:
        verdict = check(toy, "variants.py:edits_the_reference")
    except InputError as error:
        assert "reference.py changed" in str(error)  # noqa: PT017 - on hosts that cannot hide it, it is caught
        return
    # What it wrote to was not the reference.
    assert hides
    assert verdict["guards"]["reference-hidden"]["active"]
    assert (toy / "reference.py").read_text() == before


def test_a_message_that_no_system_sends_is_named(toy: Path) -> None:
    with pytest.raises(InputError, match=r"a span message whose 'name' is NoneType"):
        check(toy, "variants.py:odd_message")
