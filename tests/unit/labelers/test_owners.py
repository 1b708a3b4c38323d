"""The table of owners and the storages behind tensors."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from torchmem.labelers.owners import OwnerTable, module_depth, storages, tensors_in
from torchmem.model import OUTSIDE, OUTSIDE_OWNER, ROOT


@pytest.mark.parametrize(
    ("name", "depth"), [("", 0), ("head", 1), ("layers.17", 1), ("layers.17.mlp", 2), ("a.0.b.1.c", 3), ("0", 0)]
)
def test_depth_does_not_count_indices(name, depth):
    """A layer's parts would be told apart, or folded, at another depth than documented."""
    assert module_depth(name) == depth


def test_parents_come_before_children():
    """A walk from a module to the root would not end."""
    model = nn.Transformer(8, 2, 1, 1, 8, batch_first=True)
    for depth in range(5):
        table = OwnerTable(model, depth)
        assert table.names[:2] == [OUTSIDE, ROOT]
        assert all(parent < owner for owner, parent in enumerate(table.parents) if owner)
        assert all(table.of_parameter(p) != OUTSIDE_OWNER for p in model.parameters())
        assert all(module_depth(name) <= depth for name in table.names[2:])


def test_shared_parameters_have_one_owner():
    """A tied weight would change hands from step to step."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[1].weight = model[0].weight
    table = OwnerTable(model, 2)
    assert table.names[table.of_parameter(model[1].weight)] == "0"


def test_strangers_are_outside():
    """A tensor that is no parameter of the model would be given to one of its modules."""
    table = OwnerTable(nn.Linear(4, 4), 2)
    assert table.of_parameter(torch.ones(1)) == OUTSIDE_OWNER
    assert table.of_module(nn.Linear(1, 1)) == OUTSIDE_OWNER


def test_storages_of_every_kind():
    """The parts of a subclass or a sparse tensor would be left out, or a tensor without memory counted."""
    from torch.testing._internal.two_tensor import TwoTensor

    assert len(list(storages(torch.ones(4)))) == 1
    assert len(list(storages(TwoTensor(torch.ones(4), torch.ones(4))))) == 2
    assert len(list(storages(torch.eye(4).to_sparse()))) == 2
    assert list(storages(torch.empty(4, device="meta"))) == []


def test_tensors_in_nested_values():
    """Inputs inside lists or dicts would be missed."""
    nested = {"a": [torch.ones(1), (torch.ones(1), {"b": torch.ones(1)})], "c": 5, "d": None}
    assert len(list(tensors_in(nested))) == 3
