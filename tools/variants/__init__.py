"""What a workspace remembers: documents and results by id, and the queue of variants with the evidence they need.

The door of this part. Importing it loads no framework.
"""

from flashrt.variants.isolation import IsolatedFolder, isolate, make_folder, remove_folder
from flashrt.variants.queue import Answer, Listing, VariantQueue
from flashrt.variants.seeding import Seeds
from flashrt.variants.store import Record, Store, new_id, open_store
from flashrt.variants.variant import QueueStatus, Transition, Variant

__all__ = [
    "Answer",
    "IsolatedFolder",
    "Listing",
    "QueueStatus",
    "Record",
    "Seeds",
    "Store",
    "Transition",
    "Variant",
    "VariantQueue",
    "isolate",
    "make_folder",
    "new_id",
    "open_store",
    "remove_folder",
]
