# What `__init__.py` gives, and where it lies: read when the package is imported, loaded when it is used.

from .building import (
    BuiltProgram,
    build,
    build_file,
    find_operations,
    matches,
    parse_program,
    program_id,
    require_operations,
)
from .checks import check_program
from .documents import dump, read_document, validate
from .execute import OperationRunner
from .flattening import INPUT, OUTPUT, Dataflow, FlatProgram, Operation, flatten
from .hashing import content_hash
from .hazards import Dependency, find_dependencies, find_races, reduce_dependencies, state_accesses
from .interpreter import Interpreter, interpret
from .model import Edge, Frozen, Graph, Initial, Node, Port, Program, Repeat, StateDeclaration
from .ops import Context, load_function, load_module, load_ops
from .render import summarize, to_mermaid, to_svg

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
