"""The file of what outlives the sidecar: what is kept, and what may lie in its place."""

from __future__ import annotations

import os

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from torchmem_exporter.reading.state import MAX_BYTES, StateFile

SECTION = msgspec.msgpack.encode({"a": [1, 2]})
GOOD = msgspec.msgpack.encode({"version": 1, "sections": {"counters": {"a": [1, 2]}, "baselines": "later"}})


@pytest.fixture
def path(tmp_path):
    return tmp_path / ".exporter-state"


def test_sections_come_back(path):
    """What was counted would be lost with a restart."""
    state = StateFile(path)
    assert state.section("counters") == b""
    state.save("counters", SECTION)
    assert StateFile(path).section("counters") == SECTION
    assert [entry.name for entry in path.parent.iterdir()] == [".exporter-state"]
    assert (path.stat().st_mode & 0o777, state.num_failures) == (0o600, 0)


def test_sections_of_other_releases_are_kept(path):
    """An older sidecar would erase what a newer one keeps beside its counters."""
    path.write_bytes(GOOD)
    state = StateFile(path)
    state.save("counters", SECTION)
    assert msgspec.msgpack.decode(StateFile(path).section("baselines")) == "later"


@pytest.mark.parametrize(
    "plant",
    [
        pytest.param(lambda path: path.write_bytes(b"\xff garbage"), id="garbage"),
        pytest.param(lambda path: path.write_bytes(b""), id="empty"),
        pytest.param(lambda path: path.write_bytes(GOOD[:-3]), id="cut"),
        pytest.param(lambda path: path.write_bytes(b"\x91" * 100_000), id="nested"),
        pytest.param(lambda path: path.write_bytes(msgspec.msgpack.encode({"version": 2})), id="foreign version"),
        pytest.param(lambda path: path.write_bytes(msgspec.msgpack.encode([1, 2])), id="foreign content"),
        pytest.param(os.mkfifo, id="fifo"),
        pytest.param(lambda path: path.mkdir(), id="folder"),
        pytest.param(lambda path: path.symlink_to("/dev/zero"), id="symlink"),
        pytest.param(lambda path: path.write_bytes(bytes(MAX_BYTES + 1)), id="giant"),
    ],
)
def test_what_cannot_be_used_is_none(path, plant, caplog):
    """A damaged or planted state would keep the sidecar from starting, or hold it up."""
    plant(path)
    state = StateFile(path)
    assert (state.section("counters"), state.num_failures) == (b"", 1)
    assert "counting starts anew" in caplog.text


@settings(deadline=None)
@given(st.binary(max_size=200))
def test_no_bytes_raise(tmp_path_factory, data):
    """Some damage to the state would end the sidecar."""
    path = tmp_path_factory.mktemp("state") / "state"
    path.write_bytes(data)
    StateFile(path).section("counters")


@settings(deadline=None)
@given(st.integers(0, len(GOOD) - 1), st.integers(0, 255))
def test_no_changed_byte_raises(tmp_path_factory, index, value):
    """Some damage to the state would end the sidecar."""
    path = tmp_path_factory.mktemp("state") / "state"
    path.write_bytes(GOOD[:index] + bytes([value]) + GOOD[index + 1 :])
    StateFile(path).section("counters")


def test_what_cannot_be_written_is_kept_in_memory(tmp_path, caplog):
    """A sidecar that may not write would end, or say so at each scrape."""
    state = StateFile(tmp_path / "missing" / "state")
    for _ in range(3):
        state.save("counters", SECTION)
    assert (state.section("counters"), state.num_failures, len(caplog.messages)) == (SECTION, 3, 1)


def test_failed_write_leaves_the_former(path, monkeypatch):
    """A full disk would cost what was kept before."""
    state = StateFile(path)
    state.save("counters", SECTION)

    def fail(*_arguments, **_options):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "rename", fail)
    state.save("counters", msgspec.msgpack.encode("new"))
    assert StateFile(path).section("counters") == SECTION
    assert [entry.name for entry in path.parent.iterdir()] == [".exporter-state"]


def test_what_could_not_be_read_again_is_not_written(path):
    """One section that grew would cost all sections what was kept, at the next start."""
    state = StateFile(path)
    state.save("counters", SECTION)
    state.save("drift", msgspec.msgpack.encode(bytes(MAX_BYTES)))
    assert (StateFile(path).section("counters"), state.num_failures) == (SECTION, 1)
