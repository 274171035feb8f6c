"""The planners' tools: deployments of one stream, serving many users, elastic degrees."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, StrictInt

from flashrt.mcp_server.workspace import Workspace

ProgramArgument = Annotated[str, Field(description="Id from ir_build (prog-…), or path of a program document")]
RequireAuditArgument = Annotated[
    bool, Field(description="Refuse unless ir_audit has confirmed every claim that it rests on")
]


class PlannerTools:
    """The planners' part of `Tools`."""

    def __init__(self, workspace: Workspace) -> None:
        self.workspace = workspace

    def plan_deployment(
        self,
        program: ProgramArgument,
        profile: Annotated[str, Field(description="Profile id from profile_measure, or path of a profile document")],
        devices: Annotated[
            StrictInt | str | list[str],
            Field(description="How many (emulated), or a lease id or names, whose kind, islands and memory then count"),
        ],
        objective: Annotated[
            Literal["front", "rate", "latency", "devices"],
            Field(description="devices: the fewest that keep the limits; front: all that is best"),
        ] = "front",
        time_limit_s: Annotated[
            float, Field(gt=0, le=3600, description="Then the search stops and the proof says the gap")
        ] = 10,
        max_period_ms: Annotated[float | None, Field(gt=0, le=1e9, description="Sustained period, at most")] = None,
        min_fps: Annotated[
            float | None, Field(gt=0, le=1e9, description="The same as a rate; needs frames_per_batch in the profile")
        ] = None,
        max_latency_ms: Annotated[
            float | None, Field(gt=0, le=1e9, description="From a batch being ready to its last output")
        ] = None,
        memory_bytes: Annotated[
            int | None, Field(gt=0, description="Of each device; default: the lease's, else unlimited")
        ] = None,
        islands: Annotated[
            list[list[int]] | None,
            Field(description="Device numbers that fast links join, for groups to stay within; default: the lease's"),
        ] = None,
        pins: Annotated[
            dict[str, Any] | None,
            Field(
                description="{place: {op: [device]}, together: [[op]], apart: [[op]], degree: {op: n}}; op: a path, "
                "glob or node"
            ),
        ] = None,
        overlap: Annotated[
            Literal["disjoint", "aligned"], Field(description="aligned: groups inside others too, which do not run yet")
        ] = "disjoint",
        max_stagger: Annotated[
            int, Field(ge=0, le=16, description="By how many batches operations of a device may be apart")
        ] = 0,
        split_states: Annotated[
            bool, Field(description="Users of a written state in several groups too, which do not run yet")
        ] = False,
        min_gain: Annotated[
            float,
            Field(
                ge=0, lt=1, description="Points that gain less (a share) are left out, and listed; 0: the whole front"
            ),
        ] = 0.005,
        require_audit: RequireAuditArgument = False,
    ) -> dict[str, Any]:
        """Refuse wrong arguments before a job is started."""
        from flashrt.mcp_server.planning import read_question

        read_question(self.workspace, {
            "program": program, "profile": profile, "devices": devices, "objective": objective, "pins": pins,
            "time_limit_s": time_limit_s, "max_period_ms": max_period_ms, "min_fps": min_fps,
            "max_latency_ms": max_latency_ms, "memory_bytes": memory_bytes, "islands": islands, "overlap": overlap,
            "max_stagger": max_stagger, "split_states": split_states, "min_gain": min_gain,
            "require_audit": require_audit,
        })  # fmt: skip
        return {}

    def plan_serving(
        self,
        model: Annotated[str, Field(description="Path of a model document: components and edges")],
        workload: Annotated[str, Field(description="Path of a workload document: request types, fractions, arrivals")],
        profile: Annotated[str, Field(description="Path of a serving profile: engines with latencies")],
        devices: Annotated[StrictInt | str, Field(description="How many GPUs, or a lease id")],
        policy: Annotated[
            Literal["total", "weighted", "fair", "least_gpus"], Field(description="What is made as large as it can")
        ] = "total",
        goodput_per_s: Annotated[
            float | None, Field(gt=0, description="least_gpus: the goodput that is wanted")
        ] = None,
        restriction: Annotated[
            str | list[list[str]] | None,
            Field(
                description="monolithic, disaggregated, encoder_split, epd, or groups of components that share nodes"
            ),
        ] = None,
        routing: Annotated[Literal["lp", "grid"], Field(description="grid: steps of 0.1")] = "lp",
        alpha: Annotated[float, Field(gt=0, le=1, description="Share of the largest rate that is offered")] = 0.95,
        time_limit_s: Annotated[float, Field(gt=0, le=3600)] = 7,
        device: Annotated[
            str | None, Field(description="Name of the GPUs; another than the profile's is refused")
        ] = None,
        emulate_requests: Annotated[
            int, Field(ge=0, le=100_000, description="Run the plan on emulated executors with so many requests")
        ] = 0,
        speedup: Annotated[float, Field(gt=0, le=1000, description="Of that run, against life")] = 1,
        cluster: Annotated[Literal["ray"] | None, Field(description="Spread that run over RAY_ADDRESS's nodes")] = None,
        seed: Annotated[int, Field(ge=0, lt=2**32)] = 1,
    ) -> dict[str, Any]:
        """Refuse wrong arguments before a job is started."""
        from flashrt.mcp_server.serving import read_question

        read_question(self.workspace, {
            "model": model, "workload": workload, "profile": profile, "devices": devices, "policy": policy,
            "goodput_per_s": goodput_per_s, "restriction": restriction, "routing": routing, "alpha": alpha,
            "time_limit_s": time_limit_s, "device": device, "emulate_requests": emulate_requests, "speedup": speedup,
            "cluster": cluster, "seed": seed,
        })  # fmt: skip
        return {}

    def plan_elastic(
        self,
        profile: Annotated[str, Field(description="Elastic profile document, or shipped:public, shipped:video")],
        workload: Annotated[str, Field(description="Elastic workload document, or shipped:workload-half, -bursts")],
        devices: Annotated[StrictInt | str | list[str], Field(description="How many, or a lease id or names")],
        policy: Annotated[str | None, Field(description="Only this one, such as elastic, ddit, static_2")] = None,
        island_size: Annotated[
            int | None, Field(ge=1, description="Devices that fast links join; default: the lease's, else all")
        ] = None,
    ) -> dict[str, Any]:
        """Refuse wrong arguments before a job is started."""
        from flashrt.mcp_server.elastic import read_elastic_question

        read_elastic_question(self.workspace, {
            "profile": profile, "workload": workload, "devices": devices, "policy": policy, "island_size": island_size,
        })  # fmt: skip
        return {}
