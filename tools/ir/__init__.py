"""Program documents: the grammar, its checks, flattening, state hazards, rendering and the interpreter.

The door to this folder: `build_file` or `build` for a checked program, `interpret` to run it.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
