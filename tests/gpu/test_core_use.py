"""The time that others take on cores is never more than there was."""

from __future__ import annotations

from flashrt.gpu.sampler import CoreUse, Family


def test_processes_that_move_between_cores_do_not_take_more_than_there_is() -> None:
    # What they used counts for the core that they were on last: more than a second of one in a second.
    used = {(7, "a"): 900_000.0, (8, "b"): 300_000.0}
    found = CoreUse(frozenset({0}), Family(root=99), _used=used, _begin_s=1.0, _end_s=2.0).as_dict()
    assert found["share"] == 1
    assert [(one["pid"], one["share"]) for one in found["processes"]] == [(7, 0.75), (8, 0.25)]
