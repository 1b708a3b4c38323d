"""The ledger of ``ledger.py`` in constant time an event, for engines that book from Python.

The same books, the same rules, the same results (property-tested event for event); only what is copied differs. The
composition at a peak is kept as the cells that changed since, with what they held then; totals by reftype are kept
up to date instead of summed; at the end of a step corrections meet the modules' peaks in order of time.

Invariants: those of ``Ledger``; nothing done per event, or when a frame is opened or closed, grows with the number of
owners.

Limits: one thread at a time; the caller keeps a lock. Torch-free.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from torchmem.ledger import (
    Block,
    CellKey,
    Correction,
    DeviceBooks,
    Frame,
    FrameKind,
    Ledger,
    Mark,
    nonzero,
)
from torchmem.model import RefType

NUM_REFTYPES = len(RefType)


@dataclass
class FastBooks(DeviceBooks):
    """The books of one device.

    Attributes:
        saved: what the cells that changed since the peak held at it; ``cells_at_peak`` is made of them when asked for.
        running: current bytes by reftype.
    """

    saved: dict[CellKey, int] = field(default_factory=dict)
    running: list[int] = field(default_factory=lambda: [0] * NUM_REFTYPES)

    def totals(self) -> Counter[int]:
        """Current bytes by reftype."""
        return counted(self.running)

    def at_peak(self) -> Counter[CellKey]:
        """The cells as they were at the peak."""
        cells = self.cells.copy()
        cells.update(dict.fromkeys(self.saved, 0))
        for cell, num_bytes in self.saved.items():
            cells[cell] = num_bytes
        return cells


@dataclass(slots=True)
class FastMark(Mark):
    """A ``Mark`` whose totals are a plain list by reftype."""

    totals: list[int] = field(default_factory=lambda: [0] * NUM_REFTYPES)  # type: ignore[assignment]  # a list for speed


def counted(totals: Sequence[int]) -> Counter[int]:
    """Totals by reftype, those that are not zero."""
    return Counter({reftype: num_bytes for reftype, num_bytes in enumerate(totals) if num_bytes})


class FastLedger(Ledger):
    """See ``Ledger``."""

    devices: dict[int, FastBooks]  # type: ignore[assignment]  # as this ledger makes them

    def allocate(self, stack: int, address: int, num_bytes: int, device: int, owner: int, reftype: int) -> None:
        """Books a new block."""
        self.counters["num_events"] += 1
        self._sequence = sequence = self._sequence + 1
        if address in self._live:
            self.counters["num_double_allocations"] += 1
            self._remove(address)
        books = self.devices.get(device)
        if books is None:
            books = self.devices[device] = FastBooks()
        cell = (owner, reftype)
        self._live[address] = Block(num_bytes, sequence, cell, device)
        held = books.cells[cell]
        if cell not in books.saved:
            books.saved[cell] = held
        books.cells[cell] = held + num_bytes
        books.running[reftype] += num_bytes
        books.current = current = books.current + num_bytes
        if current > books.peak:
            books.peak = current
            books.peak_sequence = sequence
            books.saved.clear()
            books.life_peak = max(books.life_peak, current)
        frames = self.stacks.get(stack)
        if frames:
            mark = frames[-1].marks.get(device)
            if mark is None or current > mark.max:  # a new one: the old may have been handed down
                frames[-1].marks[device] = FastMark(current, sequence, books.running.copy())

    def relabel(self, address: int, owner: int, reftype: int) -> bool:
        """Moves a block to another owner and reftype, back to its birth; False when the block is unknown."""
        block = self._live.get(address)
        if block is None:
            return False
        cell = (owner, reftype)
        if block.cell == cell:
            return True
        self._sequence += 1
        books = self.devices[block.device]
        self._add(books, block.cell, -block.num_bytes)
        self._add(books, cell, block.num_bytes)
        self._rewrite_past(block, cell)
        block.cell = cell
        return True

    def push(self, stack: int, owner: int, kind: FrameKind, reftype: int = 0, task: int = -1) -> None:
        """Opens a frame."""
        marks: dict[int, Mark] = {device: self._mark(books) for device, books in self.devices.items()}
        self.stacks.setdefault(stack, []).append(Frame(owner, kind, reftype, task, self._sequence, marks))

    def enter_backward(self, stack: int, owner: int, task: int) -> None:
        """Makes ``owner`` the module whose backward runs."""
        frames = self.stacks.get(stack)
        if frames:
            top = frames[-1]
            if top.owner == owner and top.kind == FrameKind.BACKWARD and top.task == task:
                return
        super().enter_backward(stack, owner, task)

    def move(self, address: int, to: int) -> None:
        """A block is at another address now; nothing else changes."""
        self._live[to] = self._live.pop(address)

    def find(self, address: int) -> Block | None:
        """The block at the address, if it is alive."""
        return self._live.get(address)

    @property
    def sequence(self) -> int:
        """Number of the last event."""
        return self._sequence

    # -- what the reference does by copying

    def _add(self, books: FastBooks, cell: CellKey, num_bytes: int) -> None:
        held = books.cells[cell]
        books.saved.setdefault(cell, held)
        books.cells[cell] = held + num_bytes
        books.running[cell[1]] += num_bytes

    def _mark(self, books: DeviceBooks) -> Mark:
        assert isinstance(books, FastBooks)  # noqa: S101  # this ledger makes no others
        return FastMark(books.current, self._sequence, books.running.copy())

    def _remove(self, address: int) -> None:
        block = self._live.pop(address)
        books = self.devices[block.device]
        self._add(books, block.cell, -block.num_bytes)
        books.current -= block.num_bytes

    def _rewrite_past(self, block: Block, cell: CellKey) -> None:
        books = self.devices[block.device]
        if block.birth <= books.peak_sequence:
            for one, num_bytes in ((block.cell, -block.num_bytes), (cell, block.num_bytes)):
                books.saved[one] = books.saved.get(one, books.cells[one]) + num_bytes
        if block.cell[1] != cell[1]:
            self._hindsight.append(
                Correction(block.birth, self._sequence, block.num_bytes, block.device, block.cell[1], cell[1])
            )

    def _correct_modules(self, device: int, books: DeviceBooks) -> None:
        """Each correction holds for the peaks reached in [birth, end): summed along the peaks in order of time."""
        owners = sorted(books.modules, key=lambda owner: books.modules[owner].sequence)
        sequences = [books.modules[owner].sequence for owner in owners]
        deltas = [[0] * NUM_REFTYPES for _ in range(len(owners) + 1)]
        for c in self._hindsight:
            if c.device == device:
                begin, end = bisect_left(sequences, c.birth), bisect_left(sequences, c.end)
                for at, sign in ((begin, 1), (end, -1)):
                    deltas[at][c.old] -= sign * c.num_bytes
                    deltas[at][c.new] += sign * c.num_bytes
        sums = [0] * NUM_REFTYPES
        for owner, delta in zip(owners, deltas, strict=False):
            sums = [a + b for a, b in zip(sums, delta, strict=True)]
            mark = books.modules[owner]
            totals = [mark.totals[reftype] + sums[reftype] for reftype in range(NUM_REFTYPES)]
            books.modules[owner] = FastMark(mark.max, mark.sequence, totals)

    def _close_step(self, books: DeviceBooks) -> None:
        assert isinstance(books, FastBooks)  # noqa: S101  # as above
        books.cells_at_peak = Counter(nonzero(books.at_peak()))
        super()._close_step(books)
        books.saved.clear()
