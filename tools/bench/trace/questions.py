"""Questions: what a trace could not see, each with its place, the choices, and the change that each means."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Question:
    """One thing that only the author knows.

    Attributes
    ----------
    kind
        Stable short name, for example ``state-or-cache``.
    source
        Where in the reference: ``reference.py:12``.
    where
        Place in the draft: ``states.x``, ``graphs.app.nodes.y``, or the document.
    choices
        (answer, the change of the draft that it means); the first is what was drafted.
    """

    kind: str
    source: str
    text: str
    choices: tuple[tuple[str, str], ...]
    where: str = "document"

    def as_dict(self) -> dict[str, Any]:
        """Return a JSON-ready record."""
        return {
            "kind": self.kind,
            "where": self.where,
            "source": self.source,
            "question": self.text,
            "choices": [{"answer": answer, "change": change} for answer, change in self.choices],
            "drafted": self.choices[0][0],
        }


class Questions:
    """Gathers questions, each once."""

    def __init__(self) -> None:
        self.found: list[Question] = []

    def ask(
        self, kind: str, source: str, text: str, choices: Sequence[tuple[str, str]], where: str = "document"
    ) -> None:
        """Add a question."""
        question = Question(kind, source, text, tuple(choices), where)
        if question not in self.found:
            self.found.append(question)

    def at(self, where: str) -> list[Question]:
        """Return the questions about one place of the draft."""
        return [one for one in self.found if one.where == where]
