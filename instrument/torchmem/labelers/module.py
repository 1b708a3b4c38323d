"""Plain modules: whose forward runs, what its parameters, buffers and inputs are.

Each watched module gets two native hooks (about a microsecond each, no Python of ours). Backward needs none: the
engine finds the module that made the running autograd node.

Invariants: hooks are prepended before forward and appended after it, and called on exceptions too, so that what other
hooks allocate belongs to the module; nothing wraps ``forward``.

Limits: a module added after ``install`` counts for the one that calls it; parameters replaced after it are relabelled
as optimizer state or gradients are, but not themselves.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from torchmem.labelers.hooks import HookSet
from torchmem.labelers.owners import ROOT_OWNER, OwnerTable, storages, tensors_in
from torchmem.model import RefType

_CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)
"""Never called themselves."""


class ModuleLabeler:
    """Hooks on the watched modules; labels of parameters, buffers, inputs and whatever gradients exist.

    Args:
        native: the loaded engine.
        owners: the table of owners.
        parameter_reftype: what a parameter is (a sharded one under FSDP2).
        before_forward: called before the root's forward, for labelers that must notice a new iteration.
    """

    name = "module"

    def __init__(
        self,
        native: Any,
        owners: OwnerTable,
        parameter_reftype: Callable[[nn.Parameter], RefType],
        before_forward: Callable[[], None],
    ) -> None:
        self.hooks = HookSet(self.name)
        self._native = native
        self._owners = owners
        self._parameter_reftype = parameter_reftype
        self._before_forward = before_forward

    def attach(self) -> None:
        """Books what exists and puts the hooks on."""
        for tensor, owner, reftype in self._static_tensors():
            for storage in storages(tensor):
                self._native.adopt(storage._cdata, owner, reftype)  # noqa: SLF001  # the address of the StorageImpl
        for owner, module in list(self._owners.watched.items()):
            if isinstance(module, _CONTAINERS):
                continue
            make = self._native.make_hook
            self.hooks.add(module.register_forward_pre_hook(make(owner, 1), prepend=True))
            self.hooks.add(module.register_forward_hook(make(owner, 0), always_call=True))
        root_hook = self.hooks.guarded(self._root_pre_forward)
        self.hooks.add(self._owners.model.register_forward_pre_hook(root_hook, prepend=True, with_kwargs=True))

    def detach(self) -> None:
        """Takes the hooks off and gives the storages their own deleters back."""
        self.hooks.close()
        for tensor, _, _ in self._static_tensors():
            for storage in storages(tensor):
                self._native.disown(storage._cdata)  # noqa: SLF001  # as above

    def _static_tensors(self) -> list[tuple[torch.Tensor, int, RefType]]:
        found: list[tuple[torch.Tensor, int, RefType]] = []
        for module in self._owners.model.modules():
            owner = self._owners.of_module(module)
            found += [(b, owner, RefType.BUFFER) for b in module.buffers(recurse=False)]
        for parameter in self._owners.model.parameters():
            owner = self._owners.of_parameter(parameter)
            reftype = self._parameter_reftype(parameter)
            found.append((parameter, owner, reftype))
            if parameter.grad is not None:
                sharded = reftype is RefType.SHARDED_PARAMETER
                found.append((parameter.grad, owner, RefType.SHARDED_GRADIENT if sharded else RefType.GRADIENT))
        return found

    def _root_pre_forward(self, _module: nn.Module, args: Any, kwargs: Any) -> None:
        self._before_forward()
        for tensor in tensors_in((args, kwargs)):
            if not isinstance(tensor, nn.Parameter):
                for storage in storages(tensor):
                    self._native.adopt(storage._cdata, ROOT_OWNER, RefType.INPUT)  # noqa: SLF001  # as above
