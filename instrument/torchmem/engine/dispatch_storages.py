"""The storages that operators made: each booked once, by what its thread did, until a weak reference says it died.

A storage is known by the address of its StorageImpl. Weak references tell of deaths at any time, in the midst of
anything; they are only noted then, and booked before the next event.

Invariants: books are only touched under the lock, by one event at a time; while paused nothing is booked.

Limits: a block is as large as its storage, or as the given rounding makes it. What a signal's handler or a finalizer
does in the midst of an event, on the thread that is booking it, is not booked: it finds half of the event in the books.
"""

from __future__ import annotations

import contextlib
import functools
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, Concatenate, NamedTuple, ParamSpec, TypeVar

import torch

from torchmem.engine import addresses
from torchmem.engine.dispatch_context import Contexts
from torchmem.engine.fast_ledger import FastLedger
from torchmem.model import OUTSIDE_OWNER, Phase

_Books = TypeVar("_Books", bound="StorageBooks")
_Arguments = ParamSpec("_Arguments")
_Result = TypeVar("_Result")
_Method = Callable[Concatenate[_Books, _Arguments], _Result]


def alone(
    otherwise: Callable[[], Any],
) -> Callable[[_Method[_Books, _Arguments, _Result]], _Method[_Books, _Arguments, _Result]]:
    """The method is one event in the books, which are up to date when it begins.

    Args:
        otherwise: gives what is returned where the same thread is in the midst of another event.
    """

    def decorate(method: _Method[_Books, _Arguments, _Result]) -> _Method[_Books, _Arguments, _Result]:
        @functools.wraps(method)
        def call(self: _Books, /, *args: _Arguments.args, **kwargs: _Arguments.kwargs) -> _Result:
            with self._lock:
                if self.is_booking:
                    return otherwise()  # type: ignore[no-any-return]  # as the method returns
                self.is_booking = True
                try:
                    self._bury_dead()
                    return method(self, *args, **kwargs)
                finally:
                    self.is_booking = False

        return call

    return decorate


def nothing() -> None:
    """Is done."""


class PeakPlace(NamedTuple):
    """What was being done when a device held the most."""

    phase: Phase
    owner: int
    operator: str


class _Freed(weakref.ref):  # type: ignore[type-arg]  # of storages
    """A weak reference that knows under which key, and on which device, the storage is booked."""

    __slots__ = ("device", "key")

    key: int
    device: int


class StorageBooks:
    """The books, by storage.

    Args:
        block_bytes: what a storage of a size takes; none for its own size.
        default_device: of storages whose device cannot be told (those of fake tensors made while it did not run), in
            the engine's numbering.

    Attributes:
        ledger: the books.
        peak_places: of each device, where it held the most in the running step.
        num_pauses: how many of ``paused`` run now.
        is_booking: whether an event is being booked, on this thread where this is read in the midst of it.
        operator: the one that ran last.
        read_value: gives the value of a fake tensor that is asked for one; None where torch shall raise its own error.
        on_block: called with the device, key and size of each block made, and with -size when it is freed.
        on_failure: called with an error of the engine's own, after which nothing is booked any more; None where it
            shall reach the job.

    Raises:
        BuildError: this torch lays out its tensors in a way that the engine does not know.
    """

    def __init__(self, block_bytes: Callable[[int], int] | None = None, default_device: int = 0) -> None:
        addresses.check()
        self.ledger = FastLedger([OUTSIDE_OWNER])
        self.peak_places: dict[int, PeakPlace] = {}
        self.on_block: Callable[[int, int, int], None] | None = None
        self.read_value: Callable[[torch.Tensor], Any] | None = None
        self.on_failure: Callable[[Exception], None] | None = None
        self._contexts = Contexts(self.ledger)
        self._block_bytes = block_bytes
        self._default_device = default_device
        self._device_ids: dict[torch.device, int | None] = {}
        self._references: dict[int, _Freed] = {}
        self._dead: deque[_Freed] = deque()
        self._lock = threading.RLock()
        self.is_booking = False
        self.num_pauses = 0
        self.operator: Any = None
        self._born: list[int] | None = None

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Nothing made meanwhile is booked, on any thread."""
        self.num_pauses += 1
        try:
            yield
        finally:
            self.num_pauses -= 1

    @contextlib.contextmanager
    def born_into(self, keys: list[int]) -> Iterator[None]:
        """Adds the keys of the storages made meanwhile."""
        outer, self._born = self._born, keys
        try:
            yield
        finally:
            self._born = outer

    def fail(self, error: Exception) -> None:
        """Ends booking for good, or raises; see ``on_failure``."""
        if self.on_failure is None:
            raise error
        self.num_pauses += 1
        self.on_failure(error)

    # -- events

    def note(self, tensor: torch.Tensor) -> None:
        """Books the tensor's storage unless it is known; follows its size where it is."""
        device = self._device_of(tensor)
        if device is None:
            return
        try:
            storage = tensor.untyped_storage()
        except (NotImplementedError, RuntimeError, ValueError):
            self._note_parts(tensor)
            return
        if self._dead:
            self._bury()
        key = storage._cdata  # noqa: SLF001  # the address of the StorageImpl
        if key in self._references:
            return
        self._book(storage, key, device)

    def note_size(self, tensor: torch.Tensor) -> None:
        """As ``note``, for a tensor that may have been resized."""
        self.note(tensor)
        with contextlib.suppress(NotImplementedError, RuntimeError, ValueError):
            self._follow_size(tensor.untyped_storage())

    def _note_parts(self, tensor: torch.Tensor) -> None:
        if tensor.layout is torch.sparse_coo:
            self.note(tensor._indices())  # noqa: SLF001  # the public ones refuse an uncoalesced tensor
            self.note(tensor._values())  # noqa: SLF001  # as above

    def _device_of(self, tensor: torch.Tensor) -> int | None:
        device = tensor.device
        try:
            return self._device_ids[device]
        except KeyError:
            found = self._device_ids[device] = device_id(device)
            return found

    @alone(nothing)
    def _book(self, storage: torch.UntypedStorage, key: int, device: int) -> None:
        num_bytes = storage.nbytes()
        self._refer(storage, key, device)
        if self._born is not None:
            self._born.append(key)
        if num_bytes:
            self._allocate(key, num_bytes, device)

    def _refer(self, storage: torch.UntypedStorage, key: int, device: int) -> None:
        reference = _Freed(storage, self._dead.append)
        reference.key = key
        reference.device = device
        self._references[key] = reference

    def _allocate(self, key: int, num_bytes: int, device: int) -> None:
        num_bytes = self._taken(num_bytes)
        context = self._contexts.current()
        owner, reftype = self._contexts.label(context)
        self.ledger.allocate(context.stack, key, num_bytes, device, owner, reftype)
        if self.ledger.devices[device].peak_sequence == self.ledger.sequence:
            self.peak_places[device] = PeakPlace(self._contexts.phase(context), owner, self.operator)
        if self.on_block is not None:
            self.on_block(device, key, num_bytes)

    def _taken(self, num_bytes: int) -> int:
        return num_bytes if self._block_bytes is None else self._block_bytes(num_bytes)

    def _release(self, key: int) -> None:
        block = self.ledger.find(key)
        if block is not None:  # else it was empty
            if self.on_block is not None:
                self.on_block(block.device, key, -block.num_bytes)
            self.ledger.release(self._contexts.current().stack, key)

    @alone(nothing)
    def _bury(self) -> None:
        """Books the frees that weak references have told of; they come at any time, in the midst of anything."""

    def _bury_dead(self) -> None:
        while self._dead:
            freed = self._dead.popleft()
            if self._references.get(freed.key) is freed:
                del self._references[freed.key]
                self._release(freed.key)

    @alone(nothing)
    def _follow_size(self, storage: torch.UntypedStorage) -> None:
        """Books a storage that was resized anew: the allocator has moved it."""
        key = storage._cdata  # noqa: SLF001  # as above
        num_bytes = storage.nbytes()
        if key not in self._references:
            return
        block = self.ledger.find(key)
        if (block is None and not num_bytes) or (block is not None and block.num_bytes == self._taken(num_bytes)):
            return
        device = self._references[key].device
        if block is None:
            self._allocate(key, num_bytes, device)
        elif not num_bytes:
            self._release(key)
        else:  # the new block is there before the old one goes
            self._allocate(-key, num_bytes, device)
            self._release(key)
            self.ledger.move(-key, key)
            if self.on_block is not None:
                self.on_block(device, -key, -self._taken(num_bytes))
                self.on_block(device, key, self._taken(num_bytes))

    def _watched_resize(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def resize_(storage: torch.UntypedStorage, size: int) -> Any:
            result = original(storage, size)
            if not self.num_pauses:
                try:
                    self._follow_size(storage)
                except Exception as error:  # noqa: BLE001  # a running job must go on
                    self.fail(error)
            return result

        return resize_

    def requested_bytes(self, key: int) -> int | None:
        """The size of the storage booked under a key; None where there is none."""
        reference = self._references.get(key)
        storage = None if reference is None else reference()
        return None if storage is None else int(storage.nbytes())


def device_id(device: torch.device) -> int | None:
    """A device in the engine's numbering: 0 is the CPU, 1 + i accelerator i; None for one that holds no memory."""
    if device.type == "meta":
        return None
    return 0 if device.type == "cpu" else 1 + (device.index or 0)
