from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest
from rich.console import Console

import small_records
import torchmem
from torchmem import cli, model, show
from torchmem.engine import native
from torchmem.errors import BuildError
from torchmem.wire import record as wire
from torchmem.wire.ranks import RankView
from torchmem.wire.store import RankStore

MIB = small_records.MIB
NOT_A_TERMINAL = {"TERM": "dumb", "COLUMNS": "100"}

HEAD = """\
train rank 0/2 on node-1, pid 4321, step 412: {}
  fsdp2 is disabled: KeyError: 'x'
  cuda:0: peak 17.00 MiB, step peak 16.00 MiB, usage 5.00 MiB, unattributed 512.00 KiB, limit 1.00 GiB
"""

PEAK_BY_BOTH = """\
  who holds the memory at the peak of a step:
   module               reftype          bytes    share
  ─────────────────────────────────────────────────────────────────────
   layers.*.attention   activation    6.00 MiB    37.5%   ████▌
   layers.*             activation    4.00 MiB    25.0%   ███
   layers.*             parameter     3.00 MiB    18.8%   ██▎
   (2 more)                           3.00 MiB    18.8%   ██▎

   total                             16.00 MiB   100.0%   ████████████
"""

USAGE_BY_REFTYPE_IN_ASCII = """\
  who holds the memory at the end of the last step:
   reftype   |    bytes |  share |
  -----------+----------+--------+--------------
   parameter | 5.00 MiB | 100.0% | ############
  -----------+----------+--------+--------------
   total     | 5.00 MiB | 100.0% | ############
"""


@pytest.fixture
def write(tmp_path):
    """Writes records as running jobs do, and ends the jobs with the test."""
    stores = []

    def write_one(record, *, is_held=True):
        store = RankStore(tmp_path, record.identity.train_job, record.identity.rank)
        store.write(wire.encode(record))
        if is_held:
            stores.append(store)
        else:
            store.close()
        return store.path

    yield write_one
    for store in stores:
        store.close()


def now(**changes):
    """A record that has just been written."""
    return small_records.record(clock=small_records.clock(written_at=time.time()), **changes)


def rank_of(train_job, rank):
    """A fresh record of this rank."""
    return now(identity=small_records.identity(train_job=train_job, rank=rank))


def shown(capsys, *arguments):
    """What ``torchmem show --json`` says."""
    assert cli.main(["show", *map(str, arguments), "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def ranks(capsys, *arguments):
    """The ranks that ``torchmem show`` shows."""
    return [(rank["train_job"], rank["rank"]) for rank in shown(capsys, *arguments)]


def drawn(record, state, *, encoding="utf-8", book=show.Book.PEAK, by=show.By.BOTH, top=15):
    """The tables in a wide console, without what pads a line."""
    buffer = io.TextIOWrapper(io.BytesIO(), encoding=encoding, errors="replace", newline="\n")
    show.draw(Console(file=buffer, width=160, highlight=False), [RankView(record, state)], book, by, top)
    buffer.flush()
    text = buffer.buffer.getvalue().decode(encoding)
    return "".join(line.rstrip() + "\n" for line in text.splitlines())


def run(*arguments, code="import sys; from torchmem.cli import main; sys.exit(main())", **options):
    """Runs the command line in a process of its own."""
    environment = {**os.environ, **NOT_A_TERMINAL, "PYTHONIOENCODING": "utf-8"}
    command = [sys.executable, "-c", code, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=60, env=environment, **options)


def test_table_of_modules_and_reftypes():
    """The user would not see who holds the memory, or rows that do not add up."""
    assert drawn(small_records.record(), "running", top=3) == HEAD.format("running") + PEAK_BY_BOTH


def test_table_of_reftypes_between_steps_in_a_terminal_without_utf8():
    """The user of a plain terminal would see no bars, or the peak where the usage was asked for."""
    text = drawn(small_records.record(), "crashed", encoding="ascii", book=show.Book.USAGE, by=show.By.REFTYPE)
    assert text == HEAD.format("crashed") + USAGE_BY_REFTYPE_IN_ASCII


def test_json_is_the_same_as_plain_data(write, capsys, tmp_path):
    """A script would get other numbers than the table shows."""
    record = now()
    write(record)
    expected = [
        {
            "train_job": "train",
            "rank": 0,
            "world_size": 2,
            "attempt": record.identity.attempt,
            "host": "node-1",
            "pid": 4321,
            "state": "running",
            "step": 412,
            "written_at": record.clock.written_at,
            "disabled": {"fsdp2": "KeyError: 'x'"},
            "book": "peak",
            "devices": [
                {
                    "device": "cuda:0",
                    "peak_bytes": 17 * MIB,
                    "step_peak_bytes": 16 * MIB,
                    "usage_bytes": 5 * MIB,
                    "unattributed_bytes": MIB // 2,
                    "limit_bytes": 1024 * MIB,
                    "forecast_bytes": None,
                    "forecast_drift_ratio": None,
                    "total_bytes": 16 * MIB,
                    "holders": [
                        {"module": "layers.*", "reftype": None, "bytes": 7 * MIB, "share": 0.4375},
                        {"module": "layers.*.attention", "reftype": None, "bytes": 6 * MIB, "share": 0.375},
                    ],
                    "others": {"num_rows": 2, "bytes": 3 * MIB, "share": 0.1875},
                }
            ],
        }
    ]
    assert shown(capsys, tmp_path, "--by", "module", "--top", 2) == expected


@pytest.mark.parametrize("by", ["module", "reftype", "both"])
@pytest.mark.parametrize("book", ["--peak", "--usage"])
@pytest.mark.parametrize("top", [1, 2, 15])
def test_parts_sum_to_the_total(write, capsys, tmp_path, book, by, top):
    """Bytes would get lost between the rows and the total."""
    write(now())
    (rank,) = shown(capsys, tmp_path, book, "--by", by, "--top", top)
    (device,) = rank["devices"]
    parts = [row["bytes"] for row in device["holders"]] + [device["others"]["bytes"]]
    whole = device["step_peak_bytes"] if book == "--peak" else device["usage_bytes"]
    assert [sum(parts), device["total_bytes"]] == [whole, whole]
    assert len(device["holders"]) <= top


def test_forecast_is_told_with_how_far_the_step_peak_is_over_it(write, capsys, tmp_path):
    """The user could not see whether the job keeps to its forecast."""
    record = now(devices=[small_records.device(forecast_bytes=12 * MIB)])
    assert "limit 1.00 GiB, forecast 12.00 MiB (+33.3%)\n" in drawn(record, "running")
    write(record)
    ((device,),) = (rank["devices"] for rank in shown(capsys, tmp_path))
    assert (device["forecast_bytes"], device["forecast_drift_ratio"]) == (12 * MIB, 16 / 12 - 1)


def test_states(write, capsys, tmp_path):
    """A crashed rank would pass for a running one, or a finished one for crashed."""
    write(rank_of("train", 0))
    write(small_records.record(identity=small_records.identity(rank=1)))
    write(rank_of("train", 2), is_held=False)
    write(
        small_records.record(identity=small_records.identity(rank=3), clock=small_records.clock(final=True)),
        is_held=False,
    )
    states = [rank["state"] for rank in shown(capsys, tmp_path)]
    assert states == ["running", "stale", "crashed", "exited"]


def test_jobs_and_ranks_can_be_chosen(write, capsys, tmp_path):
    """The user of a busy host could not look at one rank."""
    for train_job, rank in (("b", 0), ("a", 10), ("a", 2), ("odd/name", 0)):
        write(rank_of(train_job, rank))
    assert ranks(capsys, tmp_path) == [("a", 2), ("a", 10), ("b", 0), ("odd/name", 0)]
    assert ranks(capsys, tmp_path, "--job", "a") == [("a", 2), ("a", 10)]
    assert ranks(capsys, tmp_path, "--job", "odd/name") == [("odd/name", 0)]
    assert ranks(capsys, tmp_path, "--rank", 0) == [("b", 0), ("odd/name", 0)]
    assert ranks(capsys, tmp_path, "--job", "a", "--rank", "2") == [("a", 2)]
    assert ranks(capsys, tmp_path / "a") == [("a", 2), ("a", 10)]


def test_directory_of_the_environment_is_the_default(write, capsys, monkeypatch, tmp_path):
    """``torchmem show`` would look elsewhere than the jobs of the same shell write."""
    write(now())
    monkeypatch.setenv("TORCHMEM_DIR", str(tmp_path))
    assert ranks(capsys) == [("train", 0)]


@pytest.mark.parametrize("directory", ["", "missing"], ids=["empty", "missing"])
def test_no_records_names_the_fix(capsys, tmp_path, directory):
    """The user would see nothing at all, or a traceback."""
    assert cli.main(["show", str(tmp_path / directory)]) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    assert f"no records under {tmp_path / directory}: is a job running with torchmem.install(...)?" in err
    assert "pass DIR" in err
    assert "set TORCHMEM_DIR" in err


def test_no_such_rank_says_so(write, capsys, tmp_path):
    """The user would look for a missing job where only the number was wrong."""
    write(now())
    assert cli.main(["show", str(tmp_path), "--job", "train", "--rank", "7"]) == 1
    assert "no records of job 'train' of rank 7 under" in capsys.readouterr().err


def test_attempts_that_died_are_pointed_at(write, capsys, tmp_path):
    """A rank that crashed would have left no trace, once a sidecar has moved its record away."""
    for attempt in ("a", "b"):
        path = write(now(identity=small_records.identity(attempt=attempt)), is_held=False)
    assert (path.parent / "post-mortem" / "rank-0.a.record").exists()
    path.rename(path.parent / "post-mortem" / "rank-0.b.record")
    said = []
    for arguments in ([], ["--job", "train"], ["--rank", "7"]):
        assert cli.main(["show", str(tmp_path), *arguments]) == 1
        said.append(capsys.readouterr().err.rpartition("; ")[2])
    hint = f"2 attempts died: torchmem post-mortem {tmp_path}\n"
    assert (said[:2], "1 attempt" in said[2], "2 attempts" in said[2]) == ([hint, hint], False, False)


def test_unreadable_record_is_named_and_the_rest_is_shown(write, capsys, tmp_path):
    """One bad file would hide every rank of the host, or go unnoticed."""
    path = write(now())
    path.with_name("rank-1.record").write_bytes(b"garbage" * 9)
    path.with_name("rank-2.record").symlink_to(path)
    assert cli.main(["show", str(tmp_path)]) == 0
    out, err = capsys.readouterr()
    assert "train rank 0/2" in out
    assert [line.split(": ")[1:3] for line in err.splitlines()] == [
        ["train/rank-1.record", "magic"],
        ["train/rank-2.record", "open"],
    ]


def test_only_unreadable_records_fail(capsys, tmp_path):
    """A script would take a directory of damaged records for a healthy host."""
    (tmp_path / "rank-0.record").write_bytes(b"")
    assert cli.main(["show", str(tmp_path)]) == 1
    assert "rank-0.record: truncated" in capsys.readouterr().err


def test_names_cannot_drive_the_terminal():
    """A module's name, or another user's record, could rewrite the screen or be taken for markup."""
    record = small_records.record(
        identity=small_records.identity(train_job="\x1b[2Jtrain\n", host="\x07host"),
        modules=["\x1b]0;title\x07", "[red]root[/red]", "a\nb", "[/]", "\u202eevil"],
        devices=[small_records.device(name="cpu\r")],
    )
    text = drawn(record, "running")
    assert not set(text) & {"\x1b", "\x07", "\r", "\u202e"}
    assert "[/]" in text
    assert text.startswith("\ufffd[2Jtrain\ufffd rank 0/2 on \ufffdhost, ")


def test_what_has_not_happened_yet_is_said():
    """A rank that has just started would show an empty table."""
    fresh = small_records.device(usage=b"", step_peak=b"", active_peak=b"")
    begun = small_records.record(devices=[fresh], clock=small_records.clock(step=0))
    assert "no step has finished yet" in drawn(begun, "running")
    assert "nothing is counted on this rank" in drawn(small_records.record(devices=[]), "running")


def test_empty_book_of_a_rank_that_trains_is_no_missing_step():
    """A device without use after 412 steps would be waited for."""
    record = small_records.record(devices=[small_records.device(usage=b"", step_peak=b"")])
    assert "  nothing is held at the peak of a step\n" in drawn(record, "running")
    assert "  nothing is held at the end of the last step\n" in drawn(record, "running", book=show.Book.USAGE)


def test_each_device_has_its_table():
    """The memory of a rank's second device would be missing."""
    devices = [small_records.device(), small_records.device(name="cpu", limit_bytes=None)]
    text = drawn(small_records.record(devices=devices), "running")
    assert [line.split(":")[0] for line in text.splitlines() if ": peak" in line] == ["  cuda", "  cpu"]
    assert text.count("who holds the memory") == 2


def test_show_runs_where_torch_cannot_be_imported(write, tmp_path):
    """The command would not run in the sidecar's image, or would take seconds to start."""
    write(now())
    code = (
        "import sys; sys.modules['torch'] = None\nfrom torchmem.cli import main; sys.exit(main(['show', sys.argv[1]]))"
    )
    ended = run(tmp_path, code=code)
    assert (ended.returncode, ended.stderr) == (0, "")
    assert "layers.*.attention" in ended.stdout


def test_name_that_the_encoding_lacks_is_shown_somehow(write, tmp_path):
    """A host without UTF-8 would answer with a traceback."""
    write(now(modules=["größe", *small_records.MODULES[1:]]))
    code = (
        "import sys; sys.stdout.reconfigure(encoding='ascii')\n"
        "from torchmem.cli import main; sys.exit(main(['show', sys.argv[1]]))"
    )
    ended = run(tmp_path, code=code)
    assert (ended.returncode, ended.stderr) == (0, "")
    assert "gr??e" in ended.stdout


@pytest.mark.parametrize("unbuffered", ["", "1"], ids=["buffered", "unbuffered"])
def test_closed_pipe_ends_quietly(write, tmp_path, unbuffered):
    """``torchmem show | head -1`` would end in a traceback."""
    for rank in range(200):  # far more than a pipe holds
        write(rank_of("train", rank))
    code = "import sys; from torchmem.cli import main; sys.exit(main())"
    script = '"$0" -c "$1" show "$2" | head -1; echo ${PIPESTATUS[0]}'
    command = ["bash", "-c", script, sys.executable, code, str(tmp_path)]
    environment = {**os.environ, **NOT_A_TERMINAL, "PYTHONUNBUFFERED": unbuffered}
    ended = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60, env=environment)
    assert ended.stderr == ""
    assert ended.stdout.splitlines() == ["train rank 0/2 on node-1, pid 4321, step 412: running", "141"]


def test_interrupt_ends_quietly(monkeypatch, capsys):
    """Ctrl-C would end in a traceback."""

    def interrupt():
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(60)

    monkeypatch.setattr(native, "build", interrupt)
    assert cli.main(["build"]) == 130
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize(("is_cached", "said"), [(True, "found in the cache in 0.3 s"), (False, "compiled in 0.3 s")])
def test_build_names_the_binary_and_the_time(monkeypatch, capsys, tmp_path, is_cached, said):
    """The user would not know where the engine is, nor whether the job will have to wait for it."""
    binary = tmp_path / "engine.so"
    began, took = 1_700_000_000.0, 0.3
    readings = iter([began, began + took])

    def build():
        binary.write_bytes(b"")
        made_at = began + (-1 if is_cached else 0.1)
        os.utime(binary, (made_at, made_at))
        return binary

    monkeypatch.setattr(native, "build", build)
    monkeypatch.setattr(cli, "time", SimpleNamespace(time=lambda: next(readings)))
    assert cli.main(["build"]) == 0
    path, remark = capsys.readouterr().out.splitlines()
    assert Path(path) == binary
    assert remark == said


def test_failed_build_is_one_line(monkeypatch, capsys):
    """A missing compiler would show as a traceback."""

    def build():
        raise BuildError("no C++ compiler found: install g++")

    monkeypatch.setattr(native, "build", build)
    assert cli.main(["build"]) == 1
    assert capsys.readouterr() == ("", "torchmem: no C++ compiler found: install g++\n")


def test_version(capsys):
    """A bug report would name the wrong release."""
    with pytest.raises(SystemExit) as ended:
        cli.main(["--version"])
    assert (ended.value.code, capsys.readouterr().out) == (0, f"torchmem {torchmem.__version__}\n")


def test_help_has_an_example(capsys):
    """The user would have to find the first command elsewhere."""
    with pytest.raises(SystemExit) as ended:
        cli.main(["--help"])
    assert ended.value.code == 0
    assert "torchmem show --job train --rank 0" in capsys.readouterr().out


@pytest.mark.parametrize(
    "arguments",
    [[], ["show", "--top", "0"], ["show", "--rank", "-1"], ["show", "--peak", "--usage"], ["show", "--by", "x"]],
)
def test_arguments_that_make_no_sense_are_refused(arguments, capsys):
    """A mistyped option would be ignored."""
    with pytest.raises(SystemExit) as ended:
        cli.main(arguments)
    assert ended.value.code == 2
    assert "usage: torchmem" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "folded"),
    [
        ("layers.17.mlp.0", "layers.*.mlp.*"),
        ("(root)", "(root)"),
        ("0", "*"),
        ("conv2d.layer1", "conv2d.layer1"),
        ("(outside modules)", "(outside modules)"),
    ],
)
def test_only_indices_are_folded(name, folded):
    """A stack of layers would fill the table, or modules of different names become one."""
    assert model.folded(name) == folded


def test_layers_are_summed_unless_asked_for(write, tmp_path, capsys):
    """A model of a hundred layers would show none of its totals, or never show its layers."""
    record = now()
    names = ["(outside modules)", "(root)", *(f"layers.{i}" for i in range(len(record.modules) - 2))]
    write(msgspec.structs.replace(record, modules=names))
    assert cli.main(["show", str(tmp_path), "--by", "module"]) == 0
    assert "layers.*" in capsys.readouterr().out
    assert cli.main(["show", str(tmp_path), "--by", "module", "--unfold"]) == 0
    unfolded = capsys.readouterr().out
    assert "layers.*" not in unfolded
    assert "layers.0" in unfolded


def test_it_runs_as_a_module():
    """Whoever has torchmem on the path but not its script, as in many containers, could not call it."""
    done = subprocess.run([sys.executable, "-m", "torchmem", "--version"], capture_output=True, text=True, check=True)
    assert done.stdout == f"torchmem {torchmem.__version__}\n"
