"""The results of a run of the conformance suite as a table; ends with 1 on a failure that is not expected.

    python scripts/conformance_table.py EXPECTED.yaml SERVER RESULTS SCENARIOS

SERVER: the list in EXPECTED.yaml that counts. SCENARIOS: names of what had to run, or a file of requirements.
What is missing counts as failed, and so does what is expected to fail and passes.
"""

from __future__ import annotations

import json
import re
import sys
from collections import Counter
from pathlib import Path

import yaml

RESULT = re.compile(r"server-(?P<scenario>.+)-\d{4}-\d\d-\d\dT[\d-]+Z")
COLUMNS = ("scenario", "passed", "failed", "warned", "skipped", "expected")


def required_scenarios(text: str) -> list[str]:
    """Return the scenarios that had to run, those of extensions and later additions included."""
    if not text.endswith(".yaml"):
        return text.split()
    document = yaml.safe_load(Path(text).read_text(encoding="utf-8"))
    more = [entry["scenario"] for entry in document.get("not_scored", []) if entry.get("leg") == "server"]
    return [*document["server"], *more]


def read_results(folder: Path) -> dict[str, list[dict[str, str]]]:
    """Return the checks of each scenario."""
    found = {}
    for path in folder.glob("*/checks.json"):
        match = RESULT.fullmatch(path.parent.name)
        if match is not None:
            found[match["scenario"]] = json.loads(path.read_text(encoding="utf-8"))
    return found


def main() -> int:
    """Print the table; return the exit status."""
    path, server, results_folder, scenarios = sys.argv[1:]
    expected = {str(entry) for entry in yaml.safe_load(Path(path).read_text(encoding="utf-8"))[server]}
    folder = Path(results_folder)
    results = read_results(folder)
    names = list(dict.fromkeys([*required_scenarios(scenarios), *sorted(results)]))
    rows, problems = [], []
    total: Counter[str] = Counter()
    for name in names:
        checks = results.get(name)
        if checks is None:
            problems.append(f"{name}: did not run")
            continue
        count = Counter(check["status"] for check in checks)
        total += count
        failed = [check for check in checks if check["status"] == "FAILURE"]
        whole = name in expected
        unexpected = [check for check in failed if not whole and f"{name}:{check['id']}" not in expected]
        problems += [f"{name}, {check['id']}: {check.get('errorMessage')}" for check in unexpected]
        if not failed and any(entry == name or entry.startswith(f"{name}:") for entry in expected):
            problems.append(f"{name}: passes, although it is listed as an expected failure; take it off the list")
        said = "" if not failed else "NO" if unexpected else "yes"
        shown = (count["SUCCESS"], count["FAILURE"], count["WARNING"], count["SKIPPED"])
        rows.append((name, *(str(number or "") for number in shown), said))
    print(f"\n{folder.name}: {len(rows)} scenarios, {total['SUCCESS']} checks passed, {total['FAILURE']} failed, "
          f"{len(problems)} unexpected")  # fmt: skip
    width = max(len(row[0]) for row in [COLUMNS, *rows])
    for row in [COLUMNS, *rows]:
        print(row[0].ljust(width), *(cell.rjust(8) for cell in row[1:]))
    for problem in problems:
        print(f"UNEXPECTED  {problem}")
    return 1 if problems or not rows else 0


if __name__ == "__main__":
    sys.exit(main())
