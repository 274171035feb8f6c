"""What keeps a variant from being measured although a check passed and a run is valid."""

from __future__ import annotations

from typing import Any

import pytest

from flashrt.errors import InputError
from flashrt.variants import Store, VariantQueue

SYSTEM = {"reference": "fast.py:serve", "digest": "d-fast", "entry": "/w/fast.py", "entry_digest": "e-fast"}
REFERENCE = {"reference": "reference.py:serve", "digest": "d-ref", "entry": "/w/reference.py", "entry_digest": "e-ref"}
PROGRAM = {"reference": "program.yaml", "digest": "d-prog", "entry": "/w/program.yaml", "entry_digest": "e-prog"}
OTHER = {"reference": "other.py:serve", "digest": "d-other", "entry": "/w/other.py", "entry_digest": "e-other"}

RECHECKED = {"equal": True}


def decide(store: Store, *, run_system: Any = SYSTEM, rechecked: Any = RECHECKED, **check: Any) -> Any:
    queue = VariantQueue(store)
    variant = queue.add("it is faster", "rewrite", "period", "the same operations").variant
    assert variant is not None
    record = {"equivalent": True, "baseline": REFERENCE, "candidate": SYSTEM, "num_batches": 8, **check}
    store.put_record("equivalence", "eq-1", record)
    store.put_record("run", "run-1", {"valid": True, "system": run_system, "rechecked": rechecked})
    return queue.update(variant.id, "measured", equivalence="eq-1", run="run-1")


@pytest.mark.parametrize("rechecked", [None, {"equal": False}, "yes"])
def test_a_run_that_was_compared_with_nothing_does_not(store: Store, rechecked: Any) -> None:
    prove_program(store)
    with pytest.raises(InputError, match=r"compared with the baseline's while it was timed.*call bench_run again"):
        decide(store, rechecked=rechecked)


def prove_program(store: Store) -> None:
    proof = {"equivalent": True, "role": "program", "baseline": REFERENCE, "candidate": PROGRAM, "num_batches": 8}
    store.put_record("equivalence", "eq-0", proof)


@pytest.mark.parametrize("baseline", [REFERENCE, PROGRAM])
def test_a_check_against_the_reference_or_the_proved_program_counts(store: Store, baseline: dict[str, Any]) -> None:
    prove_program(store)
    assert decide(store, baseline=baseline).variant.state == "measured"


@pytest.mark.parametrize("baseline", [OTHER, {**REFERENCE, "entry_digest": "e-edited"}])
def test_a_check_against_another_system_does_not(store: Store, baseline: dict[str, Any]) -> None:
    prove_program(store)
    with pytest.raises(InputError, match=r"ir_interpret proved the program equal to, 'reference.py:serve'"):
        decide(store, baseline=baseline)


@pytest.mark.parametrize(
    ("check", "expected"),
    [
        ({"num_batches": 4}, "at least 8 batches"),
        ({"tolerance": {"tier": "numeric", "relative": 0.99}}, r"at most 0\.02"),
    ],
)
def test_a_weak_check_does_not_count(store: Store, check: dict[str, Any], expected: str) -> None:
    with pytest.raises(InputError, match=expected):
        decide(store, **check)


def test_the_files_that_differ_between_check_and_run_are_named(store: Store) -> None:
    checked = {**SYSTEM, "files": {"fast.py": "1", "kept.py": "2"}}
    run = {**SYSTEM, "digest": "d-other", "files": {"fast.py": "3", "kept.py": "2", "log.json": "4"}}
    with pytest.raises(InputError, match=r"whose files differ: 'fast.py', 'log.json'"):
        decide(store, run_system=run, candidate=checked)
