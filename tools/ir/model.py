"""The grammar of a program document: the whole intermediate representation on one page.

Source: ``papers/000`` (FlashRT), section on the IR: hierarchical graphs, node-level state annotations,
edge-level streaming annotations.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

PROGRAM_SCHEMA = "flashrt/program@1"


class Frozen(BaseModel):
    """A document value: immutable, and unknown keys are refused by name."""

    model_config = ConfigDict(frozen=True, extra="forbid", populate_by_name=True)


class Initial(Frozen):
    """What a carried input holds before the first iteration: an op called once a batch, with the state it keeps."""

    op: str
    """Name in the ops mapping; called with the graph's other inputs, returns the value (or ``{port: value}``)."""
    reads: tuple[str, ...] = ()
    """States that the op reads."""
    writes: tuple[str, ...] = ()
    """States that the op writes."""


def _spell_initial(value: Any) -> Any:
    return {"op": value} if isinstance(value, str) else value


class Port(Frozen):
    """One named value that enters or leaves a node or graph."""

    dtype: str | None = None
    """Element type, as NumPy and torch spell it; unchecked when absent."""
    shape: tuple[int | str, ...] | None = None
    """Axis lengths, or names for lengths that may vary; unchecked when absent."""
    initial: Annotated[Initial | None, BeforeValidator(_spell_initial)] = None
    """For a carried input of a repeated graph: an op (or another input of the graph) that yields the first value."""
    rate_hz: float | None = Field(default=None, gt=0, le=1e9)
    """For an output of the entry: elements in a second of its medium (frames, samples), as they are played."""


class StateDeclaration(Frozen):
    """A value that outlives a batch."""

    per: Literal["iteration"] | None = None
    """``iteration``: one instance for each iteration of the repeated graph that uses it; absent: one instance."""
    bytes: int | None = Field(default=None, ge=0)
    """Size of one instance, in bytes."""


class Node(Frozen):
    """One self-contained operation, a nested graph, or an opaque system; exactly one of the three."""

    op: str | None = None
    """Name in the ops mapping."""
    graph: str | None = None
    """Name of a graph of this document."""
    opaque: str | None = None
    """Name in the ops mapping of a system whose inside cannot be changed (a serving engine, a remote service)."""
    devices: int | None = Field(default=None, ge=1)
    """How many devices an opaque node takes; it keeps that number in every deployment."""
    inputs: dict[str, Port] | None = None
    """Input ports; may be left out when the edges name them."""
    outputs: dict[str, Port] | None = None
    """Output ports; may be left out when the edges name them."""
    reads: tuple[str, ...] = ()
    """Persistent states that the operation reads."""
    writes: tuple[str, ...] = ()
    """Persistent states that the operation writes."""
    degrees: tuple[int, ...] = (1,)
    """Device counts on which the operation can run in sequence parallel."""
    tiles: tuple[int, ...] = ()
    """Tile counts into which the operation can be cut in space; results are then only perceptually equal."""
    event_driven: bool = False
    """The operation runs when an event comes, not once a batch, and its consumers use the last value."""

    @property
    def kind(self) -> str:
        """``op``, ``graph`` or ``opaque``."""
        return "op" if self.op is not None else "graph" if self.graph is not None else "opaque"


class Edge(Frozen):
    """A dataflow edge between ports: ``node.port``, or a bare name for a port of the graph itself."""

    source: str = Field(alias="from")
    """Where the value comes from."""
    target: str = Field(alias="to")
    """Where the value goes."""
    mode: Literal["blocking", "streaming"]
    """``blocking``: the consumer needs the whole value; ``streaming``: it starts with the first chunk."""
    chunks: int | None = Field(default=None, ge=1, le=1024)
    """Streaming only: into how many chunks a batch's value is cut."""
    axis: int = Field(default=0, ge=0)
    """Streaming only: the axis along which chunks are cut and joined."""
    lookahead: int = Field(default=0, ge=0, le=1024)
    """Streaming only: how many later chunks the consumer needs before it can work on a chunk."""

    @property
    def label(self) -> str:
        """The edge as the reader writes it: ``dit.latents -> vae.latents``."""
        return f"{self.source} -> {self.target}"

    @property
    def num_chunks(self) -> int:
        """Number of chunks a batch's value travels in: 1 for a blocking edge."""
        return self.chunks or 1 if self.mode == "streaming" else 1


class Repeat(Frozen):
    """A graph that runs several times within a batch."""

    times: int = Field(ge=1, le=10_000)
    """How often."""
    carry: dict[str, str] = Field(default_factory=dict)
    """Output of one iteration -> input of the next."""


class Graph(Frozen):
    """A directed acyclic graph of nodes, perhaps repeated."""

    repeat: Repeat | None = None
    inputs: dict[str, Port] = Field(default_factory=dict)
    outputs: dict[str, Port] = Field(default_factory=dict)
    nodes: dict[str, Node]
    edges: tuple[Edge, ...] = ()


class Program(Frozen):
    """A program document: the application as hierarchical graphs with declared state and streaming."""

    schema_: Literal["flashrt/program@1"] = Field(default="flashrt/program@1", alias="schema")
    name: str
    ops: str | None = None
    """``file.py:function`` beside the document; ``function(context)`` returns op name -> callable."""
    entry: str
    """Name of the top graph."""
    states: dict[str, StateDeclaration] = Field(default_factory=dict)
    graphs: dict[str, Graph]
