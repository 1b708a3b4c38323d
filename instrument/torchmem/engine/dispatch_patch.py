"""One attribute of torch's replaced for a while."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

_MISSING = object()


@contextlib.contextmanager
def patched(owner: Any, name: str, make: Callable[[Any], Any]) -> Iterator[None]:
    """``owner.name`` is ``make(original)`` meanwhile; what was inherited is so again.

    Raises:
        AttributeError: there is no such thing.
    """
    found = vars(owner).get(name, _MISSING)
    setattr(owner, name, make(getattr(owner, name)))
    try:
        yield
    finally:
        if found is _MISSING:
            delattr(owner, name)
        else:
            setattr(owner, name, found)
