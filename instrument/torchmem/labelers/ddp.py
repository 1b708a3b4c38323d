"""DistributedDataParallel: the reducer's buckets, which live as long as it does.

The buckets belong to the model's root and are ``gradient_bucket``; with ``gradient_as_bucket_view`` the gradients lie
in them and have no bytes of their own. They are made when the model is wrapped and once more before the second
forward, in C++; where they are is asked of the reducer whenever one of those known has lost its label.

Private torch interfaces used, checked on attach: ``DistributedDataParallel._pre_forward`` and ``reducer``; of the C++
reducer ``get_grad_buckets``.

Invariants: wrapped before or after ``install``, with the wrapper watched or the module inside it; other models'
reducers are left alone.

Limits: what a communication hook allocates is ``temporary``; DDP's own mixed precision is not named; the buckets of the
Python reducer, which torch.compile uses, are none.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from torchmem.labelers.hooks import HookSet
from torchmem.labelers.owners import OwnerTable
from torchmem.model import OUTSIDE_OWNER, RefType


class DdpLabeler:
    """Labels the gradient buckets of every DDP wrapper around or inside the model.

    Args:
        native: the loaded engine.
        owners: the table of owners.
        label_held: names the gradients that the model holds now.
    """

    name = "ddp"

    def __init__(self, native: Any, owners: OwnerTable, label_held: Callable[[], None]) -> None:
        self.hooks = HookSet(self.name)
        self._native = native
        self._owners = owners
        self._label_held = label_held
        self._accumulating: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self._known: weakref.WeakKeyDictionary[nn.Module, list[int]] = weakref.WeakKeyDictionary()

    def attach(self) -> None:
        """Books the buckets that exist and patches the wrapper's class."""
        if not hasattr(DistributedDataParallel, "_pre_forward"):
            raise AttributeError(f"DistributedDataParallel of torch {torch.__version__} has no _pre_forward")
        for module in self._owners.model.modules():
            if isinstance(module, DistributedDataParallel):
                self._label(module)
        self.hooks.patch(DistributedDataParallel, "_pre_forward", self._around_pre_forward)

    def detach(self) -> None:
        """Takes the patch off and gives the buckets their own deleters back."""
        self.hooks.close()
        for wrapper in self._known:
            for storage, _ in self._storages(wrapper):
                self._native.disown(storage)
        self._known.clear()

    def _around_pre_forward(self, original: Callable[..., Any]) -> Callable[..., Any]:
        before, after = self.hooks.guarded(self._before_pre_forward), self.hooks.guarded(self._label)

        @functools.wraps(original)
        def pre_forward(wrapper: Any, *args: Any, **kwargs: Any) -> Any:
            before(wrapper)
            result = original(wrapper, *args, **kwargs)
            after(wrapper)
            return result

        return pre_forward

    def _before_pre_forward(self, wrapper: Any) -> None:
        """Gradients accumulated apart from their buckets (``no_sync``) are gone when the optimizer steps: name them."""
        if wrapper in self._accumulating and self._owner_of(wrapper) != OUTSIDE_OWNER:
            self._label_held()
        if wrapper.gradient_as_bucket_view and not wrapper.require_backward_grad_sync:
            self._accumulating.add(wrapper)
        else:
            self._accumulating.discard(wrapper)

    def _owner_of(self, wrapper: Any) -> int:
        return self._owners.of_module(wrapper) or self._owners.of_module(wrapper.module)

    def _label(self, wrapper: Any) -> None:
        known = self._known.get(wrapper, [])
        if known and all(self._is_labelled(address) for address in known):
            return
        owner = self._owner_of(wrapper)
        if owner == OUTSIDE_OWNER:
            return
        found = self._storages(wrapper)
        for storage, _ in found:
            self._native.adopt(storage, owner, RefType.GRADIENT_BUCKET)
        self._known[wrapper] = [address for _, address in found]

    def _is_labelled(self, address: int) -> bool:
        booked = self._native.lookup(address)
        return booked is not None and booked[2] == RefType.GRADIENT_BUCKET

    def _storages(self, wrapper: Any) -> list[tuple[int, int]]:
        """(address of the StorageImpl, of its memory) of each bucket."""
        from torch._C._distributed_c10d import Reducer

        reducer = getattr(wrapper, "reducer", None)
        if not isinstance(reducer, Reducer):
            return []
        found: list[tuple[int, int]] = self._native.bucket_storages(reducer)
        return found
