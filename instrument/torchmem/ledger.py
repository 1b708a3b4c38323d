"""The books in plain Python: what the native ledger (``native/ledger.h``) must equal, event for event.

Read this to learn what is counted; the native one is the same rules made fast. A *stack* is what one thread is
doing: frames opened by a module's forward, by its share of backward, or by an explicit label.

Invariants (property-tested on both): the cells of a device sum to its current bytes; no count is negative; usage
never exceeds the peak; relabelling conserves bytes; freeing an unknown block changes nothing but a counter.

Limits: far too slow for a training job. Torch-free.
"""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from torchmem.model import OUTSIDE_OWNER, RefType

CellKey = tuple[int, int]
"""(owner, reftype)."""

NO_TASK = -1


class FrameKind(enum.IntEnum):
    """Why a frame is on a stack."""

    FORWARD = 0
    BACKWARD = 1
    LABEL = 2


@dataclass
class Block:
    """One live allocation."""

    num_bytes: int
    birth: int
    cell: CellKey
    device: int


@dataclass
class Mark:
    """The most a device held during an interval, when that was, and its composition by reftype."""

    max: int = 0
    sequence: int = 0
    totals: Counter[int] = field(default_factory=Counter)


@dataclass
class Frame:
    """One thing a thread is doing."""

    owner: int
    kind: FrameKind
    reftype: int
    task: int
    opened: int
    marks: dict[int, Mark]


@dataclass
class Window:
    """The highest step peak of a time window with its composition, and each module's own highest."""

    peak: int = 0
    composition: dict[CellKey, int] = field(default_factory=dict)
    modules: dict[int, Mark] = field(default_factory=dict)


@dataclass
class DeviceBooks:
    """The books of one device; those of the last step are captured by ``Ledger.end_step``."""

    current: int = 0
    peak: int = 0
    life_peak: int = 0
    peak_sequence: int = 0
    cells: Counter[CellKey] = field(default_factory=Counter)
    cells_at_peak: Counter[CellKey] = field(default_factory=Counter)
    modules: dict[int, Mark] = field(default_factory=dict)
    step_peak: int = 0
    step_end: int = 0
    step_peak_totals: Counter[int] = field(default_factory=Counter)
    usage: dict[CellKey, int] = field(default_factory=dict)
    windows: tuple[Window, Window] = field(default_factory=lambda: (Window(), Window()))

    def totals(self) -> Counter[int]:
        """Current bytes by reftype."""
        return by_reftype(self.cells)


@dataclass(frozen=True)
class Correction:
    """A label that was corrected at ``end``: the block had been booked otherwise since ``birth``."""

    birth: int
    end: int
    num_bytes: int
    device: int
    old: int
    new: int


def by_reftype(cells: Counter[CellKey]) -> Counter[int]:
    """Sums over owners."""
    totals: Counter[int] = Counter()
    for (_, reftype), num_bytes in cells.items():
        totals[reftype] += num_bytes
    return totals


def nonzero(cells: Counter[CellKey]) -> dict[CellKey, int]:
    """The cells that hold something."""
    return {cell: num_bytes for cell, num_bytes in cells.items() if num_bytes}


class Ledger:
    """Every live byte by (device, owner, reftype), with the composition at each step's peak.

    Args:
        parents: for each owner the one that encloses it; 0 for the root and for owner 0 itself.
    """

    def __init__(self, parents: Sequence[int]) -> None:
        self.parents = parents
        self.devices: dict[int, DeviceBooks] = {}
        self.stacks: dict[int, list[Frame]] = {}
        self.counters: Counter[str] = Counter()
        self._live: dict[int, Block] = {}
        self._sequence = 0
        self._hindsight: list[Correction] = []

    def allocate(self, stack: int, address: int, num_bytes: int, device: int, owner: int, reftype: int) -> None:
        """Books a new block."""
        self.counters["num_events"] += 1
        self._sequence += 1
        if address in self._live:
            self.counters["num_double_allocations"] += 1
            self._remove(address)
        books = self.devices.setdefault(device, DeviceBooks())
        self._live[address] = Block(num_bytes, self._sequence, (owner, reftype), device)
        books.cells[owner, reftype] += num_bytes
        books.current += num_bytes
        if books.current > books.peak:
            books.peak = books.current
            books.peak_sequence = self._sequence
            books.cells_at_peak = books.cells.copy()
            books.life_peak = max(books.life_peak, books.peak)
        frames = self.stacks.get(stack)
        if frames:
            mark = frames[-1].marks.setdefault(device, Mark())
            if books.current > mark.max:
                frames[-1].marks[device] = self._mark(books)

    def release(self, stack: int, address: int) -> bool:
        """Books a free; False when the block is unknown."""
        block = self._live.get(address)
        if block is None:
            self.counters["num_unknown_frees"] += 1
            return False
        self.counters["num_events"] += 1
        self._sequence += 1
        self._remove(address)
        owner, reftype = block.cell
        if reftype == RefType.ACTIVATION and self._freed_before_return(stack, block):
            self._rewrite_past(block, (owner, RefType.TEMPORARY))
        return True

    def relabel(self, address: int, owner: int, reftype: int) -> bool:
        """Moves a block to another owner and reftype, back to its birth; False when the block is unknown."""
        block = self._live.get(address)
        if block is None:
            return False
        if block.cell == (owner, reftype):
            return True
        self._sequence += 1
        books = self.devices[block.device]
        books.cells[block.cell] -= block.num_bytes
        books.cells[owner, reftype] += block.num_bytes
        self._rewrite_past(block, (owner, reftype))
        block.cell = (owner, reftype)
        return True

    def push(self, stack: int, owner: int, kind: FrameKind, reftype: int = 0, task: int = NO_TASK) -> None:
        """Opens a frame."""
        marks = {device: self._mark(books) for device, books in self.devices.items()}
        self.stacks.setdefault(stack, []).append(Frame(owner, kind, reftype, task, self._sequence, marks))

    def pop(self, stack: int) -> None:
        """Closes the innermost frame; its maxima count for its module and for the frame around it."""
        frames = self.stacks[stack]
        self._hand_down(frames, len(frames) - 1)
        frames.pop()

    def enter_backward(self, stack: int, owner: int, task: int) -> None:
        """Makes ``owner`` the module whose backward runs."""
        path: list[int] = []
        while owner != OUTSIDE_OWNER:
            path.insert(0, owner)
            owner = self.parents[owner]
        frames = self.stacks.setdefault(stack, [])
        first = len(frames)
        while first and frames[first - 1].kind == FrameKind.BACKWARD and frames[first - 1].task == task:
            first -= 1
        shared = 0
        for frame, wanted in zip(frames[first:], path, strict=False):
            if frame.owner != wanted:
                break
            shared += 1
        while len(frames) > first + shared:
            self.pop(stack)
        for wanted in path[shared:]:
            self.push(stack, wanted, FrameKind.BACKWARD, 0, task)

    def settle(self, stack: int, task: int) -> None:
        """Drops backward frames left by a backward pass that is over."""
        frames = self.stacks.get(stack, [])
        while frames and frames[-1].kind == FrameKind.BACKWARD and frames[-1].task != task:
            self.pop(stack)

    def end_step(self) -> None:
        """Captures the step's totals, usage and compositions, and begins a new one."""
        for stack, frames in self.stacks.items():
            while frames and frames[-1].kind == FrameKind.BACKWARD:
                self.pop(stack)
            for index in reversed(range(len(frames))):
                self._hand_down(frames, index)
        for device, books in self.devices.items():
            self._correct_modules(device, books)
            self._close_step(books)
        self._hindsight.clear()
        for frames in self.stacks.values():
            for frame in frames:
                frame.marks = {device: self._mark(books) for device, books in self.devices.items()}

    def rotate_windows(self) -> None:
        """Starts a new time window; the one before stays readable."""
        for books in self.devices.values():
            books.windows = (Window(), books.windows[0])

    def num_blocks(self) -> int:
        """Blocks alive."""
        return len(self._live)

    def _mark(self, books: DeviceBooks) -> Mark:
        return Mark(books.current, self._sequence, books.totals())

    def _remove(self, address: int) -> None:
        block = self._live.pop(address)
        books = self.devices[block.device]
        books.cells[block.cell] -= block.num_bytes
        books.current -= block.num_bytes

    def _freed_before_return(self, stack: int, block: Block) -> bool:
        """True when the forward frame in which the block was made is still open on this thread."""
        for frame in reversed(self.stacks.get(stack, [])):
            if frame.opened < block.birth:
                return frame.kind == FrameKind.FORWARD and frame.owner == block.cell[0]
        return False

    def _rewrite_past(self, block: Block, cell: CellKey) -> None:
        """In every composition since its birth, the block becomes what it turned out to be."""
        books = self.devices[block.device]
        if block.birth <= books.peak_sequence:
            books.cells_at_peak[block.cell] -= block.num_bytes
            books.cells_at_peak[cell] += block.num_bytes
        self._hindsight.append(
            Correction(block.birth, self._sequence, block.num_bytes, block.device, block.cell[1], cell[1])
        )

    def _hand_down(self, frames: list[Frame], index: int) -> None:
        frame = frames[index]
        for device, mark in frame.marks.items():
            if frame.kind != FrameKind.LABEL:
                modules = self.devices[device].modules
                if mark.max > modules.get(frame.owner, Mark()).max:
                    modules[frame.owner] = mark
            if index:
                outer = frames[index - 1].marks
                if mark.max > outer.get(device, Mark()).max:
                    outer[device] = mark

    def _correct_modules(self, device: int, books: DeviceBooks) -> None:
        for owner, mark in books.modules.items():
            totals = mark.totals.copy()
            for c in self._hindsight:
                if c.device == device and c.birth <= mark.sequence < c.end:
                    totals[c.old] -= c.num_bytes
                    totals[c.new] += c.num_bytes
            books.modules[owner] = Mark(mark.max, mark.sequence, totals)

    def _close_step(self, books: DeviceBooks) -> None:
        window = books.windows[0]
        books.step_peak = books.peak
        books.step_end = books.current
        books.step_peak_totals = by_reftype(books.cells_at_peak)
        books.usage = nonzero(books.cells)
        if books.peak > window.peak:
            window.peak = books.peak
            window.composition = nonzero(books.cells_at_peak)
        for owner, mark in books.modules.items():
            if mark.max > window.modules.get(owner, Mark()).max:
                window.modules[owner] = mark
        books.modules = {}
        books.peak = books.current
        books.peak_sequence = self._sequence
        books.cells_at_peak = books.cells.copy()
