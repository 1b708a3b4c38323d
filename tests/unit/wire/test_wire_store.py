from __future__ import annotations

import errno
import fcntl
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from torchmem.errors import RecordError, StoreError
from torchmem.wire import store as wire_store
from torchmem.wire.store import RankStore, default_dir, folder_name, is_held, open_record_bytes

ME = frozenset({os.geteuid()})


@pytest.fixture
def store(tmp_path):
    """Rank 3 of the job ``train``."""
    store = RankStore(tmp_path / "records", "train", 3)
    yield store
    store.close()


def names(folder):
    """The files of a folder."""
    return sorted(path.name for path in folder.iterdir())


def mode(path):
    """The permission bits of a file."""
    return path.stat().st_mode & 0o777


def read(folder, name="rank-3.record", allowed_uids=ME):
    """The bytes that a reader of the folder gets."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        return open_record_bytes(fd, name, allowed_uids)[0]
    finally:
        os.close(fd)


def refusal(folder, name="rank-3.record", allowed_uids=ME):
    """Why a reader of the folder gets nothing."""
    with pytest.raises(RecordError) as caught:
        read(folder, name, allowed_uids)
    return caught.value.reason


def held_elsewhere(path):
    """Whether another process sees the lock, which is what the sidecar does."""
    program = (
        "import sys; from pathlib import Path; from torchmem.wire.store import is_held\n"
        "path = Path(sys.argv[1]); print(is_held(path.parent, path.name))"
    )
    run = subprocess.run([sys.executable, "-c", program, path], capture_output=True, text=True, check=True, timeout=60)
    return run.stdout == "True\n"


def test_writes_where_the_contract_says(store, tmp_path):
    """The sidecar would look for the record elsewhere."""
    store.write(b"data")
    assert store.path == tmp_path / "records" / "train" / "rank-3.record"
    assert store.path.read_bytes() == b"data"
    assert names(store.path.parent) == ["rank-3.lock", "rank-3.record"]


def test_modes(store):
    """Other users of the host could plant records, or the sidecar's group could not be given access."""
    previous = os.umask(0)
    try:
        store.write(b"data")
    finally:
        os.umask(previous)
    assert [mode(store.path.parent.parent), mode(store.path.parent), mode(store.path)] == [0o700, 0o700, 0o644]


def test_a_directory_that_is_there_keeps_its_mode(tmp_path):
    """A directory that an administrator shared with the sidecar would be closed to it."""
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o750)
    RankStore(shared, "train", 0).close()
    assert mode(shared) == 0o750


def test_replaces_the_record_instead_of_changing_it(store):
    """A reader in the middle of a record would get two halves of different ones."""
    store.write(b"first")
    with store.path.open("rb") as reading:
        store.write(b"second")
        assert [reading.read(), store.path.read_bytes()] == [b"first", b"second"]


def test_symlinked_directory_is_refused(tmp_path):
    """Another user of /dev/shm could choose where the job writes."""
    (tmp_path / "link").symlink_to(tmp_path)
    with pytest.raises(StoreError, match="is a symbolic link: set TORCHMEM_DIR"):
        RankStore(tmp_path / "link", "train", 0)


def test_symlinked_job_folder_is_refused(tmp_path):
    """Another job's records could be overwritten through a link."""
    (tmp_path / "train").symlink_to(tmp_path)
    with pytest.raises(StoreError, match="is a symbolic link: set TORCHMEM_DIR"):
        RankStore(tmp_path, "train", 0)


def test_directory_of_another_user_is_refused(tmp_path, monkeypatch):
    """A job would publish into, and trust, what another user has planted."""
    monkeypatch.setattr(os, "geteuid", lambda: tmp_path.stat().st_uid + 1)
    with pytest.raises(StoreError, match=r"belongs to uid \d+, not to \d+: set TORCHMEM_DIR"):
        RankStore(tmp_path, "train", 0)


def test_symlinked_lock_is_refused(tmp_path):
    """Installing would create, and lock, a file of somebody else's choice."""
    (tmp_path / "train").mkdir()
    (tmp_path / "train" / "rank-0.lock").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(StoreError, match="set TORCHMEM_DIR"):
        RankStore(tmp_path, "train", 0)
    assert not (tmp_path / "elsewhere").exists()


def test_negative_rank_is_refused(tmp_path):
    """A record would be written under a name that no reader accepts."""
    with pytest.raises(StoreError, match="set RANK"):
        RankStore(tmp_path, "train", -1)


@pytest.mark.parametrize("leftover", ["file", "symlink"])
def test_temporary_file_of_a_killed_writer_is_removed(tmp_path, leftover):
    """Memory of the host would leak with every killed job, or a planted link be followed."""
    folder = tmp_path / "train"
    folder.mkdir()
    temporary = folder / ".rank-0.record.tmp"
    if leftover == "file":
        temporary.write_bytes(b"half")
    else:
        temporary.symlink_to(tmp_path / "elsewhere")
    store = RankStore(tmp_path, "train", 0)
    assert names(folder) == ["rank-0.lock"]
    store.close()


def test_failed_write_leaves_the_former_record_and_nothing_else(store, monkeypatch):
    """A full disk would cost the last good record, or fill up further with each attempt."""
    store.write(b"good")

    def full(_fd, _data):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "write", full)
    with pytest.raises(OSError, match="No space left"):
        store.write(b"new")
    monkeypatch.undo()
    assert store.path.read_bytes() == b"good"
    assert names(store.path.parent) == ["rank-3.lock", "rank-3.record"]


def test_short_writes_are_completed(store, monkeypatch):
    """A record would be cut where the kernel happened to stop."""
    write = os.write
    monkeypatch.setattr(os, "write", lambda fd, data: write(fd, data[:3]))
    store.write(b"0123456789")
    assert store.path.read_bytes() == b"0123456789"


def test_lock_is_held_until_close(store):
    """The sidecar would take a live rank for a crashed one, or a dead one for live."""
    lock = store.path.parent / "rank-3.lock"
    assert [is_held(lock.parent, lock.name), held_elsewhere(lock)] == [True, True]
    store.close()
    assert [is_held(lock.parent, lock.name), held_elsewhere(lock)] == [False, False]


def test_asking_does_not_drop_the_lock(store):
    """A process that looks at its own record would lose its rank to another job."""
    lock = store.path.parent / "rank-3.lock"
    fd = os.open(lock.parent, os.O_RDONLY)
    assert [is_held(fd, lock.name), is_held(lock.parent, lock.name)] == [True, True]
    os.close(fd)
    assert held_elsewhere(lock)


def test_nothing_is_held_where_nothing_is(tmp_path):
    """The sidecar would fail on a folder that has just been removed."""
    (tmp_path / "rank-1.lock").symlink_to(tmp_path)
    os.mkfifo(tmp_path / "rank-2.lock")
    assert not is_held(tmp_path, "rank-0.lock")
    assert not is_held(tmp_path, "rank-1.lock")
    assert not is_held(tmp_path, "rank-2.lock")
    assert not is_held(tmp_path / "missing", "rank-0.lock")


def test_a_lock_dropped_by_foreign_code_is_taken_again(store):
    """Reading the lock file in the trainer would make the rank look crashed for good."""
    lock = store.path.parent / "rank-3.lock"
    lock.read_bytes()
    assert not held_elsewhere(lock)
    store.write(b"data")
    assert held_elsewhere(lock)


def test_a_folder_that_was_removed_is_made_anew(store):
    """Whoever cleans up would hide a running job for the rest of its life."""
    store.write(b"1")
    shutil.rmtree(store.path.parent.parent)
    store.write(b"2")
    assert (read(store.path.parent), names(store.path.parent)) == (b"2", ["rank-3.lock", "rank-3.record"])
    assert held_elsewhere(store.path.with_suffix(".lock"))


def test_a_lock_file_that_was_removed_is_made_anew(store):
    """A cleaner of old files, to which a lock looks forgotten, would make a running rank look crashed."""
    store.write(b"1")
    store.path.with_suffix(".lock").unlink()
    assert not is_held(store.path.parent, "rank-3.lock")
    store.write(b"2")
    assert held_elsewhere(store.path.with_suffix(".lock"))
    assert read(store.path.parent) == b"2"


def test_a_place_that_cannot_be_taken_anew_is_tried_again(store):
    """A record that could not be written once would be the job's last."""
    folder = store.path.parent
    shutil.rmtree(folder)
    folder.write_bytes(b"in the way")
    with pytest.raises(StoreError, match="is not a directory"):
        store.write(b"1")
    folder.unlink()
    store.write(b"2")
    assert read(folder) == b"2"


def test_two_ranks_in_one_process(tmp_path):
    """Ranks that are threads, or tests, of one process would take each other's place."""
    stores = [RankStore(tmp_path, "train", rank) for rank in (0, 1)]
    for rank, store in enumerate(stores):
        store.write(bytes([rank]))
    stores[0].close()
    folder = tmp_path / "train"
    assert [held_elsewhere(folder / f"rank-{rank}.lock") for rank in (0, 1)] == [False, True]
    assert [read(folder, f"rank-{rank}.record") for rank in (0, 1)] == [b"\0", b"\1"]
    stores[1].close()


def test_same_rank_twice_in_one_process_is_refused(store, tmp_path):
    """Two monitors would overwrite each other's record, and the second's end would drop the first's lock."""
    with pytest.raises(
        StoreError, match="rank 3 of job 'train' is already held by this process: set TORCHMEM_TRAIN_JOB"
    ):
        RankStore(tmp_path / "records", "train", 3)
    assert held_elsewhere(store.path.parent / "rank-3.lock")


def test_rank_can_be_taken_again_after_close(store, tmp_path):
    """A second ``install`` in one process would be refused."""
    store.close()
    again = RankStore(tmp_path / "records", "train", 3)
    again.write(b"again")
    assert store.path.read_bytes() == b"again"
    again.close()


def test_close_twice_leaves_others_alone(store, tmp_path):
    """The second close would close a descriptor that has become another file's."""
    store.close()
    with (tmp_path / "other").open("wb") as other:
        store.close()
        other.write(b"x")


def test_write_after_close_is_refused(store):
    """A late writer would overwrite the record of the rank's next holder."""
    store.close()
    with pytest.raises(StoreError, match="no longer this process's to write"):
        store.write(b"late")
    assert not store.path.exists()


def test_a_forked_child_can_neither_write_nor_drop_the_lock(store):
    """A DataLoader worker would overwrite the trainer's record or make it look crashed."""
    store.write(b"parent")
    child = os.fork()
    if child == 0:
        status = 1
        try:
            store.write(b"child")
        except StoreError:
            store.close()
            status = 0
        finally:
            os._exit(status)
    assert os.waitpid(child, 0)[1] == 0
    assert store.path.read_bytes() == b"parent"
    assert held_elsewhere(store.path.parent / "rank-3.lock")


def test_write_fails_when_another_process_took_the_lost_lock(store):
    """Two jobs would take turns in one record."""
    lock = store.path.parent / "rank-3.lock"
    lock.read_bytes()  # drops the lock, as POSIX has it
    program = (
        "import fcntl, sys\n"
        "file = open(sys.argv[1], 'r+'); fcntl.lockf(file, fcntl.LOCK_EX); print(flush=True); sys.stdin.read()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program, lock], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as other:
        other.stdout.readline()
        with pytest.raises(BlockingIOError, match="another process took it"):
            store.write(b"data")
        other.stdin.close()
    store.write(b"data")


@pytest.mark.parametrize("name", ["train", "run_1.2-x", "a" * 128])
def test_plain_names_are_kept(name):
    """The user would not find the job's folder."""
    assert folder_name(name) == name


@pytest.mark.parametrize("name", ["..", ".", ".hidden", "a/b", "../../etc", "a b", "größe", "a" * 200, "\udcff", "/"])
def test_other_names_become_safe_and_stay_apart(name):
    """A job's name could lead out of the directory, or two jobs share a folder."""
    made = folder_name(name)
    assert wire_store._PLAIN_FOLDER.fullmatch(made)
    assert made not in {name, folder_name(name + "x")}


def test_empty_name_is_refused():
    """Records would lie where no reader looks for them."""
    with pytest.raises(StoreError, match="set TORCHMEM_TRAIN_JOB"):
        folder_name("")


def test_default_dir_is_per_user(monkeypatch, tmp_path):
    """Two users of a host would fight over one directory."""
    monkeypatch.setattr(os, "access", lambda path, _mode: path == Path("/dev/shm"))
    assert default_dir() == Path(f"/dev/shm/torchmem-{os.geteuid()}")
    monkeypatch.setattr(os, "access", lambda _path, _mode: False)
    monkeypatch.setattr("tempfile.gettempdir", lambda: str(tmp_path))
    assert default_dir() == tmp_path / f"torchmem-{os.geteuid()}"


def test_reader_gets_what_was_written(store):
    """The sidecar could not read what the job writes."""
    store.write(b"data" * 1_000_000)
    assert read(store.path.parent) == b"data" * 1_000_000


@pytest.mark.parametrize(
    "name", ["rank-03.record", "../rank-3.record", ".rank-3.record.tmp", "rank-3.lock", "rank--1.record"]
)
def test_other_names_are_not_read(store, name):
    """A reader would leave its folder, or show a record that is half written."""
    assert refusal(store.path.parent, name) == "name"


def test_what_is_no_plain_file_is_not_read(tmp_path):
    """A planted link, pipe or folder would hang the reader or leak another file."""
    (tmp_path / "target").write_bytes(b"secret")
    (tmp_path / "rank-0.record").symlink_to(tmp_path / "target")
    os.mkfifo(tmp_path / "rank-1.record")
    (tmp_path / "rank-2.record").mkdir()
    os.link(tmp_path / "target", tmp_path / "rank-3.record")
    reasons = [refusal(tmp_path, f"rank-{number}.record") for number in range(5)]
    assert reasons == ["open", "not_regular", "not_regular", "hard_link", "open"]


def test_file_of_another_user_is_not_read(store):
    """Any user of the host could invent a rank."""
    store.write(b"data")
    assert refusal(store.path.parent, allowed_uids=frozenset({os.geteuid() + 1})) == "uid"


def test_large_file_is_not_read(tmp_path):
    """A sparse file would take the reader's memory."""
    with (tmp_path / "rank-3.record").open("wb") as file:
        file.truncate(wire_store.MAX_RECORD_BYTES + 1)
    assert refusal(tmp_path) == "oversize"


def test_file_that_grows_while_it_is_read_is_not_read(tmp_path, monkeypatch):
    """A file that its owner keeps extending would take the reader's memory."""
    monkeypatch.setattr(wire_store, "MAX_RECORD_BYTES", 100)
    (tmp_path / "rank-3.record").write_bytes(b"x" * 100)
    read_once = os.read

    def read_and_grow(fd, size):
        with (tmp_path / "rank-3.record").open("ab") as file:
            file.write(b"x" * 50)
        return read_once(fd, min(size, 60))

    monkeypatch.setattr(os, "read", read_and_grow)
    assert refusal(tmp_path) == "oversize"


def test_lock_is_of_the_posix_kind(store):
    """A ``flock`` would stay with forked workers after the trainer was killed."""
    program = "import fcntl, sys; fcntl.flock(open(sys.argv[1]), fcntl.LOCK_EX | fcntl.LOCK_NB)"
    lock = store.path.parent / "rank-3.lock"
    subprocess.run([sys.executable, "-W", "ignore", "-c", program, lock], check=True, timeout=60)
    assert fcntl.fcntl(store._lock_fd, fcntl.F_GETFD) & fcntl.FD_CLOEXEC
