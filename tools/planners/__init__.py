"""Planners for many users: `serving` (Cornfigurator) for mixed requests, `elastic` (DDiT) for video diffusion."""
