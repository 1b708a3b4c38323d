"""Label values that no storage or terminal chokes on.

Invariant: what ``clean_label`` returns is valid UTF-8 without control characters, of at most ``MAX_LABEL_BYTES``.
"""

from __future__ import annotations

import hashlib
import unicodedata
from functools import lru_cache

MAX_LABEL_BYTES = 200
_NUM_HASH_DIGITS = 16
_MAX_REMEMBERED_CHARACTERS = 1024
"""Records may be full of longer ones, which together would be more than there is memory."""


def clean_label(text: str) -> str:
    """The text without control characters; a long one is cut and told apart by a hash of the whole."""
    if len(text) > _MAX_REMEMBERED_CHARACTERS:
        return _cleaned(text)
    return text if _is_plain(text) and len(text) <= MAX_LABEL_BYTES else _remembered(text)


def _is_plain(text: str) -> bool:
    return text.isascii() and text.isprintable()


def _cleaned(text: str) -> str:
    kept = text if _is_plain(text) else "".join(c for c in text if unicodedata.category(c) not in ("Cc", "Cs"))
    encoded = kept.encode()
    if len(encoded) <= MAX_LABEL_BYTES:
        return kept
    digest = hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:_NUM_HASH_DIGITS]
    head = encoded[: MAX_LABEL_BYTES - _NUM_HASH_DIGITS - 1].decode(errors="ignore")
    return f"{head}~{digest}"


_remembered = lru_cache(maxsize=1 << 14)(_cleaned)
