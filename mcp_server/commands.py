"""One command for each tool: its options are the tool's own arguments, its answer is a table or JSON.

A command calls the tool of a server in its own process, as ``flashrt call`` does, so both mean the same.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from flashrt.errors import InputError, input_error

EXIT_NO = 1
"""The answer is no: not equal, not valid, findings."""
EXIT_TOOL_ERROR = 5
Schema = Mapping[str, Any]
ID = re.compile(r"(audit|cmp|deploy|eq|job|lease|plan|prog|profile|run|var)(-[0-9a-f]+)+")


@dataclass(frozen=True)
class Command:
    """A command and its tool.

    Parameters
    ----------
    positional
        Arguments of the tool that are written without their names; those with a default may be left out.
    says_no
        Whether the record of a call that worked is a no, which ends with status 1.
    """

    name: str
    tool: str
    help: str
    positional: tuple[str, ...] = ()
    says_no: Callable[[Mapping[str, Any]], bool] = field(default=lambda record: False)
    required: tuple[str, ...] = ()
    """Positional arguments that the tool has another form for, but the command line has not."""


COMMANDS: tuple[Command, ...] = (
    Command("build", "ir_build", "check a program document and give it an id", ("document",), required=("document",)),
    Command("show", "ir_show", "show a program as text, JSON, Mermaid or SVG", ("program",)),
    Command(
        "interpret", "ir_interpret", "run a program as it is meant; with --baseline, prove it equal",
        ("program", "inputs"), lambda record: record.get("equivalent") is False,
    ),
    Command(
        "audit", "ir_audit", "check what a program's document claims: states, streams, order, chance, degrees",
        ("program", "inputs"), lambda record: not record["clean"],
    ),
    Command(
        "trace", "ir_trace", "draft a program from a reference by running it: stages, states, loops, questions",
        ("system", "inputs"),
    ),
    Command(
        "analyze", "analyze", "dependencies, legal candidates, and with a profile and a deployment exact figures",
        ("program", "profile", "deployment"),
    ),
    Command("profile", "profile_measure", "measure every operation: time, memory, hand-overs", ("program", "inputs")),
    Command(
        "check", "equivalence_check", "compare a candidate's outputs with the baseline's, element by element",
        ("baseline", "candidate", "inputs"), lambda record: not record["equivalent"],
    ),
    Command(
        "bench", "bench_run", "measure a system through its own buffers", ("system", "inputs"),
        lambda record: not record["valid"],
    ),
    Command(
        "compare", "bench_compare", "compare finished runs, or let two systems take turns (with --inputs)", ("items",),
        lambda record: record.get("valid") is False,
    ),
    Command("report", "report_write", "write one HTML page of all that the workspace has"),
)  # fmt: skip
VARIANTS: tuple[Command, ...] = (
    Command("list", "variant_list", "all variants, and whether the search may stop"),
    Command("add", "variant_add", "queue a variant", ("hypothesis",)),
    Command("next", "variant_next", "claim the highest-ranked pending variant, or one by its id", ("variant",)),
    Command("update", "variant_update", "decide a variant: measured, or removed for a reason", ("variant", "state")),
)
JOBS: tuple[Command, ...] = (
    Command(
        "wait", "job_wait", "wait for a job and show how it ended", ("job",),
        lambda record: record.get("state") in {"failed", "lost", "cancelled"},
    ),
    Command("cancel", "job_cancel", "end a job and all that it started", ("job",)),
)  # fmt: skip
GPU: tuple[Command, ...] = (
    Command("acquire", "gpu_acquire", "lease devices, all or none", ("count", "holder")),
    Command("renew", "gpu_renew", "let a lease last longer", ("lease", "ttl_s")),
    Command("release", "gpu_release", "give a lease back", ("lease",)),
)


def arguments_of(tool: str) -> dict[str, tuple[Schema, bool]]:
    """Return a tool's arguments: name -> (its JSON schema, whether it is needed), in the tool's order."""
    schema = _schema(tool)
    required = set(schema.get("required", ()))
    return {name: (one, name in required) for name, one in schema.get("properties", {}).items()}


@cache
def _schema(tool: str) -> Schema:
    import inspect

    from pydantic import create_model

    from flashrt.mcp_server.tools import Tools

    parameters = inspect.signature(getattr(Tools, tool), eval_str=True).parameters
    fields: dict[str, Any] = {
        name: (one.annotation, ... if one.default is inspect.Parameter.empty else one.default)
        for name, one in parameters.items()
        if name != "self"
    }
    made = create_model(tool, **fields)
    return dict(made.model_json_schema())


def add_command(commands: Any, command: Command, *, filled: bool) -> argparse.ArgumentParser:
    """Add a command; where it is `filled`, with the tool's arguments as options."""
    parser: argparse.ArgumentParser = commands.add_parser(command.name, help=command.help, description=command.help)
    parser.set_defaults(tool_command=command)
    if filled:
        found = arguments_of(command.tool)
        if command.tool == "bench_compare":
            parser.add_argument(
                "items", nargs="+", metavar="RUN|SYSTEM", help="run ids, or two systems; baseline first"
            )
            found = {name: one for name, one in found.items() if name not in {"runs", "systems"}}
        for name in command.positional:
            if name in found:
                schema, required = found[name]
                _add_positional(parser, name, schema, required or name in command.required)
        for name, (schema, required) in found.items():
            if name not in command.positional:
                _add_option(parser, name, schema, required)
        parser.add_argument("--json", action="store_true", default=argparse.SUPPRESS, help="print the answer as JSON")
        parser.add_argument("--get", metavar="KEY", help="print this part of the answer alone, such as front.0.id")
    return parser


def _add_positional(parser: argparse.ArgumentParser, name: str, schema: Schema, required: bool) -> None:
    choices = _choices(schema)
    parser.add_argument(
        name, metavar=name.upper().replace("_", "-"), nargs=None if required else "?", choices=choices,
        help=_help(schema, choices, named=False),
    )  # fmt: skip


def _add_option(parser: argparse.ArgumentParser, name: str, schema: Schema, required: bool) -> None:
    flag = "--" + name.replace("_", "-")
    if _types(schema) == {"boolean"}:
        parser.add_argument(
            flag, action="store_true", default=argparse.SUPPRESS, help=_help(schema, None, named=False), dest=name
        )
        return
    choices = _choices(schema)
    parser.add_argument(
        flag, dest=name, required=required, choices=choices, metavar=None if choices else _metavar(schema),
        help=_help(schema, choices),
    )  # fmt: skip


def _options(schema: Schema) -> list[Schema]:
    return [one for one in schema.get("anyOf", [schema]) if one.get("type") != "null"]


def _types(schema: Schema) -> set[str]:
    return {str(one.get("type", "string")) for one in _options(schema)}


def _choices(schema: Schema) -> list[str] | None:
    found = [one["enum"] for one in _options(schema) if "enum" in one]
    found += [[one["const"]] for one in _options(schema) if "const" in one]
    return list(found[0]) if len(found) == 1 and len(_options(schema)) == 1 else None


def _metavar(schema: Schema) -> str:
    words = {"object": "JSON", "array": "A,B", "integer": "N", "number": "X", "string": "TEXT"}
    return "|".join(dict.fromkeys(words[kind] for kind in ("integer", "number", "string", "array", "object")
                                  if kind in _types(schema)))  # fmt: skip


def _help(schema: Schema, choices: list[str] | None, *, named: bool = True) -> str:
    default = schema.get("default")
    parts = [str(schema.get("description", ""))]
    if named and choices:
        parts.append(f"one of {', '.join(map(str, choices))}")
    if default not in (None, False, ""):
        parts.append(f"(default: {default})")
    return " ".join(part for part in parts if part).replace("%", "%%")


def read_value(name: str, text: str, schema: Schema) -> Any:
    """Return what is written on the command line as the tool's argument wants it.

    Lists are written ``a,b`` or as JSON, ``none`` is an empty one; objects are JSON.

    Raises
    ------
    InputError
        It is none of the argument's types.
    """
    types = _types(schema)
    for kind in ("integer", "number"):
        if kind in types:
            try:
                return int(text) if kind == "integer" else float(text)
            except ValueError:
                pass
    wanted = [one for one in _options(schema) if one.get("type") == "array"]
    if types & {"object", "array"} and text[:1] in {"{", "["}:
        try:
            return json.loads(text)
        except ValueError as error:
            raise _refusal(name, "JSON", f"{text} ({error})") from None
    if wanted and (types == {"array"} or "," in text):
        if text == "none":
            return []
        return [read_value(name, one.strip(), wanted[0].get("items", {})) for one in text.split(",")]
    if "string" in types:
        return text
    words = {"integer": "a whole number", "number": "a number", "object": "a JSON object, such as '{\"name\": 1}'",
             "array": "values with commas between them"}  # fmt: skip
    raise _refusal(name, " or ".join(words[kind] for kind in sorted(types) if kind in words), text)


def _refusal(name: str, expected: str, got: str) -> Exception:
    return input_error(f"option --{name.replace('_', '-')}", expected, f"'{got}'", "correct it and call again",
                       rule="bad-option")  # fmt: skip


def given_arguments(command: Command, options: argparse.Namespace) -> dict[str, Any]:
    """Return the tool's arguments that were given."""
    found = {}
    for name, (schema, _) in arguments_of(command.tool).items():
        value = getattr(options, name, None)
        if value is not None:
            found[name] = value if isinstance(value, bool) else read_value(name, value, schema)
    if command.tool == "bench_compare":
        runs = all(one.startswith("run-") for one in options.items)
        found["runs" if runs else "systems"] = options.items
    return found


def run_tool_command(options: argparse.Namespace) -> int:
    """Call the command's tool and show its answer; return the exit status: 0, 1 for a no, or 5 for a tool's error."""
    from flashrt.mcp_server.calling import call_tool
    from flashrt.mcp_server.rendering import show

    command: Command = options.tool_command
    given = given_arguments(command, options)
    answer = call_tool(command.tool, given, options.workspace, f"flashrt {options.command}")
    record = dict(answer.record)
    if getattr(options, "json", False) and options.get is None:
        print(json.dumps(record, indent=2))
    if not answer.ok:
        print(answer.text, file=sys.stderr)
        return EXIT_TOOL_ERROR
    if options.get is not None:
        print_part(record, options.get)
    elif not getattr(options, "json", False):
        show(command.tool, record, options.workspace, given)
    sys.stdout.flush()
    return EXIT_NO if command.says_no(record) else 0


def print_part(record: Mapping[str, Any], path: str) -> None:
    """Print a part of an answer; say on standard error why the answer is not valid, where it says that it is not.

    Raises
    ------
    InputError
        There is no such part; the ids that the answer has are said first, since the work is done and kept.
    """
    if record.get("valid") is False:
        print(
            f"not valid: {'; '.join(map(str, record.get('reasons') or ['the answer gives no reason']))}",
            file=sys.stderr,
        )
    try:
        print(part_of(record, path))
    except InputError:
        kept = [f"{name}: {value}" for name, value in record.items() if is_id(value)]
        if kept:
            print(f"the call is done; {', '.join(kept)}", file=sys.stderr)
        raise


def is_id(value: Any) -> bool:
    """Return whether a value is an id of what a call made, such as ``run-1f3a``."""
    return isinstance(value, str) and ID.fullmatch(value) is not None


def part_of(record: Any, path: str) -> str:
    """Return the part of an answer at a dotted path: text as it is, anything else as JSON.

    Raises
    ------
    InputError
        There is none; the names that there are at that place are said.
    """
    from flashrt.errors import listed

    for step in path.split("."):
        names = [str(name) for name in (record if isinstance(record, Mapping) else range(len(record))
                                        if isinstance(record, list) else ())]  # fmt: skip
        if step not in names:
            raise input_error(f"option --get '{path}'", f"one of {listed(names, 30)}", f"'{step}'",
                              "name one of them; --json shows the whole answer", rule="no-such-part", valid=names,
                              name=step)  # fmt: skip
        record = record[int(step)] if isinstance(record, list) else record[step]
    return record if isinstance(record, str) else json.dumps(record)
