"""Whether a node gives the same on several ranks: real processes, gloo, the numeric tier."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from flashrt.analysis.claims import CONFIRMED, REFUTED, UNCHECKED, degree_claim
from flashrt.bench import profile_layout as layout
from flashrt.bench.audit.findings import Findings
from flashrt.bench.audit.values import ROUNDED_SHARE
from flashrt.bench.drive import run_all
from flashrt.bench.equality import Tolerance, compare_output, flatten_stream
from flashrt.bench.process import SystemProcess
from flashrt.bench.systems import System
from flashrt.errors import FlashrtError, InputError
from flashrt.ir import BuiltProgram
from flashrt.runtime.wire import Tensor

MAX_DEGREE = 4
"""Beyond it, ranks would wait for each other on few cores for longer than the check is worth."""


def check_degrees(
    system: System,
    built: BuiltProgram,
    items: Sequence[Mapping[str, Any]],
    expected: Mapping[str, Sequence[Any]],
    findings: Findings,
    folder: Path,
    *,
    degrees: Sequence[int] | None,
    config: Mapping[str, Any],
    timeout_s: float,
    progress: Callable[[float, str], None],
) -> None:
    """Run the program at every degree and compare its outputs with those of one process.

    Parameters
    ----------
    expected
        Output -> what the program wrote over `items` at degree 1.
    degrees
        Which to run; None: all that are declared, up to `MAX_DEGREE`.
    """
    declared = sorted({n for one in built.flat.operations if not one.opaque for n in one.degrees if n > 1})
    for operation in built.flat.operations:
        for count in operation.tiles:
            findings.skip(f"tiles:{operation.template}@{count}", "results by tiles are only perceptually equal")
    if not declared:
        return
    try:
        parts = layout.find_parts(built.flat)
    except InputError as error:
        findings.skip("degrees", str(error))
        return
    pool = layout.find_pool(())
    wanted = [n for n in declared if (n <= MAX_DEGREE if degrees is None else n in degrees)]
    for number, degree in enumerate(declared):
        claimed = {one.template for one in built.flat.operations if degree in one.degrees and not one.opaque}
        if degree not in wanted:
            why = f"beyond {MAX_DEGREE}, the most that is run unasked" if degrees is None else "it was not asked for"
            for template in sorted(claimed):
                findings.claim(degree_claim(template, degree), UNCHECKED, why)
                findings.skip(degree_claim(template, degree), why)
            continue
        progress(0.9 + 0.1 * number / len(declared), f"degree {degree}")
        wide = [part for part in parts if degree in part.degrees]
        covered = {built.flat.by_path[path].template for part in wide for path in part.paths}
        for template in sorted(claimed - covered):
            why = "an operation that shares a state with it does not declare this degree"
            findings.claim(degree_claim(template, degree), UNCHECKED, why)
            findings.skip(degree_claim(template, degree), why)
        run = _Runner(system, built, items, expected, parts, pool, folder, config, timeout_s)
        told = run.differs(degree, wide)
        if told is None:
            for template in sorted(covered):
                findings.claim(
                    degree_claim(template, degree), CONFIRMED,
                    f"outputs over {len(items)} batches on {degree} ranks equal those of one, numeric tier",
                )  # fmt: skip
            continue
        for part in wide:
            alone = told if len(wide) == 1 else run.differs(degree, [part])
            for template in dict.fromkeys(built.flat.by_path[path].template for path in part.paths):
                _tell(findings, built, template, degree, alone, len(items))


def _tell(
    findings: Findings, built: BuiltProgram, template: str, degree: int, told: str | None, num_batches: int
) -> None:
    claim = degree_claim(template, degree)
    if told is None:
        findings.claim(claim, CONFIRMED, f"alone at degree {degree}: outputs over {num_batches} batches are equal")
        return
    path = next(one.path for one in built.flat.operations if one.template == template)
    node = findings.node(path)
    findings.claim(claim, REFUTED, told)
    findings.add(
        "degree-differs", path, str(degree), f"remove {degree} from 'degrees' of node '{node.name}'",
        {"remove": {"degrees": [degree]}}, degree=degree, difference=told, batches=num_batches,
        how=f"the program with this node on {degree} ranks does not give what it gives on one",
    )  # fmt: skip


class _Runner:
    """Runs the program with some of its parts at a degree."""

    def __init__(
        self,
        system: System,
        built: BuiltProgram,
        items: Sequence[Mapping[str, Any]],
        expected: Mapping[str, Sequence[Any]],
        parts: Sequence[layout.Part],
        pool: layout.Pool,
        folder: Path,
        config: Mapping[str, Any],
        timeout_s: float,
    ) -> None:
        self._system = system
        self._items = items
        self._expected = expected
        self._parts = parts
        self._pool = pool
        self._folder = folder
        self._config = config
        self._timeout_s = timeout_s
        self._count = 0

    def differs(self, degree: int, wide: Sequence[layout.Part]) -> str | None:
        """Return how the outputs differ from those at degree 1, or None."""
        self._count += 1
        document, names = layout.place(self._parts, degree, wide, self._pool)
        path = self._folder / f"degree-{degree}-{self._count}.json"
        system = layout.write_system(self._system, document, path, {})
        try:
            with SystemProcess(
                system, list(self._items[0]), devices=names, config=self._config, log_path=path.with_suffix(".log")
            ) as process:
                process.wait_ready(self._timeout_s)
                got = run_all(process, self._items, self._timeout_s).values()
        except FlashrtError as error:
            return f"it fails: {error}"[:500]
        for name, values in self._expected.items():
            result = compare_output(name, values, got.get(name, []), Tolerance("numeric"), len(self._items))
            if not result.equal and not _rounded(values, got.get(name, [])):
                return "; ".join(result.reasons[:2]) or f"output '{name}': {result.mismatched} of {result.total} differ"
        return None


def _rounded(want: Sequence[Any], have: Sequence[Any]) -> bool:
    """Return whether integers of eight bits differ by one here and there, as rounded numbers do."""
    a, b = flatten_stream(want), flatten_stream(have)
    x, y = (value.data if isinstance(value, Tensor) else value for value in (a, b))
    if not isinstance(x, np.ndarray) or not isinstance(y, np.ndarray) or x.dtype != y.dtype or x.shape != y.shape:
        return False
    if x.dtype.kind not in "iu" or x.dtype.itemsize != 1:
        return False
    errors = np.abs(x.astype(np.int32) - y.astype(np.int32))
    return bool(errors.max() <= 1 and (errors > 0).mean() <= ROUNDED_SHARE)
