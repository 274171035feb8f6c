"""The queue gives no variant twice, believes no claim without proof, and knows when the search may stop."""

from __future__ import annotations

import json
import math
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from flashrt.errors import InputError
from flashrt.variants import Store, VariantQueue, open_store
from flashrt.variants.variant import default_rank

Add = Callable[..., str]
Prove = Callable[..., dict[str, str]]


def rules(error: InputError) -> set[str]:
    return {finding.rule for finding in error.findings}


def states(queue: VariantQueue) -> dict[str, str]:
    return {variant.id: variant.state for variant in queue.list().variants}


def test_add_makes_a_folder_that_shows_the_workspace(workspace: Path, queue: VariantQueue, add: Add) -> None:
    (workspace / "serve.py").write_text("x = 1\n")
    assert add() == "var-0001"
    variant = queue.list().variants[0]
    assert variant.folder == workspace / ".flashrt" / "variants" / "var-0001"
    assert (variant.folder / "serve.py").read_text() == "x = 1\n"
    assert variant.state == "pending"
    json.dumps(variant.as_dict())


def test_add_names_everything_that_is_wrong_and_keeps_nothing(workspace: Path, queue: VariantQueue) -> None:
    with pytest.raises(InputError) as caught:
        queue.add(" ", "", "b", "", parent="var-9", expected={"fps": float("nan")}, system="")
    assert rules(caught.value) == {
        "missing-hypothesis", "missing-transformation", "missing-legality", "unknown-variant", "bad-argument",
    }  # fmt: skip
    assert queue.list().variants == ()
    assert not (workspace / ".flashrt" / "variants").exists()


def test_next_follows_rank_then_age(queue: VariantQueue, add: Add) -> None:
    add(expected={"rate_ratio": 1.2})
    add(expected={"fps": 30.0, "reference_fps": 20.0})
    add()
    add(expected={"rate_ratio": 1.2})
    add(rank=9.0)
    offered = [queue.next().variant for _ in range(5)]
    assert [variant.id for variant in offered if variant] == [
        "var-0005",
        "var-0002",
        "var-0001",
        "var-0004",
        "var-0003",
    ]
    nothing = queue.next()
    assert nothing.variant is None
    assert not nothing.status.may_stop
    assert len(nothing.status.in_the_way) == 5
    assert nothing.as_dict()["variant"] is None


def test_a_claim_is_offered_again_after_an_hour(store: Store, add: Add) -> None:
    add()
    now = 1_800_000_000.0
    assert VariantQueue(store, now_s=lambda: now).next().variant is not None
    assert VariantQueue(store, now_s=lambda: now + 3600.0).next().variant is None
    later = VariantQueue(store, now_s=lambda: now + 3601.0)
    variant = later.next().variant
    assert variant is not None
    assert [step.to_state for step in variant.history] == ["pending", "claimed", "claimed"]
    assert later.next().variant is None


def test_processes_never_claim_the_same(
    workspace: Path, add: Add, start_python: Callable[..., subprocess.Popen[str]]
) -> None:
    for _ in range(12):
        add()
    script = (
        "import sys, pathlib\nfrom flashrt.variants import VariantQueue, open_store\n"
        "queue = VariantQueue(open_store(pathlib.Path(sys.argv[1])))\n"
        "print('ready', flush=True); sys.stdin.readline()\n"
        "while (found := queue.next().variant): print(found.id, flush=True)\n"
    )
    processes = [start_python(script, workspace) for _ in range(4)]
    for process in processes:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
    for process in processes:
        assert process.stdin is not None
        process.stdin.write("go\n")
        process.stdin.flush()
    claimed = [id for process in processes for id in process.communicate()[0].split()]
    assert sorted(claimed) == [f"var-{n:04d}" for n in range(1, 13)]


def test_measured_needs_a_passed_check_and_a_valid_run_of_one_system(
    queue: VariantQueue, add: Add, prove: Prove
) -> None:
    variant = add()
    proof = prove(digest="cafe")
    answer = queue.update(variant, "measured", **proof)
    assert answer.variant is not None
    assert answer.variant.state == "measured"
    assert answer.variant.equivalence == proof["equivalence"]
    assert answer.status.may_stop
    assert answer.status.in_the_way == ()


BAD_PROOFS: list[tuple[dict[str, Any], dict[str, Any], set[str]]] = [
    ({}, {"equivalence": None}, {"missing-equivalence"}),
    ({}, {"run": None}, {"missing-run"}),
    ({}, {"equivalence": " ", "run": ""}, {"missing-equivalence", "missing-run"}),
    ({}, {"equivalence": "eq-9"}, {"unknown-equivalence"}),
    ({}, {"equivalence": "run-0"}, {"unknown-equivalence"}),
    ({}, {"run": "run-9"}, {"unknown-run"}),
    ({"equivalent": False}, {}, {"not-equivalent"}),
    ({"equivalent": "true"}, {}, {"not-equivalent"}),
    ({"equivalent": 1}, {}, {"not-equivalent"}),
    ({"valid": False}, {}, {"invalid-run"}),
    ({"valid": None}, {}, {"invalid-run"}),
    ({"equivalent": False, "valid": False}, {}, {"not-equivalent", "invalid-run"}),
    ({"run_digest": "other"}, {}, {"different-systems"}),
    ({"run_digest": "base"}, {}, {"different-systems", "variant-is-reference"}),
    ({"digest": "base"}, {}, {"variant-is-reference"}),
    ({"reference": "other.py:serve"}, {}, {"other-system"}),
]


def spell(value: object) -> str:
    """Return a name that is the same in every process."""
    return str(sorted(value)) if isinstance(value, set) else str(value)


@pytest.mark.parametrize(("evidence", "change", "expected"), BAD_PROOFS, ids=spell)
def test_measured_is_refused_in_each_bad_way_and_nothing_changes(
    queue: VariantQueue, add: Add, prove: Prove, evidence: dict[str, Any], change: dict[str, Any], expected: set[str]
) -> None:
    variant, other = add(system="fast.py:serve"), add()
    proof: dict[str, Any] = {**prove(**evidence), **change}
    before = queue.list()
    with pytest.raises(InputError) as caught:
        queue.update(variant, "measured", ranks={other: 5}, system=None, **proof)
    assert rules(caught.value) == expected
    assert queue.list() == before


def test_evidence_without_digests_is_refused(queue: VariantQueue, store: Store, add: Add) -> None:
    store.put_record("equivalence", "eq-1", {"equivalent": True, "candidate": {"reference": "a"}})
    store.put_record("run", "run-1", {"valid": True, "rechecked": {"equal": True}})
    with pytest.raises(InputError) as caught:
        queue.update(add(), "measured", equivalence="eq-1", run="run-1")
    assert rules(caught.value) == {"evidence-without-digest"}
    assert len(caught.value.findings) == 3


def test_a_system_may_be_named_in_the_variants_own_folder_or_anew(
    workspace: Path, queue: VariantQueue, add: Add, prove: Prove
) -> None:
    first, second = add(system="fast.py:serve"), add(system="fast.py:serve")
    queue.update(first, "measured", **prove(reference=f".flashrt/variants/{first}/fast.py:serve"))
    queue.update(second, "measured", system="new.py:serve", **prove(reference=f"{workspace}/new.py:serve"))
    assert [variant.system for variant in queue.list().variants] == ["fast.py:serve", "new.py:serve"]


@pytest.mark.parametrize("reason", [None, "", "   ", "slow", "too slow"])
def test_removed_needs_a_reason_of_a_few_words(queue: VariantQueue, add: Add, reason: str | None) -> None:
    variant = add()
    with pytest.raises(InputError) as caught:
        queue.update(variant, "removed", reason=reason)
    assert rules(caught.value) == {"missing-reason"}
    assert states(queue) == {variant: "pending"}
    queue.update(variant, "removed", reason="no faster than the reference")
    assert states(queue) == {variant: "removed"}


def test_everything_wrong_is_said_at_once(queue: VariantQueue, add: Add) -> None:
    add()
    decided = add()
    queue.update(decided, "removed", reason="not equal at frame three")
    with pytest.raises(InputError) as caught:
        queue.update("var-0009", "done", ranks={"var-0008": 1, decided: 2, "var-0001": float("inf")})
    assert rules(caught.value) == {"unknown-variant", "unknown-state", "already-decided", "bad-ranks"}
    with pytest.raises(InputError) as caught:
        queue.update("var-0001", "claimed")
    assert "variant_next" in str(caught.value)


def test_ranks_change_with_the_decision_or_not_at_all(queue: VariantQueue, add: Add) -> None:
    first, second, third = add(), add(), add()
    queue.update(first, "removed", reason="forbidden by the cache", ranks={third: 4})
    with pytest.raises(InputError):
        queue.update(second, "removed", reason="forbidden by the cache", ranks={second: 9})
    offered = queue.next().variant
    assert offered is not None
    assert offered.id == third


def test_a_claim_is_given_back_and_a_decision_opened_again_with_history(
    queue: VariantQueue, add: Add, prove: Prove
) -> None:
    variant = add()
    queue.next()
    queue.update(variant, "pending")
    proof = prove()
    queue.update(variant, "measured", **proof)
    for state in ("measured", "removed"):
        with pytest.raises(InputError) as caught:
            queue.update(variant, state, reason="once more with feeling", **proof)
        assert "already-decided" in rules(caught.value)
    with pytest.raises(InputError) as caught:
        queue.update(variant, "pending")
    assert rules(caught.value) == {"missing-reason"}
    answer = queue.update(variant, "pending", reason="measured on a busy host")
    assert answer.variant is not None
    assert (answer.variant.run, answer.variant.equivalence) == (None, None)
    steps = [(step.from_state, step.to_state) for step in answer.variant.history]
    assert steps == [(None, "pending"), ("pending", "claimed"), ("claimed", "pending"), ("pending", "measured"),
                     ("measured", "pending")]  # fmt: skip
    assert answer.variant.history[3].run == proof["run"]
    assert not answer.status.may_stop


def test_may_stop(queue: VariantQueue, add: Add, prove: Prove) -> None:
    status = queue.list().status
    assert not status.may_stop
    assert "seed_queue" in status.in_the_way[0]
    first, second = add(), add()
    assert not queue.update(first, "removed", reason="not equal at frame three").status.may_stop
    all_removed = queue.update(second, "removed", reason="no faster than before").status
    assert all_removed.may_stop
    assert "none was measured" in all_removed.note
    third = add()
    assert not queue.list().status.may_stop
    status = queue.update(third, "measured", **prove()).status
    assert status.may_stop
    assert status.note == ""
    assert status.counts == {"pending": 0, "claimed": 0, "measured": 1, "removed": 2}


CANDIDATES: list[dict[str, Any]] = [
    {"id": "c1", "transformation": "stream", "targets": ["dit -> vae"], "legality": "causal decoder", "legal": True,
     "bottleneck": "vae", "expected": {"rate_ratio": 1.3},
     "deployment": {"schema": "flashrt/deployment@1", "program": "apps/app.yaml", "place": {"*": "a"}}},
    {"id": "c2", "transformation": "double-buffer", "targets": [], "legality": "dit.kv is read after it is written",
     "legal": False, "bottleneck": "dit", "expected": {}},
    {"id": "c3", "transformation": "disaggregate", "targets": ["vae"], "legality": "no shared state", "legal": True,
     "bottleneck": "vae", "expected": {"rate_ratio": 1.6}},
]  # fmt: skip


def test_seeding_twice_adds_once(workspace: Path, queue: VariantQueue) -> None:
    first = queue.seed([*CANDIDATES, CANDIDATES[0]])
    assert (first.added, first.removed, first.already) == (("var-0001", "var-0003"), ("var-0002",), ())
    before = queue.list()
    again = queue.seed(CANDIDATES)
    assert (again.added, again.removed) == ((), ())
    assert sorted(again.already) == ["var-0001", "var-0002", "var-0003"]
    assert queue.list() == before
    illegal = before.variants[1]
    assert (illegal.state, illegal.reason) == ("removed", "dit.kv is read after it is written")
    assert not (workspace / ".flashrt" / "variants").exists()


def placed(id: str, groups: dict[str, list[int]], place: dict[str, str], **more: Any) -> dict[str, Any]:
    deployment = {"groups": groups, "place": place, **more}
    return {**CANDIDATES[0], "id": id, "expected": {}, "deployment": deployment}


def test_candidates_that_need_too_many_devices_or_repeat_a_deployment_are_removed(queue: VariantQueue) -> None:
    edges = ["a -> b", "b -> c"]
    seeds = queue.seed(
        [
            placed("one", {"a": [0], "b": [1]}, {"x": "a", "y": "b"}, blocking=edges),
            placed("renamed", {"p": [1], "q": [0]}, {"y": "p", "x": "q"}, blocking=edges[::-1]),
            placed("ordered", {"a": [0], "b": [1]}, {"x": "a", "y": "b"}, blocking=edges, order={"0": ["x"]}),
            placed("swapped", {"a": [1], "b": [0]}, {"x": "a", "y": "b"}, blocking=edges),
            placed("wide", {"a": [0, 1], "b": [2]}, {"x": "a", "y": "b"}),
            CANDIDATES[1],
        ],
        max_devices=2,
    )
    assert seeds.added == ("var-0001", "var-0003", "var-0004")
    assert seeds.removed == ("var-0002", "var-0005", "var-0006")
    reasons = {variant.id: variant.reason for variant in queue.list().variants}
    assert reasons["var-0002"] == "the same deployment as one (var-0001)"
    assert reasons["var-0005"] == "it needs 3 devices; max_devices is 2"
    assert reasons["var-0006"] == CANDIDATES[1]["legality"]


def test_a_candidate_that_repeats_one_of_an_earlier_seeding_names_it(queue: VariantQueue) -> None:
    first = placed("one", {"a": [0]}, {"*": "a"})
    queue.seed([first])
    assert queue.seed([first, placed("two", {"b": [0]}, {"*": "b"})]).removed == ("var-0002",)
    assert queue.list().variants[1].reason == "the same deployment as one (var-0001)"


def test_a_candidate_that_is_predicted_to_be_no_better_comes_last(queue: VariantQueue, add: Add) -> None:
    same = {"versus_baseline": {"fps": 1.009, "latency": 0.995, "first_output": 1.2}}
    queue.seed([{**CANDIDATES[0], "expected": same}])
    nothing_known = add()
    better = add(expected={"versus_baseline": {"fps": 0.5, "latency": 0.9, "first_output": 1.0}})
    offered = [queue.next().variant for _ in range(3)]
    assert [variant.id for variant in offered if variant] == [better, nothing_known, "var-0001"]


def test_one_pending_variant_is_claimed_by_its_id(queue: VariantQueue, add: Add) -> None:
    first, second = add(rank=2), add()
    claimed = queue.next(second).variant
    assert claimed is not None
    assert (claimed.id, claimed.state) == (second, "claimed")
    queue.update(first, "removed", reason="no faster than the reference")
    for id, rule, words in (
        (second, "not-pending", "give the claim back"),
        (first, "not-pending", "open it again"),
        ("var-0009", "unknown-variant", "did you mean"),
    ):
        before = queue.list()
        with pytest.raises(InputError) as caught:
            queue.next(id)
        assert rules(caught.value) == {rule}
        assert words in str(caught.value)
        assert queue.list() == before


def test_answers_are_short_whatever_the_queue_holds(queue: VariantQueue, add: Add) -> None:
    for _ in range(8):
        add()
    answer = queue.next().as_dict()
    assert "history" not in answer
    assert len(answer["in_the_way"]) == 6
    assert answer["in_the_way"][-1] == "and 3 more"
    assert answer["counts"] == {"pending": 7, "claimed": 1, "measured": 0, "removed": 0}
    listing = queue.list()
    assert listing.as_dict()["in_the_way"] == answer["in_the_way"]
    assert all("history" not in variant for variant in listing.as_dict()["variants"])
    assert len(listing.as_dict(history=True)["variants"][0]["history"]) == 2


def test_a_measured_variant_keeps_the_system_of_its_check(queue: VariantQueue, add: Add, prove: Prove) -> None:
    first, second = add(), add(system="fast.py:serve")
    queue.update(first, "measured", **prove(reference="own.py:serve"))
    queue.update(second, "measured", **prove(reference=f".flashrt/variants/{second}/fast.py:serve"))
    assert [variant.system for variant in queue.list().variants] == ["own.py:serve", "fast.py:serve"]


def test_a_profile_that_comes_later_fills_in_what_is_expected(queue: VariantQueue) -> None:
    queue.seed([{**CANDIDATES[0], "expected": None}])
    assert queue.list().variants[0].rank == 0
    queue.seed(CANDIDATES[:1])
    assert queue.list().variants[0].rank == 1.3
    queue.update("var-0001", "pending", ranks={"var-0001": 0.5})
    queue.seed([{**CANDIDATES[0], "expected": {"rate_ratio": 7}}])
    assert queue.list().variants[0].rank == 0.5


def test_a_bad_candidate_is_refused_with_every_key(queue: VariantQueue) -> None:
    with pytest.raises(InputError) as caught:
        queue.seed([CANDIDATES[0], {"id": "x", "legal": "yes"}])
    assert len(caught.value.findings) == 4
    assert queue.list().variants == ()


def test_a_claimed_candidate_gets_its_folder_and_deployment(workspace: Path, queue: VariantQueue) -> None:
    (workspace / "apps").mkdir()
    (workspace / "apps" / "app.yaml").write_text("name: app\n")
    queue.seed(CANDIDATES)
    first, second = queue.next().variant, queue.next().variant
    assert first is not None
    assert second is not None
    assert (first.id, second.id) == ("var-0003", "var-0001")
    assert second.folder is not None
    document = yaml.safe_load((second.folder / "deployment.yaml").read_text())
    assert document["program"] == "apps/app.yaml"
    assert (second.folder / document["program"]).read_text() == "name: app\n"
    assert first.folder is not None
    assert not (first.folder / "deployment.yaml").exists()


def test_a_folder_that_is_gone_is_made_again(queue: VariantQueue, add: Add) -> None:
    from flashrt.variants import remove_folder

    add()
    variant = queue.list().variants[0]
    assert variant.folder is not None
    remove_folder(variant.folder.parents[2], variant.id)
    claimed = queue.next().variant
    assert claimed is not None
    assert claimed.folder == variant.folder
    assert variant.folder.is_dir()


def test_lineage_and_the_parents_folder(queue: VariantQueue, add: Add) -> None:
    first = add()
    folder = queue.list().variants[0].folder
    assert folder is not None
    (folder / "changed.py").write_text("faster = True\n")
    second, third = add(parent=first), add(parent=first)
    fourth = add(parent=second)
    variants = {variant.id: variant for variant in queue.list().variants}
    assert variants[first].children == (second, third)
    assert [variants[id].depth for id in (first, second, third, fourth)] == [0, 1, 1, 2]
    leaf = variants[fourth].folder
    assert leaf is not None
    assert (leaf / "changed.py").read_text() == "faster = True\n"


KILLED_WHILE_ADDING = """
import os, pathlib, signal, sys
import flashrt.variants.queue as queue
from flashrt.variants import open_store
real = queue.isolate
def die(*arguments):
    made = real(*arguments)
    if sys.argv[2] == "wait":
        print("made", flush=True); sys.stdin.readline()
    else:
        os.kill(os.getpid(), signal.SIGKILL)
    return made
queue.isolate = die
queue.VariantQueue(open_store(pathlib.Path(sys.argv[1]))).add("h", "t", "b", "l")
"""


def test_a_crash_while_adding_leaves_no_half_variant(
    workspace: Path, queue: VariantQueue, add: Add, start_python: Callable[..., subprocess.Popen[str]]
) -> None:
    add()
    process = start_python(KILLED_WHILE_ADDING, workspace, "die")
    process.communicate()
    folder = workspace / ".flashrt" / "variants"
    assert sorted(path.name for path in folder.iterdir()) == ["var-0001", "var-0002"]
    assert list(states(queue)) == ["var-0001"]
    VariantQueue(open_store(workspace))
    assert [path.name for path in folder.iterdir()] == ["var-0001"]
    assert add() == "var-0003"


def test_opening_leaves_alone_what_another_process_is_adding(
    workspace: Path, start_python: Callable[..., subprocess.Popen[str]]
) -> None:
    process = start_python(KILLED_WHILE_ADDING, workspace, "wait")
    assert process.stdout is not None
    assert process.stdout.readline() == "made\n"
    queue = VariantQueue(open_store(workspace))
    assert queue.list().variants == ()
    process.communicate("go\n")
    assert process.returncode == 0
    variant = queue.list().variants[0]
    assert variant.folder is not None
    assert variant.folder.is_dir()


ANYTHING = st.one_of(
    st.none(), st.text(), st.booleans(), st.floats(), st.integers(-3, 3), st.just(10**400), st.just(1e-320)
)


@settings(deadline=None, max_examples=300)
@given(st.dictionaries(st.sampled_from(["rate_ratio", "fps", "reference_fps", "versus_baseline"]), ANYTHING))
def test_a_rank_is_always_a_finite_number(expected: dict[str, Any]) -> None:
    assert math.isfinite(default_rank(expected))


def test_the_rank_of_an_analysed_candidate_is_what_it_helps_most() -> None:
    assert default_rank({"versus_baseline": {"fps": 1.9, "latency": 1.0, "first_output": 0.5}}) == 2.0
    assert default_rank({"versus_baseline": {"fps": 1.9, "latency": 1.0, "first_output": 1.0}}) == 1.9
    assert default_rank({"versus_baseline": {}}) == 0.0
