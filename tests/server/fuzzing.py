"""Generated tool calls: arguments from the tools' own schemas, references that are nearly right, mutated documents."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from hypothesis import strategies as st

ROOT = Path(__file__).parents[2]
SERVING = ROOT / "tools" / "planners" / "serving" / "examples" / "qwen-vl-like"
ELASTIC = ROOT / "tools" / "planners" / "elastic" / "data"
# Documents of the workspace that mutants are made of, by the arguments that name such documents.
DOCUMENTS = {
    "document": "program.yaml",
    "program": "program.yaml",
    "deployment": "split.yaml",
    "profile": "profile.yaml",
    "model": "serving/model.yaml",
    "workload": "serving/half-images.yaml",
}
OTHER_DOCUMENTS = ("together.yaml", "serving/profile.yaml", "elastic/tiny.yaml", "elastic/workload-tiny.yaml")
GOOD = {
    "inputs": ("inputs.py:batches",),
    "baseline": ("reference.py:serve", "program.yaml"),
    "candidate": ("variants.py:same", "split.yaml"),
    "system": ("reference.py:serve", "split.yaml"),
    "systems": ("reference.py:serve", "variants.py:same"),
    "trace": ("moments.csv",),
    "devices": ("cpu-0", "cuda:0"),
    "policy": ("elastic", "ddit", "static_2"),
}
HOSTILE = (
    "", " ", ".", "..", "/", "~", "-", "--help", "a" * 5000, "../outside.yaml", "../outside.py:serve", "/etc/passwd",
    "/etc/passwd:serve", "/dev/zero", "/dev/stdin", "/proc/self/mem", "/proc/self/environ", "link.yaml", "loop.yaml",
    "folder.yaml", "pipe.yaml", "pipe.py:serve", "empty.yaml", "binary.yaml", "deep.yaml", "deep.json", "bomb.yaml",
    "no-such.yaml", "no-such.py:serve", "reference.py", "reference.py:", ":serve", "reference.py:no_such",
    "program.yaml/..", "./program.yaml", "sub/../program.yaml", ".flashrt/flashrt.db",
    "program.yaml\x00", "prog-", "prog-000000000000", "run-00000000", "job-00000000", "job-../..", "var-9999",
    "lease-1",
    "shipped:public", "shipped:../../x", "reference.py:serve:serve",
    "\u202eodd", "ünï.yaml", "日本語", "%s%n{0}", "'; DROP TABLE jobs; --", "\n\r\t",
    "http://127.0.0.1/x.yaml", "cpu-99999999999", "cuda:-1", "null", "nan", "1e999", "*", "[", "prog-*", "program.*",
)  # fmt: skip
NUMBERS = (0, -1, 1, 2, 3, 0.5, -0.0, 1e-300, 1e308, 2**31, 2**63, 2**64, -(2**63), 10**400)


def _nested(levels: int) -> Any:
    value: Any = 0
    for _ in range(levels):
        value = {"a": [value]}
    return value


JSON = st.recursive(
    st.one_of(st.none(), st.booleans(), st.sampled_from(NUMBERS), st.sampled_from(HOSTILE), st.text(max_size=8)),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3), st.dictionaries(st.sampled_from((*HOSTILE[:3], "graphs", "a")), inner, max_size=3)
    ),
    max_leaves=5,
)
ODD = st.one_of(JSON, st.just(_nested(40)), st.just(list(range(3000))))


def lay_out(workspace: Path, outside: Path) -> None:
    """Put into a workspace what the generated calls name: documents, and files that are no such thing."""
    import os

    for folder, source in (("serving", SERVING), ("elastic", ELASTIC)):
        (workspace / folder).mkdir()
        for path in source.glob("*.yaml"):
            (workspace / folder / path.name).write_bytes(path.read_bytes())
    (workspace / "mutants").mkdir()
    (workspace / "moments.csv").write_text("timestamp\n0.0\n0.1\n0.3\n")
    outside.write_text("secret: of-the-neighbour\n")
    (workspace / "link.yaml").symlink_to(outside)
    (workspace / "loop.yaml").symlink_to("loop.yaml")
    (workspace / "folder.yaml").mkdir()
    os.mkfifo(workspace / "pipe.yaml")
    os.mkfifo(workspace / "pipe.py")
    (workspace / "empty.yaml").write_text("")
    (workspace / "binary.yaml").write_bytes(bytes(range(256)) * 20)
    (workspace / "deep.yaml").write_text("[" * 3000 + "]" * 3000)
    (workspace / "deep.json").write_text('{"a":' * 20_000 + "1" + "}" * 20_000)
    lines = ["a: &a [x, x, x, x, x, x, x, x, x]"]
    lines += [f"{chr(98 + i)}: &{chr(98 + i)} [{', '.join(['*' + chr(97 + i)] * 9)}]" for i in range(9)]
    (workspace / "bomb.yaml").write_text("\n".join(lines))


def read_base(name: str, workspace: Path) -> Any:
    """Return a document that mutants are made of."""
    return yaml.safe_load((workspace / name).read_text())


def _places(value: Any, found: list[tuple[Any, Any]] | None = None) -> list[tuple[Any, Any]]:
    """Return (container, key) of everything in a document."""
    found = [] if found is None else found
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        found.append((value, key))
        _places(inner, found)
    return found


@st.composite
def mutants(draw: st.DrawFn, base: Any) -> Any:
    """Return the document with one to three things deleted, doubled, renamed, retyped or replaced."""
    document = copy.deepcopy(base)
    for _ in range(draw(st.integers(1, 3))):
        places = _places(document)
        if not places:
            return document
        container, key = draw(st.sampled_from(places))
        how = draw(st.sampled_from(("delete", "double", "rename", "retype", "replace", "nest", "swap")))
        value = container[key]
        if how == "delete":
            del container[key]
        elif how == "double" and isinstance(container, list):
            container.append(copy.deepcopy(value))
        elif how in ("double", "rename") and isinstance(container, dict):
            container[draw(st.sampled_from(HOSTILE))] = copy.deepcopy(value)
            if how == "rename":
                del container[key]
        elif how == "retype":
            container[key] = draw(st.sampled_from((str(value)[:200], [value], {"x": value}, None, True, 0)))
        elif how == "nest":
            container[key] = _nested(draw(st.sampled_from((3, 60))))
        elif how == "swap":
            other, place = draw(st.sampled_from(places))
            container[key] = copy.deepcopy(other[place])
        else:
            container[key] = copy.deepcopy(draw(ODD))
    return document


def schema_values(schema: Mapping[str, Any]) -> st.SearchStrategy[Any]:
    """Return a strategy for values of a JSON schema, as far as the tools' schemas go; numbers often lie at bounds."""
    if "anyOf" in schema:
        return st.one_of([schema_values(one) for one in schema["anyOf"]])
    if "enum" in schema:
        return st.sampled_from(schema["enum"])
    if "const" in schema:
        return st.just(schema["const"])
    kind = schema.get("type")
    if kind == "boolean":
        return st.booleans()
    if kind == "null":
        return st.none()
    if kind in ("integer", "number"):
        low = schema.get("minimum", schema.get("exclusiveMinimum", -(2**31)))
        high = schema.get("maximum", schema.get("exclusiveMaximum", 2**31))
        edges = st.sampled_from((low, high, low + 1, high - 1))
        inner = st.integers(int(low), int(high)) if kind == "integer" else st.floats(low, high, allow_nan=False)
        return st.one_of(edges, st.integers(int(max(low, 0)), int(min(max(low, 0) + 4, high))), inner)
    if kind == "string":
        return st.one_of(st.sampled_from(HOSTILE), st.text(max_size=min(schema.get("maxLength", 40), 40)))
    if kind == "array":
        least = schema.get("minItems", 0)
        return st.lists(
            schema_values(schema.get("items", {})), min_size=least, max_size=min(schema.get("maxItems", 4), 4)
        )
    if kind == "object":
        return st.dictionaries(st.sampled_from((*HOSTILE[:6], "frames", "dit")), JSON, max_size=3)
    return JSON


@dataclass(frozen=True)
class Call:
    """A generated request.

    Parameters
    ----------
    mutant
        A document that has to be written to a file first, which the arguments name as `MUTANT`.
    """

    method: str
    params: dict[str, Any]
    mutant: Any = None

    @property
    def name(self) -> str:
        """The tool's name, or the method's."""
        return str(self.params["name"]) if self.method == "tools/call" else self.method


REFERENCES = (
    {"type": "ref/prompt", "name": "design-variants"},
    {"type": "ref/prompt", "name": "no-such"},
    {"type": "ref/resource", "uri": "program://{id}"},
    {"type": "ref/resource", "uri": "x://{id}"},
)
MUTANT = "\x01mutant"
"""Stands for the name of the file that a call's mutant is written to."""
ID = "\x01id:"
"""Begins what stands for an id that an earlier call returned."""
WAITS = {"wait_s"}


class CallMaker:
    """Makes calls for the tools of one server.

    Parameters
    ----------
    tools
        What ``tools/list`` returned.
    jobs
        Names of those that start jobs, which cost seconds: few of their calls are left without a mistake.
    """

    def __init__(self, tools: Sequence[Mapping[str, Any]], jobs: set[str], workspace: Path) -> None:
        self.tools = {str(tool["name"]): tool["inputSchema"] for tool in tools}
        self.jobs = jobs
        self.bases = {name: read_base(name, workspace) for name in {*DOCUMENTS.values(), *OTHER_DOCUMENTS}}
        self.mutants = {name: mutants(base) for name, base in self.bases.items()}
        self.values = {
            (tool, name): schema_values(part)
            for tool, schema in self.tools.items()
            for name, part in schema["properties"].items()
        }

    @st.composite
    @staticmethod
    def calls(draw: st.DrawFn, self: CallMaker) -> Call:
        """Return one call."""
        kind = draw(st.integers(0, 19))
        if kind == 7:
            scheme = draw(st.sampled_from(("program://", "run://", "variant://", "job://", "file://", "x:")))
            return Call("resources/read", {"uri": scheme + draw(st.sampled_from(HOSTILE))})
        if kind == 11:
            name = draw(st.sampled_from(("program", "id", "goal", "")))
            argument = {"name": name, "value": draw(st.sampled_from(HOSTILE))}
            return Call("completion/complete", {"ref": draw(st.sampled_from(REFERENCES)), "argument": argument})
        if kind == 13:
            given = draw(st.dictionaries(st.sampled_from(("reference", "goal", "x")), st.text(max_size=20), max_size=2))
            name = draw(st.sampled_from(("flashrt", "measure", "", "../x")))
            return Call("prompts/get", {"name": name, "arguments": given})
        tool = draw(st.sampled_from(sorted(self.tools)))
        return self._tool_call(draw, tool)

    def _tool_call(self, draw: st.DrawFn, tool: str) -> Call:
        schema = self.tools[tool]
        required = set(schema.get("required", []))
        mutant: list[Any] = []
        arguments: dict[str, Any] = {}
        for name in schema["properties"]:
            chance = draw(st.integers(0, 99))
            if chance < (96 if name in required else 12):
                arguments[name] = self._value(draw, tool, name, mutant)
        if tool in self.jobs and draw(st.integers(0, 39)) not in (23, 29, 31):
            # A mistake somewhere that is found before a job starts.
            name = draw(st.sampled_from(sorted(required or {"runs", "systems"})))
            arguments[name] = draw(ODD if draw(st.integers(0, 9)) == 4 else st.sampled_from(HOSTILE))
        if draw(st.integers(0, 29)) == 13:
            arguments[draw(st.sampled_from(HOSTILE))] = draw(JSON)
        for name in WAITS & arguments.keys():
            if isinstance(arguments[name], int | float) and 0 < arguments[name] <= 25:
                arguments[name] = 0.05
        return Call("tools/call", {"name": tool, "arguments": arguments}, mutant[0] if mutant else None)

    def _value(self, draw: st.DrawFn, tool: str, name: str, mutant: list[Any]) -> Any:
        chance = draw(st.integers(0, 99))
        # Hypothesis draws bounds more often than what lies between: that is for what is nearly right.
        if 44 < chance < 50:
            return draw(ODD)
        if name == "program" and self.tools[tool]["properties"][name] != self.tools["ir_show"]["properties"]["program"]:
            # An inline program.
            return draw(self.mutants["program.yaml"]) if chance < 90 else self.bases["program.yaml"]
        if name in DOCUMENTS and chance < 45 and not mutant:
            document = DOCUMENTS[name]
            if tool == "plan_serving" and name == "profile":
                document = "serving/profile.yaml"
            if tool == "plan_elastic":
                document = "elastic/tiny.yaml" if name == "profile" else "elastic/workload-tiny.yaml"
            mutant.append(draw(self.mutants[document]))
            return MUTANT
        if name in {"program", "job", "variant", "lease", "run", "equivalence", "parent", "devices"} and chance < 60:
            return ID + name
        if name in DOCUMENTS and chance < 80:
            return draw(st.sampled_from((DOCUMENTS[name], *OTHER_DOCUMENTS)))
        if name in GOOD and chance < 75:
            return list(GOOD[name]) if name == "systems" else draw(st.sampled_from(GOOD[name]))
        return draw(self.values[tool, name])
