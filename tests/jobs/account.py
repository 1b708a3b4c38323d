"""What torchmem is asked to do in one step of an FSDP2 job, and what each of those things costs alone.

Counted in real steps: allocator events, calls of watched modules' hooks, calls of the FSDP2 methods that are labelled,
optimizer steps. An event is timed as the engine samples it while the job runs, a step's end as torchmem times it;
everything else as what watching adds to a call that has nothing else to do. No profiler: it would inflate the bill.
Known limits: the publisher's thread is not in the bill: it does not run in the training thread.
"""

from __future__ import annotations

import contextlib
import functools
import statistics
import time
from collections import Counter
from typing import TYPE_CHECKING, Any, NamedTuple
from unittest import mock

import torch
from torch import nn
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup

import torchmem

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from jobs.model import Job

LABELLED = ("unshard", "wait_for_unshard", "post_backward")
_NUM_WARM_STEPS = 5
_NUM_REPEATS = 9


class Item(NamedTuple):
    """One line of the bill."""

    name: str
    num_calls: float
    """A step."""
    seconds: float
    """Each."""

    @property
    def total_seconds(self) -> float:
        """A step."""
        return self.num_calls * self.seconds


class Account(NamedTuple):
    """One step's bill."""

    items: list[Item]
    step_seconds: float
    """Of the step as it is, watched."""
    published_seconds: float
    """What torchmem itself says it took of a step."""
    record_seconds: float
    """To make the record that the publisher writes now and then, on its own thread."""

    @property
    def total_seconds(self) -> float:
        """What watching takes of the training thread's step."""
        return sum(item.total_seconds for item in self.items)


def account(job: Job, num_steps: int, directory: str, depth: int) -> Account:
    """Bills an FSDP2 job; all ranks must call it together.

    Args:
        job: ready to step.
        num_steps: over how many steps to count.
        directory: where records go.
        depth: of the modules watched.
    """

    @contextlib.contextmanager
    def watched() -> Iterator[torchmem.Monitor]:
        with torchmem.install(job.model, job.optimizer, dir=directory, depth=depth) as monitor:
            yield monitor

    for _ in range(_NUM_WARM_STEPS):
        job.step()
    num_label_calls = _count_label_calls(job)
    label_seconds = _label_seconds(job, watched)
    with watched() as monitor:
        for _ in range(_NUM_WARM_STEPS):
            job.step()
        before, optimizer_before = monitor.snapshot(), _optimizer_seconds(monitor)
        start = time.perf_counter()
        for _ in range(num_steps):
            job.step()
        step_seconds = (time.perf_counter() - start) / num_steps
        after, optimizer_after = monitor.snapshot(), _optimizer_seconds(monitor)
        record_seconds = _seconds(monitor.snapshot, num_calls=50)
    spent = {name: after.counters[name] - number for name, number in before.counters.items()}
    event_seconds = spent["event_nanoseconds"] / 1e9 / spent["num_events"]
    items = [
        Item("allocator events", spent["num_events"] / num_steps, event_seconds),
        Item("module hooks", spent["num_hook_calls"] / num_steps, _hook_seconds(directory)),
        *(Item(f"FSDP2 {name}", num_label_calls[name], label_seconds[name]) for name in LABELLED),
        Item("optimizer hooks and the step's end", 1, (optimizer_after - optimizer_before) / num_steps),
    ]
    published_seconds = (after.clock.tracker_seconds - before.clock.tracker_seconds) / num_steps
    return Account(items, step_seconds, published_seconds, record_seconds)


def _optimizer_seconds(monitor: torchmem.Monitor) -> float:
    return next(labeler.hooks.seconds for labeler in monitor._labelers if labeler.name == "optimizer")


def _count_label_calls(job: Job) -> Counter[str]:
    counts: Counter[str] = Counter()

    def counting(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            counts[name] += 1
            return original(*args, **kwargs)

        return wrapper

    with contextlib.ExitStack() as patches:
        for name in LABELLED:
            original = getattr(FSDPParamGroup, name)
            patches.enter_context(mock.patch.object(FSDPParamGroup, name, counting(name, original)))
        job.step()
    return counts


def _label_seconds(job: Job, watched: Callable[[], Any]) -> dict[str, float]:
    """What a label adds to each of FSDP2's methods, called on a block's group when they have nothing to do."""
    job.forward_backward(job.batch())  # sharded gradients, as after a real post-backward
    group = job.model.get_submodule("layers.0")._get_fsdp_state()._fsdp_param_groups[0]  # type: ignore[operator,union-attr]
    group.unshard()
    group.wait_for_unshard()
    added = {
        name: _added_seconds(lambda name=name: getattr(group, name)(), watched, num_calls=500) for name in LABELLED
    }
    job.optimizer.zero_grad()
    return added


def _hook_seconds(directory: str) -> float:
    """What one hook adds to the call of a module that does nothing."""
    model = nn.Sequential(nn.Identity(), nn.Identity())
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1)
    x = torch.zeros(1)
    watched = functools.partial(torchmem.install, model, optimizer, dir=directory)
    return _added_seconds(lambda: model[0](x), watched, num_calls=5000) / 2


def _added_seconds(call: Callable[[], Any], watched: Callable[[], Any], num_calls: int) -> float:
    """How much longer a call takes watched: medians of blocks in turn."""
    bare, with_us = [], []
    for _ in range(_NUM_REPEATS):
        bare.append(_seconds(call, num_calls))
        with watched():
            call()  # what is done only the first time
            with_us.append(_seconds(call, num_calls))
    return max(0.0, statistics.median(with_us) - statistics.median(bare))


def _seconds(call: Callable[[], Any], num_calls: int) -> float:
    start = time.perf_counter()
    for _ in range(num_calls):
        call()
    return (time.perf_counter() - start) / num_calls
