"""From what was seen of a reference to a draft: program document, ops file, profile, questions."""

from __future__ import annotations

import ast
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flashrt.bench.trace.closing import close
from flashrt.bench.trace.document import Document, as_yaml, profile_of
from flashrt.bench.trace.measure import Traced
from flashrt.bench.trace.opsfile import OpsFile
from flashrt.bench.trace.plan import Call, Loop, Part, Step, steps_of
from flashrt.bench.trace.questions import Questions
from flashrt.bench.trace.run import SetUp
from flashrt.bench.trace.states import Kept, find_kept
from flashrt.bench.trace.units import Block, StaysClosedError, Unit, Units
from flashrt.errors import Finding, InputError
from flashrt.ir.building import parse_program


@dataclass(frozen=True)
class Draft:
    """A draft, all in memory.

    Attributes
    ----------
    program
        The document; `yaml` is its text with the questions.
    nodes
        Operation -> the places of the reference that it runs, and what it calls.
    """

    program: dict[str, Any]
    yaml: str
    ops: str
    profile: dict[str, Any]
    questions: list[dict[str, Any]]
    nodes: dict[str, dict[str, Any]]
    notes: list[str]


def draft_program(traced: Traced, name: str, folder: Path) -> Draft:
    """Return the draft of a traced reference; `folder` is where its files will be.

    Raises
    ------
    InputError
        The draft breaks a rule of programs; says which.
    """
    questions = traced.questions
    parts = _without_imports(traced.parts, traced)
    parts, outputs = _plain_outputs(parts, traced)
    parts = _plain_inputs(parts, traced)
    whys: list[str] = []
    while True:
        asked = Questions()
        asked.found = list(questions.found)
        try:
            return _drafted(traced, parts, outputs, name, folder, asked, whys)
        except StaysClosedError as error:
            whys.append(f"{error.part.whole.place}: {error.why}")
            parts = _close_one(parts, error.part, traced)


def _drafted(
    traced: Traced, parts: list[Part], outputs: Mapping[str, str], name: str, folder: Path, questions: Questions,
    notes: Sequence[str],
) -> Draft:  # fmt: skip
    runner, namer = traced.runner, traced.planner.namer
    saved = [(part, list(part.body)) for part in _opened(parts)]
    setup_names = {one for setup in runner.setups for one in setup.flow.binds} | set(namer.imported)
    inputs = {entry: (variable, traced.inputs[entry]) for entry, variable in traced.front.inputs.items()}
    units = Units(runner, namer, Kept(runner))
    units.kept.batch_names = {one for step in steps_of(parts) for one in runner.flow(step).binds}
    exposed, _ = units.exposed(parts, {variable for variable, _ in inputs.values()})
    kept = find_kept(
        runner,
        parts,
        [variable for variable, _ in inputs.values()],
        exposed,
        dict(traced.initial),
        setup_names,
        questions,
    )
    units = Units(runner, namer, kept)
    try:
        top = units.block(parts, set(outputs.values()), None, {one for one, _ in inputs.values()}, only_modules=False)
        document = Document(kept, units, questions)
        document.top = top.units
        program = document.program(name, top, inputs, outputs)
        _check(program, top)
    except StaysClosedError:
        for part, body in saved:
            part.body = body
        raise
    operations = [one for unit in top.units for one in unit.every_unit()]
    file = OpsFile(traced.path, traced.function, folder, runner, namer, kept)
    ops = file.write(operations, document.begins, document.order, traced.front.io_name)
    _ask_about_branches(traced, questions)
    if runner.watch.cut_short:
        questions.ask(
            "too-many-objects", "reference",
            "the reference holds more objects than were looked through: is there state that was not seen?",
            [("no", "as drafted"), ("yes", "declare it under the nodes that use it; ir_audit looks for it")],
        )  # fmt: skip
    for entry in sorted(set(runner.input_names) - set(inputs)):
        questions.ask(
            "unread-input", "reference", f"the batch loop was not seen to read the input '{entry}': is it needed?",
            [("no", "as drafted: it is no input"), ("yes", "read it in the batch loop, and trace again")],
        )  # fmt: skip
    head = [
        f"A draft that ir_trace made of {traced.path.name}:{traced.function}. Where there is a question, the first",
        "answer is what was drafted. Edges are blocking; degrees, tiles and streams are the author's to add.",
    ]
    return Draft(
        program, as_yaml(program, questions, head), ops,
        profile_of(name, top, units, traced.planning, document.graphs),
        [one.as_dict() for one in questions.found], {unit.name: _about(unit, units) for unit in operations},
        [f"kept in one piece: {one}" for one in dict.fromkeys(notes)],
    )  # fmt: skip


def _ask_about_branches(traced: Traced, questions: Questions) -> None:
    """Ask about branches of the statements that were run which no batch took."""
    taken: dict[str, set[int]] = {}
    every: dict[tuple[str, int], str] = {}
    for step in traced.every_step:
        file = step.place.rpartition(":")[0]
        for node in ast.walk(step.statement):
            if isinstance(node, ast.If):
                for block in (node.body, node.orelse):
                    if block:
                        every[file, block[0].lineno] = ast.unparse(node.test)
        taken.setdefault(file, set()).update(traced.runner.evidence[step.number].branches)
    for (file, line), test in sorted(every.items()):
        if line not in taken.get(file, set()):
            questions.ask(
                "untaken-branch", f"{file}:{line}",
                f"no batch took this branch of 'if {test[:60]}': does it change something that outlives a batch, "
                "or give values of another kind?",
                [
                    ("no", "as drafted: its statements are in the draft, and what they do to variables is known"),
                    ("yes", "trace inputs that take it, or declare its states by hand"),
                ],
            )  # fmt: skip


def _about(unit: Unit, units: Units) -> dict[str, Any]:
    calls: list[str] = []
    for step in unit.steps:
        for site in units.evidence(step).sites.values():
            if site.own or site.num_modules:
                calls.append(getattr(site.callee, "__name__", type(site.callee).__name__))
    return {
        "places": list(dict.fromkeys(step.place for step in unit.steps)),
        "calls": list(dict.fromkeys(calls)),
        "reads": sorted(unit.reads),
        "writes": sorted(unit.writes),
    }


def _check(program: Mapping[str, Any], top: Block) -> None:
    _, findings = parse_program(program, None, "draft")
    errors = [one for one in findings if one.severity == "error"]
    if not errors:
        return
    graphs = [unit for unit in _graphs(top) if unit.part is not None]
    text = str(errors[0])
    named = [unit for unit in graphs if f"'{unit.name}" in text or f"{unit.name}." in text or f"{unit.name}[" in text]
    for unit in reversed(named or graphs):
        assert unit.part is not None, "filtered"
        raise StaysClosedError(unit.part, text)
    raise InputError([_ours(one) for one in errors])


def _ours(finding: Finding) -> Finding:
    return Finding(
        f"draft, {finding.where}", finding.expected, finding.got,
        "the reference does something that a draft cannot say; write the program by hand from here, or let the batch's "
        "parts be functions of their own and call ir_trace again", rule=finding.rule,
    )  # fmt: skip


def _graphs(block: Block) -> list[Unit]:
    found: list[Unit] = []
    for unit in block.units:
        if unit.block is not None:
            found += [unit, *_graphs(unit.block)]
    return found


def _opened(parts: Sequence[Part]) -> list[Loop | Call]:
    found: list[Loop | Call] = []
    for part in parts:
        if isinstance(part, Loop | Call):
            found += [part, *_opened(part.body)]
    return found


def _close_one(parts: Sequence[Part], which: Loop | Call, traced: Traced) -> list[Part]:
    made: list[Part] = []
    for part in parts:
        if part is which:
            made.append(close(which, traced.runner))
            continue
        if isinstance(part, Loop | Call):
            part.body = _close_one(part.body, which, traced)
        made.append(part)
    return made


def _without_imports(parts: Sequence[Part], traced: Traced) -> list[Part]:
    """Return the plan without its imports: what they bind belongs to the set-up."""
    made: list[Part] = []
    for part in parts:
        if isinstance(part, Step) and isinstance(part.statement, ast.Import | ast.ImportFrom):
            traced.runner.setups.append(SetUp(part, traced.runner.flow(part), frozenset()))
            continue
        if isinstance(part, Loop | Call):
            part.body = _without_imports(part.body, traced)
        made.append(part)
    return made


def _plain_outputs(parts: Sequence[Part], traced: Traced) -> tuple[list[Part], dict[str, str]]:
    """Return the plan without ``frames_written = frames``, where the two are one value to the end of the batch."""
    outputs = dict(traced.outputs)
    made: list[Part] = list(parts)
    bound = {name for step in steps_of(parts) for name in traced.runner.flow(step).binds}
    ready = {name for setup in traced.runner.setups for name in setup.flow.binds}
    for part in parts:
        if not (isinstance(part, Step) and part.writes and isinstance(part.statement, ast.Assign)):
            continue
        value = part.statement.value
        if not isinstance(value, ast.Name) or value.id not in bound or value.id in ready:
            continue
        after = parts[list(parts).index(part) + 1 :]
        later = {name for step in steps_of(after) for name in traced.runner.flow(step).binds}
        later |= {name for step in steps_of(after) for name in traced.runner.evidence[step.number].changed}
        if value.id not in later:
            outputs[part.writes] = value.id
            made.remove(part)
    return made, outputs


def _plain_inputs(parts: Sequence[Part], traced: Traced) -> list[Part]:
    """Return the plan without ``field = knobs`` where an input is only used under its second name."""
    made = list(parts)
    front = traced.front
    for part in parts:
        if not (isinstance(part, Step) and isinstance(part.statement, ast.Assign) and len(part.statement.targets) == 1):
            continue
        target, value = part.statement.targets[0], part.statement.value
        if not (isinstance(target, ast.Name) and isinstance(value, ast.Name) and value.id in front.inputs.values()):
            continue
        before = [one for step in steps_of(made[: made.index(part)]) for one in traced.runner.flow(step).binds]
        others = {one for step in steps_of(made) if step is not part for one in traced.runner.flow(step).needs}
        ready = {name for setup in traced.runner.setups for name in setup.flow.binds}
        if target.id not in before and value.id not in others and target.id not in ready:
            entry = next(entry for entry, variable in front.inputs.items() if variable == value.id)
            front.inputs[entry] = target.id
            made.remove(part)
    return made
