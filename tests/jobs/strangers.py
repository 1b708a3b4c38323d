"""Threads beside a training: what they do to a watched model, or to another, must not crash the job.

Run as a program: the name of one of ``CASES`` and a number of steps; prints the labelers that gave up.
"""

from __future__ import annotations

import os
import sys
import tempfile
import threading
from collections.abc import Callable

import torch
from torch import nn
from torch.optim import Optimizer

import torchmem

SIZE, BATCH = 8, 4


def train(model: nn.Module, optimizer: Optimizer, num_steps: int, is_over: Callable[[], bool]) -> None:
    inputs = torch.ones(BATCH, SIZE)
    for _ in range(num_steps):
        if is_over():
            return
        optimizer.zero_grad()
        model(inputs).sum().backward()
        optimizer.step()


def trained(model: nn.Module, is_over: threading.Event) -> Callable[[], None]:
    """Trains the model until it is over."""
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    return lambda: train(model, optimizer, sys.maxsize, is_over.is_set)


def repeated(action: Callable[[], object], is_over: threading.Event) -> Callable[[], None]:
    def repeat() -> None:
        while not is_over.wait(0.0005):
            action()

    return repeat


def fork_and_step(monitor: torchmem.Monitor) -> None:
    """A child that ends a step of its parent's."""
    pid = os.fork()
    if not pid:
        monitor.step()
        os._exit(0)
    if os.waitpid(pid, 0)[1]:
        raise SystemExit("the child died")


def main(case: str, num_steps: int) -> None:
    both = nn.ModuleDict({"actor": nn.Linear(SIZE, SIZE), "critic": nn.Linear(SIZE, SIZE)})
    model, is_over = both["actor"], threading.Event()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    watched = both if case == "part" else model
    with tempfile.TemporaryDirectory() as directory:
        monitor = torchmem.install(watched, optimizer, dir=directory)
        beside = {
            "stranger": trained(both["critic"], is_over),
            "part": trained(both["critic"], is_over),
            "heartbeat": repeated(monitor.step, is_over),
            "fork": repeated(lambda: fork_and_step(monitor), is_over),
            "close": monitor.close,
        }[case]
        thread = threading.Thread(target=beside)
        if case != "close":
            thread.start()
        train(model, optimizer, num_steps, lambda: False)
        if case == "close":
            thread.start()
            train(model, optimizer, num_steps, lambda: False)
        is_over.set()
        thread.join()
        sys.stdout.write(f"{[one.name for one in monitor.snapshot().labelers if not one.up]}\n")
        monitor.close()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
