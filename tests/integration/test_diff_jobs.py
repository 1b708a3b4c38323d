"""Two real training jobs, the second with a larger layer: ``torchmem diff`` and a saved baseline name it."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from torchmem import cli

pytestmark = pytest.mark.slow

PROGRAM = """\
import os
import torch
from torch import nn
import torchmem

torch.manual_seed(0)
torch.set_num_threads(1)
width, num_steps = int(os.environ["WIDTH"]), int(os.environ["STEPS"])


class Wide(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(64, width), nn.Linear(width, 64)

    def forward(self, x):
        x = self.up(x)
        for _ in range(4):
            x = nn.functional.gelu(x)
        return self.down(x)


model = nn.Sequential()
model.add_module("stem", nn.Linear(64, 64))
model.add_module("wide", Wide())
model.add_module("head", nn.Linear(64, 8))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
with torchmem.install(model, optimizer) as monitor:
    for _ in range(num_steps):
        model(torch.randn(512, 64)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
"""


def train(directory, width, num_steps=20):
    """Trains a model whose layer ``wide`` is this wide inside."""
    variables = {"TORCHMEM_DIR": str(directory), "TORCHMEM_TRAIN_JOB": "train", "WIDTH": str(width)}
    environment = {**os.environ, **variables, "STEPS": str(num_steps)}
    subprocess.run([sys.executable, "-c", PROGRAM], env=environment, check=True, timeout=200)


def compare(capsys, *arguments):
    """Status and data."""
    status = cli.main(["diff", "--json", *map(str, arguments)])
    return status, json.loads(capsys.readouterr().out)


def test_the_layer_that_grew_is_named(tmp_path, capsys):
    """A CI job could not tell which layer of a change made training hold more."""
    train(tmp_path / "A", 256, num_steps=200)
    train(tmp_path / "B", 512)
    train(tmp_path / "again", 256)
    assert cli.main(["baseline", "save", "main", str(tmp_path / "A"), "--output", str(tmp_path / "main.json")]) == 0
    capsys.readouterr()
    for before in (tmp_path / "A", tmp_path / "main.json"):
        status, data = compare(capsys, before, tmp_path / "B")
        (device,) = data["devices"]
        most = device["rows"][0]
        assert (status, most["module"], most["reftype"]) == (1, "wide", "activation")
        assert most["grown_bytes"] == 4 * 512 * 256 * 4
        assert sum(row["grown_bytes"] for row in [*device["rows"], device["others"]]) == device["grown_bytes"]
        assert compare(capsys, before, tmp_path / "again")[0] == 0
