"""Optimizers: what the step keeps is optimizer state, what it frees again is temporary; the step ends the step.

Works with any optimizer, passed in or not, through torch's global optimizer hooks. State is walked only when it has
grown or been replaced, so a settled optimizer costs two hooks a step.

Invariants: an exception inside ``optimizer.step()`` (torch then calls no post hook) leaves a label behind that the
next forward takes away; an optimizer whose closure runs the model (LBFGS) keeps its label. Where others train too, or
a backward is still running, only the gradients of the optimizer that steps are looked at: see ``module``.

Limits: state tensors that an optimizer replaces one by one, its dict staying the same, are labelled as its scratch.
"""

from __future__ import annotations

import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.optim import Optimizer

from torchmem.labelers.anchor import Anchor
from torchmem.labelers.hooks import HookSet, is_from_signal_handler
from torchmem.labelers.owners import OwnerTable, disown, storages, tensors_in
from torchmem.labelers.step_hooks import StepHooks
from torchmem.model import OUTSIDE_OWNER, RefType

_UNNAMED = (RefType.ACTIVATION, RefType.RECOMPUTATION, RefType.TEMPORARY, RefType.OTHER)
"""What a gradient may be booked as before anybody has named it."""


class OptimizerLabeler:
    """Labels gradients before, and optimizer state after, each optimizer step.

    Args:
        native: the loaded engine.
        owners: the table of owners.
        optimizer: the one whose step ends a step; None for the first that trains the model.
        label_held: names the parameters and gradients that the model holds now.
        find_anew: called when an optimizer has come to hold state of other parameters than before.
        on_step: called after that optimizer has stepped.

    Attributes:
        step_hooks: the global hooks, once attached.
        num_steps_seen: grows with each step that begins or ends, of any optimizer.
    """

    name = "optimizer"

    def __init__(
        self,
        native: Any,
        owners: OwnerTable,
        optimizer: Optimizer | None,
        label_held: Callable[[], None],
        find_anew: Callable[[], None],
        on_step: Callable[[], None],
    ) -> None:
        self.hooks = HookSet(self.name)
        self._native = native
        self._owners = owners
        self._anchor = Anchor(optimizer, owners.trained_by)
        self.label_held = label_held
        self._find_anew = find_anew
        self._on_step = on_step
        self._thread = threading.local()
        self._seen: weakref.WeakKeyDictionary[Optimizer, tuple[int, int]] = weakref.WeakKeyDictionary()
        self._is_fresh = self._has_followed = False
        self._labelled_at = -1
        self.step_hooks: StepHooks | None = None
        self.num_steps_seen = 0

    def attach(self) -> None:
        """Books the state that exists and puts the hooks on."""
        if (optimizer := self._anchor()) is not None:
            self._label_state(optimizer)
        self.step_hooks = StepHooks(self.hooks, self.before_step, self.after_step)

    def detach(self) -> None:
        """Takes the hooks off and gives the state's storages their own deleters back."""
        self.hooks.close()
        for optimizer in self._seen:
            for tensor in tensors_in(list(optimizer.state.values())):
                disown(self._native, tensor)

    def label_now(self) -> None:
        """Names the parameters, gradients and optimizer state that exist now; a failure disables the labeler."""
        if not self.hooks.active:
            return
        try:
            self.label_held()
            for optimizer in list(self._seen):
                self._label_state(optimizer)
        except Exception as error:  # nothing of ours may reach the training loop
            if is_from_signal_handler(error):
                raise
            self.hooks.fail(error)

    @property
    def _open(self) -> list[int]:
        """Depths at which this thread's running steps opened their labels."""
        opened: list[int] = self._thread.__dict__.setdefault("opened", [])
        return opened

    def before_forward(self) -> None:
        """Takes away what an exception left on this thread: a step's label, an interrupted forward's frames."""
        self.drop_stale_labels()
        if torch._C._current_graph_task_id() == -1:  # noqa: SLF001  # outside of backward
            self._native.cut_stack(self._open[-1] + 1 if self._open else 0)

    def drop_stale_labels(self) -> None:
        """Takes away the labels of steps that an exception ended on this thread."""
        if self._open:
            self._cut_to(num_running_steps())

    def _cut_to(self, num_open: int) -> None:
        while len(self._open) > num_open:
            self._native.cut_stack(self._open.pop())

    def before_step(self, optimizer: Optimizer, _args: Any = None, _kwargs: Any = None) -> None:
        """Labels what a step makes as its scratch from here on; a hook of the optimizer."""
        self.num_steps_seen += 1
        if self._open:
            self._cut_to(num_running_steps() - 1)  # this one runs too
        self._label_before(optimizer)
        self._open.append(self._native.push_label(OUTSIDE_OWNER, RefType.TEMPORARY))

    def _label_before(self, optimizer: Optimizer) -> None:
        """Names gradients: all, or where they have been named since the last forward those of this optimizer."""
        if torch._C._current_graph_task_id() == -1 and self._native.is_lone_trainer():  # noqa: SLF001  # outside of backward
            number: int = torch.autograd._get_sequence_nr()  # type: ignore[attr-defined]  # noqa: SLF001  # of the next node
            if number != self._labelled_at:
                self._labelled_at = number
                self.label_held()
                return
        for parameter in _parameters(optimizer):
            if parameter.grad is not None and (owner := self._owners.of_parameter(parameter)) != OUTSIDE_OWNER:
                self._name_gradient(parameter.grad, owner)

    def _name_gradient(self, gradient: torch.Tensor, owner: int) -> None:
        for storage in storages(gradient):
            booked = self._native.lookup(storage.data_ptr()) if storage.nbytes() else None
            if booked is not None and booked[2] in _UNNAMED:
                self._native.adopt(storage._cdata, owner, RefType.GRADIENT)  # noqa: SLF001  # the address of the StorageImpl

    def after_step(self, optimizer: Optimizer, _args: Any = None, _kwargs: Any = None) -> None:
        """Takes the step's label away, and labels the state that it has made; a hook of the optimizer."""
        self._cut_to(max(0, len(self._open) - 1))
        self.stepped(optimizer)

    def stepped(self, optimizer: Optimizer) -> None:
        """What follows each step, eager or compiled."""
        self.num_steps_seen += 1
        self._label_state(optimizer)
        if self._anchor.ends(optimizer):
            self._is_fresh = False
            self._on_step()

    def _follow_model(self, optimizer: Optimizer) -> bool:
        """Finds what the model has got since, at most once a step: optimizers may be made by the thousand.

        Returns:
            Whether all of the optimizer's parameters are known by now, or are no parameters of the model.
        """
        is_known = all(self._owners.of_parameter(p) != OUTSIDE_OWNER for p in _parameters(optimizer))
        if self._is_fresh or (is_known and self._has_followed):
            return is_known
        self._is_fresh = self._has_followed = True
        self._owners.refresh()
        if self._anchor() is optimizer or self._owners.trained_by(optimizer):
            self._find_anew()
        return True

    def _label_state(self, optimizer: Optimizer) -> None:
        state = optimizer.state
        now = (id(state), len(state))  # loading a state dict makes a new one
        if self._seen.get(optimizer) == now and self._is_labelled(state):
            return
        if self._follow_model(optimizer):
            self._seen[optimizer] = now
        for parameter, values in state.items():
            owner = self._owners.of_parameter(parameter)
            for tensor in tensors_in(values):
                for storage in storages(tensor):
                    if owner == OUTSIDE_OWNER and self._is_named(storage):
                        continue  # of a parameter that the model has let go since
                    self._native.adopt(storage._cdata, owner, RefType.OPTIMIZER_STATE)  # noqa: SLF001  # the address of the StorageImpl

    def _is_named(self, storage: Any) -> bool:
        """Whether it is booked as the state of a module's parameter."""
        booked = self._native.lookup(storage.data_ptr()) if storage.nbytes() else None
        return booked is not None and booked[1] != OUTSIDE_OWNER and booked[2] == RefType.OPTIMIZER_STATE

    def _is_labelled(self, state: Any) -> bool:
        """False when another state took the place and the identity of the one that was walked."""
        for tensor in tensors_in(next(iter(state.values()), None)):
            for storage in storages(tensor):
                if storage.nbytes():  # FSDP2 leaves ranks with nothing of a small parameter
                    booked = self._native.lookup(storage.data_ptr())
                    return booked is not None and booked[2] == RefType.OPTIMIZER_STATE
        return True


def _parameters(optimizer: Optimizer) -> Iterator[torch.Tensor]:
    return (parameter for group in optimizer.param_groups for parameter in group["params"])


_STEP_FILE = Optimizer.profile_hook_step.__code__.co_filename


def num_running_steps() -> int:
    """Calls of ``Optimizer.step`` on this thread's stack, found by the wrapper that torch puts around every one."""
    count = 0
    frame: Any = sys._getframe(1)  # noqa: SLF001  # the only way to ask
    while frame is not None:
        code = frame.f_code
        count += code.co_name == "wrapper" and code.co_filename == _STEP_FILE
        frame = frame.f_back
    return count
