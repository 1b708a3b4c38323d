"""Every hook and patch of one labeler: put on once, undone last-in first-out, harmless when it fails.

Invariants: after ``close`` each touched object is as it was before; a wrapped function always runs the original
exactly once, with the original's result or exception, whatever the labeler does; the first failure of a labeler
disables it for good and is kept for the record.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Any, Protocol

logger = logging.getLogger("torchmem")

_MISSING = object()


class Removable(Protocol):
    """torch's handle of a registered hook."""

    def remove(self) -> None:
        """Takes the hook off."""


class HookSet:
    """The hooks and patches of one labeler.

    Args:
        labeler: its name in the record.
    """

    def __init__(self, labeler: str) -> None:
        self.labeler = labeler
        self.failure = ""
        self._undo: list[Callable[[], None]] = []
        self._closed = False

    @property
    def active(self) -> bool:
        """False once the labeler failed or was closed."""
        return not self.failure and not self._closed

    def add(self, handle: Removable) -> None:
        """Keeps a hook's handle for ``close``."""
        self._undo.append(handle.remove)

    def fail(self, error: BaseException) -> None:
        """Disables the labeler; its bytes are booked as if it were not there."""
        if not self.failure:
            self.failure = f"{type(error).__name__}: {error}"[:200]
            logger.warning("labeler %s is off: %s", self.labeler, self.failure)

    def guarded(self, function: Callable[..., None]) -> Callable[..., None]:
        """The function as a hook that never raises and returns None."""

        @functools.wraps(function)
        def hook(*args: Any, **kwargs: Any) -> None:
            if self.active:
                try:
                    function(*args, **kwargs)
                except Exception as error:  # noqa: BLE001  # nothing of ours may reach the training loop
                    self.fail(error)

        return hook

    def patch(
        self,
        owner: Any,
        name: str,
        before: Callable[..., Any],
        after: Callable[..., None],
    ) -> None:
        """Wraps ``owner.name``: ``before(*args)`` runs first, ``after(token, *args)`` last, also on an exception.

        Both get the original's positional arguments; ``token`` is what ``before`` returned.
        """
        original = getattr(owner, name)
        found = vars(owner).get(name, _MISSING)

        @functools.wraps(original)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            if not self.active:
                return original(*args, **kwargs)
            try:
                token = before(*args)
            except Exception as error:  # noqa: BLE001  # as above
                self.fail(error)
                return original(*args, **kwargs)
            try:
                return original(*args, **kwargs)
            finally:
                try:
                    after(token, *args)
                except Exception as error:  # noqa: BLE001  # as above
                    self.fail(error)

        setattr(owner, name, wrapper)

        def restore() -> None:
            # Somebody may have wrapped us since: theirs stays, and ours, inactive, only passes through.
            if vars(owner).get(name) is not wrapper:
                return
            if found is _MISSING:
                delattr(owner, name)
            else:
                setattr(owner, name, found)

        self._undo.append(restore)

    def close(self) -> None:
        """Undoes everything, newest first; safe to call twice."""
        self._closed = True
        while self._undo:
            try:
                self._undo.pop()()
            except Exception as error:  # noqa: BLE001  # the rest must still be undone
                self.fail(error)
