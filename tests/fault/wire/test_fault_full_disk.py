"""A real file system without space: a tmpfs of a few pages, mounted for one process."""

from __future__ import annotations

import subprocess
import sys

import pytest

PROGRAM = """
import os, sys
from pathlib import Path
from torchmem.wire.publisher import Publisher
from torchmem.wire.store import RankStore

root = Path(sys.argv[1])
size = [100]
store = RankStore(root, "train", 0)
publisher = Publisher(store, lambda is_final: bytes([65 + is_final]) * size[0], 0.01)
publisher.start()
while publisher.num_written < 1:
    pass
size[0] = 1 << 20
failed = publisher.num_failed
while publisher.num_failed < failed + 3:
    pass
print("No space left on device" in publisher.last_error)
print(store.path.read_bytes() == b"A" * 100)
names = {name for name in os.listdir(store.path.parent) if not name.endswith(".tmp")}
print(sorted(names))
size[0] = 200
written = publisher.num_written
while publisher.num_written == written:
    pass
publisher.close()
print(store.path.read_bytes() == b"B" * 200)
print(sorted(os.listdir(store.path.parent)))
"""


def in_small_tmpfs(folder, size):
    """The command that runs what follows with a small tmpfs on the folder; None where mounting is not allowed."""
    script = f'mount -t tmpfs -o size={size} torchmem-test "$0" && exec "$@"'
    command = ["unshare", "--mount", "sh", "-c", script, str(folder)]
    probe = subprocess.run([*command, "true"], capture_output=True, check=False, timeout=60)
    return command if probe.returncode == 0 else None


def test_full_file_system_costs_records_and_nothing_else(tmp_path):
    """A full /dev/shm would end the job, lose the last good record, leave debris, or end publishing for good."""
    command = in_small_tmpfs(tmp_path, "64k")
    if command is None:
        pytest.skip("mounting a tmpfs is not allowed here")
    ended = subprocess.run(
        [*command, sys.executable, "-c", PROGRAM, str(tmp_path)],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert ended.stdout.splitlines() == [
        "True",
        "True",
        "['rank-0.lock', 'rank-0.record']",
        "True",
        "['rank-0.lock', 'rank-0.record']",
    ], ended.stderr
    assert ended.stderr.count("\n") == 1
    assert "no record was written: OSError: [Errno 28] No space left on device" in ended.stderr


def test_file_system_without_room_for_a_lock_is_refused_with_the_fix(tmp_path):
    """Installing on a full file system would fail with a traceback that names no setting."""
    command = in_small_tmpfs(tmp_path, "64k,nr_inodes=2")
    if command is None:
        pytest.skip("mounting a tmpfs is not allowed here")
    program = (
        "import sys; from pathlib import Path; from torchmem.errors import StoreError\n"
        "from torchmem.wire.store import RankStore\n"
        "try: RankStore(Path(sys.argv[1]), 'train', 0)\n"
        "except StoreError as error: print(error)"
    )
    ended = subprocess.run(
        [*command, sys.executable, "-c", program, str(tmp_path)],
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    assert ended.stdout == (
        f"cannot keep records in {tmp_path}/train (No space left on device):"
        " set TORCHMEM_DIR to a local directory you can write\n"
    )
