"""Tracing a reference: run its set-up, open what can be opened over the first batches, then look and measure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from flashrt.bench.io import Inputs, Outputs, SystemIO
from flashrt.bench.trace.closing import closed
from flashrt.bench.trace.front import Front, find_front
from flashrt.bench.trace.outputs import JOIN, name_outputs
from flashrt.bench.trace.plan import Call, Loop, Namer, Part, Planner, Step, steps_of
from flashrt.bench.trace.questions import Questions
from flashrt.bench.trace.run import Runner
from flashrt.bench.trace.syntax import flow_of
from flashrt.bench.trace.values import Seen, describe_value
from flashrt.bench.trace.watch import Watch
from flashrt.clock import monotonic_ns
from flashrt.errors import input_error
from flashrt.ir.ops import load_function
from flashrt.ir.values import join


@dataclass(frozen=True)
class Traced:
    """All that was seen of a reference.

    Attributes
    ----------
    outputs
        Output -> the name in the plan that has its value.
    planning
        How many of the first batches were run to find the plan; times are of the ones after.
    """

    path: Path
    function: str
    front: Front
    parts: list[Part]
    outputs: Mapping[str, str]
    runner: Runner
    planner: Planner
    questions: Questions
    inputs: Mapping[str, Seen]
    initial: Mapping[str, Seen]
    planning: int
    every_step: Sequence[Step]
    """All statements that were run, those of opened calls that were closed again included."""
    batch_ns: Sequence[int] = field(default_factory=list)


def trace_reference(
    path: Path, function: str, items: Sequence[Mapping[str, Any]], *, config: Mapping[str, Any] | None = None,
    devices: Sequence[str] = ("cpu",), depth: int = 2,
) -> Traced:  # fmt: skip
    """Run a reference over `items` and return what was seen.

    Parameters
    ----------
    depth
        How many levels of calls of the application's own functions may be opened.

    Raises
    ------
    InputError
        The reference cannot be followed, or its code fails; names the place.
    """
    planning = depth + 1
    if len(items) < planning + 2:
        raise input_error(
            "argument 'count'", f"at least {planning + 2}: {planning} to find the stages, two to look and measure",
            str(len(items)), "ask for more batches, or let the inputs function yield more",
        )  # fmt: skip
    serve = load_function(path, function)
    watch = Watch(path.parent)
    ready: list[int] = []
    io = SystemIO(
        Inputs(list(items[0])), Outputs(lambda name, value, batch: None), list(devices), dict(config or {}),
        lambda: ready.append(1),
    )  # fmt: skip
    runner = Runner(io, watch, list(items[0]))
    namer = Namer(runner.values)
    planner = Planner(namer, runner.is_own)
    questions = Questions()
    with _counted_modules(runner):
        front = find_front(serve, runner, planner)
        body, outputs = name_outputs(front.body, runner, namer)
        if not outputs:
            raise input_error(
                f"system '{path.name}:{function}'", "a batch that writes an output", "no write in the batch loop",
                "write io.outputs['name'].write(value) there, and call ir_trace again", rule="no-outputs",
            )  # fmt: skip
        runner.values[JOIN] = join
        parts = planner.parts(body, front.source, front.contexts)
        by_name = {name: output for output, name in outputs.items()}
        for step in steps_of(parts):
            targets = flow_of([step.statement]).binds & by_name.keys()
            if targets:
                step.writes = by_name[next(iter(targets))]
        initial = {name: describe_value(value) for name, value in runner.values.items()}
        batch_ns = []
        steps: dict[int, Step] = {}
        for number, item in enumerate(items):
            runner.roots = _roots(parts, runner)
            named = {front.inputs[name]: value for name, value in item.items() if name in front.inputs}
            begin = monotonic_ns()
            runner.run_batch(
                parts, named, closely=number == planning, walk=number <= planning or number == len(items) - 1
            )
            batch_ns.append(monotonic_ns() - begin)
            if number < depth:
                parts = _opened(parts, runner, planner, top=number == 0)
            steps.update({step.number: step for step in steps_of(parts)})
            if number == planning:
                parts = closed(parts, runner, questions)
    seen: dict[str, Seen] = {}
    for item in items:
        for name in front.inputs:
            one = describe_value(item[name])
            seen[name] = seen[name].merged(one) if name in seen else one
    return Traced(
        path,
        function,
        front,
        parts,
        outputs,
        runner,
        planner,
        questions,
        seen,
        initial,
        planning + 1,
        list(steps.values()),
        batch_ns,
    )


def _roots(parts: Sequence[Part], runner: Runner) -> list[str]:
    """Return the names of the set-up that a batch uses and does not bind."""
    flows = [runner.flow(step) for step in steps_of(parts)]
    bound = {name for flow in flows for name in flow.binds}
    ready = {name for one in runner.setups for name in one.flow.binds}
    return sorted({name for flow in flows for name in flow.needs if name in ready and name not in bound})


def _opened(parts: Sequence[Part], runner: Runner, planner: Planner, *, top: bool) -> list[Part]:
    """Return the plan with one more level of calls opened."""
    made: list[Part] = []
    for part in parts:
        if isinstance(part, Loop | Call):
            part.body = _opened(part.body, runner, planner, top=top)
            made.append(part)
            continue
        assert isinstance(part, Step), "there are three kinds"
        evidence = runner.evidence[part.number]
        callees = {
            position: site.callee
            for position, site in evidence.sites.items()
            if isinstance(position, int) and site.own and not site.generator and (top or site.num_modules)
        }
        opened = planner.open_step(part, callees) if callees else None
        made += [part] if opened is None else opened
    return made


@contextmanager
def _counted_modules(runner: Runner) -> Iterator[None]:
    """Count the calls of modules; nothing where torch is not loaded by the reference."""
    import sys

    if "torch" not in sys.modules:
        yield
        return
    from torch.nn.modules.module import register_module_forward_pre_hook

    def count(module: Any, arguments: Any) -> None:
        runner.num_modules += 1

    handle = register_module_forward_pre_hook(count)
    try:
        yield
    finally:
        handle.remove()
