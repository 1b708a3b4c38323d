"""The frames of module calls: whose forward is running, noted around ``nn.Module.__call__``.

One wrapper on the class serves every watched module: nothing is put on a module, so that copies, pickles and
TorchScript see it as it is, and torch keeps to the short way through a module that has no hooks. What runs inside a
module that was compiled belongs to that module: ``__call__`` lies outside of it.

torch.compile never sees the wrapper: it is taken off the class while Dynamo traces, and Dynamo puts no guard on
``__call__``. So frames compiled, graph breaks and recompiles are what they are without it.

Private torch interfaces used, checked on attach: ``torch._dynamo.callback_handler.install_callbacks``,
``torch._C._dynamo.eval_frame.set_code_exec_strategy``.

Invariants: every frame that was opened is closed, by exceptions too; the wrapper adds no exception of its own.

Limits: a module whose ``__call__`` does not lead to ``nn.Module.__call__``, or whose ``forward`` is called directly,
counts for the one around it; while one thread compiles, module calls of other threads count for nobody.
"""

from __future__ import annotations

import contextlib
import functools
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from torch import nn

from torchmem.labelers.hooks import GuardedHook, HookSet
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
        self._call: Any = None
        self._original: Any = None
        self._num_hiding = 0
        self._lock = threading.Lock()

    def attach(self, hooks: HookSet) -> None:
        """Puts the wrapper on, through the labeler's hooks.

        Raises:
            AttributeError: this torch cannot be told to leave the wrapper alone when it compiles.
        """
        # Dynamo remembers the original from when it is imported; every optimizer imports it anyway.
        from torch._dynamo.callback import callback_handler
        from torch._dynamo.eval_frame import OptimizedModule

        for owner, module in self._owners.watched():
            self._watch(module, owner)
        skip_in_dynamo(GuardedHook.__call__, recursive=True)
        hooks.on_off(self._frames.clear)
        hooks.patch(callback_handler, "install_callbacks", self._hidden_while)
        hooks.patch(nn.Module, "__call__", functools.partial(self._framed, OptimizedModule))

    def frame_of(self, owner: int) -> Frame:
        """The frame of an owner, without what is called before the root's."""
        make = self._native.make_hook
        return Frame(make(owner, 1), make(owner, 0), None)

    def _watch(self, module: nn.Module, owner: int) -> None:
        key = id(module)

        def forget(_: Any) -> None:
            self._frames.pop(key, None)
            self._alive.pop(key, None)

        self._alive[key] = weakref.ref(module, forget)
        frame = self.frame_of(owner)
        self._frames[key] = frame._replace(before=self._before_root) if module is self._owners.model else frame

    def _framed(self, compiled_type: type, original: Callable[..., Any]) -> Callable[..., Any]:
        find = self._frames.get
        frame_of_compiled = self._frame_of_compiled

        # The name by which torch.compile knows that it is given the call of a module.
        @functools.wraps(original)
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

        skip_in_dynamo(call)
        self._call, self._original = call, original
        return call

    def _frame_of_compiled(self, wrapper: Any) -> Frame | None:
        """The frame of the module in a ``torch.compile(module)``, unless the wrapper comes to our own call of it."""
        frame = self._frames.get(id(wrapper._orig_mod))  # noqa: SLF001  # what torch.compile calls it
        inner = getattr(wrapper.forward, "_torchdynamo_orig_callable", None)
        return None if getattr(inner, "__func__", None) is self._call else frame

    def _hidden_while(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @contextlib.contextmanager
        def install_callbacks(*args: Any, **kwargs: Any) -> Iterator[None]:
            self._hide()
            try:
                with original(*args, **kwargs):
                    yield
            finally:
                self._show()

        return install_callbacks

    def _hide(self) -> None:
        with self._lock:
            self._num_hiding += 1
            if vars(nn.Module).get("__call__") is self._call:
                nn.Module.__call__ = self._original  # type: ignore[method-assign]

    def _show(self) -> None:
        with self._lock:
            self._num_hiding -= 1
            # Without frames the labeler is off or closed, and has put the original back for good.
            if not self._num_hiding and self._frames and vars(nn.Module).get("__call__") is self._original:
                nn.Module.__call__ = self._call  # type: ignore[method-assign]


def skip_in_dynamo(function: Any, *, recursive: bool = False) -> None:
    """Tells Dynamo not to compile the function where it meets it running; ``recursive``: nor what it calls."""
    from torch._C._dynamo import eval_frame

    action = eval_frame._FrameAction  # noqa: SLF001  # torch's own decorators use it
    called = action.SKIP if recursive else action.DEFAULT
    eval_frame.set_code_exec_strategy(function.__code__, eval_frame._FrameExecStrategy(action.SKIP, called))  # noqa: SLF001
