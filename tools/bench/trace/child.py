"""The process that a reference is traced in: ``python -m flashrt.bench.trace.child SPEC ITEMS ANSWER PARENT``."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from flashrt.errors import Finding, FlashrtError

EXIT_USER_ERROR = 3


def main(arguments: Sequence[str]) -> int:
    """Trace one reference and write the draft as JSON; exit status 3 with findings where the reference is at fault."""
    from flashrt.bench.record import read_items
    from flashrt.bench.trace.draft import draft_program
    from flashrt.bench.trace.measure import trace_reference
    from flashrt.runtime.lifeline import die_with_parent

    text, items_fd, answer_fd, parent = arguments
    die_with_parent(int(parent))
    spec = json.loads(text)
    with os.fdopen(int(items_fd), "rb", closefd=False) as file:
        items = read_items(file, torch=True)
    code = 0
    try:
        traced = trace_reference(
            Path(spec["path"]), spec["function"], items, config=spec["config"], devices=spec["devices"],
            depth=spec["depth"],
        )  # fmt: skip
        draft = draft_program(traced, spec["name"], Path(spec["out"]))
        answer = json.dumps({
            "yaml": draft.yaml, "ops": draft.ops, "profile": draft.profile, "questions": draft.questions,
            "nodes": draft.nodes, "notes": draft.notes,
            "num_batches": len(items), "batch_ms": [round(one / 1e6, 3) for one in traced.batch_ns],
        })  # fmt: skip
    except FlashrtError as error:
        findings = error.findings or (Finding("reference", "code that runs", str(error), "correct it"),)
        answer, code = json.dumps([asdict(finding) for finding in findings]), EXIT_USER_ERROR
    with os.fdopen(int(answer_fd), "w", encoding="utf-8", closefd=False) as out:
        out.write(answer)
    return code


if __name__ == "__main__":
    status = main(sys.argv[1:])
    sys.stdout.flush()
    sys.stderr.flush()
    # Threads of the reference that still run must not hold the process.
    os._exit(status)
