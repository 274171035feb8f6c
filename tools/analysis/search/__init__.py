"""The proven search over deployments: placement × degree × order, and interleaved batches where asked for.

The door to this folder: `search_deployments` for the points of a request with their proofs, `rank_under_spread` for how
they hold under the profile's measured spread. Importing it is light: NumPy and numba are loaded by the first
search.
"""

from flashrt.analysis.search.plan import Point, Proof, SearchResult, search_deployments
from flashrt.analysis.search.request import Pins, SearchRequest
from flashrt.analysis.search.robust import Ranked, rank_under_spread
from flashrt.analysis.search.sensitivity import Sensitivity, find_sensitivity

__all__ = [
    "Pins",
    "Point",
    "Proof",
    "Ranked",
    "SearchRequest",
    "SearchResult",
    "Sensitivity",
    "find_sensitivity",
    "rank_under_spread",
    "search_deployments",
]
