"""Rules about ports: element types that an array or tensor can have, and axes by length or by name."""

from __future__ import annotations

import re
from collections.abc import Iterator

from flashrt.errors import Finding, nearest
from flashrt.ir.documents import shown
from flashrt.ir.model import Port, Program
from flashrt.ir.rules_nodes import AGAIN, each_graph

_SIZED = {
    "int": (1, 2, 3, 4, 5, 6, 7, 8, 16, 32, 64),
    "uint": (1, 2, 3, 4, 5, 6, 7, 8, 16, 32, 64),
    "float": (16, 32, 64, 96, 128),
    "complex": (32, 64, 128, 192, 256),
    "bits": (8, 16),
}
_VARIANTS = {
    "bits": ("1x8", "2x4", "4x2"),
    "float8_": ("e3m4", "e4m3", "e4m3b11fnuz", "e4m3fn", "e4m3fnuz", "e5m2", "e5m2fnuz", "e8m0fnu"),
    "float6_": ("e2m3fn", "e3m2fn"),
    "float4_": ("e2m1fn", "e2m1fn_x2"),
    "q": ("int8", "int32", "uint8", "uint4x2", "uint2x4"),
}
DTYPES = (
    "bool", "bfloat16", "object", "datetime64", "timedelta64", "StringDType()",
    *(f"{name}{size}" for name, sizes in _SIZED.items() for size in sizes),
    *(f"{name}{variant}" for name, variants in _VARIANTS.items() for variant in variants),
    "str", "bytes", "int", "float", "complex", "list", "tuple", "dict",
)  # fmt: skip
"""Names of element types: NumPy's, torch's, and Python's own for values that are no arrays."""
_ALIASES = {"half": "float16", "single": "float32", "double": "float64", "short": "int16", "long": "int64",
            "str_": "str", "bytes_": "bytes", "bool_": "bool", "string": "str", "boolean": "bool"}  # fmt: skip
# What NumPy adds to a name: byte order and length (<U5, |S3, >i4), a unit, and records, which it writes as lists.
_SPELLED = re.compile(r"[<>|=][A-Za-z]\d*(\[.+\])?|(datetime64|timedelta64)\[.+\]|[\[({].*", re.DOTALL)
_AXIS = re.compile(r"[^\W\d][\w-]*")


def check_ports(program: Program) -> Iterator[Finding]:
    """A port's dtype is one that a value can have; each axis is a length or a name."""
    for place, port in _ports(program):
        dtype = port.dtype
        if dtype is not None and dtype not in DTYPES and not _SPELLED.fullmatch(dtype):
            yield Finding(
                f"{place}, key 'dtype'", "an element type as NumPy or torch spells it", shown(dtype),
                f"correct it, or leave it out; {AGAIN}", rule="unknown-dtype",
                nearest=_ALIASES.get(dtype.lower()) or nearest(dtype[:40].lower(), DTYPES),
            )  # fmt: skip
        for axis, length in enumerate(port.shape or ()):
            if isinstance(length, int) and length < 0:
                yield Finding(
                    f"{place}, key 'shape', axis {axis}", "a length of 0 or more, or a name", str(length),
                    f"give a length that may vary a name, such as 'rows'; {AGAIN}", rule="bad-axis",
                )  # fmt: skip
            elif isinstance(length, str) and not _AXIS.fullmatch(length):
                yield Finding(
                    f"{place}, key 'shape', axis {axis}",
                    "a length, or a name that begins with a letter and has only letters, digits, _ and -",
                    shown(length), f"rename it, or write the length without quotes; {AGAIN}", rule="bad-axis",
                )  # fmt: skip


def _ports(program: Program) -> Iterator[tuple[str, Port]]:
    for _, graph, where in each_graph(program):
        for owner, place in (
            (graph, where),
            *((node, f"{where}, node '{name}'") for name, node in graph.nodes.items()),
        ):
            for side in ("inputs", "outputs"):
                for name, port in (getattr(owner, side) or {}).items():
                    yield f"{place}, {side[:-1]} '{name}'", port
