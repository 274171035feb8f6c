"""The serving planner: which executors and routes serve the most requests of mixed types within their targets.

The door to this folder: `make_problem` from documents, `plan_serving` for the answer.

Source: ``papers/002`` (Cornfigurator); ``spec/planners.md``, section 2.
"""

from flashrt.planners.serving.documents import (
    RequestType,
    ServingModel,
    ServingProfile,
    Workload,
    read_model,
    read_serving_profile,
    read_workload,
)
from flashrt.planners.serving.evaluate import Evaluator, Load
from flashrt.planners.serving.problem import Problem, make_problem
from flashrt.planners.serving.restrictions import baseline, restricted
from flashrt.planners.serving.search import Answer, Candidate, Settings, plan_serving

__all__ = [
    "Answer",
    "Candidate",
    "Evaluator",
    "Load",
    "Problem",
    "RequestType",
    "ServingModel",
    "ServingProfile",
    "Settings",
    "Workload",
    "baseline",
    "make_problem",
    "plan_serving",
    "read_model",
    "read_serving_profile",
    "read_workload",
    "restricted",
]
