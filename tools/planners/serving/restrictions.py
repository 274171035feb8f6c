"""Baselines as restrictions of the same space: which components share a node. Data, no other code.

Source: ``spec/planners.md``, section 2; ``papers/002`` (Cornfigurator), section 6.1.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from flashrt.errors import Finding, InputError, listed, nearest
from flashrt.planners.serving.documents import RETRY, ServingModel
from flashrt.planners.serving.search import Settings
from flashrt.planners.serving.subplans import Restriction

NAMED = ("monolithic", "disaggregated", "encoder_split", "epd")


@dataclass(frozen=True)
class Baseline:
    """Groups of components that share a node: of each group, those that a request needs."""

    name: str
    groups: tuple[frozenset[str], ...]

    @property
    def allowed(self) -> Restriction:
        """The restriction of subplans to these groups."""

        def is_grouped(nodes: tuple[tuple[str, ...], ...]) -> bool:
            union = {name for node in nodes for name in node}
            return {frozenset(node) for node in nodes} == {group & union for group in self.groups if group & union}

        return is_grouped


def baseline(model: ServingModel, wanted: str | Sequence[Sequence[str]]) -> Baseline:
    """Return a baseline by name, or a fixed plan's groups of components.

    ``monolithic``: all in one; ``disaggregated``: each component alone; ``encoder_split``: each component without a
    predecessor alone, the others together; ``epd``: the encoders together, each other component (prefill, decode)
    alone.

    Raises
    ------
    InputError
        An unknown name or component, or groups that leave a component out.
    """
    every = model.components
    targets = {edge.target for edge in model.edges}
    first = [name for name in every if name not in targets and len(every) > 1]
    rest = [name for name in every if name not in first]
    where = "argument 'restriction'"
    if isinstance(wanted, str):
        groups: dict[str, list[list[str]]] = {
            "monolithic": [list(every)],
            "disaggregated": [[name] for name in every],
            "encoder_split": [*([name] for name in first), rest],
            "epd": [first, *([name] for name in rest)],
        }
        if wanted not in groups:
            raise InputError(
                Finding(where, f"{listed(NAMED)}, or a list of groups of components", f"'{wanted}'", RETRY,
                        rule="unknown-restriction", nearest=nearest(wanted, NAMED))
            )  # fmt: skip
        return Baseline(wanted, tuple(frozenset(group) for group in groups[wanted] if group))
    findings = [
        Finding(where, f"components of the model: {listed(every)}", f"'{name}'", RETRY, rule="unknown-component",
                nearest=nearest(name, every))
        for group in wanted for name in group if name not in every
    ]  # fmt: skip
    named = [name for group in wanted for name in group]
    if missing := [name for name in every if named.count(name) != 1]:
        findings.append(
            Finding(where, "every component in one group", f"not so: {listed(missing)}", RETRY, rule="not-a-partition")
        )
    if findings:
        raise InputError(findings)
    return Baseline("fixed", tuple(frozenset(group) for group in wanted))


def restricted(settings: Settings) -> Settings:
    """Return settings for one subplan with no others beside it, as the baselines have it."""
    return replace(settings, max_compound=1, max_subplans=1)
