"""What the demonstration of an application tries, and which published figures stand beside it: its ``demo.yaml``."""

from __future__ import annotations

from collections.abc import Mapping
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from flashrt.errors import Finding, FlashrtError, InputError, input_error
from flashrt.ir.documents import read_document

FILE = "demo.yaml"


class DemoFailedError(FlashrtError):
    """A step of the demonstration did not do what it must."""


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Published(_Frozen):
    """Figures of a publication; those that it does not have are absent."""

    latency_ms: float | None = None
    fps: float | None = None


class EmulatedRun(_Frozen):
    """One deployment on emulated devices, with what was published of it."""

    name: str
    gpus: int | None = None
    """Devices of the published deployment; default: those of `groups`."""
    groups: dict[str, list[int]]
    place: dict[str, str]
    whole: bool = True
    """Whether every streaming edge is handed over whole, as in a serial path of stages."""
    asynchronous: list[str] = []
    stagger: dict[str, int] = {}
    order: dict[int, list[str]] = {}
    published: Published = Published()
    runs: bool = True
    """Whether it is run; else the model alone stands beside the paper."""
    note: str = ""
    """What the figures do not show, or why they differ."""

    @property
    def num_devices(self) -> int:
        """Devices that the row is about."""
        return self.gpus or len({number for numbers in self.groups.values() for number in numbers})


class Emulated(_Frozen):
    """Runs on emulated devices."""

    profile: str
    """A profile document of the application, or ``measured``: this machine's times, measured in the demonstration."""
    slower: float = Field(default=1.0, ge=1)
    """By how much longer each operation takes in the run, so that its real work fits into that; figures are divided."""
    rate: Literal["sustained", "within_batch"] = "sustained"
    """What a frame rate is: batches that follow each other, or frames of one batch from its first to its last chunk."""
    frames_after_first: int | None = None
    """``within_batch``: frames of a batch that come after its first chunk."""
    config: dict[str, Any] = {}
    """Options of the runs: sizes whose real work is small, since only the profile's times count."""
    runs: list[EmulatedRun]


class Attempt(_Frozen):
    """A ready deployment that is proved and measured beside the candidates."""

    name: str
    system: str
    hypothesis: str
    legality: str
    bottleneck: str


class DemoPlan(_Frozen):
    """The content of ``demo.yaml``."""

    schema_: Literal["flashrt/demo@1"] = Field(default="flashrt/demo@1", alias="schema")
    batches: int = Field(default=8, ge=8)
    """Batches of an equality check; evidence wants 8."""
    runs: int = Field(default=1, ge=1)
    """Restarts of a benchmark."""
    scenario: Literal["max_rate", "single_stream"] = "max_rate"
    figure: Literal["fps", "first_output_ms", "latency_ms"] = "fps"
    """By which variants are compared with the reference."""
    media_rate: dict[str, float] | None = None
    candidates: list[str] = []
    """Which candidates are measured, as patterns; empty: all that fit this machine."""
    also: list[Attempt] = []
    emulated: Emulated | None = None
    said: list[str] = []
    """What cannot be derived from what was published, and what stands instead."""

    def wants(self, candidate: str) -> bool:
        """Whether a candidate is among those that are measured."""
        return not self.candidates or any(fnmatchcase(candidate, pattern) for pattern in self.candidates)


def read_plan(folder: Path) -> DemoPlan:
    """Return the demonstration of an application; without a ``demo.yaml`` all candidates are tried.

    Raises
    ------
    InputError
        The file is no demonstration; every finding at once.
    """
    path = folder / FILE
    if not path.exists():
        return DemoPlan()
    document: Any = read_document(path)
    if not isinstance(document, dict):
        raise input_error(f"file '{FILE}'", "a mapping", type(document).__name__, "correct the file")
    try:
        return DemoPlan.model_validate(document)
    except ValidationError as error:
        raise InputError(
            Finding(
                f"file '{FILE}', {'.'.join(map(str, one['loc']))}", one["msg"], repr(one.get("input"))[:80],
                "correct the file",
            )
            for one in error.errors()
        ) from error  # fmt: skip


def deployment_of(
    run: EmulatedRun, program: str, profile: str, streaming: list[str], config: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Return the deployment document of a run.

    Parameters
    ----------
    program, profile
        Paths beside the document, or ids.
    streaming
        The program's streaming edges.
    """
    document: dict[str, Any] = {
        "schema": "flashrt/deployment@1", "program": program, "profile": profile, "devices": "emulated",
        "groups": run.groups, "place": run.place,
    }  # fmt: skip
    if run.whole:
        document["blocking"] = streaming
    if config:
        document["config"] = dict(config)
    if run.asynchronous:
        document["asynchronous"] = run.asynchronous
    if run.stagger:
        document["stagger"] = run.stagger
    if run.order:
        document["order"] = run.order
    return document
