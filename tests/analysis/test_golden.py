"""WorldPlay's published figures, and the propositions of the cost model, reproduced.

Citation: ``papers/000`` (FlashRT), table of multi-GPU deployments; ``golden.json``. Rates within the rounding of the
table; serial latencies below the measured ones and within 40 ms, because the model leaves out what is not an operation.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import flashrt.apps.worldplay
from flashrt.analysis import DeploymentCost, evaluate_placement, read_deployment, read_profile
from flashrt.ir import BuiltProgram, build, build_file

WORLDPLAY = Path(flashrt.apps.worldplay.__file__).parent
PROFILE = WORLDPLAY / "profiles" / "paper.yaml"
# gpus, degree of the DiT, degree of the VAE, on one group, measured latency in ms, measured frames per second
PAPER = [
    (2, 2, 2, True, 493, 25.5),
    (2, 1, 1, False, 625, 31.0),
    (4, 4, 4, True, 425, 29.7),
    (4, 2, 2, False, 494, 39.5),
    (6, 4, 2, False, 447, 44.3),
]
MS = st.integers(0, 4000).map(lambda value: value / 8)


def program(steps: int = 4, state: dict[str, Any] | None = None, streaming: bool = True) -> BuiltProgram:
    """The shipped program's shape, with degrees; `state` declares the steps' cache (default: one per iteration)."""
    mode: dict[str, Any] = {"mode": "streaming", "chunks": 3} if streaming else {"mode": "blocking"}
    return build(
        {
            "schema": "flashrt/program@1",
            "name": "worldplay",
            "entry": "app",
            "states": {"dit.kv": {"per": "iteration"} if state is None else state, "vae.cache": {}},
            "graphs": {
                "app": {
                    "inputs": {"actions": {}},
                    "outputs": {"frames": {}},
                    "nodes": {
                        "dit": {"graph": "denoise"},
                        "vae": {"op": "decode", "reads": ["vae.cache"], "writes": ["vae.cache"],
                                "degrees": list(range(1, 9))},
                    },
                    "edges": [
                        {"from": "actions", "to": "dit.latents", "mode": "blocking"},
                        {"from": "dit.latents", "to": "vae.latents", **mode},
                        {"from": "vae.frames", "to": "frames", **mode},
                    ],
                },
                "denoise": {
                    "repeat": {"times": steps, "carry": {"latents": "latents"}},
                    "inputs": {"latents": {}},
                    "outputs": {"latents": {}},
                    "nodes": {"step": {"op": "denoise", "reads": ["dit.kv"], "writes": ["dit.kv"],
                                       "degrees": list(range(1, 9))}},
                    "edges": [
                        {"from": "latents", "to": "step.latents", "mode": "blocking"},
                        {"from": "step.latents", "to": "latents", "mode": "blocking"},
                    ],
                },
            },
        },
        Path(__file__).parent,
    )  # fmt: skip


def cost(built: BuiltProgram, profile: Any, groups: dict[str, list[int]], place: dict[str, str]) -> DeploymentCost:
    deployment = {"groups": groups, "place": place}
    return evaluate_placement(built, read_profile(profile, built), read_deployment(deployment, built))


@pytest.mark.parametrize(("gpus", "dit", "vae", "together", "latency_ms", "fps"), PAPER)
def test_worldplay_deployments(gpus: int, dit: int, vae: int, together: bool, latency_ms: float, fps: float) -> None:
    first = list(range(dit))
    second = first if together else list(range(dit, dit + vae))
    found = cost(program(), PROFILE, {"a": first, "b": second}, {"dit/*": "a", "vae": "b"})
    assert found.num_devices == gpus
    assert found.fps is not None
    assert abs(found.fps - fps) <= 0.05 + 1e-9
    assert latency_ms - 40 <= found.latency_ms < latency_ms
    assert found.provenance == "inferred"


def test_worldplay_baseline_as_shipped() -> None:
    built = build_file(WORLDPLAY / "program.yaml")
    found = cost(built, PROFILE, {"a": [0]}, {"dit": "a", "vae": "a"})
    assert found.fps is not None
    assert abs(found.fps - 20.4) <= 0.05
    assert found.first_output_ms < found.latency_ms == pytest.approx(588.24)
    assert [step.operation for step in found.latency_path][:5] == [f"dit/step[{i}]" for i in range(4)] + ["vae"]
    # The decoder's three chunks show a third of the frames each.
    assert found.first_output_ms == pytest.approx(387.1 + 201.14 / 3, abs=1e-6)


def _profile(steps: dict[int, float], vae: dict[int, float], lag: float, num_frames: int = 4) -> dict[str, Any]:
    return {
        "schema": "flashrt/profile@1", "device": "emulated", "provenance": "declared", "frames_per_batch": num_frames,
        "operations": {"dit/step[*]": steps, "vae": vae}, "transfer": {"latency_ms": lag},
    }  # fmt: skip


@settings(deadline=None, max_examples=60)
@given(MS, MS, MS, MS, MS)
def test_together_on_one_group_or_apart(d: float, v: float, d2: float, v3: float, lag: float) -> None:
    built = program(steps=1, streaming=False)
    profile = _profile({2: d, 4: d2}, {2: v, 3: v3}, lag)
    together = cost(built, profile, {"g": [0, 1]}, {"dit/*": "g", "vae": "g"})
    assert together.t_min_ms == pytest.approx(d + v)
    assert together.d0_ms == pytest.approx(together.t_min_ms + d + v)
    apart = cost(built, profile, {"x": [0, 1, 2, 3], "y": [4, 5, 6]}, {"dit/*": "x", "vae": "y"})
    assert apart.t_min_ms == pytest.approx(max(d2, v3))
    assert apart.d0_ms == pytest.approx(apart.t_min_ms + d2 + lag + v3)
    assert apart.latency_ms == pytest.approx(d2 + lag + v3)


@settings(deadline=None, max_examples=60)
@given(st.integers(1, 4), MS, MS, MS)
def test_steps_in_sequence_parallel_or_pipelined(n: int, t1: float, tn: float, lag: float) -> None:
    profile = _profile({1: t1, n: tn if n > 1 else t1}, {1: 0}, lag)
    built = program(steps=n, streaming=False)
    group = list(range(n))
    spread = cost(built, profile, {"g": group, "v": [0]}, {"dit/*": "g", "vae": "v"})
    whole = n * (tn if n > 1 else t1)
    assert spread.t_min_ms == pytest.approx(whole)
    assert spread.d0_ms == pytest.approx(whole + whole)
    groups = {f"s{i}": [i] for i in range(n)}
    place = {f"dit/step[{i}]": f"s{i}" for i in range(n)} | {"vae": f"s{n - 1}"}
    pipelined = cost(built, profile, groups, place)
    assert pipelined.t_min_ms == pytest.approx(t1)
    assert pipelined.d0_ms == pytest.approx(t1 + n * t1 + (n - 1) * lag)
    shared = cost(program(steps=n, state={}, streaming=False), profile, groups, place)
    lags = n * lag if n > 1 else 0
    assert shared.t_min_ms == pytest.approx(n * t1 + lags)
    assert shared.t_min_recurrence_ms == pytest.approx(n * t1 + lags)
    assert shared.t_min_resource_ms == pytest.approx(t1)


@settings(deadline=None, max_examples=40)
@given(st.lists(MS, min_size=3, max_size=3))
def test_three_operations_tied_by_one_state_sustain_the_sum(times: list[float]) -> None:
    names = ["a", "b", "c"]
    built = build(
        {
            "schema": "flashrt/program@1", "name": "tied", "entry": "app", "states": {"s": {}},
            "graphs": {"app": {
                "inputs": {"x": {}}, "outputs": {"y": {}},
                "nodes": {name: {"op": name, "reads": ["s"], "writes": ["s"]} for name in names},
                "edges": [{"from": f, "to": t, "mode": "blocking"} for f, t in
                          [("x", "a.x"), ("a.y", "b.x"), ("b.y", "c.x"), ("c.y", "y")]],
            }},
        },
        Path(__file__).parent,
    )  # fmt: skip
    profile = {"schema": "flashrt/profile@1", "device": "d", "provenance": "declared",
               "operations": dict(zip(names, times, strict=True))}  # fmt: skip
    found = cost(built, profile, {"p": [0], "q": [1], "r": [2]}, {"a": "p", "b": "q", "c": "r"})
    assert found.t_min_ms == pytest.approx(sum(times))
    assert found.t_min_resource_ms == max(times)
    assert math.isclose(found.t_min_recurrence_ms, sum(times))
