"""The mode that sees every operator, and what can be told of an operator once and for all.

Invariants: the operator runs exactly once, or not at all where a subclass takes it apart first; per operator a
dictionary says whether its result can hold new storage. A mode that ended only passes operators on, wherever it stays.

Limits: of a higher-order operator (``torch.cond``) only what it returns is seen. In inference mode a mode stays on the
stack that was entered before, because torch goes back to what it was then; so it does on a stack that autograd, or the
operator that is running, puts back afterwards. ``take_off_ended`` takes it off later.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    _get_current_dispatch_mode_stack,
    _pop_mode,
    _push_mode,
)

from torchmem.engine.dispatch_storages import StorageBooks

_PLAIN = (torch.Tensor, torch.nn.Parameter, FakeTensor)


class DispatchMode(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's
    """Sees every operator, until it ends."""

    supports_higher_order_operators = True

    def __init__(self, engine: StorageBooks) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # as above
        self._engine: StorageBooks | None = engine
        self._is_wrapper: dict[type, bool] = dict.fromkeys(_PLAIN, False)
        self._is_of_inference = torch.is_inference_mode_enabled()

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """What is compiled meanwhile is compiled as without it."""
        return True

    def end(self) -> None:
        """Passes operators on from here on."""
        self._engine = None

    @property
    def may_go(self) -> bool:
        """Whether it has ended, and can be taken off a stack here."""
        return self._engine is None and (self._is_of_inference or not torch.is_inference_mode_enabled())

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Runs the operator and books what it made."""
        engine = self._engine
        if engine is None:
            return func(*args, **(kwargs or {}))
        for kind in types:
            if kind not in _PLAIN and self._wraps(kind):
                return NotImplemented  # the subclass takes it apart first
        try:
            makes = _known[func]
        except KeyError:
            makes = _known[func] = _makes(func)
        if makes >= _WAITS and isinstance(args[0], FakeTensor) and engine.read_value is not None:
            if makes == _WAITS:  # torch's rule for fake tensors makes a new one
                return args[0]
            if args[0].constant is None:
                return engine.read_value(args[0])
        result = func(*args, **kwargs) if kwargs else func(*args)
        if makes and not engine.num_pauses:
            engine.operator = func
            try:
                _each_tensor(engine.note_size if makes == _RESIZES else engine.note, result)
            except Exception as error:  # noqa: BLE001  # a running job must go on
                engine.fail(error)
        return result

    def _wraps(self, kind: type) -> bool:
        found = self._is_wrapper.get(kind)
        if found is None:
            found = self._is_wrapper[kind] = hasattr(kind, "__tensor_flatten__") and not issubclass(kind, FakeTensor)
        return found


def enter(mode: DispatchMode) -> None:
    """Puts the mode on top of this thread's stack."""
    _push_mode(mode)


def leave(mode: DispatchMode) -> None:
    """Ends the mode, and takes it off this thread's stack if it can be."""
    mode.end()
    take_off_ended()


def take_off_ended() -> None:
    """Takes modes that have ended off this thread's stack, from under others where need be."""
    above: list[Any] = []
    while any(_may_go(mode) for mode in _get_current_dispatch_mode_stack()):
        top = _pop_mode()
        if not _may_go(top):
            above.append(top)
    for other in reversed(above):
        _push_mode(other)


def _may_go(mode: Any) -> bool:
    return isinstance(mode, DispatchMode) and mode.may_go


def _each_tensor(note: Callable[[torch.Tensor], None], result: Any) -> None:
    if isinstance(result, torch.Tensor):
        note(result)
    elif isinstance(result, list | tuple):
        for one in result:
            _each_tensor(note, one)


_NOTHING, _NEW, _RESIZES, _WAITS, _READS = range(5)

_known: dict[Any, int] = {}
"""By operator, what ``_makes`` says: what a process samples again need not be asked again."""

_RESIZING = frozenset({"aten::resize_", "aten::resize_as_", "aten::set_", "aten::_resize_output_"})


def _makes(func: Any) -> int:
    """Whether an operator's result can hold new storage."""
    schema = getattr(func, "_schema", None)  # there is no public way
    if schema is None:  # a higher-order operator
        return _NEW
    if schema.name == "_c10d_functional::wait_tensor":
        return _WAITS
    if schema.name == "aten::_local_scalar_dense":
        return _READS
    if schema.name in _RESIZING or any(argument.is_out for argument in schema.arguments):
        return _RESIZES
    returned = [one for one in schema.returns if "Tensor" in str(one.type)]
    return _NEW if any(one.alias_info is None for one in returned) else _NOTHING
