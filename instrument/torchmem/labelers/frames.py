"""The frames of module calls: whose forward is running, noted around ``nn.Module.__call__``.

One wrapper on the class serves every watched module: nothing is put on a module, so that copies, pickles and
TorchScript see it as it is, and torch keeps to the short way through a module that has no hooks. What runs inside a
module that was compiled belongs to that module: ``__call__`` lies outside of it.

Invariants: every frame that was opened is closed, by exceptions too; the wrapper adds no exception of its own.

Limits: a module whose ``__call__`` does not lead to ``nn.Module.__call__``, or whose ``forward`` is called directly,
counts for the one around it; while one thread compiles, module calls of other threads count for nobody.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

from torch import nn

from torchmem.labelers.call_patch import CallPatch
from torchmem.labelers.hooks import HookSet
from torchmem.labelers.owners import OwnerTable


class Frame(NamedTuple):
    """What opens and closes the frame of one owner."""

    enter: Callable[[], None]
    leave: Callable[[], None]
    before: Callable[..., None] | None
    """Called with the module, its arguments and keyword arguments before the frame is opened."""


class ModuleFrames:
    """Opens and closes the frames of watched modules.

    Args:
        native: the loaded engine.
        owners: the table of owners.
        before_root: called with the root, its arguments and keyword arguments before its frame is opened.
    """

    def __init__(self, native: Any, owners: OwnerTable, before_root: Callable[..., None]) -> None:
        self._native = native
        self._owners = owners
        self._before_root = before_root
        self._frames: dict[int, Frame] = {}
        self._alive: dict[int, weakref.ref[nn.Module]] = {}
        self._patch: CallPatch | None = None

    def attach(self, hooks: HookSet) -> None:
        """Puts the wrapper on, through the labeler's hooks.

        Raises:
            AttributeError: this torch cannot be told to leave the wrapper alone when it compiles.
        """
        for owner, module in self._owners.watched():
            self._watch(module, owner)
        hooks.on_off(self._frames.clear)
        self._patch = CallPatch(hooks, self._framed)

    def frame_of(self, owner: int) -> Frame:
        """The frame of an owner, without what is called before the root's."""
        make = self._native.make_hook
        return Frame(make(owner, 1), make(owner, 0), None)

    def is_root_inside_itself(self) -> bool:
        """Whether the call of the root that is beginning is made, on this thread, by another one."""
        if self._patch is None or not self._native.stack_depth():  # nothing runs: no need to look at Python's stack
            return False
        return sum(call.get("before") is not None for call in self._patch.running()) > 1

    def _watch(self, module: nn.Module, owner: int) -> None:
        key = id(module)

        def forget(_: Any) -> None:
            self._frames.pop(key, None)
            self._alive.pop(key, None)

        self._alive[key] = weakref.ref(module, forget)
        frame = self.frame_of(owner)
        self._frames[key] = frame._replace(before=self._before_root) if module is self._owners.model else frame

    def _framed(self, original: Callable[..., Any], compiled_type: type) -> Callable[..., Any]:
        find = self._frames.get
        frame_of_compiled = self._frame_of_compiled

        def call(self: nn.Module, /, *args: Any, **kwargs: Any) -> Any:
            frame = find(id(self))
            if frame is None and type(self) is compiled_type:
                frame = frame_of_compiled(self)
            if frame is None:
                return original(self, *args, **kwargs)
            enter, leave, before = frame
            if before is not None:
                before(self, args, kwargs)
            enter()
            try:
                return original(self, *args, **kwargs)
            finally:
                leave()

        return call

    def _frame_of_compiled(self, wrapper: Any) -> Frame | None:
        """The frame of the module in a ``torch.compile(module)``, unless the wrapper comes to our own call of it."""
        frame = self._frames.get(id(getattr(wrapper, "_orig_mod", None)))
        return None if frame is None or self._patch is None or self._patch.comes_again(wrapper) else frame
