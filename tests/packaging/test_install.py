"""The package as users have it: a wheel, or an editable checkout, beside folders that bear its names."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from flashrt import __version__
from tests.packaging.test_sources import FOLDERS, ROOT

DATA_SUFFIXES = {".md", ".yaml", ".json", ".svg", ".html", ".css", ".js", ".pyi", ".typed"}


def run(*line: str | Path, cwd: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        list(map(str, line)), cwd=cwd, env={**os.environ, **environment}, capture_output=True, text=True, timeout=600,
        stdin=subprocess.DEVNULL, check=False,
    )  # fmt: skip


def ships(path: Path) -> bool:
    return path.is_file() and (path.suffix == ".py" or path.suffix in DATA_SUFFIXES) and "__pycache__" not in path.parts


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel built offline from a copy, so that nothing is left in the checkout."""
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"
    source.mkdir()
    for name in FOLDERS:
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source / name)
    done = run(
        sys.executable, "-m", "pip", "--disable-pip-version-check", "wheel", "--no-index", "--no-deps",
        "--no-build-isolation", "--wheel-dir", folder, source, cwd=folder,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    (built,) = folder.glob("*.whl")
    return built


@pytest.fixture
def hostile(toy: Path) -> Path:
    """The toy application in a folder with a `tools`, a `flashrt` and more of its own that must never be imported."""
    for name in ("flashrt.py", "mcp.py", "json.py", "tools/__init__.py", "apps/__init__.py", "mcp_server/__init__.py"):
        (toy / name).parent.mkdir(exist_ok=True)
        (toy / name).write_text(f"raise SystemExit('imported the hostile {name}')\n")
    return toy


def test_the_wheel_holds_every_source_and_document(wheel: Path) -> None:
    expected = {
        f"{package.replace('.', '/')}/{path.relative_to(ROOT / folder)}"
        for folder, package in FOLDERS.items()
        for path in (ROOT / folder).rglob("*")
        if ships(path)
    }
    names = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    assert names == expected
    assert {
        "flashrt/__init__.py", "flashrt/py.typed", "flashrt/ir/__init__.py", "flashrt/mcp_server/server.py",
        "flashrt/apps/worldplay/program.yaml", "flashrt/apps/worldplay/README.md",
        "flashrt/apps/worldplay/config/tiny.json", "flashrt/skills/flashrt/SKILL.md",
    } <= names  # fmt: skip
    top = {name.partition("/")[0] for name in names}
    assert top == {"flashrt"}


def test_the_wheel_declares_command_license_and_dependencies(wheel: Path) -> None:
    archive = zipfile.ZipFile(wheel)
    info = f"flashrt-{__version__}.dist-info"
    assert "flashrt = flashrt.mcp_server.cli:main" in archive.read(f"{info}/entry_points.txt").decode()
    metadata = archive.read(f"{info}/METADATA").decode()
    assert "License-Expression: Apache-2.0" in metadata
    assert "Requires-Dist: mcp<3,>=2.3" in metadata
    assert f"{info}/licenses/LICENSE" in archive.namelist()


def test_an_installed_wheel_works_beside_hostile_folders(wheel: Path, hostile: Path, tmp_path: Path) -> None:
    target = tmp_path / "site"
    done = run(
        sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "--quiet", "--no-index", "--no-deps",
        "--target", target, wheel, cwd=tmp_path,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    # A path ahead of the editable checkout's, as it is on a machine without one.
    where = run(sys.executable, "-P", "-c", "import flashrt; print(flashrt.__file__)", cwd=hostile,
                PYTHONPATH=str(target))  # fmt: skip
    assert Path(where.stdout.strip()).is_relative_to(target), where.stderr
    works([target / "bin" / "flashrt"], hostile, PYTHONPATH=str(target))


def test_an_editable_checkout_works_beside_hostile_folders(hostile: Path) -> None:
    script = Path(sys.executable).with_name("flashrt")
    assert script.is_file(), "the tests want the package installed, as `make test` does"
    works([script], hostile)


def works(flashrt: list[str | Path], folder: Path, **environment: str) -> None:
    """Check that a command works in `folder`, with the processes that it starts."""
    version = run(*flashrt, "--version", cwd=folder, **environment)
    assert version.stdout.split() == ["flashrt", __version__], version.stderr
    built = run(*flashrt, "call", "ir_build", '{"document": "program.yaml"}', cwd=folder, **environment)
    assert built.returncode == 0, built.stderr
    program = json.loads(built.stdout)["program"]
    arguments = {"baseline": "reference.py:serve", "candidate": program, "inputs": "inputs.py:batches", "count": 2}
    checked = run(*flashrt, "call", "equivalence_check", json.dumps(arguments), cwd=folder, **environment)
    assert checked.returncode == 0, checked.stdout + checked.stderr
    assert json.loads(checked.stdout)["equivalent"] is True
    for done in (built, checked):
        assert "hostile" not in done.stderr
