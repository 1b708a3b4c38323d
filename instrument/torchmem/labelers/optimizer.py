"""Optimizers: what the step keeps is optimizer state, what it frees again is temporary; the step ends the step.

Works with any optimizer, passed in or not, through torch's global optimizer hooks. State is walked only when it has
grown or been replaced, so a settled optimizer costs two hooks a step.

Invariants: an exception inside ``optimizer.step()`` (torch then calls no post hook) leaves a label behind that the
next forward takes away; an optimizer whose closure runs the model (LBFGS) keeps its label. What the model holds is only
looked at before a step that trains it, and in the midst of a backward only what that step trains: the model's backward,
on another thread perhaps, puts gradients in place without the interpreter's lock.

Limits: state tensors that an optimizer replaces one by one, its dict staying the same, are labelled as its scratch.
"""

from __future__ import annotations

import sys
import threading
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch.optim import Optimizer

from torchmem.labelers.hooks import HookSet
from torchmem.labelers.owners import OwnerTable, disown, storages, tensors_in
from torchmem.labelers.step_hooks import StepHooks
from torchmem.model import OUTSIDE_OWNER, RefType


class OptimizerLabeler:
    """Labels gradients before, and optimizer state after, each optimizer step.

    Args:
        native: the loaded engine.
        owners: the table of owners.
        optimizer: the one whose step ends a step; None for the first that steps.
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
        self._anchor = None if optimizer is None else weakref.ref(optimizer)
        self.label_held = label_held
        self._find_anew = find_anew
        self._on_step = on_step
        self._thread = threading.local()
        self._seen: weakref.WeakKeyDictionary[Optimizer, tuple[int, int]] = weakref.WeakKeyDictionary()
        self._trainers: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        self.step_hooks: StepHooks | None = None
        self.num_steps_seen = 0

    def attach(self) -> None:
        """Books the state that exists and puts the hooks on."""
        optimizer = None if self._anchor is None else self._anchor()
        if optimizer is not None:
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
        except Exception as error:  # noqa: BLE001  # nothing of ours may reach the training loop
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
        if self._is_anchor(optimizer) or self._trains_model(optimizer):
            self._label_before(optimizer)
        self._open.append(self._native.push_label(OUTSIDE_OWNER, RefType.TEMPORARY))

    def _label_before(self, optimizer: Optimizer) -> None:
        if torch._C._current_graph_task_id() == -1:  # noqa: SLF001  # outside of backward
            self.label_held()
            return
        # Other threads of this backward may be putting other gradients in place.
        parameters = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        for owner, gradient in ((self._owners.of_parameter(p), p.grad) for p in parameters):
            for storage in storages(gradient) if owner != OUTSIDE_OWNER else ():
                booked = self._native.lookup(storage.data_ptr()) if storage.nbytes() else None
                if booked is not None and booked[2] != RefType.GRADIENT_BUCKET:
                    self._native.adopt(storage._cdata, owner, RefType.GRADIENT)  # noqa: SLF001  # the address of the StorageImpl

    def after_step(self, optimizer: Optimizer, _args: Any = None, _kwargs: Any = None) -> None:
        """Takes the step's label away, and labels the state that it has made; a hook of the optimizer."""
        self._cut_to(max(0, len(self._open) - 1))
        self.stepped(optimizer)

    def stepped(self, optimizer: Optimizer) -> None:
        """What follows each step, eager or compiled."""
        self.num_steps_seen += 1
        self._label_state(optimizer)
        if (self._anchor is None or self._anchor() is None) and self._trains_model(optimizer):
            self._anchor = weakref.ref(optimizer)
        if self._is_anchor(optimizer):
            self._on_step()

    def _is_anchor(self, optimizer: Optimizer) -> bool:
        return self._anchor is not None and self._anchor() is optimizer

    def _trains_model(self, optimizer: Optimizer) -> bool:
        if optimizer in self._trainers:
            return True
        is_trainer = self._has_parameters_of_model(optimizer)
        if not is_trainer and optimizer not in self._seen:  # at its first step the model may have got new ones
            self._owners.refresh()
            is_trainer = self._has_parameters_of_model(optimizer)
        if is_trainer:  # one that is none may become one
            self._trainers.add(optimizer)
        return is_trainer

    def _has_parameters_of_model(self, optimizer: Optimizer) -> bool:
        parameters = (p for group in optimizer.param_groups for p in group["params"])
        return any(self._owners.of_parameter(p) != OUTSIDE_OWNER for p in parameters)

    def _label_state(self, optimizer: Optimizer) -> None:
        state = optimizer.state
        now = (id(state), len(state))  # loading a state dict makes a new one
        if self._seen.get(optimizer) == now and self._is_labelled(state):
            return
        self._seen[optimizer] = now
        self._owners.refresh()
        if self._is_anchor(optimizer) or self._has_parameters_of_model(optimizer):
            self._find_anew()
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
