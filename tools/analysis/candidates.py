"""Candidates: every transformation of a program and every sensible pair, judged and, with a profile, predicted."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from flashrt.analysis.claims import NOT_AUDITED, Audited, claims_of_setting
from flashrt.analysis.cost import DeploymentCost
from flashrt.analysis.profile import Profile
from flashrt.analysis.settings import (
    Setting,
    baseline_setting,
    deployment_of,
    expectation,
    merge_settings,
    share_of,
    try_cost,
)
from flashrt.analysis.transformations import COMPOSABLE, Proposal, Verdict, propose_all
from flashrt.ir import OUTPUT, BuiltProgram

MAX_COMPOSITIONS = 64
MAX_COMPOSED_OF_EACH = 24
"""Of each transformation, how many legal proposals are composed with others: the first."""
CANDIDATES_WORK = 1_600_000
"""What the searches for orders of all candidates together may take; see `flashrt.analysis.ordering.limit_nodes`."""


@dataclass(frozen=True)
class Candidate:
    """One transformation, or a composition of two, judged against the program and, with a profile, predicted."""

    id: str
    transformation: str
    targets: tuple[str, ...]
    legal: bool
    legality: str
    bottleneck: str
    expected: dict[str, Any] | str
    """Figures and ratios to the baseline where a profile gives them, else a sentence."""
    deployment: dict[str, Any] | None
    """Ready to run, where a deployment document alone expresses the candidate."""
    program_change: dict[str, Any] | None
    rests_on: tuple[str, ...] = ()
    """Claims of the document that its legality rests on, see `flashrt.analysis.claims`."""
    unaudited: Mapping[str, str] = field(default_factory=dict)
    """Those of them that no valid audit has confirmed -> unchecked, or refuted."""

    def as_dict(self) -> dict[str, Any]:
        """Return the record that ``analyze`` reports."""
        record: dict[str, Any] = {
            "id": self.id, "transformation": self.transformation, "targets": list(self.targets), "legal": self.legal,
            "legality": self.legality, "bottleneck": self.bottleneck, "expected": self.expected,
        }  # fmt: skip
        if self.deployment is not None:
            record["deployment"] = self.deployment
        if self.program_change is not None:
            record["program_change"] = self.program_change
        record |= {"rests_on": list(self.rests_on), "audited": not self.unaudited}
        return record | ({"unaudited": dict(self.unaudited)} if self.unaudited else {})


@dataclass(frozen=True)
class CandidateList:
    """All candidates, with the figures that they are compared with."""

    baseline: dict[str, Any] | str
    """Figures of one sequential block of devices with nothing streamed, or why there are none."""
    baseline_deployment: dict[str, Any]
    candidates: tuple[Candidate, ...]
    num_left_out: int
    """Compositions beyond `max_compositions`, not listed."""


def max_compositions(num_operations: int) -> int:
    """Return how many compositions are judged: fewer for large programs, whose figures take longer each."""
    return max(4, min(MAX_COMPOSITIONS, MAX_COMPOSITIONS * 20 // max(num_operations, 1)))


def find_candidates(
    built: BuiltProgram,
    profile: Profile | None = None,
    current: DeploymentCost | None = None,
    audited: Audited = NOT_AUDITED,
) -> CandidateList:
    """Return every candidate of the program, legal and illegal.

    Parameters
    ----------
    profile
        Gives the expected figures; where it lacks a time the candidate says which.
    current
        The deployment whose critical cycle and path the bottleneck is told from; default: the baseline.
    audited
        What a valid audit says of the claims that candidates rest on.
    """
    proposals = propose_all(built)
    plain = baseline_setting(built)
    base = try_cost(built, profile, plain) if profile is not None else "no profile was given"
    base_cost = base if isinstance(base, DeploymentCost) else None
    looked_at = current or base_cost
    work = CANDIDATES_WORK // (len(proposals) + MAX_COMPOSITIONS)
    single = [_judge(built, profile, proposal, base_cost, looked_at, work) for proposal in proposals]
    seen = {(plain.blocks, plain.degrees, plain.streamed)}
    seen |= {_key(p.setting) for p in proposals if p.setting is not None and p.verdict.legal and p.needs is None}
    fresh: list[Proposal] = []
    for proposal in _compose(built, proposals):
        assert proposal.setting is not None
        if proposal.needs is None and _key(proposal.setting) in seen:
            continue
        seen.add(_key(proposal.setting))
        fresh.append(proposal)
    kept = _take_of_each_kind(fresh, max_compositions(len(built.flat.operations)))
    composed = [_judge(built, profile, proposal, base_cost, looked_at, work) for proposal in kept]
    return CandidateList(
        expectation(base_cost, None) if base_cost else str(base),
        deployment_of(built, plain),
        tuple(
            _resting(built, proposal, candidate, audited)
            for proposal, candidate in zip((*proposals, *kept), (*single, *composed), strict=True)
        ),
        len(fresh) - len(kept),
    )


def _resting(built: BuiltProgram, proposal: Proposal, candidate: Candidate, audited: Audited) -> Candidate:
    """Return a candidate with the claims that it rests on."""
    claims = claims_of_setting(built, proposal.operations, proposal.setting)
    if proposal.transformation == "tile" and proposal.program_change:
        claims += tuple(f"tiles:{target}@{proposal.program_change['tiles']}" for target in proposal.targets)
    open_ones = {claim: audited.status(claim) for claim in claims if not audited.confirms([claim])}
    return replace(candidate, rests_on=claims, unaudited=open_ones)


def _take_of_each_kind(proposals: list[Proposal], limit: int) -> list[Proposal]:
    """Return at most `limit` proposals in their order, taken in turn from each pair of transformations."""
    rank: dict[tuple[str, ...], int] = {}
    turns = []
    for index, proposal in enumerate(proposals):
        rank[proposal.parts] = rank.get(proposal.parts, 0) + 1
        turns.append((rank[proposal.parts], index))
    return [proposals[index] for index in sorted(index for _, index in sorted(turns)[:limit])]


def _key(setting: Setting) -> tuple[Any, ...]:
    return (setting.blocks, setting.degrees, setting.streamed)


def _judge(
    built: BuiltProgram,
    profile: Profile | None,
    proposal: Proposal,
    base: DeploymentCost | None,
    looked_at: DeploymentCost | None,
    work: int,
) -> Candidate:
    expected: dict[str, Any] | str = proposal.effect
    setting = proposal.setting
    if not proposal.verdict.legal:
        expected = "nothing: it is not legal"
    told = proposal.verdict.legal or proposal.transformation == "step-pipeline"
    if setting is not None and profile is not None and proposal.predictable and told:
        cost = try_cost(built, profile, setting, work)
        if isinstance(cost, str):
            expected = expected if not proposal.verdict.legal else f"{proposal.effect}; {cost}"
        elif proposal.verdict.legal:
            expected = expectation(cost, base)
        elif proposal.transformation == "step-pipeline":
            expected = (
                f"were it done all the same: no period below {cost.t_min_recurrence_ms:g} ms, its recurrence through "
                f"state, on {cost.num_devices} devices" + (f", against {base.t_min_ms:g} ms now" if base else "")
            )
    ready = setting is not None and proposal.verdict.legal and proposal.needs is None
    legality = proposal.verdict.reason
    if proposal.verdict.legal and proposal.needs is not None:
        legality += f"; {proposal.needs}"
    return Candidate(
        proposal.id, proposal.transformation if not proposal.parts else "+".join(proposal.parts), proposal.targets,
        proposal.verdict.legal, legality, _bottleneck(proposal, looked_at), expected,
        deployment_of(built, setting) if ready and setting is not None else None, proposal.program_change,
    )  # fmt: skip


def _bottleneck(proposal: Proposal, looked_at: DeploymentCost | None) -> str:
    if looked_at is None:
        return proposal.attacks
    own, whole = share_of(looked_at, proposal.operations)
    on_path = sum(step.time_ms for step in looked_at.latency_path if step.operation in proposal.operations)
    return (
        f"{proposal.attacks}; these operations have {own:g} of the {whole:g} ms of the critical cycle and {on_path:g} "
        f"of the {looked_at.latency_ms:g} ms of the path to the last output"
    )


def _compose(built: BuiltProgram, proposals: list[Proposal]) -> list[Proposal]:
    of_each: dict[str, list[Proposal]] = {}
    for proposal in proposals:
        if proposal.verdict.legal and proposal.setting is not None:
            of_each.setdefault(proposal.transformation, []).append(proposal)
    legal = [proposal for kind in of_each.values() for proposal in kind[:MAX_COMPOSED_OF_EACH]]
    found = []
    for index, a in enumerate(legal):
        for b in legal[index + 1 :]:
            if (a.transformation, b.transformation) not in COMPOSABLE or not _compatible(built, a, b):
                continue
            assert a.setting is not None
            assert b.setting is not None
            merged = merge_settings(a.setting, b.setting)
            if merged is None or merged in (a.setting, b.setting):
                continue
            needs = "; ".join(text for text in (a.needs, b.needs) if text) or None
            found.append(
                Proposal(
                    f"{a.id}+{b.id}", a.transformation, (*a.targets, *b.targets),
                    Verdict(True, f"both are legal and choose different things: ({a.verdict.reason}) and "
                            f"({b.verdict.reason})"),
                    f"{a.attacks}; and {b.attacks}", f"{a.effect}; and {b.effect}", a.operations | b.operations,
                    merged, {"first": a.program_change, "second": b.program_change}
                    if a.program_change or b.program_change else None, needs,
                    parts=(a.transformation, b.transformation),
                )
            )  # fmt: skip
    return found


def _compatible(built: BuiltProgram, a: Proposal, b: Proposal) -> bool:
    """Return whether two legal proposals do more together than apart."""
    if a.transformation == b.transformation == "sequence-parallel":
        return a.targets != b.targets
    if a.transformation == "stream" and b.setting is not None:
        # A streamed edge matters to a placement that separates its ends, or where it carries an output.
        flows = [flow for flow in built.flat.dataflow if set(flow.labels) & set(a.targets)]
        return any(
            flow.target == OUTPUT or any((flow.source in block) != (flow.target in block) for block in b.setting.blocks)
            for flow in flows
        )
    return True
