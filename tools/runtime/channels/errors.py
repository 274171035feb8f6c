"""What can go wrong on a channel."""

from __future__ import annotations


class ChannelClosedError(RuntimeError):
    """Waiting was given up: the deployment ends, or is cancelled."""


class InPlaceWriteError(RuntimeError):
    """An operation wrote in place to a value that it received; others may be reading the same memory."""
