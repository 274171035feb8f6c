"""Program documents: the grammar, its checks, flattening, state hazards, rendering and the interpreter.

The door to this folder: `build_file` or `build` for a checked program, `interpret` to run it.
"""

from flashrt.ir.build import (
    BuiltProgram,
    build,
    build_file,
    find_operations,
    matches,
    parse_program,
    program_id,
    require_operations,
)
from flashrt.ir.checks import check_program
from flashrt.ir.documents import content_hash, dump, read_document, validate
from flashrt.ir.execute import OperationRunner
from flashrt.ir.flatten import INPUT, OUTPUT, Dataflow, FlatProgram, Operation, flatten
from flashrt.ir.hazards import Dependency, find_dependencies, find_races, reduce_dependencies, state_accesses
from flashrt.ir.interpret import Interpreter, interpret
from flashrt.ir.model import Edge, Frozen, Graph, Initial, Node, Port, Program, Repeat, StateDeclaration
from flashrt.ir.ops import Context, load_function, load_module, load_ops
from flashrt.ir.render import summarize, to_mermaid, to_svg

__all__ = [
    "INPUT",
    "OUTPUT",
    "BuiltProgram",
    "Context",
    "Dataflow",
    "Dependency",
    "Edge",
    "FlatProgram",
    "Frozen",
    "Graph",
    "Initial",
    "Interpreter",
    "Node",
    "Operation",
    "OperationRunner",
    "Port",
    "Program",
    "Repeat",
    "StateDeclaration",
    "build",
    "build_file",
    "check_program",
    "content_hash",
    "dump",
    "find_dependencies",
    "find_operations",
    "find_races",
    "flatten",
    "interpret",
    "load_function",
    "load_module",
    "load_ops",
    "matches",
    "parse_program",
    "program_id",
    "read_document",
    "reduce_dependencies",
    "require_operations",
    "state_accesses",
    "summarize",
    "to_mermaid",
    "to_svg",
    "validate",
]
