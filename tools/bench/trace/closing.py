"""Which opened calls and loops stay open: those that show stages of their own. Decided by what ran, not by time."""

from __future__ import annotations

from collections.abc import Sequence

from flashrt.bench.trace.plan import Call, Loop, Part, Step, calls_of, steps_of
from flashrt.bench.trace.questions import Questions
from flashrt.bench.trace.run import Runner

FOLDED = {"range", "list", "tuple", "Tensor", "ndarray", "zip", "enumerate", "dict_items", "dict_values", "str"}
"""Kinds of iterables that can be taken apart beforehand: nothing is computed while they are gone through."""


def modules_in(part: Part, runner: Runner) -> int:
    """Return how many calls of modules were made inside of a part."""
    steps = [part] if isinstance(part, Step) else list(steps_of(part.body))
    return sum(runner.evidence[step.number].num_modules for step in steps)


def is_stage(part: Part, runner: Runner, *, only_modules: bool) -> bool:
    """Return whether a part is work of its own, not plumbing between such.

    Parameters
    ----------
    only_modules
        Inside of an opened call that runs modules: what runs none of them there is plumbing.
    """
    if not isinstance(part, Step):
        return any(is_stage(one, runner, only_modules=only_modules) for one in part.body)
    evidence = runner.evidence[part.number]
    if evidence.num_modules:
        return True
    if only_modules:
        return False
    certain = {index for index, _ in enumerate(calls_of(part.statement))}
    compound = hasattr(part.statement, "body")
    return any(site.own and (compound or position in certain) for position, site in evidence.sites.items())


def closed(parts: Sequence[Part], runner: Runner, questions: Questions, *, only_modules: bool = False) -> list[Part]:
    """Return the plan with calls and loops closed that show nothing more when they are open."""
    return [_closed(part, runner, questions, only_modules) for part in parts]


def _closed(part: Part, runner: Runner, questions: Questions, only_modules: bool) -> Part:
    if isinstance(part, Step):
        return part
    inner_modules = only_modules or (isinstance(part, Call) and modules_in(part, runner) > 0)
    part.body = closed(part.body, runner, questions, only_modules=inner_modules)
    if isinstance(part, Call):
        stages = [one for one in part.body if is_stage(one, runner, only_modules=inner_modules)]
        # A loop over pieces of a value is how a stage works; one that counts refines, and is a repeat.
        loops = [one for one in stages if isinstance(one, Loop) and runner.iterables.get(one.number) == "range"]
        if len(stages) >= 2 or loops:
            return part
        return close(part, runner)
    return part if _folds(part, runner, questions, only_modules) else close(part, runner)


def _folds(loop: Loop, runner: Runner, questions: Questions, only_modules: bool) -> bool:
    counts, kind = runner.counts[loop.number], runner.iterables.get(loop.number, "nothing")
    if not is_stage(loop, runner, only_modules=only_modules):
        return False
    head = runner.evidence[loop.number]
    if kind not in FOLDED or any(site.generator and site.own for site in head.sites.values()):
        questions.ask(
            "loop-over-generator", loop.whole.place,
            f"the loop goes through a {kind} that computes while it is gone through; is it one operation?",
            [
                ("one operation", "as drafted"),
                ("a stream", "make what it goes through an operation that yields chunks, and its body the consumer "
                 "of a streaming edge"),
            ],
        )  # fmt: skip
        return False
    if len(counts) != 1 or counts == {0}:
        questions.ask(
            "loop-count", loop.whole.place,
            f"the loop took {_spelled(sorted(counts))} turns in different batches; a repeat has a fixed number",
            [
                ("one operation", "as drafted: the loop runs inside of one operation"),
                ("fixed", "make the reference take the same number of turns in every batch, and trace it again"),
            ],
        )  # fmt: skip
        return False
    return True


def _spelled(counts: Sequence[int]) -> str:
    return ", ".join(map(str, counts[:6])) + (", …" if len(counts) > 6 else "")


def close(part: Loop | Call, runner: Runner) -> Step:
    """Return an opened call or loop as the one statement that it was, with all that was seen inside of it."""
    whole = part.whole
    total = runner.evidence[whole.number]
    for batch, times in _summed(part, runner).items():
        total.times_ns[batch] = times
    for evidence_number, evidence in [(one.number, runner.evidence[one.number]) for one in steps_of(part.body)]:
        total.num_modules += evidence.num_modules
        total.made.update(evidence.made)
        total.changed |= evidence.changed
        total.aliased |= evidence.aliased
        total.slots |= evidence.slots
        total.read_slots |= evidence.read_slots
        total.read_storages.update(evidence.read_storages)
        total.written_storages |= evidence.written_storages
        for position, site in evidence.sites.items():
            if site.own or site.generator:
                total.sites.setdefault(("inside", evidence_number, position), site)
    if isinstance(part, Call):
        whole.label = part.name
    if isinstance(part, Loop):
        total.made.update(runner.evidence[part.number].made)
    return whole


def _summed(part: Loop | Call, runner: Runner) -> dict[int, list[int]]:
    """Return batch -> the time of each run of a part, of all that is inside of it."""
    inner = [runner.evidence[step.number].times_ns for step in steps_of(part.body)]
    if isinstance(part, Loop):
        first = runner.evidence[part.number].times_ns
        inner.insert(0, first)
    else:
        first = next((runner.evidence[one.number].times_ns for one in part.body if isinstance(one, Step)), {})
    found = {}
    for batch, runs in first.items():
        turns = len(runs)
        found[batch] = [
            sum(sum(times[batch][turn * len(times[batch]) // turns : (turn + 1) * len(times[batch]) // turns])
                for times in inner if batch in times)
            for turn in range(turns)
        ]  # fmt: skip
    return found
