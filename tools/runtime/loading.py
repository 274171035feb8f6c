"""Loading libraries and weights with the garbage collector out of the way."""

from __future__ import annotations

import gc

LOADING = (50_000, 20, 20)
"""Collections while loading: rare, not none, since a loader may hold weights in a cycle."""


class Loading:
    """The time from a process's start until it is ready to serve.

    Importing makes millions of objects that stay, and the collector looks at them again and again: a fifth of the
    time that diffusers and transformers need.
    """

    def __init__(self) -> None:
        self._usual = gc.get_threshold()
        gc.set_threshold(*LOADING)

    def end(self) -> None:
        """Collect as usual from now on; settings that other code made meanwhile stay."""
        if gc.get_threshold() == LOADING:
            gc.set_threshold(*self._usual)
