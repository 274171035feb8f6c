"""Driver libraries that are built by the tests and driven through the vendors' own bindings."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent
BINDINGS = Path(sys.prefix) / "bindings"
"""Where `make` puts AMD's binding: apart from the environment, for the tests of AMD hosts alone (``PYTHONPATH``)."""
UUID = "GPU-00000000-0000-0000-0000-{:012d}".format
INSTANCE = "MIG-00000000-0000-0000-0000-{:012d}".format


def compile_library(source: Path, library: Path, *flags: str) -> None:
    library.parent.mkdir(exist_ok=True)
    command = ["gcc", "-shared", "-fPIC", "-Wall", "-Werror", *flags, "-o", str(library), str(source)]
    subprocess.run(command, check=True)


def build_driver(folder: Path, *flags: str) -> Path:
    """Build NVIDIA's management library and its CUDA driver into a folder for ``LD_LIBRARY_PATH``."""
    compile_library(FOLDER / "fake_nvml.c", folder / "libnvidia-ml.so.1", *flags)
    compile_library(FOLDER / "fake_cuda.c", folder / "libcuda.so.1")
    return folder


def build_amd_driver(folder: Path, *, without: str = "") -> Path:
    """Build AMD's management library with every function that its binding looks up, but for one."""
    wrapper = (BINDINGS / "amdsmi" / "amdsmi_wrapper.py").read_text()
    wanted = set(re.findall(r"_libraries\['libamd_smi\.so'\]\.(\w+)", wrapper))
    source = (FOLDER / "fake_amd_smi.c").read_text()
    own = set(re.findall(r"^int (amdsmi_\w+)\(", source, re.MULTILINE))
    assert own <= wanted, f"the binding does not know {sorted(own - wanted)}"
    stubs = "".join(f"int {name}(void) {{ return 2; }}\n" for name in sorted(wanted - own - {without}))
    folder.mkdir(exist_ok=True)
    whole = folder / "whole.c"
    whole.write_text(source + stubs)
    compile_library(whole, folder / "libamd_smi.so")
    return folder


def ask(driver: Path, source: str, **environment: str) -> Any:
    """Run `source`, which sets `answer`, in a process that sees the driver; return the answer."""
    script = f"import json, os\nfrom flashrt import gpu\n{source}\nprint(json.dumps(answer))"
    completed = subprocess.run(
        [sys.executable, "-P", "-c", script],
        env={**os.environ, "LD_LIBRARY_PATH": str(driver), **environment},
        capture_output=True,
        text=True,
        check=False,
        timeout=240,
    )
    assert completed.returncode == 0, completed.stderr
    return json.loads(completed.stdout)
