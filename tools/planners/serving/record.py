"""An answer as data: for tools, files and tables."""

from __future__ import annotations

from typing import Any

import numpy as np

from flashrt.planners.serving.explain import explain, node_loads
from flashrt.planners.serving.search import Answer, Candidate

DEPLOYMENT_SCHEMA = "flashrt/serving-deployment@1"


def answer_record(answer: Answer) -> dict[str, Any]:
    """Return the best plan, the front, counts and seconds by phase, and why."""
    problem = answer.problem
    return {
        "plan": plan_record(answer, answer.best),
        "front": [plan_record(answer, one) for one in answer.front],
        "policy": answer.settings.policy,
        "num_gpus": answer.space.num_gpus,
        "targets_ms": dict(zip(problem.types, problem.targets_ms.tolist(), strict=True)),
        "alpha": answer.settings.load.alpha,
        "complete": answer.complete,
        "counts": answer.counts,
        "seconds": {name: round(value, 3) for name, value in answer.seconds.items()},
        "why": explain(answer),
        "provenance": problem.profile.provenance,
        "figures": "predicted",
        "notes": list(answer.notes),
    }


def plan_record(answer: Answer, candidate: Candidate) -> dict[str, Any]:
    """Return one plan: nodes with executors, routing, and what the simulation shows of it."""
    problem, plan, shown = answer.problem, candidate.plan, candidate.simulated
    assert shown is not None, "it has been simulated"
    return {
        "gpus": plan.num_gpus(problem),
        "goodput_per_s": float(shown.goodput_per_s.sum()),
        "goodput_error_95": shown.total_error,
        "offered_per_s": shown.offered_per_s,
        "throughput_per_s": shown.throughput_per_s,
        "max_rate_per_s": plan.rate_per_s,
        "estimated_goodput_per_s": float(candidate.estimate_per_s.sum()),
        "nodes": nodes_record(answer, candidate),
        "routing": routing_record(answer, candidate),
        "types": {
            name: {
                "goodput_per_s": float(shown.goodput_per_s[place]),
                "goodput_error_95": float(shown.goodput_error[place]),
                "target_ms": float(problem.targets_ms[place]),
                **percentiles(shown.latency_ms[place]),
            }
            for place, name in enumerate(problem.types)
        },
    }


def percentiles(latency_ms: np.ndarray) -> dict[str, float | None]:
    """Return p50, p90 and p99 in ms; None where there is nothing, or requests were never done."""
    if not len(latency_ms):
        return dict.fromkeys(("p50_ms", "p90_ms", "p99_ms"))
    found = np.quantile(latency_ms, [0.5, 0.9, 0.99], method="higher")
    return {
        name: float(value) if np.isfinite(value) else None
        for name, value in zip(("p50_ms", "p90_ms", "p99_ms"), found, strict=True)
    }


def nodes_record(answer: Answer, candidate: Candidate) -> list[dict[str, Any]]:
    """Return each node's components and executors."""
    problem = answer.problem
    found = []
    for (subplan, mask), executors in zip(candidate.plan.logical.nodes, candidate.plan.allocation, strict=True):
        rows = []
        for k, count in executors:
            one = problem.configurations[k]
            engine = problem.profile.engines[one.engine]
            rows.append(
                {"count": count, "gpus": one.gpus, "degree": engine.degree, "batch": one.batch,
                 "batching": engine.batching}
            )  # fmt: skip
        found.append({"subplan": subplan, "components": list(problem.names(mask)), "executors": rows})
    return found


def routing_record(answer: Answer, candidate: Candidate) -> dict[str, Any]:
    """Return for each type the paths that it takes, and its shares of the executors of nodes that mix them."""
    problem, plan = answer.problem, candidate.plan
    found: dict[str, Any] = {}
    for place, name in enumerate(problem.types):
        paths, split = [], {}
        for (kind, path), route in candidate.routes.items():
            share = float(plan.path_share[place, path])
            if kind != place or share <= 0:
                continue
            nodes = [node_name(answer, candidate, node) for node in route.nodes]
            paths.append({"share": round(share, 6), "nodes": nodes})
            for node in route.nodes:
                if len(plan.allocation[node]) > 1:
                    shares = plan.split[place, node, : len(plan.allocation[node])]
                    split[node_name(answer, candidate, node)] = [round(float(one), 6) for one in shares]
        found[name] = {"paths": paths, **({"split": split} if split else {})}
    return found


def node_name(answer: Answer, candidate: Candidate, node: int) -> str:
    """Return a node as ``subplan/component + component``; without the subplan where there is one."""
    subplan, mask = candidate.plan.logical.nodes[node]
    names = " + ".join(answer.problem.names(mask))
    return names if len(candidate.plan.logical.subplans) == 1 else f"{subplan}/{names}"


def deployment_record(answer: Answer) -> dict[str, Any]:
    """Return the best plan as a document that says what to start and how to route."""
    best = answer.best
    return {
        "schema": DEPLOYMENT_SCHEMA,
        "model": answer.problem.model.name,
        "model_digest": answer.problem.model.digest,
        "workload": answer.problem.workload.name,
        "profile": answer.problem.profile.name,
        "provenance": answer.problem.profile.provenance,
        "gpus": best.plan.num_gpus(answer.problem),
        "rate_per_s": answer.settings.load.alpha * best.plan.rate_per_s,
        "nodes": nodes_record(answer, best),
        "routing": routing_record(answer, best),
        "loads": [round(one["load"], 4) for one in node_loads(answer)],
    }
