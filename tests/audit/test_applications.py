"""Lies planted into shipped applications, and the applications as they are.

`make test` takes the skeleton; all applications with `FLASHRT_AUDIT_APPS=1`.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.apps import applications
from tests.apps.applications import ROOT

from .auditing import audit_folder, auditors
from .test_programs import told

ALL = os.environ.get("FLASHRT_AUDIT_APPS", "") not in {"", "0"}
APPS = ("skeleton", *(("worldplay", *applications.APPS) if ALL else ()))


@dataclass(frozen=True)
class Lie:
    """Text edits of an application's files, and what has to be found."""

    app: str
    name: str
    edits: tuple[tuple[str, str, str], ...]
    finds: tuple[tuple[str, str, str], ...]


OPS, DOC = "ops.py", "program.yaml"
KEEP = "    kept: dict[str, Any] = {}\n"

LIES = (
    Lie("skeleton", "ink-in-a-closure",
        ((OPS, "    def draw(inputs", KEEP + "    def draw(inputs"), (OPS, 'before = state["draw.ink"]',
        'before = kept.get("ink")'),
         (OPS, 'frames, state["draw.ink"]', 'frames, kept["ink"]')),
        (("hidden-attribute", "draw", "kept"), ("unused-read", "draw", "draw.ink"), ("unused-write", "draw",
        "draw.ink"))),
    Lie("skeleton", "memory-shared-by-steps",
        ((OPS, "    def refine(inputs", KEEP + "    def refine(inputs"), (OPS, 'state["think.memory"]\n',
        'kept.get("m")\n'),
         (OPS, 'refined, state["think.memory"]', 'refined, kept["m"]')),
        (("iteration-leak", "think/refine[*]", "kept"), ("unused-read", "think/refine[*]", "think.memory"))),
    Lie("skeleton", "writes-dropped", ((DOC, "reads: [draw.ink], writes: [draw.ink]", "reads: [draw.ink]"),),
        (("undeclared-write", "draw", "draw.ink"),)),
    Lie("skeleton", "reads-dropped", ((DOC, "reads: [draw.ink], writes: [draw.ink]", "writes: [draw.ink]"),),
        (("reads-old-value", "draw", "draw.ink"),)),
    Lie("skeleton", "ink-of-a-batch-alone",
        ((OPS, 'model.draw(inputs["field"], ', 'model.draw(inputs["field"] - inputs["field"].mean(), '),),
        (("streaming-lookahead", "draw", "think.field -> draw.field"),)),
    Lie("skeleton", "knobs-changed", ((OPS, '        refined, state', '        field *= 0.5\n        refined, state'),),
        (("changes-input", "think/refine[*]", "field"),)),
    Lie("skeleton", "ink-in-place", ((OPS, "        return {\"frames\": frames}",
        '        kept["last"] = frames\n        kept.setdefault("first", frames)[0] = 0\n'
          '        return {"frames": kept["first"]}'),
        (OPS, "    def draw(inputs", KEEP + "    def draw(inputs")),
        (("hidden-attribute", "draw", "kept"),)),
    Lie("worldplay", "writes-dropped", ((DOC, "reads: [vae.cache]\n        writes: [vae.cache]",
        "reads: [vae.cache]"),),
        (("undeclared-write", "vae", "vae.cache"),)),
    Lie("worldplay", "kv-in-a-closure",
        ((OPS, "    def denoise_step(inputs", KEEP + "    def denoise_step(inputs"), (OPS, 'kv = state["dit.kv"]',
        'kv = kept.get("kv")'),
         (OPS, 'latents, state["dit.kv"]', 'latents, kept["kv"]')),
        (("iteration-leak", "dit/step[*]", "kept"),)),
    Lie("worldplay", "noise-of-the-global-generator",
        ((OPS, '        return {"sample": {"latents": latents, "level": 0}}',
          '        import torch\n        return {"sample": {"latents": latents + torch.rand(1), "level": 0}}'),),
        (("hidden-random", "dit/step[*]", "torch"),)),
    Lie("omni", "memory-in-a-closure",
        ((OPS, "    def vocode(inputs", KEEP + "    def vocode(inputs"), (OPS, 'memory = state["vocoder.memory"]',
        'memory = kept.get("m")'),
         (OPS, 'speech, state["vocoder.memory"]', 'speech, kept["m"]')),
        (("hidden-attribute", "vocoder", "kept"),)),
    Lie("omni", "picture-changed", ((OPS, '        return {"thoughts": model.think(',
        '        torch.as_tensor(inputs["image"])[0] = 0\n        return {"thoughts": model.think('),),
        (("changes-input", "thinker", "image"),)),
    Lie("omni", "reads-dropped", ((DOC, "        reads: [talker.rng]\n", ""),), (("reads-old-value", "talker",
        "talker.rng"),)),
    Lie("conversation", "dialogue-in-a-global",
        ((OPS, "Op = Callable", "KEPT: dict[str, Any] = {}\nOp = Callable"),
         (OPS, 'reply, state["llm.dialogue"] = model.respond(llm, config, inputs["tokens"], state["llm.dialogue"])',
          'reply, KEPT["d"] = model.respond(llm, config, inputs["tokens"], KEPT.get("d"))')),
        (("hidden-global", "llm", "KEPT"),)),
    Lie("conversation", "sound-made-even", ((OPS, '{"audio": inputs["audio"], "frames"',
        '{"audio": inputs["audio"] - inputs["audio"].mean(), "frames"'),),
        (("streaming-lookahead", "mux", "mux.audio"),)),
    Lie("background_editor", "camera-changed", ((OPS, '    return {"frames": model.composite(',
        '    torch.as_tensor(inputs["camera"])[:, 0] = 0\n    return {"frames": model.composite('),),
        (("changes-input", "mix", "camera"),)),
    Lie("background_editor", "generator-not-declared",
        ((DOC, "reads: [encoder.cache, encoder.rng], writes: [encoder.cache, encoder.rng]",
        "reads: [encoder.cache], writes: [encoder.cache]"),
         (DOC, "  encoder.rng: {bytes: 5056}\n", "")),
        (("undeclared-read", "encoder", "encoder.rng"), ("undeclared-write", "encoder", "encoder.rng"))),
    Lie("longlive", "clock-in-the-latents", ((OPS, '        return {"sample": sample}\n\n    direct(',
        '        import time\n        sample = {**sample, "latents": sample["latents"] + time.time() % 1}\n'
          '        return {"sample": sample}\n\n    direct('),),
        (("nondeterministic", "director", "clock"),)),
    Lie("longlive", "reads-too-much", ((DOC, "reads: [dit.scene]", "reads: [dit.scene, vae.cache]"),),
        (("unused-read", "director", "vae.cache"),)),
)  # fmt: skip


@pytest.fixture(scope="module")
def pool() -> Iterator[ProcessPoolExecutor]:
    with auditors(torch=ALL) as found:
        yield found


def audited(pool: ProcessPoolExecutor, app: str, folder: Path, edits: tuple[tuple[str, str, str], ...] = ()) -> Any:
    place = folder / app
    shutil.copytree(ROOT / app, place, ignore=shutil.ignore_patterns("__pycache__"))
    for name, old, new in edits:
        path = place / name
        text = path.read_text()
        assert old in text, f"{app}/{name} has no {old!r}"
        path.write_text(text.replace(old, new, 1))
    document = yaml.safe_load((place / "program.yaml").read_text())
    shipped, wanted = applications.NUM_CHUNKS.get(app, (0, 0))
    for graph in document["graphs"].values():
        for edge in graph["edges"]:
            if shipped and edge.get("chunks") == shipped:
                edge["chunks"] = wanted
    batches = [dict(item) for item in applications.load_file(app, "inputs").batches(7, 4)]
    future = pool.submit(audit_folder, str(place), document, batches, applications.options(app), False)
    return future.result(timeout=280)


@pytest.mark.parametrize("lie", [lie for lie in LIES if lie.app in APPS], ids=lambda lie: f"{lie.app}-{lie.name}")
def test_a_lie_in_an_application_is_found(pool: ProcessPoolExecutor, lie: Lie, tmp_path: Path) -> None:
    result = audited(pool, lie.app, tmp_path, lie.edits)
    found = told(result, "error", "warning")
    for kind, node, subject in lie.finds:
        assert any(k == kind and n == node and subject in s for k, n, s in found), (found, result["unchecked"])
    assert {node for _, node, _ in found} == {node for _, node, _ in lie.finds}, found


@pytest.mark.parametrize("app", APPS)
def test_a_shipped_application_is_not_accused(pool: ProcessPoolExecutor, app: str, tmp_path: Path) -> None:
    result = audited(pool, app, tmp_path)
    assert told(result, "error", "warning") == [], result["findings"]
    assert {status for status, _ in result["claims"].values()} == {"confirmed"}
