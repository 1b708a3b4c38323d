"""Calls of modules, observed around ``nn.Module.__call__``: before everything that a call does, and after it.

Nothing is put on a module: hooks on modules would make torch.compile compile each block of a model anew, up to its
limit, and then no longer. The wrapper lies on top of that of ``frames``.

Invariants: a call runs exactly once, with its own result or exception; what was observed before is observed after, also
when the call raised.

Limits: a compiled module that is called is observed, what it calls inside is not.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from torchmem.labelers.call_patch import CallPatch
from torchmem.labelers.hooks import GuardedHook, HookSet


class ModuleCalls:
    """Observes every module's calls.

    Args:
        hooks: the labeler's, through which the wrapper is put on.
        before: called with the module, its arguments and keyword arguments.
        after: called with the module and its output, None after an exception.
        is_known: whether a ``torch.compile(module)`` is observed itself; the module inside of it is otherwise.
    """

    def __init__(
        self, hooks: HookSet, before: GuardedHook, after: GuardedHook, is_known: Callable[[nn.Module], bool]
    ) -> None:
        self._before = before
        self._after = after
        self._is_known = is_known
        self._patch: CallPatch | None = None  # while it is put on, other threads may come by already
        self._patch = CallPatch(hooks, self._observed)

    def is_inside_itself(self, module: nn.Module) -> bool:
        """Whether the call of the module that is beginning is made, on this thread, by another one of it."""
        running = self._patch.running() if self._patch else ()
        return sum(call.get("module") is module for call in running) > 1

    def _observed(self, original: Callable[..., Any], compiled_type: type) -> Callable[..., Any]:
        before, after, called_module = self._before, self._after, self._called_module

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

        return call

    def _called_module(self, wrapper: Any) -> nn.Module | None:
        """Whose call that of a ``torch.compile(module)`` is; None where it leads to our own call of the module."""
        if self._is_known(wrapper):
            found: nn.Module = wrapper
            return found
        if self._patch is None or self._patch.comes_again(wrapper):
            return None
        return getattr(wrapper, "_orig_mod", None)
