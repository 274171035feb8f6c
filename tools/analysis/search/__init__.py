"""The proven search over deployments: placement × degree × order, and interleaved batches where asked for.

The door to this folder: `search_deployments` for the points of a request with their proofs, `rank_under_spread` for how
they hold under the profile's measured spread, `plots` for drawings of both. Importing it is light: NumPy, numba and
matplotlib are loaded by the first search and the first drawing.
"""

from flashrt.analysis.search.plan import search_deployments
from flashrt.analysis.search.request import Pins, SearchRequest
from flashrt.analysis.search.result import LeftOut, Point, Proof, SearchResult
from flashrt.analysis.search.robust import Ranked, rank_under_spread
from flashrt.analysis.search.sensitivity import Sensitivity, find_sensitivity
from flashrt.analysis.search.warm import warm_search

__all__ = [
    "LeftOut",
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
    "warm_search",
]
