"""FSDP1 (``FullyShardedDataParallel``): flat parameters, sharded and not, their gradients and buffers.

A flat parameter belongs to the module that was wrapped, which may hold many. While a handle unshards, what it
allocates is ``all_gather`` (the shard cast to low precision, copies), and the flat parameter that is filled is
``unsharded_parameter``. In its post-backward the flat gradient is ``unsharded_gradient``, what is allocated
``reduce_scatter``, and the shard that is kept ``sharded_gradient``. With ``NO_SHARD`` the flat parameter and its
gradient are a plain ``parameter`` and ``gradient``.

Private torch interfaces used, checked on attach: ``FlatParamHandle.pre_unshard`` and ``unshard``, ``flat_param``,
``uses_sharded_strategy``, ``_fully_sharded_module``; ``_runtime_utils._post_backward_hook``; of a flat parameter
``_local_shard``, ``_mp_shard``, ``_full_param_padded``, ``_full_prec_full_param_padded``, ``_saved_grad_shard``,
``_cpu_grad``, ``_params``.

Invariants: relabelled back to its birth, so that a peak during backward knows gradients for what they are.

Limits: in ``no_sync`` gradients stay ``unsharded_gradient`` until they are reduced; a communication hook's own buffers
are ``reduce_scatter``.
"""

from __future__ import annotations

import functools
import sys
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from torchmem.labelers.hooks import HookSet
from torchmem.labelers.owners import OwnerTable, adopt, disown
from torchmem.model import RefType

_UNSHARD_METHODS = ("pre_unshard", "unshard")


def flat_handles(model: nn.Module) -> list[Any]:
    """The handles of the model's flat parameters, each once; empty where there are none."""
    fsdp = sys.modules.get("torch.distributed.fsdp.fully_sharded_data_parallel")
    if fsdp is None:  # never imported: nothing can have been wrapped
        return []
    handles = [
        module._handle  # noqa: SLF001  # there is no public way
        for module in model.modules()
        if isinstance(module, fsdp.FullyShardedDataParallel) and module._handle is not None  # noqa: SLF001  # as above
    ]
    return list({id(handle): handle for handle in handles}.values())


class Fsdp1Labeler:
    """Labels what FSDP1 allocates around the computation.

    Args:
        native: the loaded engine.
        owners: the table of owners.
        handles: from ``flat_handles``.
    """

    name = "fsdp1"

    def __init__(self, native: Any, owners: OwnerTable, handles: list[Any]) -> None:
        self.hooks = HookSet(self.name)
        self._native = native
        self._owners = owners
        self._handles: weakref.WeakSet[Any] = weakref.WeakSet(handles)
        self._claimed = {id(p) for handle in handles for p in _parameters_of(handle)}

    def claims(self, parameter: torch.Tensor) -> bool:
        """True for a flat parameter, or one that is a view of it."""
        return id(parameter) in self._claimed

    def attach(self) -> None:
        """Books what exists and patches the handles' class; nothing where FSDP1 was never imported."""
        if not self._handles:
            return
        from torch.distributed.fsdp import _runtime_utils
        from torch.distributed.fsdp._flat_param import FlatParamHandle

        wanted: list[tuple[Any, str]] = [(FlatParamHandle, name) for name in _UNSHARD_METHODS]
        wanted.append((_runtime_utils, "_post_backward_hook"))
        if missing := [name for owner, name in wanted if not hasattr(owner, name)]:
            raise AttributeError(f"FSDP1 of torch {torch.__version__} has no {', '.join(missing)}")
        for handle in self._handles:
            for tensor, reftype in _lasting_tensors(handle):
                adopt(self._native, tensor, self._owner_of(handle), reftype)
        for name in _UNSHARD_METHODS:
            self.hooks.patch(FlatParamHandle, name, self._unsharding)
        self.hooks.patch(_runtime_utils, "_post_backward_hook", self._post_backward)

    def detach(self) -> None:
        """Takes the patches off."""
        self.hooks.close()
        for handle in self._handles:
            vars(handle).pop("_torchmem", None)
        for handle in self._handles:
            for tensor, _ in _lasting_tensors(handle):
                disown(self._native, tensor)

    def _owner_of(self, handle: Any) -> int:
        return self._owners.of_module(handle._fully_sharded_module)  # noqa: SLF001  # there is no public way

    def _unsharding(self, original: Any) -> Any:
        call = self._native.make_label_call(
            original,
            self._target,
            self._remember_unsharded,
            self.hooks.fail,
            int(RefType.ALL_GATHER),
            -1,
            int(RefType.UNSHARDED_PARAMETER),
        )
        self.hooks.on_off(call.disable)
        return call

    def _target(self, handle: Any) -> Any:
        """What the engine knows of a handle, left on it where it is quickly found."""
        handle._torchmem = self._native.make_target(self._owner_of(handle))  # noqa: SLF001  # our own attribute
        self._handles.add(handle)
        return handle._torchmem  # noqa: SLF001  # as above

    def _remember_unsharded(self, handle: Any) -> None:
        """Names the flat parameter after the first unshard; from then on the engine does so by itself."""
        tensors = list(_unsharded_tensors(handle))
        if not tensors:
            return  # not initialised yet
        owner = self._owner_of(handle)
        # A shard that could be resized before the tap came must not bypass it later.
        for tensor in tensors:
            adopt(self._native, tensor, owner, RefType.UNSHARDED_PARAMETER)
        group = self._native.make_group([(t._cdata, owner) for t in tensors])  # noqa: SLF001  # the address of the TensorImpl
        handle._torchmem.parameters = group  # noqa: SLF001  # as above
        group.relabel(RefType.UNSHARDED_PARAMETER)

    def _post_backward(self, original: Callable[..., Any]) -> Callable[..., Any]:
        before, after = self.hooks.guarded(self._before_reduction), self.hooks.guarded(self._after_reduction)

        @functools.wraps(original)
        def post_backward(state: Any, handle: Any, *args: Any) -> Any:
            depths: list[int] = []
            before(handle, depths)
            try:
                return original(state, handle, *args)
            finally:
                after(handle, depths)

        return post_backward

    def _before_reduction(self, handle: Any, depths: list[int]) -> None:
        owner = self._owner_of(handle)
        gradient = handle.flat_param.grad
        if gradient is not None:
            sharded = handle.uses_sharded_strategy
            self._relabel(gradient, owner, RefType.UNSHARDED_GRADIENT if sharded else RefType.GRADIENT)
        depths.append(self._native.push_label(owner, RefType.REDUCE_SCATTER))

    def _after_reduction(self, handle: Any, depths: list[int]) -> None:
        for depth in depths:
            self._native.cut_stack(depth)
        owner = self._owner_of(handle)
        for tensor, reftype in _gradients_of(handle):
            self._relabel(tensor, owner, reftype)

    def _relabel(self, tensor: torch.Tensor, owner: int, reftype: RefType) -> None:
        self._native.relabel(tensor._cdata, owner, reftype)  # noqa: SLF001  # the address of the TensorImpl


def _parameters_of(handle: Any) -> Iterator[torch.Tensor]:
    yield handle.flat_param
    yield from getattr(handle.flat_param, "_params", None) or ()


def _unsharded_tensors(handle: Any) -> Iterator[torch.Tensor]:
    """The tensors that hold the parameters during computation, also while they are empty."""
    names = ("_full_param_padded", "_full_prec_full_param_padded") if handle.uses_sharded_strategy else ("_mp_shard",)
    for name in names:
        tensor = getattr(handle.flat_param, name, None)
        if tensor is not None:
            yield tensor


def _lasting_tensors(handle: Any) -> Iterator[tuple[torch.Tensor, RefType]]:
    """What a handle keeps between steps."""
    flat = handle.flat_param
    sharded = handle.uses_sharded_strategy
    yield getattr(flat, "_local_shard", flat), RefType.SHARDED_PARAMETER if sharded else RefType.PARAMETER
    if sharded and hasattr(flat, "_mp_shard"):
        yield flat._mp_shard, RefType.ALL_GATHER  # noqa: SLF001  # there is no public way
    for tensor in _unsharded_tensors(handle):
        yield tensor, RefType.UNSHARDED_PARAMETER
    yield from _gradients_of(handle)


def _gradients_of(handle: Any) -> Iterator[tuple[torch.Tensor, RefType]]:
    flat = handle.flat_param
    kept = RefType.SHARDED_GRADIENT if handle.uses_sharded_strategy else RefType.GRADIENT
    for name in ("_saved_grad_shard", "_cpu_grad"):
        tensor = getattr(flat, name, None)
        if tensor is not None:
            yield tensor, kept
    if flat.grad is not None and flat.grad.device.type != "meta":
        is_shard = flat.grad.numel() != flat._unpadded_unsharded_size.numel()  # noqa: SLF001  # as above
        yield flat.grad, kept if is_shard or not handle.uses_sharded_strategy else RefType.UNSHARDED_GRADIENT
