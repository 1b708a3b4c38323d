"""Five small training jobs on gloo, four of which go wrong in one way each once a file appears, and one never.

A script, one process a rank: ``python tests/jobs/drifting.py KIND NAME DIRECTORY FOLDER RANK WORLD_SIZE``. It trains
until it is ended, slowly enough to leave the cores to others. Until ``FOLDER/fault`` exists every job is healthy, so
that the test says when baselines are known, and not a number of steps.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn import functional

import torchmem

VOCAB, WIDTH, INNER, NUM_LAYERS = 256, 64, 256, 6
LENGTH, LONGER = 32, 48
"""Tokens of a sequence; from the fault of the steps-up job on."""
SECONDS_BETWEEN_STEPS = 0.02
EVERY = 4
"""Steps from one thing that is kept by mistake to the next."""
ADAPTER_EVERY, ADAPTER_WIDTH = 4 * EVERY, 4 * WIDTH
"""Few and large: what an optimizer's step costs torchmem grows with its groups, until that is an alert of its own."""
EVAL_EVERY, CHECKPOINT_EVERY = 40, 60


class Block(nn.Module):
    """A layer beside a residual; of what it makes, autograd keeps the output of ``act``.

    Its backward takes little beside that, so that a fault hardly moves the instant at which a step peaks: what passes
    by there, and did not at the old instant, would be named as grown too.
    """

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, INNER)
        self.act = nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        return x + self.act(self.up(x)).unflatten(-1, (-1, WIDTH)).sum(-2)


class Net(nn.Module):
    """Tokens (batch, length) in, logits (batch, length, vocabulary) out."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.layers = nn.ModuleList(Block() for _ in range(NUM_LAYERS))
        self.head = nn.Linear(WIDTH, VOCAB)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


class Job:
    """A healthy job; ``break_down`` is called once, ``after_step`` after each step with its number."""

    batch = 4

    def __init__(self) -> None:
        self.model: Any = Net()
        self.prepare()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        self.is_broken = False

    def prepare(self) -> None:
        """What is done to the model before it is trained."""

    def length(self) -> int:
        """Tokens of the next sequences."""
        return LENGTH

    def break_down(self) -> None:
        """Begins to go wrong."""

    def after_step(self, number: int) -> None:
        """What is done beside the steps."""

    def step(self) -> None:
        """One training step."""
        tokens = torch.randint(VOCAB, (self.batch, self.length() + 1))
        logits = self.model(tokens[:, :-1])
        functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()


class Leak(Job):
    """Keeps, in a list, what one layer makes."""

    def break_down(self) -> None:
        kept: list[Tensor] = []
        calls = iter(range(sys.maxsize))

        def keep(_module: nn.Module, _inputs: Any, output: Tensor) -> None:
            if next(calls) % EVERY == 0:
                kept.append(output.detach())

        self.model.layers[2].up.register_forward_hook(keep)


class StepsUp(Job):
    """Goes on with longer sequences."""

    batch = 16

    def length(self) -> int:
        return LONGER if self.is_broken else LENGTH


class OptimizerGrows(Job):
    """Adds adapters, one after the other, and trains the newest; the states of all stay in the optimizer."""

    def prepare(self) -> None:
        adapters = self.model.head.adapters = nn.ParameterList([_adapter()])

        def adapt(_module: nn.Module, inputs: Any) -> Tensor:
            return inputs[0] + (inputs[0] @ adapters[-1]).unflatten(-1, (-1, WIDTH)).sum(-2)

        self.model.head.register_forward_pre_hook(adapt)

    def after_step(self, number: int) -> None:
        if self.is_broken and number % ADAPTER_EVERY == 0:
            self.model.head.adapters.append(_adapter())
            self.optimizer.add_param_group({"params": [self.model.head.adapters[-1]]})


def _adapter() -> nn.Parameter:
    return nn.Parameter(torch.zeros(WIDTH, ADAPTER_WIDTH))


class UnshardedGradients(Job):
    """FSDP2, with the synchronisation of gradients left off."""

    def prepare(self) -> None:
        for layer in self.model.layers:
            fully_shard(layer)
        fully_shard(self.model)

    def break_down(self) -> None:
        self.model.set_requires_gradient_sync(False)


class Control(Job):
    """Healthy: sequences of many lengths, evaluations of larger batches, and checkpoints."""

    batch = 16

    def length(self) -> int:
        return int(torch.randint(LENGTH // 2, LENGTH + LENGTH // 2, ()))

    def after_step(self, number: int) -> None:
        if number % EVAL_EVERY == 0:
            self.model.eval()
            with torch.no_grad():
                self.model(torch.randint(VOCAB, (2 * self.batch, LONGER)))
            self.model.train()
        if number % CHECKPOINT_EVERY == 0:
            states = {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}
            torch.save({"states": states, "copy": {k: v.clone() for k, v in states["model"].items()}}, os.devnull)


KINDS = {
    "leak": Leak,
    "steps-up": StepsUp,
    "optimizer": OptimizerGrows,
    "unsharded": UnshardedGradients,
    "control": Control,
}


def train(kind: str, name: str, directory: str, folder: Path, rank: int, world_size: int) -> None:
    """Trains until the process is ended."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world_size))
    store = dist.FileStore(str(folder / f"store-{kind}"), world_size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
    job = KINDS[kind]()
    fault = folder / "fault"
    with torchmem.install(job.model, job.optimizer, train_job=name, dir=directory):
        for number in range(1, sys.maxsize):
            has_fault = torch.tensor(int(not job.is_broken and fault.exists()))
            if world_size > 1:  # all ranks from the same step on
                dist.all_reduce(has_fault, dist.ReduceOp.MIN)
            if has_fault:
                job.is_broken = True
                job.break_down()
            job.step()
            job.after_step(number)
            time.sleep(SECONDS_BETWEEN_STEPS)


if __name__ == "__main__":
    train(*sys.argv[1:4], Path(sys.argv[4]), int(sys.argv[5]), int(sys.argv[6]))
