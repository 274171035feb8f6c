"""Drafts of every shipped application: they mean the reference bit for bit, and have the stages of the program by hand.

The tracer is given the reference and its inputs alone.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import flashrt.apps
from tests.trace import drafting

ROOT = Path(flashrt.apps.__path__[0])
TOY = Path(__file__).parents[1] / "toy"
OPTIONS: dict[str, dict[str, Any]] = {
    "worldplay": {"transformer": {"num_layers": 1}},
    "longlive": {},
    "background_editor": {},
    "conversation": {"num_chunks": 2},
    "omni": {"num_chunks": 2},
    "skeleton": {},
    "toy": {},
}
STAGES: dict[str, dict[str, str]] = {
    "worldplay": {
        "dit/step": "each_denoise_step/denoise_step[{}]/denoise", "vae": "decode", "noise": "draw_noise",
    },
    "longlive": {
        "asr": "listen", "director": "direct", "dit/step": "each_denoise_step/denoise_step[{}]", "vae": "decode",
    },
    "background_editor": {
        "encoder": "encode", "dit/step": "each_denoise_step/denoise_step[{}]/denoise", "decoder": "decode",
        "sam": "segment", "mix": "composite",
    },
    "conversation": {
        "asr": "transcribe", "llm": "respond", "tts/talker": "speak", "tts/vocoder": "vocode", "listen": "prepare",
        "dit/step": "each_denoise_step/denoise_step[{}]", "vae": "decode",
    },
    "omni": {"thinker": "think", "talker": "speak", "vocoder": "vocode"},
    "skeleton": {"think/refine": "each_refine/refine[{}]", "draw": "draw"},
    "toy": {"drift": "drift", "render": "render"},
}  # fmt: skip
"""Operation of the program by hand -> the draft's; the conversation's `mux` computes nothing: no reference has it."""
COUNT = {"longlive": 6, "background_editor": 5}
"""Batches: speech has to begin and to end in them."""
DEPTH = {"background_editor": 2}
"""Its style is called within a call."""
TURNS = {"worldplay": 4, "longlive": 4, "background_editor": 3, "conversation": 4, "skeleton": 2}
STATES: dict[str, set[str]] = {
    "worldplay": {"kv_of_step", "noise_state", "feature_cache"},
    "longlive": {"hearing", "scene", "kv_of_step", "feature_cache"},
    "background_editor": {"encoded", "noise_state", "kv_of_step", "decoded"},
    "conversation": {"dialogue", "generator", "memory", "noise_state", "kv_of_step", "feature_cache"},
    "omni": {"generator", "memory", "thinker.model.model.rope_deltas"},
    "skeleton": {"memories", "ink"},
    "toy": {"drift", "render"},
}
"""Those of the programs by hand, by the reference's names; whether the thinker's positions are state is asked."""


@pytest.mark.slow
@pytest.mark.parametrize("app", STAGES)
def test_the_draft_means_the_reference_and_has_its_stages(app: str, tmp_path: Path) -> None:
    folder = TOY if app == "toy" else ROOT / app
    with drafting.pool() as pool:
        draft = pool.submit(
            drafting.drafted, str(folder / "reference.py"), "serve", str(folder / "inputs.py"), str(tmp_path / "draft"),
            COUNT.get(app, 4), DEPTH.get(app, 1), OPTIONS[app], app,
        ).result(timeout=240)  # fmt: skip
    assert all(draft["equal"].values()), draft["equal"]
    assert draft["equal"]
    assert draft["warnings"] == []
    for by_hand, drafted in STAGES[app].items():
        turns = range(TURNS[app]) if "{}" in drafted else range(1)
        for turn in turns:
            assert drafted.format(turn) in draft["operations"], by_hand
    assert set(draft["program"]["states"]) == STATES[app]
    per_turn = {name for name, state in draft["program"]["states"].items() if state.get("per") == "iteration"}
    assert per_turn == STATES[app] & {"kv_of_step", "memories"}
    asked = {question["kind"] for question in draft["questions"]}
    assert ("streaming" in asked) is (app in {"conversation", "omni"})
    assert ("state-or-scratch" in asked) is (app == "omni")
