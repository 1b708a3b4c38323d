"""DDP on fake tensors: its reducer, which is C++, told what a fake process group and fake tensors cannot tell it.

The reducer compares shapes and the order of gradients over the ranks by reading memory: both are left out; buckets in
another order hold as many bytes. It wants its bucket back from the group, so that a communication hook gives it that.

Private torch interfaces used: ``dist._verify_params_across_processes``, ``dist._register_comm_hook``, ``_comm_hooks``,
``_ddp_init_helper`` and ``_pre_forward`` of ``DistributedDataParallel``, ``Reducer._rebuild_buckets`` and
``_get_zeros_like_grad_buckets``.

Limits: a communication hook of the job's own that reads a future's value finds none; a parameter that only
other ranks use gets no gradient.
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist

from torchmem.engine.adaptations import ignored
from torchmem.engine.dispatch import DispatchEngine
from torchmem.engine.dispatch_patch import patched


@contextlib.contextmanager
def fake_reducer(engine: DispatchEngine, on_counting: Callable[[], None]) -> Iterator[None]:
    """DDP works on fake tensors, and the engine knows its buckets.

    Args:
        engine: what counts.
        on_counting: called when a reducer will count how often parameters are used.
    """
    from torch._C._distributed_c10d import Reducer
    from torch.nn.parallel import DistributedDataParallel

    born: list[int] = []

    def keys(reducer: Any) -> list[int]:
        """Buckets are made in C++: they are the storages of a bucket's size that came while the reducer was made."""
        with engine.paused():
            sizes = {bucket.buffer().untyped_storage().nbytes() for bucket in reducer._get_zeros_like_grad_buckets()}  # noqa: SLF001  # there is no public way
        return [key for key in born if engine.requested_bytes(key) in sizes]

    with contextlib.ExitStack() as stack:
        stack.enter_context(patched(dist, "_verify_params_across_processes", ignored))
        stack.enter_context(patched(Reducer, "_rebuild_buckets", ignored))
        around = functools.partial(_answering, on_counting)
        stack.enter_context(patched(DistributedDataParallel, "_pre_forward", around))
        watched = functools.partial(_watching, engine, born)
        stack.enter_context(patched(DistributedDataParallel, "_ddp_init_helper", watched))
        before, engine.bucket_keys = engine.bucket_keys, keys
        try:
            yield
        finally:
            engine.bucket_keys = before


def _watching(engine: DispatchEngine, born: list[int], original: Any) -> Any:
    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        with engine.born_into(born):
            return original(*args, **kwargs)

    return call


def _answering(on_counting: Callable[[], None], original: Any) -> Any:
    answered: weakref.WeakSet[Any] = weakref.WeakSet()

    @functools.wraps(original)
    def pre_forward(wrapper: Any, *args: Any, **kwargs: Any) -> Any:
        if wrapper not in answered:
            answered.add(wrapper)
            if wrapper.find_unused_parameters or wrapper.static_graph:
                on_counting()
            if not wrapper._comm_hooks:  # noqa: SLF001  # as above
                register: Any = vars(dist)["_register_comm_hook"]
                register(wrapper.reducer, None, _bucket_as_it_is)
        return original(wrapper, *args, **kwargs)

    return pre_forward


def _bucket_as_it_is(_state: Any, bucket: Any) -> torch.futures.Future[torch.Tensor]:
    future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    future.set_result(bucket.buffer())
    return future
