"""A job of any size in one process: fake tensors, a process group that hallucinates, and torch adapted to both.

What of torch does not know fake tensors is put right by ``adaptations`` and ``fake_reducer``. Besides, a fake scalar
has no value: one that is read is 0, and the job counts them (an integer, which a shape may be made of, is only told to
a data loader); and the job's own ``init_process_group`` finds a group
that is there already. What is compiled runs eagerly: fake tensors would be compiled for.

Private torch interfaces used: ``torch.testing._internal.distributed.fake_pg``.

Invariants: after the block the process group, the environment and every patched attribute are as before.

Limits: one job at a time in a process; a process group of the process's own must not exist.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch._ops import HigherOrderOperator
from torch._subclasses.fake_tensor import FakeTensorMode, UnsupportedOperatorException

from torchmem.engine import adaptations, fake_reducer
from torchmem.engine.dispatch import DispatchEngine
from torchmem.engine.dispatch_patch import patched
from torchmem.errors import ForecastError

_FIRST_BRANCH = "of torch.cond the first branch is forecast: which one is taken depends on a value"
_LOADED = "data loaders read their seed and order from fake tensors: all of it was 0"
_LOADER = str(Path(torch.__file__).parent / "utils" / "data")
_NOT_THE_READER = (str(Path(torch.__file__).parent), str(Path(__file__).parent), "<")


class FakeMode(FakeTensorMode):  # type: ignore[no-untyped-call]  # torch's
    """Torch's, of which there is one: copying what it made shares it.

    Torch would copy it with the weak references that it holds to storages, and those free what they point to once for
    each copy: the process ends in a segmentation fault, at some later collection. Torch finds its rules for
    higher-order operators (``torch.cond``) by the very type of a mode: here they are those of its own.
    """

    supports_higher_order_operators = True

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[object] = (), kwargs: Mapping[str, object] | None = None
    ) -> object:
        """Runs an operator by torch's rule for fake tensors."""
        if isinstance(func, HigherOrderOperator) and func not in _dispatched_by_torch():
            rule = func.python_key_table.get(FakeTensorMode)
            if rule is None:
                raise UnsupportedOperatorException(func)  # type: ignore[arg-type]  # it is only named
            return rule(self, *args, **(kwargs or {}))
        return super().__torch_dispatch__(func, types, args, kwargs or {})

    def __deepcopy__(self, _memo: dict[int, Any]) -> FakeMode:
        return self


def _dispatched_by_torch() -> Container[Any]:
    """The higher-order operators whose rule leads back to the mode."""
    from torch._higher_order_ops.utils import registered_hop_fake_fns

    return registered_hop_fake_fns


class FakeJob:
    """What a fake job says of itself.

    Attributes:
        mode: the fake mode, entered by whoever builds and steps.
        num_values_read: scalars of fake tensors whose value was asked for.
        counts_uses: whether DDP counts how often parameters are used, in tensors of int32, and will read that.
        unadapted: what of this torch could not be adapted to fake tensors, and why.
        made_up: what else was made up in place of a value, a sentence each.
    """

    def __init__(self) -> None:
        self.mode = FakeMode(allow_non_fake_inputs=True)
        self.num_values_read = 0
        self.counts_uses = False
        self.unadapted: dict[str, str] = {}
        self.made_up: dict[str, None] = {}


@contextlib.contextmanager
def fake_job(engine: DispatchEngine, world_size: int, rank: int, *, like_cuda: bool = False) -> Iterator[FakeJob]:
    """A job of ``world_size`` ranks, of which this process is one; nothing is entered yet but the process group.

    Args:
        engine: what will count it.
        world_size: ranks of the job.
        rank: which of them this is.
        like_cuda: whether torch chooses on the CPU what it would choose on CUDA.

    Raises:
        ForecastError: the process has a process group already.
    """
    if dist.is_available() and dist.is_initialized():
        raise ForecastError("this process has a process group already: forecast in a process of its own")
    job = FakeJob()
    with contextlib.ExitStack() as stack:
        stack.enter_context(_environment(world_size, rank))
        if dist.is_available():
            stack.enter_context(_process_group(world_size, rank))
        for name, adaptation in _adaptations(engine, job, like_cuda=like_cuda).items():
            try:
                stack.enter_context(adaptation)
            except (ImportError, AttributeError, KeyError, TypeError) as error:  # this torch does it otherwise
                job.unadapted[name] = f"{type(error).__name__}: {error}"
        stack.enter_context(torch.compiler.set_stance("force_eager"))
        engine.read_value = _value_read(job)
        try:
            yield job
        finally:
            engine.read_value = None


def _adaptations(
    engine: DispatchEngine, job: FakeJob, *, like_cuda: bool
) -> dict[str, contextlib.AbstractContextManager[None]]:
    found: dict[str, contextlib.AbstractContextManager[None]] = {
        "the conversion of modules": adaptations.swapping(),
        "the choice of optimizer kernels": adaptations.choosing_kernels(like_cuda=like_cuda),
        "threads": adaptations.threads(engine, job.mode),
        "torch.cond": adaptations.first_branches(lambda: job.made_up.setdefault(_FIRST_BRANCH)),
    }
    if dist.is_available():
        found |= {
            "DTensor's sharding propagation": adaptations.quiet_propagation(engine),
            "FSDP2's chunks": adaptations.lazy_chunks(),
            "FSDP1": adaptations.telling_what_is_there(),
            "DeviceMesh": adaptations.real_meshes(),
            "DistributedDataParallel": fake_reducer.fake_reducer(engine, lambda: setattr(job, "counts_uses", True)),
        }
    return found


@contextlib.contextmanager
def _environment(world_size: int, rank: int) -> Iterator[None]:
    wanted = {
        "RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_RANK": "0",
        "LOCAL_WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "0",
    }
    before = {name: os.environ.get(name) for name in wanted}
    os.environ.update(wanted)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


@contextlib.contextmanager
def _process_group(world_size: int, rank: int) -> Iterator[None]:
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
    try:
        with contextlib.ExitStack() as stack:
            for name in ("init_process_group", "destroy_process_group"):
                stack.enter_context(patched(dist, name, adaptations.ignored))
            yield
    finally:
        dist.destroy_process_group()


def _value_read(job: FakeJob) -> Callable[[torch.Tensor], Any]:
    """What the value of a fake tensor is taken for."""

    def value(tensor: torch.Tensor) -> Any:
        if tensor.dtype is torch.int32 and job.counts_uses:
            return 0  # DDP then leaves gradients as autograd made them
        if tensor.is_floating_point():
            job.num_values_read += 1
            return 0.0
        if tensor.dtype is torch.bool:
            job.num_values_read += 1
            return False
        if _reader().startswith(_LOADER):
            job.made_up[_LOADED] = None
            return 0
        raise ForecastError(
            "the job reads an integer out of a tensor (item(), int(), tolist()), which has none before it runs: leave"
            " that out, or make the number of what it is made of"
        )

    return value


def _reader() -> str:
    """The file of the innermost code that is the job's own, or a data loader's: what reads a value, not how."""
    frame: Any = sys._getframe(1)  # noqa: SLF001  # the only way to ask
    while frame is not None:
        name: str = frame.f_code.co_filename
        if name.startswith(_LOADER) or not name.startswith(_NOT_THE_READER):
            return name
        frame = frame.f_back
    return ""
