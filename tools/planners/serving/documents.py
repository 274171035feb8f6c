"""The three documents of a serving plan: the model's components, the workload's request types, the measured profile.

Source: ``spec/planners.md``, section 2; ``papers/002`` (Cornfigurator), sections 3 and 4.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from flashrt.ir import Frozen, read_document, validate

RETRY = "correct the document and call plan_serving again"
HASH_DIGITS = 16


class Edge(Frozen):
    """Data that flows from one component to another."""

    source: str = Field(alias="from")
    """The component that makes it."""
    target: str = Field(alias="to")
    """The component that needs it."""
    colocatable: bool = False
    """One executor may run both components."""


class ServingModel(Frozen):
    """A model as components and the data between them."""

    schema_: Literal["flashrt/model@1"] = Field(default="flashrt/model@1", alias="schema")
    name: str
    components: tuple[str, ...] = Field(min_length=1, max_length=16)
    """Names of the parts that an executor can run."""
    edges: tuple[Edge, ...] = ()
    """Dataflow between components; without a cycle."""

    @property
    def digest(self) -> str:
        """Hash of all that the times of a profile depend on: components and edges."""
        parts = [sorted(self.components), sorted((edge.source, edge.target, edge.colocatable) for edge in self.edges)]
        return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:HASH_DIGITS]


class RequestType(Frozen):
    """A kind of request: which components it passes, how often it comes, how fast it must be."""

    components: tuple[str, ...] = Field(min_length=1)
    """The components that work on it; between them the model's edges hold."""
    fraction: float = Field(gt=0, le=1)
    """Share of all requests."""
    target_ms: float | None = Field(default=None, gt=0)
    """Latency that counts as good; absent: found from the profile."""
    weight: float = Field(default=1.0, ge=0)
    """What one good request of this type is worth to the policy ``weighted``."""
    characteristics: dict[str, Any] = Field(default_factory=dict)
    """What its times depend on: lengths, resolutions. A profile of other characteristics is refused."""


class Arrivals(Frozen):
    """How requests come over time."""

    process: Literal["poisson", "gamma", "trace"] = "poisson"
    """``trace``: moments from a file, scaled to the rate that is asked."""
    cv: float = Field(default=1.0, gt=0, le=20)
    """gamma: coefficient of variation of the times between arrivals; 1 is Poisson."""
    trace: str | None = None
    """trace: a CSV file of moments, beside the document."""


class Workload(Frozen):
    """Request types with their shares, and how they arrive."""

    schema_: Literal["flashrt/workload@1"] = Field(default="flashrt/workload@1", alias="schema")
    name: str = "workload"
    types: dict[str, RequestType] = Field(min_length=1, max_length=32)
    """Type name -> request type."""
    arrivals: Arrivals = Arrivals()


def _spell_latency(value: Any) -> Any:
    """Let a number stand for one sample."""
    if not isinstance(value, Mapping):
        return value
    return {
        batch: {name: [one] if isinstance(one, int | float) else one for name, one in by_type.items()}
        if isinstance(by_type, Mapping) else by_type
        for batch, by_type in value.items()
    }  # fmt: skip


Samples = Annotated[tuple[Annotated[float, Field(gt=0, le=1e9)], ...], Field(min_length=1, max_length=10_000)]
Batch = Annotated[int, Field(ge=1, le=256)]


class Engine(Frozen):
    """One way to run a set of components: on so many GPUs, at some degree; with its latencies by batch size."""

    components: tuple[str, ...] = Field(min_length=1)
    """What it runs, together."""
    gpus: int = Field(ge=1, le=1024)
    """GPUs of one executor."""
    degree: int = Field(default=1, ge=1)
    """Degree of parallelism inside."""
    batching: Literal["static", "continuous"] = "static"
    """``static``: a batch begins and ends together; ``continuous``: each request joins when a place is free."""
    latency_ms: Annotated[dict[Batch, dict[str, Samples]], BeforeValidator(_spell_latency)] = Field(min_length=1)
    """Batch size -> type -> milliseconds of one request in a batch (or among so many in flight) of its kind. Each batch
    size is a configuration that may be chosen; between them latencies are interpolated."""
    throughput_per_s: dict[Batch, dict[str, Annotated[float, Field(gt=0)]]] = Field(default_factory=dict)
    """Batch size -> type -> requests a second at most; absent: batch size over mean latency."""
    cpu_ms: dict[str, Annotated[float, Field(ge=0)]] = Field(default_factory=dict)
    """Type -> preprocessing on the CPU, which shows only while the executor is idle."""


class ServingKey(Frozen):
    """What a profile was measured with."""

    model: str | None = None
    """Digest of the model document."""
    device: str | None = None
    """Name of the GPUs."""


class ServingProfile(Frozen):
    """Latencies of every engine for every request type."""

    schema_: Literal["flashrt/serving-profile@1"] = Field(default="flashrt/serving-profile@1", alias="schema")
    name: str = "profile"
    provenance: Literal["measured", "declared", "inferred"]
    key: ServingKey = ServingKey()
    types: dict[str, dict[str, Any]] = Field(default_factory=dict)
    """Type -> characteristics that it was measured with; absent: not known, not compared."""
    engines: tuple[Engine, ...] = Field(min_length=1, max_length=2000)


def read_model(path: Path) -> ServingModel:
    """Return a model document.

    Raises
    ------
    InputError
        With every finding.
    """
    return validate(ServingModel, read_document(path, retry=RETRY), noun=f"model '{path.name}'", retry=RETRY)


def read_workload(path: Path) -> Workload:
    """Return a workload document; as `read_model`."""
    return validate(Workload, read_document(path, retry=RETRY), noun=f"workload '{path.name}'", retry=RETRY)


def read_serving_profile(path: Path) -> ServingProfile:
    """Return a serving profile; as `read_model`."""
    found = read_document(path, retry=RETRY)
    return validate(ServingProfile, found, noun=f"serving profile '{path.name}'", retry=RETRY)
