"""Loading user code: an application's ops and any other function that a document or reference names."""

from __future__ import annotations

import importlib.util
import sys
import traceback
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from flashrt.errors import InputError, input_error, is_own_frame, listed
from flashrt.ir.hashing import content_hash

if TYPE_CHECKING:
    from flashrt.ir.flattening import FlatProgram

Call = Callable[[Mapping[str, Any], MutableMapping[str, Any]], Any]


def _no_loan(port: str, shape: Sequence[int], dtype: Any) -> None:
    """Lend nothing: the value does not leave the process."""


@dataclass(frozen=True)
class Context:
    """What ``load(context)`` is told about where its operations will run."""

    device: str = "cpu"
    """Device as torch spells it."""
    config: Mapping[str, Any] = field(default_factory=dict)
    """The application's own options."""
    operations: frozenset[str] | None = None
    """Names of the ops that will be called here, or None for all: load no other weights."""
    rank: int = 0
    degree: int = 1
    group: Any = None
    """The process group of a sequence-parallel operation, or None."""
    seed: int = 0
    tiles: Mapping[str, int] = field(default_factory=dict)
    """Op -> into how many tiles the ranks of its group cut its value in space; absent: it is not cut."""
    loan: Callable[[str, Sequence[int], Any], Any | None] = _no_loan

    def empty(self, port: str, shape: Sequence[int], dtype: Any) -> Any:
        """Return an uninitialised tensor to write an output of the running operation into.

        Where the output goes to another process, this is the memory that its reader sees: returning the tensor then
        copies nothing. Once returned it may be read, not written to.

        Parameters
        ----------
        port
            Output port of the operation.
        shape, dtype
            As ``torch.empty`` takes them.
        """
        import torch

        loaned = self.loan(port, shape, dtype) if self.device == "cpu" else None
        return torch.empty(tuple(shape), dtype=dtype, device=self.device) if loaned is None else loaned


def load_module(path: Path) -> ModuleType:
    """Load a Python file under a private name, with its folder importable for its siblings.

    Raises
    ------
    InputError
        The file is absent or fails while it is imported; carries the last lines of the traceback.
    """
    if not path.is_file():
        raise input_error(f"file '{path.name}'", "a Python file", "no such file", "correct the path and call again")
    name = f"_flashrt_user_{path.stem}_{content_hash(str(path.resolve()))}"
    folder = str(path.resolve().parent)
    if folder not in sys.path:
        sys.path.insert(0, folder)
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise input_error(f"file '{path.name}'", "a Python file", path.suffix or "no suffix", "rename it to .py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except InputError:
        raise
    except Exception as error:
        raise user_error(
            f"file '{path.name}'", "code that imports", error, "correct the file and call again"
        ) from error
    return module


def load_function(path: Path, name: str) -> Callable[..., Any]:
    """Return a function of a Python file; errors name the functions that exist."""
    module = load_module(path)
    function = getattr(module, name, None)
    if not callable(function):
        names = [key for key, value in vars(module).items() if callable(value) and not key.startswith("_")]
        raise input_error(
            f"file '{path.name}'", f"a function; there are {listed(names)}", f"'{name}'",
            "correct the reference and call again", rule="no-such-function", valid=names, name=name,
        )  # fmt: skip
    return function  # type: ignore[no-any-return]


def user_error(where: str, expected: str, error: BaseException, fix: str) -> InputError:
    """Describe an exception of user code with the place it came from."""
    frames = [f for f in traceback.extract_tb(error.__traceback__) if not is_own_frame(f.filename)]
    place = f" at {Path(frames[-1].filename).name}:{frames[-1].lineno}" if frames else ""
    text = " ".join(str(error).split())[:500]
    return input_error(where, expected, f"{type(error).__name__}: {text}{place}", fix, rule="user-code")


def load_ops(flat: FlatProgram, folder: Path, context: Context) -> dict[str, Call]:
    """Load the program's ops mapping and check that every op that will be called is in it.

    Raises
    ------
    InputError
        No ops key, the file or function is missing, it raises, it returns no mapping, or an op is missing.
    """
    program = flat.program
    if not program.ops or ":" not in program.ops:
        raise input_error(
            f"program '{program.name}', key 'ops'", "file.py:function", repr(program.ops),
            "add it and call ir_build again", rule="no-ops",
        )  # fmt: skip
    file, _, function = program.ops.partition(":")
    load = load_function(folder / file, function)
    try:
        ops = load(context)
    except InputError:
        raise
    except Exception as error:
        raise user_error(f"ops '{program.ops}'", "a mapping of op names", error, "correct it and call again") from error
    if not isinstance(ops, Mapping):
        raise input_error(
            f"ops '{program.ops}'", "a mapping op name -> callable", type(ops).__name__, "return a dict",
            rule="ops-not-a-mapping",
        )  # fmt: skip
    wanted = {operation.op for operation in flat.operations} | {
        prologue.op for operation in flat.operations for prologue in operation.prologues
    }
    if context.operations is not None:
        wanted &= context.operations
    missing = sorted(name for name in wanted if not callable(ops.get(name)))
    if missing:
        raise input_error(
            f"ops '{program.ops}'", f"callables for {listed(sorted(wanted))}", f"none for {listed(missing)}",
            "return them from load(context), or correct the node's 'op'", rule="missing-op", valid=list(ops),
            name=missing[0],
        )  # fmt: skip
    return dict(ops)
