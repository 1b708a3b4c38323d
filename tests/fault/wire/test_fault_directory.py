from __future__ import annotations

import shutil

import pytest

from torchmem.errors import StoreError
from torchmem.wire.publisher import Publisher
from torchmem.wire.store import RankStore


def test_path_below_a_file_is_refused_with_the_fix(tmp_path):
    """A job with an unusable directory would fail with a traceback that names no setting."""
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(StoreError, match=r"cannot keep records in .*Not a directory\): set TORCHMEM_DIR") as caught:
        RankStore(tmp_path / "file" / "records", "train", 0)
    assert "\n" not in str(caught.value)


def test_file_in_place_of_the_directory_is_refused_with_the_fix(tmp_path):
    """A job whose directory is a file would fail with a traceback that names no setting."""
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(StoreError, match="is not a directory: set TORCHMEM_DIR"):
        RankStore(tmp_path / "file", "train", 0)


def test_file_in_place_of_the_job_folder_is_refused_with_the_fix(tmp_path):
    """A job named like a file of the directory would fail with a traceback that names no setting."""
    (tmp_path / "train").write_bytes(b"")
    with pytest.raises(StoreError, match="is not a directory: set TORCHMEM_DIR"):
        RankStore(tmp_path, "train", 0)


def test_directory_deleted_under_a_live_writer_is_made_anew(tmp_path):
    """Cleaning up /dev/shm would kill every job of the host, or hide it for the rest of its life."""
    store = RankStore(tmp_path / "records", "train", 0)
    shutil.rmtree(tmp_path / "records")
    publisher = Publisher(store, lambda _final: b"record", 3600.0)
    publisher.start()
    publisher.close()
    assert [publisher.num_written, publisher.num_failed] == [2, 0]
    assert (tmp_path / "records" / "train" / "rank-0.record").read_bytes() == b"record"


def test_directory_that_cannot_be_made_anew_is_counted(tmp_path):
    """A job whose records are lost would pass unnoticed."""
    store = RankStore(tmp_path / "records", "train", 0)
    shutil.rmtree(tmp_path / "records")
    (tmp_path / "records").write_bytes(b"in the way")
    publisher = Publisher(store, lambda _final: b"record", 3600.0)
    publisher.start()
    publisher.close()
    assert [publisher.num_written, publisher.num_failed] == [0, 2]
    assert publisher.last_error.startswith(f"StoreError: {tmp_path / 'records'} is not a directory")
