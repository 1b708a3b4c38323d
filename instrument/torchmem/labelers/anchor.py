"""The optimizer whose step ends a step of the job.

It is the one that was passed in, or the first that trains the model. One that wraps another and has no hooks of torch's
(Accelerate's) stands for the one it wraps. Where it has not stepped while others that train the model did, for longer
than any job takes turns, the job has gone on with another, which takes its place.

Invariant: optimizers are not kept alive.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

from torch.optim import Optimizer

MAX_SILENT_STEPS = 100
"""Steps of others: a critic may take some before each of its generator's."""


class Anchor:
    """Tells whose steps end a step.

    Args:
        optimizer: the one that was passed in, or None.
        trains: whether an optimizer trains the model.
    """

    def __init__(self, optimizer: Optimizer | None, trains: Callable[[Optimizer], bool]) -> None:
        found = hooked(optimizer)
        self._reference = None if found is None else weakref.ref(found)
        self._trains = trains
        self._num_silent = 0

    def __call__(self) -> Optimizer | None:
        """It, while it is known and lives."""
        return None if self._reference is None else self._reference()

    def ends(self, optimizer: Optimizer) -> bool:
        """Whether the step that this optimizer has made ends a step; to be asked of every one."""
        if self() is optimizer:
            self._num_silent = 0
            return True
        if not self._trains(optimizer):
            return False
        self._num_silent += 1
        if self() is not None and self._num_silent <= MAX_SILENT_STEPS:
            return False
        self._reference, self._num_silent = weakref.ref(optimizer), 0
        return True


def hooked(optimizer: Any) -> Optimizer | None:
    """The optimizer of whose steps torch's hooks tell: itself, or the one that it wraps; None where there is none."""
    while isinstance(optimizer, Optimizer):
        if getattr(type(optimizer).step, "hooked", False):
            return optimizer
        optimizer = getattr(optimizer, "optimizer", None)
    return None
