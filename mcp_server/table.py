"""The tools in one table: what an agent reads of each before it calls it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Tool:
    """One row of the table.

    Attributes
    ----------
    job
        Whether it runs as a job: detached, with progress, waited for with ``job_wait``.
    """

    name: str
    description: str
    read_only: bool = False
    destructive: bool = False
    job: bool = False


TABLE: tuple[Tool, ...] = (
    Tool(
        "ir_build",
        "Check a program document (path) or an inline program and return its id. Reports every finding at once with "
        "the repair. First step of the loop.",
    ),
    Tool("ir_show", "Show a program: summary text, its JSON, Mermaid source, or the path of an SVG drawing."),
    Tool(
        "ir_interpret",
        "Run a program sequentially over inputs; with a baseline, prove every output equal to it. Job.",
        job=True,
    ),
    Tool(
        "ir_audit",
        "Run a program over several batches and check what its document claims: undeclared and unused states, hidden "
        "memory, inputs changed, streaming, order, chance, degrees. Findings name evidence and the repair. Job.",
        job=True,
    ),
    Tool(
        "ir_trace",
        "Draft a program by running a reference (file.py:function): stages as nested graphs, loops as repeats, states, "
        "shapes, times; an ops.py of the reference's own statements; questions where it could not see. Job.",
        job=True,
    ),
    Tool(
        "analyze",
        "Dependencies, parallel groups, streaming edges and candidates (every transformation with its legality). With "
        "profile and deployment: exact period, offset and latency with critical cycle and path. seed_queue fills the "
        "variant queue with the candidates; those that are illegal, need over max_devices, or repeat another's "
        "deployment are there as removed.",
    ),
    Tool(
        "profile_measure",
        "Measure every operation of a program at every degree that it declares and the devices allow: time (ranks run "
        "for real), memory, hand-overs. Writes a profile document; what could not be measured is named in its notes. "
        "A profile is refused once the program, its files, options or versions have changed. Job.",
        job=True,
    ),
    Tool(
        "plan_deployment",
        "Search placements, degrees, orders and staggers of a program for the best deployments in period and latency, "
        "with proofs: a front of deployment documents, written to the workspace and ready to run, each with what binds "
        "it; plots. Says what it left out. Job.",
        job=True,
    ),
    Tool(
        "plan_serving",
        "Plan executors and routes for many users of a multimodal model with mixed request types: the highest goodput "
        "(requests within their latency targets) on so many GPUs, or the fewest GPUs for a goodput. Returns plan, "
        "front, why, counts and seconds by phase, plots. Job.",
        job=True,
    ),
    Tool(
        "plan_elastic",
        "Video diffusion for many users: how many GPUs each request has, step by step (DDiT). Simulates the method, "
        "static degrees, partitions and each half of the method on a workload; figures by class and policy. Job.",
        job=True,
    ),
    Tool(
        "equivalence_check",
        "Drive baseline and candidate with the same hidden inputs, compare every output element by element, and name "
        "the first difference. Job.",
        job=True,
    ),
    Tool(
        "bench_run",
        "Benchmark a system through its own input and output buffers: single_stream, realtime (one batch a period), "
        "poisson, burst, trace (moments from a file) or max_rate (the smallest period with a finite offset). Latency "
        "counts from when an item was due. Job.",
        job=True,
    ),
    Tool(
        "bench_compare",
        "Ratios with intervals; says when a difference is noise. With runs: of finished runs, at once. With systems: "
        "two take turns (A B, B A, …), each turn a new process; verdict faster, slower or inconclusive for the second, "
        "beyond the noise between one system and itself. Job.",
        job=True,
    ),
    Tool(
        "gpu_status",
        "Devices with their state, topology, leases with their holders, the queue, quarantined devices with the "
        "evidence, foreign processes.",
        True,
    ),
    Tool(
        "gpu_acquire",
        "Lease devices, all or none, and the environment to export. When they are busy: who holds what, and when they "
        "are free at the latest; wait_s queues, first come first served.",
    ),
    Tool("gpu_renew", "Let a lease last ttl_s from now on."),
    Tool(
        "gpu_release",
        "Give a lease back, so that others can have its devices; a GPU that is not free again is quarantined.",
        destructive=True,
    ),
    Tool(
        "variant_add",
        "Queue a variant: a hypothesis with the transformation, the bottleneck it attacks and why it is legal. Makes "
        "an isolated folder to implement it in.",
    ),
    Tool("variant_next", "Claim the highest-ranked pending variant, or the one that is named."),
    Tool(
        "variant_update",
        "Decide a variant: measured (needs a passed equivalence check and a valid run of the same system) or removed "
        "(needs a reason); re-rank others with ranks.",
    ),
    Tool("variant_list", "All variants with lineage; may_stop, and what still stands in its way.", True),
    Tool("job_wait", "Wait up to wait_s for a job: state, progress, result or error.", True),
    Tool("job_cancel", "End a job and every process it started.", destructive=True),
    Tool(
        "report_write",
        "Write one HTML page of the workspace: program, analysis, front, variants with lineage and verdicts, runs with "
        "plots and timelines, comparisons, audits, environment. Call it when variant_list says may_stop.",
    ),
)
