"""Planners for many users: `elastic` (DDiT) for diffusion video step by step."""
