"""Steps of optimizers inside compiled calls, where no hook runs: seen by the versions of the optimizer's tensors.

Invariants: outside of compiled calls nothing is read; the hooks of eager steps are hidden exactly while a thread is in
an outermost compiled call.

Limits: those of ``compiled``.
"""

from __future__ import annotations

import contextlib
import gc
import operator
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch.optim import Optimizer

from torchmem.labelers.hooks import HookSet, is_from_signal_handler
from torchmem.labelers.optimizer import OptimizerLabeler, num_running_steps
from torchmem.model import OUTSIDE_OWNER, RefType


def open_depth(native: Any) -> int:
    """How many frames and labels are open on this thread; pushing one takes away those of a backward that ended."""
    depth: int = native.push_label(OUTSIDE_OWNER, RefType.OTHER)
    native.cut_stack(depth)
    return depth


class _Call(NamedTuple):
    """The outermost compiled call that runs on a thread."""

    frame: int
    error: BaseException | None
    before: dict[Optimizer, _Versions]


class _Versions(NamedTuple):
    """How often tensors of an optimizer were changed in place, all together."""

    of_state: bool
    """Whether they are the first tensors of each parameter's state; else the parameters."""
    num_tensors: int
    num_changes: int


class CompiledSteps:
    """Notices that an optimizer stepped inside a compiled call."""

    def __init__(self, native: Any, optimizers: OptimizerLabeler, hooks: HookSet) -> None:
        self._native = native
        self._labeler = optimizers
        self._hooks = hooks
        self._known: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        self._found = False
        self._thread = threading.local()
        self._latest: weakref.WeakKeyDictionary[Optimizer, tuple[int, _Versions]] = weakref.WeakKeyDictionary()
        self._num_steps_then = 0

    def noted_when_made(self, original: Callable[..., None]) -> Callable[..., None]:
        """Around what every new or unpickled optimizer runs."""

        def _patch_step_function(optimizer: Optimizer) -> None:
            original(optimizer)
            try:
                self._known.add(optimizer)
            except Exception as error:  # nothing of ours may reach the training loop
                if is_from_signal_handler(error):
                    raise
                self._hooks.fail(error)

        return _patch_step_function

    def show_hooks(self) -> None:
        """Shows the hooks whoever hides them."""
        if self._labeler.step_hooks is not None:
            self._labeler.step_hooks.restore()

    def enter(self, frame: int) -> None:
        """A compiled call begins."""
        if getattr(self._thread, "call", None) is not None or self._labeler.step_hooks is None:
            return
        self._labeler.drop_stale_labels()
        if open_depth(self._native) or num_running_steps():
            return  # inside a module's forward or an eager step, which is going through its hooks
        before = {optimizer: self._versions_before(optimizer) for optimizer in self._optimizers()}
        self._thread.call = _Call(frame, sys.exc_info()[1], before)
        self._labeler.step_hooks.hide()

    def leave(self, frame: int) -> None:
        """A compiled call ends."""
        call: _Call | None = getattr(self._thread, "call", None)
        if call is None or call.frame != frame or self._labeler.step_hooks is None:
            return
        self._thread.call = None
        self._labeler.step_hooks.show()
        if sys.exc_info()[1] is not call.error:
            self._latest.clear()  # it may have ended in the middle of a step
            return
        for optimizer in self._optimizers():
            if _versions(optimizer) != call.before.get(optimizer):
                self._labeler.stepped(optimizer)

    def _versions_before(self, optimizer: Optimizer) -> _Versions:
        """As they are; read once a step, because to read them takes 50 ns a parameter."""
        if self._num_steps_then != self._labeler.num_steps_seen:
            self._num_steps_then = self._labeler.num_steps_seen
            self._latest.clear()
        state, versions = self._latest.get(optimizer, (None, None))
        if versions is None or state != id(optimizer.state):  # loading makes a new one
            versions = _versions(optimizer)
            self._latest[optimizer] = (id(optimizer.state), versions)
        return versions

    def _optimizers(self) -> Iterator[Optimizer]:
        if not self._found:  # once, and only in a job that compiles: it looks at every object there is
            self._found = True
            self._known.update(o for o in gc.get_objects() if issubclass(type(o), Optimizer))
        return iter(list(self._known))


_version: Callable[[torch.Tensor], int] = operator.attrgetter("_version")
"""torch's count of changes in place."""


def _versions(optimizer: Optimizer) -> _Versions:
    states = list(optimizer.state.values())
    name = _name_of_tensor(states[0]) if states else None
    if name is not None:
        # States of several kinds, or what is no tensor in some of them.
        with contextlib.suppress(KeyError, TypeError, AttributeError):
            num_changes = sum(map(_version, map(operator.itemgetter(name), states)))
            return _Versions(of_state=True, num_tensors=len(states), num_changes=num_changes)
    tensors = [state[name] for state in states if (name := _name_of_tensor(state)) is not None]
    of_state = bool(tensors)
    if not of_state:
        tensors = [p for group in optimizer.param_groups for p in group["params"]]
    return _Versions(of_state, len(tensors), sum(map(_version, tensors)))


def _name_of_tensor(state: Any) -> Any:
    """Under which a parameter's state has its first tensor; None where it has none."""
    found = state.items() if isinstance(state, dict) else ()
    return next((name for name, value in found if isinstance(value, torch.Tensor)), None)
