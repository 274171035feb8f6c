"""Auditing a program: does each node do what the document says, and nothing else?

The door to this folder: `audit_program`. It starts a process (`host`) that loads the ops and never runs them itself:
everything runs in forks of it. One fork runs the program observed (`record`); the others repeat recorded calls alone
(`replay`), on whole values and changed chunks (`streams`), and in other orders (`orders`). What differs was kept
outside the declared states, and `places` finds where.
"""

from flashrt.bench.audit.findings import KINDS
from flashrt.bench.audit.run import DEFAULT_BATCHES, MIN_BATCHES, audit_program

__all__ = ["DEFAULT_BATCHES", "KINDS", "MIN_BATCHES", "audit_program"]
