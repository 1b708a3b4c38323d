"""Jobs on which torch's own memory trackers err, each watched by them and by torchmem's ``MemTracker``.

Each job returns what either said, in bytes by torch's display names, and what is true. They run in one process that
believes the other ranks exist (``jobs.ranks.run_alone``), DDP's in a job of one rank; each run makes a model of its
own, because torch's tracker keeps what it tracked alive.
"""

from __future__ import annotations

import contextlib
import gc
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, cast
from unittest import mock

import torch
from torch import nn
from torch.distributed._tools import mem_tracker
from torch.distributed._tools.common_utils import get_untyped_storages
from torch.distributed._tools.fsdp2_mem_tracker import FSDPMemTracker
from torch.distributed._tools.mem_tracker import MemTracker as TorchMemTracker
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.utils._python_dispatch import return_and_correct_aliasing
from torch.utils._pytree import tree_map_only

import torchmem
from jobs.fsdp2 import Variant, fsdp2_job
from jobs.model import Size

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch.distributed.fsdp import FSDPModule
    from typing_extensions import Self

    from jobs.model import Job, Transformer

Held = dict[str, int]

SMALL = Size(num_layers=2, batch=1, seq=8)
WIDTH = 1024
LAYER_BYTES = WIDTH * WIDTH * 4
NUM_SCALED = 4


@dataclass
class Said:
    """What the two trackers said of the same moments of the same job, and what is true."""

    torch: dict[str, Any] = field(default_factory=dict)
    ours: dict[str, Any] = field(default_factory=dict)
    true: dict[str, Any] = field(default_factory=dict)


def held(snapshot: dict[torch.device, dict[Any, int]]) -> Held:
    """A snapshot of the CPU, by display name."""
    row = snapshot.get(torch.device("cpu"), {})
    return {str(getattr(key, "value", key)): num_bytes for key, num_bytes in row.items() if num_bytes}


@contextlib.contextmanager
def torch_plain(model: nn.Module, optimizer: torch.optim.Optimizer | None) -> Iterator[TorchMemTracker]:
    """torch's tracker of plain modules."""
    tracker = TorchMemTracker()
    tracker.track_external(model, *([] if optimizer is None else [optimizer]))
    with tracker:
        yield tracker


def both(
    watch_torch: Callable[..., Any],
    make: Callable[[], tuple[nn.Module, torch.optim.Optimizer | None]],
    run: Callable[[Any, nn.Module, Any], dict[str, Any]],
) -> Said:
    """Runs a job twice, each time on a model of its own, ours first; ``run(tracker, model, optimizer)``."""
    said = Said()
    for name, watch in (("ours", torchmem.MemTracker), ("torch", watch_torch)):
        model, optimizer = make()
        with watch(model, optimizer) as tracker:
            setattr(said, name, run(tracker, model, optimizer))
        gc.collect()
    return said


def two_layers() -> tuple[nn.Module, torch.optim.Optimizer]:
    """Two matrices of 4 MiB and an AdamW that works on all of them at once."""
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False))
    return model, torch.optim.AdamW(model.parameters(), foreach=True)


def _step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model(torch.ones(1, WIDTH)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def optimizer_scratch() -> Said:
    """The peak of a second step, which lies in the optimizer."""

    def run(tracker: Any, model: nn.Module, optimizer: Any) -> dict[str, Any]:
        _step(model, optimizer)
        tracker.reset_mod_stats()
        _step(model, optimizer)
        return held(tracker.get_tracker_snapshot("peak"))

    return both(torch_plain, two_layers, run)


def failed_step() -> Said:
    """A forward after an optimizer step that raised."""

    def run(tracker: Any, model: nn.Module, optimizer: Any) -> dict[str, Any]:
        model(torch.ones(1, WIDTH)).sum().backward()
        group = optimizer.param_groups[0]
        lr = group.pop("lr")
        with contextlib.suppress(KeyError):
            optimizer.step()
        group["lr"] = lr
        optimizer.zero_grad()
        optimizer.state.clear()
        tracker.reset_mod_stats()
        output = model(torch.ones(1, WIDTH))
        said = held(tracker.get_tracker_snapshot())
        del output
        return said

    return both(torch_plain, two_layers, run)


def second_iteration() -> Said:
    """Two steps without a reset; an error by its class."""

    def run(_tracker: Any, model: nn.Module, optimizer: Any) -> dict[str, Any]:
        try:
            for _ in range(2):
                _step(model, optimizer)
        except NotImplementedError as error:
            return {"error": type(error).__name__}
        return {"error": ""}

    return both(torch_plain, two_layers, run)


class Recurrent(nn.Module):
    """Calls one cell as often as it is told."""

    def __init__(self, num_calls: int) -> None:
        super().__init__()
        self.cell, self.num_calls = nn.Linear(8, 8), num_calls

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(self.num_calls):
            x = self.cell(x)
        return x


def many_calls() -> Said:
    """The most snapshots kept of any state, by how often the cell was called."""
    said = Said()
    for num_calls in (50, 100):

        def run(tracker: Any, model: nn.Module, _: Any) -> dict[str, Any]:
            model(torch.ones(1, 8)).sum().backward()
            stats = tracker.memory_tracking[cast("Recurrent", model).cell]
            return {"num_snapshots": max(len(kept) for kept in stats.snapshots.values())}

        each = both(torch_plain, lambda n=num_calls: (Recurrent(n), None), run)
        said.torch[num_calls], said.ours[num_calls] = each.torch["num_snapshots"], each.ours["num_snapshots"]
    return said


class Scaled(torch.Tensor):
    """Two storages behind one tensor: data, and a scale that operations hand on unchanged."""

    scale: torch.Tensor
    data_: torch.Tensor

    @staticmethod
    def __new__(cls, scale: torch.Tensor, data: torch.Tensor) -> Self:
        made = torch.Tensor._make_wrapper_subclass(cls, data.shape, dtype=data.dtype, device=data.device)
        made.scale, made.data_ = scale, data
        return made

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["scale", "data_"], None

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, torch.Tensor], _meta: None, _size: Any, _stride: Any) -> Scaled:
        return Scaled(inner["scale"], inner["data_"])

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        scales = [a.scale for a in args if isinstance(a, Scaled)]
        inner = tree_map_only(Scaled, lambda t: t.data_, (args, kwargs or {}))
        result = func(*inner[0], **inner[1])
        wrapped = Scaled(scales[0], result) if isinstance(result, torch.Tensor) else result
        return return_and_correct_aliasing(func, args, kwargs or {}, wrapped)


class Doubles(nn.Module):
    """Makes a new tensor of its input's kind."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * 2


def several_storages() -> Said:
    """What forwards made whose results share one storage with their input and have one of their own.

    Which of a result's storages torch's tracker meets first is chance, for it has them in a set: here, the shared one.
    """

    def run(tracker: Any, model: nn.Module, _: Any) -> dict[str, Any]:
        given = Scaled(torch.ones(1), torch.ones(WIDTH))
        tracker.track_external(given.scale, given.data_)
        before = held(tracker.get_tracker_snapshot())
        made = []
        for _ in range(NUM_SCALED):
            tracker.reset_mod_stats()
            made.append(model(given))
        after = held(tracker.get_tracker_snapshot())
        del made
        return {"num_bytes": after["Total"] - before["Total"]}

    with mock.patch.object(mem_tracker, "get_untyped_storages", smallest_first):
        said = both(torch_plain, lambda: (Doubles(), None), run)
    said.true = {"num_bytes": NUM_SCALED * WIDTH * 4}
    return said


def smallest_first(tensor: torch.Tensor) -> list[torch.UntypedStorage]:
    """The storages of a tensor in a certain order: the scale's before the data's."""
    return sorted(get_untyped_storages(tensor), key=len)


def compiled() -> Said:
    """How often a compiled model ran its compiled graph: in the tracker, and after it."""

    def run_all(watch: Any) -> dict[str, int]:
        torch._dynamo.reset()
        runs = {"now": 0}

        def backend(graph: torch.fx.GraphModule, _inputs: Any) -> Any:
            @torch.compiler.disable
            def call(*args: Any) -> Any:
                runs["now"] += 1
                return graph(*args)

            return call

        model = nn.Sequential(nn.Linear(8, 8), nn.ReLU())
        wrapped = torch.compile(model, backend=backend)
        with watch(model, None):
            for _ in range(3):
                with torch.no_grad():
                    wrapped(torch.ones(1, 8))
            inside = runs["now"]
        for _ in range(3):
            with torch.no_grad():
                wrapped(torch.ones(1, 8))
        return {"inside": inside, "after": runs["now"] - inside}

    @contextlib.contextmanager
    def resetting(model: nn.Module, optimizer: Any) -> Iterator[Any]:
        with torch_plain(model, optimizer) as tracker:
            model.register_forward_pre_hook(lambda *_: tracker.reset_mod_stats())
            yield tracker

    return Said(torch=run_all(resetting), ours=run_all(torchmem.MemTracker))


# -- FSDP2


def fsdp2(variant: Variant, run: Callable[[Any, Job], dict[str, Any]], *, optimizer_passed: bool = True) -> Said:
    """Runs an FSDP2 job under both, each on a model of its own."""
    said = Said()
    for name, watch in (("ours", torchmem.MemTracker), ("torch", FSDPMemTracker)):
        job = fsdp2_job(variant, SMALL)
        job.step()
        try:
            with watch(job.model, job.optimizer if optimizer_passed else None) as tracker:
                setattr(said, name, run(tracker, job))
        except AssertionError as error:
            setattr(said, name, {"error": str(error)})
        gc.collect()
    said.true["parameter_bytes"] = 4 * sum(p.numel() for p in job.model.parameters())
    said.true["num_parameters"] = len(list(job.model.parameters()))
    said.true["local_bytes"] = sum(p._local_tensor.nbytes for p in job.model.parameters())
    return said


def accumulated_gradients() -> Said:
    """What is there after a micro-batch whose gradients are kept unsharded in float32."""

    def run(tracker: Any, job: Job) -> dict[str, Any]:
        cast("FSDPModule", job.model).set_requires_gradient_sync(False)
        job.forward_backward(job.batch())
        return held(tracker.get_tracker_snapshot())

    return fsdp2(Variant("mixed_accumulate", mixed_precision=True, num_microbatches=2), run)


def hidden_optimizer() -> Said:
    """What is there after the first step of an optimizer that nobody passed in."""

    def run(tracker: Any, job: Job) -> dict[str, Any]:
        optimizer = torch.optim.AdamW(job.model.parameters())
        job.forward_backward(job.batch())
        optimizer.step()
        optimizer.zero_grad()
        return held(tracker.get_tracker_snapshot())

    return fsdp2(Variant("reshard"), run, optimizer_passed=False)


def full_state_dict() -> Said:
    """What a full state dict is booked as while it is held."""

    def run(tracker: Any, job: Job) -> dict[str, Any]:
        before = held(tracker.get_tracker_snapshot())
        state = get_model_state_dict(job.model, options=StateDictOptions(full_state_dict=True))
        after = held(tracker.get_tracker_snapshot())
        num_bytes = sum(t.untyped_storage().nbytes() for t in state.values())
        return {"num_bytes": num_bytes} | {name: after.get(name, 0) - before.get(name, 0) for name in after}

    return fsdp2(Variant("reshard"), run)


def several_groups() -> Said:
    """A step of a module with two parameter groups."""

    def run(tracker: Any, job: Job) -> dict[str, Any]:
        job.step()
        block = cast("Transformer", job.model).layers[0]
        states = {state.value: len(kept) for state, kept in tracker.memory_tracking[block].snapshots.items()}
        return held(tracker.get_tracker_snapshot("peak")) | {"error": "", "states": states}

    return fsdp2(Variant("two_groups", groups_per_block=2), run)


def hooks_after() -> Said:
    """The modules' hooks before (``true``) and after: their order, and which are called after an exception too."""
    said = Said()
    for name, watch in (("ours", torchmem.MemTracker), ("torch", FSDPMemTracker)):
        job = fsdp2_job(Variant("grouped_head", grouped_head=True), SMALL)
        for module in job.model.modules():
            module.register_forward_hook(_user_hook)
        said.true = _hooks(job.model)
        with watch(job.model, job.optimizer):
            pass
        setattr(said, name, _hooks(job.model))
    return said


def _hooks(model: nn.Module) -> dict[str, list[Any]]:
    every = [module._forward_hooks for module in model.modules()]
    always = [list(module._forward_hooks_always_called.values()) for module in model.modules()]
    return {"order": [[hook.__name__ for hook in hooks.values()] for hooks in every], "always_called": always}


def _user_hook(*_: Any) -> None:
    """A hook that somebody put on after sharding."""


JOBS: tuple[Callable[[], Said], ...] = (
    optimizer_scratch,
    failed_step,
    second_iteration,
    many_calls,
    several_storages,
    compiled,
    accumulated_gradients,
    hidden_optimizer,
    full_state_dict,
    several_groups,
    hooks_after,
)


def all_errors(_rank: int, _world_size: int) -> dict[str, Said]:
    """Every job but DDP's, by name."""
    return {job.__name__: job() for job in JOBS}


# -- DDP


def ddp_buckets(_rank: int, _world_size: int) -> Said:
    """What is there after the first backward and after the second forward, which rebuilds the buckets."""

    def make() -> tuple[nn.Module, torch.optim.Optimizer | None]:
        return nn.parallel.DistributedDataParallel(two_layers()[0]), None

    def run(tracker: Any, model: nn.Module, _: Any) -> dict[str, Any]:
        model(torch.ones(1, WIDTH)).sum().backward()
        model.zero_grad()
        first = held(tracker.get_tracker_snapshot())
        tracker.reset_mod_stats()
        output = model(torch.ones(1, WIDTH))
        second = held(tracker.get_tracker_snapshot())
        del output
        return {"after_backward": first, "after_forward": second}

    said = both(torch_plain, make, run)
    said.true = {"bucket_bytes": 2 * LAYER_BYTES}
    return said
