"""What torchmem is asked to do in one step of a job, and what each of those things costs.

Counted in real steps: allocator events, frames opened and closed by module calls, calls of FSDP's methods that are
labelled, what labelers do in Python. Events and labels are timed where they happen, caches cold; a module's frame, too
short for that, as what it adds to the call of a module that does nothing.
Known limits: the publisher's thread is not in the bill: it does not run in the training thread.
"""

from __future__ import annotations

import functools
import statistics
import time
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn

import torchmem

if TYPE_CHECKING:
    from collections.abc import Callable

    from jobs.model import Job

_NUM_WARM_STEPS = 5
_NUM_REPEATS = 9
_NAMES = {"module": "root's inputs", "optimizer": "optimizer labels and the step's end"}
"""What a labeler does in Python, where its name does not say it."""


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
    record_seconds: float
    """To make the record that the publisher writes now and then, on its own thread."""

    @property
    def total_seconds(self) -> float:
        """What watching takes of the training thread's step."""
        return sum(item.total_seconds for item in self.items)


def account(job: Job, num_steps: int, directory: str, depth: int) -> Account:
    """Bills a job; all ranks must call it together.

    Args:
        job: ready to step.
        num_steps: over how many steps to count.
        directory: where records go.
        depth: of the modules watched.
    """
    for _ in range(_NUM_WARM_STEPS):
        job.step()
    with torchmem.install(job.model, job.optimizer, dir=directory, depth=depth) as monitor:
        for _ in range(_NUM_WARM_STEPS):
            job.step()
        counters, labels = monitor.snapshot().counters, _label_seconds(monitor)
        start = time.perf_counter()
        for _ in range(num_steps):
            job.step()
        step_seconds = (time.perf_counter() - start) / num_steps
        events = {name: number - counters[name] for name, number in monitor.snapshot().counters.items()}
        labels = {name: seconds - labels[name] for name, seconds in _label_seconds(monitor).items()}
        record_seconds = _seconds(monitor.snapshot, num_calls=50)
    num_events, num_hook_calls, num_labels = (events[f"num_{name}"] for name in ("events", "hook_calls", "label_calls"))
    items = [
        Item("allocator events", num_events / num_steps, events["event_nanoseconds"] / 1e9 / num_events),
        Item("module frames", num_hook_calls / num_steps, _hook_seconds(directory)),
        Item("native labels", num_labels / num_steps, events["label_nanoseconds"] / 1e9 / max(1, num_labels)),
        *(Item(_NAMES.get(name, name), 1, seconds / num_steps) for name, seconds in labels.items() if seconds),
    ]
    return Account(items, step_seconds, record_seconds)


def _label_seconds(monitor: torchmem.Monitor) -> dict[str, float]:
    return {labeler.name: labeler.hooks.seconds for labeler in monitor._labelers}


def _hook_seconds(directory: str) -> float:
    """What opening or closing a frame adds to the call of a module that does nothing."""
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
