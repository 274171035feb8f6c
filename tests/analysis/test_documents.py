"""Profiles and deployments: every finding at once, nothing extrapolated, deadlocks named."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from flashrt.analysis import (
    analyze_program,
    deployment_document,
    evaluate_placement,
    matches,
    read_deployment,
    read_profile,
)
from flashrt.analysis.figures import first_frames, releasing_chunk
from flashrt.errors import InputError
from flashrt.ir import BuiltProgram, build

FOLDER = Path(__file__).parent


def program() -> BuiltProgram:
    """A fan: `a` feeds `b` and `c`, which feed `d`; one opaque node; four steps."""
    return build(
        {
            "schema": "flashrt/program@1", "name": "fan", "entry": "app",
            "graphs": {"app": {
                "inputs": {"x": {}}, "outputs": {"y": {}},
                "nodes": {
                    "a": {"op": "a", "degrees": [1, 2],
                          "outputs": {"y": {"dtype": "float32", "shape": [250, 1000]}}},
                    "b": {"op": "b"}, "c": {"op": "c"}, "d": {"op": "d"},
                    "e": {"opaque": "engine", "devices": 2},
                },
                "edges": [{"from": f, "to": t, "mode": "blocking"} for f, t in
                          [("x", "a.x"), ("a.y", "b.x"), ("a.y", "c.x"), ("b.y", "d.b"), ("c.y", "d.c"), ("d.y", "e.x"),
                           ("e.y", "y")]],
            }},
        },
        FOLDER,
    )  # fmt: skip


def profile(**changes: Any) -> dict[str, Any]:
    base = {
        "schema": "flashrt/profile@1", "device": "emulated", "provenance": "measured",
        "operations": {"a": {"1": 10, 2: 6}, "b": 3.0, "c": 4, "d": 5, "e": {"2": 7}},
    }  # fmt: skip
    return {**base, **changes}


GROUPS = {"g": [0], "h": [1], "two": [2, 3]}
PLACE = {"a": "g", "b": "g", "c": "h", "d": "h", "e": "two"}


def rules(error: InputError) -> list[str]:
    return sorted(finding.rule for finding in error.findings)


def test_the_most_specific_pattern_counts() -> None:
    read = read_profile(profile(operations={"*": 1, "dit/*": 2, "dit/step[*]": 3, "dit/step[0]": {"1": 4, "2": 2}}))
    assert [read.time_ms(path, 1) for path in ("vae", "dit/enc", "dit/step[3]", "dit/step[0]")] == [1, 2, 3, 4]
    assert read.degrees("dit/step[0]") == (1, 2)


def test_a_missing_degree_names_those_known_and_is_never_extrapolated() -> None:
    read = read_profile(profile(operations={"vae": {"1": 4, "2": 3}}))
    with pytest.raises(InputError, match=r"'1', '2'.*nearest degree: 2; times are never extrapolated"):
        read.time_ms("vae", 4)
    with pytest.raises(InputError) as caught:
        read.require_times({"vae": 4, "dit": 1, "va": 2})
    assert len(caught.value.findings) == 3
    assert any("did you mean 'vae'" in str(finding) for finding in caught.value.findings)


def test_transfers() -> None:
    read = read_profile(
        profile(transfer={"latency_ms": 1, "gigabytes_per_s": 2, "edges": {"dit -> vae": 5, "dit/step[3] -> vae": 9}})
    )
    assert read.transfer_ms("dit/step[0]", "vae", None) == 5
    assert read.transfer_ms("dit/step[3]", "vae", 10**9) == 9
    assert read.transfer_ms("dit/step[3]", "vae", None, 4) == 1 + 8 / 4
    assert read.transfer_ms("vae", "dit/step[0]", 10**6) == 1.5
    assert read.transfer_ms("vae", "dit/step[0]", None) == 1
    assert read.transfer_ms("<input>", "vae", 10**6) == 0
    built = program()
    timed = read_profile(profile(transfer={"gigabytes_per_s": 1}), built)
    cost = evaluate_placement(built, timed, read_deployment({"groups": GROUPS, "place": PLACE}, built))
    # 250 x 1000 float32 are one million bytes: one millisecond, on the one edge whose port says its shape.
    assert cost.latency_ms == 10 + 1 + 4 + 5 + 7


def test_every_finding_of_a_profile_at_once() -> None:
    broken = profile(provenance="guessed", operations={"a": {"x": 1, "0": 2}, "b": -1}, colour="red")
    with pytest.raises(InputError) as caught:
        read_profile(broken)
    text = str(caught.value)
    assert len(caught.value.findings) >= 5
    assert all(part in text for part in ("provenance", "colour", "'a'", "'b'"))
    with pytest.raises(InputError) as caught:
        read_profile(profile(operations={"z": 1}, memory={"q": 1}, transfer={"edges": {"a to b": 1}}), program())
    assert rules(caught.value) == ["transfer-edge", "unknown-operation", "unknown-operation"]


def test_chunk_shares_have_to_fit() -> None:
    read = read_profile(profile(chunks={"a": [3, 1, 2], "b": [1, 1]}))
    assert read.split_ticks("a", 90, 3) == [45, 15, 30]
    assert read.split_ticks("a", 90, 6) == [30, 10, 10, 10, 10, 20]
    assert read.split_ticks("c", 90, 3) == [30, 30, 30]
    with pytest.raises(InputError, match="3 shares for the 3 chunks of 'b', or 3: first, middle, last"):
        read.split_ticks("b", 90, 3)


def test_every_finding_of_a_deployment_at_once() -> None:
    document = {
        "groups": {"g": [0, 0], "h": [1, 2]},
        "place": {"a": "g", "b": "nowhere", "*": "g", "e": "h", "zz": "g"},
        "order": {0: ["a", "a"], 7: ["b"], "1": ["c", "a", "e", "f"]},
        "blocking": ["a.y -> b.z"],
    }
    with pytest.raises(InputError) as caught:
        read_deployment(document, program())
    found = rules(caught.value)
    assert {"device-twice", "unknown-group", "unknown-operation", "degree", "order-repeats", "unknown-device",
            "not-on-device", "order-omits", "unknown-edge"} <= set(found), found  # fmt: skip


@pytest.mark.parametrize(
    ("change", "rule"),
    [
        ({"place": {k: v for k, v in PLACE.items() if k != "c"}}, "not-placed"),
        ({"place": {**{k: v for k, v in PLACE.items() if k != "c"}, "c*": "g", "*c": "h"}}, "placed-twice"),
        ({"place": {**PLACE, "b": "two"}}, "degree"),
        ({"place": {**PLACE, "e": "g"}}, "opaque-devices"),
        ({"order": {0: ["a"]}}, "order-omits"),
        ({"order": {0: ["a", "b", "c"]}}, "not-on-device"),
        ({"order": {0: ["a", "b", "b"]}}, "order-repeats"),
        ({"order": {0: ["a", "b", "zz"]}}, "unknown-operation"),
        ({"program": "prog-000000000000"}, "other-program"),
        ({"groups": {**GROUPS, "none": []}}, "empty-group"),
        ({"colour": "red"}, "unknown-key"),
    ],
)
def test_each_rule_of_a_deployment(change: dict[str, Any], rule: str) -> None:
    with pytest.raises(InputError) as caught:
        read_deployment({"groups": GROUPS, "place": PLACE, **change}, program())
    assert rules(caught.value) == [rule]


def test_an_order_against_the_dataflow_is_a_named_deadlock() -> None:
    built = program()
    read = read_profile(profile(), built)
    document = {"groups": GROUPS, "place": PLACE, "order": {"1": ["d", "c"]}}
    with pytest.raises(InputError) as caught:
        evaluate_placement(built, read, read_deployment(document, built))
    assert rules(caught.value) == ["deadlock"]
    assert "device 1" in str(caught.value)
    assert "c.y -> d.c" in str(caught.value)
    # Two devices that agree with the dataflow each, but not with one another.
    crossed = {
        "groups": {"g": [0, 1], "h": [0], "i": [1], "two": [2, 3]},
        "place": {"a": "g", "b": "h", "c": "i", "d": "h", "e": "two"},
        "order": {0: ["a", "b", "d"], 1: ["c", "a"]},
    }
    with pytest.raises(InputError, match=r"deadlock.*a -\[.*c -\[|deadlock.*c -\[.*a -\["):
        evaluate_placement(built, read, read_deployment(crossed, built))


def test_the_order_found_is_written_into_the_deployment() -> None:
    built = program()
    read = read_profile(profile(operations={"a": 1, "b": 1, "c": 9, "d": 1, "e": {2: 1}}), built)
    document = {"groups": {"g": [0], "two": [1, 2]}, "place": {"*": "g", "e": "two"}, "devices": "emulated"}
    cost = evaluate_placement(built, read, read_deployment(document, built))
    assert cost.order_proof == "optimal"
    written = deployment_document(cost.deployment)
    assert written["order"] == {"0": ["a", "b", "c", "d"], "1": ["e"], "2": ["e"]}
    again = evaluate_placement(built, read, read_deployment(written, built))
    assert again.order_proof == "given"
    assert again.latency_ms == cost.latency_ms == 13


def test_neighbours_that_take_turns_show_their_first_chunk_earlier() -> None:
    chunks = {"mode": "streaming", "chunks": 2}
    built = build(
        {
            "schema": "flashrt/program@1", "name": "turns", "entry": "app",
            "graphs": {"app": {
                "inputs": {"x": {}}, "outputs": {"y": {}, "z": {}},
                "nodes": {name: {"op": name} for name in ("u", "aside", "v", "w")},
                "edges": [{"from": "x", "to": "u.x", "mode": "blocking"},
                          {"from": "x", "to": "aside.x", "mode": "blocking"},
                          {"from": "u.y", "to": "v.x", **chunks}, {"from": "v.y", "to": "w.x", **chunks},
                          {"from": "w.y", "to": "y", **chunks}, {"from": "aside.y", "to": "z", "mode": "blocking"}],
            }},
        },
        FOLDER,
    )  # fmt: skip
    read = read_profile(profile(operations={"u": 10, "v": 10, "w": 20, "aside": 0}), built)
    document = {"groups": {"g": [0], "h": [1]}, "place": {"*": "g", "w": "h"}}
    turns = evaluate_placement(built, read, read_deployment(document, built))
    assert turns.interleave
    assert turns.latency_ms == 30
    assert turns.order_proof == "optimal"
    assert deployment_document(turns.deployment)["interleave"] is True
    whole = evaluate_placement(built, read, read_deployment({**document, "interleave": False}, built))
    assert whole.latency_ms == 35
    assert whole.t_min_ms == turns.t_min_ms == 20


def test_a_search_that_is_cut_says_so() -> None:
    nodes = {f"n{i}": {"op": "f"} for i in range(5)} | {f"m{i}": {"op": "f"} for i in range(5)}
    edges = [{"from": "x", "to": f"n{i}.x", "mode": "blocking"} for i in range(5)]
    edges += [{"from": f"n{i}.y", "to": f"m{i}.x", "mode": "blocking"} for i in range(5)]
    edges += [{"from": f"m{i}.y", "to": f"y{i}", "mode": "blocking"} for i in range(5)]
    built = build(
        {
            "schema": "flashrt/program@1", "name": "wide", "entry": "app",
            "graphs": {"app": {"inputs": {"x": {}}, "outputs": {f"y{i}": {} for i in range(5)}, "nodes": nodes,
                               "edges": edges}},
        },
        FOLDER,
    )  # fmt: skip
    times = {f"n{i}": 9 - i for i in range(5)} | {f"m{i}": (5 * i) % 7 + 2 * i for i in range(5)}
    read = read_profile(profile(operations=times), built)
    placement = read_deployment({"groups": {"g": [0], "h": [1]}, "place": {"n?": "g", "m?": "h"}}, built)
    cut = evaluate_placement(built, read, placement, node_limit=3)
    assert cut.order_proof == "heuristic"
    proved = evaluate_placement(built, read, placement)
    assert proved.order_proof == "optimal"
    assert proved.latency_ms <= cut.latency_ms
    # Johnson's rule gives the least latency of two machines in a row: no order is better.
    first, second = [times[f"n{i}"] for i in range(5)], [times[f"m{i}"] for i in range(5)]
    jobs = sorted(p for p in zip(first, second, strict=True) if p[0] < p[1])
    jobs += sorted((p for p in zip(first, second, strict=True) if p[0] >= p[1]), key=lambda p: -p[1])
    end_first = end_second = 0
    for p, q in jobs:
        end_first += p
        end_second = max(end_second, end_first) + q
    assert proved.latency_ms >= end_second
    assert cut.t_min_ms == max(sum(first), sum(second))


def test_a_deployment_without_a_profile_is_refused_and_both_documents_findings_come_together() -> None:
    with pytest.raises(InputError, match="profile_measure"):
        analyze_program(program(), deployment={"groups": GROUPS, "place": PLACE})
    with pytest.raises(InputError) as caught:
        analyze_program(program(), profile(operations={"z": 1}), {"groups": GROUPS, "place": {**PLACE, "c": "q"}})
    assert rules(caught.value) == ["unknown-group", "unknown-operation"]


def test_importing_the_analysis_imports_no_heavy_library() -> None:
    code = (
        "import sys, flashrt.analysis; heavy = {'torch', 'numpy', 'scipy', 'networkx', 'matplotlib'} & set(sys.modules)"
        "; sys.exit(f'imported {sorted(heavy)}' if heavy else 0)"
    )
    subprocess.run([sys.executable, "-P", "-c", code], check=True, timeout=60)


@pytest.mark.parametrize(
    "change",
    [
        {"operations": {"a": 1e10}},
        {"frames_per_batch": 1_000_001},
        {"chunks": {"a": [1] * 1025}},
        {"chunks": {"a": [1e300, 1e300]}},
        {"operations": {"a": {"1": 1, "1 ": 2}}},
        {"operations": {"a": {"²": 1}}},
    ],
)
def test_profiles_have_limits_and_say_each_degree_once(change: dict[str, Any]) -> None:
    with pytest.raises(InputError):
        read_profile(profile(**change))


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"order": {"0": ["a", "b"], "00": ["b", "a"]}}, "'00'"),
        ({"groups": {**GROUPS, "g": [True]}}, "integer"),
        ({"period_ms": 1e10}, "less than"),
        ({"devices": "tpu"}, "'emulated'"),
    ],
)
def test_deployments_have_limits_and_say_each_device_once(change: dict[str, Any], word: str) -> None:
    with pytest.raises(InputError, match=word):
        read_deployment({"groups": GROUPS, "place": PLACE, **change}, program())


def test_shares_add_up_and_only_the_first_frame_of_a_chunk_counts() -> None:
    read = read_profile(profile(chunks={"a": [1e-9, 1e9, 0, 0.3, 0]}))
    assert sum(read.split_ticks("a", 10**18 + 1, 5)) == 10**18 + 1
    for chunks, frames in ((3, 12), (3, 7), (5, 5), (4, 3)):
        released = [releasing_chunk(frame, chunks, frames) for frame in range(frames)]
        assert list(first_frames(chunks, frames)) == [released.index(chunk) for chunk in dict.fromkeys(released)]


def test_a_pattern_of_many_stars_is_matched_at_once() -> None:
    assert not matches("*" * 200 + "z", "a" * 200)
