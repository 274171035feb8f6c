"""The skills as an agent's client finds them on disk and as the server's prompts: one source for both."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path

import yaml

HEAD = re.compile(r"\A---\n(.*?)\n---\n", re.DOTALL)
LINK = re.compile(r"\[[^\]]*\]\((references/[^)]+\.md)\)")


@dataclass(frozen=True)
class Skill:
    """One folder of ``skills``: its front matter, its text, and the references that the text links."""

    name: str
    description: str
    text: str
    references: Mapping[str, str]


def skills_folder() -> Path:
    """Return where the skills lie: in the installed package, or beside the checkout's other folders."""
    try:
        return Path(str(files("flashrt.skills")))
    except ModuleNotFoundError:
        return Path(str(files("flashrt"))).parent / "skills"


def read_skills() -> Iterator[Skill]:
    """Yield every skill that FlashRT ships, by name."""
    for path in sorted(skills_folder().glob("*/SKILL.md")):
        whole = path.read_text(encoding="utf-8")
        head = HEAD.match(whole)
        assert head is not None, f"{path.parent.name}/SKILL.md begins with its front matter"
        front = yaml.safe_load(head.group(1))
        text = whole[head.end() :].strip()
        references = {link: (path.parent / link).read_text(encoding="utf-8") for link in LINK.findall(text)}
        yield Skill(str(front["name"]), str(front["description"]), text, references)
