"""A program for people: summary text, Mermaid source and SVG."""

from __future__ import annotations

import re
from collections import defaultdict
from html import escape

from flashrt.ir.building import BuiltProgram
from flashrt.ir.graphs import node_of, topological_nodes
from flashrt.ir.hazards import find_dependencies, reduce_dependencies
from flashrt.ir.model import Edge, Graph, Node, Program


def summarize(built: BuiltProgram) -> str:
    """Return the program as indented text: graphs, operations, state and dependencies."""
    program, flat = built.program, built.flat
    lines = [
        f"program {program.name}  {built.id}",
        f"ops {program.ops or '(none)'}, entry {program.entry}",
        "",
    ]
    for name, graph in program.graphs.items():
        times = f" x{graph.repeat.times}" if graph.repeat else ""
        carry = ", ".join(f"{a} -> next {b}" for a, b in graph.repeat.carry.items()) if graph.repeat else ""
        lines.append(f"graph {name}{times}" + (f"  carries {carry}" if carry else ""))
        for node_name in topological_nodes(graph):
            lines.append(f"  {node_name}: {_describe_node(graph.nodes[node_name])}")
        lines += [f"  {edge.label}  {_describe_mode(edge)}" for edge in graph.edges]
        lines.append("")
    lines.append(f"operations of a batch ({len(flat.operations)})")
    for operation in flat.operations:
        touched = ", ".join(f"{state} {how}" for state, how in operation.accesses.items())
        degrees = "/".join(map(str, operation.degrees))
        lines.append(f"  {operation.path}  degrees {degrees}" + (f"  state: {touched}" if touched else ""))
    lines += ["", "dependencies (implied ones left out)"]
    for edge in sorted(reduce_dependencies(find_dependencies(flat))):
        cause = f"{edge.kind} {edge.state}" if edge.state else edge.kind
        lines.append(f"  {edge.source} -> {edge.target}  lambda {edge.lam}  {cause}")
    for finding in built.findings:
        lines.append(f"{finding.severity}: {finding}")
    return "\n".join(lines) + "\n"


def _describe_node(node: Node) -> str:
    parts = [f"{node.kind} {node.op or node.graph or node.opaque}"]
    for key in ("reads", "writes"):
        if getattr(node, key):
            parts.append(f"{key} {', '.join(getattr(node, key))}")
    if node.kind == "op" and node.degrees != (1,):
        parts.append(f"degrees {'/'.join(map(str, node.degrees))}")
    if node.devices:
        parts.append(f"{node.devices} devices")
    if node.event_driven:
        parts.append("event-driven")
    return "; ".join(parts)


def _describe_mode(edge: Edge) -> str:
    if edge.mode == "blocking":
        return "blocking"
    ahead = f", {edge.lookahead} ahead" if edge.lookahead else ""
    return f"streaming in {edge.chunks}{ahead}"


def _identifier(text: str) -> str:
    return re.sub(r"\W", "_", text)


def to_mermaid(program: Program) -> str:
    """Return Mermaid flowchart source: one subgraph per graph; thick arrows stream, dotted lines are state."""
    lines = ["flowchart LR"]
    for name, graph in program.graphs.items():
        times = f" ×{graph.repeat.times}" if graph.repeat else ""
        prefix = _identifier(name)
        lines.append(f'  subgraph {prefix}["{name}{times}"]')
        for port in graph.inputs:
            lines.append(f'    {prefix}_in_{_identifier(port)}(["{port}"])')
        for node_name, node in graph.nodes.items():
            label = f"{node_name}<br/>{node.kind} {node.op or node.graph or node.opaque}"
            lines.append(f'    {prefix}_{_identifier(node_name)}["{label}"]')
        for port in graph.outputs:
            lines.append(f'    {prefix}_out_{_identifier(port)}(["{port}"])')
        for edge in graph.edges:
            arrow = "-->" if edge.mode == "blocking" else "==>"
            text = f'|"{edge.chunks} chunks"|' if edge.mode == "streaming" else ""
            source = _mermaid_end(prefix, edge.source, "in")
            target = _mermaid_end(prefix, edge.target, "out")
            lines.append(f"    {source} {arrow}{text} {target}")
        if graph.repeat:
            for output, port in graph.repeat.carry.items():
                lines.append(
                    f'    {prefix}_out_{_identifier(output)} -. "next iteration" .-> {prefix}_in_{_identifier(port)}'
                )
        lines.append("  end")
        for node_name, node in graph.nodes.items():
            for state in dict.fromkeys((*node.reads, *node.writes)):
                how = ("r" if state in node.reads else "") + ("w" if state in node.writes else "")
                lines.append(
                    f'  {prefix}_{_identifier(node_name)} -. "{how}" .- state_{_identifier(state)}[("{state}")]'
                )
            if node.graph:
                lines.append(f"  {prefix}_{_identifier(node_name)} -. contains .- {_identifier(node.graph)}")
    return "\n".join(lines) + "\n"


def _mermaid_end(prefix: str, end: str, side: str) -> str:
    node = node_of(end)
    return f"{prefix}_{_identifier(node)}" if node else f"{prefix}_{side}_{_identifier(end)}"


BOX_WIDTH, BOX_HEIGHT, GAP_X, GAP_Y, MARGIN = 150, 46, 90, 26, 24


def to_svg(program: Program, *, embedded: bool = False) -> str:
    """Return a drawing of every graph, one below the other, nodes in columns by depth.

    Parameters
    ----------
    embedded
        Without colours and background of its own, for a page whose style has those of its classes below ``.program``.
    """
    parts: list[str] = []
    top, width = MARGIN, 0
    for name, graph in program.graphs.items():
        body, graph_width, graph_height = _draw_graph(name, graph, top)
        parts += body
        top += graph_height + MARGIN
        width = max(width, graph_width)
    style = (
        "text{font:13px system-ui,sans-serif;fill:#1b1f24}.small{font-size:11px;fill:#57606a}"
        ".op{fill:#ddf4ff;stroke:#0969da}.graph{fill:#fff8c5;stroke:#9a6700}.opaque{fill:#eaeef2;stroke:#57606a}"
        ".port{fill:#fff;stroke:#57606a}.frame{fill:none;stroke:#d0d7de}.blocking{stroke:#57606a;fill:none}"
        ".streaming{stroke:#1a7f37;stroke-width:2.5;fill:none}.carry{stroke:#bf3989;stroke-dasharray:5 4;fill:none}"
    )
    marker = (
        '<marker id="tip" viewBox="0 0 8 8" refX="8" refY="4" markerWidth="9" markerHeight="9" '
        'markerUnits="userSpaceOnUse" orient="auto">'
        '<path d="M0 0 L8 4 L0 8 z" fill="#57606a"/></marker>'
    )
    title = f"<title>Program {escape(program.name)}</title>"
    if embedded:
        whole = f"{width + 2 * MARGIN} {top}"
        return (
            f'<svg class="program" viewBox="0 0 {whole}" width="{width + 2 * MARGIN}" height="{top}" role="img">{title}'
            f"<defs>{marker}</defs>{''.join(parts)}</svg>"
        )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width + 2 * MARGIN}" height="{top}" role="img">{title}'
        f'<style>{style}</style><defs>{marker}</defs><rect width="100%" height="100%" fill="#fff"/>'
        + "".join(parts)
        + "</svg>\n"
    )


def _draw_graph(name: str, graph: Graph, top: int) -> tuple[list[str], int, int]:
    depth: dict[str, int] = dict.fromkeys(graph.nodes, 1)
    for name_before in topological_nodes(graph):
        for edge in graph.edges:
            target = node_of(edge.target)
            if node_of(edge.source) == name_before and target in depth and target is not None:
                depth[target] = max(depth[target], depth[name_before] + 1)
    last = max(depth.values(), default=0) + 1
    columns: dict[int, list[tuple[str, str, str, str]]] = defaultdict(list)
    for port in graph.inputs:
        columns[0].append((f"in:{port}", port, "", "port"))
    for node_name, node in graph.nodes.items():
        touched = dict.fromkeys((*node.reads, *node.writes))
        detail = f"{node.kind} {node.op or node.graph or node.opaque}" + (f" · {', '.join(touched)}" if touched else "")
        columns[depth[node_name]].append((node_name, node_name, detail, node.kind))
    for port in graph.outputs:
        columns[last].append((f"out:{port}", port, "", "port"))
    rows = max(len(column) for column in columns.values())
    width = (last + 1) * BOX_WIDTH + last * GAP_X + 2 * MARGIN
    height = rows * (BOX_HEIGHT + GAP_Y) + 2 * MARGIN + 10
    times = f" ×{graph.repeat.times}" if graph.repeat else ""
    parts = [
        f'<rect class="frame" x="{MARGIN}" y="{top}" width="{width}" height="{height}" rx="8"/>',
        f'<text x="{MARGIN + 12}" y="{top + 20}">{escape(name)}{times}</text>',
    ]
    centre: dict[str, tuple[int, int]] = {}
    for column, boxes in columns.items():
        offset = (rows - len(boxes)) * (BOX_HEIGHT + GAP_Y) // 2
        for row, (key, label, detail, kind) in enumerate(boxes):
            x = 2 * MARGIN + column * (BOX_WIDTH + GAP_X)
            y = top + MARGIN + 10 + offset + row * (BOX_HEIGHT + GAP_Y)
            centre[key] = (x, y + BOX_HEIGHT // 2)
            radius = 22 if kind == "port" else 6
            short = detail if len(detail) <= 26 else detail[:25] + "…"
            parts.append(
                f'<g><title>{escape(detail or label)}</title><rect class="{kind}" x="{x}" y="{y}" width="{BOX_WIDTH}" '
                f'height="{BOX_HEIGHT}" rx="{radius}"/><text x="{x + 10}" y="{y + (19 if detail else 28)}">'
                f'{escape(label)}</text><text class="small" x="{x + 10}" y="{y + 36}">{escape(short)}</text></g>'
            )
    for edge in graph.edges:
        source = node_of(edge.source) or f"in:{edge.source}"
        target = node_of(edge.target) or f"out:{edge.target}"
        (x1, y1), (x2, y2) = centre[source], centre[target]
        x1 += BOX_WIDTH
        middle = (x1 + x2) // 2
        parts.append(
            f'<path class="{edge.mode}" marker-end="url(#tip)" d="M{x1} {y1} C{middle} {y1} {middle} {y2} {x2} {y2}">'
            f"<title>{escape(edge.label)}: {_describe_mode(edge)}</title></path>"
        )
        if edge.mode == "streaming":
            parts.append(f'<text class="small" x="{middle - 26}" y="{(y1 + y2) // 2 - 6}">{edge.chunks} chunks</text>')
    for output, port in (graph.repeat.carry if graph.repeat else {}).items():
        (x1, y1), (x2, y2) = centre[f"out:{output}"], centre[f"in:{port}"]
        bottom = top + height - 10
        parts.append(
            f'<path class="carry" d="M{x1 + 40} {y1 + BOX_HEIGHT // 2} C{x1 + 40} {bottom} {x2 + 90} {bottom} '
            f'{x2 + 90} {y2 + BOX_HEIGHT // 2}"><title>carried to the next iteration</title></path>'
        )
    return parts, width, height
