"""Write the serving documents that FlashRT ships: models, workloads, and synthetic profiles, marked as declared.

The profiles carry the asymmetries that Cornfigurator's paper (``papers/002``, section 6) names, and no measured figure:
the audio generator is heavy and the image encoder light (Qwen3-Omni-like), the image encoder is heavy (InternVL-like)
or small (Qwen-VL-like), the first of two stages is light (Qwen-Image-like). Times of one request alone on one GPU are
chosen; all others follow from the rules in this file.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from flashrt.planners.serving import ServingModel

FOLDER = Path(__file__).resolve().parents[1] / "tools" / "planners" / "serving" / "examples"
# Quantiles of a request's time over its mean: requests of a type differ in length.
SPREAD = (0.82, 0.91, 0.98, 1.06, 1.23)
# What a degree of parallelism divides the time by.
SPEEDUP = {1: 1.0, 2: 1.75, 4: 3.0}


@dataclass(frozen=True)
class Part:
    """One component: time of a request of each type that is alone on one GPU, and what a batch adds.

    `marginal` is what each further request of a batch adds to the time, as a share of it.
    """

    name: str
    alone_ms: Mapping[str, float]
    marginal: float
    batching: str
    cpu_ms: float = 0.0


@dataclass(frozen=True)
class Example:
    """One model with its workloads; `penalty` is what merging two components adds to their time."""

    name: str
    parts: Sequence[Part]
    edges: Sequence[tuple[str, str]]
    workloads: Mapping[str, Mapping[str, Any]]
    degrees: Sequence[int]
    batches: Sequence[int]
    penalty: Mapping[frozenset[str], float] = field(default_factory=dict)
    default_penalty: float = 0.02


def connected(names: Sequence[str], edges: Sequence[tuple[str, str]]) -> bool:
    """Return whether edges join these components."""
    seen, pending = {names[0]}, [names[0]]
    while pending:
        one = pending.pop()
        for a, b in edges:
            for here, there in ((a, b), (b, a)):
                if here == one and there in names and there not in seen:
                    seen.add(there)
                    pending.append(there)
    return len(seen) == len(names)


def engines(example: Example) -> list[dict[str, Any]]:
    """Return an engine for every set of components that edges join, and every degree."""
    found = []
    parts = {part.name: part for part in example.parts}
    for size in range(1, len(parts) + 1):
        for names in itertools.combinations(parts, size):
            if not connected(names, example.edges):
                continue
            penalty = 1.0
            for edge in example.edges:
                if set(edge) <= set(names):
                    penalty += example.penalty.get(frozenset(edge), example.default_penalty)
            types = sorted({name for part in names for name in parts[part].alone_ms})
            batching = "continuous" if any(parts[name].batching == "continuous" for name in names) else "static"
            for degree in example.degrees:
                latency: dict[int, dict[str, list[float]]] = {}
                for batch in example.batches:
                    latency[batch] = {}
                    for kind in types:
                        mean = penalty / SPEEDUP[degree] * sum(
                            parts[name].alone_ms[kind] * (1 + parts[name].marginal * (batch - 1))
                            for name in names if kind in parts[name].alone_ms
                        )  # fmt: skip
                        latency[batch][kind] = [float(f"{mean * one:.4g}") for one in SPREAD]
                engine: dict[str, Any] = {
                    "components": list(names), "gpus": degree, "degree": degree, "batching": batching,
                    "latency_ms": latency,
                }  # fmt: skip
                cpu = {
                    kind: max(parts[name].cpu_ms for name in names if kind in parts[name].alone_ms) for kind in types
                }
                if any(cpu.values()):
                    engine["cpu_ms"] = cpu
                found.append(engine)
    return found


def omni() -> Example:
    """Return the Qwen3-Omni-like model: eight types, the talker takes most, the vocoder and the encoders little."""
    inputs = {"i": ("image",), "iv": ("image", "video"), "ia": ("image", "audio"), "iva": ("image", "video", "audio")}
    kinds = {f"{name}_{out}": media for name, media in inputs.items() for out in ("text", "audio")}

    def of(media: str, ms: float) -> dict[str, float]:
        return {kind: ms for kind, given in kinds.items() if media in given}

    spoken = [kind for kind in kinds if kind.endswith("audio") and "_audio" in kind]
    parts = (
        Part("image_encoder", of("image", 8.0), 0.55, "static", 6.0),
        Part("video_encoder", of("video", 26.0), 0.6, "static", 20.0),
        Part("audio_encoder", of("audio", 10.0), 0.5, "static", 4.0),
        Part("thinker", {kind: 110.0 + 30.0 * len(given) for kind, given in kinds.items()}, 0.055, "continuous"),
        Part("talker", dict.fromkeys(spoken, 2700.0), 0.085, "continuous"),
        Part("vocoder", dict.fromkeys(spoken, 60.0), 0.55, "static"),
    )
    edges = (
        ("image_encoder", "thinker"), ("video_encoder", "thinker"), ("audio_encoder", "thinker"),
        ("thinker", "talker"), ("talker", "vocoder"),
    )  # fmt: skip
    components = {"image": "image_encoder", "video": "video_encoder", "audio": "audio_encoder"}

    def workload(audio: float) -> dict[str, Any]:
        types = {}
        for kind, media in kinds.items():
            own = [components[one] for one in media] + ["thinker"]
            own += ["talker", "vocoder"] if kind in spoken else []
            share = (audio if kind in spoken else 1 - audio) / len(inputs)
            types[kind] = {"components": own, "fraction": share}
        return types

    return Example(
        "qwen3-omni-like", parts, edges,
        {"audio-third": workload(1 / 3), "audio-two-thirds": workload(2 / 3)}, (1, 2), (1, 4, 16),
        {frozenset({"talker", "vocoder"}): 0.02, frozenset({"thinker", "talker"}): 0.25}, 0.015,
    )  # fmt: skip


def vision(name: str, encoder_ms: float, penalty: float) -> Example:
    """Return a model of an image encoder and a language model, prefill and decode apart."""
    parts = (
        Part("image_encoder", {"image": encoder_ms}, 0.8, "static", 8.0),
        Part("prefill", {"text": 70.0, "image": 140.0}, 0.45, "static"),
        Part("decode", {"text": 900.0, "image": 1000.0}, 0.06, "continuous"),
    )
    types = {
        "text": {"components": ["prefill", "decode"], "fraction": 0.5},
        "image": {"components": ["image_encoder", "prefill", "decode"], "fraction": 0.5},
    }
    return Example(
        name, parts, (("image_encoder", "prefill"), ("prefill", "decode")), {"half-images": types}, (1, 2, 4),
        (1, 4, 16), {frozenset({"image_encoder", "prefill"}): penalty, frozenset({"prefill", "decode"}): 0.02},
    )  # fmt: skip


def image() -> Example:
    """Return the Qwen-Image-like model: a light text encoder before a heavy diffusion transformer."""
    parts = (
        Part("text_encoder", {"low": 40.0, "high": 40.0}, 0.3, "static"),
        Part("dit", {"low": 2600.0, "high": 9800.0}, 0.92, "static"),
    )
    types = {
        "low": {"components": ["text_encoder", "dit"], "fraction": 0.7},
        "high": {"components": ["text_encoder", "dit"], "fraction": 0.3},
    }
    return Example(
        "qwen-image-like", parts, (("text_encoder", "dit"),), {"mixed": types}, (1, 2, 4), (1, 2, 4),
        {frozenset({"text_encoder", "dit"}): 0.0},
    )  # fmt: skip


EXAMPLES = (omni(), vision("internvl-like", 900.0, 0.35), vision("qwen-vl-like", 45.0, 0.01), image())


def documents(example: Example) -> dict[str, dict[str, Any]]:
    """Return the example's documents by file name."""
    model = {
        "schema": "flashrt/model@1", "name": example.name, "components": [part.name for part in example.parts],
        "edges": [{"from": a, "to": b, "colocatable": True} for a, b in example.edges],
    }  # fmt: skip
    found: dict[str, dict[str, Any]] = {f"{example.name}/model.yaml": model}
    for name, types in example.workloads.items():
        found[f"{example.name}/{name}.yaml"] = {
            "schema": "flashrt/workload@1", "name": name, "types": dict(types), "arrivals": {"process": "poisson"}
        }  # fmt: skip
    found[f"{example.name}/profile.yaml"] = {
        "schema": "flashrt/serving-profile@1", "name": example.name, "provenance": "declared",
        "key": {"model": ServingModel.model_validate(model).digest}, "engines": engines(example),
    }  # fmt: skip
    return found


class _Flow(yaml.SafeDumper):
    """Lists of plain values on one line."""


def _list(dumper: yaml.SafeDumper, value: list[Any]) -> yaml.Node:
    flat = all(not isinstance(one, list | dict) for one in value)
    return dumper.represent_sequence("tag:yaml.org,2002:seq", value, flow_style=flat)


_Flow.add_representer(list, _list)


def main() -> None:
    """Write the documents, or with --check say which differ from those in the folder."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 where a document differs")
    check = parser.parse_args().check
    differs = []
    for example in EXAMPLES:
        for name, document in documents(example).items():
            text = yaml.dump(document, Dumper=_Flow, sort_keys=False, width=150)
            path = FOLDER / name
            if check:
                differs += [] if path.is_file() and path.read_text() == text else [name]
                continue
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
    if differs:
        raise SystemExit(f"these differ from what this script writes: {', '.join(differs)}")


if __name__ == "__main__":
    main()
