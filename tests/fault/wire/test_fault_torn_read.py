from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from torchmem.wire import record as wire
from torchmem.wire.store import open_record_bytes

NUM_WRITES = 2000
WRITER = """
import sys
from pathlib import Path
import small_records
from torchmem.wire import record as wire
from torchmem.wire.store import RankStore

store = RankStore(Path(sys.argv[1]), "train", 0)
for step in range(int(sys.argv[2])):
    # Records of changing length: a torn one could not pass for a whole one by having the right size.
    changes = {"clock": small_records.clock(step=step), "ring": small_records.ring(step % 64)}
    store.write(wire.encode(small_records.record(**changes)))
    if step == 0:
        print(flush=True)
store.close()
"""


def test_reader_never_sees_a_bad_record_while_it_is_replaced(tmp_path):
    """The sidecar would count errors, or show a mixture of two records, on a job that is well."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    command = [sys.executable, "-c", WRITER, str(tmp_path), str(NUM_WRITES)]
    steps, folder = [], None
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=environment) as writer:
        writer.stdout.readline()
        folder = os.open(Path(tmp_path) / "train", os.O_RDONLY | os.O_DIRECTORY)
        try:
            while not steps or steps[-1] < NUM_WRITES - 1:
                data, status = open_record_bytes(folder, "rank-0.record", frozenset({os.geteuid()}))
                record = wire.decode(data)
                assert len(data) == status.st_size
                assert len(record.ring.steps) == 8 * (record.clock.step % 64)
                steps.append(record.clock.step)
        finally:
            os.close(folder)
            writer.wait(60)
    assert writer.returncode == 0
    assert steps == sorted(steps)
    assert len(set(steps)) > 10
