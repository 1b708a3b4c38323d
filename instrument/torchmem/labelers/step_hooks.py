"""The hooks around every optimizer's step, in torch's two tables of global ones, and how they are hidden there.

torch guards compiled optimizer steps on these tables, so that inside a compiled call ours must not be in them. They are
never taken out: other threads may be going through a table at that moment. A copy without ours takes its place.

Private torch interfaces used, checked when they are hidden: ``torch.optim.optimizer._global_optimizer_pre_hooks``,
``_global_optimizer_post_hooks``.

Invariants: no table changes its size when hooks are hidden or shown; threads that hide them at the same time may end in
any order; after ``restore`` torch has its own tables back; a signal handler may close the hooks anywhere in here.

Limits: a global hook that somebody registers while ours are hidden stays when its handle is removed later. Putting the
hooks on and taking them off goes through torch, which changes its tables: where another thread is just then inside a
step, and the job has global hooks of its own behind ours, that step raises.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, NamedTuple

from torch.optim import optimizer as torch_optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from torchmem.labelers.hooks import HookSet

TABLES = ("_global_optimizer_pre_hooks", "_global_optimizer_post_hooks")


class _Hidden(NamedTuple):
    """A table of torch's, what took its place, and what that held then."""

    name: str
    table: Any
    copy: Any
    keys: frozenset[int]


class StepHooks:
    """A hook before and a hook after every step.

    Args:
        hooks: the labeler's; closing them takes both off.
        before: called with the optimizer, its arguments and keyword arguments.
        after: likewise.
    """

    def __init__(self, hooks: HookSet, before: Callable[..., None], after: Callable[..., None]) -> None:
        self._hooks = hooks
        self._lock = threading.RLock()  # a signal handler that closes the hooks may interrupt whoever holds it
        self._num_hiding = 0
        self._hidden: list[_Hidden] = []
        self._keys: list[int] = []
        for register, function in (
            (register_optimizer_step_pre_hook, before),
            (register_optimizer_step_post_hook, after),
        ):
            handle = register(hooks.guarded(function))
            hooks.add(handle)
            self._keys.append(handle.id)
        hooks.on_off(self.restore)

    def hide(self) -> None:
        """Hides the hooks until each thread that did so has shown them again."""
        with self._lock:
            self._num_hiding += 1
            if self._num_hiding > 1:
                return
            hidden = [_without(key, name) for name, key in zip(TABLES, self._keys, strict=True)]
            self._hidden = hidden
            for one in hidden:
                setattr(torch_optimizer, one.name, one.copy)
            if self._hooks.closed:  # meanwhile, by a signal handler, which found some of them only
                self._hidden = hidden
                self.restore()

    def show(self) -> None:
        """Ends one ``hide``."""
        with self._lock:
            if self._num_hiding > 1:
                self._num_hiding -= 1
                return
        self.restore()

    def restore(self) -> None:
        """Shows the hooks whoever hides them."""
        with self._lock:
            self._num_hiding = 0
            for hidden in self._hidden:
                for key, hook in list(hidden.copy.items()):
                    if key not in hidden.keys:  # registered meanwhile
                        hidden.table[key] = hook
                if getattr(torch_optimizer, hidden.name) is hidden.copy:
                    setattr(torch_optimizer, hidden.name, hidden.table)
            self._hidden = []  # only now: whatever interrupts this can do it over


def _without(key: int, name: str) -> _Hidden:
    """The table of that name, and a copy that has no such hook."""
    table = getattr(torch_optimizer, name)
    copy = table.copy()
    copy.pop(key, None)
    return _Hidden(name, table, copy, frozenset(copy))
