"""What the clients' and registries' files say agrees with the package; the skills' examples are documents."""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

import flashrt
from flashrt.ir.documents import validate
from flashrt.ir.model import Program
from flashrt.mcp_server.skills import read_skills
from flashrt.mcp_server.table import TABLE
from flashrt.planners.serving.documents import ServingModel, ServingProfile, Workload

ROOT = Path(__file__).parents[2]
SKILLS = list(read_skills())
START = ["flashrt", "serve"]


def read(path: str) -> Any:
    return json.loads((ROOT / path).read_text(encoding="utf-8"))


def test_every_manifest_has_the_version_of_the_package() -> None:
    server, market = read("server.json"), read(".claude-plugin/marketplace.json")
    versions = [
        server["version"], *(package["version"] for package in server["packages"]),
        read("clients/mcpb/manifest.json")["version"], read(".claude-plugin/plugin.json")["version"],
        market["metadata"]["version"], *(plugin["version"] for plugin in market["plugins"]),
    ]  # fmt: skip
    assert set(versions) == {flashrt.__version__}


def test_every_client_starts_the_same_command() -> None:
    entries = [
        read(".mcp.json")["mcpServers"]["flashrt"],
        read("clients/vscode.json")["servers"]["flashrt"],
        read("clients/cursor.json")["mcpServers"]["flashrt"],
        tomllib.loads((ROOT / "clients/codex.toml").read_text(encoding="utf-8"))["mcp_servers"]["flashrt"],
    ]
    for entry in entries:
        assert [entry["command"], entry["args"][0]] == START
        assert entry["args"][1] == "--workspace"


def test_the_registry_entry_keeps_to_its_schema() -> None:
    server = read("server.json")
    assert re.fullmatch(r"[a-zA-Z0-9.-]+/[a-zA-Z0-9._-]+", server["name"])
    assert 1 <= len(server["description"]) <= 100
    assert [argument["value"] for argument in server["packages"][0]["packageArguments"] if "value" in argument] == [
        "serve"
    ]
    assert server["packages"][0]["transport"] == {"type": "stdio"}


@pytest.mark.parametrize("skill", SKILLS, ids=lambda skill: skill.name)
def test_a_skill_is_short_and_says_when_how_and_until_when(skill: Any) -> None:
    assert "Use when" in skill.description or "Use after" in skill.description
    assert len(skill.description) <= 1024
    assert len(skill.text.splitlines()) < 80
    assert "## You are done when" in skill.text
    assert skill.references
    tools = {tool.name for tool in TABLE}
    named = set(re.findall(r"`([a-z]+_[a-z_]+)(?: \{[^`]*\})?`", skill.text))
    verbs = {name for name in named if name.split("_")[0] in {"ir", "gpu", "bench", "variant", "job", "plan"}}
    assert verbs <= tools, verbs - tools


def test_the_examples_of_the_skills_are_documents() -> None:
    kinds = {
        "flashrt/program@1": Program, "flashrt/model@1": ServingModel, "flashrt/workload@1": Workload,
        "flashrt/serving-profile@1": ServingProfile,
    }  # fmt: skip
    seen = set()
    for skill in SKILLS:
        for text in skill.references.values():
            for block in re.findall(r"```yaml\n(.*?)```", text, re.DOTALL):
                for document in yaml.safe_load_all(block):
                    validate(kinds[document["schema"]], document, noun="example", retry="correct it")
                    seen.add(document["schema"])
    assert seen == kinds.keys()
