"""One engine and its labelers on one model: attached, counting, detached.

Composed by whatever counts (``Monitor``, ``MemTracker``); who does so first claims the process, because the allocator,
and with it the books, are the process's.

Invariants: ``detach`` leaves every hook table, patched attribute and allocator as before and is safe to call twice; a
labeler that cannot attach, or fails later, is off and named by its hooks, and costs nothing else; a forked child does
not inherit its parent's claim, and takes its parent's labelers off before it counts itself.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from torchmem.errors import BuildError, InstallError

if TYPE_CHECKING:
    from torch import nn
    from torch.optim import Optimizer

    from torchmem.engine.dispatch import DispatchEngine
    from torchmem.labelers.owners import OwnerTable

slot_lock = threading.RLock()
"""Held while the process's one place to count is taken or given back."""

# A child that is forked while another thread installs would wait for it forever.
os.register_at_fork(before=slot_lock.acquire, after_in_parent=slot_lock.release, after_in_child=slot_lock.release)

_holder: tuple[int, Any, str] | None = None
_attached: Counting | None = None
"""The one that has labelers on a model in this process; in a forked child at first its parent's."""

MAX_FORWARDS_IN_STEP = 1000
"""At so many it is said that no step ends."""


def claim(holder: object, fix: str) -> None:
    """Takes the process's one place to count.

    Args:
        holder: who counts.
        fix: what the user must do before somebody else can.

    Raises:
        InstallError: somebody counts already; the message names their fix.
    """
    global _holder  # noqa: PLW0603  # the allocator is the process's: so is the place to count
    with slot_lock:
        if _holder is not None and _holder[0] == os.getpid():
            raise InstallError(f"torchmem is installed already in this process: {_holder[2]}")
        _holder = (os.getpid(), holder, fix)


def release(holder: object) -> None:
    """Gives the place back; nothing happens when somebody else has it."""
    global _holder  # noqa: PLW0603  # as above
    with slot_lock:
        if _holder is not None and _holder[1] is holder:
            _holder = None


def check_arguments(model: Any, optimizer: Any) -> None:
    """Raises ``InstallError`` unless the model is a module and the optimizer an optimizer or None."""
    from torch import nn
    from torch.optim import Optimizer

    if not isinstance(model, nn.Module):
        raise InstallError(f"the model is a {type(model).__name__}, not a torch.nn.Module: pass the root module")
    if optimizer is not None and not isinstance(optimizer, Optimizer):
        raise InstallError(
            f"the optimizer is a {type(optimizer).__name__}, not a torch.optim.Optimizer: pass it or nothing"
        )


def _nothing(*_arguments: object) -> None:
    """What is done where there is nothing to do."""


class Counting:
    """An engine, the table of owners and the labelers of one model.

    Args:
        model: the root module.
        optimizer: whose step ends a step; None for the first that trains the model.
        depth: how deep modules are told apart.
        on_step: called after that optimizer has stepped.
        before_forward: called before the root's forward with the number of elements of its inputs.
        engine: a dispatch engine, which may have counted before, and is started and stopped by whoever made it; None
            for the native one, built where need be, whose books begin anew.
        owners: the table of owners; None for a new one.

    Attributes:
        native: the engine; None before ``attach``.
        owners: the table of owners; None before ``attach``.
        labelers: those tried, in the order in which they were attached.
        frame_seconds: what opening, or closing, a frame costs a module's call.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer | None,
        *,
        depth: int,
        on_step: Callable[[], None] = _nothing,
        before_forward: Callable[[int], None] = _nothing,
        engine: DispatchEngine | None = None,
        owners: OwnerTable | None = None,
    ) -> None:
        self._subject: tuple[nn.Module, Optimizer | None] | None = (model, optimizer)
        self._depth = depth
        self._on_step = on_step
        self._before_forward = before_forward
        self._engine = engine
        self.native: Any = None
        self.owners: Any = owners
        self.labelers: list[Any] = []
        self.frame_seconds = 0.0
        self._has_cuda = False
        self._label_now: Callable[[], None] = _nothing

    def attach(self) -> None:
        """Loads the engine, books what exists, and counts from here on; once. Nothing keeps the model alive then.

        Raises:
            BuildError: the engine cannot be built or cannot be put under torch's allocator.
        """
        from torchmem.engine import native
        from torchmem.labelers.frame_cost import frame_seconds
        from torchmem.labelers.owners import OwnerTable

        global _attached  # noqa: PLW0603  # as in claim()
        engine: Any = self._engine or native.load()
        engine.set_gate(False)
        if self._subject is None:
            raise InstallError("a Counting attaches once: make another")
        if _attached is not None:  # only in a forked child
            _attached.detach()
        if reason := engine.attach_cpu():
            raise BuildError(reason)
        model, optimizer = self._subject
        self._subject = None
        _attached = self
        self.native = engine
        self.owners = self.owners or OwnerTable(model, self._depth)
        if self._engine is None:
            with contextlib.suppress(Exception):  # a torch that changed: the labeler of module calls will say so
                self.frame_seconds = frame_seconds(engine)
            engine.reset(self.owners.parents)
        else:
            engine.set_parents(self.owners.parents)
        engine.set_gate(True)
        self._attach_cuda()
        for labeler in self._make_labelers(model, optimizer):
            self.add(labeler)

    def add(self, labeler: Any) -> None:
        """Attaches one more labeler, which ``detach`` takes off with the others."""
        self.labelers.append(labeler)  # first: one that is interrupted must be detached too
        try:
            labeler.attach()
        except Exception as error:  # noqa: BLE001  # a torch that changed costs one labeler, not the job
            labeler.hooks.fail(error)

    def _attach_cuda(self) -> bool:
        """Counts CUDA devices, once there is CUDA; returns whether it just began to."""
        import torch

        if self._has_cuda or not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]  # torch's
            return False
        self._has_cuda = True
        self.native.attach_cuda()
        return True

    def label_now(self) -> None:
        """Names what the model and its optimizers hold at this moment, as each optimizer step does by itself."""
        self._label_now()

    def detach(self) -> None:
        """Stops counting and puts everything back."""
        global _attached  # noqa: PLW0603  # as in claim()
        for labeler in reversed(self.labelers):
            try:
                labeler.detach()
            except Exception as error:  # noqa: BLE001  # the rest must still be put back
                labeler.hooks.fail(error)
        if self.native is not None:
            self.native.set_gate(False)
            self.native.detach_cpu()
        self.labelers.clear()  # with them go the weak references that torch finds on the parameters
        self._label_now = _nothing
        if _attached is self:
            _attached = None

    def _make_labelers(self, model: nn.Module, optimizer: Optimizer | None) -> tuple[Any, ...]:
        from torchmem.labelers.compiled import CompiledLabeler
        from torchmem.labelers.ddp import DdpLabeler
        from torchmem.labelers.fsdp1 import Fsdp1Labeler, flat_handles
        from torchmem.labelers.fsdp2 import Fsdp2Labeler, param_groups
        from torchmem.labelers.module import ModuleLabeler
        from torchmem.labelers.optimizer import OptimizerLabeler
        from torchmem.labelers.recompute import RecomputeLabeler
        from torchmem.labelers.state_dict import StateDictLabeler

        def before_forward(num_elements: int) -> None:
            optimizers.before_forward()
            if not self._has_cuda and self._attach_cuda():
                modules.adopt_held()  # what was moved there meanwhile
            self._before_forward(num_elements)

        def after_step() -> None:
            if not state_dicts.running:  # torch makes missing optimizer state by a step of its own
                self._on_step()

        state_dicts = StateDictLabeler(self.native)
        fsdp1 = Fsdp1Labeler(self.native, self.owners, flat_handles(model))
        fsdp2 = Fsdp2Labeler(self.native, self.owners, param_groups(model))
        modules = ModuleLabeler(self.native, self.owners, lambda p: fsdp1.claims(p) or fsdp2.claims(p), before_forward)
        optimizers = OptimizerLabeler(
            self.native, self.owners, optimizer, modules.label_held, modules.find_anew, after_step
        )
        self._label_now = optimizers.label_now
        # Under the dispatch engine's mode nothing runs compiled.
        compiled = [] if self._engine else [CompiledLabeler(self.native, self.owners, modules.frames, optimizers)]
        return (
            modules,
            DdpLabeler(self.native, self.owners, modules.label_held),
            fsdp1,
            fsdp2,
            RecomputeLabeler(self.native),
            state_dicts,
            optimizers,
            *compiled,
        )
