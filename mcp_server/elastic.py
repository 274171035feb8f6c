"""What ``plan_elastic`` and ``flashrt elastic`` share: a question read from documents, devices and a policy."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from flashrt.bench.systems import find_file
from flashrt.errors import Finding, InputError, input_error, listed
from flashrt.mcp_server.devices import devices_to_plan
from flashrt.mcp_server.workspace import Workspace
from flashrt.planners.elastic import (
    DATA,
    ElasticProfile,
    ElasticWorkload,
    Policy,
    Question,
    choose_policies,
    find_policy,
    make_islands,
    make_question,
    read_elastic_profile,
    read_elastic_workload,
)

RETRY = "call plan_elastic again"
SHIPPED = "shipped:"
MAX_DEVICES = 1024

Value = TypeVar("Value")


def read_elastic_question(
    workspace: Workspace, arguments: Mapping[str, Any]
) -> tuple[Question, list[Policy], list[str]]:
    """Return what a call asks, the policies to simulate, and what to say of those left out.

    Raises
    ------
    InputError
        With every finding about profile, workload, devices and policy.
    """
    findings: list[Finding] = []
    profile: ElasticProfile | None = _kept(
        findings, lambda: read_elastic_profile(_find(workspace, arguments, "profile"))
    )
    workload: ElasticWorkload | None = _kept(
        findings, lambda: read_elastic_workload(_find(workspace, arguments, "workload"))
    )
    islands = _kept(findings, lambda: _islands(arguments))
    name = arguments.get("policy")
    policy = None if name is None else _kept(findings, lambda: find_policy(str(name)))
    question = None
    if profile is not None and workload is not None and islands is not None:
        question = _kept(findings, lambda: make_question(profile, workload, islands, workspace.root))
    if findings or question is None:
        raise InputError(list(dict.fromkeys(findings)))
    policies, notes = choose_policies(question)
    if policy is not None:
        if policy.partition == "static" and notes:
            raise input_error("argument 'policy'", "devices for every class", notes[0], RETRY, rule="too-few-devices")
        policies, notes = [policy], []
    return question, policies, notes


def _kept(findings: list[Finding], call: Callable[[], Value]) -> Value | None:
    """Return what a call returns; where it refuses, keep its findings instead."""
    try:
        return call()
    except InputError as error:
        findings += error.findings or [Finding("plan_elastic", "arguments that hold", str(error), RETRY)]
        return None


def _find(workspace: Workspace, arguments: Mapping[str, Any], what: str) -> Path:
    reference, where = str(arguments[what]), f"argument '{what}'"
    if not reference.startswith(SHIPPED):
        return find_file(workspace.root, reference, where)
    name = reference.removeprefix(SHIPPED)
    names = sorted(
        path.stem for path in DATA.glob("*.yaml") if path.stem.startswith("workload") == (what == "workload")
    )
    if name not in names:
        raise input_error(where, f"a shipped document: {listed(names)}", f"'{name}'", RETRY, rule="unknown-document",
                          valid=names, name=name)  # fmt: skip
    return DATA / f"{name}.yaml"


def _islands(arguments: Mapping[str, Any]) -> Sequence[Sequence[int]]:
    given = devices_to_plan(arguments["devices"])
    if not 1 <= given.num_devices <= MAX_DEVICES:
        raise input_error("argument 'devices'", f"1 to {MAX_DEVICES} devices", str(given.num_devices), RETRY,
                          rule="num-devices")  # fmt: skip
    size = arguments.get("island_size")
    if size is None and given.islands:
        return given.islands
    return make_islands(given.num_devices, None if size is None else int(size))
