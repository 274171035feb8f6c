"""Answers of tools as tables and sentences, for people."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

MIN_WIDTH = 100
"""Columns of a table where standard output has fewer, as a pipe has."""
COLOURS = {
    "valid": "green", "equal": "green", "measured": "green", "done": "green", "clean": "green", "faster": "green",
    "confirmed": "green", "yes": "green", "not valid": "red", "not equal": "red", "refuted": "red", "failed": "red",
    "lost": "red", "slower": "red", "error": "red", "warning": "yellow", "pending": "yellow", "claimed": "yellow",
    "running": "yellow", "queued": "yellow", "inconclusive": "yellow", "hint": "cyan", "EMULATED": "magenta",
}  # fmt: skip
Record = Mapping[str, Any]
Part = Table | Text | str


def show(tool: str, record: Record, workspace: Path, given: Record | None = None) -> None:
    """Print a tool's answer to the arguments that were given."""
    console = Console()
    console.width = max(console.width, MIN_WIDTH)
    render = RENDERERS.get(tool)
    for part in render({**record, "given": given or {}}, workspace) if render else facts(record):
        if isinstance(part, Table):
            console.print(part)
        else:
            console.print(part, markup=False, highlight=False, soft_wrap=True)


def table(title: str, columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> Table:
    """Return a table; columns whose name begins with ``#`` are numbers, and nothing in a cell is markup."""
    made = Table(title=title or None, title_justify="left")
    for column in columns:
        number = column.startswith("#")
        made.add_column(column.lstrip("#"), justify="right" if number else "left", overflow="fold", no_wrap=number)
    for row in rows:
        made.add_row(*(Text(said, COLOURS.get(said, "")) for said in map(say, row)))
    return made


def say(value: Any) -> str:
    """Return a cell's text: few digits, nothing for what is not known."""
    if value is None:
        return ""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:,.4g}" if abs(value) < 1000 else f"{value:,.0f}"
    if isinstance(value, list | tuple):
        return ", ".join(map(say, value))
    return str(value)


def facts(record: Record) -> list[Part]:
    """Return any record: its plain values as a table, lists of records as tables of their own."""
    plain = [(key, value) for key, value in record.items() if key != "ok" and not isinstance(value, Mapping | list)]
    plain += [
        (key, value) for key, value in record.items()
        if isinstance(value, list) and value and not any(isinstance(one, Mapping | list) for one in value)
    ]  # fmt: skip
    return [table("", ("what", "value"), plain)] if plain else ["done"]


def _notes(record: Record, *kinds: str) -> list[Part]:
    words = {"reasons": "not valid", "in_the_way": "in the way"}
    return [f"{words.get(kind, kind.rstrip('s'))}: {one}" for kind in kinds for one in record.get(kind) or []]


def _build(record: Record, workspace: Path) -> list[Part]:
    rows = [(one["severity"], one["where"], one["message"], one["fix"]) for one in record["diagnostics"]]
    parts: list[Part] = [table("", ("severity", "where", "finding", "repair"), rows)] if rows else []
    counts = ", ".join(f"{count} {name}" for name, count in record["counts"].items())
    return [
        *parts,
        f"{record['program']}  {record['name']}: {counts}",
        f"operations: {', '.join(record['operations'])}",
    ]


def _show(record: Record, workspace: Path) -> list[Part]:
    if "path" in record:
        return [f"wrote {record['path']}"]
    if "text" in record:
        return [record["text"].rstrip("\n")]
    import json

    return [json.dumps(record["document"], indent=1)]


def _difference(first: Record | None) -> str | None:
    if first is None:
        return None
    batch = "" if first["batch"] is None else f" (batch {first['batch']})"
    return f"at {first['position']}{batch}: expected {first['expected']}, got {first['got']}"


def _equality(record: Record) -> list[Part]:
    rows = [
        (name, "equal" if not one.get("mismatched") else "not equal", one.get("mismatched"), one.get("total"),
         one.get("max_abs"), _difference(one.get("first_mismatch")))
        for name, one in record["outputs"].items()
    ]  # fmt: skip
    columns = ("output", "verdict", "#differ", "#of", "#max abs", "first difference")
    verdict = "equal" if record["equivalent"] else "NOT EQUAL"
    return [
        table("", columns, rows),
        f"{record['equivalence']}: '{record['candidate']['reference']}' is {verdict} to "
        f"'{record['baseline']['reference']}' ({record.get('tier')}, {record.get('num_batches')} batches)",
        *[f"because: {one}" for one in record.get("reasons") or []],
        *[f"warning: {one}" for one in record.get("warnings") or []],
        *_after_inequality(record),
    ]


def _after_inequality(record: Record) -> list[Part]:
    """Return what the first difference says, and what to call next."""
    if record["equivalent"]:
        return []
    candidate, inputs = record["candidate"], record["inputs"]
    if candidate["kind"] == "program":
        return [f"next: flashrt audit {candidate['reference']} {inputs} finds state that is not declared"]
    if candidate["kind"] == "deployment":
        return [
            f"next: flashrt check {record['baseline']['reference']} PROGRAM {inputs}, with the deployment's program; "
            "where that is equal, flashrt audit PROGRAM finds what its ops keep or change undeclared"
        ]
    wrong = [one for one in record["outputs"].values() if not one["equal"]]
    batches = [one["first_mismatch"]["batch"] for one in wrong if one.get("first_mismatch")]
    # Where an output has no first difference (another shape, say), nothing is known of when it began.
    if not batches or len(batches) < len(wrong) or None in batches:
        return []
    # A batch is reckoned from the position, as if all batches had one length.
    if min(batches) > 0:
        return ["next: it begins well, so look at what goes from batch to batch: caches, counters, generators"]
    return ["next: it differs about from the first batch on: look at weights, seeds, order of inputs, arithmetic"]


def _check(record: Record, workspace: Path) -> list[Part]:
    return _equality(record)


def _interpret(record: Record, workspace: Path) -> list[Part]:
    parts = _equality(record["equality"]) if "equality" in record else []
    elements = ", ".join(f"{count} {name}" for name, count in record["elements"].items())
    return [f"{record['num_batches']} batches gave {elements}; wrote {record['outputs']}", *parts]


def _audit(record: Record, workspace: Path) -> list[Part]:
    parts: list[Part] = []
    if record["findings"]:
        rows = []
        for one in record["findings"]:
            evidence = one["evidence"]
            seen = "; ".join(
                str(evidence[key]) for key in ("difference", "how", "place", "source") if evidence.get(key)
            )
            rows.append((one["severity"], one["where"], one["kind"], one["subject"], seen, one["fix"]))
        columns = ("", "node", "kind", "about", "evidence", "smallest change")
        parts.append(table(f"{record['name']}: what is not as the document says", columns, rows))
    claims = [(name, one["status"], one["how"]) for name, one in record["claims"].items()]
    parts.append(table("claims of the document", ("claim", "status", "how"), claims))
    parts += [f"not checked: {one['what']}: {one['why']}" for one in record["unchecked"]]
    parts += [f"seen: {one['place']} ({one['kind']}): {one['says']}" for one in record["observed"]]
    counts = ", ".join(f"{count} {level}{'' if count == 1 else 's'}" for level, count in record["counts"].items())
    return [
        *parts, *_notes(record, "notes"),
        f"{counts} over {record['num_batches']} batches in {record['seconds']['all']:.0f} s; {record['audit']}",
        f"wrote {record['path']}",
    ]  # fmt: skip


def _trace(record: Record, workspace: Path) -> list[Part]:
    from flashrt.analysis.profile import read_profile

    times = read_profile(workspace / record["files"]["profile"])
    paths = {path.replace("[*]", "").rpartition("/")[2]: path for path in times.operations}
    rows = []
    for name, node in record["nodes"].items():
        path = paths.get(name, name)
        ms, size = times.operations.get(path, {}).get(1), times.memory.get(path)
        rows.append(
            (path, None if ms is None else f"{ms:.3g}", f"{size / 1e6:.3g}" if isinstance(size, int) else None,
             "\n".join(node["reads"]), "\n".join(node["writes"]), node["places"][-1])
        )  # fmt: skip
    parts: list[Part] = [table("", ("operation", "#ms", "#MB", "reads", "writes", "from"), rows)]
    parts.append(f"{record['name']}: {record['num_batches']} batches run; program {record['program']}")
    parts += [f"wrote {path}" for path in record["files"].values()]
    parts += _notes(record, "notes")
    for number, question in enumerate(record["questions"], 1):
        parts.append(f"question {number} ({question['where']}, {question['source']}): {question['question']}")
        parts += [f"   - {choice['answer']}: {choice['change']}" for choice in question["choices"]]
    inputs = record["given"].get("inputs", "INPUTS")
    prove = shlex.join(["flashrt", "interpret", record["path"], inputs, "--baseline", record["system"]])
    answer = f"answer the questions in {record['path']}, then " if record["questions"] else ""
    return [*parts, f"next: {answer}{prove}"]


def _analyze(record: Record, workspace: Path) -> list[Part]:
    edges = [(one["source"], one["target"], one["lambda"], one["kind"], one["state"]) for one in record["dependencies"]]
    rows = []
    ids = {one["id"] for one in record["candidates"]}
    for one in record["candidates"]:
        expected = one["expected"] if isinstance(one["expected"], Mapping) else {}
        gain = expected.get("versus_baseline") or {}
        rows.append((one["id"], "legal" if one["legal"] else "no", gain.get("fps"), gain.get("first_output"),
                     _why(one, ids)))  # fmt: skip
    parts: list[Part] = [
        table("dependencies (λ: batches between)", ("from", "to", "#λ", "kind", "state"), edges),
        table("candidates", ("candidate", "legal", "#rate ×", "#first output ×", "why"), rows),
    ]
    if record.get("t_min_ms") is not None:
        keys = ("t_min_ms", "t_min_resource_ms", "t_min_recurrence_ms", "d0_ms", "latency_ms", "first_output_ms", "fps")
        title = f"figures of the deployment, from {record['provenance']} times"
        parts.append(table(title, ("figure", "#value"), [(key, record.get(key)) for key in keys]))
    if "seeded" in record:
        seeded = record["seeded"]
        parts.append(f"queue: {len(seeded['added'])} variants added, {len(seeded['removed'])} removed at once")
    return parts


def _why(candidate: Record, ids: set[str]) -> str:
    """Return why a candidate is legal or not; of a composition, whose parts have rows of their own, that both are."""
    whole = str(candidate["id"])
    cuts = (at for at, letter in enumerate(whole) if letter == "+")
    parts = next(((whole[:at], whole[at + 1 :]) for at in cuts if {whole[:at], whole[at + 1 :]} <= ids), None)
    if parts is None or not candidate["legal"]:
        return str(candidate["legality"])
    more = "; a change of the program too, see --json" if candidate.get("program_change") else ""
    return f"both are legal: {parts[0]}, {parts[1]}{more}"


def _profile(record: Record, workspace: Path) -> list[Part]:
    document = record["document"]
    rows = [
        (path, degree, ms, (document.get("spread") or {}).get(path, {}).get(degree))
        for path, times in document["operations"].items()
        for degree, ms in times.items()
    ]
    return [
        table("", ("operation", "#degree", "#ms", "#spread"), rows), *_notes(record, "notes"),
        f"{record['profile']}: wrote {record['path']}",
    ]  # fmt: skip


def _bench(record: Record, workspace: Path) -> list[Part]:
    from flashrt.variants.report.page import figures

    verdict = "valid" if record["valid"] else "NOT VALID"
    emulated = ", EMULATED devices" if record.get("emulated") else ""
    return [
        table(f"{record['system']['reference']}, {record['scenario']}: {verdict}{emulated}",
              ("figure", "#value", "#95 % interval"), figures(record)),
        *_notes(record, "reasons", "notes"),
        f"{record['run']}; plots: {record['artifacts']['page']}",
    ]  # fmt: skip


def _compare(record: Record, workspace: Path) -> list[Part]:
    parts: list[Part] = []
    for one in record["comparisons"]:
        rows = [
            (name, found["baseline"], found["value"], found["ratio"], found["confidence_95"], found["verdict"])
            for name, found in one["metrics"].items()
        ]
        title = f"{one['run']} against {record['baseline']}{', EMULATED devices' if record.get('emulated') else ''}"
        parts.append(table(title, ("figure", "#baseline", "#value", "#ratio", "95 % interval", "verdict"), rows))
    return [*parts, *_notes(record, "reasons", "notes"), *([record["comparison"]] if "comparison" in record else [])]


def _queue(record: Record) -> list[Part]:
    stop = "the search may stop" if record["may_stop"] else "the search may not stop yet"
    return [*_notes(record, "in_the_way"), f"{stop}{': ' + record['note'] if record.get('note') else ''}"]


def _variants(record: Record, workspace: Path) -> list[Part]:
    rows = [
        ("  " * one["depth"] + one["variant"], one["state"], one["transformation"], one["rank"],
         one["reason"] or " ".join(filter(None, (one["equivalence"], one["run"]))) or one["hypothesis"])
        for one in record["variants"]
    ]  # fmt: skip
    columns = ("variant", "state", "transformation", "#rank", "evidence, reason or hypothesis")
    return [table("", columns, rows), *_queue(record)]


def _variant(record: Record, workspace: Path) -> list[Part]:
    if record.get("variant") is None:
        return [*_queue(record), "there is no pending variant"]
    keys = ("variant", "state", "hypothesis", "transformation", "bottleneck", "legality", "system", "parent", "folder",
            "equivalence", "run", "reason")  # fmt: skip
    rows = [(key, record.get(key)) for key in keys if record.get(key)]
    return [table("", ("what", "value"), rows), *_queue(record)]


def _lease(record: Record, workspace: Path) -> list[Part]:
    exports = [f"export {name}={value}" for name, value in (record.get("environment") or {}).items()]
    names = [one.get("run_name") or one.get("uuid") if isinstance(one, Mapping) else one for one in record["devices"]]
    return [f"{record['lease']}: {say(names)}", *exports, f"give it back: flashrt gpu release {record['lease']}"]


def _report(record: Record, workspace: Path) -> list[Part]:
    return [*[f"not in it: {one}" for one in record["missing"]], f"wrote {record['path']}"]


RENDERERS: dict[str, Callable[[Record, Path], list[Part]]] = {
    "ir_build": _build, "ir_show": _show, "ir_interpret": _interpret, "ir_audit": _audit, "ir_trace": _trace,
    "analyze": _analyze, "profile_measure": _profile, "equivalence_check": _check, "bench_run": _bench,
    "bench_compare": _compare, "variant_list": _variants, "variant_add": _variant, "variant_next": _variant,
    "variant_update": _variant, "gpu_acquire": _lease, "report_write": _report,
}  # fmt: skip
