"""Who owns what: the table of watched modules, and the storages behind any tensor.

Owner 0 is ``(outside modules)``, 1 the root; every other watched module follows in ``named_modules`` order, so that a
parent's index is smaller than its children's. A module below the watched depth counts for the nearest watched one
above it, as do its parameters.

Limits: a module or parameter shared by several parents belongs to the first that names it.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, MutableMapping
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from torch.utils.weak import WeakTensorKeyDictionary

from torchmem.model import OUTSIDE, OUTSIDE_OWNER, ROOT

ROOT_OWNER = 1


def module_depth(name: str) -> int:
    """Components of a qualified name, indices not counted: ``layers.17.mlp`` has depth 2."""
    return sum(not part.isdecimal() for part in name.split(".") if part)


class OwnerTable:
    """Owners of a model's modules and parameters.

    Args:
        model: the root module.
        depth: how deep modules are told apart.

    Attributes:
        names: label of each owner.
        parents: index of the owner around each owner.
        watched: the modules that are owners themselves, by owner; gone when the model is.
    """

    def __init__(self, model: nn.Module, depth: int) -> None:
        self.names = [OUTSIDE]
        self.parents = [OUTSIDE_OWNER]
        self.watched: weakref.WeakValueDictionary[int, nn.Module] = weakref.WeakValueDictionary()
        self._of_module: weakref.WeakKeyDictionary[nn.Module, int] = weakref.WeakKeyDictionary()
        self._of_parameter: MutableMapping[torch.Tensor, int] = WeakTensorKeyDictionary()
        by_name: dict[str, int] = {}
        for name, module in model.named_modules():
            above = by_name.get(name.rpartition(".")[0], OUTSIDE_OWNER) if name else OUTSIDE_OWNER
            if module_depth(name) <= depth:
                owner = len(self.names)
                self.names.append(name or ROOT)
                self.parents.append(above)
                self.watched[owner] = module
            else:
                owner = above
            by_name[name] = owner
            self._of_module[module] = owner
            for parameter in module.parameters(recurse=False):
                self._of_parameter.setdefault(parameter, owner)  # type: ignore[no-untyped-call]  # torch's

    @property
    def model(self) -> nn.Module:
        """The root; an empty module once the model is gone, which nothing here keeps alive."""
        root = self.watched.get(ROOT_OWNER)
        return nn.Module() if root is None else root

    def of_module(self, module: nn.Module) -> int:
        """Owner of what the module does; ``OUTSIDE_OWNER`` for a stranger."""
        return self._of_module.get(module, OUTSIDE_OWNER)

    def of_parameter(self, parameter: torch.Tensor) -> int:
        """Owner of a parameter, its gradient and its optimizer state."""
        return self._of_parameter.get(parameter, OUTSIDE_OWNER)


def plain_tensors(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """The tensors with memory of their own behind any tensor: the parts of a subclass, the values of a sparse one."""
    if is_traceable_wrapper_subclass(tensor):
        for name in tensor.__tensor_flatten__()[0]:
            part = getattr(tensor, name)
            if isinstance(part, torch.Tensor):  # a DTensor flattens to its mesh too
                yield from plain_tensors(part)
    elif tensor.layout is torch.strided:
        yield tensor
    elif tensor.layout is torch.sparse_coo:
        yield from (tensor._indices(), tensor._values())  # noqa: SLF001  # the public ones refuse an uncoalesced tensor


def storages(tensor: torch.Tensor) -> Iterator[Any]:
    """The untyped storages behind any tensor, meta tensors excepted."""
    for plain in plain_tensors(tensor):
        if plain.device.type == "meta":
            continue
        try:
            storage = plain.untyped_storage()
        except (NotImplementedError, RuntimeError):  # a functorch wrapper: its memory is another tensor's
            continue
        yield storage


def tensors_in(value: Any, depth: int = 16) -> Iterator[torch.Tensor]:
    """The tensors in lists, tuples and dicts, nested at most ``depth`` times."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, list | tuple | dict) and depth:
        for item in value.values() if isinstance(value, dict) else value:
            yield from tensors_in(item, depth - 1)
