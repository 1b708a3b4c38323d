"""Every hook and patch of one labeler: put on once, undone last-in first-out, harmless when it fails.

Invariants: after ``close`` each touched object is as it was before; a wrapped function always runs the original
exactly once, with the original's result or exception, whatever the labeler does; the first failure of a labeler
disables it for good and is kept for the record.
"""

from __future__ import annotations

import functools
import logging
import sys
import time
from collections.abc import Callable
from typing import Any, Protocol

import torch

logger = logging.getLogger("torchmem")

_MISSING = object()


class Removable(Protocol):
    """torch's handle of a registered hook."""

    def remove(self) -> None:
        """Takes the hook off."""


class GuardedHook:
    """A hook that never raises, returns None, and does nothing in a pickled model.

    A model is pickled with its hooks, and must load where torchmem is not installed: there the hook is
    ``functools.partial(sys.audit, ...)``, which takes any arguments. A deep copy shares the hook.
    """

    def __init__(self, hooks: HookSet, function: Callable[..., None]) -> None:
        self._hooks = hooks
        self._function = function

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        """Runs the function unless the labeler is off; its time is charged to the labeler."""
        # While Dynamo traces the call, reading a clock would split the graph; what other threads compile is no matter.
        if torch.compiler.is_dynamo_compiling() or not self._hooks.active:
            return
        began = time.perf_counter()
        try:
            self._function(*args, **kwargs)
        except Exception as error:  # noqa: BLE001  # nothing of ours may reach the training loop
            self._hooks.fail(error)
        self._hooks.seconds += time.perf_counter() - began

    def __deepcopy__(self, _memo: dict[int, Any]) -> GuardedHook:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return functools.partial, (sys.audit, "torchmem.unpickled_hook")


class HookSet:
    """The hooks and patches of one labeler.

    Args:
        labeler: its name in the record.

    Attributes:
        failure: why the labeler is off, one line; empty while it works.
        seconds: what its hooks and patches took so far (native module hooks excepted).
    """

    def __init__(self, labeler: str) -> None:
        self.labeler = labeler
        self.failure = ""
        self.seconds = 0.0
        self._undo: list[Callable[[], None]] = []
        self._closed = False
        self._disable: list[Callable[[], None]] = []

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
            self._switch_off()
            logger.warning("labeler %s is off: %s", self.labeler, self.failure)

    def guarded(self, function: Callable[..., None]) -> GuardedHook:
        """The function as a hook that never raises and returns None."""
        return GuardedHook(self, function)

    def patch(self, owner: Any, name: str, make: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
        """Replaces ``owner.name`` by ``make(original)``.

        What ``make`` returns must run the original exactly once and let nothing else reach the caller; after ``close``
        it may still be called, by whoever wrapped it since, and must then only pass through (see ``on_off``).
        """
        original = getattr(owner, name)
        found = vars(owner).get(name, _MISSING)
        wrapper = make(original)
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

    def on_off(self, disable: Callable[[], None]) -> None:
        """Registers what must be switched off when the labeler fails or is closed."""
        self._disable.append(disable)

    def close(self) -> None:
        """Undoes everything, newest first; safe to call twice."""
        self._closed = True
        self._switch_off()
        while self._undo:
            try:
                self._undo.pop()()
            except Exception as error:  # noqa: BLE001  # the rest must still be undone
                self.fail(error)

    def _switch_off(self) -> None:
        while self._disable:
            self._disable.pop()()
