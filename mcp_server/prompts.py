"""Prompts: one a skill, with what the user has in mind filled in."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from mcp.server.mcpserver.prompts import Prompt
from mcp.server.mcpserver.prompts.base import PromptArgument

from flashrt.mcp_server.skills import Skill, read_skills

ARGUMENTS: Mapping[str, Mapping[str, str]] = {
    "flashrt": {
        "reference": "The reference system, file.py:function",
        "goal": "What is wanted: a latency, a rate, so many devices",
    },
    "write-program": {"reference": "The reference system, file.py:function"},
    "design-variants": {"program": "The program: an id or a path", "goal": "What should get better"},
    "measure": {"system": "What to measure: a path or an id", "baseline": "What it has to equal, file.py:function"},
    "serve-many": {"goal": "Which requests, how many users, which targets, how many GPUs"},
}


def skill_prompts() -> list[Prompt]:
    """Return the prompts; each puts the skill's text, its references below it, into one message of the user."""
    return [_prompt(skill, ARGUMENTS.get(skill.name, {})) for skill in read_skills()]


def _prompt(skill: Skill, arguments: Mapping[str, str]) -> Prompt:
    return Prompt(
        name=skill.name,
        title=f"FlashRT: {skill.name.replace('-', ' ')}",
        description=skill.description,
        arguments=[PromptArgument(name=name, description=says, required=False) for name, says in arguments.items()],
        fn=_renderer(skill, arguments),
        context_kwarg=None,
    )


def _renderer(skill: Skill, arguments: Mapping[str, str]) -> Callable[..., str]:
    def render(**given: str) -> str:
        wanted = [f"- {name}: {given[name]}" for name in arguments if given.get(name)]
        parts = ["Use the FlashRT tools and follow this skill.", *wanted, skill.text]
        parts += [f"# {link}\n\n{text.strip()}" for link, text in skill.references.items()]
        return "\n\n".join(parts)

    return render
