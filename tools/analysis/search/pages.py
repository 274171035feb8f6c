"""Pages of HTML around the plots of a search: one file each, with nothing that is loaded from elsewhere."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from typing import Any

from flashrt.analysis.schedule import Schedule
from flashrt.analysis.search.result import Point, SearchResult

STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; color: #1f2328; max-width: 70em; margin: 2em auto; padding: 0 1em; }
h1 { font-size: 1.4em; } h2 { font-size: 1.1em; margin-top: 2em; }
.says { color: #57606a; }
svg { max-width: 100%; height: auto; }
table { border-collapse: collapse; width: 100%; }
th, td { text-align: left; vertical-align: top; padding: .4em .6em; border-bottom: 1px solid #d0d7de; }
td.number, th.number { text-align: right; white-space: nowrap; }
pre { background: #f6f8fa; padding: .8em; overflow-x: auto; }
""".strip()


def front_page(result: SearchResult, says: str, name: str, num_devices: int, svg: str) -> str:
    """Return the page of a front: the drawing, a table of points with explanations, and every deployment."""
    rows = [
        [str(number), f"{point.period_ms:g}", "" if point.fps is None else f"{point.fps:.2f}", f"{point.latency_ms:g}",
         str(point.num_devices), str(point.proof),
         "\n".join([point.period_because, point.latency_because, point.one_more_device, *point.notes])]
        for number, point in enumerate(result.points, 1)
    ]  # fmt: skip
    head = ["point", "period, ms", "elements a second", "latency, ms", "devices", "proof", "what binds it"]
    parts = [
        f"<p class=says>{escape(says)}. Proof of the whole front: {escape(str(result.proof))}.</p>",
        f"<figure>{svg}</figure>",
        _table(head, rows, (0, 1, 2, 3, 4)),
        *[f"<p>{escape(note)}</p>" for note in result.notes],
    ]
    if result.left_out:
        items = "".join(f"<li>{escape(str(one))}</li>" for one in result.left_out)
        parts.append(f"<h2>Left out</h2><p>Too little gain of their own:</p><ul>{items}</ul>")
    parts.append("<h2>Deployments</h2>")
    parts += [_deployment(number, point) for number, point in enumerate(result.points, 1)]
    return page(f"{name}: deployments on up to {num_devices} devices", parts)


def gantt_page(point: Point, number: int, says: str, name: str, schedule: Schedule, svg: str) -> str:
    """Return the page of a Gantt chart: the drawing, what binds the point, and its transfers."""
    parts = [
        f"<p class=says>{escape(says)}. Proof: {escape(str(point.proof))}.</p>",
        f"<figure>{svg}</figure>",
        f"<p>{escape(point.period_because)}.</p><p>{escape(point.latency_because)}.</p>",
    ]
    rows = [
        [one.source, one.target, one.cause, str(one.batch), f"{one.from_device} to {one.to_device}",
         f"{one.begin_ms:g}", f"{one.end_ms:g}"]
        for one in schedule.transfers
    ]  # fmt: skip
    if rows:
        head = ["from", "to", "edge or state", "batch", "devices", "begin, ms", "end, ms"]
        parts += ["<h2>Transfers</h2>", _table(head, rows, (3, 4, 5, 6))]
    parts += ["<h2>Deployment</h2>", _deployment(number, point)]
    return page(f"{name}: point {number}, the steady state", parts)


def page(title: str, parts: Iterable[str]) -> str:
    """Return a whole page of HTML around parts of one."""
    body = "\n".join(parts)
    return (
        f'<!doctype html>\n<html lang="en">\n<head><meta charset="utf-8"><title>{escape(title)}</title>\n'
        f"<style>\n{STYLE}\n</style></head>\n<body>\n<h1>{escape(title)}</h1>\n{body}\n</body>\n</html>\n"
    )


def _table(head: Sequence[str], rows: Sequence[Sequence[str]], numbers: Sequence[int]) -> str:
    def cells(tag: str, values: Sequence[str]) -> str:
        return "".join(
            f"<{tag}{' class=number' if place in numbers else ''}>{'<br>'.join(escape(value).splitlines())}</{tag}>"
            for place, value in enumerate(values)
        )

    body = "\n".join(f"<tr>{cells('td', row)}</tr>" for row in rows)
    return f"<table>\n<tr>{cells('th', head)}</tr>\n{body}\n</table>"


def _deployment(number: int, point: Point) -> str:
    return (
        f"<details><summary>Point {number}: {point.period_ms:g} ms period, {point.latency_ms:g} ms latency</summary>"
        f"<pre>{escape(as_yaml(point.deployment), quote=False)}</pre></details>"
    )


def as_yaml(document: dict[str, Any]) -> str:
    """Return a deployment document as text."""
    import yaml

    return yaml.safe_dump(document, sort_keys=False, default_flow_style=None, allow_unicode=True, width=110)
