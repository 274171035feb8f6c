"""Searches whose time is counted in steps: they do the same on every machine, however busy it is."""

from __future__ import annotations

import functools
import itertools
from typing import Any

from flashrt.planners import serving
from flashrt.planners.serving.least import fewest_gpus as fewest_gpus_in_time

STEP_S = 5e-4
"""What a step takes on a machine that has nothing else to do, on the average."""


class StepClock:
    """A clock that goes on by a step whenever it is looked at."""

    def __init__(self) -> None:
        self._looks = itertools.count()

    def __call__(self) -> float:
        return next(self._looks) * STEP_S


@functools.wraps(serving.plan_serving)
def plan_serving(*arguments: Any, **named: Any) -> serving.Answer:
    return serving.plan_serving(*arguments, **named, clock=StepClock())


@functools.wraps(fewest_gpus_in_time)
def fewest_gpus(*arguments: Any, **named: Any) -> serving.Answer:
    return fewest_gpus_in_time(*arguments, **named, clock=StepClock())
