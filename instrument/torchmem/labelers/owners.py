"""Who owns what: the table of watched modules, and the storages behind any tensor.

Owner 0 is ``(outside modules)``, 1 the root; every other watched module follows in ``named_modules`` order, so that a
parent's index is smaller than its children's. A module below the watched depth counts for the nearest watched one
above it, as do its parameters. A wrapper (DDP, FSDP1, a checkpoint wrapper, a compiled module) and what it wraps are
one owner, under the name that the module has without the wrapper.

Invariants: nothing here keeps a module alive, and no tensor is held, not even weakly: torch refuses to convert a
parameter that somebody holds weakly. A parameter is known by its place (module and name), and is that place's only
while the module still has it there.

Limits: a module or parameter shared by several parents belongs to the first that names it; the parameters of a module
added after the table was made belong to the nearest known module above it, once ``refresh`` has seen them.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from torchmem.model import OUTSIDE, OUTSIDE_OWNER, ROOT

ROOT_OWNER = 1
_WRAPPED = frozenset({"_fsdp_wrapped_module", "_checkpoint_wrapped_module", "_orig_mod"})
"""Names under which wrappers keep what they wrap."""


def module_depth(name: str) -> int:
    """Components of a qualified name, indices not counted: ``layers.17.mlp`` has depth 2."""
    return sum(not part.isdecimal() for part in name.split(".") if part)


def is_wrapped(parent: nn.Module, name: str) -> bool:
    """Whether ``parent`` only wraps its child of that name."""
    parallel = (nn.parallel.DistributedDataParallel, nn.DataParallel)
    return name in _WRAPPED or (name == "module" and isinstance(parent, parallel))


def clean_names(model: nn.Module) -> Iterator[tuple[str, str, str, nn.Module]]:
    """(qualified name, its parent's, the name without wrappers, module) of each module, in ``named_modules`` order."""
    modules = {"": model}
    cleaned = {"": ""}
    for name, module in model.named_modules():
        above, _, own = name.rpartition(".")
        modules[name] = module
        if name:
            around = cleaned[above]
            wrapped = is_wrapped(modules[above], own)
            cleaned[name] = around if wrapped else f"{around}.{own}" if around else own
        yield name, above, cleaned[name], module


class _Place(NamedTuple):
    """Where a parameter is kept."""

    module: weakref.ref[nn.Module]
    name: str
    owner: int


class OwnerTable:
    """Owners of a model's modules and parameters.

    Args:
        model: the root module.
        depth: how deep modules are told apart.

    Attributes:
        names: label of each owner.
        parents: index of the owner around each owner.
    """

    def __init__(self, model: nn.Module, depth: int) -> None:
        self.names = [OUTSIDE]
        self.parents = [OUTSIDE_OWNER]
        self._root = weakref.ref(model)
        self._watched: list[tuple[int, weakref.ref[nn.Module]]] = []
        self._of_module: weakref.WeakKeyDictionary[nn.Module, int] = weakref.WeakKeyDictionary()
        self._places: dict[int, _Place] = {}
        owner_at: dict[str, int] = {}
        for name, above, cleaned, module in clean_names(model):
            around = owner_at[above] if name else OUTSIDE_OWNER
            owner = around
            if not name or (cleaned != self._cleaned_name(around) and module_depth(cleaned) <= depth):
                owner = len(self.names)
                self.names.append(cleaned or ROOT)
                self.parents.append(around)
            owner_at[name] = owner
            self._of_module[module] = owner
            if cleaned == self._cleaned_name(owner):
                self._watched.append((owner, weakref.ref(module)))
        self.refresh()

    @property
    def model(self) -> nn.Module:
        """The root; an empty module once the model is gone, which nothing here keeps alive."""
        root = self._root()
        return nn.Module() if root is None else root

    def watched(self) -> Iterator[tuple[int, nn.Module]]:
        """The modules that are owners themselves, with their owners; wrappers and what they wrap both."""
        for owner, reference in self._watched:
            module = reference()
            if module is not None:
                yield owner, module

    def of_module(self, module: nn.Module) -> int:
        """Owner of what the module does; ``OUTSIDE_OWNER`` for a stranger."""
        return self._of_module.get(module, OUTSIDE_OWNER)

    def of_parameter(self, parameter: torch.Tensor) -> int:
        """Owner of a parameter, its gradient and its optimizer state; ``OUTSIDE_OWNER`` for a stranger."""
        place = self._places.get(id(parameter))
        module = None if place is None else place.module()
        if place is None or module is None:
            return OUTSIDE_OWNER
        table = module._parameters  # noqa: SLF001  # getattr would run a module's own __getattr__
        is_there = place.name in table and table[place.name] is parameter  # TorchScript's table has no get()
        return place.owner if is_there else OUTSIDE_OWNER

    def trained_by(self, optimizer: Optimizer) -> bool:
        """Whether any of its parameters is the model's."""
        parameters = (parameter for group in optimizer.param_groups for parameter in group["params"])
        return any(self.of_parameter(parameter) != OUTSIDE_OWNER for parameter in parameters)

    def refresh(self) -> None:
        """Finds the parameters again: some may have been replaced or added."""
        places: dict[int, _Place] = {}
        owner_at: dict[str, int] = {}
        try:
            for name, module in self.model.named_modules():
                around = owner_at.get(name.rpartition(".")[0], OUTSIDE_OWNER)
                owner_at[name] = owner = self._of_module.get(module, around)
                for own, parameter in module._parameters.items():  # noqa: SLF001  # as above
                    if parameter is not None:
                        places.setdefault(id(parameter), _Place(weakref.ref(module), own, owner))
        except RuntimeError:  # another thread adds or removes modules just now: next time
            return
        self._places = places

    def _cleaned_name(self, owner: int) -> str | None:
        if owner == OUTSIDE_OWNER:
            return None
        return "" if owner == ROOT_OWNER else self.names[owner]


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
        except (
            NotImplementedError,
            RuntimeError,
            ValueError,
        ):  # another tensor's memory (functorch), or none yet (lazy)
            continue
        yield storage


def adopt(native: Any, tensor: torch.Tensor | None, owner: int, reftype: int) -> None:
    """Books the memory behind a tensor, also such as is older than the books; None has none.

    Args:
        native: the loaded engine.
        tensor: of any kind.
        owner: whose it is.
        reftype: what it is for.
    """
    for storage in () if tensor is None else storages(tensor):
        native.adopt(storage._cdata, owner, reftype)  # noqa: SLF001  # the address of the StorageImpl


def disown(native: Any, tensor: torch.Tensor | None) -> None:
    """Gives the memory behind a tensor its own deleter back; None has none."""
    for storage in () if tensor is None else storages(tensor):
        native.disown(storage._cdata)  # noqa: SLF001  # as above


def tensors_in(value: Any, depth: int = 16) -> Iterator[torch.Tensor]:
    """The tensors in lists, tuples and dicts, nested at most ``depth`` times."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, list | tuple | dict) and depth:
        for item in value.values() if isinstance(value, dict) else value:
            yield from tensors_in(item, depth - 1)
