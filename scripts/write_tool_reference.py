"""Write ``docs/tools.md`` from the tools' own schemas; with ``--check``, only say whether it is fresh.

python scripts/write_tool_reference.py [--check]
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import anyio

from flashrt.mcp_server.server import FlashrtServer
from flashrt.mcp_server.table import TABLE
from flashrt.mcp_server.workspace import Workspace

PAGE = Path(__file__).parents[1] / "docs" / "tools.md"
HEAD = """# The tools

Made from the server's own schemas by `scripts/write_tool_reference.py`; `flashrt call TOOL --describe` prints one at
the command line. A *job* tool answers with a job id, or with the result where that takes less than about two seconds.
Every result has `ok`; every refusal has `error` and `diagnostics`: where, expected, got, the nearest valid name, the
next call.
"""


def type_of(schema: Mapping[str, Any]) -> str:
    """Return a JSON schema's type in words."""
    if "enum" in schema:
        return " or ".join(f"`{value}`" for value in schema["enum"])
    if "const" in schema:
        return f"`{schema['const']}`"
    if "anyOf" in schema:
        return " or ".join(dict.fromkeys(type_of(one) for one in schema["anyOf"] if one.get("type") != "null"))
    kind = str(schema.get("type", "any"))
    return f"array of {type_of(schema['items'])}" if kind == "array" and schema.get("items") else kind


def section(tool: Any, *, job: bool) -> str:
    """Return one tool's part of the page."""
    lines = [f"## `{tool.name}`", "", str(tool.description), ""]
    properties = tool.input_schema.get("properties", {})
    if properties:
        lines += ["| argument | type | default | meaning |", "| --- | --- | --- | --- |"]
        required = set(tool.input_schema.get("required", ()))
        for name, schema in properties.items():
            default = (
                "**needed**"
                if name in required
                else f"`{schema['default']}`"
                if schema.get("default") is not None
                else ""
            )
            meaning = str(schema.get("description", "")).replace("|", "\\|")
            lines.append(f"| `{name}` | {type_of(schema)} | {default} | {meaning} |")
        lines.append("")
    fields = [name for name in tool.output_schema["properties"] if name != "ok"]
    lines.append(f"Returns {'(job) ' if job else ''}{', '.join(f'`{name}`' for name in fields)}.")
    return "\n".join(lines)


async def page() -> str:
    """Return the whole page."""
    with tempfile.TemporaryDirectory() as folder:
        tools = {tool.name: tool for tool in await FlashrtServer(Workspace(Path(folder))).list_tools()}
    return "\n\n".join([HEAD.strip(), *(section(tools[row.name], job=row.job) for row in TABLE)]) + "\n"


def main() -> int:
    """Write the page, or compare it."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--check", action="store_true")
    text = anyio.run(page)
    if parser.parse_args().check:
        fresh = PAGE.exists() and PAGE.read_text(encoding="utf-8") == text
        if not fresh:
            print(f"{PAGE} is not what the schemas say: run python {sys.argv[0]}")
        return 0 if fresh else 1
    PAGE.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
