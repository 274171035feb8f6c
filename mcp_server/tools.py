"""The tools: what each takes and what it returns. Thin: the work is in the library."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field

from flashrt.errors import Finding, InputError, input_error, listed
from flashrt.mcp_server.devices import device_names
from flashrt.mcp_server.planner_tools import PlannerTools, RequireAuditArgument
from flashrt.mcp_server.reporting import ReportTools
from flashrt.mcp_server.workspace import write_whole

if TYPE_CHECKING:
    from flashrt.bench.settings import RunSettings
    from flashrt.variants.queue import VariantQueue

ProgramArgument = Annotated[str, Field(description="Id from ir_build (prog-…), or path of a program document")]
SystemArgument = Annotated[
    str,
    Field(description="file.py:function, a program or deployment document, or an id of one; paths in the workspace"),
]
InputsArgument = Annotated[
    str, Field(description="file.py:function, called as function(seed, count), yielding {input: value}; or a recording")
]
DevicesArgument = Annotated[
    str | list[str] | None, Field(description="A lease id from gpu_acquire, or names such as cpu-0, cuda:0")
]
TimeoutArgument = Annotated[
    float | None, Field(gt=0, le=86_400, description="Silence after which a system counts as hanging, s")
]
ToleranceArgument = Annotated[
    str | float | dict[str, Any] | None, Field(description="bit (default), numeric, or a relative error")
]
MAX_WORDS = 4000
MAX_NAME = 200
MAX_TTL_S = 604_800
RateArgument = Annotated[float | None, Field(gt=0, description="poisson, burst: items a second, on average")]
BurstArgument = Annotated[int | None, Field(ge=1, description="burst: items that are due at once")]
TraceArgument = Annotated[
    str | None, Field(description="trace: a CSV file of moments (seconds or ISO 8601), header optional")
]
SpeedupArgument = Annotated[float | None, Field(gt=0, description="trace: how many times faster; default 1")]
SeedArgument = Annotated[int | None, Field(ge=0, description="poisson, burst: repeat these arrivals; default: new")]
ScenarioArgument = Literal["single_stream", "realtime", "poisson", "burst", "trace", "max_rate"]
NeighboursArgument = Annotated[
    Literal["refuse", "record"] | None,
    Field(description="Others on the devices make it invalid, or are noted; default: refuse on GPUs, record on cores"),
]
ConfigArgument = Annotated[dict[str, Any] | None, Field(description="The application's own options")]


class Tools(PlannerTools, ReportTools):
    """The tools' functions, bound to one workspace; each returns a JSON-ready mapping."""

    def ir_build(
        self,
        document: Annotated[str | None, Field(description="Path of the program document in the workspace")] = None,
        program: Annotated[dict[str, Any] | None, Field(description="The program itself, inline")] = None,
    ) -> dict[str, Any]:
        """Check a program and keep it under its id."""
        import json

        from flashrt.bench.systems import find_file
        from flashrt.ir.building import build, build_file

        if (document is None) == (program is None):
            raise input_error(
                "ir_build", "exactly one of 'document' and 'program'", "both" if document else "neither", "name one"
            )
        if document is not None:
            path = find_file(self.workspace.root, document, "argument 'document'")
            built = build_file(path)
        else:
            assert program is not None, "one of the two is given"
            built = build(program, self.workspace.root)
            path = self.workspace.folder("programs") / f"{built.id}.json"
            try:
                write_whole(path, json.dumps(program, indent=1))
            except OSError as error:
                raise input_error(
                    "ir_build, argument 'program'", f"a workspace whose folder '{path.parent.name}' can be written",
                    str(error), "make room or give access, and call ir_build again", rule="not-written",
                ) from None  # fmt: skip
        folder = self.workspace.relative(built.folder)
        self.workspace.store.put_record("program", built.id, {"name": built.program.name, "folder": folder}, path)
        return {
            "program": built.id,
            "name": built.program.name,
            "diagnostics": [finding.as_dict() for finding in built.findings],
            "counts": built.counts(),
            "operations": [operation.path for operation in built.flat.operations],
        }

    def ir_show(
        self,
        program: ProgramArgument,
        view: Literal["summary", "json", "mermaid", "svg"] = "summary",
    ) -> dict[str, Any]:
        """Render a program."""
        from flashrt.ir import dump, summarize, to_mermaid, to_svg

        built = self.workspace.program(program)
        if view == "svg":
            path = self.workspace.folder("programs") / f"{built.id}.svg"
            write_whole(path, to_svg(built.program))
            return {"view": view, "path": self.workspace.relative(path)}
        if view == "json":
            return {"view": view, "document": dump(built.program)}
        text = summarize(built) if view == "summary" else to_mermaid(built.program)
        return {"view": view, "text": text}

    def analyze(
        self,
        program: ProgramArgument,
        profile: Annotated[str | None, Field(description="Profile document or id")] = None,
        deployment: Annotated[str | None, Field(description="Deployment document or id")] = None,
        seed_queue: Annotated[bool, Field(description="Put the candidates into the variant queue")] = False,
        max_devices: Annotated[
            int | None, Field(ge=1, description="seed_queue: devices there are; candidates that need more are removed")
        ] = None,
    ) -> dict[str, Any]:
        """Analyse a program, and with profile and deployment what that deployment does."""
        from flashrt.analysis import analyze_program
        from flashrt.mcp_server.auditing import find_audit
        from flashrt.variants.queue import VariantQueue

        built = self.workspace.program(program)
        times = placed = None
        if profile is not None:
            times, _ = self.workspace.document(profile, "profile", "argument 'profile'")
        if deployment is not None:
            placed, _ = self.workspace.document(deployment, "deployment", "argument 'deployment'")
        result = analyze_program(built, times, placed, find_audit(self.workspace, built, times))
        if seed_queue:
            candidates = [self._rooted(candidate, program, built) for candidate in result["candidates"]]
            result["seeded"] = VariantQueue(self.workspace.store).seed(candidates, max_devices=max_devices).as_dict()
        return {"program": built.id, **result}

    def _rooted(self, candidate: Mapping[str, Any], program: str, built: Any) -> dict[str, Any]:
        """Name the program document in a candidate's deployment, so that its variant can be run as it stands."""
        expected = candidate["expected"]
        candidate = {**candidate, "expected": expected if isinstance(expected, Mapping) else {"says": expected}}
        deployment = candidate.get("deployment")
        if deployment is None:
            return candidate
        named = self.workspace.program_name(program)
        return {**candidate, "deployment": {"schema": "flashrt/deployment@1", **deployment, "program": named}}

    def bench_compare(
        self,
        runs: Annotated[
            list[str] | None, Field(min_length=2, description="Finished runs' ids; the first is the baseline")
        ] = None,
        systems: Annotated[
            list[str] | None,
            Field(min_length=2, max_length=2, description="Instead: two systems to run, baseline first"),
        ] = None,
        inputs: Annotated[str | None, Field(description="systems: as in bench_run")] = None,
        pairs: Annotated[int, Field(ge=2, le=100, description="systems: turns of each; a verdict needs 5")] = 12,
        scenario: ScenarioArgument = "single_stream",
        devices: DevicesArgument = None,
        duration_s: Annotated[float, Field(gt=0, le=3600, description="Measured time of each turn")] = 4,
        period_ms: Annotated[float | None, Field(gt=0, description="realtime: the batch period of both")] = None,
        warmup: Annotated[int, Field(ge=0, le=1000, description="Batches before measuring")] = 3,
        rate_hz: RateArgument = None,
        burst_size: BurstArgument = None,
        trace: TraceArgument = None,
        speedup: SpeedupArgument = None,
        seed: SeedArgument = None,
        max_batches: Annotated[int, Field(ge=1, le=100_000, description="Batches of a turn, at most")] = 256,
        config: ConfigArgument = None,
        timeout_s: TimeoutArgument = None,
        neighbours: NeighboursArgument = None,
    ) -> dict[str, Any]:
        """Compare finished runs; refuse wrong arguments before two systems take turns."""
        from flashrt.bench.compare import compare_runs
        from flashrt.bench.interleave import check_pair

        if (runs is None) == (systems is None):
            raise input_error(
                "bench_compare", "exactly one of 'runs' (finished) and 'systems' (to be run in turns)",
                "both" if runs else "neither", "name one and call again", rule="runs-or-systems",
            )  # fmt: skip
        if runs is not None:
            return compare_runs([self.workspace.store.get_record("run", run).payload for run in runs])
        assert systems is not None, "one of the two is given"
        given = {
            "scenario": scenario, "duration_s": duration_s, "period_ms": period_ms, "warmup": warmup,
            "rate_hz": rate_hz, "burst_size": burst_size, "trace": trace, "speedup": speedup, "seed": seed,
            "max_batches": max_batches, "neighbours": neighbours,
        }  # fmt: skip
        findings = self._check_load(given, lambda settings: check_pair(systems, settings, pairs))
        if inputs is None:
            findings.append(Finding("argument 'inputs'", "file.py:function, or a recording", "nothing",
                                    "name the inputs of both systems", rule="missing-argument"))  # fmt: skip
        for index, system in enumerate(systems):
            findings += _findings_of(
                lambda system=system, index=index: self._check_systems(  # type: ignore[misc]
                    **{f"systems[{index}]": system}, inputs=None if index else inputs,
                    devices=None if index else devices, config=config,
                )
            )  # fmt: skip
        if findings:
            raise InputError(findings)
        return {}

    def gpu_status(self) -> dict[str, Any]:
        """Report devices and leases."""
        from flashrt import gpu

        return gpu.status()

    def gpu_acquire(
        self,
        count: Annotated[int, Field(description="How many devices")],
        holder: Annotated[str, Field(max_length=MAX_NAME, description="Who holds them: a name others can read")],
        ttl_s: Annotated[
            float, Field(gt=0, le=MAX_TTL_S, description="The lease ends after this time unless renewed")
        ] = 600,
        min_free_bytes: Annotated[int, Field(description="Memory that must be free on each device")] = 0,
        same_island: Annotated[bool, Field(description="Only devices joined by fast links")] = False,
        kind: Annotated[
            Literal["cuda", "rocm", "cpu", "emulated"] | None, Field(description="Default: the best there is")
        ] = None,
        purpose: Annotated[str, Field(max_length=MAX_NAME)] = "",
        wait_s: Annotated[
            float, Field(ge=0, le=25, description="Wait in the queue for so long when they are busy")
        ] = 0,
    ) -> dict[str, Any]:
        """Lease devices."""
        from flashrt import gpu

        lease = gpu.acquire(
            count, holder, kind=kind, ttl_s=ttl_s, min_free_bytes=min_free_bytes, same_island=same_island,
            purpose=purpose, wait_s=wait_s,
        )  # fmt: skip
        return lease.as_dict()

    def gpu_renew(
        self,
        lease: Annotated[str, Field(description="Lease id from gpu_acquire")],
        ttl_s: Annotated[
            float, Field(gt=0, le=MAX_TTL_S, description="The lease ends this long from now unless renewed again")
        ],
    ) -> dict[str, Any]:
        """Let a lease last longer, or shorter."""
        from flashrt import gpu

        return gpu.renew(lease, ttl_s).as_dict()

    def gpu_release(self, lease: Annotated[str, Field(description="Lease id from gpu_acquire")]) -> dict[str, Any]:
        """Give a lease back."""
        from flashrt import gpu

        released = gpu.release(lease)
        apart = gpu.quarantined()
        return {
            "released": released.lease,
            "devices": list(released.uuids),
            "quarantined": [apart[uuid].as_dict() for uuid in released.uuids if uuid in apart],
        }

    def variant_add(
        self,
        hypothesis: Annotated[str, Field(max_length=MAX_WORDS, description="What will get better, and why")],
        transformation: Annotated[str, Field(max_length=MAX_WORDS, description="Such as disaggregate dit|vae")],
        bottleneck: Annotated[str, Field(max_length=MAX_WORDS, description="Which cycle or path it attacks")],
        legality: Annotated[str, Field(max_length=MAX_WORDS, description="Why results stay the same")],
        system: Annotated[str | None, Field(description="The variant's system, when it exists already")] = None,
        parent: Annotated[str | None, Field(description="The variant it builds on")] = None,
        expected: Annotated[dict[str, Any] | None, Field(description="Such as {rate_ratio: 1.4}")] = None,
        rank: Annotated[
            float | None, Field(description="Higher is offered first; default: the gain that is expected")
        ] = None,
    ) -> dict[str, Any]:
        """Queue a variant."""
        return self._queue().add(
            hypothesis, transformation, bottleneck, legality, system=system, parent=parent, expected=expected,
            rank=rank,
        ).as_dict()  # fmt: skip

    def variant_next(
        self,
        variant: Annotated[str | None, Field(description="Id of a pending one; default: the highest-ranked")] = None,
    ) -> dict[str, Any]:
        """Claim a variant."""
        return self._queue().next(variant).as_dict()

    def variant_update(
        self,
        variant: str,
        state: Annotated[
            Literal["measured", "removed", "pending"],
            Field(description="pending gives a claim back, or re-opens with a reason"),
        ],
        equivalence: Annotated[str | None, Field(description="Id of a passed equivalence check")] = None,
        run: Annotated[str | None, Field(description="Id of a valid run of the same system")] = None,
        reason: Annotated[str | None, Field(max_length=MAX_WORDS, description="Why it is removed")] = None,
        ranks: Annotated[dict[str, float] | None, Field(description="New ranks of pending variants")] = None,
        system: Annotated[str | None, Field(description="The variant's system, if it was not said")] = None,
        require_audit: RequireAuditArgument = False,
    ) -> dict[str, Any]:
        """Decide a variant."""
        if require_audit and state == "measured":
            from flashrt.mcp_server.auditing import require_audited_variant

            require_audited_variant(self.workspace, self._queue(), variant, system)
        return self._queue().update(
            variant, state, equivalence=equivalence, run=run, reason=reason, ranks=ranks, system=system
        ).as_dict()  # fmt: skip

    def variant_list(
        self,
        detail: Annotated[bool, Field(description="With every variant's history")] = False,
    ) -> dict[str, Any]:
        """List variants."""
        return self._queue().list().as_dict(history=detail)

    def _queue(self) -> VariantQueue:
        from flashrt.variants.queue import VariantQueue

        return VariantQueue(self.workspace.store)

    # Jobs: the signature is the tool's; `flashrt.mcp_server.work` has the function of the same name.

    def ir_interpret(
        self,
        program: ProgramArgument,
        inputs: InputsArgument,
        baseline: Annotated[str | None, Field(description="System to prove it equal to")] = None,
        tolerance: ToleranceArgument = None,
        count: Annotated[int, Field(ge=1, le=4096, description="Batches")] = 8,
        devices: DevicesArgument = None,
        config: ConfigArgument = None,
        timeout_s: TimeoutArgument = None,
    ) -> dict[str, Any]:
        """Refuse wrong arguments before a job is started."""
        from flashrt.bench.equality import Tolerance

        self.workspace.program(program)
        Tolerance.parse(tolerance)
        return self._check_systems(baseline=baseline, inputs=inputs, devices=devices, config=config)

    def ir_audit(
        self,
        program: ProgramArgument,
        inputs: InputsArgument,
        count: Annotated[int, Field(ge=3, le=256, description="Batches")] = 6,
        degrees: Annotated[
            list[int] | None, Field(description="Degrees to run; default: the declared ones up to 4; []: none")
        ] = None,
        seed: Annotated[int | None, Field(ge=0, description="Of the inputs; default: new")] = None,
        config: ConfigArgument = None,
        timeout_s: TimeoutArgument = None,
    ) -> dict[str, Any]:
        """Refuse wrong arguments before a job is started."""
        self.workspace.program(program)
        return self._check_systems(inputs=inputs, devices=None, config=config)

    def ir_trace(
        self,
        system: Annotated[str, Field(description="The reference: file.py:function, path in the workspace")],
        inputs: InputsArgument,
        name: Annotated[str | None, Field(max_length=80, pattern=r"^[\w-]+$", description="The program's name")] = None,
        out: Annotated[str | None, Field(description="Folder for the draft; default: a new one in traced/")] = None,
        count: Annotated[int, Field(ge=2, le=256, description="Batches")] = 8,
        depth: Annotated[int, Field(ge=0, le=6, description="Levels of calls that may be opened")] = 2,
        devices: DevicesArgument = None,
        config: ConfigArgument = None,
        timeout_s: Annotated[float | None, Field(gt=0, le=86_400, description="Of all; default 600")] = None,
    ) -> dict[str, Any]:
        """Refuse wrong arguments before a job is started."""
        from flashrt.bench.systems import inside
        from flashrt.bench.trace import refuse_other_draft

        findings = _findings_of(lambda: self._check_systems(system=system, inputs=inputs, devices=devices))
        if ".py:" not in system and not findings:
            findings.append(
                Finding(
                    "argument 'system'", "a reference, file.py:function", f"'{system}'",
                    "name the code that the program is to be drafted from", rule="kind-of-system",
                )
            )  # fmt: skip
        if out is not None:
            findings += _findings_of(
                lambda: refuse_other_draft(inside(self.workspace.root, out, "argument 'out'"))
            )  # fmt: skip
        if count < depth + 3:
            findings.append(
                Finding(
                    "argument 'count'", f"at least depth + 3, {depth + 3}: that many find the stages and are measured",
                    str(count), "raise it, or lower depth", rule="too-few-batches",
                )
            )  # fmt: skip
        if findings:
            raise InputError(findings)
        return {}

    def profile_measure(
        self,
        program: ProgramArgument,
        inputs: InputsArgument,
        devices: DevicesArgument = None,
        degrees: Annotated[
            list[int] | None, Field(description="Default: all that operations declare and the devices allow")
        ] = None,
        count: Annotated[int, Field(ge=3, le=4096, description="Batches a degree, beside warm-up")] = 16,
        config: ConfigArgument = None,
        timeout_s: TimeoutArgument = None,
    ) -> dict[str, Any]:
        """Refuse wrong arguments before a job is started."""
        from flashrt.bench.profile_layout import choose_degrees, find_parts, find_pool

        built = self.workspace.program(program)
        findings = _findings_of(lambda: find_parts(built.flat))
        findings += _findings_of(lambda: self._check_systems(inputs=inputs, devices=devices))
        if not findings:
            findings += _findings_of(lambda: choose_degrees(built, degrees, find_pool(device_names(devices)).limit))
        elif degrees:
            findings += _findings_of(lambda: choose_degrees(built, degrees, None))
        if findings:
            raise InputError(findings)
        return {}

    def equivalence_check(
        self,
        baseline: SystemArgument,
        candidate: SystemArgument,
        inputs: InputsArgument,
        tolerance: ToleranceArgument = None,
        runs: Annotated[int, Field(ge=1, le=100, description="Repeats with new hidden inputs")] = 1,
        count: Annotated[int, Field(ge=1, le=4096, description="Batches; drift shows over 8 or more")] = 8,
        devices: DevicesArgument = None,
        config: ConfigArgument = None,
        timeout_s: TimeoutArgument = None,
    ) -> dict[str, Any]:
        """Refuse wrong arguments before a job is started."""
        from flashrt.bench.equality import Tolerance

        Tolerance.parse(tolerance)
        return self._check_systems(
            baseline=baseline, candidate=candidate, inputs=inputs, devices=devices, config=config
        )

    def bench_run(
        self,
        system: SystemArgument,
        inputs: InputsArgument,
        scenario: ScenarioArgument = "single_stream",
        devices: DevicesArgument = None,
        duration_s: Annotated[float, Field(gt=0, le=3600, description="Measured time of each run")] = 8,
        runs: Annotated[int, Field(ge=1, le=100, description="Process restarts; intervals want 5")] = 3,
        period_ms: Annotated[
            float | None,
            Field(gt=0, description="realtime: the batch period; default: 1.1 times the latency seen in warm-up"),
        ] = None,
        elements_per_batch: Annotated[
            dict[str, float] | None, Field(description="What each output owes for a batch; found when absent")
        ] = None,
        warmup: Annotated[int, Field(ge=0, le=1000, description="Batches before measuring")] = 3,
        rate_hz: RateArgument = None,
        burst_size: BurstArgument = None,
        trace: TraceArgument = None,
        speedup: SpeedupArgument = None,
        seed: SeedArgument = None,
        d0_ms: Annotated[
            float | None, Field(ge=0, description="realtime, max_rate: count deadline misses at this offset")
        ] = None,
        media_rate: Annotated[
            dict[str, float] | None,
            Field(description="Output: elements in a second of its medium, for real-time factor and audio/video skew"),
        ] = None,
        max_batches: Annotated[int, Field(ge=1, le=100_000, description="Batches of a run, at most")] = 256,
        config: ConfigArgument = None,
        timeout_s: TimeoutArgument = None,
        neighbours: NeighboursArgument = None,
    ) -> dict[str, Any]:
        """Refuse wrong arguments before a job is started."""
        given = {
            "scenario": scenario, "duration_s": duration_s, "runs": runs, "period_ms": period_ms, "warmup": warmup,
            "elements_per_batch": elements_per_batch, "rate_hz": rate_hz, "burst_size": burst_size, "trace": trace,
            "speedup": speedup, "seed": seed, "max_batches": max_batches, "d0_ms": d0_ms,
            "media_rate": media_rate, "neighbours": neighbours,
        }  # fmt: skip
        findings = self._check_load(given)
        findings += _findings_of(
            lambda: self._check_systems(system=system, inputs=inputs, devices=devices, config=config)
        )
        if findings:
            raise InputError(findings)
        return {}

    def _check_load(
        self, given: Mapping[str, Any], check: Callable[[RunSettings], None] | None = None
    ) -> list[Finding]:
        """Return what is wrong with a run's settings, its trace read."""
        from flashrt.bench.arrivals import read_trace
        from flashrt.bench.settings import RunSettings, check_settings

        settings = RunSettings(**{name: value for name, value in given.items() if value is not None})
        findings = _findings_of(lambda: (check or check_settings)(settings))
        if settings.trace is not None:
            reference = settings.trace
            findings += _findings_of(lambda: read_trace(self.workspace.root, reference))
        return findings

    def _check_systems(
        self,
        *,
        inputs: str | None,
        devices: str | list[str] | None,
        config: Mapping[str, Any] | None = None,
        **systems: str | None,
    ) -> dict[str, Any]:
        """Resolve every reference, so that mistakes come back at once, all of them, without a job."""
        from flashrt.bench.record import SUFFIX
        from flashrt.bench.systems import check_system_times, find_file, resolve_system, split_function

        def check(name: str, reference: str) -> None:
            found = resolve_system(reference, self.workspace.root, f"argument '{name}'", self.workspace.find_id)
            stale = check_system_times(found, names, config)
            if stale:
                raise InputError(stale)

        names: list[str] = []
        findings = _findings_of(lambda: names.extend(device_names(devices)))
        for name, reference in systems.items():
            if reference is not None:
                findings += _findings_of(
                    lambda name=name, reference=reference: check(name, reference)  # type: ignore[misc]
                )
        where = "argument 'inputs'"
        if inputs is None:
            pass
        elif inputs.endswith(SUFFIX):
            findings += _findings_of(lambda: find_file(self.workspace.root, inputs, where))
        else:
            findings += _findings_of(
                lambda: find_file(self.workspace.root, split_function(inputs, where, "inputs.py:batches")[0], where)
            )
        if findings:
            raise InputError(findings)
        return {}

    def job_wait(
        self,
        job: Annotated[str, Field(description="Job id")],
        wait_s: Annotated[float, Field(ge=0, le=25, description="How long to wait")] = 20,
    ) -> dict[str, Any]:
        """Wait for a job."""
        from flashrt.mcp_server.jobs import wait_job

        return wait_job(self.workspace.root, job, wait_s).as_dict()

    def job_cancel(self, job: Annotated[str, Field(description="Job id")]) -> dict[str, Any]:
        """Cancel a job."""
        from flashrt.mcp_server.jobs import cancel_job

        return cancel_job(self.workspace.root, job).as_dict()


def _findings_of(call: Callable[[], object]) -> list[Finding]:
    try:
        call()
    except InputError as error:
        return list(error.findings) or [Finding("arguments", "valid references", str(error), "correct them")]
    return []


def unknown_argument(tool: str, name: str, valid: list[str]) -> Finding:
    """Return the finding for an argument that a tool does not have."""
    from flashrt.errors import nearest

    return Finding(
        f"{tool}, argument '{name}'", f"one of {listed(valid)}", f"unknown argument '{name}'",
        "rename or remove it and call again", rule="unknown-argument", nearest=nearest(name, valid),
    )  # fmt: skip
