"""The fallback where the native engine cannot be built: one training step in so many, under the dispatch engine.

Between samples nothing of torchmem is on the model: one hook counts optimizer steps. A sample begins when a step has
ended: the engine and all labelers are put on, adopt what exists, and are taken off when the next step has ended; its
books then stand for the steps up to the next sample. Steps are counted, not timed, so all ranks sample the same one.

Invariants: between samples no labeler and no mode is there; a sample that cannot begin is left out, with the reason.

Limits: what existed before a sample and no labeler knows (data kept between steps) is not counted; a checkpoint that is
saved between samples is not seen. Jobs that use torch.compile are not sampled: under a dispatch mode it would run
eagerly, and stay so. A job that keeps a dispatch mode of its own open over the end of a step is not sampled either.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from torchmem.engine.dispatch import DispatchEngine
from torchmem.forecasting.counted import DispatchCounting
from torchmem.labelers.hooks import HookSet
from torchmem.labelers.owners import OwnerTable
from torchmem.model import OUTSIDE_OWNER

if TYPE_CHECKING:
    from torch import nn

    from torchmem.engine.dispatch_books import EndRow, WindowRow

EVERY = 100
"""Steps of which one is sampled: an engine that doubles a step's time then costs 1%."""

_FIRST = 2
"""The first step makes the optimizer's state, and is like no other."""


class Sample(NamedTuple):
    """The books of one sampled step, as of the engine's functions of these names."""

    number: int
    phases: int
    rows: list[EndRow]
    window: list[WindowRow]
    counters: dict[str, int]
    failures: dict[str, str]


class StepSampler:
    """Samples the steps of one model.

    Args:
        model: the root module; not kept alive.
        optimizer: whose step ends a step; None for the first that trains the model.
        depth: how deep modules are told apart.
        on_step: called after that optimizer has stepped, and after a sample was closed.
        every: one step in so many is sampled; the same on all ranks.

    Attributes:
        owners: the table of owners.
        last: the latest sample; None until there is one.
        num_steps: steps that have ended.
        reason: why steps are not sampled; empty while they are.
    """

    name = "sampler"

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer | None,
        *,
        depth: int,
        on_step: Callable[[], None],
        every: int = EVERY,
    ) -> None:
        self.owners = OwnerTable(model, depth)
        self.hooks = HookSet(self.name)
        self.last: Sample | None = None
        self.num_steps = 0
        self.reason = ""
        self._depth = depth
        self._every = max(_FIRST, every)
        self._on_step = on_step
        self._anchor: weakref.ref[Optimizer] | None = None
        self._given = None if optimizer is None else weakref.ref(optimizer)
        self._is_due = False
        self._running: tuple[DispatchEngine, DispatchCounting] | None = None

    def attach(self) -> None:
        """Counts steps from here on."""
        self.hooks.on_off(self._drop)
        optimizer = None if self._given is None else self._given()
        if optimizer is not None:
            self._follow(optimizer)
        else:
            self.hooks.add(register_optimizer_step_post_hook(self.hooks.guarded(self._after_any_step)))

    def detach(self) -> None:
        """Takes everything off; safe to call twice."""
        self.hooks.close()

    @property
    def is_sampling(self) -> bool:
        """Whether the running step is one that is sampled."""
        return self._running is not None

    def _follow(self, optimizer: Optimizer) -> None:
        """Its own hook, not a global one: labelers put global ones on and take them off in it."""
        self._anchor = weakref.ref(optimizer)
        self.hooks.add(optimizer.register_step_post_hook(self.hooks.guarded(self._after_step)))

    def _after_any_step(self, optimizer: Optimizer, _args: Any, _kwargs: Any) -> None:
        if (self._anchor is None or self._anchor() is None) and self._trains_model(optimizer):
            self._follow(optimizer)
            self._count()
            self._on_step()

    def _after_step(self, optimizer: Optimizer, _args: Any, _kwargs: Any) -> None:
        self._count()
        if self._running is not None:
            self._close(*self._running)
        elif self._is_due:
            self._open(optimizer)
        self._on_step()

    def _count(self) -> None:
        self.num_steps += 1
        self._is_due |= self.num_steps % self._every == _FIRST - 1

    def _trains_model(self, optimizer: Optimizer) -> bool:
        parameters = (p for group in optimizer.param_groups for p in group["params"])
        return any(self.owners.of_parameter(p) != OUTSIDE_OWNER for p in parameters)

    def _open(self, optimizer: Optimizer) -> None:
        self._is_due = False
        self.reason = self._why_not()
        if self.reason:
            return
        engine = DispatchEngine()
        counting = DispatchCounting(engine, self.owners.model, optimizer, depth=self._depth)
        self._running = (engine, counting)
        counting.attach()
        engine.end_step()
        engine.start()

    def _close(self, engine: DispatchEngine, counting: DispatchCounting) -> None:
        counting.label_now()
        self._running = None
        engine.stop()
        phases, rows = engine.end_step()
        failures = {one.name: one.hooks.failure for one in counting.labelers if one.hooks.failure}
        counting.detach()
        self.last = Sample(self.num_steps, phases, rows, engine.read_window(), engine.counters(), failures)

    def _drop(self) -> None:
        """Ends a running sample without a result."""
        if self._running is not None:
            engine, counting = self._running
            self._running = None
            engine.stop()
            counting.detach()

    def _why_not(self) -> str:
        if _get_current_dispatch_mode_stack():
            return "the job keeps a dispatch mode of its own open between steps"
        for module in self.owners.model.modules():
            if isinstance(module, torch._dynamo.OptimizedModule) or module._compiled_call_impl is not None:  # noqa: SLF001  # there is no public way
                return "the model is compiled: it would run eagerly while sampled, and stay so"
        return ""
