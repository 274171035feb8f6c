"""What can go wrong on a channel."""

from __future__ import annotations


class ChannelClosedError(RuntimeError):
    """Waiting was given up: the deployment ends, or is cancelled."""
