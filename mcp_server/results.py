"""What the tools' structured results have: their output schemas, as short as agents' contexts want them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from flashrt.mcp_server.table import Tool

JOB = "job:string state:string progress:number result:object error:string artifacts:array"
FIELDS: Mapping[str, str] = {
    "ir_build": "program:string name:string operations:array diagnostics:array counts:object",
    "ir_show": "view:string text:string document:object path:string",
    "ir_interpret": "outputs:string equivalent:boolean equality:object",
    "ir_audit": "audit:string clean:boolean findings:array claims:object unchecked:array",
    "ir_trace": "program:string path:string files:object operations:array questions:array diagnostics:array",
    "analyze": "program:string dependencies:array parallel:array streaming:array candidates:array t_min_ms:number|null "
    "d0_ms:number|null latency_ms:number|null fps:number|null seeded:object",
    "profile_measure": "profile:string path:string program:string notes:array document:object",
    "plan_deployment": "plan:string program:string front:array left_out:array notes:array",
    "plan_serving": "front:array complete:boolean notes:array",
    "plan_elastic": "notes:array",
    "equivalence_check": "equivalence:string equivalent:boolean outputs:object reasons:array warnings:array",
    "bench_run": "run:string valid:boolean reasons:array latency_ms:object first_output_ms:number|null "
    "fps:number|null rechecked:object|null notes:array",
    "bench_compare": "comparisons:array",
    "gpu_status": "devices:array leases:array",
    "gpu_acquire": "lease:string devices:array environment:object",
    "gpu_renew": "lease:string",
    "gpu_release": "released:string devices:array quarantined:array",
    "variant_add": "variant:string folder:string may_stop:boolean in_the_way:array",
    "variant_next": "variant:string|null folder:string|null may_stop:boolean in_the_way:array",
    "variant_update": "variant:string|null may_stop:boolean in_the_way:array",
    "variant_list": "variants:array may_stop:boolean in_the_way:array",
    "report_write": "path:string",
}
"""Tool -> ``name:type`` by blanks, in JSON's types. Any may be absent (a running job has no result yet), and there may
be more."""


def output_schema(tool: Tool) -> dict[str, Any]:
    """Return the JSON schema of a tool's structured result."""
    job = JOB if tool.job or tool.name in {"job_wait", "job_cancel"} else ""
    properties: dict[str, Any] = {"ok": {"type": "boolean"}}
    for field in f"{FIELDS.get(tool.name, '')} {job}".split():
        name, _, types = field.partition(":")
        kinds = [{"type": kind} for kind in types.split("|")]
        # Several types in one list are legal, but not every client's dialect has them.
        properties[name] = kinds[0] if len(kinds) == 1 else {"anyOf": kinds}
    return {"type": "object", "properties": properties, "required": ["ok"]}
