"""Elastic degree of parallelism (DDiT): how many GPUs each video request has, step by step.

One scheduler (`Scheduler`), in the simulator (`simulate`) and in a runtime of engine processes (`serve_load`).
"""

from flashrt.planners.elastic.bound import Bound, offline_bound
from flashrt.planners.elastic.compare import Question, choose_policies, compare, make_question
from flashrt.planners.elastic.degrees import RequestClass, gains, make_classes, optimal_degree
from flashrt.planners.elastic.devices import make_islands
from flashrt.planners.elastic.documents import (
    DATA,
    ElasticProfile,
    ElasticWorkload,
    read_elastic_profile,
    read_elastic_workload,
)
from flashrt.planners.elastic.policies import DDIT, ELASTIC, POLICIES, Policy, find_policy
from flashrt.planners.elastic.scheduler import Scheduler
from flashrt.planners.elastic.simulate import Simulated, simulate

__all__ = [
    "DATA",
    "DDIT",
    "ELASTIC",
    "POLICIES",
    "Bound",
    "ElasticProfile",
    "ElasticWorkload",
    "Policy",
    "Question",
    "RequestClass",
    "Scheduler",
    "Simulated",
    "choose_policies",
    "compare",
    "find_policy",
    "gains",
    "make_classes",
    "make_islands",
    "make_question",
    "offline_bound",
    "optimal_degree",
    "read_elastic_profile",
    "read_elastic_workload",
    "simulate",
]
