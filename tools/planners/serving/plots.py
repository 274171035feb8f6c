"""Pictures of an answer: goodput against the targets, the front, and the plan."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from flashrt.planners.serving.explain import executors_text, node_loads, with_target
from flashrt.planners.serving.search import Answer

FACTORS = np.linspace(0.4, 2.5, 43)
DPI = 110


def write_plots(answer: Answer, folder: Path) -> dict[str, Path]:
    """Write the three pictures as PNG; return their paths by name."""
    folder.mkdir(parents=True, exist_ok=True)
    found = {}
    for name, draw in (("targets", _targets), ("front", _front), ("plan", _plan)):
        found[name] = folder / f"{name}.png"
        _write(answer, draw, found[name])
    return found


def _write(answer: Answer, draw: Any, path: Path) -> None:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 5), layout="constrained")
    FigureCanvasAgg(figure)
    draw(answer, figure.subplots())
    model, profile = answer.problem.model.name, answer.problem.profile
    figure.suptitle(
        f"{model}, {answer.problem.workload.name}, {answer.space.num_gpus} GPUs "
        f"(predicted from a profile that is {profile.provenance})", fontsize=10,
    )  # fmt: skip
    figure.savefig(path, dpi=DPI)


def _targets(answer: Answer, axes: Any) -> None:
    axes.plot(FACTORS, [with_target(answer, float(one)) for one in FACTORS], color="C0")
    axes.axvline(1.0, color="0.6", linewidth=0.8)
    axes.set_xlabel("all latency targets, times what they are")
    axes.set_ylabel("goodput of the best plan, requests/s")
    axes.set_ylim(bottom=0)


def _front(answer: Answer, axes: Any) -> None:
    types = answer.problem.types
    width = 0.8 / len(answer.front)
    for number, one in enumerate(answer.front):
        assert one.simulated is not None
        places = np.arange(len(types)) + number * width
        axes.bar(places, one.simulated.goodput_per_s, width, yerr=one.simulated.goodput_error, capsize=2,
                 label=f"plan {number + 1}: {one.simulated.goodput_per_s.sum():.3g} requests/s")  # fmt: skip
    axes.set_xticks(np.arange(len(types)) + 0.4 - width / 2, types, rotation=20, ha="right")
    axes.set_ylabel("goodput, requests/s")
    axes.legend(fontsize=8)


def _plan(answer: Answer, axes: Any) -> None:
    """Draw nodes as boxes in the order of the data, and the flow between them as lines as thick as it is large."""
    plan, problem = answer.best.plan, answer.problem
    depth = [0] * len(plan.logical.nodes)
    flow: dict[tuple[int, int], float] = {}
    for (kind, path), route in answer.best.routes.items():
        share = float(plan.path_share[kind, path] * problem.fractions[kind])
        for place, (node, before) in enumerate(zip(route.nodes, route.before, strict=True)):
            depth[node] = max(depth[node], place and max((depth[route.nodes[one]] + 1 for one in before), default=0))
            for one in before:
                if share > 0:
                    flow[route.nodes[one], node] = flow.get((route.nodes[one], node), 0.0) + share
    row: dict[int, int] = {}
    spots = {}
    for node, column in enumerate(depth):
        spots[node] = column * 1.0, -float(row.get(column, 0))
        row[column] = row.get(column, 0) + 1
    for (a, b), share in flow.items():
        axes.annotate("", spots[b], spots[a], arrowprops={"arrowstyle": "->", "lw": 0.6 + 4 * share, "color": "0.6",
                                                            "shrinkA": 40, "shrinkB": 40})  # fmt: skip
    for node, load in enumerate(node_loads(answer)):
        text = "\n".join(load["components"])
        text += f"\n{executors_text(answer, plan.allocation[node])}\nload {load['load']:.0%}"
        shade = 1 - 0.45 * min(load["load"], 1.0)
        axes.text(*spots[node], text, ha="center", va="center", fontsize=8,
                  bbox={"boxstyle": "round", "facecolor": (shade, shade, 1.0), "edgecolor": "0.3"})  # fmt: skip
    axes.set_xlim(-0.6, max(depth) + 0.6)
    axes.set_ylim(-max(row.values()) + 0.4, 0.6)
    axes.axis("off")
