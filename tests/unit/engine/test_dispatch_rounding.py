"""CUDA's caching allocator, replayed: sizes by its rules, and books that stay consistent."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchmem.engine.rounding import CachingAllocator, block_bytes, segment_bytes

KIB, MIB = 1 << 10, 1 << 20


@pytest.mark.parametrize(("asked", "taken"), [(1, 512), (512, 512), (513, 1024), (MIB, MIB), (MIB + 1, MIB + 512)])
def test_blocks_are_multiples_of_512(asked, taken):
    """A forecast for CUDA would be below what ``memory_allocated`` says."""
    assert block_bytes(asked) == taken


@pytest.mark.parametrize(
    ("block", "segment"),
    [
        (512, 2 * MIB),
        (MIB, 2 * MIB),
        (MIB + 512, 20 * MIB),
        (10 * MIB - 512, 20 * MIB),
        (10 * MIB, 10 * MIB),
        (11 * MIB, 12 * MIB),
    ],
)
def test_segments_by_size(block, segment):
    """Reserved memory would be forecast by other rules than the allocator's."""
    assert segment_bytes(block) == segment


def test_a_segment_is_shared_and_used_again():
    """Small blocks would each take a segment, or freed ones never be used again."""
    allocator = CachingAllocator()
    for key in range(4):
        allocator.allocate(1, key, 512 * KIB)
    assert allocator.peaks() == {1: 2 * MIB}
    allocator.free(1, 1)
    allocator.free(1, 2)
    allocator.allocate(1, 4, MIB)
    assert allocator.peaks() == {1: 2 * MIB}
    allocator.allocate(1, 5, 512)
    assert allocator.peaks() == {1: 4 * MIB}


def test_a_large_rest_is_split_off_and_a_small_one_is_not():
    """The share of a segment that is lost inside its blocks would be wrong."""
    allocator = CachingAllocator()
    allocator.allocate(1, 0, 19 * MIB + 512 * KIB)
    assert (allocator.peaks(), allocator.used_bytes(1)) == ({1: 20 * MIB}, 20 * MIB)
    allocator.allocate(1, 1, 5 * MIB)
    assert (allocator.peaks(), allocator.used_bytes(1)) == ({1: 40 * MIB}, 25 * MIB)


EVENTS = st.lists(st.tuples(st.booleans(), st.integers(0, 9), st.integers(1, 30 * MIB)), max_size=60)


@given(EVENTS)
def test_blocks_never_overlap_and_fit_what_is_reserved(events):
    """Two live blocks would lie on each other, or more be used than was taken from the device."""
    allocator, live = CachingAllocator(), {}
    for wants, key, num_bytes in events:
        if wants and key not in live:
            allocator.allocate(1, key, block_bytes(num_bytes))
            live[key] = block_bytes(num_bytes)
        elif not wants and key in live:
            allocator.free(1, key)
            del live[key]
        if not live:
            continue
        device = allocator._devices[1]
        spans = sorted((b.start, b.start + b.num_bytes) for b in device.used.values())
        assert all(end <= start for (_, end), (start, _) in itertools.pairwise(spans))
        assert spans[-1][1] <= device.reserved
        free = sum(b.num_bytes for pool in device.pools for b in pool.blocks.values())
        assert free + allocator.used_bytes(1) == device.reserved
        assert all(device.used[key].num_bytes >= num_bytes for key, num_bytes in live.items())
