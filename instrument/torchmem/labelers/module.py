"""Plain modules: whose forward runs, what its parameters, gradients, buffers and inputs are.

Whose forward runs is told by ``frames``. Backward needs nothing: the engine finds the module that made the running
autograd node. Parameters, gradients and buffers are named again before each optimizer step, through
the modules that hold them, so that what was replaced or converted meanwhile is followed.

Invariants: what other hooks on a module allocate belongs to the module; nothing wraps ``forward``; no tensor is held;
a gradient is only looked at on the one thread that trains: torch frees gradients without the interpreter's lock, and
whoever looks at one from elsewhere may read freed memory.

Limits: a module added after ``install`` counts for the one that calls it, and its tensors as what they were made for;
gradients that exist at ``install`` are looked at there, so it belongs before the training or on the thread that trains.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from torchmem.labelers.frames import ModuleFrames
from torchmem.labelers.hooks import HookSet
from torchmem.labelers.owners import ROOT_OWNER, OwnerTable, adopt, disown, plain_tensors, tensors_in
from torchmem.model import RefType


class _Held(NamedTuple):
    """A tensor that a module holds, and where."""

    module: nn.Module
    table: str
    name: str
    tensor: torch.Tensor
    owner: int
    reftype: RefType


class ModuleLabeler:
    """Hooks on the watched modules; labels of what they hold and of the root's inputs.

    Args:
        native: the loaded engine.
        owners: the table of owners.
        is_claimed: whether another labeler names this parameter and its gradient (sharded ones).
        before_forward: called before the root's forward with the number of elements of its inputs, for what must
            notice a new iteration.
    """

    name = "module"

    def __init__(
        self,
        native: Any,
        owners: OwnerTable,
        is_claimed: Callable[[torch.Tensor], bool],
        before_forward: Callable[[int], None],
    ) -> None:
        self.hooks = HookSet(self.name)
        self._native = native
        self._owners = owners
        self._is_claimed = is_claimed
        self._before_forward = before_forward
        self.frames = ModuleFrames(native, owners, self.hooks.guarded(self._root_pre_forward))
        self._held: Any = None
        self._has_subclasses = False

    def attach(self) -> None:
        """Books what exists and puts the hooks on."""
        self._hold(self.adopt_held())
        self.frames.attach(self.hooks)

    def find_anew(self) -> None:
        """Follows parameters and buffers that were added in new places."""
        if self._held is None:
            return
        try:
            found = list(self._find_held())
        except RuntimeError:  # another thread adds or removes some just now: next time
            return
        self._hold(found)

    def _hold(self, held: list[_Held]) -> None:
        places = [(one.module, one.table, one.name, one.owner, int(one.reftype)) for one in held]
        self._held = self._native.make_held(places, torch.Tensor)
        self._has_subclasses = any(is_traceable_wrapper_subclass(one.tensor) for one in held)

    def adopt_held(self) -> list[_Held]:
        """Books the parameters, gradients and buffers that the modules hold; returns them."""
        held = list(self._find_held())
        for one in held:
            adopt(self._native, one.tensor, one.owner, one.reftype)
            adopt(self._native, _gradient_of(one.tensor), one.owner, RefType.GRADIENT)
        return held

    def detach(self) -> None:
        """Takes the hooks off and gives the storages their own deleters back."""
        self.hooks.close()
        self._held = None
        looks = self._native.is_lone_trainer()  # else a gradient's deleter stays, and passes on what it frees
        for one in self._find_held():
            disown(self._native, one.tensor)
            if looks:
                disown(self._native, _gradient_of(one.tensor))

    def label_held(self) -> None:
        """Names the parameters and buffers that the modules hold now, and their gradients unless others train too."""
        held = self._held  # another thread may be closing
        if held is None:
            return
        looks = self._native.is_lone_trainer()
        with torch._C.DisableTorchFunction():  # noqa: SLF001  # a default device would be asked about each tensor
            held.relabel(looks)
        if self._has_subclasses:
            self._label_subclasses(looks=looks)

    def _label_subclasses(self, *, looks: bool) -> None:
        """The tensors behind a subclass (tensor parallelism's DTensor), which the engine cannot find by itself."""
        for one in self._find_held():
            if not is_traceable_wrapper_subclass(one.tensor):
                continue
            self._relabel(one.tensor, one.owner, one.reftype)
            if looks and (gradient := _gradient_of(one.tensor)) is not None:
                self._relabel(gradient, one.owner, RefType.GRADIENT)

    def _find_held(self) -> Iterator[_Held]:
        seen: set[int] = set()
        for module in self._owners.model.modules():
            owner = self._owners.of_module(module)
            for table, reftype in (("_parameters", RefType.PARAMETER), ("_buffers", RefType.BUFFER)):
                for name, tensor in getattr(module, table).items():
                    if tensor is None or id(tensor) in seen or self._is_claimed(tensor):
                        continue
                    seen.add(id(tensor))
                    yield _Held(module, table, name, tensor, owner, reftype)

    def _relabel(self, tensor: torch.Tensor, owner: int, reftype: RefType) -> None:
        for plain in plain_tensors(tensor):
            self._native.relabel(plain._cdata, owner, reftype)  # noqa: SLF001  # the address of the TensorImpl

    def _root_pre_forward(self, _module: nn.Module, args: Any, kwargs: Any) -> None:
        if self.frames.is_root_inside_itself():  # no new iteration, and its arguments are activations
            return
        inputs = [tensor for tensor in tensors_in((args, kwargs)) if not isinstance(tensor, nn.Parameter)]
        self._before_forward(sum(tensor.numel() for tensor in inputs))
        for tensor in inputs:
            adopt(self._native, tensor, ROOT_OWNER, RefType.INPUT)


def _gradient_of(tensor: torch.Tensor) -> torch.Tensor | None:
    return tensor.grad if tensor.is_leaf or tensor.retains_grad else None  # torch warns of asking any other
