"""What of torch does not know fake tensors, or not jobs of a thousand ranks in one process, put right while one runs.

- DTensor's sharding propagation makes tensors of global size under the ambient fake mode, which no rank ever holds: the
  engine pauses meanwhile.
- FSDP2 chunks each parameter into as many tensors as there are ranks, to keep one or two: a chunk is made when it is
  asked for.
- A device mesh reads its ranks, which fake tensors do not have: it is made of real ones.
- Modules are converted (``to``, ``half``, ``to_empty``) by swapping tensors, which torch refuses for tensors that are
  held weakly, as its own fake mode holds all of them: those references are not counted.
- Optimizers and ``clip_grad_norm_`` choose their kernels by the type of a tensor: a fake one counts as a plain one.
- FSDP1 asks for the address of memory to see whether it is there: a fake tensor's is where its size is not 0.
- ``torch.cond`` asks for the value of its predicate, or runs both branches: the first is run.
- A new thread is in no mode: it enters those of the job.

Private torch interfaces used: ``ShardingPropagator._propagate_tensor_meta_non_cached``,
``_fsdp_param._chunk_with_empty``, ``DeviceMesh._create_flatten_mesh`` and ``_create_unflatten_mesh``, the name
``weakref`` in ``torch.utils``, ``_flat_param._data_ptr_allocated``, ``_foreach_supported_types``,
``_get_foreach_kernels_supported_devices`` and ``torch._higher_order_ops.cond.cond_op``.

Invariants: each is a context manager that leaves torch as it was, and raises ``AttributeError``, ``KeyError``,
``ImportError`` or ``TypeError`` before it has changed anything where this torch has no such thing.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import inspect
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, overload

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import _disable_current_modes, _get_current_dispatch_mode_stack

from torchmem.engine.dispatch import DispatchEngine
from torchmem.engine.dispatch_patch import patched

_MESH_METHODS = ("__init__", "_create_flatten_mesh", "_create_unflatten_mesh")


class LazyChunks(Sequence[torch.Tensor]):
    """``torch.chunk``, padded with empty tensors to a number of chunks, each made when it is asked for.

    Args:
        tensor: what is chunked.
        num_chunks: into how many.
        dim: along which dimension.
    """

    def __init__(self, tensor: torch.Tensor, num_chunks: int, dim: int) -> None:
        self._tensor = tensor
        self._num_chunks = num_chunks
        self._dim = dim
        self._length = tensor.size(dim)
        self._step = max(1, -(-self._length // num_chunks))

    def __len__(self) -> int:
        return self._num_chunks

    @overload
    def __getitem__(self, index: int) -> torch.Tensor: ...
    @overload
    def __getitem__(self, index: slice) -> list[torch.Tensor]: ...
    def __getitem__(self, index: int | slice) -> torch.Tensor | list[torch.Tensor]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(self._num_chunks))]
        if index < 0:
            index += self._num_chunks
        if not 0 <= index < self._num_chunks:
            raise IndexError(index)
        start = index * self._step
        if self._length and start >= self._length:
            return self._tensor.new_empty(0)
        start = min(start, self._length)
        return self._tensor.narrow(self._dim, start, min(self._step, self._length - start))


def ignored(_original: Any) -> Callable[..., None]:
    """In place of a function that is not to be run."""

    def nothing(*_: Any, **__: Any) -> None:
        """Does nothing."""

    return nothing


@contextlib.contextmanager
def quiet_propagation(engine: DispatchEngine) -> Iterator[None]:
    """Nothing is booked while DTensor propagates sharding."""
    from torch.distributed.tensor._sharding_prop import ShardingPropagator

    def make(original: Any) -> Any:
        @functools.wraps(original)
        def propagate(*args: Any, **kwargs: Any) -> Any:
            with engine.paused():
                return original(*args, **kwargs)

        return propagate

    with patched(ShardingPropagator, "_propagate_tensor_meta_non_cached", make):
        yield


@contextlib.contextmanager
def lazy_chunks() -> Iterator[None]:
    """FSDP2 makes only the chunks that it uses."""
    from torch.distributed.fsdp._fully_shard import _fsdp_param

    chunk: Any = vars(_fsdp_param)["_chunk_with_empty"]
    parameters = list(inspect.signature(chunk).parameters)
    if parameters != ["tensor", "num_chunks", "dim"]:
        raise TypeError(f"_chunk_with_empty takes {', '.join(parameters)}")
    with patched(_fsdp_param, "_chunk_with_empty", lambda _original: LazyChunks):
        yield


@contextlib.contextmanager
def real_meshes() -> Iterator[None]:
    """Device meshes hold real numbers of ranks."""
    from torch.distributed.device_mesh import DeviceMesh

    with contextlib.ExitStack() as stack:
        for name in _MESH_METHODS:
            stack.enter_context(patched(DeviceMesh, name, _in_the_real))
        yield


def _in_the_real(original: Any) -> Any:
    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        ranks = kwargs.get("_rank_map")
        with _disable_current_modes():
            if isinstance(ranks, FakeTensor):  # init_device_mesh's own: all ranks in order
                kwargs["_rank_map"] = torch.arange(ranks.numel(), dtype=torch.int, device="cpu")
            return original(*args, **kwargs)

    return call


class _NoWeakReferences:
    """In place of the module ``weakref`` where only this is asked of it."""

    @staticmethod
    def getweakrefs(_tensor: torch.Tensor) -> list[Any]:
        """Those that torch's own fake mode holds are its own business."""
        return []


@contextlib.contextmanager
def swapping() -> Iterator[None]:
    """Fake tensors can be swapped."""
    with patched(torch.utils, "weakref", lambda _module: _NoWeakReferences):
        yield


@contextlib.contextmanager
def telling_what_is_there() -> Iterator[None]:
    """FSDP1 knows which fake tensors have memory."""
    from torch.distributed.fsdp import _flat_param

    def make(original: Any) -> Any:
        @functools.wraps(original)
        def is_allocated(tensor: torch.Tensor) -> bool:
            if not isinstance(tensor, FakeTensor):
                return bool(original(tensor))
            return tensor.untyped_storage().nbytes() > 0

        return is_allocated

    with patched(_flat_param, "_data_ptr_allocated", make):
        yield


@contextlib.contextmanager
def choosing_kernels(*, like_cuda: bool) -> Iterator[None]:
    """Fake tensors are updated by the kernels that plain ones are.

    Args:
        like_cuda: on the CPU by those that are the default on CUDA.
    """
    from torch.optim import optimizer
    from torch.utils import _foreach_utils

    name = "_get_foreach_kernels_supported_devices"
    with contextlib.ExitStack() as stack:
        for module in (optimizer, _foreach_utils):
            types = patched(module, "_foreach_supported_types", lambda types: [*types, FakeTensor])
            stack.enter_context(types)
            if like_cuda:
                stack.enter_context(patched(module, name, lambda original: lambda: [*original(), "cpu"]))
        yield


@contextlib.contextmanager
def first_branches(on_choice: Callable[[], Any]) -> Iterator[None]:
    """Of ``torch.cond`` the first branch is run, as a part of the job.

    Args:
        on_choice: called where it is.
    """
    module = importlib.import_module("torch._higher_order_ops.cond")  # torch gives the function that name too

    def choose(_predicate: Any, first: Callable[..., Any], _second: Any, operands: Sequence[Any]) -> Any:
        on_choice()
        return first(*operands)

    with patched(module, "cond_op", lambda _original: choose):
        yield


@contextlib.contextmanager
def threads(engine: DispatchEngine, mode: FakeTensorMode) -> Iterator[None]:
    """Threads that the job's own threads start have fake tensors too, and are counted."""

    def make_start(original: Any) -> Any:
        @functools.wraps(original)
        def start(thread: threading.Thread) -> None:
            thread._torchmem_is_fake = mode in _get_current_dispatch_mode_stack()  # type: ignore[attr-defined]  # noqa: SLF001  # our own
            original(thread)

        return start

    def make_run(original: Any) -> Any:
        @functools.wraps(original)
        def run(thread: threading.Thread) -> None:
            if not vars(thread).pop("_torchmem_is_fake", False):
                original(thread)
                return
            with mode, engine.here():
                original(thread)

        return run

    with patched(threading.Thread, "start", make_start), patched(threading.Thread, "run", make_run):
        yield
