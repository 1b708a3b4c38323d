"""Who really made each block: a second opinion on owners, from torch's dispatcher and the autograd graph itself.

Shares no code with torchmem: every operator's results are noted under the module that was called last and has not
returned; in backward, under the module that tagged the autograd node that is running, tags being put on when a module
is called and when it returns, by walking the graph from what goes in and what comes out.

Known limits: sees what operators return, not what kernels allocate inside; one thread; eager mode.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any, NamedTuple
from unittest import mock

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from torchmem.model import OUTSIDE, ROOT, RefType

if TYPE_CHECKING:
    from collections.abc import Iterator

    import torchmem

WRAPPERS = ("_fsdp_wrapped_module", "_checkpoint_wrapped_module", "_orig_mod")
BY_WHERE = {RefType.ACTIVATION, RefType.RECOMPUTATION, RefType.TEMPORARY, RefType.OTHER}
"""Reftypes that belong to whatever was running; the others belong to what they are for."""
OF_UNITS = {RefType.SHARDED_GRADIENT, RefType.UNSHARDED_GRADIENT}
OPS_BETWEEN_LOOKS = 7
TAG = "made by"


class Count(NamedTuple):
    """Bytes over all looks, and what was wrong."""

    right: int = 0
    unnamed: int = 0
    wrong: int = 0
    gradients_right: int = 0
    gradients: int = 0
    mistakes: tuple[str, ...] = ()

    @property
    def named_share(self) -> float:
        """Of the bytes that were looked at, those under the right module."""
        return self.right / max(1, self.right + self.unnamed + self.wrong)


def clean_name(model: nn.Module, name: str) -> str:
    """A module's name without the wrappers on the way to it."""
    parts, kept, module = name.split(".") if name else [], [], model
    for part in parts:
        is_wrapped = part in WRAPPERS or (part == "module" and isinstance(module, nn.parallel.DistributedDataParallel))
        module = module.get_submodule(part)
        if not is_wrapped:
            kept.append(part)
    return ".".join(kept) or ROOT


class Observer(TorchDispatchMode):
    """Notes where every result comes from, and now and then compares the living with the books."""

    def __init__(self, model: nn.Module, monitor: torchmem.Monitor) -> None:
        super().__init__()
        self.count = Count()
        self._names = {module: clean_name(model, name) for name, module in model.named_modules()}
        self._holders = [(m, name) for name, m in model.named_modules()]
        self._model = model
        self._monitor = monitor
        self._stack: list[str] = []
        self._made: dict[int, tuple[StorageWeakRef, int, str, str]] = {}
        self._num_ops = 0

    @contextlib.contextmanager
    def observing(self) -> Iterator[None]:
        """While this lasts, everything is noted."""
        original = nn.Module._call_impl

        def call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            name = self._names.get(module)
            if name is None:
                return original(module, *args, **kwargs)
            # FSDP1 has made a module's parameters before it calls the module: views of its own flat one.
            self._tag((args, kwargs, list(vars(module).values())), self._stack[-1] if self._stack else OUTSIDE)
            self._stack.append(name)
            try:
                outputs = original(module, *args, **kwargs)
                self._tag(outputs, name)
                return outputs
            finally:
                self._stack.pop()

        with mock.patch.object(nn.Module, "_call_impl", call), self:
            yield

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, torch.distributed.tensor.DTensor) for kind in types):
            return NotImplemented  # its parts are dispatched once more
        result = func(*args, **(kwargs or {}))
        owner = self._owner()
        for tensor in tree_iter(result):
            if isinstance(tensor, torch.Tensor) and owner is not None:
                self._note(tensor, owner, str(func))
        self._num_ops += 1
        if self._num_ops % OPS_BETWEEN_LOOKS == 0:
            self.look()
        return result

    def look(self) -> None:
        """Compares what is alive with the books."""
        right = unnamed = wrong = 0
        mistakes = list(self.count.mistakes)
        for key, (reference, address, owner, func) in list(self._made.items()):
            storage = torch.UntypedStorage._new_with_weak_ptr(reference.cdata)
            if storage is None or storage.data_ptr() != address:  # FSDP empties and fills the same storage
                del self._made[key]
                continue
            booked = self._monitor._native.lookup(address)
            if booked is None or RefType(booked[2]) not in BY_WHERE:
                continue
            num_bytes, name = booked[0], self._monitor._names[booked[1]]
            if name == owner:
                right += num_bytes
            elif name == OUTSIDE:
                unnamed += num_bytes
            else:
                wrong += num_bytes
                mistakes.append(f"{func}: {num_bytes} bytes of {owner} booked as {name} {RefType(booked[2]).label}")
        self.count = self.count._replace(
            right=self.count.right + right,
            unnamed=self.count.unnamed + unnamed,
            wrong=self.count.wrong + wrong,
            mistakes=tuple(dict.fromkeys(mistakes))[:8],
        )

    def look_at_gradients(self) -> None:
        """Compares the owners of the gradients there are with the modules that hold their parameters."""
        right = total = 0
        seen: set[int] = set()
        for module, name in self._holders:
            for parameter in module.parameters(recurse=False):
                gradient = getattr(parameter.grad, "_local_tensor", parameter.grad)
                address = 0 if gradient is None else gradient.untyped_storage().data_ptr()
                booked = self._monitor._native.lookup(address) if address and address not in seen else None
                if booked is None:
                    continue
                seen.add(address)
                total += booked[0]
                owner, expected = self._monitor._names[booked[1]], clean_name(self._model, name)
                # A storage that parameters share, a sharded unit's or a bucket's, belongs to a module around them.
                is_shared = gradient.untyped_storage().nbytes() > gradient.nbytes or booked[2] in OF_UNITS
                is_around = owner == ROOT or expected.startswith(f"{owner}.")
                right += booked[0] if owner == expected or (is_shared and is_around) else 0
        self.count = self.count._replace(
            gradients_right=self.count.gradients_right + right, gradients=self.count.gradients + total
        )

    def _note(self, tensor: torch.Tensor, owner: str, func: str) -> None:
        with contextlib.suppress(NotImplementedError, RuntimeError):
            storage = tensor.untyped_storage()
            known = self._made.get(storage._cdata)
            if storage.data_ptr() and (known is None or known[1] != storage.data_ptr()):
                self._made[storage._cdata] = StorageWeakRef(storage), storage.data_ptr(), owner, func

    def _owner(self) -> str | None:
        if self._stack:
            return self._stack[-1]
        node = torch._C._current_autograd_node()
        if torch._C._current_graph_task_id() == -1:
            return OUTSIDE
        if node is None or node.name() == "torch::autograd::AccumulateGrad":
            return None
        return node.metadata.get(TAG, OUTSIDE)

    @staticmethod
    def _tag(tensors: Any, name: str) -> None:
        """The graph behind the tensors was made by this module, as far as nobody else's tags reach."""
        nodes = [t.grad_fn for t in tree_iter(tensors) if isinstance(t, torch.Tensor) and t.grad_fn is not None]
        while nodes:
            node = nodes.pop()
            if node.name() == "torch::autograd::AccumulateGrad" or TAG in node.metadata:
                continue
            node.metadata[TAG] = name
            nodes += [following for following, _ in node.next_functions if following is not None]
