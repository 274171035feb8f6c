"""Systems under test, driven through their own buffers: equality, benchmarks and profiles.

The door to this folder: `resolve_system`, `check_equivalence`, `run_benchmark`, `compare_systems`.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
