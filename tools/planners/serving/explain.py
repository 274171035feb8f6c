"""Why a plan is the best: what bounds it, what the next GPU would buy, and what each merge gains."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from flashrt.planners.serving.evaluate import Evaluator
from flashrt.planners.serving.flow import best_routing, load_per_rate
from flashrt.planners.serving.guided import exchanges, improve
from flashrt.planners.serving.plans import Plan, Routes
from flashrt.planners.serving.policies import value_of
from flashrt.planners.serving.search import NUM_SHORT, Answer

MOST_TRIED = 60


def explain(answer: Answer) -> dict[str, Any]:
    """Return the bottleneck, the load of every node, the best use of one more GPU, and each merge beside its split."""
    evaluator = Evaluator(answer.problem, answer.settings.load)
    loads = node_loads(answer)
    busiest = max(loads, key=lambda one: one["load"])
    return {
        "bottleneck": " + ".join(busiest["components"]),
        "loads": loads,
        "next_gpu": next_gpu(answer, evaluator),
        "merges": [merge(answer, evaluator, node) for node in merged_nodes(answer)],
    }


def node_loads(answer: Answer) -> list[dict[str, Any]]:
    """Return how busy the executors of each node are at α·R, the busiest configuration counting."""
    problem, best = answer.problem, answer.best
    plan = best.plan
    per_rate = load_per_rate(problem, best.routes, plan.allocation, plan.path_share, plan.split)
    rate = answer.settings.load.alpha * plan.rate_per_s
    return [
        {"subplan": subplan, "components": list(problem.names(mask)), "load": float(per_rate[node].max()) * rate}
        for node, (subplan, mask) in enumerate(plan.logical.nodes)
    ]


def _shown(answer: Answer, evaluator: Evaluator, plan: Plan, routes: Routes) -> float:
    return value_of(
        answer.problem, answer.settings.policy, evaluator.simulate(plan, routes, num=NUM_SHORT).goodput_per_s
    )


def next_gpu(answer: Answer, evaluator: Evaluator) -> dict[str, Any]:
    """Return the best single change that one more GPU allows, with the goodput that short simulations show."""
    problem, best = answer.problem, answer.best
    before = _shown(answer, evaluator, best.plan, best.routes)
    found: tuple[float, Plan] | None = None
    ranked: list[tuple[float, int, Plan]] = []
    for allocation in exchanges(problem, best.plan, answer.space.num_gpus + 1, answer.space.max_kinds):
        plan = best_routing(problem, best.routes, best.plan.logical, allocation, answer.space.routings)
        if plan.rate_per_s > 0 and plan.num_gpus(problem) > best.plan.num_gpus(problem):
            goodput = evaluator.estimate(plan, best.routes).goodput_per_s
            ranked.append((value_of(problem, answer.settings.policy, goodput), len(ranked), plan))
    for _, _, plan in sorted(ranked, key=lambda one: -one[0])[:MOST_TRIED]:
        value = _shown(answer, evaluator, plan, best.routes)
        if found is None or value > found[0]:
            found = value, plan
    if found is None:
        return {"gain_per_s": 0.0, "text": "no executor fits in one more GPU: engines take more"}
    changes = []
    for (_, mask), old, new in zip(best.plan.logical.nodes, best.plan.allocation, found[1].allocation, strict=True):
        if old != new:
            changes.append(f"{' + '.join(problem.names(mask))}: {executors_text(answer, new)}")
    gain = found[0] - before
    return {"gain_per_s": gain, "text": f"{'; '.join(changes)}: {gain:+.3g} requests/s"}


def executors_text(answer: Answer, executors: tuple[tuple[int, int], ...]) -> str:
    """Return executors as a reader writes them: ``2 x (2 GPUs, batch 16)``."""
    parts = []
    for k, count in executors:
        one = answer.problem.configurations[k]
        parts.append(f"{count} x ({one.gpus} GPU{'s' if one.gpus > 1 else ''}, batch {one.batch})")
    return " and ".join(parts)


def merged_nodes(answer: Answer) -> list[tuple[int, int]]:
    """Return (subplan, components as bits) of the nodes with more than one component."""
    return [node for node in answer.best.plan.logical.nodes if node[1].bit_count() > 1]


def merge(answer: Answer, evaluator: Evaluator, node: tuple[int, int]) -> dict[str, Any]:
    """Return what the best plan is worth whose node is split in two, beside the best plan."""
    problem, space, best = answer.problem, answer.space, answer.best
    before = _shown(answer, evaluator, best.plan, best.routes)
    known = {members: number for number, members in enumerate(space.subplans)}
    old = space.subplans[best.chosen[node[0]]]
    found: tuple[float, str] | None = None
    for one in old:
        if node[1] not in space.simple[one].nodes:
            continue
        rest = {other for other in space.simple[one].nodes if other != node[1]}
        for number, other in enumerate(space.simple):
            parts = [part for part in other.nodes if part & node[1]]
            if len(parts) != 2 or not rest <= set(other.nodes) or sum(parts) != node[1]:
                continue
            members = known.get(tuple(sorted(number if member == one else member for member in old)))
            if members is None:
                continue
            chosen = tuple(members if place == node[0] else taken for place, taken in enumerate(best.chosen))
            if len(set(chosen)) < len(chosen) or not space.fits(chosen):
                continue
            plan = improve(
                space, chosen,
                lambda plan, own: value_of(
                    problem, answer.settings.policy, evaluator.estimate(plan, own).goodput_per_s
                ),
                lambda: False,
            )  # fmt: skip
            if plan is None:
                continue
            value = _shown(answer, evaluator, plan[0], space.logical(chosen)[1])
            if found is None or value > found[0]:
                found = value, " | ".join(" + ".join(problem.names(part)) for part in parts)
    names = " + ".join(problem.names(node[1]))
    if found is None:
        return {"merged": names, "split": None, "text": f"{names}: no split of it fits in the GPUs"}
    gain = before - found[0]
    return {
        "merged": names, "split": found[1], "gain_per_s": gain,
        "text": f"{names} together: {gain:+.3g} requests/s against {found[1]}",
    }  # fmt: skip


def with_target(answer: Answer, factor: float) -> float:
    """Return the total goodput of the best plan, were all targets `factor` times what they are."""
    simulated = answer.best.simulated
    assert simulated is not None
    changed = replace(answer.problem, targets_ms=answer.problem.targets_ms * factor)
    share = [
        float((latency <= target).mean()) if len(latency) else 0.0
        for latency, target in zip(simulated.latency_ms, changed.targets_ms, strict=True)
    ]
    return float(sum(s * f for s, f in zip(share, answer.problem.fractions, strict=True))) * simulated.offered_per_s
