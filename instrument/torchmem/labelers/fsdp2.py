"""FSDP2 (``fully_shard``): all-gather and reduce-scatter buffers, unsharded parameters, gradients either side.

Labels by context: while a parameter group unshards, what it allocates is ``all_gather``; in its post-backward,
``reduce_scatter``. What turned out to be something else there (the unsharded parameters, the sharded gradients) is
relabelled right after, back to its birth.

Private torch interfaces used, checked on attach: ``FSDPParamGroup.unshard``, ``wait_for_unshard``, ``post_backward``,
``fsdp_params``, ``modules``; of a parameter ``all_gather_outputs``, ``_unsharded_inner_tensors``, ``_unsharded_param``,
``sharded_param``, ``unsharded_accumulated_grad``.

Invariants: buffers belong to the module that was given to ``fully_shard``, parameters and their unsharded gradients to
the module that holds them. The sharded gradients of one group are views of one storage, which is the group's.

Limits: gradients of unsharded parameters that are themselves DTensors (tensor parallelism) are ``temporary`` until
they are reduced; HSDP's all-reduce buffers count as ``reduce_scatter``.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from torchmem.labelers.hooks import HookSet
from torchmem.labelers.owners import OwnerTable, plain_tensors
from torchmem.model import RefType

_GROUP_METHODS = ("unshard", "wait_for_unshard", "post_backward")


def param_groups(model: nn.Module) -> list[Any]:
    """The model's FSDP2 parameter groups, each once; empty where there are none."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    if fsdp is None:  # never imported: nothing can have been sharded
        return []
    groups: dict[int, Any] = {}
    for module in model.modules():
        if isinstance(module, fsdp.FSDPModule):
            for group in module._get_fsdp_state()._fsdp_param_groups:  # noqa: SLF001  # there is no public way
                groups[id(group)] = group
    return list(groups.values())


class _Group:
    """What is remembered of one parameter group; its tensors are made at the first unshard."""

    def __init__(self, owner: int) -> None:
        self.owner = owner
        self.parameters: Any = None
        self.unsharded: Any = None


class Fsdp2Labeler:
    """Labels what FSDP2 allocates around the computation.

    Args:
        native: the loaded engine.
        owners: the table of owners.
        groups: from ``param_groups``.
    """

    name = "fsdp2"

    def __init__(self, native: Any, owners: OwnerTable, groups: list[Any]) -> None:
        self.hooks = HookSet(self.name)
        self._native = native
        self._owners = owners
        self._groups: weakref.WeakKeyDictionary[Any, _Group] = weakref.WeakKeyDictionary(
            {group: _Group(owners.of_module(group.modules[0])) for group in groups}
        )
        self._sharded = {id(p.sharded_param) for group in groups for p in group.fsdp_params}

    def is_sharded(self, parameter: nn.Parameter) -> bool:
        """True for a parameter that FSDP2 manages."""
        return id(parameter) in self._sharded

    def attach(self) -> None:
        """Books the buffers that exist and patches the groups' class.

        A group may carry a method of its own (torch's memory tracker leaves some behind): that one is patched too.
        """
        from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup

        if missing := [name for name in _GROUP_METHODS if not hasattr(FSDPParamGroup, name)]:
            raise AttributeError(f"FSDPParamGroup of torch {torch.__version__} has no {', '.join(missing)}")
        for group in self._groups:
            self._adopt_unsharded(group)
        for name in _GROUP_METHODS:
            before, after = getattr(self, f"_before_{name}"), getattr(self, f"_after_{name}")
            self.hooks.patch(FSDPParamGroup, name, before, after)
            for group in self._groups:
                if name in vars(group):  # already bound: it is called without the group
                    self.hooks.patch(group, name, partial(before, group), partial(_with_group, after, group))

    def detach(self) -> None:
        """Takes the patches off."""
        self.hooks.close()
        for group in self._groups:
            for tensor, _ in _unsharded_storage(group, self._owners):
                self._native.disown(tensor.untyped_storage()._cdata)  # noqa: SLF001  # the address of the StorageImpl

    def _adopt_unsharded(self, group: Any) -> None:
        for tensor, owner in _unsharded_storage(group, self._owners):
            storage = tensor.untyped_storage()
            self._native.adopt(storage._cdata, owner, RefType.UNSHARDED_PARAMETER)  # noqa: SLF001  # as above

    def _of(self, group: Any) -> _Group:
        known = self._groups.get(group)
        if known is None:
            known = self._groups[group] = _Group(self._owners.of_module(group.modules[0]))
        return known

    def _before_unshard(self, group: Any, *_: Any) -> int:
        depth: int = self._native.push_label(self._of(group).owner, RefType.ALL_GATHER)
        return depth

    def _after_unshard(self, depth: int, *_: Any) -> None:
        self._native.cut_stack(depth)

    def _before_wait_for_unshard(self, group: Any) -> int:
        # What is left over once the parameters are named is the copying between the buffer and them.
        depth: int = self._native.push_label(self._of(group).owner, RefType.ALL_GATHER)
        return depth

    def _after_wait_for_unshard(self, depth: int, group: Any) -> None:
        self._native.cut_stack(depth)
        known = self._of(group)
        if known.parameters is None:
            self._remember_unsharded(known, group)
        if known.parameters is not None:
            known.parameters.relabel(RefType.UNSHARDED_PARAMETER)

    def _remember_unsharded(self, known: _Group, group: Any) -> None:
        if not all(hasattr(p, "_unsharded_param") for p in group.fsdp_params):
            return  # nothing was unsharded yet
        # _cdata is the address of the TensorImpl
        known.parameters = self._native.make_group([(t._cdata, o) for t, o in _unsharded_storage(group, self._owners)])  # noqa: SLF001
        known.unsharded = self._native.make_group(
            [(p._unsharded_param._cdata, _owner_of(p, self._owners)) for p in group.fsdp_params]  # noqa: SLF001  # as above
        )

    def _before_post_backward(self, group: Any, *_: Any) -> int:
        known = self._of(group)
        if known.unsharded is not None:
            known.unsharded.relabel_gradients(RefType.UNSHARDED_GRADIENT)
        depth: int = self._native.push_label(known.owner, RefType.REDUCE_SCATTER)
        return depth

    def _after_post_backward(self, depth: int, group: Any, *_: Any) -> None:
        self._native.cut_stack(depth)
        owner = self._of(group).owner
        relabel = self._native.relabel
        for parameter in group.fsdp_params:
            gradient = parameter.sharded_param.grad
            if gradient is None:
                continue
            local = gradient._local_tensor if isinstance(gradient, DTensor) else gradient  # noqa: SLF001  # to_local() makes an autograd node
            moved = relabel(local._cdata, owner, RefType.SHARDED_GRADIENT)  # noqa: SLF001  # the address of the TensorImpl
            if moved and not parameter.offload_to_cpu:
                break  # the group's other new gradients are views of this storage; older ones have their label
        if not group.reduce_grads:
            self._label_accumulated(group)

    def _label_accumulated(self, group: Any) -> None:
        for parameter in group.fsdp_params:
            accumulated = parameter.unsharded_accumulated_grad
            if accumulated is not None:
                for tensor in plain_tensors(accumulated):
                    owner = _owner_of(parameter, self._owners)
                    self._native.relabel(tensor._cdata, owner, RefType.UNSHARDED_GRADIENT)  # noqa: SLF001  # as above


def _with_group(after: Callable[..., None], group: Any, depth: int, *args: Any) -> None:
    after(depth, group, *args)


def _owner_of(fsdp_param: Any, owners: OwnerTable) -> int:
    return owners.of_module(fsdp_param._module_info.module)  # noqa: SLF001  # there is no public way


def _unsharded_storage(group: Any, owners: OwnerTable) -> Iterator[tuple[torch.Tensor, int]]:
    """The tensors that hold a group's unsharded parameters, also while they are empty, with their owners."""
    for parameter in group.fsdp_params:
        for tensor in (*parameter.all_gather_outputs, *parameter._unsharded_inner_tensors):  # noqa: SLF001  # as above
            yield tensor, _owner_of(parameter, owners)
