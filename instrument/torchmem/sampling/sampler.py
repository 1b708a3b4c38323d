"""Samples one training step in so many, with the dispatch engine and every labeler, and has nothing on in between.

Between samples the hooks of ``steps`` say that a step has ended, and that is all. A sample begins when a step has
ended: the engine and all labelers are put on, adopt what exists, and are taken off when the next step has ended; its
books then stand until the next sample. Steps are counted, not timed, so all ranks sample the same one.

Invariants: between samples no labeler and no mode is there; nothing of a sample raises into the training loop: one that
cannot begin is left out, with the reason, and after one that failed there are no more; a child forked during a sample
has none of it.

Limits: what existed before a sample and no labeler knows (data kept between steps, a DDP reducer's buckets unless
gradients are views of them) is not counted; nor is what kernels use inside, nor what a replayed CUDA graph holds. A
checkpoint that is saved between samples is not seen. Jobs that use torch.compile are not sampled: what compiled code
allocates is not seen. A sample that ends on another thread, in inference mode, in a backward hook or in the midst of an
operator leaves its mode on the job's thread, where it does nothing, until a step ends there under a sampler.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch.optim import Optimizer
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from torchmem.counting import MAX_FORWARDS_IN_STEP
from torchmem.engine import addresses
from torchmem.engine.dispatch import DispatchEngine
from torchmem.engine.dispatch_context import graph_task
from torchmem.engine.dispatch_mode import take_off_ended
from torchmem.labelers.anchor import Anchor
from torchmem.labelers.hooks import HookSet
from torchmem.labelers.owners import OwnerTable
from torchmem.ledger import NO_TASK
from torchmem.sampling.books import Sample, SampledBooks
from torchmem.sampling.steps import StepCounting, Steps
from torchmem.sampling.times import StepTimes

if TYPE_CHECKING:
    from torch import nn

_FIRST = 2
"""The first step makes the optimizer's state, and is like no other."""

logger = logging.getLogger("torchmem")


class _Running(NamedTuple):
    """A sample that has begun."""

    engine: DispatchEngine
    counting: StepCounting
    thread: int


@dataclass(frozen=True)
class SampledLabeler:
    """What became of a labeler in the latest sample."""

    name: str
    hooks: HookSet


class StepSampler:
    """Samples the steps of one model; has what ``Counting`` has.

    Args:
        model: the root module; not kept alive.
        optimizer: whose step ends a step; None for the first that trains the model.
        depth: how deep modules are told apart.
        every: one step in so many is sampled, from 2 on; the same on all ranks.
        on_step: called after that optimizer has stepped.
        before_forward: called in sampled steps, before the root's forward, with the number of elements of its inputs.

    Attributes:
        native: the books of the latest sample.
        owners: the table of owners.
        num_steps: steps that have ended.
        reason: why the last step that was due was not sampled; empty where it was.
        frame_seconds: 0: what samples take is measured as a whole.
    """

    name = "sampler"

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer | None,
        *,
        depth: int,
        every: int,
        on_step: Callable[[], None],
        before_forward: Callable[[int], None],
    ) -> None:
        self.native = SampledBooks()
        self.owners = OwnerTable(model, depth)
        self.hooks = HookSet(self.name)
        self.num_steps = 0
        self.reason = ""
        self.frame_seconds = 0.0
        self._depth = depth
        self._every = every
        self._on_step = on_step
        self._before_forward = before_forward
        self._anchor = Anchor(optimizer, self._trains_model)
        self._steps = Steps(self.hooks, optimizer, self._after_step)
        self._is_due = False
        self._num_forwards = 0
        self._failure = ""
        self._times = StepTimes()
        self._running: _Running | None = None

    def attach(self) -> None:
        """Hears of steps from here on.

        Raises:
            BuildError: this torch lays out its tensors in a way that the engine does not know.
        """
        addresses.check()
        self.hooks.on_off(self._drop)
        self._steps.attach()

    def detach(self) -> None:
        """Takes everything off; safe to call twice."""
        self.hooks.close()

    @property
    def is_sampling(self) -> bool:
        """Whether the running step is one that is sampled."""
        return self._running is not None

    @property
    def extra_seconds(self) -> float:
        """What sampled steps took longer than others, their beginnings and ends not included."""
        return self._times.extra_seconds

    @property
    def labelers(self) -> list[SampledLabeler]:
        """Itself, and those of the latest sample."""
        failures = {self.name: self._failure or self.reason}
        if self.native.last is not None:
            failures |= self.native.last.failures
        found = [SampledLabeler(name, HookSet(name)) for name in failures]
        for one in found:
            one.hooks.failure = failures[one.name]
        found[0].hooks.seconds = self.hooks.seconds + self.extra_seconds
        return found

    def label_now(self) -> None:
        """Nothing: a sample names what is held when it ends."""

    # -- steps

    def end_step(self) -> bool:
        """A step has ended: ends its sample, or begins that of the next; returns whether there is a new sample."""
        self.num_steps += 1
        self._is_due |= self.num_steps % self._every == _FIRST - 1
        self._times.end(was_sampled=self._running is not None)
        try:
            take_off_ended()
            if self._running is not None:
                return self._close(self._running)
            if self._is_due and not self._failure:
                self._open()
        except Exception as error:  # noqa: BLE001  # nothing of ours may reach the training loop
            self._fail(error)
            self._drop()
        finally:
            self._times.begin()
        return False

    def _after_step(self, optimizer: Optimizer) -> None:
        if self._anchor.ends(optimizer):
            self._on_step()

    def _trains_model(self, optimizer: Optimizer) -> bool:
        if self._anchor() is None:
            self.owners.refresh()
        return self.owners.trained_by(optimizer)

    # -- samples

    def _open(self) -> None:
        global _sampling  # noqa: PLW0603  # a forked child must find it
        self._is_due = False
        self.reason = self._why_not()
        if self.reason:
            return
        engine = DispatchEngine()
        engine.on_failure = self._fail
        self.owners.refresh()
        counting = StepCounting(
            self._steps,
            self.owners.model,
            self._anchor(),
            depth=self._depth,
            before_forward=self._before_sampled_forward,
            engine=engine,
            owners=self.owners,
        )
        self._num_forwards = 0
        self._running = _Running(engine, counting, threading.get_ident())
        _sampling = self
        counting.attach()
        engine.end_step()
        engine.start()

    def _close(self, running: _Running) -> bool:
        if running.thread != threading.get_ident():
            raise RuntimeError("steps end on different threads")
        engine, counting, _ = running
        if engine.is_in_event():
            self._give_up("a signal's handler ended the step in the midst of an operator")
            return False
        counting.label_now()
        engine.stop()
        phases, rows = engine.end_step()
        failures = {one.name: one.hooks.failure for one in counting.labelers}
        self._drop()
        if self._failure:
            return False
        self.native.take(Sample(self.num_steps, phases, rows, engine.read_window(), engine.counters(), failures))
        return True

    def _before_sampled_forward(self, num_elements: int) -> None:
        self._before_forward(num_elements)
        self._num_forwards += 1
        if self._num_forwards == MAX_FORWARDS_IN_STEP:
            self._give_up(f"no step has ended in {MAX_FORWARDS_IN_STEP} forwards since a sample began")

    def _give_up(self, reason: str) -> None:
        """Ends a running sample without a result; there will be others."""
        self.reason = reason
        self._drop()

    def _fail(self, error: Exception) -> None:
        """There will be no more samples; the running one has no result."""
        if not self._failure:
            self._failure = f"{type(error).__name__}: {error}"[:200]
            logger.warning("no more steps are sampled: %s", self._failure)

    def _drop(self) -> None:
        """Ends a running sample."""
        global _sampling  # noqa: PLW0603  # as above
        if self._running is None:
            return
        engine, counting, _ = self._running
        self._running = None
        _sampling = None
        engine.num_pauses += 1  # who still has it books nothing
        engine.stop()
        counting.detach()

    def end_in_child(self) -> None:
        """Ends everything, in a forked child."""
        if self._running is not None:
            self._running.engine.stop_in_child()
        self.hooks.close()

    def _why_not(self) -> str:
        if torch.is_inference_mode_enabled():
            return "the step ends in inference mode, where no sample can begin: end it outside"
        if _get_current_dispatch_mode_stack():
            return "the job keeps a dispatch mode of its own open between steps"
        if graph_task() != NO_TASK:
            return "the optimizer steps while backward runs"
        if _uses_compile(self.owners.model):
            return "the job uses torch.compile: what compiled code allocates cannot be seen"
        return ""


_sampling: StepSampler | None = None
"""The one with a running sample."""


def _end_in_child() -> None:
    if _sampling is not None:
        with contextlib.suppress(Exception):  # the child must start whatever becomes of its copy
            _sampling.end_in_child()


os.register_at_fork(after_in_child=_end_in_child)


def _uses_compile(model: nn.Module) -> bool:
    if "torch._dynamo" not in sys.modules:
        return False
    if torch._dynamo.utils.counters["frames"]["total"]:  # noqa: SLF001  # there is no public way
        return True
    return any(
        isinstance(module, torch._dynamo.OptimizedModule) or module._compiled_call_impl is not None  # noqa: SLF001  # as above
        for module in model.modules()
    )
