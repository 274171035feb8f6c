"""Plots of a comparison: who had which device when, latencies by policy, cost."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from flashrt.planners.elastic.report import NS_PER_S
from flashrt.planners.elastic.request import DECODING, Request
from flashrt.planners.elastic.simulate import Simulated

DPI = 110
MAX_SHOWN = 60
"""Requests in the timeline, from the first."""


def write_timeline(requests: Sequence[Request], num_devices: int, title: str, png: Path) -> None:
    """Draw each request on the devices that it had; hatched: the VAE. Only requests with a history are there."""
    from matplotlib import colormaps
    from matplotlib.figure import Figure

    shown = requests[:MAX_SHOWN]
    figure = Figure(figsize=(12, 1.6 + 0.35 * min(num_devices, 32)), layout="constrained")
    axes = figure.subplots()
    colours = colormaps["tab20"]
    for place, request in enumerate(shown):
        ends = [*(moment for moment, _, _ in request.history[1:]), request.ended_ns]
        for (begin, devices, phase), end in zip(request.history, ends, strict=True):
            if end <= begin or not devices:
                continue
            axes.barh(
                list(devices), (end - begin) / NS_PER_S, left=begin / NS_PER_S, height=0.9, color=colours(place % 20),
                edgecolor="white", linewidth=0.4, hatch="///" if phase == DECODING else None,
            )  # fmt: skip
        if request.history:
            begin, devices, _ = request.history[0]
            axes.text(begin / NS_PER_S, devices[0], f" {request.number}", va="center", fontsize=6, clip_on=True)
    axes.set_ylim(num_devices - 0.5, -0.5)
    axes.set_xlabel(f"s; one colour a request (the first {len(shown)}), hatched: its VAE")
    axes.set_ylabel("device")
    axes.set_title(title, fontsize=9, parse_math=False)
    figure.savefig(png, dpi=DPI)


def write_cdf(simulations: Mapping[str, Sequence[Simulated]], title: str, png: Path) -> None:
    """Draw the share of requests that are done within a latency, by policy."""
    import numpy as np
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.subplots()
    for name, runs in simulations.items():
        latency = np.sort([(one.ended_ns - one.arrived_ns) / NS_PER_S for run in runs for one in run.requests])
        style = "-" if name in {"elastic", "ddit"} else "--"
        axes.plot(latency, np.arange(1, len(latency) + 1) / len(latency), style, label=name,
                  linewidth=2 if style == "-" else 1)  # fmt: skip
    axes.set_xscale("log")
    axes.set_xlabel("latency (s)")
    axes.set_ylabel("share of requests")
    axes.legend(fontsize=7)
    axes.set_title(title, fontsize=9, parse_math=False)
    figure.savefig(png, dpi=DPI)


def write_cost(record: Mapping[str, Any], title: str, png: Path) -> None:
    """Draw every policy's device time against the offline bound, and its p99."""
    from matplotlib.figure import Figure

    names = list(record["policies"])
    figure = Figure(figsize=(9, 4), layout="constrained")
    left, right = figure.subplots(1, 2, sharey=True)
    bound = record["bound_gpu_s"]
    gpu = [record["policies"][name]["all"]["gpu_s"] / (bound or 1.0) for name in names]
    left.barh(names, gpu, color="#4c78a8")
    if bound is not None:
        left.axvline(1.0, color="black", lw=0.8)
    left.set_xlabel("device time over the offline bound" if bound is not None else "device time (s)")
    left.invert_yaxis()
    right.barh(names, [record["policies"][name]["all"]["p99_ms"] / 1e3 for name in names], color="#f58518")
    right.set_xlabel("p99 latency (s)")
    figure.suptitle(title, fontsize=9, parse_math=False)
    figure.savefig(png, dpi=DPI)


def write_plots(
    record: Mapping[str, Any], simulations: Mapping[str, Sequence[Simulated]], title: str, folder: Path
) -> dict[str, Path]:
    """Write all plots of a comparison; the timeline is the first policy's."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = {name: folder / f"{name}.png" for name in ("timeline", "cdf", "cost")}
    first = next(iter(simulations))
    whole = f"{title}; predicted from {record['provenance']} times"
    requests = simulations[first][0].requests
    write_timeline(requests, record["num_devices"], f"{first}: {whole}", paths["timeline"])
    write_cdf(simulations, whole, paths["cdf"])
    write_cost(record, whole, paths["cost"])
    return paths
