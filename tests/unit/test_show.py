"""The rows and tables of ``torchmem show``, as any terminal shows them."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

import small_records
from torchmem import show
from torchmem.model import RefType
from torchmem.wire import record as wire
from torchmem.wire.ranks import RankView


def narrow(width, by):
    """Lines of the table of a long name in a terminal of so many columns."""
    name = "decoder.layers.*." + "x" * 60 + ".end"
    record = small_records.record(labelers=[], modules=[*small_records.MODULES[:3], name, "head"])
    console = Console(file=io.StringIO(), width=width, highlight=False)
    show.draw(console, [RankView(record, "running")], show.Book.PEAK, by, 15)
    return console.file.getvalue().partition("step:\n")[2].splitlines()


def test_long_names_are_whole_where_there_is_room_for_bars():
    """Two modules of long names could not be told apart."""
    lines = narrow(76, show.By.MODULE)
    first_column = [line[:46].strip().split(" ")[0] for line in lines]
    assert "decoder.layers.*." + "x" * 60 + ".end" in "".join(first_column)
    assert lines[-1].split() == ["total", "16.00", "MiB", "100.0%", "█" * 12]


@pytest.mark.parametrize(
    ("width", "by", "largest"),
    [
        (60, show.By.BOTH, "  ~xxxxxxxxxxxxxxxxxxxxxxxxx.end activation  6.00 MiB  37.5%"),
        (40, show.By.BOTH, "  ~xxxxx.end activation  6.00 MiB  37.5%"),
        (40, show.By.MODULE, "  ~xxxxxxxxxxxxxxxx.end  6.00 MiB  37.5%"),
        (40, show.By.REFTYPE, "  activation 10.00 MiB  62.5%"),
    ],
)
def test_numbers_stay_in_a_narrow_terminal(width, by, largest):
    """Sizes would be cut, or names be broken into columns of a few characters beside a bar."""
    lines = [line.rstrip() for line in narrow(width, by)]
    assert largest in lines
    assert lines[-1].endswith(" 16.00 MiB 100.0%")
    assert max(map(len, lines)) <= width


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.00 KiB"),
        (1536, "1.50 KiB"),
        (-2048, "-2.00 KiB"),
        (80 << 30, "80.00 GiB"),
        (2**63 - 1, "8.00 EiB"),
        (1 << 74, "16384.00 EiB"),
    ],
)
def test_sizes_have_binary_units(num_bytes, text):
    """A size would be off by the 7% between GB and GiB."""
    assert show.binary(num_bytes) == text


def test_every_reftype_has_a_name_to_show():
    """A new reftype would be shown without a name."""
    cells = [wire.Cell(1, reftype, 1) for reftype in RefType]
    record = small_records.record(devices=[small_records.device(step_peak=wire.pack_cells(cells))])
    held = show.holders(record, record.devices[0], show.Book.PEAK, show.By.REFTYPE, 100)
    assert {row.reftype for row in held.shown} == {reftype.label for reftype in RefType}
