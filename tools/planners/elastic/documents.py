"""The two documents of elastic degrees: the profile of request classes, and the workload that they come in.

Source: ``spec/planners.md``, section 3; ``papers/003`` (DDiT), sections 2, 10 and 17.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field

from flashrt.errors import Finding, InputError
from flashrt.ir import Frozen, read_document, validate

RETRY = "correct the document and call plan_elastic again"
DATA = Path(__file__).parent / "data"
DEFAULT_THRESHOLD = 0.25

Degree = Annotated[int, Field(ge=1, le=64)]
Time = Annotated[float, Field(gt=0, le=1e9)]
Times = Annotated[dict[Degree, Time], Field(min_length=1, max_length=64)]


class ClassKey(Frozen):
    """All that changes the times of a class of requests; another value of any of them is another class."""

    resolution: str
    """Such as ``360p`` or ``1024x1024``."""
    frames: int = Field(ge=1)
    """Frames of the video; 1: an image."""
    steps: int = Field(ge=1, le=10_000)
    """Denoising steps."""
    guidance: bool
    """Whether each step runs with and without the prompt."""
    precision: str
    """Type of weights and activations, such as ``bfloat16``."""
    model: str
    """Name and version of the model."""
    device: str
    """Kind of device that the times are of."""


class ClassTimes(Frozen):
    """What was measured of one class."""

    key: ClassKey
    step_ms: Times
    """Degree -> milliseconds of one denoising step; other degrees are never used."""
    vae_ms: Times
    """Degree -> milliseconds of decoding a request."""
    broadcast_ms: float = Field(ge=0)
    """Milliseconds of handing the latent to the members of a new group."""


class Conservative(Frozen):
    """How a class that was not profiled runs, where it is not refused: at one degree, never promoted."""

    degree: Degree
    steps: int = Field(ge=1, le=10_000)
    step_ms: Time
    """Declared time of a step, for planning alone."""
    vae_ms: Time


class ElasticProfile(Frozen):
    """The request information database: times by class and degree, and what a change of degree costs."""

    schema_: Literal["flashrt/elastic-profile@1"] = Field(default="flashrt/elastic-profile@1", alias="schema")
    name: str
    provenance: Literal["measured", "declared", "inferred"]
    source: str = ""
    """Where the times come from, and which were added."""
    threshold: float = Field(default=DEFAULT_THRESHOLD, gt=0, lt=1)
    """What a doubling must gain of a step's time for B(r) to go on."""
    setup_ms: dict[Degree, Annotated[float, Field(ge=0)]]
    """Degree -> milliseconds until a group of so many devices can begin, its communicators made ahead."""
    classes: dict[str, ClassTimes] = Field(min_length=1, max_length=32)
    """Class name -> its times."""
    conservative: Conservative | None = None
    """For classes that are not here; absent: they are refused."""


class WorkloadClass(Frozen):
    """A share of the requests."""

    share: float = Field(gt=0)
    """Its part of all requests, relative to the other classes'."""
    key: dict[str, Any] = Field(default_factory=dict)
    """What its requests ask for; must agree with the profile's key, as far as it is said."""


class Arrivals(Frozen):
    """When requests come."""

    process: Literal["poisson", "burst", "trace"] = "poisson"
    """``burst``: `burst_size` at once, bursts as a Poisson process; ``trace``: moments from a file."""
    rate: float | None = Field(default=None, gt=0, le=1e6)
    """Mean rate, in `unit`; a trace without one keeps its own times."""
    unit: Literal["nominal", "per_s"] = "nominal"
    """``nominal``: 1 is what a monolithic deployment sustains, every request at its B; ``per_s``: requests a second."""
    burst_size: int = Field(default=1, ge=1, le=100_000)
    """burst: requests that come together."""
    trace: str | None = None
    """trace: a CSV file of moments in the workspace."""


class ElasticWorkload(Frozen):
    """Classes with their shares, and how they come."""

    schema_: Literal["flashrt/elastic-workload@1"] = Field(default="flashrt/elastic-workload@1", alias="schema")
    name: str = "workload"
    classes: dict[str, WorkloadClass] = Field(min_length=1, max_length=32)
    """Class name -> its share."""
    arrivals: Arrivals
    num_requests: int = Field(default=400, ge=1, le=1_000_000)
    """Requests of one repeat."""
    repeats: int = Field(default=5, ge=1, le=1000)
    """How often it is drawn; figures are over all requests of all repeats."""
    seed: int = Field(default=0, ge=0)


def read_elastic_profile(path: Path) -> ElasticProfile:
    """Return a profile document.

    Raises
    ------
    InputError
        With every finding.
    """
    noun = f"elastic profile '{path.name}'"
    found = validate(ElasticProfile, read_document(path, retry=RETRY), noun=noun, retry=RETRY)
    findings = []
    for name, times in found.classes.items():
        for what, by_degree in (("step_ms", times.step_ms), ("vae_ms", times.vae_ms)):
            if 1 not in by_degree:
                findings.append(
                    Finding(f"{noun}, class '{name}', {what}", "a time at degree 1: a request begins on one device "
                            "where no more is free", f"degrees {sorted(by_degree)}", RETRY, rule="no-degree-1")
                )  # fmt: skip
        missing = sorted(set(times.step_ms) - {1} - set(found.setup_ms))
        if missing:
            findings.append(
                Finding(f"{noun}, setup_ms", f"the set-up of every degree that class '{name}' has",
                        f"none for {missing}", f"measure it; {RETRY}", rule="no-setup")
            )  # fmt: skip
    if findings:
        raise InputError(findings)
    return found


def read_elastic_workload(path: Path) -> ElasticWorkload:
    """Return a workload document; as `read_elastic_profile`."""
    noun = f"elastic workload '{path.name}'"
    found = validate(ElasticWorkload, read_document(path, retry=RETRY), noun=noun, retry=RETRY)
    arrivals, findings = found.arrivals, []
    if arrivals.process == "trace" and arrivals.trace is None:
        findings.append(
            Finding(f"{noun}, arrivals", "key 'trace': a CSV file of moments", "none", RETRY, rule="no-trace")
        )
    if arrivals.process != "trace" and arrivals.rate is None:
        findings.append(Finding(f"{noun}, arrivals", "key 'rate'", "none", RETRY, rule="no-rate"))
    if findings:
        raise InputError(findings)
    return found
