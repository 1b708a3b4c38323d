"""The record's bytes: what was encoded comes back, and whatever else lies there is refused by name."""

from __future__ import annotations

import struct
import zlib

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from records import make_device, make_record

from torchmem.errors import RecordError
from torchmem.wire.record import (
    HEADER,
    MAGIC,
    MAJOR,
    MAX_PAYLOAD_BYTES,
    MINOR,
    Cell,
    Ring,
    decode,
    encode,
    pack_cells,
    unpack_cells,
)

SMALL = make_record(num_modules=1, ring=Ring(), counters={})
DATA = encode(SMALL)
UINT32 = st.integers(0, 2**32 - 1)


def framed(payload, *, magic=MAGIC, major=MAJOR, minor=MINOR):
    """A file whose header fits its payload."""
    return HEADER.pack(magic, major, minor, zlib.crc32(payload), len(payload)) + payload


def reason(data):
    """Why the bytes are refused; the test fails where they are not, or by anything else than a RecordError."""
    with pytest.raises(RecordError) as refused:
        decode(data)
    return refused.value.reason


def decode_or_reason(data):
    """The record, or why there is none."""
    try:
        return decode(data)
    except RecordError as error:
        return error.reason


def payload_fields():
    """The small record's payload as plain data, to be changed."""
    return msgspec.msgpack.decode(DATA[HEADER.size :])


def with_book(book, cells):
    """The small record with other bytes for one of its books."""
    return encode(msgspec.structs.replace(SMALL, devices=[make_device(0, 1, **{book: cells})]))


@pytest.mark.parametrize("num_modules", [0, 1, 300])
def test_round_trip(num_modules):
    """The sidecar would see other numbers than the rank counted."""
    record = make_record(num_modules=num_modules)
    assert decode(encode(record)) == record


@given(st.lists(st.builds(Cell, UINT32, UINT32, st.integers(-(2**63), 2**63 - 1))))
def test_cells_round_trip(cells):
    """A book would change on its way."""
    assert unpack_cells(pack_cells(cells)) == cells


def test_every_truncation_is_refused():
    """A file that was cut short would be read as a record."""
    assert {reason(DATA[:length]) for length in range(len(DATA))} == {"truncated"}


def test_trailing_bytes_are_refused():
    """A file that something was appended to would be read as a record."""
    assert reason(DATA + b"\0") == "truncated"


@pytest.mark.parametrize("mask", [1 << bit for bit in range(8)] + [0xFF])
def test_every_flipped_byte_is_refused_or_harmless(mask):
    """A damaged byte would become a wrong number, or an exception that costs a scrape."""
    for position in range(len(DATA)):
        damaged = bytearray(DATA)
        damaged[position] ^= mask
        got = decode_or_reason(bytes(damaged))
        assert got == SMALL or isinstance(got, str), position


def test_every_value_of_every_header_byte_is_refused_or_harmless():
    """A damaged header would become a wrong record, or an exception that costs a scrape."""
    for position in range(HEADER.size):
        for value in range(256):
            damaged = bytearray(DATA)
            damaged[position] = value
            got = decode_or_reason(bytes(damaged))
            assert got == SMALL or isinstance(got, str), (position, value)


@pytest.mark.parametrize("major", [0, 2, 65535])
def test_foreign_major_version_is_refused_by_its_number(major):
    """A reader would misread a format it does not know, or its user would not learn which one it met."""
    with pytest.raises(RecordError, match=f"version {major}.7; .* 1.x") as refused:
        decode(framed(DATA[HEADER.size :], major=major, minor=7))
    assert refused.value.reason == "version"


def test_newer_minor_version_with_unknown_fields_is_read():
    """Upgrading the jobs before the sidecar would blind it."""
    fields = payload_fields()
    fields["invented"] = {"later": [1, 2]}
    fields["identity"]["invented"] = "later"
    fields["devices"][0]["invented"] = 3
    assert decode(framed(msgspec.msgpack.encode(fields), minor=MINOR + 1)) == SMALL


def test_older_minor_version_without_defaulted_fields_is_read():
    """Upgrading the sidecar before the jobs would blind it."""
    fields = payload_fields()
    for name in ("ring", "labelers", "counters"):
        del fields[name]
    for name in ("limit_bytes", "other_bytes", "model", "uuid", "allocator"):
        del fields["devices"][0][name]
    del fields["identity"]["mesh"]
    del fields["clock"]["final"]
    record = decode(framed(msgspec.msgpack.encode(fields)))
    assert (record.ring, record.labelers, record.counters) == (Ring(), [], {})
    assert (record.devices[0].limit_bytes, record.devices[0].model, record.identity.mesh) == (None, "", {})
    assert record.devices[0].usage == SMALL.devices[0].usage


@pytest.mark.parametrize("name", ["identity", "clock", "modules", "reftypes", "devices"])
def test_missing_field_without_default_is_refused(name):
    """A record of nobody, or of nothing, would be shown."""
    fields = payload_fields()
    del fields[name]
    assert reason(framed(msgspec.msgpack.encode(fields))) == "schema"


@pytest.mark.parametrize(
    "book",
    [
        pytest.param(b"\0" * 15, id="no whole number of cells"),
        pytest.param(pack_cells([Cell(2, 0, 1)]), id="module past the table"),
        pytest.param(pack_cells([Cell(0, 18, 1)]), id="reftype past the table"),
        pytest.param(pack_cells([Cell(0, 0, 0)]), id="no bytes"),
        pytest.param(pack_cells([Cell(0, 0, -1)]), id="negative bytes"),
    ],
)
@pytest.mark.parametrize("name", ["usage", "step_peak", "active_peak"])
def test_books_outside_their_tables_are_refused(name, book):
    """A reader would fail on an index, or show a negative size."""
    assert reason(with_book(name, book)) == "books"


@pytest.mark.parametrize("column", ["steps", "ended_at", "phases"])
def test_ring_of_unequal_columns_is_refused(column):
    """A step's time would be taken for another's."""
    ring = make_record().ring
    shorter = msgspec.structs.replace(ring, **{column: getattr(ring, column)[:-8]})
    assert reason(encode(make_record(ring=shorter))) == "books"


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        pytest.param(b"", "truncated", id="empty"),
        pytest.param(framed(DATA[HEADER.size :], magic=b"torchmom"), "magic", id="magic"),
        pytest.param(b"#!/bin/sh\nexec true # garbage\n", "magic", id="garbage"),
        pytest.param(
            HEADER.pack(MAGIC, MAJOR, MINOR, 0, MAX_PAYLOAD_BYTES + 1) + b"x", "oversize", id="claims too much"
        ),
        pytest.param(HEADER.pack(MAGIC, MAJOR, MINOR, 0, 1) + b"x", "checksum", id="checksum"),
        pytest.param(framed(b""), "schema", id="nothing"),
        pytest.param(framed(b"\x91" * 100_000), "schema", id="nested too deep"),
        pytest.param(framed(b"\xdd" + struct.pack(">I", 2**32 - 1)), "schema", id="claims four billion items"),
        pytest.param(framed(msgspec.msgpack.encode({"modules": 3})), "schema", id="wrong types"),
        pytest.param(
            framed(DATA[HEADER.size :].replace(b"llama-pretrain", b"llama\xff\xfe\xfd\xfc\xfb\xfa\xf9\xf8\xf7")),
            "schema",
            id="no UTF-8",
        ),
    ],
)
def test_what_is_no_record_is_refused_by_its_reason(data, expected):
    """Its users could not tell from the counter what lies in their directory."""
    assert reason(data) == expected


@given(st.binary(max_size=200))
def test_arbitrary_bytes_are_refused(data):
    """Garbage in the directory would cost a scrape."""
    assert isinstance(decode_or_reason(data), str)


@given(st.binary(max_size=200))
def test_arbitrary_payloads_are_refused(payload):
    """A well-framed payload of another program would cost a scrape."""
    assert isinstance(decode_or_reason(framed(payload)), str)


@given(st.integers(0, len(DATA) - HEADER.size - 1), st.binary(min_size=1, max_size=4))
def test_mutated_payloads_are_refused_or_read(position, patch):
    """A record that a broken writer framed correctly would raise something that readers do not catch."""
    payload = bytearray(DATA[HEADER.size :])
    payload[position : position + len(patch)] = patch
    got = decode_or_reason(framed(bytes(payload)))
    if not isinstance(got, str):
        for device in got.devices:
            assert all(cell.num_bytes > 0 for cell in unpack_cells(device.usage))
