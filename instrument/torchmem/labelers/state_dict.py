"""State dicts and distributed checkpoints: what saving and loading allocates is ``checkpoint``.

From the outermost call on a thread until it returns, everything that the thread allocates is ``checkpoint``, whatever
else would name it (gathers, copies, staging and serialisation buffers), and the most each device holds meanwhile is
the peak of that operation. What lives on as something else (loaded parameters, optimizer state) is renamed by its own
labeler in the next step.

Always patched, being public methods: ``state_dict`` and ``load_state_dict`` of modules and of optimizers. Elsewhere
users import the public functions by name before torchmem comes, so patched is what those look up when called, all of
it private to torch: of ``torch.distributed.checkpoint`` the functions and context managers in ``_PARTS``, of
``FullyShardedDataParallel`` both ends of its optimizer state dicts. A part that this torch does not have is left out
and named in ``missing``; the others work. ``torch.distributed.checkpoint`` is imported here if the job has not yet:
0.1 s beyond the parts of torch.distributed that torchmem needs anyway, and simpler than to wait for its first use.

Invariants: the original runs exactly once with the very arguments, result or exception; no label outlives the call; a
nested call belongs to the outermost, so a ``load`` that first takes a state dict is one load.

Limits: what ``torch.save``, ``torch.load``, ``DTensor.full_tensor`` or a stager of the user's own allocate outside of
these is not a checkpoint's, nor what the communication library's own threads allocate inside, though the peak counts
it; a checkpoint process (``AsyncCheckpointerType.PROCESS``) and shared memory are not counted at all. In a compiled
region nothing is labelled, and a compiled function that itself takes a state dict is compiled once more when torchmem
comes after it.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import inspect
import logging
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.optim import Optimizer

from torchmem.labelers.hooks import HookSet, is_from_signal_handler
from torchmem.model import Operation

logger = logging.getLogger("torchmem")

_CHECKPOINT = "torch.distributed.checkpoint"


class _Part(NamedTuple):
    """Names in one module, or in one class of it, that are looked up when they are called."""

    owner: str
    operation: Operation
    names: tuple[str, ...]
    are_contexts: bool = False
    """Whether they are context managers around the whole operation."""


_PARTS = (
    _Part(f"{_CHECKPOINT}.state_dict_saver", Operation.SAVE, ("_profile",), are_contexts=True),
    _Part(f"{_CHECKPOINT}.state_dict_saver", Operation.SAVE, ("_stateful_to_state_dict", "_save_state_dict")),
    _Part(f"{_CHECKPOINT}.staging.DefaultStager", Operation.SAVE, ("_stage",)),
    _Part(f"{_CHECKPOINT}.staging.BlockingAsyncStager", Operation.SAVE, ("stage",)),
    # Also run by threads of the writer's own.
    _Part(f"{_CHECKPOINT}.filesystem", Operation.SAVE, ("_write_files_from_queue",)),
    _Part(f"{_CHECKPOINT}.state_dict_loader", Operation.LOAD, ("_profile",), are_contexts=True),
    _Part(f"{_CHECKPOINT}.state_dict_loader", Operation.LOAD, ("_load_state_dict",)),
    _Part(f"{_CHECKPOINT}.state_dict", Operation.SAVE, ("_get_model_state_dict", "_get_optim_state_dict")),
    _Part(f"{_CHECKPOINT}.state_dict", Operation.LOAD, ("_load_model_state_dict", "_load_optim_state_dict")),
    _Part(f"{_CHECKPOINT}.optimizer", Operation.LOAD, ("_alloc_tensor", "_create_chunk_sharded_tensor")),
    _Part("torch.distributed.fsdp.FullyShardedDataParallel", Operation.SAVE, ("_optim_state_dict_impl",)),
    _Part("torch.distributed.fsdp.FullyShardedDataParallel", Operation.LOAD, ("_optim_state_dict_to_load_impl",)),
)


class StateDictLabeler:
    """Labels what is allocated to save and to load state.

    Args:
        native: the loaded engine.

    Attributes:
        missing: the parts of torch that were not found, whose bytes are booked as if the labeler were not there; empty
            when it is whole.
    """

    name = "state_dict"

    def __init__(self, native: Any) -> None:
        self.hooks = HookSet(self.name)
        self.missing = ""
        self._native = native
        self._thread = threading.local()

    def attach(self) -> None:
        """Patches the methods, and what is found of distributed checkpoints."""
        for kind in (nn.Module, Optimizer):
            self.hooks.patch(kind, "state_dict", functools.partial(self._labelled, Operation.SAVE))
            self.hooks.patch(kind, "load_state_dict", functools.partial(self._labelled, Operation.LOAD))
        if torch.distributed.is_available():
            missing = [name for part in _PARTS for name in self._patch_part(part)]
            self.missing = ", ".join(missing)
        if self.missing:
            logger.warning("labeler %s: torch %s has no %s", self.name, torch.__version__, self.missing)

    def detach(self) -> None:
        """Takes the patches off."""
        self.hooks.close()

    @property
    def running(self) -> bool:
        """Whether this thread is saving or loading: an optimizer that then steps only makes the state to be filled."""
        depth = getattr(self._thread, "depth", None)
        # Where an exception came between opening and closing, the next forward has cut the label, but not told us.
        return depth is not None and self._native.stack_depth() > depth

    def _patch_part(self, part: _Part) -> Iterator[str]:
        """Patches what there is of a part; yields the names that are missing."""
        owner = _found(part.owner)
        for name in part.names:
            if not hasattr(owner, name):
                yield f"{part.owner}.{name}"
                continue
            wrap = self._around if part.are_contexts else self._labelled
            is_static = isinstance(inspect.getattr_static(owner, name), staticmethod)
            self.hooks.patch(owner, name, functools.partial(wrap, part.operation, is_static=is_static))

    def _labelled(
        self, operation: Operation, original: Callable[..., Any], *, is_static: bool = False
    ) -> Callable[..., Any]:
        @functools.wraps(original)
        def call(*args: Any, **kwargs: Any) -> Any:
            if torch.compiler.is_compiling() or not self._begin(operation):
                return original(*args, **kwargs)
            try:
                return original(*args, **kwargs)
            finally:
                self._end()

        return staticmethod(call) if is_static else call

    def _around(self, operation: Operation, original: Callable[..., Any], **_: Any) -> Callable[..., Any]:
        @functools.wraps(original)
        @contextlib.contextmanager
        def call(*args: Any, **kwargs: Any) -> Iterator[Any]:
            begun = self._begin(operation)
            try:
                with original(*args, **kwargs) as value:
                    yield value
            finally:
                if begun:
                    self._end()

        return call

    def _begin(self, operation: Operation) -> bool:
        """Opens the label unless the call is nested or the labeler off; returns whether it did."""
        if not self.hooks.active:
            return False
        began = time.perf_counter()
        try:
            if self.running:
                return False
            self._thread.depth = self._native.push_checkpoint(operation)
        except Exception as error:  # nothing of ours may reach the caller
            if is_from_signal_handler(error):
                raise
            self.hooks.fail(error)
            return False
        finally:
            self.hooks.seconds += time.perf_counter() - began
        return True

    def _end(self) -> None:
        began = time.perf_counter()
        depth, self._thread.depth = self._thread.depth, None
        try:
            if depth is not None:  # a forward meanwhile may have cut it
                self._native.cut_stack(depth)
        except Exception as error:  # as above
            if is_from_signal_handler(error):
                raise
            self.hooks.fail(error)
        self.hooks.seconds += time.perf_counter() - began


def _found(path: str) -> Any:
    """The module of that name, or the class in a module; None where this torch has no such thing."""
    module, _, last = path.rpartition(".")
    try:
        return getattr(importlib.import_module(module), last) if last[0].isupper() else importlib.import_module(path)
    except (ImportError, AttributeError):
        return None
