"""Records that lie about themselves: cut, flipped, and put together to exhaust whoever reads them."""

from __future__ import annotations

import contextlib
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hostile import HUGE, JOB, RANK, framed, judged, running_ranks, with_field
from records import WRITTEN_AT, living, make_device, make_record, make_ring
from sidecars import Clock
from torchmem.errors import RecordError
from torchmem.wire.record import HEADER, Record, decode, encode
from torchmem_exporter.reading.reader import REASONS, Reader

FIRST = 100
"""Rank of the first file planted."""
SMALL = encode(make_record(FIRST, 2, ring=make_ring(1, make_device())))
PAYLOAD = SMALL[HEADER.size :]
INSIDE = {"schema", "books", "identity", "values", "sums"}
"""What may be wrong with a record whose header is right."""


@pytest.fixture
def reader(tmp_path):
    """A reader of a directory with two ranks that live."""
    with living(tmp_path, make_record(0), make_record(1)):
        yield Reader(tmp_path, stale_after=60.0, clock=Clock(WRITTEN_AT + 1))


def refused(reader, spoilt):
    """Plants each of the contents as a rank of its own: the reason for which each is refused, or None; in order."""
    paths = [reader.directory / JOB / f"rank-{number}.record" for number, _ in enumerate(spoilt, start=FIRST)]
    for path, data in zip(paths, spoilt, strict=True):
        path.write_bytes(data)
    states, counted = judged(reader)
    assert states.items() >= running_ranks(0, 1).items()
    reasons = {rejection.path: rejection.reason for rejection in reader.scan(None).rejections}
    assert Counter(reasons.values()) == counted
    for path in paths:
        path.unlink()
    return [reasons.get(f"{JOB}/{path.name}") for path in paths]


def replaced(position, value, data=SMALL):
    """The bytes with another value in one place."""
    return data[:position] + bytes([value]) + data[position + 1 :]


def test_cut_at_every_byte(reader):
    """A record that was half written would be believed, or raise."""
    assert refused(reader, [SMALL[:length] for length in range(len(SMALL))]) == ["truncated"] * len(SMALL)


def wanted_reason(position):
    """Why a record with a byte flipped there is refused; the minor version alone says nothing about the rest."""
    for end, reason in ((8, "magic"), (10, "version"), (12, "identity"), (16, "checksum")):
        if position < end:
            return reason
    return "oversize or truncated" if position < HEADER.size else "checksum"


def test_each_byte_flipped(reader):
    """A bit that fell over in memory would change figures without a word."""
    found = refused(reader, [replaced(position, SMALL[position] ^ 0xFF) for position in range(len(SMALL))])
    wanted = [wanted_reason(position) for position in range(len(SMALL))]
    wanted[10:12] = [None if position == 0 else "identity" for position in (10, 11)]  # named after their position
    assert [
        (position, reason)
        for position, reason in enumerate(found)
        if reason != wanted[position] and (reason not in ("oversize", "truncated") or position not in range(16, 24))
    ] == []


def test_each_bit_flipped():
    """A checksum that misses some bits would let them through."""
    accepted = set()
    for position in range(len(SMALL)):
        for bit in range(8):
            with contextlib.suppress(RecordError):
                decode(replaced(position, SMALL[position] ^ (1 << bit)))
                accepted.add(position)
    assert accepted == {10, 11}  # the minor version


@pytest.mark.parametrize("change", [lambda byte: byte ^ 0xFF, lambda byte: byte ^ 1, lambda _: 0xC1, lambda _: 0xDF])
def test_each_byte_forged(reader, change):
    """Whoever forges the checksum too would make the reader raise: no parse may trust its input."""
    forged = [framed(replaced(position, change(byte), PAYLOAD)) for position, byte in enumerate(PAYLOAD)]
    assert set(refused(reader, forged)) <= INSIDE | {None}


@settings(max_examples=400, deadline=None)
@given(
    changes=st.lists(st.tuples(st.integers(0, len(PAYLOAD) - 1), st.binary(max_size=9)), min_size=1, max_size=8),
    length=st.none() | st.integers(0, len(PAYLOAD)),
    is_forged=st.booleans(),
)
def test_any_combination_of_changes(changes, length, is_forged):
    """Several changes together could reach what none does alone: anything but a record or a RecordError is a bug."""
    payload = PAYLOAD
    for position, data in changes:
        payload = payload[:position] + data + payload[position + len(data) :]
    payload = payload[:length]
    try:
        record = decode(framed(payload) if is_forged else SMALL[: HEADER.size] + payload)
    except RecordError as error:
        assert error.reason in REASONS  # noqa: PT017  # either outcome is fine
    else:
        assert isinstance(record, Record)
        assert is_forged or payload == PAYLOAD


NESTED_LISTS = b"\x91" * 1_000_000
NESTED_MAPS = b"\x81\xa1a" * 1_000_000
ENDLESS = {
    "list": b"\xdd\xff\xff\xff\xff",
    "map": b"\xdf\xff\xff\xff\xff",
    "text": b"\xdb\xff\xff\xff\xff",
    "bytes": b"\xc6\xff\xff\xff\xff",
    "extension": b"\xc9\xff\xff\xff\xff\x01",
}


@pytest.mark.parametrize(
    "data",
    [
        pytest.param(framed(NESTED_LISTS), id="lists in lists"),
        pytest.param(framed(NESTED_MAPS), id="maps in maps"),
        pytest.param(with_field("modules", NESTED_LISTS + b"\xc0"), id="lists in lists in a field"),
        pytest.param(with_field("later", NESTED_LISTS + b"\xc0"), id="lists in lists in an unknown field"),
        pytest.param(with_field("later", NESTED_MAPS + b"\xc0"), id="maps in maps in an unknown field"),
        *(pytest.param(framed(raw), id=f"endless {name}") for name, raw in ENDLESS.items()),
        *(pytest.param(with_field("modules", raw), id=f"endless {name} in a field") for name, raw in ENDLESS.items()),
        *(pytest.param(with_field("later", raw), id=f"endless {name}, unknown") for name, raw in ENDLESS.items()),
        pytest.param(with_field("modules", b"\x91\xa2\xff\xfe"), id="text that is none"),
        pytest.param(with_field("counters", b"\x81\xa1a\xca\x7f\xc0\x00\x00"), id="no number"),
    ],
)
def test_bombs(reader, data):
    """A few bytes that promise much would cost the sidecar its memory, its stack or its time."""
    assert refused(reader, [data]) == ["schema"]


@pytest.mark.parametrize("name", HUGE)
def test_as_much_as_fits(reader, name):
    """A record of the greatest size, full of the smallest things, would hold up the scrape of all others."""
    (reader.directory / JOB / f"rank-{RANK}.record").write_bytes(HUGE[name]())
    for _ in range(2):
        states, _ = judged(reader)
        assert states.items() >= running_ranks(0, 1).items()
