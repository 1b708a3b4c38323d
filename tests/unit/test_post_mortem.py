"""``torchmem post-mortem``: who died, how, who held what, and which allocations failed."""

from __future__ import annotations

import errno
import io
import json
import os
import subprocess
import sys

import msgspec
import pytest
from rich.console import Console

import small_records
from torchmem import cli, postmortem_show
from torchmem.model import Phase, RefType
from torchmem.wire import record as wire
from torchmem.wire.deaths import Death, read_deaths
from torchmem.wire.store import RankStore

MIB = small_records.MIB

TEXT = """\
train rank 0/2 on node-1, pid 4321, attempt 7d4ad1c4-6f6b-4b52-9a5e-3f2a8c0f7f5e: out of memory
  last seen 2023-11-14 22:15:00 UTC, after step 412
  cuda:0: peak 17.00 MiB, step peak 16.00 MiB, usage 5.00 MiB, unattributed 512.00 KiB, limit 1.00 GiB
  who held the memory at the highest peak of the last steps:
   module               reftype          bytes    share
  ─────────────────────────────────────────────────────────────────────
   layers.*.attention   activation    6.00 MiB    37.5%   ████▌
   layers.*             activation    4.00 MiB    25.0%   ███
   (3 more)                           6.00 MiB    37.5%   ████▌

   total                             16.00 MiB   100.0%   ████████████
  3 allocations failed, the last 2 are kept
  out of memory on cuda:0 2023-11-14 22:13:20 UTC, after step 3, in forward:
  layers.*.attention asked for 1.00 GiB (activation) while 20.00 MiB were held
  who held the 20.00 MiB on cuda:0:
   module               reftype          bytes    share
  ─────────────────────────────────────────────────────────────────────
   layers.*.attention   activation    6.00 MiB    30.0%   ███▋
   layers.*             activation    4.00 MiB    20.0%   ██▍
   layers.*             parameter     3.00 MiB    15.0%   █▊
   head                 parameter     2.00 MiB    10.0%   █▎
   (outside modules)    other         1.00 MiB     5.0%   ▋
   (the rest)                         4.00 MiB    20.0%   ██▍

   total                             20.00 MiB   100.0%   ████████████
  out of memory on cuda:0 2023-11-14 22:14:59 UTC, after step 412, in optimizer:
  (outside modules) asked for 2.00 GiB (temporary) while 5.00 MiB were held
  who held the 5.00 MiB on cuda:0:
   module     reftype        bytes    share
  ─────────────────────────────────────────────────────────
   layers.*   parameter   3.00 MiB    60.0%   ███████▎
   head       parameter   2.00 MiB    40.0%   ████▊

   total                  5.00 MiB   100.0%   ████████████
"""


def event(**changes):
    """A failure in the optimizer after the last finished step, with changes."""
    return wire.OutOfMemory(
        **{
            "number": 3,
            "device": "cuda:0",
            "time": 1_700_000_099.0,
            "step": 412,
            "phase": int(Phase.OPTIMIZER),
            "module": 0,
            "reftype": int(RefType.TEMPORARY),
            "requested_bytes": 2048 * MIB,
            "held_bytes": 5 * MIB,
            "holders": wire.pack_cells(small_records.USAGE),
            **changes,
        }
    )


EARLIER = event(
    number=2,
    time=1_700_000_000.0,
    step=3,
    phase=int(Phase.FORWARD),
    module=3,
    reftype=int(RefType.ACTIVATION),
    requested_bytes=1024 * MIB,
    held_bytes=20 * MIB,
    holders=wire.pack_cells(small_records.PEAK),
)


def of_oom(**changes):
    """A record of an attempt that died of its third failure."""
    return small_records.record(labelers=[], oom_events=[EARLIER, event()], counters={"num_ooms": 3}, **changes)


@pytest.fixture
def die(tmp_path):
    """Leaves the record of a dead attempt in its place; the one before goes to the post-mortem folder."""

    def die_once(train_job="train", rank=0, attempt="a", seconds=0, record=None):
        identity = small_records.identity(train_job=train_job, rank=rank, attempt=attempt)
        clock = small_records.clock(written_at=1_700_000_000.0 + seconds)
        store = RankStore(tmp_path, train_job, rank)
        store.write(wire.encode(msgspec.structs.replace(record or of_oom(), identity=identity, clock=clock)))
        store.close()
        return store.path

    return die_once


def shown(capsys, *arguments):
    """What ``torchmem post-mortem --json`` says."""
    assert cli.main(["post-mortem", *map(str, arguments), "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def attempts(capsys, *arguments):
    """The attempts that it lists, in its order."""
    return [death["attempt"] for death in shown(capsys, *arguments)]


def test_all_of_a_death_is_told():
    """Who reads it would not learn who held what, who asked for how much, or how the rank died."""
    buffer = io.StringIO()
    deaths = [Death(of_oom(), "rank-0.record", "out of memory")]
    postmortem_show.draw(Console(file=buffer, width=160, highlight=False), deaths, top=2, fold=True)
    assert "".join(line.rstrip() + "\n" for line in buffer.getvalue().splitlines()) == TEXT


def test_the_latest_first_wherever_they_lie(die, capsys, tmp_path):
    """Some of the dead would be missing, or the latest be hard to find."""
    die(attempt="a", seconds=1)
    die(attempt="b", seconds=5)
    die("other", 3, "c", seconds=3)
    assert attempts(capsys, tmp_path) == ["b", "c", "a"]
    assert attempts(capsys, tmp_path / "train") == ["b", "a"]
    assert attempts(capsys, tmp_path / "train" / "post-mortem") == ["a"]
    assert attempts(capsys, tmp_path, "--last", 2) == ["b", "c"]
    assert attempts(capsys, tmp_path, "--job", "other") == ["c"]
    assert attempts(capsys, tmp_path, "--rank", 0) == ["b", "a"]
    assert [death["path"] for death in shown(capsys, tmp_path)] == [
        str(tmp_path / "train/rank-0.record"),
        str(tmp_path / "other/rank-3.record"),
        str(tmp_path / "train/post-mortem/rank-0.a.record"),
    ]


def test_one_file_is_enough(die, capsys, tmp_path):
    """A record that was copied from another host could not be read."""
    copy = tmp_path / "copied"
    copy.write_bytes(die().read_bytes())
    [death] = shown(capsys, copy)
    assert (death["how"], death["attempt"], death["num_ooms"]) == ("out of memory", "a", 3)
    latest = death["out_of_memory"][-1]
    assert (latest["module"], latest["phase"], latest["requested_bytes"]) == ("(outside modules)", "optimizer", 2 << 30)
    assert sum(row["bytes"] for row in latest["holders"]) + latest["others"]["bytes"] == latest["held_bytes"]


def test_one_file_is_passed_over_where_another_rank_is_wanted(die, tmp_path, capsys):
    """A script would take another job's or another rank's death for the one it asked for."""
    die(rank=3, attempt="a")
    for path in (die(rank=3, attempt="b"), tmp_path / "train" / "post-mortem" / "rank-3.a.record"):
        assert len(shown(capsys, path, "--rank", 3, "--job", "train")) == 1
        for wanted in (["--rank", "5"], ["--job", "nope"]):
            assert cli.main(["post-mortem", str(path), *wanted]) == 1
            assert f"has died, as far as {path} tells" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("record", "how"),
    [
        (of_oom(), "out of memory"),
        (small_records.record(), "crashed"),
        (small_records.record(oom_events=[EARLIER]), "crashed"),
        (of_oom(clock=small_records.clock(final=True)), "exited cleanly"),
    ],
)
def test_how_it_ended(tmp_path, record, how):
    """A job that survived a failure and was killed later would seem to have died of it."""
    path = tmp_path / "rank-0.record"
    path.write_bytes(wire.encode(record))
    assert [death.how for death in read_deaths(path).deaths] == [how]


def test_the_living_and_the_ended_are_left_out(die, tmp_path, capsys):
    """A running rank would be declared dead."""
    die(attempt="a")
    store = RankStore(tmp_path, "train", 0)
    store.write(wire.encode(small_records.record(identity=small_records.identity(attempt="b"))))
    assert attempts(capsys, tmp_path) == ["a"]
    [death] = read_deaths(store.path).deaths
    assert death.how == "still running"
    store.write(wire.encode(small_records.record(identity=small_records.identity(attempt="a"))))
    assert read_deaths(tmp_path).deaths == []
    store.close()


def test_nothing_is_status_1_and_one_line(tmp_path, capsys):
    """A script could not tell that nobody died."""
    assert cli.main(["post-mortem", str(tmp_path), "--job", "train"]) == 1
    captured = capsys.readouterr()
    assert (captured.out, captured.err.count("\n")) == ("", 1)
    assert "no attempt of job 'train' has died" in captured.err


def test_what_was_not_looked_at_has_no_dead(tmp_path, capsys):
    """A mistyped path, or one that may not be read, would be told to hold no dead."""
    assert cli.main(["post-mortem", str(tmp_path / "typo")]) == 1
    fix = "set TORCHMEM_DIR or pass DIR"
    assert capsys.readouterr().err == f"torchmem: {tmp_path / 'typo'} does not exist: {fix}\n"
    too_long = tmp_path / ("x" * 300)
    assert cli.main(["post-mortem", str(too_long)]) == 1
    assert capsys.readouterr().err == f"torchmem: {too_long}: File name too long\n"


def test_an_empty_book_is_no_unfinished_step():
    """A device that the rank did not use would look as if the rank had died in its first step."""
    said = []
    for step in (0, 412):
        empty = small_records.device(step_peak=b"", step_peak_bytes=0)
        record = small_records.record(devices=[empty], clock=small_records.clock(step=step))
        console = Console(file=io.StringIO(), width=160, highlight=False)
        postmortem_show.draw(console, [Death(record, "rank-0.record", "crashed")], top=2, fold=True)
        said.append(console.file.getvalue().splitlines()[-1])
    assert said == ["  no step had finished", "  nothing was held at the peak"]


def test_what_cannot_be_read_is_named(die, tmp_path, capsys):
    """One bad file would hide the dead, or be passed over in silence."""
    die(attempt="a")
    die(attempt="b", seconds=1)
    (tmp_path / "train" / "post-mortem" / "rank-1.x.record").write_bytes(b"garbage" * 10)
    (tmp_path / "train" / "post-mortem" / "rank-2.x.record").symlink_to("/dev/zero")
    assert cli.main(["post-mortem", str(tmp_path), "--json"]) == 0
    captured = capsys.readouterr()
    assert [death["attempt"] for death in json.loads(captured.out)] == ["b", "a"]
    assert "rank-1.x.record: magic" in captured.err
    assert "rank-2.x.record: open" in captured.err


@pytest.mark.parametrize("seconds", [float("nan"), float("inf"), -1e300, 1e300])
def test_senseless_times_do_not_matter(die, tmp_path, capsys, seconds):
    """A damaged clock would keep the rest from being read."""
    die(attempt="a", seconds=seconds)
    assert shown(capsys, tmp_path)[0]["attempt"] == "a"
    assert cli.main(["post-mortem", str(tmp_path)]) == 0


def test_a_folder_that_cannot_be_opened_is_named_once(die, tmp_path, monkeypatch):
    """One line would be there twice, as if two things were wrong."""
    die()
    (tmp_path / "closed").mkdir()
    real = os.open

    def refuse(path, *arguments, **options):
        if path == "closed":
            raise PermissionError(errno.EACCES, "Permission denied")
        return real(path, *arguments, **options)

    monkeypatch.setattr(os, "open", refuse)
    found = read_deaths(tmp_path)
    assert (found.unreadable, len(found.deaths)) == (["closed: Permission denied"], 1)


def test_it_needs_no_torch(die, tmp_path):
    """It would not run in an image that has no torch."""
    die()
    code = "import sys; sys.modules['torch'] = None; from torchmem.cli import main; sys.exit(main())"
    command = [sys.executable, "-c", code, "post-mortem", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert "out of memory" in done.stdout
