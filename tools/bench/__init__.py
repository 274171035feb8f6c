"""Systems under test, driven through their own buffers: equality, benchmarks and profiles.

The door to this folder: `resolve_system`, `check_equivalence`, `run_benchmark`, `compare_systems`.
"""

from flashrt.bench.check import CheckSettings, check_equivalence
from flashrt.bench.equality import Tolerance
from flashrt.bench.interleave import compare_systems
from flashrt.bench.io import InputClosed, SystemIO
from flashrt.bench.record import read_inputs, read_recording, write_recording
from flashrt.bench.run import run_benchmark
from flashrt.bench.settings import SCENARIOS, RunSettings
from flashrt.bench.systems import System, resolve_system

__all__ = [
    "SCENARIOS",
    "CheckSettings",
    "InputClosed",
    "RunSettings",
    "System",
    "SystemIO",
    "Tolerance",
    "check_equivalence",
    "compare_systems",
    "read_inputs",
    "read_recording",
    "resolve_system",
    "run_benchmark",
    "write_recording",
]
