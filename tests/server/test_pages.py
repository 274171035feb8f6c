"""The pages: links lead somewhere, the tool reference is fresh, and the rules that they name exist."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = sorted(
    path for pattern in ("*.md", "docs/**/*.md", "apps/**/*.md", "skills/**/*.md") for path in ROOT.glob(pattern)
)
LINK = re.compile(r"\]\(([^)\s]+)\)")


def anchors(path: Path) -> set[str]:
    """Return the anchors of a page's headings, as Markdown renderers make them."""
    headings = re.findall(r"^#+ +(.*)$", path.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    for link in LINK.findall(text):
        if re.match(r"[a-z]+://", link):
            continue
        name, _, anchor = link.partition("#")
        target = (page.parent / name).resolve() if name else page
        assert target.exists(), link
        assert target.is_relative_to(ROOT)
        assert not anchor or anchor in anchors(target), link


def test_the_tool_reference_is_what_the_schemas_say() -> None:
    command = [sys.executable, str(ROOT / "scripts" / "write_tool_reference.py"), "--check"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_rules_that_troubleshooting_names_exist() -> None:
    text = (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
    first = [row.split("|")[1] for row in text.splitlines() if row.startswith("| ")]
    named = {rule for cell in first for rule in re.findall(r"`([a-z]+(?:-[a-z]+)*)`", cell)} - {"rule"}
    sources = "".join(
        path.read_text(encoding="utf-8") for folder in ("tools", "mcp_server") for path in (ROOT / folder).rglob("*.py")
    )
    absent = {rule for rule in named if f'"{rule}"' not in sources and '"undeclared-{' not in sources}
    assert len(named) > 20
    assert {rule for rule in absent if not rule.startswith("undeclared-")} == set()
