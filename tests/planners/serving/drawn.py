"""Random small serving problems."""

from __future__ import annotations

import itertools
import random
from typing import Any

import numpy as np

from flashrt.planners.serving import Problem, ServingModel, ServingProfile, Workload, make_problem


def single(engine: dict[str, Any], types: dict[str, float] | None = None, target_ms: float = 100.0) -> Problem:
    """Return a problem of one component ``a`` on one engine."""
    model = ServingModel.model_validate({"name": "one", "components": ["a"]})
    shares = types or {"x": 1.0}
    workload = Workload.model_validate(
        {
            "types": {
                name: {"components": ["a"], "fraction": share, "target_ms": target_ms} for name, share in shares.items()
            }
        }
    )
    profile = ServingProfile.model_validate(
        {"provenance": "declared", "engines": [{"components": ["a"], "gpus": 1, **engine}]}
    )
    return make_problem(model, workload, profile)


def documents(seed: int, *, most_components: int = 3, most_types: int = 3) -> dict[str, dict[str, Any]]:
    """Return model, workload and profile: a chain or two encoders before one, types that pass a part of it."""
    draw = random.Random(seed)
    num = draw.randint(1, most_components)
    names = [f"c{index}" for index in range(num)]
    if num >= 3 and draw.random() < 0.4:
        pairs = [(names[0], names[2]), (names[1], names[2]), *itertools.pairwise(names[2:])]
    else:
        pairs = list(itertools.pairwise(names))
    edges = [{"from": a, "to": b, "colocatable": draw.random() < 0.8} for a, b in pairs]
    joined = {(edge["from"], edge["to"]) for edge in edges if edge["colocatable"]}
    num_types = draw.randint(1, most_types)
    shares = np.random.default_rng(seed).dirichlet(np.full(num_types, 3.0)).round(3)
    shares[-1] = 1 - shares[:-1].sum()
    types: dict[str, Any] = {}
    for index in range(num_types):
        own = set(names) if index == 0 else _part(draw, names, pairs)
        types[f"t{index}"] = {"components": sorted(own), "fraction": float(shares[index])}
    alone = {(name, kind): draw.uniform(5, 60) for name in names for kind in types}
    engines = []
    for size in range(1, num + 1):
        for chosen in itertools.combinations(names, size):
            if not _joined(chosen, joined):
                continue
            for gpus in (1, 2) if draw.random() < 0.4 else (1,):
                penalty = draw.uniform(0.9, 1.4)
                latency: dict[int, dict[str, list[float]]] = {}
                for batch in (1, 4) if draw.random() < 0.5 else (1,):
                    work = {
                        kind: penalty / gpus**0.8 * (0.5 + 0.5 * batch**0.8)
                        * sum(alone[name, kind] for name in chosen if name in one["components"])
                        for kind, one in types.items()
                    }  # fmt: skip
                    latency[batch] = {kind: [0.8 * ms, ms, 1.3 * ms] for kind, ms in work.items() if ms > 0}
                batching = draw.choice(["static", "continuous"])
                engines.append(
                    {
                        "components": list(chosen),
                        "gpus": gpus,
                        "degree": gpus,
                        "batching": batching,
                        "latency_ms": latency,
                    }
                )
    engines = [engine for engine in engines if all(engine["latency_ms"].values())]
    return {
        "model": {"name": f"drawn-{seed}", "components": names, "edges": edges},
        "workload": {"types": types},
        "profile": {"provenance": "declared", "engines": engines},
    }


def problem(seed: int, **most: int) -> Problem:
    """Return the problem of `documents`."""
    found = documents(seed, **most)
    return make_problem(
        ServingModel.model_validate(found["model"]), Workload.model_validate(found["workload"]),
        ServingProfile.model_validate(found["profile"]),
    )  # fmt: skip


def _part(draw: random.Random, names: list[str], pairs: list[tuple[str, str]]) -> set[str]:
    own = {draw.choice(names)}
    for _ in range(draw.randint(0, len(names) - 1)):
        beside = [b for a, b in pairs if a in own] + [a for a, b in pairs if b in own]
        if beside:
            own.add(draw.choice(beside))
    return own


def _joined(chosen: tuple[str, ...], joined: set[tuple[str, str]]) -> bool:
    seen, pending = {chosen[0]}, [chosen[0]]
    while pending:
        one = pending.pop()
        for other in chosen:
            if other not in seen and ((one, other) in joined or (other, one) in joined):
                seen.add(other)
                pending.append(other)
    return len(seen) == len(chosen)
