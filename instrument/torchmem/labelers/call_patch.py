"""One wrapper around ``nn.Module.__call__`` that torch.compile never sees.

It is taken off the class while Dynamo traces, and Dynamo puts no guard on ``__call__``: frames compiled, graph breaks
and recompiles are what they are without it.

Private torch interfaces used, checked when it is put on: ``torch._dynamo.callback_handler.install_callbacks``,
``torch._C._dynamo.eval_frame.set_code_exec_strategy``, ``OptimizedModule``. Used where it is there:
``fullgraph_capture``, by which ``torch.export`` and ahead-of-time compilation trace.

Invariants: two may lie on each other and be taken off newest first; once the hooks are closed no thread that still
compiles puts the wrapper back; a signal handler may close the hooks anywhere in here.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

from torch import nn

from torchmem.labelers.hooks import GuardedHook, HookSet

_NAME = "__call__"
_CAPTURE = "fullgraph_capture"


class CallPatch:
    """Puts the wrapper on, through a labeler's hooks.

    Args:
        hooks: the labeler's; closing them takes it off.
        make: makes the wrapper, given the original and the type of what ``torch.compile(module)`` returns.

    Raises:
        AttributeError: this torch cannot be told to leave the wrapper alone when it compiles.
    """

    def __init__(self, hooks: HookSet, make: Callable[[Callable[..., Any], type], Callable[..., Any]]) -> None:
        # Dynamo remembers the original from when it is imported; every optimizer imports it anyway.
        from torch import _dynamo
        from torch._dynamo.callback import callback_handler
        from torch._dynamo.eval_frame import OptimizedModule

        self._hooks = hooks
        self._lock = threading.RLock()  # a signal handler that closes the hooks may interrupt whoever holds it
        self._num_hiding = 0
        self._is_on = True
        skip_in_dynamo(GuardedHook.__call__, recursive=True)
        self._original = vars(nn.Module)[_NAME]
        # The name by which torch.compile knows that it is given the call of a module.
        self._call: Any = functools.wraps(self._original)(make(self._original, OptimizedModule))
        skip_in_dynamo(self._call)
        # Only now: from here on another thread that compiles asks for all of the above.
        hooks.patch(callback_handler, "install_callbacks", self._hidden_while)
        for module in (getattr(_dynamo, name, None) for name in ("convert_frame", "functional_export")):
            if hasattr(module, _CAPTURE):  # the second has it from the first
                hooks.patch(module, _CAPTURE, self._hidden_during)
        hooks.add(self)
        self._replace(self._original, self._call)

    def remove(self) -> None:
        """Takes the wrapper off, unless somebody has wrapped it since; for good."""
        with self._lock:
            self._is_on = False
            self._replace(self._call, self._original)

    def comes_again(self, wrapper: Any) -> bool:
        """Whether a ``torch.compile(module)`` leads to a call of the module that comes by here too."""
        inner = getattr(wrapper.forward, "_torchdynamo_orig_callable", None)
        return getattr(inner, "__func__", None) is self._call

    def running(self) -> Iterator[dict[str, Any]]:
        """The variables of this thread's running calls of the wrapper, innermost first."""
        frame: Any = sys._getframe(1)  # noqa: SLF001  # the only way to ask
        while frame is not None:
            if frame.f_code is self._call.__code__:
                yield frame.f_locals
            frame = frame.f_back

    def _hidden_while(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @contextlib.contextmanager
        def install_callbacks(*args: Any, **kwargs: Any) -> Iterator[None]:
            with self._hiding(), original(*args, **kwargs):
                yield

        return install_callbacks

    def _hidden_during(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def fullgraph_capture(*args: Any, **kwargs: Any) -> Any:
            with self._hiding():
                return original(*args, **kwargs)

        return fullgraph_capture

    @contextlib.contextmanager
    def _hiding(self) -> Iterator[None]:
        self._hide()
        try:
            yield
        finally:
            self._show()

    def _hide(self) -> None:
        with self._lock:
            self._num_hiding += 1
            self._replace(self._call, self._original)

    def _show(self) -> None:
        with self._lock:
            self._num_hiding -= 1
            if self._is_wanted():
                self._replace(self._original, self._call)
            if not self._is_wanted():  # closed meanwhile, by a signal handler
                self._replace(self._call, self._original)

    def _is_wanted(self) -> bool:
        return self._is_on and self._hooks.active and not self._num_hiding

    @staticmethod
    def _replace(old: Any, new: Any) -> None:
        if vars(nn.Module).get(_NAME) is old:
            setattr(nn.Module, _NAME, new)


def skip_in_dynamo(function: Any, *, recursive: bool = False) -> None:
    """Tells Dynamo not to compile the function where it meets it running; ``recursive``: nor what it calls."""
    from torch._C._dynamo import eval_frame

    action = eval_frame._FrameAction  # noqa: SLF001  # torch's own decorators use it
    called = action.SKIP if recursive else action.DEFAULT
    eval_frame.set_code_exec_strategy(function.__code__, eval_frame._FrameExecStrategy(action.SKIP, called))  # noqa: SLF001
