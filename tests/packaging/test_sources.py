"""Rules that hold for every source file, read from the syntax trees and the text."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
# Each may import what stands left of it.
ORDER = ("errors", "clock", "ir", "gpu", "analysis", "runtime", "bench", "variants", "planners", "mcp_server")
FOLDERS = {"tools": "flashrt", "mcp_server": "flashrt.mcp_server", "apps": "flashrt.apps", "skills": "flashrt.skills"}
OTHER_FOLDERS = ("tests", "benchmarks", "scripts", ".ci")
TORCH_FREE = ("flashrt.mcp_server", "flashrt.ir", "flashrt.gpu", "flashrt.analysis", "flashrt.variants")
MAX_LINES = 600
BINARY = {".png", ".bin", ".npz", ".frec"}


def python_files(*folders: str) -> list[Path]:
    found = [path for folder in folders for path in sorted((ROOT / folder).rglob("*.py"))]
    assert found
    return found


def text_files() -> list[Path]:
    """Return what the repository ships: everything but caches and what is built."""
    folders = [path for name in (*FOLDERS, *OTHER_FOLDERS) for path in sorted((ROOT / name).rglob("*"))]
    top = [
        path for path in sorted(ROOT.iterdir()) if path.suffix in {".md", ".toml", ".txt"} or path.name == "Makefile"
    ]
    return [
        path for path in (*top, *folders)
        if path.is_file() and "__pycache__" not in path.parts and not any(p.endswith(".egg-info") for p in path.parts)
    ]  # fmt: skip


def module_of(path: Path) -> str:
    """Return the name that a source file is imported by."""
    folder, *rest = path.relative_to(ROOT).with_suffix("").parts
    parts = [FOLDERS.get(folder, folder), *rest]
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports(path: Path, tree: ast.AST | None = None) -> Iterator[tuple[str, ast.stmt]]:
    """Yield every module that a file imports, wherever in it, by its full name."""
    is_package = path.name == "__init__.py"
    for node in ast.walk(tree or ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                above = module_of(path).split(".")
                above = above[: len(above) - node.level + is_package]
                base = ".".join([*above, *([base] if base else [])])
            yield from ((f"{base}.{alias.name}", node) for alias in node.names)


def part_of(module: str) -> str | None:
    """Return which part of the library a module belongs to; None for the package itself and for others' modules."""
    head, _, rest = module.partition(".")
    part = rest.partition(".")[0]
    return part if head == "flashrt" and part in {*ORDER, "apps", "skills"} else None


def test_every_folder_of_the_library_has_its_place_in_the_order() -> None:
    parts = {path.name for path in (ROOT / "tools").iterdir() if path.is_dir() and (path / "__init__.py").exists()}
    parts |= {path.stem for path in (ROOT / "tools").glob("*.py")} - {"__init__"}
    assert parts <= set(ORDER), f"give {sorted(parts - set(ORDER))} a place in the import order"


def test_parts_import_from_the_left_only() -> None:
    wrong = []
    for path in python_files("tools", "mcp_server"):
        own = part_of(module_of(path))
        for module, node in imports(path):
            part = part_of(module)
            if part is None or part == own:
                continue
            if part not in ORDER or own is None or ORDER.index(part) > ORDER.index(own):
                wrong.append(f"{path.relative_to(ROOT)}:{node.lineno} imports {module}")
    assert not wrong, "\n".join(wrong)


def test_applications_use_the_library_s_errors_only_and_nothing_imports_them() -> None:
    wrong = []
    for path in python_files("apps"):
        for module, _ in imports(path):
            if module.partition(".")[0] == "flashrt" and not module.startswith(("flashrt.errors", "flashrt.apps")):
                wrong.append(f"{path.relative_to(ROOT)} imports {module}")
    for path in python_files("tools", "mcp_server", "skills"):
        wrong += [f"{path.relative_to(ROOT)} imports {name}" for name, _ in imports(path) if "flashrt.apps" in name]
    assert not wrong, "\n".join(wrong)


def test_nothing_is_imported_by_the_name_of_its_folder() -> None:
    wrong = [
        f"{path.relative_to(ROOT)} imports {module}"
        for path in python_files(*FOLDERS, "tests", "benchmarks")
        for module, _ in imports(path)
        if module.partition(".")[0] in FOLDERS
    ]
    assert not wrong, "\n".join(wrong)


def test_torch_is_imported_inside_functions() -> None:
    wrong = []
    for path in python_files("tools", "mcp_server", "benchmarks"):
        tree = ast.parse(path.read_text())
        local = {
            id(inner)
            for node in ast.walk(tree)
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) or is_type_checking(node)
            for inner in ast.walk(node)
        }
        for module, node in imports(path, tree):
            if module.partition(".")[0] == "torch" and id(node) not in local:
                wrong.append(str(path.relative_to(ROOT)))
    assert not wrong, f"import torch inside the function that needs it: {sorted(set(wrong))}"


def is_type_checking(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"


@pytest.mark.parametrize("package", TORCH_FREE)
def test_importing_a_package_with_all_its_modules_loads_no_torch(package: str) -> None:
    script = (
        "import importlib, pkgutil, sys\n"
        f"package = importlib.import_module({package!r})\n"
        "for module in pkgutil.walk_packages(package.__path__, package.__name__ + '.'):\n"
        "    if not module.name.endswith(('__main__', '.amd')): importlib.import_module(module.name)\n"
        "sys.exit('torch' in sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-P", "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr or f"importing {package} imports torch"


def test_no_file_is_over_600_lines() -> None:
    lines = {str(path.relative_to(ROOT)): len(path.read_text().splitlines())
             for path in python_files(*FOLDERS, "tests", "benchmarks")}  # fmt: skip
    assert not {name: number for name, number in lines.items() if number > MAX_LINES}


def lines_with(pattern: re.Pattern[str]) -> list[str]:
    """Return the lines of the repository, this file's apart, in which the pattern is found."""
    return [
        f"{path.relative_to(ROOT)}:{number}: {line.strip()}"
        for path in text_files()
        if path != Path(__file__) and path.suffix not in BINARY
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if pattern.search(line)
    ]


def test_nothing_is_put_off_or_passed_over() -> None:
    pattern = re.compile(
        r"\b(TODO|FIXME|XXX|importorskip|xfail|SkipTest)\b|\braise NotImplementedError|pytest\.skip|mark\.skip"
    )
    assert pattern.search("# TODO: later")
    assert not (found := lines_with(pattern)), "\n".join(found)


def test_no_path_of_a_machine_is_in_the_repository() -> None:
    pattern = re.compile(r"(?<![\w.\-/}])/(?:work|root|tmp/w|home/\w+)(?![\w\-])")
    assert pattern.search("see /work/main")
    assert not (found := lines_with(pattern)), "\n".join(found)
