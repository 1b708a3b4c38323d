"""What may lie in a directory of records: healthy ranks are always served, and everything refused is counted."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from hostile import JOB, PLANTS
from records import WRITTEN_AT, leave, living, make_record
from sidecars import DEADLINE_SECONDS, Clock, application, ask, command, running, states, values
from torchmem.wire.record import encode

HOLDER = """
import pathlib, sys, time
sys.path.insert(0, sys.argv[1])
import records
with records.living(pathlib.Path(sys.argv[2]), records.make_record(5)):
    print("held", flush=True)
    time.sleep(60)
"""


@pytest.mark.parametrize("name", PLANTS)
def test_bad_file_costs_a_count_and_no_other_rank(tmp_path, name):
    """One bad file would cost the scrape of all healthy ranks, or go unnoticed."""
    with living(tmp_path, make_record(0), make_record(1)):
        reason = PLANTS[name].reason
        PLANTS[name].make(tmp_path / JOB / "rank-7.record")
        app = application(tmp_path, Clock(WRITTEN_AT + 1))
        for num_scrapes in (1, 2, 3):
            text = ask(app).text
            assert states(text) == {"0": "running", "1": "running"}
            counted = values(text, "torchmem_snapshot_errors_total", "reason")
            assert {name: number for name, number in counted.items() if number} == {reason: num_scrapes}


def test_links_in_place_of_jobs_are_not_followed(tmp_path):
    """A link in the directory could show the records of another place as this host's."""
    elsewhere = tmp_path / "elsewhere"
    directory = tmp_path / "records"
    with living(elsewhere, make_record(3)), living(directory, make_record(0)):
        (directory / "linked").symlink_to(elsewhere / JOB)
        text = ask(application(directory, Clock(WRITTEN_AT + 1))).text
    assert states(text) == {"0": "running"}
    assert values(text, "torchmem_snapshot_errors_total", "reason")["symlink"] == 1


def test_foreign_folder_is_not_read(tmp_path):
    """Another user of the host could show jobs that do not exist."""
    if os.geteuid() != 0:
        pytest.skip("only root can give folders away")
    with living(tmp_path, make_record(0)):
        leave(tmp_path, make_record(4, train_job="foreign"))
        os.chown(tmp_path / "foreign", 54321, -1)
        text = ask(application(tmp_path, Clock(WRITTEN_AT + 1))).text
    assert states(text) == {"0": "running"}
    assert values(text, "torchmem_snapshot_errors_total", "reason")["uid"] == 1


def test_directory_that_vanishes_and_comes_back(tmp_path):
    """The sidecar would have to be restarted after its directory was cleaned away."""
    directory, aside = tmp_path / "records", tmp_path / "aside"
    app = application(directory, Clock(WRITTEN_AT + 1))
    with living(directory, make_record(0)):
        assert states(ask(app).text) == {"0": "running"}
        directory.rename(aside)
        assert (states(ask(app).text), ask(app, "/readyz").status) == ({}, 503)
        aside.rename(directory)
        assert (states(ask(app).text), ask(app, "/readyz").status) == ({"0": "running"}, 200)


def test_file_in_place_of_the_directory(tmp_path):
    """A mistyped directory would look like a host without jobs."""
    path = tmp_path / "file"
    path.write_text("")
    app = application(path)
    assert ask(app, "/readyz").status == 503
    assert values(ask(app).text, "torchmem_snapshot_errors_total", "reason")["directory"] == 1


def test_record_replaced_while_it_is_read(tmp_path):
    """A scrape at the instant of a write would see half a record, or none."""
    with living(tmp_path, make_record(0, 30), make_record(1)) as (store, _):
        done = threading.Event()

        def rewrite():
            step = 0
            while not done.is_set():
                step += 1
                store.write(encode(make_record(0, 30, step=step)))

        writer = threading.Thread(target=rewrite)
        writer.start()
        try:
            app = application(tmp_path, Clock(WRITTEN_AT + 1))
            for _ in range(20):
                text = ask(app).text
                assert states(text) == {"0": "running", "1": "running"}
        finally:
            done.set()
            writer.join()
        assert sum(values(text, "torchmem_snapshot_errors_total", "reason").values()) == 0


def test_killed_rank_is_seen_to_have_crashed(tmp_path):
    """A rank that was killed without a chance to say so would be shown as running, with all its memory."""
    line = [sys.executable, "-c", HOLDER, str(Path(__file__).parents[2]), str(tmp_path)]
    with (
        subprocess.Popen(line, stdout=subprocess.PIPE, text=True) as holder,
        living(tmp_path, make_record(0)),
    ):
        try:
            assert holder.stdout.readline() == "held\n"
            app = application(tmp_path, Clock(WRITTEN_AT + 1))
            assert states(ask(app).text) == {"0": "running", "5": "running"}
        finally:
            holder.send_signal(signal.SIGKILL)
            holder.wait(DEADLINE_SECONDS)
        text = ask(app).text
    assert states(text) == {"0": "running", "5": "crashed"}
    assert values(text, "torchmem_rank_up", "rank") == {"0": 1, "5": 0}
    assert values(text, "torchmem_memory_peak_bytes", "rank").keys() == {"0"}
    assert values(text, "torchmem_steps_total", "rank").keys() == {"0", "5"}


def test_port_in_use_is_one_line(tmp_path):
    """Two sidecars of one host would end in a traceback, or share a port in silence."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        line = command("--dir", str(tmp_path), "--listen", address)
        done = subprocess.run(line, capture_output=True, text=True, timeout=DEADLINE_SECONDS, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    (said,) = done.stderr.splitlines()
    assert address in said
    assert "Address already in use" in said


@pytest.mark.parametrize("ending", [signal.SIGTERM, signal.SIGINT])
def test_stalled_clients_hold_up_neither_scrapes_nor_the_end(tmp_path, ending):
    """A client that sends half a request, or reads nothing of its answer, could keep the sidecar from its work."""
    ranks = [make_record(i, 300, written_at=time.time()) for i in range(4)]
    with living(tmp_path, *ranks), running(tmp_path) as sidecar, socket.socket() as silent, socket.socket() as deaf:
        silent.connect(("127.0.0.1", sidecar.port))
        silent.sendall(b"GET /metrics HTTP/1.1\r\nHost:")
        deaf.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        deaf.connect(("127.0.0.1", sidecar.port))
        deaf.sendall(b"GET /metrics HTTP/1.1\r\nHost: a\r\n\r\n")
        assert deaf.recv(12) == b"HTTP/1.1 200"
        assert len(states(sidecar.ask().text)) == 4
        status, seconds = sidecar.end(ending)
    assert status == 0
    assert seconds < 5
