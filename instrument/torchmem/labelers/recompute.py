"""Activation checkpointing: what backward remakes is ``recomputation``, owned by the module that remakes it.

A watched module that runs again inside backward is recognised by the engine without any help. This labeler covers what
is checkpointed without being a module's call (``checkpoint(function, x)``): it belongs to the module whose backward
asked for it.

Private torch interfaces used, checked on attach: ``torch.utils.checkpoint._recomputation_hook``, the context in which
non-reentrant checkpointing remakes activations, and ``CheckpointFunction.backward`` for the reentrant one.

Invariants: a label is taken away however the recomputation ends (early stop is an exception).

Limits: other libraries' checkpointing is recognised where it calls watched modules.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any

import torch
from torch.utils import checkpoint as torch_checkpoint

from torchmem.labelers.hooks import HookSet


class RecomputeLabeler:
    """Labels what checkpointed functions remake.

    Args:
        native: the loaded engine.
    """

    name = "recompute"

    def __init__(self, native: Any) -> None:
        self.hooks = HookSet(self.name)
        self._native = native
        self._thread = threading.local()

    def attach(self) -> None:
        """Patches both ways in which torch recomputes."""
        context = getattr(torch_checkpoint, "_recomputation_hook", None)
        if context is None or not hasattr(context, "__enter__"):
            raise AttributeError(f"torch.utils.checkpoint of torch {torch.__version__} has no _recomputation_hook")
        self.hooks.patch(context, "__enter__", self._entering)
        self.hooks.patch(context, "__exit__", self._leaving)
        self.hooks.patch(torch_checkpoint.CheckpointFunction, "backward", self._reentrant)

    def detach(self) -> None:
        """Takes the patches off."""
        self.hooks.close()

    @property
    def _open(self) -> list[int]:
        """Depths at which this thread's running recomputations opened their labels."""
        opened: list[int] = self._thread.__dict__.setdefault("opened", [])
        return opened

    def _push(self) -> None:
        self._open.append(self._native.push_recomputation())

    def _pop(self) -> None:
        if self._open:
            self._native.cut_stack(self._open.pop())

    def _entering(self, original: Callable[..., Any]) -> Callable[..., Any]:
        push = self.hooks.guarded(self._push)

        @functools.wraps(original)
        def enter(context: Any) -> Any:
            result = original(context)
            push()
            return result

        return enter

    def _leaving(self, original: Callable[..., Any]) -> Callable[..., Any]:
        pop = self.hooks.guarded(self._pop)

        @functools.wraps(original)
        def leave(context: Any, *error: Any) -> Any:
            pop()
            return original(context, *error)

        return leave

    def _reentrant(self, original: Callable[..., Any]) -> Any:
        push, pop = self.hooks.guarded(self._push), self.hooks.guarded(self._pop)

        @functools.wraps(original)
        def backward(*args: Any) -> Any:
            push()
            try:
                return original(*args)
            finally:
                pop()

        return staticmethod(backward)
