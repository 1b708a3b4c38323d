"""What the dispatch engine hands to labelers: hooks, groups of tensors, labelled calls; as the native engine does.

The same interface and the same effects as ``native/label_call.h``, ``native/held.h`` and the module hooks of
``native/bindings.cpp``, in Python over the engine's own functions.

Invariants: a labelled call runs the original exactly once, with its own result or exception; a failure of ours is
handed to ``fail``; modules and tensors are held weakly.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from types import MethodType
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from torchmem.engine.addresses import tensor_at
from torchmem.model import RefType

if TYPE_CHECKING:
    from typing_extensions import Self


class Books(Protocol):
    """What is needed of the engine."""

    def relabel(self, tensor_address: int, owner: int, reftype: int) -> bool:
        """Relabels the storage of a tensor."""

    def reftype_of(self, tensor_address: int) -> int | None:
        """What the storage of a tensor is booked as."""

    def push_label(self, owner: int, reftype: int) -> int:
        """Opens a label."""

    def cut_stack(self, depth: int) -> None:
        """Closes what was opened since."""


class Hook:
    """Enters or leaves a module."""

    __slots__ = ("_act", "_owner")

    def __init__(self, act: Callable[[int], None], owner: int) -> None:
        self._act = act
        self._owner = owner

    def __call__(self, *_: Any) -> None:
        """Books it."""
        self._act(self._owner)


class TensorGroup:
    """Tensors with their owners, relabelled in one call; those that have no Python object any more are passed over."""

    def __init__(self, books: Books, tensors: Iterable[tuple[int, int]]) -> None:
        self._books = books
        found = ((tensor_at(address), owner) for address, owner in tensors)
        self._tensors = [(weakref.ref(tensor), owner) for tensor, owner in found if tensor is not None]

    def relabel(self, reftype: int) -> int:
        """Relabels the tensors' storages; returns how many are in the books."""
        return sum(self._relabel(tensor(), owner, reftype) for tensor, owner in self._tensors)

    def relabel_gradients(self, reftype: int) -> int:
        """Relabels the storages of their gradients."""
        return sum(self._relabel(getattr(tensor(), "grad", None), owner, reftype) for tensor, owner in self._tensors)

    def _relabel(self, tensor: Any, owner: int, reftype: int) -> bool:
        return tensor is not None and self._books.relabel(tensor._cdata, owner, reftype)  # noqa: SLF001  # the address of the TensorImpl


class _Place(NamedTuple):
    module: weakref.ref[Any]
    table: str
    name: str
    owner: int
    reftype: int


class Held:
    """What modules hold under their names now, relabelled at once."""

    def __init__(self, books: Books, places: Iterable[tuple[Any, str, str, int, int]], tensor_type: type) -> None:
        self._books = books
        self._places = [_Place(weakref.ref(place[0]), *place[1:]) for place in places]
        self._tensor_type = tensor_type

    def relabel(self, with_gradients: bool) -> None:  # noqa: FBT001  # as the native one
        """Relabels all of it, the parameters' gradients if told; those that lie in a bucket stay the bucket's."""
        for place in self._places:
            module = place.module()
            tensor = None if module is None else getattr(module, place.table).get(place.name)
            if not isinstance(tensor, self._tensor_type):
                continue
            self._books.relabel(tensor._cdata, place.owner, place.reftype)  # type: ignore[attr-defined]  # noqa: SLF001  # as above
            gradient = tensor.grad if with_gradients and place.table == "_parameters" else None  # type: ignore[attr-defined]
            if gradient is not None and self._books.reftype_of(gradient._cdata) != RefType.GRADIENT_BUCKET:  # noqa: SLF001
                self._books.relabel(gradient._cdata, place.owner, RefType.GRADIENT)  # noqa: SLF001  # as above


class Target:
    """What the engine knows of one parameter group."""

    def __init__(self, owner: int) -> None:
        self.owner = owner
        self.parameters: TensorGroup | None = None
        self.unsharded: Any = None

    def __deepcopy__(self, _memo: dict[int, Any]) -> Self:
        return self


class LabelCall:
    """A method of torch's replaced by one that labels what it allocates.

    Args:
        books: the engine.
        original: the method.
        find: gives the target of a group that has none yet.
        after: called with the group while there are no parameters to relabel; or None.
        fail: called with an exception of ours.
        reftype: of what the call allocates.
        gradients_before: what the group's gradients become before it, or -1.
        parameters_after: what its parameters become after it, or -1.
    """

    def __init__(
        self,
        books: Books,
        original: Callable[..., Any],
        find: Callable[[Any], Target],
        after: Callable[[Any], None] | None,
        fail: Callable[[BaseException], None],
        reftype: int,
        gradients_before: int,
        parameters_after: int,
    ) -> None:
        self.__wrapped__ = original
        self._books = books
        self._find: Callable[[Any], Target] | None = find
        self._after = after
        self._fail: Callable[[BaseException], None] | None = fail
        self._reftype = reftype
        self._gradients_before = gradients_before
        self._parameters_after = parameters_after

    def __get__(self, group: Any, _type: type | None = None) -> Any:
        return self if group is None else MethodType(self, group)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the original under the label."""
        target = self._guarded(self._enter, args[0]) if self._find is not None and args else None
        if target is None:
            return self.__wrapped__(*args, **kwargs)
        try:
            return self.__wrapped__(*args, **kwargs)
        finally:
            self._guarded(self._leave, args[0], *target)

    def disable(self) -> None:
        """From now on only the original runs."""
        self._find = self._after = self._fail = None

    def _enter(self, group: Any) -> tuple[Target, int]:
        target = getattr(group, "_torchmem", None)
        if not isinstance(target, Target):
            assert self._find is not None  # noqa: S101  # as the caller has seen
            target = self._find(group)
        if self._gradients_before >= 0 and target.unsharded is not None:
            if isinstance(target.unsharded, TensorGroup):
                target.unsharded.relabel_gradients(self._gradients_before)
            else:
                target.unsharded()
        return target, self._books.push_label(target.owner, self._reftype)

    def _leave(self, group: Any, target: Target, depth: int) -> None:
        self._books.cut_stack(depth)
        if self._parameters_after >= 0 and target.parameters is not None:
            target.parameters.relabel(self._parameters_after)
        elif self._after is not None:
            self._after(group)

    def _guarded(self, function: Callable[..., Any], *args: Any) -> Any:
        try:
            return function(*args)
        except Exception as error:  # noqa: BLE001  # nothing of ours may reach the training loop
            if self._fail is not None:
                self._fail(error)
            return None
