"""An FSDP2 job that is held against its forecast: ``build`` is what is forecast, the script a rank that trains it.

``python -m jobs.held NAME BATCH FORECAST DIRECTORY FOLDER RANK WORLD_SIZE``, in the folder of the tests; it trains
until it is ended. Its weights are small beside its activations: gloo's threads let go of communication buffers when
they come to it, so that a real run holds one or two of them more, or less, than a forecast.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import torchmem
from jobs import forecast_models

VOCABULARY, WIDTH, NUM_LAYERS = 1000, 64, 2
SEQUENCE = 256
SECONDS_BETWEEN_STEPS = 0.1


def build(mesh, batch=8):
    """A narrow decoder, each layer sharded, and all of it."""
    model = forecast_models.Decoder(VOCABULARY, WIDTH, NUM_LAYERS)
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters())
    return model, optimizer, forecast_models.step_of(model, optimizer, batch, SEQUENCE)


def train(name: str, batch: int, forecast: str, directory: str, folder: Path, rank: int, world_size: int) -> None:
    """Trains until the process is ended."""
    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world_size))
    store = dist.FileStore(str(folder / f"store-{name}"), world_size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
    mesh = init_device_mesh("cpu", (world_size,), mesh_dim_names=("dp",))
    model, optimizer, step = build(mesh, batch)
    with torchmem.install(model, optimizer, train_job=name, dir=directory, forecast=forecast):
        while True:
            step()
            time.sleep(SECONDS_BETWEEN_STEPS)


if __name__ == "__main__":
    name, batch, forecast, directory, folder, rank, world_size = sys.argv[1:]
    train(name, int(batch), forecast, directory, Path(folder), int(rank), int(world_size))
