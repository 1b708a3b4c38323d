"""What CUDA's caching allocator takes for a request: blocks of 512 bytes, and segments of the device that it keeps.

``block_bytes`` is what counts as allocated. ``CachingAllocator`` replays requests with torch's default settings: a
request of up to 1 MiB comes from segments of 2 MiB, one below 10 MiB from segments of 20 MiB, a larger one from a
segment of its own rounded up to 2 MiB; the smallest free block that fits is split, and free neighbours are joined.
Source: the constants and rules of ``c10/cuda/CUDACachingAllocator.cpp``.

Invariants: the blocks of a segment sum to its size; what is allocated never exceeds what is reserved.

Limits: one stream; ``expandable_segments`` and other settings of ``PYTORCH_CUDA_ALLOC_CONF`` are not known; nothing is
ever given back, as when the device is large enough. Torch-free.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from dataclasses import dataclass, field

MIN_BLOCK_BYTES = 512
SMALL_BYTES = 1 << 20
"""The largest request that comes from small segments."""
SMALL_SEGMENT_BYTES = 2 << 20
LARGE_SEGMENT_BYTES = 20 << 20
MIN_LARGE_BYTES = 10 << 20
"""From this size on a request has a segment of its own."""
ROUND_LARGE_BYTES = 2 << 20


def block_bytes(num_bytes: int) -> int:
    """What a request counts as."""
    return max(MIN_BLOCK_BYTES, -(-num_bytes // MIN_BLOCK_BYTES) * MIN_BLOCK_BYTES)


def segment_bytes(num_bytes: int) -> int:
    """The segment that is taken from the device for a block that no segment has room for."""
    if num_bytes <= SMALL_BYTES:
        return SMALL_SEGMENT_BYTES
    if num_bytes < MIN_LARGE_BYTES:
        return LARGE_SEGMENT_BYTES
    return -(-num_bytes // ROUND_LARGE_BYTES) * ROUND_LARGE_BYTES


@dataclass(eq=False, slots=True)
class _Block:
    start: int
    num_bytes: int
    is_small: bool
    is_free: bool = True
    before: _Block | None = None
    after: _Block | None = None

    @property
    def order(self) -> tuple[int, int]:
        """Smallest first, then by address: the order in which a fit is looked for."""
        return self.num_bytes, self.start


@dataclass
class _Pool:
    """Free blocks in order, with their sort keys beside them."""

    keys: list[tuple[int, int]] = field(default_factory=list)
    blocks: dict[tuple[int, int], _Block] = field(default_factory=dict)

    def put(self, block: _Block) -> None:
        insort(self.keys, block.order)
        self.blocks[block.order] = block

    def take(self, block: _Block) -> None:
        del self.keys[bisect_left(self.keys, block.order)]
        del self.blocks[block.order]

    def fitting(self, num_bytes: int) -> _Block | None:
        index = bisect_left(self.keys, (num_bytes, 0))
        return self.blocks[self.keys[index]] if index < len(self.keys) else None


@dataclass
class _Device:
    reserved: int = 0
    pools: tuple[_Pool, _Pool] = field(default_factory=lambda: (_Pool(), _Pool()))
    used: dict[int, _Block] = field(default_factory=dict)


class CachingAllocator:
    """Replays requests and frees; devices are told apart by number."""

    def __init__(self) -> None:
        self._devices: dict[int, _Device] = {}

    def allocate(self, device: int, key: int, num_bytes: int) -> None:
        """A request of a size that ``block_bytes`` gave, known by its key from here on."""
        one = self._devices.setdefault(device, _Device())
        is_small = num_bytes <= SMALL_BYTES
        pool = one.pools[is_small]
        block = pool.fitting(num_bytes)
        if block is None:
            size = segment_bytes(num_bytes)
            block = _Block(one.reserved, size, is_small)
            one.reserved += size
        else:
            pool.take(block)
        self._split(pool, block, num_bytes)
        block.is_free = False
        one.used[key] = block

    def free(self, device: int, key: int, _num_bytes: int = 0) -> None:
        """The block of a key is free again, joined with its free neighbours."""
        one = self._devices[device]
        block = one.used.pop(key)
        pool = one.pools[block.is_small]
        if (before := block.before) is not None and before.is_free:
            pool.take(before)
            block = _joined(before, block)
        if (after := block.after) is not None and after.is_free:
            pool.take(after)
            block = _joined(block, after)
        block.is_free = True
        pool.put(block)

    def peaks(self) -> dict[int, int]:
        """Bytes taken from each device so far."""
        return {device: one.reserved for device, one in self._devices.items()}

    def used_bytes(self, device: int) -> int:
        """Bytes in blocks that are not free."""
        return sum(block.num_bytes for block in self._devices[device].used.values())

    @staticmethod
    def _split(pool: _Pool, block: _Block, num_bytes: int) -> None:
        rest = block.num_bytes - num_bytes
        if rest < MIN_BLOCK_BYTES if block.is_small else rest <= SMALL_BYTES:
            return
        left = _Block(block.start + num_bytes, rest, block.is_small, before=block, after=block.after)
        if block.after is not None:
            block.after.before = left
        block.after = left
        block.num_bytes = num_bytes
        pool.put(left)


def _joined(block: _Block, after: _Block) -> _Block:
    block.num_bytes += after.num_bytes
    block.after = after.after
    if after.after is not None:
        after.after.before = block
    return block
