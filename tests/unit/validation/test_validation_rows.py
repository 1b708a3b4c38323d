"""The table of rows as data: what there is, how it is chosen, what a machine must have."""

from __future__ import annotations

import re

import pytest

from torchmem.validation import rows
from torchmem.validation.models import ZOO
from torchmem.validation.rows import ROWS, Machine, Row, find

NAMES = [row.name for row in ROWS]


def test_names_are_unique_and_plain():
    """Two rows could not be told apart, or a name would need quoting in a shell."""
    assert len(set(NAMES)) == len(NAMES)
    assert [name for name in NAMES if not re.fullmatch(r"[a-z0-9-]+(/[a-z0-9-]+)+", name)] == []


@pytest.mark.parametrize(
    ("pattern", "num_rows"),
    [
        ("fsdp2/multi-group/*", 8),
        ("fsdp2/non-root", 1),
        ("fsdp2/checkpointing/*", 4),
        ("plain/checkpointing/*", 2),
        ("fsdp2/hybrid/*", 3),
        ("tensor-parallel/*", 5),
        ("fsdp2/accumulate/*", 3),
        ("ddp/*", 6),
        ("fsdp1/full-shard/*", 2),
        ("fsdp1/hybrid-shard*", 4),
        ("fsdp1/mixed/*", 4),
        ("fsdp1/offload/*", 2),
        ("fsdp1/ignored-modules/*", 2),
        ("fsdp1/no-sync/*", 2),
        ("state-dict/fsdp1/*", 7),
        ("state-dict/fsdp2/*", 3),
        ("compiled/*", 4),
        ("zoo/*", 4 * len(ZOO)),
    ],
)
def test_the_seed_matrix_is_there(pattern, num_rows):
    """A way of training would not be validated any more."""
    assert len(find([pattern])) == num_rows


def test_rows_are_found_by_part_or_pattern():
    """The user could not run one row, or would run others too."""
    table = [Row(name, ROWS[0].build) for name in ("a/b", "a/bc", "d")]
    assert [row.name for row in find(["b"], table)] == ["a/b", "a/bc"]
    assert [row.name for row in find(["a/b"], table)] == ["a/b"]
    assert [row.name for row in find(["*/b"], table)] == ["a/b"]
    assert [row.name for row in find(["d", "?/b"], table)] == ["a/b", "d"]
    assert find(["e"], table) == []
    assert find([], table) == table


def test_a_row_says_what_it_lacks(monkeypatch):
    """A row that cannot run on a machine would fail there instead of saying why it was skipped."""
    two, one = Machine("cpu", 2), Machine("cpu", 1)
    (hybrid,) = find(["fsdp2/hybrid/keep"])
    assert hybrid.reason_to_skip(two) == ""
    assert hybrid.reason_to_skip(one) == "needs 2 ranks, there is 1"
    assert hybrid.reason_to_skip(Machine("cpu", 3)) == "needs a multiple of 2 ranks, there are 3"
    (offload,) = find(["fsdp1/offload/flat"])
    assert "accelerator" in offload.reason_to_skip(two)
    assert offload.reason_to_skip(Machine("cuda", 2)) == ""
    monkeypatch.setattr(rows.importlib.util, "find_spec", lambda _name: None)
    (saved,) = find(["state-dict/fsdp2/distributed"])
    assert "numpy" in saved.reason_to_skip(two)
    (compiled,) = find(["compiled/model"])
    assert "triton" in compiled.reason_to_skip(Machine("cuda", 1))
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.setenv("CXX", "")
    assert "no C++ compiler found" in compiled.reason_to_skip(two)
