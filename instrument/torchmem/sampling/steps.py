"""Every optimizer's steps, heard of through two hooks that are put on once.

Samples begin and end when a step ends, which is when torch goes through its tables of hooks: a table that changed then
would raise in the job's own step. So a sample's labeler puts no hooks on; it is told of steps from here.

Invariants: torch's tables change when the hooks are put on, and when they are taken off for good, at no other time;
optimizers are not kept alive, nor is a labeler once it is off.
"""

from __future__ import annotations

import functools
import sys
import weakref
from collections.abc import Callable
from typing import Any

from torch.optim import Optimizer

from torchmem.counting import Counting
from torchmem.labelers.hooks import HookSet
from torchmem.labelers.optimizer import OptimizerLabeler
from torchmem.labelers.step_hooks import StepHooks

_MAKES_STATE = "torch.distributed.checkpoint.state_dict"


def _nothing(*_arguments: object) -> None:
    """What is done where nobody listens."""


class Steps:
    """Hears of steps, and tells of them.

    Args:
        hooks: closing them ends it.
        optimizer: one that is known to begin with, or None.
        on_step: called with each optimizer that has stepped, unless torch only made its state so.
    """

    def __init__(self, hooks: HookSet, optimizer: Optimizer | None, on_step: Callable[[Optimizer], None]) -> None:
        self._hooks = hooks
        self._on_step = on_step
        self._known: weakref.WeakSet[Optimizer] = weakref.WeakSet([] if optimizer is None else [optimizer])
        self._before: Callable[..., None] = _nothing
        self._after: Callable[..., None] = _nothing

    def attach(self) -> None:
        """Puts the hooks on."""
        StepHooks(self._hooks, self._before_step, self._after_step)

    def tell(self, labeler: OptimizerLabeler) -> None:
        """Tells a labeler of the optimizers that have stepped, and of their steps from here on until it is off."""
        for optimizer in list(self._known):
            labeler.stepped(optimizer)
        labeler.hooks.on_off(self._silence)
        self._before = labeler.hooks.guarded(labeler.before_step)
        self._after = labeler.hooks.guarded(labeler.after_step)

    def _silence(self) -> None:
        self._before = self._after = _nothing

    def _before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self._before(optimizer, args, kwargs)

    def _after_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self._known.add(optimizer)
        self._after(optimizer, args, kwargs)
        if not _makes_state():
            self._on_step(optimizer)


class StepCounting(Counting):
    """Counts within one sample; its labeler of optimizers is told of steps.

    Args:
        steps: what tells it.
        *arguments: as ``Counting`` takes them.
        **settings: likewise.
    """

    def __init__(self, steps: Steps, *arguments: Any, **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        self._steps = steps

    def add(self, labeler: Any) -> None:
        """As ``Counting`` does."""
        if isinstance(labeler, OptimizerLabeler):
            labeler.attach = functools.partial(self._steps.tell, labeler)  # type: ignore[method-assign]  # no hooks
        super().add(labeler)


def _makes_state() -> bool:
    """Whether torch makes an optimizer's missing state, by a step of its own, to save or load it."""
    module = sys.modules.get(_MAKES_STATE)
    frame: Any = None if module is None else sys._getframe(1)  # noqa: SLF001  # the only way to ask
    while frame is not None and frame.f_globals is not vars(module):
        frame = frame.f_back
    return frame is not None
