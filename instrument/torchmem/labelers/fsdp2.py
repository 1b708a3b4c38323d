"""FSDP2 (``fully_shard``): all-gather and reduce-scatter buffers, unsharded parameters, gradients either side.

Labels by context: while a parameter group unshards, what it allocates is ``all_gather``; in its post-backward,
``reduce_scatter``. What turned out to be something else there (the unsharded parameters, the sharded gradients) is
relabelled right after, back to its birth.

Private torch interfaces used, checked on attach: ``FSDPParamGroup.unshard``, ``wait_for_unshard``, ``post_backward``,
``fsdp_params``, ``modules``, ``_all_reduce_state``, ``_partial_reduce_output``; ``FSDPParam.reset_sharded_param``; of a
parameter ``all_gather_outputs``, ``_unsharded_inner_tensors``, ``_unsharded_param``, ``sharded_param``,
``unsharded_accumulated_grad``.

Invariants: buffers belong to the module that was given to ``fully_shard``, parameters and their unsharded gradients to
the module that holds them. The sharded gradients of one group are views of one storage, which is the group's.

Limits: under HSDP the buffer that is all-reduced is ``all_reduce`` only where it is not itself the sharded gradient
(another type, or gradients kept for a later all-reduce): else it is ``sharded_gradient``.
"""

from __future__ import annotations

import functools
import sys
import weakref
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from torchmem.labelers.hooks import HookSet
from torchmem.labelers.owners import OwnerTable, adopt, disown, plain_tensors
from torchmem.model import RefType

_LABELS = {
    "unshard": (int(RefType.ALL_GATHER), -1, -1),
    # What is left once the parameters are named is copying between the buffer and them.
    "wait_for_unshard": (int(RefType.ALL_GATHER), -1, int(RefType.UNSHARDED_PARAMETER)),
    "post_backward": (int(RefType.REDUCE_SCATTER), int(RefType.UNSHARDED_GRADIENT), -1),
}
"""By method: the label of what it allocates, of the gradients before it, of the unsharded parameters after it."""


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
        self._groups: weakref.WeakSet[Any] = weakref.WeakSet(groups)
        self._claimed = {id(p.sharded_param) for group in groups for p in group.fsdp_params}

    def claims(self, parameter: torch.Tensor) -> bool:
        """True for a parameter that FSDP2 manages."""
        return id(parameter) in self._claimed

    def attach(self) -> None:
        """Books what exists and patches the groups' class; nothing where there are no groups.

        A group may carry a method of its own (torch's memory tracker leaves some behind): that one is patched too.
        """
        if not self._groups:
            return
        from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam
        from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup

        if missing := [name for name in _LABELS if not hasattr(FSDPParamGroup, name)]:
            raise AttributeError(f"FSDPParamGroup of torch {torch.__version__} has no {', '.join(missing)}")
        for group in self._groups:
            for parameter in group.fsdp_params:
                self._adopt_sharded(parameter)
            self._adopt_unsharded(group)
        self.hooks.patch(FSDPParam, "reset_sharded_param", self._after_reset)
        for name in _LABELS:
            self.hooks.patch(FSDPParamGroup, name, partial(self._labelled, name))
            for group in self._groups:
                if name in vars(group):
                    self.hooks.patch_own(group, name, partial(self._label_call, name))

    def detach(self) -> None:
        """Takes the patches off."""
        self.hooks.close()
        for group in self._groups:
            vars(group).pop("_torchmem", None)
        for group in self._groups:
            for tensor, _ in _unsharded_storage(group, self._owners):
                disown(self._native, tensor)
            for parameter in group.fsdp_params:
                for tensor in (parameter.sharded_param, parameter.sharded_param.grad):
                    disown(self._native, tensor)

    def _after_reset(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Converting or loading a model gives its parameters other storages."""
        adopt = self.hooks.guarded(self._adopt_sharded)

        @functools.wraps(original)
        def reset_sharded_param(parameter: Any) -> Any:
            result = original(parameter)
            adopt(parameter)
            return result

        return reset_sharded_param

    def _adopt_sharded(self, parameter: Any) -> None:
        self._claimed.add(id(parameter.sharded_param))
        owner = _owner_of(parameter, self._owners)
        adopt(self._native, parameter.sharded_param, owner, RefType.SHARDED_PARAMETER)
        adopt(self._native, parameter.sharded_param.grad, owner, RefType.SHARDED_GRADIENT)

    def _adopt_unsharded(self, group: Any) -> None:
        for tensor, owner in _unsharded_storage(group, self._owners):
            adopt(self._native, tensor, owner, RefType.UNSHARDED_PARAMETER)

    def _labelled(self, name: str, original: Any) -> Any:
        call = self._label_call(name, original)
        self.hooks.on_off(call.disable)
        return call

    def _label_call(self, name: str, original: Any) -> Any:
        reftype, gradients_before, parameters_after = _LABELS[name]
        after = {"wait_for_unshard": self._remember_unsharded, "post_backward": self._after_post_backward}.get(name)
        return self._native.make_label_call(
            original, self._target, after, self.hooks.fail, reftype, gradients_before, parameters_after
        )

    def _target(self, group: Any) -> Any:
        """What the engine knows of a group, left on it where it is quickly found."""
        group._torchmem = self._native.make_target(self._owners.of_module(group.modules[0]))  # noqa: SLF001  # our own attribute
        self._groups.add(group)
        return group._torchmem  # noqa: SLF001  # as above

    def _remember_unsharded(self, group: Any) -> None:
        """Names the parameters after the first unshard; from then on the engine does so by itself."""
        if not all(hasattr(p, "_unsharded_param") for p in group.fsdp_params):
            return  # nothing was unsharded yet
        known = group._torchmem  # noqa: SLF001  # as above
        # _cdata is the address of the TensorImpl
        known.parameters = self._native.make_group([(t._cdata, o) for t, o in _unsharded_storage(group, self._owners)])  # noqa: SLF001
        if any(is_traceable_wrapper_subclass(p._unsharded_param) for p in group.fsdp_params):  # noqa: SLF001  # as above
            known.unsharded = partial(self._label_parallel_gradients, weakref.ref(group))
        else:
            known.unsharded = self._native.make_group(
                [(p._unsharded_param._cdata, _owner_of(p, self._owners)) for p in group.fsdp_params]  # noqa: SLF001  # as above
            )
        known.parameters.relabel(RefType.UNSHARDED_PARAMETER)

    def _label_parallel_gradients(self, reference: weakref.ref[Any]) -> None:
        """Under tensor parallelism an unsharded gradient is a DTensor: the engine cannot find its memory by itself."""
        group = reference()
        for parameter in () if group is None else group.fsdp_params:
            gradient = parameter._unsharded_param.grad  # noqa: SLF001  # as above
            if gradient is not None:
                self._label_unsharded(gradient, parameter)

    def _label_unsharded(self, gradient: torch.Tensor, parameter: Any) -> None:
        owner = _owner_of(parameter, self._owners)
        for tensor in plain_tensors(gradient):
            self._native.relabel(tensor._cdata, owner, RefType.UNSHARDED_GRADIENT)  # noqa: SLF001  # as above

    def _label_all_reduced(self, group: Any, owner: int) -> None:
        state = getattr(group, "_all_reduce_state", None)
        for tensor in (getattr(state, "all_reduce_input", None), getattr(group, "_partial_reduce_output", None)):
            if tensor is not None:
                self._native.relabel(tensor._cdata, owner, RefType.ALL_REDUCE)  # noqa: SLF001  # as above

    def _after_post_backward(self, group: Any) -> None:
        owner = group._torchmem.owner  # noqa: SLF001  # as above
        self._label_all_reduced(group, owner)
        for parameter in group.fsdp_params:
            gradient = parameter.sharded_param.grad
            if gradient is None:
                continue
            local = gradient._local_tensor if isinstance(gradient, DTensor) else gradient  # noqa: SLF001  # to_local() makes an autograd node
            moved = self._native.relabel(local._cdata, owner, RefType.SHARDED_GRADIENT)  # noqa: SLF001  # the address of the TensorImpl
            if moved and not parameter.offload_to_cpu:
                break  # the group's other new gradients are views of this storage; older ones have their label
        if not group.reduce_grads:
            self._label_accumulated(group)

    def _label_accumulated(self, group: Any) -> None:
        for parameter in group.fsdp_params:
            accumulated = parameter.unsharded_accumulated_grad
            if accumulated is not None:
                self._label_unsharded(accumulated, parameter)


def _owner_of(fsdp_param: Any, owners: OwnerTable) -> int:
    return owners.of_module(fsdp_param._module_info.module)  # noqa: SLF001  # there is no public way


def _unsharded_storage(group: Any, owners: OwnerTable) -> Iterator[tuple[torch.Tensor, int]]:
    """The tensors that hold a group's unsharded parameters, also while they are empty, with their owners."""
    for parameter in group.fsdp_params:
        for tensor in (*parameter.all_gather_outputs, *parameter._unsharded_inner_tensors):  # noqa: SLF001  # as above
            yield tensor, _owner_of(parameter, owners)
