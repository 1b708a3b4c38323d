"""The independent count: every CPU block, of every thread, as requested."""

from __future__ import annotations

import threading

import pytest
import torch

from jobs.ranks import run_alone
from torchmem.errors import BuildError
from torchmem.validation import witness


def blocks(_rank: int, _world_size: int) -> dict[str, object]:
    """What the witness says of a block's life; in a process of its own, where it stays on the allocator."""
    witness.install()
    witness.reset_peak()
    foreign = witness.current()
    block = torch.empty(1001, dtype=torch.uint8)
    address = block.data_ptr()
    seen: dict[str, object] = {"alive": witness.current() - foreign, "has alive": witness.has(address)}
    del block
    seen |= {"freed": witness.current() - foreign, "has freed": witness.has(address), "peak": witness.peak() - foreign}
    witness.reset_peak()
    return seen | {"reset": witness.peak() - foreign}


def resized(_rank: int, _world_size: int) -> list[int]:
    """What a storage holds that FSDP empties and fills again."""
    witness.install()
    foreign = witness.current()
    block = torch.empty(100, dtype=torch.uint8)
    held = []
    for size in (100, 0, 300):
        block.untyped_storage().resize_(size)
        held.append(witness.current() - foreign)
    return held


def from_another_thread(_rank: int, _world_size: int) -> tuple[int, int]:
    """Bytes and events of one block that another thread made."""
    witness.install()
    foreign, before, made = witness.current(), witness.num_events(), []
    thread = threading.Thread(target=lambda: made.append(torch.empty(64, dtype=torch.uint8)))
    thread.start()
    thread.join()
    return witness.current() - foreign, witness.num_events() - before


def test_blocks_count_as_requested():
    """The truth would be rounded, or miss that a block was freed."""
    assert run_alone(blocks, 1) == {
        "alive": 1001,
        "has alive": True,
        "freed": 0,
        "has freed": False,
        "peak": 1001,
        "reset": 0,
    }


def test_resized_storages_count():
    """What FSDP frees by resizing a storage would count for ever."""
    assert run_alone(resized, 1) == [100, 0, 300]


def test_other_threads_count():
    """Blocks of autograd's or the communication library's threads would be missing from the truth."""
    assert run_alone(from_another_thread, 1) == (64, 1)


def test_a_missing_compiler_is_named(monkeypatch, tmp_path):
    """The user would get a traceback instead of the fix."""
    monkeypatch.setenv("TORCHMEM_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.setenv("CXX", "")
    with pytest.raises(BuildError, match="install g\\+\\+"):
        witness.build()
