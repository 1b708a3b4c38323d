from __future__ import annotations

import contextlib
import struct
import zlib

import msgspec
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

import small_records
from torchmem.errors import RecordError
from torchmem.wire import record as wire

RECORD = small_records.record()
DATA = wire.encode(RECORD)
PAYLOAD = DATA[wire.HEADER.size :]


def framed(payload, *, magic=wire.MAGIC, major=wire.MAJOR, minor=wire.MINOR, length=None):
    """The payload behind a header that fits it."""
    length = len(payload) if length is None else length
    return wire.HEADER.pack(magic, major, minor, zlib.crc32(payload), length) + payload


def reason(data):
    """Why these bytes are no record."""
    with pytest.raises(RecordError) as caught:
        wire.decode(data)
    return caught.value.reason


def plain():
    """The payload as plain data, to be changed."""
    return msgspec.msgpack.decode(PAYLOAD)


def test_round_trip():
    """The sidecar would publish other numbers than the rank wrote."""
    assert wire.decode(DATA) == RECORD


def test_round_trip_of_the_smallest_record():
    """A rank that has nothing to say yet could not be read."""
    empty = small_records.record(modules=[], reftypes=[], devices=[], ring=wire.Ring(), labelers=[], counters={})
    assert wire.decode(wire.encode(empty)) == empty


def test_cells_round_trip():
    """A module's bytes would be read as another's."""
    cells = [wire.Cell(0, 0, 1), wire.Cell(2**32 - 1, 17, 2**63 - 1)]
    assert wire.unpack_cells(wire.pack_cells(cells)) == cells


def test_header_is_as_documented():
    """Readers of other releases would not recognise the file."""
    assert struct.unpack("<8sHHIQ", DATA[:24]) == (b"torchmem", 1, 3, zlib.crc32(PAYLOAD), len(PAYLOAD))


def test_every_truncation_is_refused():
    """A record cut short would be shown as a whole one."""
    assert {reason(DATA[:length]) for length in range(len(DATA))} == {"truncated"}


def test_bytes_after_the_payload_are_refused():
    """A file that two writers had mixed would be read."""
    assert reason(DATA + b"\0") == "truncated"


def test_every_flipped_byte_is_noticed():
    """Memory counts damaged on their way would be shown as real ones."""
    for index in range(len(DATA)):
        for mask in (*(1 << bit for bit in range(8)), 0xFF):
            flipped = bytearray(DATA)
            flipped[index] ^= mask
            with contextlib.suppress(RecordError):
                assert wire.decode(bytes(flipped)) == RECORD  # the minor version says nothing about the payload


def test_foreign_magic_is_refused():
    """Any file named like a record would be parsed."""
    assert reason(framed(PAYLOAD, magic=b"notmemry")) == "magic"


@pytest.mark.parametrize("major", [0, 2, 65535])
def test_foreign_major_is_refused_with_its_number(major):
    """The user would not learn which release wrote the record."""
    with pytest.raises(RecordError, match=rf"record version {major}\.3; this reader knows 1\.x") as caught:
        wire.decode(framed(PAYLOAD, major=major, minor=3))
    assert caught.value.reason == "version"


def test_newer_minor_with_unknown_fields_is_read():
    """Upgrading the library before the sidecar would blind it."""
    newer = plain()
    newer["novelty"] = {"a": [1, 2]}
    newer["identity"]["novelty"] = "x"
    newer["devices"][0]["novelty"] = 3
    assert wire.decode(framed(msgspec.msgpack.encode(newer), minor=wire.MINOR + 1)) == RECORD


def test_a_forecast_travels_and_an_older_record_has_none():
    """A running job would be held against no forecast, or a record of an older library be refused."""
    record = small_records.record(devices=[small_records.device(forecast_bytes=8 * small_records.MIB)])
    assert wire.decode(wire.encode(record)) == record
    older = plain()
    del older["devices"][0]["forecast_bytes"]
    assert wire.decode(framed(msgspec.msgpack.encode(older), minor=2)) == RECORD


def test_a_record_with_a_forecast_is_read_by_an_older_sidecar():
    """Upgrading the library before the sidecar would blind it."""

    def without(struct_type, left_out, **types):
        fields = [f for f in msgspec.structs.fields(struct_type) if f.name not in left_out]
        required = [(f.name, types.get(f.name, f.type)) for f in fields if f.required]
        others = [(f.name, types.get(f.name, f.type), None) for f in fields if not f.required]
        return msgspec.defstruct(struct_type.__name__, [*required, *others])

    device = without(wire.Device, {"forecast_bytes"})
    older = msgspec.msgpack.Decoder(without(wire.Record, set(), devices=list[device]))
    record = small_records.record(devices=[small_records.device(forecast_bytes=8)])
    read = older.decode(wire.encode(record)[wire.HEADER.size :])
    assert (read.identity, read.devices[0].step_peak_bytes) == (record.identity, record.devices[0].step_peak_bytes)


@pytest.mark.parametrize("num_bytes", [-1, 2.5, "8"])
def test_a_forecast_that_makes_no_sense_is_refused(num_bytes):
    """A negative forecast would be published, and a ratio of it judged."""
    record = small_records.record(devices=[small_records.device(forecast_bytes=num_bytes)])
    assert reason(wire.encode(record)) in ("books", "schema")


@pytest.mark.parametrize(
    ("device", "step", "ratio"),
    [
        ({"forecast_bytes": 8 * small_records.MIB}, 1, 1.0),
        ({"forecast_bytes": 32 * small_records.MIB}, 9, -0.5),
        ({"forecast_bytes": 8 * small_records.MIB}, 0, None),
        ({"forecast_bytes": 8 * small_records.MIB, "step_peak_bytes": 0, "step_peak": b""}, 9, None),
        ({"forecast_bytes": 0}, 9, None),
        ({}, 9, None),
    ],
)
def test_how_far_over_its_forecast_a_device_is(device, step, ratio):
    """A job would seem to have missed its forecast before its first step, or a scrape divide by zero."""
    one = small_records.device(**device)
    record = small_records.record(devices=[one], clock=small_records.clock(step=step))
    assert wire.forecast_drift_ratio(record, one) == ratio


def oom(**changes):
    """A failed allocation of the small record's device, with changes."""
    return wire.OutOfMemory(
        **{
            "number": 1,
            "device": "cuda:0",
            "time": 1_700_000_090.0,
            "step": 411,
            "phase": 1,
            "module": 3,
            "reftype": 14,
            "requested_bytes": 1 << 40,
            "held_bytes": 16 * small_records.MIB,
            "holders": wire.pack_cells(small_records.PEAK),
            **changes,
        }
    )


@pytest.mark.parametrize("event", [oom(), oom(holders=b"", held_bytes=0), oom(holders=b""), oom(phase=1 << 20)])
def test_failures_round_trip(event):
    """What filled the device when an allocation failed would not reach the sidecar."""
    record = small_records.record(oom_events=[event, oom(number=2)])
    assert wire.decode(wire.encode(record)) == record


@pytest.mark.parametrize(
    "event",
    [
        pytest.param(oom(module=5), id="unknown module"),
        pytest.param(oom(module=-1), id="negative module"),
        pytest.param(oom(reftype=18), id="unknown reftype"),
        pytest.param(oom(held_bytes=16 * small_records.MIB - 1), id="parts above the whole"),
        pytest.param(oom(held_bytes=-1, holders=b""), id="negative whole"),
        pytest.param(oom(requested_bytes=-1), id="negative request"),
        pytest.param(oom(step=-1), id="negative step"),
        pytest.param(oom(time=float("nan")), id="no time"),
        pytest.param(oom(holders=wire.pack_cells([*small_records.PEAK, small_records.PEAK[0]])), id="cell twice"),
        pytest.param(oom(holders=wire.pack_cells([wire.Cell(9, 0, 1)])), id="cell of no module"),
        pytest.param(oom(holders=b"x"), id="no whole cell"),
    ],
)
def test_failures_that_make_no_sense_are_refused(event):
    """Whoever reads a failure would fail on it, or show parts that are more than the whole."""
    assert reason(wire.encode(small_records.record(oom_events=[oom(), event]))) == "books"


def test_missing_fields_with_defaults_are_read():
    """Upgrading the sidecar before the library would blind it."""
    older = plain()
    for name in ("ring", "labelers", "counters", "oom_events"):
        del older[name]
    for name in ("limit_bytes", "other_bytes", "model", "uuid", "allocator"):
        del older["devices"][0][name]
    del older["identity"]["mesh"]
    del older["clock"]["final"]
    read = wire.decode(framed(msgspec.msgpack.encode(older)))
    assert read == small_records.record(
        identity=small_records.identity(mesh={}),
        devices=[small_records.device(limit_bytes=None, allocator=wire.Allocator())],
        ring=wire.Ring(),
        labelers=[],
        counters={},
    )


def test_missing_field_without_default_is_refused():
    """A record of unknown origin would be shown under an invented name."""
    broken = plain()
    del broken["identity"]["rank"]
    assert reason(framed(msgspec.msgpack.encode(broken))) == "schema"


@pytest.mark.parametrize("length", [wire.MAX_PAYLOAD_BYTES + 1, 2**64 - 1])
def test_oversize_is_refused_by_the_header_alone(length):
    """A bomb would be checked, and unpacked, in full."""
    assert reason(framed(PAYLOAD, length=length)) == "oversize"


def test_nesting_bomb_is_refused():
    """A record of nested lists would overflow the reader's stack."""
    assert reason(framed(b"\x81\xa1x" + b"\x91" * 100_000)) == "schema"


@pytest.mark.parametrize("field", [b"\xa7modules\xdd", b"\xa7devices\xdd", b"\xa8counters\xdf"])
def test_length_bomb_is_refused(field):
    """A dozen bytes that promise 4 billion elements would take the reader's memory."""
    assert reason(framed(b"\x81" + field + b"\xff\xff\xff\xff")) == "schema"


@pytest.mark.parametrize(
    "cell",
    [(5, 0, 1), (0, 18, 1), (0, 0, 0), (0, 0, -1), (2**32 - 1, 2**32 - 1, 2**63 - 1)],
    ids=["module", "reftype", "zero", "negative", "extreme"],
)
@pytest.mark.parametrize("book", ["usage", "step_peak", "active_peak"])
def test_cells_that_mean_nothing_are_refused(book, cell):
    """A reader would fail on an index outside the tables, or publish a negative size."""
    changed = small_records.device(**{book: wire.CELL.pack(*cell)})
    assert reason(wire.encode(small_records.record(devices=[changed]))) == "books"


def test_book_of_part_of_a_cell_is_refused():
    """Unpacking the book would raise in the reader."""
    assert reason(wire.encode(small_records.record(devices=[small_records.device(usage=b"\0" * 17)]))) == "books"


def test_negative_checkpoint_peak_is_refused():
    """A reader would publish a negative size."""
    changed = small_records.device(checkpoint_peaks={"save": 1, "load": -1})
    assert reason(wire.encode(small_records.record(devices=[changed]))) == "books"


def test_a_record_without_checkpoint_peaks_is_read():
    """A sidecar would refuse the ranks of a job that has the release before."""
    older = plain()
    for device in older["devices"]:
        del device["checkpoint_peaks"]
    [device] = wire.decode(framed(msgspec.msgpack.encode(older))).devices
    assert device.checkpoint_peaks == {}


@pytest.mark.parametrize("column", ["steps", "ended_at", "phases", "input_sizes"])
def test_ring_columns_of_unequal_length_are_refused(column):
    """Drift would be judged on steps and sizes that do not belong together."""
    ring = msgspec.structs.replace(small_records.ring(2), **{column: small_records.ring(3).steps})
    assert reason(wire.encode(small_records.record(ring=ring))) == "books"


@given(st.binary(max_size=300))
@example(b"")
@example(DATA[:24])
def test_arbitrary_bytes_raise_nothing_else(data):
    """Garbage in the directory would cost a scrape instead of a counter."""
    with pytest.raises(RecordError):
        wire.decode(data)


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | st.text() | st.binary(),
        lambda inner: st.lists(inner) | st.dictionaries(st.text() | st.integers(0, 9), inner),
        max_leaves=20,
    )
)
def test_arbitrary_payloads_raise_nothing_else(value):
    """A well-formed file of another program would cost a scrape instead of a counter."""
    with pytest.raises(RecordError):
        wire.decode(framed(msgspec.msgpack.encode(value)))


@settings(max_examples=300)
@given(st.integers(0, len(PAYLOAD) - 1), st.binary(min_size=1, max_size=9), st.integers(0, 9))
def test_forged_payloads_raise_nothing_else(start, inserted, num_removed):
    """A record changed on purpose, with a checksum that fits, would cost a scrape instead of a counter."""
    forged = PAYLOAD[:start] + inserted + PAYLOAD[start + num_removed :]
    try:
        assert isinstance(wire.decode(framed(forged)), wire.Record)
    except RecordError as error:
        assert error.reason in {"schema", "books"}  # noqa: PT017  # forged bytes may also make a good record


def test_a_cell_that_appears_twice_is_refused():
    """A book could count the same bytes twice, which a scrape would publish as two series of one name."""
    record = small_records.record()
    [device, *_] = record.devices
    twice = msgspec.structs.replace(device, usage=device.usage + device.usage[: wire.CELL.size])
    with pytest.raises(RecordError, match="a cell appears twice"):
        wire.decode(wire.encode(msgspec.structs.replace(record, devices=[twice])))
