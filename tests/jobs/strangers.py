"""Training of an unrelated model in another thread, beside the one that is watched."""

from __future__ import annotations

import sys
import tempfile
import threading

import torch
from torch import nn

import torchmem


def make():
    model = nn.Linear(8, 8)
    return model, torch.optim.SGD(model.parameters(), 0.1)


def train(model, optimizer, inputs):
    optimizer.zero_grad()
    model(inputs).sum().backward()
    optimizer.step()


def main(num_steps):
    (model, optimizer), (other, other_optimizer) = make(), make()
    inputs, is_over = torch.ones(4, 8), threading.Event()

    def beside():
        while not is_over.is_set():
            train(other, other_optimizer, inputs)

    with tempfile.TemporaryDirectory() as directory, torchmem.install(model, optimizer, dir=directory) as monitor:
        thread = threading.Thread(target=beside)
        thread.start()
        for _ in range(num_steps):
            train(model, optimizer, inputs)
        is_over.set()
        thread.join()
        record = monitor.snapshot()
    sys.stdout.write(f"{record.clock.step} {[one.name for one in record.labelers if not one.up]}\n")


if __name__ == "__main__":
    main(int(sys.argv[1]))
