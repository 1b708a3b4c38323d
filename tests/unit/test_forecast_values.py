"""Forecasts of jobs that ask for values, which fake tensors do not have: what is answered, and what is said of it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, WeightedRandomSampler

import torchmem
from torchmem.cli import main

SIZE = 64
LAYER_BYTES = 4 * (SIZE * SIZE + SIZE)
BATCH = 4
LOADED = "data loaders read their seed and order from fake tensors: all of it was 0"


def job_of(model, loss):
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    def step():
        optimizer.zero_grad()
        loss(model).sum().backward()
        optimizer.step()

    return model, optimizer, step


def loads(*, shuffle=False, weighted=False):
    """Trains on a data loader."""
    data = TensorDataset(torch.randn(20 * BATCH, SIZE))
    sampler = WeightedRandomSampler(torch.ones(20 * BATCH), 10 * BATCH) if weighted else None
    loader = DataLoader(data, batch_size=BATCH, shuffle=shuffle, sampler=sampler)
    batches = iter(loader)
    return job_of(nn.Linear(SIZE, SIZE), lambda model: model(next(batches)[0]))


class Counts(torch.utils.data.Dataset):
    """A data set that reads a length."""

    def __len__(self):
        return 20

    def __getitem__(self, _index):
        return torch.ones(int(torch.ones(1, dtype=torch.long)), SIZE)


def loads_lengths():
    """Trains on shapes that are values."""
    batches = iter(DataLoader(Counts()))
    return job_of(nn.Linear(SIZE, SIZE), lambda model: model(next(batches)))


def counts_hits():
    """Reads how many predictions are right."""

    def loss(model):
        output = model(torch.ones(BATCH, SIZE))
        (output.argmax(-1) == 0).sum().item()
        return output

    return job_of(nn.Linear(SIZE, SIZE), loss)


class Branching(nn.Module):
    """Takes a layer, or none."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(SIZE, SIZE)

    def forward(self, x):
        return torch.cond(x.sum() > 0, self.layer, lambda y: y * 2, (x,))


def branches():
    """Trains what one branch of a condition holds."""
    return job_of(Branching(), lambda model: model(torch.ones(BATCH, SIZE)))


def attends():
    """Uses a higher-order operator whose rule torch's own fake mode has."""
    from torch.nn.attention.flex_attention import flex_attention

    def loss(model):
        with torch.no_grad():
            query = torch.randn(1, 2, 32, 16)
            flex_attention(query, query, query)
        return model(torch.ones(BATCH, SIZE))

    return job_of(nn.Linear(SIZE, SIZE), loss)


def compiles_whole():
    """Insists on being compiled."""
    layer = nn.Linear(SIZE, SIZE)
    whole = torch.compile(layer, fullgraph=True)
    return job_of(layer, lambda _: whole(torch.ones(BATCH, SIZE)))


@pytest.mark.parametrize("more", [{}, {"shuffle": True}, {"weighted": True}])
def test_a_job_with_a_data_loader(more):
    """Most jobs could not be forecast: a data loader reads its seed, and the order of its data, from tensors."""
    found = torchmem.forecast(loads, arguments=more)
    assert found.by_reftype["parameter"] == LAYER_BYTES
    assert found.by_reftype["input"] == 4 * BATCH * SIZE
    assert LOADED in found.ranks[0].notes


@pytest.mark.parametrize(("build", "what"), [(loads_lengths, "return torch.ones(int("), (counts_hits, ".sum().item()")])
def test_an_integer_that_the_job_reads_is_found(build, what):
    """The message would not say which line to change, or a shape be made of a number that was made up."""
    with pytest.raises(torchmem.ForecastError, match="the job reads an integer out of a tensor") as caught:
        torchmem.forecast(build)
    file, line, _ = str(caught.value).split(":", 2)
    assert Path(file) == Path(__file__)
    assert what in Path(file).read_text().splitlines()[int(line) - 1]


def test_a_condition_takes_its_first_branch():
    """A job with ``torch.cond`` could not be forecast, or without the gradients of what its branches hold."""
    found = torchmem.forecast(branches)
    assert found.by_reftype["parameter"] == found.by_reftype["gradient"] == LAYER_BYTES
    assert any("torch.cond the first branch is forecast" in note for note in found.ranks[0].notes)


@pytest.mark.filterwarnings("ignore:(?s).*flex_attention called without torch.compile")
@pytest.mark.parametrize("build", [attends, compiles_whole])
def test_what_is_compiled_whole_is_forecast(build):
    """Jobs with higher-order operators, or compiled as a whole, could not be forecast."""
    found = torchmem.forecast(build)
    assert found.by_reftype["parameter"] == found.by_reftype["gradient"] == LAYER_BYTES


@pytest.mark.parametrize("ranks", ["0", 0, [0.5], [None]])
def test_ranks_that_are_no_numbers(ranks):
    """The user would get a TypeError from inside of torchmem."""
    with pytest.raises(torchmem.ForecastError, match="give whole numbers, such as"):
        torchmem.forecast(attends, ranks=ranks)


def heads(heads=2):
    """Takes only some numbers."""
    model = nn.MultiheadAttention(SIZE, heads)
    return job_of(model, lambda model: model(*3 * [torch.ones(8, 1, SIZE)])[0])


def test_a_search_beyond_what_the_job_takes(capsys):
    """The whole sweep would be lost because of a value that nobody asked for."""
    assert main(["forecast", f"{__name__}:heads", "--sweep", "heads=2,4", "--capacity", "100MiB"]) == 0
    assert "the largest that was tried heads that fits 100.00 MiB is" in capsys.readouterr().out
