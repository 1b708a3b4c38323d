"""Every hook and patch of one labeler: put on once, undone last-in first-out, harmless when it fails.

Invariants: after ``close`` each touched object is as it was before; a wrapped function always runs the original
exactly once, with the original's result or exception, whatever the labeler does; the first failure of a labeler
disables it for good and is kept for the record; what the job's signal handlers raise inside a hook reaches the job.
"""

from __future__ import annotations

import functools
import logging
import signal
import sys
import time
import traceback
import weakref
from collections.abc import Callable
from types import MethodType
from typing import Any, Protocol

import torch

logger = logging.getLogger("torchmem")

_MISSING = object()
_ORIGINALS = "_torchmem_originals"
"""Attribute of an object that had methods of its own replaced."""


class Removable(Protocol):
    """torch's handle of a registered hook."""

    def remove(self) -> None:
        """Takes the hook off."""


class GuardedHook:
    """A hook that raises nothing of ours, returns None, and does nothing in a pickled model.

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
        except Exception as error:  # nothing of ours may reach the training loop
            if is_from_signal_handler(error):
                raise
            if self._hooks.active:  # else another thread has closed it meanwhile: what it needs may be gone
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
    def closed(self) -> bool:
        """True from when ``close`` begins."""
        return self._closed

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
        """The function as a hook that raises nothing of ours and returns None."""
        return GuardedHook(self, function)

    def patch(self, owner: Any, name: str, make: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
        """Replaces ``owner.name`` by ``make(original)``.

        What ``make`` returns must run the original exactly once and let nothing else reach the caller; after ``close``
        it may still be called, by whoever wrapped it since, and must then only pass through (see ``on_off``).
        """
        original = getattr(owner, name)
        found = vars(owner).get(name, _MISSING)
        wrapper = make(original)

        def restore() -> None:
            # Somebody may have wrapped us since: theirs stays, and ours, inactive, only passes through.
            if vars(owner).get(name) is not wrapper:
                return
            if found is _MISSING:
                delattr(owner, name)
            else:
                setattr(owner, name, found)

        self._undo.append(restore)  # first: an interrupt may come in between
        setattr(owner, name, wrapper)

    def patch_own(self, owner: Any, name: str, make: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
        """Replaces a method that one object has of its own, which is called without the object; keeps nothing alive.

        What ``make`` returns is called with the object first, and runs what it was given exactly once. Where it has a
        ``disable``, that is called when the labeler fails or is closed.
        """
        own = _Own(weakref.ref(owner), name, f"{self.labeler}.{name}")
        bound = own.bind(make(own.call_original), owner)
        self._undo.append(own.restore)
        self._disable.append(own.disable)
        vars(owner).setdefault(_ORIGINALS, {})[own.key] = vars(owner)[name]
        setattr(owner, name, bound)

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
        while True:
            try:
                disable = self._disable.pop()
            except IndexError:  # also where another thread took the last one
                return
            try:
                disable()
            except Exception:  # a hook that fails is calling, or the rest must still be undone
                logger.warning("labeler %s cannot be switched off in full", self.labeler, exc_info=True)


class _Own:
    """A method of one object's own that was replaced.

    The original lies on the object beside its replacement: nothing else could hold it without the object.
    """

    def __init__(self, owner: weakref.ref[Any], name: str, key: str) -> None:
        self.key = key
        self._owner = owner
        self._name = name
        self._bound: Callable[[], MethodType | None] = _nothing

    def bind(self, function: Callable[..., Any], owner: Any) -> MethodType:
        """The replacement."""
        bound = MethodType(function, owner)
        self._bound = weakref.ref(bound)
        return bound

    def call_original(self, owner: Any, *args: Any, **kwargs: Any) -> Any:
        """What the replacement calls."""
        return vars(owner)[_ORIGINALS][self.key](*args, **kwargs)

    def restore(self) -> None:
        """As ``HookSet.patch`` does."""
        owner, bound = self._owner(), self._bound()
        if owner is None or bound is None or vars(owner).get(self._name) is not bound:
            return
        originals = vars(owner)[_ORIGINALS]
        setattr(owner, self._name, originals.pop(self.key))
        if not originals:
            del vars(owner)[_ORIGINALS]

    def disable(self) -> None:
        """Switches the replacement off, where it can be."""
        bound = self._bound()
        if bound is not None and hasattr(bound.__func__, "disable"):
            bound.__func__.disable()


def is_from_signal_handler(error: BaseException) -> bool:
    """Whether a handler that is installed now raised it: it is the job's, wherever the signal came."""
    handlers = [_code_of(signal.getsignal(number)) for number in signal.valid_signals()]
    return any(frame.f_code in handlers for frame, _ in traceback.walk_tb(error.__traceback__))


def _code_of(function: Any) -> Any:
    """The code of a function or method, also where some of its arguments are fixed; None where it has none."""
    while isinstance(function, functools.partial):
        function = function.func
    return getattr(function, "__code__", None)  # a method gives its function's


def _nothing() -> None:
    """There is none yet."""
