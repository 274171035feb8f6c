"""Program documents that several tests use."""

from __future__ import annotations

import copy
from typing import Any


def edge(source: str, target: str, mode: str = "blocking", **more: Any) -> dict[str, Any]:
    """Return an edge of a document."""
    return {"from": source, "to": target, "mode": mode, **more}


def world(**changes: Any) -> dict[str, Any]:
    """Return the program of interfaces.md, filled in: actions -> 4 denoising steps -> decoder -> frames."""
    document: dict[str, Any] = {
        "schema": "flashrt/program@1",
        "name": "world",
        "ops": "ops.py:load",
        "entry": "app",
        "states": {"dit.kv": {"per": "iteration"}, "vae.cache": {}, "rng": {}},
        "graphs": {
            "app": {
                "inputs": {"actions": {"dtype": "float32", "shape": ["frames", 8]}},
                "outputs": {"frames": {}},
                "nodes": {
                    "dit": {"graph": "denoise"},
                    "vae": {
                        "op": "decode",
                        "inputs": {"latents": {}},
                        "outputs": {"frames": {}},
                        "reads": ["vae.cache"],
                        "writes": ["vae.cache"],
                        "degrees": [1, 2, 4],
                    },
                },
                "edges": [
                    edge("actions", "dit.actions"),
                    edge("dit.latents", "vae.latents", "streaming", chunks=3),
                    edge("vae.frames", "frames", "streaming", chunks=3),
                ],
            },
            "denoise": {
                "repeat": {"times": 4, "carry": {"latents": "latents"}},
                "inputs": {
                    "actions": {},
                    "latents": {"initial": {"op": "noise", "reads": ["rng"], "writes": ["rng"]}},
                },
                "outputs": {"latents": {}},
                "nodes": {
                    "step": {
                        "op": "denoise_step",
                        "inputs": {"actions": {}, "latents": {}},
                        "outputs": {"latents": {}},
                        "reads": ["dit.kv"],
                        "writes": ["dit.kv"],
                    }
                },
                "edges": [
                    edge("actions", "step.actions"),
                    edge("latents", "step.latents"),
                    edge("step.latents", "latents"),
                ],
            },
        },
    }
    return {**copy.deepcopy(document), **changes}


def flat_graph(nodes: dict[str, Any], edges: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
    """Return a program of one graph with input x and output y."""
    return {
        "schema": "flashrt/program@1",
        "name": "flat",
        "ops": "ops.py:load",
        "entry": "app",
        "states": more.pop("states", {}),
        "graphs": {"app": {"inputs": {"x": {}}, "outputs": {"y": {}}, "nodes": nodes, "edges": edges, **more}},
    }


WORLD_OPS = """
import numpy as np

def load(context):
    def noise(inputs, state):
        drawn = state.get("rng", 0)
        state["rng"] = drawn + 1
        return np.full((3, 2), drawn, dtype=np.float32)

    def step(inputs, state):
        seen = state.get("dit.kv", 0.0)
        state["dit.kv"] = seen + 1
        return {"latents": inputs["latents"] + inputs["actions"].sum() + seen}

    def decode(inputs, state):
        seen = state["vae.cache"] or 0
        state["vae.cache"] = seen + len(inputs["latents"])
        offsets = seen + np.arange(len(inputs["latents"]), dtype=np.float32)
        return {"frames": np.repeat(inputs["latents"] + offsets[:, None], 4, axis=0)}

    return {"noise": noise, "denoise_step": step, "decode": decode}
"""
