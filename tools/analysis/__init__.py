"""What a program's structure allows and what a deployment of it costs, exactly.

The door to this folder: `analyze_program` for the whole result of the tool ``analyze``; `read_profile`,
`read_deployment` and `evaluate_placement` for one deployment's figures; `find_candidates` for the transformations;
`simulate` for the same figures by events; `check_profile_key` for whether a profile is still that of the program;
`all_claims` for what only `ir_audit` can check.
"""

from flashrt.analysis.bounds import path_bound, recurrence_bound, resource_bound
from flashrt.analysis.candidates import Candidate, CandidateList, find_candidates
from flashrt.analysis.claims import NOT_AUDITED, Audited, all_claims, audit_changes, audit_key
from flashrt.analysis.constraints import (
    Arc,
    Constraints,
    Part,
    Variation,
    build_constraints,
    device_sequences,
    resource_arcs,
)
from flashrt.analysis.cost import DeploymentCost, Step, evaluate_placement
from flashrt.analysis.deployment import Deployment, Placement, deployment_document, read_deployment
from flashrt.analysis.parallel import find_parallel, find_streaming
from flashrt.analysis.patterns import best_patterns, matches
from flashrt.analysis.profile import PROFILE_SCHEMA, Profile, Transfer, read_profile
from flashrt.analysis.profile_key import Use, check_profile_key
from flashrt.analysis.ratio import CycleRatio, Walks, find_zero_cycle, longest_walks, max_cycle_ratio
from flashrt.analysis.report import analyze_program, cost_record
from flashrt.analysis.simulate import Simulation, simulate
from flashrt.analysis.structure import Unit, find_units

__all__ = [
    "NOT_AUDITED",
    "PROFILE_SCHEMA",
    "Arc",
    "Audited",
    "Candidate",
    "CandidateList",
    "Constraints",
    "CycleRatio",
    "Deployment",
    "DeploymentCost",
    "Part",
    "Placement",
    "Profile",
    "Simulation",
    "Step",
    "Transfer",
    "Unit",
    "Use",
    "Variation",
    "Walks",
    "all_claims",
    "analyze_program",
    "audit_changes",
    "audit_key",
    "best_patterns",
    "build_constraints",
    "check_profile_key",
    "cost_record",
    "deployment_document",
    "device_sequences",
    "evaluate_placement",
    "find_candidates",
    "find_parallel",
    "find_streaming",
    "find_units",
    "find_zero_cycle",
    "longest_walks",
    "matches",
    "max_cycle_ratio",
    "path_bound",
    "read_deployment",
    "read_profile",
    "recurrence_bound",
    "resource_arcs",
    "resource_bound",
    "simulate",
]
