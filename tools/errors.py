"""The errors an agent reads: where, what was expected, what came, and what to call next."""

from __future__ import annotations

import difflib
import traceback
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

PACKAGE = Path(__file__).parent
Severity = Literal["error", "warning", "info"]


@dataclass(frozen=True)
class Finding:
    """One thing that is wrong, in one shape for every part of FlashRT.

    Parameters
    ----------
    where
        The place, as the reader would name it: ``graph 'app', node 'vae', port 'latents'``.
    expected, got
        What the rule asks for, and what was found instead.
    fix
        The smallest change that repairs it and the call to make next.
    rule
        Stable short name of the rule that was broken, for example ``unknown-port``.
    nearest
        The nearest valid name, where a name was not recognised.
    """

    where: str
    expected: str
    got: str
    fix: str
    rule: str = "invalid"
    nearest: str | None = None
    severity: Severity = "error"

    @property
    def message(self) -> str:
        """What was expected and what came, with the nearest valid name where there is one."""
        hint = f" (did you mean '{self.nearest}'?)" if self.nearest else ""
        return f"expected {self.expected}, got {self.got}{hint}"

    def __str__(self) -> str:
        return f"{self.where}: {self.message}; {self.fix}"

    def as_dict(self) -> dict[str, Any]:
        """Return the diagnostic record of ``ir_build``: severity, where, message, fix, rule."""
        return {
            "severity": self.severity,
            "where": self.where,
            "message": self.message,
            "fix": self.fix,
            "rule": self.rule,
        }


class FlashrtError(Exception):
    """Base of all errors that FlashRT raises on purpose; carries every finding, not the first."""

    def __init__(self, findings: Finding | Iterable[Finding] | str) -> None:
        if isinstance(findings, str):
            self.findings: tuple[Finding, ...] = ()
            super().__init__(findings)
            return
        self.findings = (findings,) if isinstance(findings, Finding) else tuple(findings)
        super().__init__("\n".join(str(finding) for finding in self.findings))


class InputError(FlashrtError):
    """The caller can fix this: a document, an argument, a path, a system under test."""


class ResourceMissingError(FlashrtError):
    """A resource is missing or held by somebody else; says who holds it and when to retry."""

    def __init__(
        self,
        findings: Finding | Iterable[Finding] | str,
        *,
        holders: Sequence[str] = (),
        retry_after_s: float | None = None,
    ) -> None:
        super().__init__(findings)
        self.holders = tuple(holders)
        self.retry_after_s = retry_after_s


class InternalFaultError(FlashrtError):
    """Our own invariant broke; the text carries an id that the log explains."""


def nearest(name: str, valid: Iterable[str]) -> str | None:
    """Return the valid name closest to `name`, or None when nothing is close."""
    matches = difflib.get_close_matches(name, [str(candidate) for candidate in valid], n=1, cutoff=0.5)
    return matches[0] if matches else None


def listed(names: Iterable[object], limit: int = 12) -> str:
    """Return names in quotes, comma separated, cut at `limit` with the number left out."""
    items = [f"'{name}'" for name in names]
    if not items:
        return "none"
    shown = ", ".join(items[:limit])
    return shown if len(items) <= limit else f"{shown} and {len(items) - limit} more"


def input_error(
    where: str,
    expected: str,
    got: str,
    fix: str,
    *,
    rule: str = "invalid",
    valid: Iterable[str] | None = None,
    name: str | None = None,
) -> InputError:
    """Build an `InputError` with one finding; `valid` and `name` yield the nearest valid name."""
    near = nearest(name if name is not None else got, valid) if valid is not None else None
    return InputError(Finding(where, expected, got, fix, rule=rule, nearest=near))


def is_own_frame(filename: str) -> bool:
    """Return whether a frame of a traceback is FlashRT's own, or of Python's import machinery."""
    return filename.startswith("<frozen ") or Path(filename).is_relative_to(PACKAGE)


def user_traceback(error: BaseException, limit: int = 6) -> str:
    """Return the last `limit` frames of a traceback as text, from where the user's code begins, if it does."""
    trace = error.__traceback__
    while trace is not None and is_own_frame(trace.tb_frame.f_code.co_filename):
        trace = trace.tb_next
    return "".join(traceback.format_exception(type(error), error, trace or error.__traceback__, limit=-limit))
