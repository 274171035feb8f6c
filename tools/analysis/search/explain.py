"""What binds a deployment, in sentences."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction

from flashrt.analysis.cost import DeploymentCost, Step, to_ms
from flashrt.analysis.search.layout import Found


def describe_cycle(cost: DeploymentCost) -> str:
    """Return which cycle binds the period, operation by operation."""
    steps = cost.critical_cycle
    if not steps:
        return "nothing binds the period: no operation takes time"
    batches = sum(step.batches for step in steps)
    causes = {step.cause for step in steps if step.cause}
    placed = cost.constraints.placement
    operations = {step.operation for step in steps}
    busy = [device for device, paths in placed.by_device.items() if set(paths) == operations]
    lags = sum(step.lag_ms for step in steps)
    if busy and cost.t_min_ms == cost.t_min_resource_ms and not lags:
        what = f"the work of device{'s' if len(busy) > 1 else ''} {', '.join(map(str, busy))}"
    elif not any(cause.startswith("device ") for cause in causes):
        what = "a recurrence through state, whatever else the devices do,"
    else:
        devices = sorted(cause for cause in causes if cause.startswith("device "))
        what = f"a cycle through {' and '.join(devices)} and what other operations wait for"
    length = sum(step.time_ms + step.lag_ms for step in steps)
    over = f", over {batches} batches" if batches != 1 else ""
    return f"{what} binds the period: {_chain(steps)} is {length:g} ms{over}, so {cost.t_min_ms:g} ms a batch"


def describe_path(cost: DeploymentCost) -> str:
    """Return which path binds the latency, operation by operation."""
    steps = cost.latency_path
    if not steps:
        return "no output: there is no latency"
    waits = [step for step in steps if step.batches]
    text = f"the path {_chain(steps)} binds the latency: {cost.latency_ms:g} ms"
    if waits:
        batches = sum(step.batches for step in steps)
        moved = f"{abs(batches)} period{'s' if abs(batches) != 1 else ''}"
        text += f"; it waits for other batches at {', '.join(_name(step) for step in waits)}, so {moved} " + (
            "come on top of it" if batches < 0 else "are taken off it"
        )
    return text


def describe_device(num_devices: int, found: Found, richer: Sequence[Found] | None) -> str:
    """Return what one more device would buy at a point."""
    if richer is None:
        return f"not known: search again with {num_devices + 1} devices"
    faster = [one for one in richer if one.latency <= found.latency and one.period < found.period]
    sooner = [one for one in richer if one.period <= found.period and one.latency < found.latency]
    parts = []
    if faster:
        best = min(faster, key=lambda one: (one.period, one.latency))
        parts.append(
            f"a period of {to_ms(best.period):g} ms ({_percent(best.period, found.period)}) at no more latency"
        )
    if sooner:
        best = min(sooner, key=lambda one: (one.latency, one.period))
        parts.append(
            f"a latency of {to_ms(best.latency):g} ms ({_percent(best.latency, found.latency)}) at no longer period"
        )
    return f"with {num_devices + 1} devices: " + ("; or ".join(parts) if parts else "nothing better than this point")


def _percent(new: Fraction, old: Fraction) -> str:
    return f"{float(new / old - 1) * 100:+.1f} %"


def _chain(steps: Sequence[Step]) -> str:
    words = []
    for step in steps:
        lag = f" (+ {step.lag_ms:g} ms transfer)" if step.lag_ms else ""
        words.append(f"{_name(step)} {step.time_ms:g} ms{lag}")
    return " → ".join(words)


def _name(step: Step) -> str:
    return f"'{step.operation}'" + (f" chunk {step.chunk}" if step.chunk else "")
