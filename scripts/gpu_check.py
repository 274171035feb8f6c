"""Whether the applications compute on a GPU what they compute on the CPU, and how fast.

    python scripts/gpu_check.py [--device cuda:0] [--only APP,APP] [--batches N] [--json FILE]
    python scripts/gpu_check.py --dry          # the same steps on two CPU cores, at the tiny configuration

For each application, through real systems (processes, buffers, workers):

- *medium*: the reference, and a deployment that cuts the application in two workers on the one device, at a medium
  configuration in bfloat16. Values go from worker to worker over CUDA channels, each worker on a stream of its own.
  The deployment must be equal to the reference bit for bit.
- *against the CPU*: the reference at the tiny configuration in float32, on the device and on the CPU. Frames may
  differ by rounding: at most one in a hundred pixels by more than two of 256 levels; sound by at most a hundredth of
  its range. Where a token is chosen by a hair, a device may choose another, and all that follows is different: such
  batches are counted, and said.

A table, and exit status 1 when a claim fails. With one GPU it takes a few minutes.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from flashrt.bench import resolve_system
from flashrt.bench.drive import Recorder, run_all
from flashrt.bench.process import SystemProcess
from flashrt.errors import FlashrtError
from flashrt.mcp_server.demo import applications, prepare_workspace

TIMEOUT_S = 240.0
NUM_BATCHES = 12
DRY_BATCHES = 2
MAX_LEVELS, MAX_SHARE = 2, 0.01
SEED = 3

WAN = {"num_attention_heads": 8, "attention_head_dim": 64, "ffn_dim": 2048, "num_layers": 8}
VIDEO = {"latent_height": 24, "latent_width": 24, "transformer": WAN, "vae": {"base_dim": 32}}
MEDIUM: dict[str, dict[str, Any]] = {
    "worldplay": {**VIDEO},
    "conversation": {"video": VIDEO},
    "longlive": {"video": VIDEO},
    "background_editor": {"video": VIDEO},
    "omni": {},
}
"""What the medium configuration has instead of the tiny one."""
CUTS: dict[str, tuple[str, ...]] = {
    "worldplay": ("vae",), "conversation": ("dit", "vae", "mux"), "longlive": ("vae",),
    "background_editor": ("sam", "mix"), "omni": ("vocoder",),
}  # fmt: skip
"""Nodes that get a worker of their own."""


@dataclass(frozen=True)
class Row:
    """One application's line of the table."""

    app: str
    reference_ms: float
    """A batch of the reference at the medium configuration, all sent at once."""
    split_ms: float
    """A batch of the two workers."""
    equal: bool
    close: bool
    """Whether the device agrees with the CPU in every batch that chose the same tokens."""
    other_tokens: int
    """Batches, of sound or picture that hang on tokens, in which the device chose otherwise."""
    seconds: float
    failure: str = ""

    @property
    def held(self) -> bool:
        """Whether the claims hold."""
        return self.equal and self.close and not self.failure


def main() -> int:
    """Check every application; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--only", help="names, separated by commas")
    parser.add_argument("--batches", type=int)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--dry", action="store_true", help="on CPU cores, at the tiny configuration")
    options = parser.parse_args()
    names = options.only.split(",") if options.only else list(applications())
    count = options.batches or (DRY_BATCHES if options.dry else NUM_BATCHES)
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for name in names:
            rows.append(check(name, Path(folder), options.device, count, dry=options.dry))
            print(line(rows[-1]), flush=True)
    if options.json is not None:
        record = {"device": "cpu" if options.dry else options.device, "rows": [asdict(row) for row in rows]}
        options.json.write_text(json.dumps(record, indent=1) + "\n")
    return 0 if all(row.held for row in rows) else 1


def check(name: str, folder: Path, device: str, count: int, *, dry: bool) -> Row:
    """Run one application's systems and compare them."""
    begin = time.monotonic()
    try:
        workspace = prepare_workspace(name, folder)
        medium = {} if dry else {**MEDIUM[name], "dtype": "bfloat16"}
        devices = ["cpu-0", "cpu-1"] if dry else [device, device]
        (workspace / "check.yaml").write_text(yaml.safe_dump(cut(workspace, CUTS[name], medium, dry=dry)))
        items = resized(inputs(workspace, count), medium)
        reference, reference_ms = play(workspace, "reference.py:serve", items, devices[:1], medium)
        split, split_ms = play(workspace, "check.yaml", items, devices, {})
        equal = same(reference, split)
        tiny = inputs(workspace, count)
        # Dry, both are what was just played.
        here = reference if dry else play(workspace, "reference.py:serve", tiny, devices[:1], {})[0]
        there = reference if dry else play(workspace, "reference.py:serve", tiny, ["cpu-0"], {})[0]
        differ = [batch for batch in range(count) if not close(here[batch], there[batch])]
        hangs_on_tokens = name in {"conversation", "omni", "longlive"}
        others = len(differ) if hangs_on_tokens else 0
        agreed = len(differ) == 0 or (hangs_on_tokens and differ[0] > 0)
        return Row(name, reference_ms, split_ms, equal, agreed, others, time.monotonic() - begin)
    except FlashrtError as error:
        return Row(name, 0.0, 0.0, False, False, 0, time.monotonic() - begin, str(error)[:300])


def inputs(workspace: Path, count: int) -> list[Mapping[str, Any]]:
    """Return the application's own batches."""
    from flashrt.ir.ops import load_function

    return list(load_function(workspace / "inputs.py", "batches")(SEED, count))


def resized(items: Sequence[Mapping[str, Any]], medium: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return batches whose camera frames have the medium configuration's size."""
    if "video" not in medium or "camera" not in items[0]:
        return list(items)
    factor = medium["video"]["latent_height"] * 8 // items[0]["camera"].shape[1]
    return [{**item, "camera": item["camera"].repeat(factor, axis=1).repeat(factor, axis=2)} for item in items]


def cut(workspace: Path, apart: Sequence[str], config: Mapping[str, Any], *, dry: bool) -> dict[str, Any]:
    """Return a deployment that gives the nodes `apart` a worker of their own."""
    program = yaml.safe_load((workspace / "program.yaml").read_text())
    nodes = program["graphs"][program["entry"]]["nodes"]
    return {
        "schema": "flashrt/deployment@1", "program": "program.yaml", "devices": "cpu" if dry else "cuda",
        "groups": {"first": [0], "second": [1]}, "config": dict(config),
        "place": {name: "second" if name in apart else "first" for name in nodes},
    }  # fmt: skip


def play(
    workspace: Path, system: str, items: Sequence[Mapping[str, Any]], devices: Sequence[str], config: Mapping[str, Any]
) -> tuple[list[dict[str, np.ndarray]], float]:
    """Return a system's outputs by batch, and milliseconds a batch from the first input to the last output."""
    found = resolve_system(system, workspace)
    log = workspace / "check.log"
    with SystemProcess(found, list(items[0]), devices=devices, config=config, log_path=log) as process:
        process.wait_ready(TIMEOUT_S)
        recorder: Recorder = run_all(process, items, TIMEOUT_S)
    outputs: list[dict[str, list[Any]]] = [{} for _ in items]
    seen: dict[str, int] = {}
    for write in recorder.written:
        # The reference writes each output once a batch and does not number them.
        batch = write.batch if write.batch is not None else seen.setdefault(write.output, 0)
        seen[write.output] = seen.get(write.output, 0) + 1
        outputs[batch].setdefault(write.output, []).append(np.asarray(write.value.data))
    period_ms = (recorder.written[-1].at_ns - recorder.sent_ns[0]) / 1e6 / len(items)
    return [{name: np.concatenate(parts) for name, parts in batch.items()} for batch in outputs], period_ms


def same(left: Sequence[Mapping[str, Any]], right: Sequence[Mapping[str, Any]]) -> bool:
    """Whether outputs are equal bit for bit."""
    return all(
        one.keys() == other.keys() and all(np.array_equal(one[name], other[name]) for name in one)
        for one, other in zip(left, right, strict=True)
    )


def close(left: Mapping[str, np.ndarray], right: Mapping[str, np.ndarray]) -> bool:
    """Whether a batch's outputs differ by rounding only."""
    for name, one in left.items():
        other = right[name]
        if one.shape != other.shape:
            return False
        apart = np.abs(one.astype(np.float64) - other.astype(np.float64))
        limit = MAX_LEVELS if one.dtype == np.uint8 else MAX_SHARE
        if float((apart > limit).mean()) > MAX_SHARE:
            return False
    return True


def line(row: Row) -> str:
    """Return a row of the table."""
    verdict = "PASS" if row.held else "FAIL"
    tokens = f", {row.other_tokens} batches chose other tokens" if row.other_tokens else ""
    return (
        f"{row.app:<18} reference {row.reference_ms:9.1f} ms  two workers {row.split_ms:9.1f} ms  "
        f"equal {'yes' if row.equal else 'no'}  as the CPU {'yes' if row.close else 'no'}{tokens}  "
        f"{row.seconds:5.0f} s  {verdict} {row.failure}"
    )


if __name__ == "__main__":
    sys.exit(main())
