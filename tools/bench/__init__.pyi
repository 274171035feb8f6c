# What `__init__.py` gives, and where it lies: read when the package is imported, loaded when it is used.

from .check import CheckSettings, check_equivalence
from .equality import Tolerance
from .interleave import compare_systems
from .io import InputClosed, SystemIO
from .record import read_inputs, read_recording, write_recording
from .run import run_benchmark
from .settings import SCENARIOS, RunSettings
from .systems import System, resolve_system

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
