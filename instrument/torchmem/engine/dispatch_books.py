"""What is read of a Python ledger's books, in the rows and packed bytes that the native engine gives.

Invariant: the same layout as ``native/book_bindings.h``: cells are owner u32, reftype u32, bytes i64; totals by reftype
are i64; all little-endian.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Mapping

from torchmem.engine.fast_ledger import NUM_REFTYPES, FastBooks, FastLedger
from torchmem.ledger import CellKey, Mark, by_reftype

_TOTALS = struct.Struct(f"<{NUM_REFTYPES}q")
_CELL = struct.Struct("<IIq")

EndRow = tuple[int, int, int, bytes, bytes]
TotalsRow = tuple[int, int, bytes, int, bytes]
WindowRow = tuple[int, int, int, int, bytes, bytes, bytes]


def end_step_rows(ledger: FastLedger) -> list[EndRow]:
    """[(device, step peak, bytes at the step's end, peak by reftype, end by reftype), ...]."""
    return [
        (device, books.step_peak, books.step_end, _packed(books.step_peak_totals), _TOTALS.pack(*books.running))
        for device, books in ledger.devices.items()
    ]


def totals_rows(ledger: FastLedger) -> list[TotalsRow]:
    """[(device, bytes now, by reftype, peak of the running step, by reftype), ...]."""
    return [
        (device, books.current, _TOTALS.pack(*books.running), books.peak, _packed(by_reftype(books.at_peak())))
        for device, books in ledger.devices.items()
    ]


def window_rows(ledger: FastLedger) -> list[WindowRow]:
    """[(device, usage, step peak of the window, peak since reset, usage, peak and active-peak cells), ...]."""
    return [_window_row(device, books) for device, books in ledger.devices.items()]


def _window_row(device: int, books: FastBooks) -> WindowRow:
    running, before = books.windows
    highest = running if running.peak >= before.peak else before
    return (
        device,
        books.step_end,
        highest.peak,
        books.life_peak,
        _cells(books.usage.items()),
        _cells(highest.composition.items()),
        _cells(_active(running.modules, before.modules)),
    )


def _active(running: Mapping[int, Mark], before: Mapping[int, Mark]) -> Iterable[tuple[CellKey, int]]:
    for owner in sorted({*running, *before}):
        now, then = running.get(owner, Mark()), before.get(owner, Mark())
        mark = now if now.max >= then.max else then
        if mark.max:
            for reftype in range(NUM_REFTYPES):
                if mark.totals[reftype]:
                    yield (owner, reftype), mark.totals[reftype]


def _packed(totals: Mapping[int, int]) -> bytes:
    return _TOTALS.pack(*(totals.get(reftype, 0) for reftype in range(NUM_REFTYPES)))


def _cells(cells: Iterable[tuple[CellKey, int]]) -> bytes:
    return b"".join(_CELL.pack(owner, reftype, num_bytes) for (owner, reftype), num_bytes in sorted(cells))
