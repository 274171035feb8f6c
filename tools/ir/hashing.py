"""Ids by content: the same for the same value, whatever process computes them and whatever order keys came in."""

from __future__ import annotations

import hashlib
import json
from typing import Any


def content_hash(value: Any, length: int = 12) -> str:
    """Return the first `length` hexadecimal digits of the SHA-256 of the canonical JSON of `value`."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, default=str)
    return hashlib.sha256(text.encode(errors="surrogatepass")).hexdigest()[:length]
