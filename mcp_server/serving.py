"""What ``plan_serving`` and ``flashrt plan-serving`` share: documents read, the planner asked, the answer written."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from flashrt.errors import Finding, InputError, listed, nearest
from flashrt.mcp_server.devices import devices_to_plan
from flashrt.mcp_server.workspace import Workspace

TOOL = "plan_serving"
EXAMPLES = "examples"
POLICIES = ("total", "weighted", "fair", "least_gpus")
Progress = Callable[[float, str], None]
Value = TypeVar("Value")


@dataclass(frozen=True)
class Question:
    """Checked documents and settings."""

    problem: Any
    num_gpus: int
    settings: Any
    baseline: Any
    goodput_per_s: float | None
    emulate_requests: int
    speedup: float
    cluster: bool


def read_question(workspace: Workspace, arguments: Mapping[str, Any]) -> Question:
    """Return what a call asks.

    Raises
    ------
    InputError
        With every finding about the documents, how they fit, the devices and the restriction.
    """
    from flashrt.planners.serving import (
        Load,
        Settings,
        baseline,
        make_problem,
        read_model,
        read_serving_profile,
        read_workload,
        restricted,
    )

    findings: list[Finding] = []

    def kept(call: Callable[[], Value]) -> Value | None:
        try:
            return call()
        except InputError as error:
            findings.extend(error.findings or [Finding(TOOL, "arguments that hold", str(error), "call again")])
            return None

    def path(name: str) -> Path:
        from flashrt.bench.systems import find_file

        return find_file(workspace.root, str(arguments[name]), f"argument '{name}'")

    model = kept(lambda: read_model(path("model")))
    workload = kept(lambda: read_workload(path("workload")))
    profile = kept(lambda: read_serving_profile(path("profile")))
    devices = kept(lambda: devices_to_plan(arguments["devices"]))
    policy: Any = arguments.get("policy") or "total"
    if policy not in POLICIES:
        findings.append(
            Finding("argument 'policy'", listed(POLICIES), f"'{policy}'", "name one of them", rule="unknown-policy",
                    nearest=nearest(policy, POLICIES))
        )  # fmt: skip
    wanted = arguments.get("goodput_per_s")
    if (policy == "least_gpus") != (wanted is not None):
        findings.append(
            Finding("argument 'goodput_per_s'", "a goodput with policy 'least_gpus', and with no other",
                    f"policy '{policy}', goodput_per_s {wanted}", "change one of them", rule="goodput")
        )  # fmt: skip
    problem = trace = None
    if model is not None and workload is not None and profile is not None:
        problem = kept(lambda: make_problem(model, workload, profile, device=arguments.get("device")))
    if workload is not None and workload.arrivals.trace is not None:
        from flashrt.bench.arrivals import read_trace

        trace = kept(lambda: read_trace(path("workload").parent, str(workload.arrivals.trace)))
    restriction = None
    if model is not None and arguments.get("restriction") is not None:
        restriction = kept(lambda: baseline(model, arguments["restriction"]))
    if findings or problem is None or devices is None:
        raise InputError(list(dict.fromkeys(findings)))
    load = Load(alpha=float(arguments.get("alpha") or 0.95), seed=int(arguments.get("seed") or 1), trace_s=trace)
    settings = Settings(
        policy=policy, time_limit_s=float(arguments.get("time_limit_s") or 7.0), load=load,
        routing=arguments.get("routing") or "lp",
    )  # fmt: skip
    if restriction is not None:
        settings = restricted(settings)
    return Question(
        problem, devices.num_devices, settings, restriction, wanted, int(arguments.get("emulate_requests") or 0),
        float(arguments.get("speedup") or 1.0), arguments.get("cluster") == "ray",
    )  # fmt: skip


def ask(question: Question, progress: Progress) -> Any:
    """Return the planner's answer."""
    from flashrt.planners.serving import plan_serving
    from flashrt.planners.serving.least import fewest_gpus

    restriction = {"allowed": question.baseline.allowed} if question.baseline is not None else {}
    if question.goodput_per_s is not None:
        return fewest_gpus(
            question.problem, question.num_gpus, question.goodput_per_s, question.settings, progress=progress,
            **restriction,
        )  # fmt: skip
    return plan_serving(question.problem, question.num_gpus, question.settings, progress=progress, **restriction)


def run_plan(question: Question, answer: Any) -> dict[str, Any]:
    """Run the best plan on emulated executors; return what it reached beside what was predicted."""
    from flashrt.planners.serving import Evaluator
    from flashrt.planners.serving.emulate import run_emulated

    found = run_emulated(
        Evaluator(answer.problem, answer.settings.load), answer.best.plan, answer.best.routes,
        num_requests=question.emulate_requests, speedup=question.speedup, cluster=question.cluster,
    )  # fmt: skip
    reached, predicted = (float(one.goodput_per_s.sum()) for one in (found.reached, found.predicted))
    return {
        "emulated": True, "goodput_per_s": reached, "predicted_goodput_per_s": predicted,
        "ratio": reached / predicted if predicted else None, "throughput_per_s": found.reached.throughput_per_s,
        "executors": found.num_executors, "requests": found.num_requests, "seconds": round(found.seconds, 2),
        "speedup": found.speedup, "placed_by": "ray" if question.cluster else "this host",
    }  # fmt: skip


def write_answer(answer: Any, folder: Path) -> tuple[dict[str, Any], dict[str, Path]]:
    """Write the deployment and the pictures of an answer; return it as data, and the paths by name."""
    from flashrt.analysis.search.pages import as_yaml
    from flashrt.planners.serving.plots import write_plots
    from flashrt.planners.serving.record import answer_record, deployment_record

    record = answer_record(answer)
    paths = write_plots(answer, folder)
    paths["deployment"] = folder / "serving-deployment.yaml"
    paths["deployment"].write_text(as_yaml(deployment_record(answer)))
    return record, paths


def write_measured(operations: Path, folder: Path) -> Path:
    """Write the serving profile that measured profiles of operations make; return its path."""
    from flashrt.analysis.search.pages import as_yaml
    from flashrt.planners.serving.measured import serving_profile

    found = serving_profile(operations)
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "serving-profile.yaml"
    path.write_text(as_yaml(found.model_dump(mode="json", by_alias=True, exclude_defaults=True) | {
        "schema": "flashrt/serving-profile@1"
    }))  # fmt: skip
    return path


def copy_examples(folder: Path) -> list[str]:
    """Copy the documents that FlashRT ships into a folder; return their names. What is there already stays.

    Raises
    ------
    InputError
        A document is there already.
    """
    import flashrt.planners.serving as serving

    source = Path(str(serving.__file__)).parent / EXAMPLES
    found = sorted(path.relative_to(source) for path in source.glob("*/*.yaml"))
    if there := [str(path) for path in found if (folder / path).exists()]:
        raise InputError(
            Finding(f"folder '{folder}'", "none of the documents", listed(there, 3), "name another folder",
                    rule="already-there")
        )  # fmt: skip
    for path in found:
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(source / path, folder / path)
    return [str(path) for path in found]


def table_rows(record: Mapping[str, Any]) -> Sequence[tuple[str, ...]]:
    """Return a plan's nodes as rows of text: components, executors, load."""
    loads = record["why"]["loads"]
    return [
        (
            " + ".join(node["components"]),
            ", ".join(f"{one['count']} x ({one['gpus']} GPU, batch {one['batch']}, {one['batching']})"
                      for one in node["executors"]),
            f"{load['load']:.0%}",
        )
        for node, load in zip(record["plan"]["nodes"], loads, strict=True)
    ]  # fmt: skip


def as_text(record: Mapping[str, Any]) -> str:
    """Return a record as JSON."""
    return json.dumps(record, indent=1)
