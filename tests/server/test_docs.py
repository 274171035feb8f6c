"""The page on documents: its examples are valid, and its tables have every key."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

from flashrt.analysis.deployment import Deployment, read_deployment
from flashrt.analysis.profile import Profile, Transfer
from flashrt.bench.systems import resolve_system
from flashrt.ir import Frozen
from flashrt.ir.building import build_file
from flashrt.ir.documents import validate
from flashrt.ir.model import Edge, Graph, Initial, Node, Port, Program, Repeat, StateDeclaration
from flashrt.mcp_server.table import TABLE

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "docs" / "documents.md").read_text()
EXAMPLES = [yaml.safe_load(block) for block in re.findall(r"```yaml\n(.*?)```", TEXT, re.DOTALL)]
WORLD = ROOT / "apps" / "worldplay"


def section(name: str) -> str:
    return TEXT.partition(f"\n## {name}\n")[2].partition("\n## ")[0]


@pytest.mark.parametrize(("model", "index"), [(Program, 0), (Profile, 1), (Deployment, 2)])
def test_the_examples_are_valid(model: type[Frozen], index: int) -> None:
    assert len(EXAMPLES) == 3
    validate(model, EXAMPLES[index], noun="example", retry="correct it")


@pytest.mark.parametrize(
    ("name", "models"),
    [
        ("Program", (Program, StateDeclaration, Graph, Repeat, Node, Port, Initial, Edge)),
        ("Profile", (Profile, Transfer)),
        ("Deployment", (Deployment,)),
    ],
)
def test_the_tables_have_every_key(name: str, models: tuple[type[Frozen], ...]) -> None:
    text = section(name)
    rows = "\n".join(line for line in text.splitlines() if line.startswith("|")) + text.partition("**`initial`**")[2]
    for model in models:
        for field, info in model.model_fields.items():
            assert re.search(rf"\b{info.alias or field}\b", rows), f"{model.__name__}.{info.alias or field}"


@pytest.mark.parametrize(("name", "num_devices"), [("split", 2), ("together", 1)])
def test_the_ready_deployments_of_worldplay_find_their_program(name: str, num_devices: int) -> None:
    path = WORLD / "deployments" / f"{name}.yaml"
    system = resolve_system(str(path), WORLD, "argument 'system'")
    assert system.program == WORLD / "program.yaml"
    assert read_deployment(path, build_file(WORLD / "program.yaml")).num_devices == num_devices


def test_the_readme_names_every_tool_and_links_the_page() -> None:
    readme = (ROOT / "README.md").read_text()
    assert [tool.name for tool in TABLE if f"`{tool.name}`" not in readme] == []
    assert "docs/documents.md" in readme
