"""Planners for many users: `serving` (Cornfigurator) for mixed requests."""
