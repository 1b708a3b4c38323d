"""Calls of modules, observed around ``nn.Module.__call__``: before everything that a call does, and after it.

Nothing is put on a module: hooks on modules would make torch.compile compile each block of a model anew, up to its
limit, and then no longer. As with ``frames``, on top of whose wrapper this one lies, Dynamo never sees it.

Private torch interfaces used: ``torch._dynamo.callback_handler.install_callbacks``, ``OptimizedModule._orig_mod``.

Invariants: a call runs exactly once, with its own result or exception; what was observed before is observed after, also
when the call raised.

Limits: a compiled module that is called is observed, what it calls inside is not.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator
from typing import Any

from torch import nn

from torchmem.labelers.frames import skip_in_dynamo
from torchmem.labelers.hooks import GuardedHook, HookSet


class ModuleCalls:
    """Observes every module's calls.

    Args:
        before: called with the module, its arguments and keyword arguments.
        after: called with the module and its output, None after an exception.
        is_known: whether a ``torch.compile(module)`` is observed itself; the module inside of it is otherwise.
    """

    def __init__(self, before: GuardedHook, after: GuardedHook, is_known: Callable[[nn.Module], bool]) -> None:
        self._before = before
        self._after = after
        self._is_known = is_known
        self._hooks: HookSet | None = None
        self._call: Any = None
        self._original: Any = None
        self._num_hiding = 0
        self._lock = threading.Lock()

    def attach(self, hooks: HookSet) -> None:
        """Puts the wrapper on, through the labeler's hooks."""
        from torch._dynamo.callback import callback_handler
        from torch._dynamo.eval_frame import OptimizedModule

        self._hooks = hooks
        skip_in_dynamo(GuardedHook.__call__, recursive=True)
        hooks.patch(callback_handler, "install_callbacks", self._hidden_while)
        hooks.patch(nn.Module, "__call__", functools.partial(self._observed, OptimizedModule))

    def _observed(self, compiled_type: type, original: Callable[..., Any]) -> Callable[..., Any]:
        before, after, called_module = self._before, self._after, self._called_module

        # The name by which torch.compile knows that it is given the call of a module.
        @functools.wraps(original)
        def call(self: nn.Module, /, *args: Any, **kwargs: Any) -> Any:
            module = called_module(self) if type(self) is compiled_type else self
            if module is None:
                return original(self, *args, **kwargs)
            before(module, args, kwargs)
            output = None
            try:
                output = original(self, *args, **kwargs)
                return output
            finally:
                after(module, output)

        skip_in_dynamo(call)
        self._call, self._original = call, original
        return call

    def _called_module(self, wrapper: Any) -> nn.Module | None:
        """Whose call that of a ``torch.compile(module)`` is; None where it leads to our own call of the module."""
        if self._is_known(wrapper):
            found: nn.Module = wrapper
            return found
        inner = getattr(wrapper.forward, "_torchdynamo_orig_callable", None)
        return None if getattr(inner, "__func__", None) is self._call else wrapper._orig_mod  # noqa: SLF001  # no public way

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
            is_on = self._hooks is not None and self._hooks.active
            if not self._num_hiding and is_on and vars(nn.Module).get("__call__") is self._original:
                nn.Module.__call__ = self._call  # type: ignore[method-assign]
