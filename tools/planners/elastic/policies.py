"""Policies: the method, the baselines and each half of the method alone, as settings of one scheduler."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from flashrt.errors import input_error, listed


@dataclass(frozen=True)
class Policy:
    """What a scheduler does with a request.

    Attributes
    ----------
    degree
        For all classes; None: each class's B.
    waits
        A request waits until its whole degree is free; else it begins with what there is.
    promotes
        Hungry requests get devices that are released.
    releases
        When the DiT phase ends, only the VAE's devices are kept.
    partition
        Devices are divided among classes, once or by who is there.
    is_isolated
        A class never takes devices of another's part.
    waiting_first
        Released devices go to waiting requests before hungry ones, one at least to each. Not DDiT's order, but where
        requests wait a device does more as a first one than as a fourth one, and promotions then lengthen the queue.
    """

    name: str
    degree: int | None = None
    waits: bool = False
    promotes: bool = False
    releases: bool = False
    partition: Literal["none", "static", "dynamic"] = "none"
    is_isolated: bool = True
    waiting_first: bool = False


ELASTIC = Policy("elastic", promotes=True, releases=True, waiting_first=True)
DDIT = Policy("ddit", promotes=True, releases=True)
"""The paper's own order: hungry requests first."""
STATIC = tuple(Policy(f"static_{degree}", degree=degree, waits=True) for degree in (1, 2, 4, 8))
PARTITIONS = (
    Policy("static_partition", waits=True, partition="static"),
    Policy("dynamic_partition", waits=True, partition="dynamic"),
    Policy("shared_partition", waits=True, partition="dynamic", is_isolated=False),
)
HALVES = (Policy("release_only", releases=True), Policy("promote_only", promotes=True))
POLICIES = {policy.name: policy for policy in (ELASTIC, DDIT, *STATIC, *PARTITIONS, *HALVES)}


def find_policy(name: str) -> Policy:
    """Return a policy by its name.

    Raises
    ------
    InputError
        There is none of that name.
    """
    found = POLICIES.get(name)
    if found is None:
        raise input_error("argument 'policy'", f"one of {listed(POLICIES)}", f"'{name}'",
                          "name one of them, or leave it out for all", rule="unknown-policy", valid=POLICIES,
                          name=name)  # fmt: skip
    return found
