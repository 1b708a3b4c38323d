"""``torchmem diff``: what it reads, what it prints, and the status that a CI job goes by."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys

import msgspec
import pytest

import records
import small_records
from torchmem import cli
from torchmem.model import RefType
from torchmem.wire import record as wire
from torchmem_exporter.drift import baseline
from torchmem_exporter.drift.composition import Composition, Part
from torchmem_exporter.drift.learning import Level

MIB = small_records.MIB

TABLE = """\
A: train, 1 rank, records in A
B: train, 1 rank, records in B

rank 0 cuda:0, at the peak of a step: 16.00 MiB in A, 18.00 MiB in B: +12.5%
   module               reftype              A           B       grown     of A
  ─────────────────────────────────────────────────────────────────────────────────────────────
   layers.*.attention   activation    6.00 MiB    9.00 MiB   +3.00 MiB   +18.8%   ████████████
   head                 parameter     2.00 MiB    1.00 MiB   -1.00 MiB    -6.2%   ████
   (3 more)                           8.00 MiB    8.00 MiB         0 B    +0.0%

   total                             16.00 MiB   18.00 MiB   +2.00 MiB   +12.5%

grew by more than 5%: rank 0 cuda:0 by +12.5%
"""


def record(rank=0, train_job="train", grown_bytes=0, shrunk_bytes=0, **changes):
    """A record whose attention holds more at the peak, and whose head holds less."""
    amounts = {(3, RefType.ACTIVATION): grown_bytes, (4, RefType.PARAMETER): -shrunk_bytes}
    cells = [cell._replace(num_bytes=cell.num_bytes + amounts.get(cell[:2], 0)) for cell in small_records.PEAK]
    device = small_records.device(step_peak=wire.pack_cells(cells), step_peak_bytes=sum(cell[2] for cell in cells))
    identity = small_records.identity(rank=rank, train_job=train_job)
    return small_records.record(**{"identity": identity, "devices": [device], "labelers": [], **changes})


@pytest.fixture
def runs(tmp_path):
    """Two directories: the latter's rank holds 3 MiB more activations and 1 MiB less parameters."""
    records.leave(tmp_path / "A", record())
    records.leave(tmp_path / "B", record(grown_bytes=3 * MIB, shrunk_bytes=MIB))
    return tmp_path / "A", tmp_path / "B"


def compare(capsys, *arguments):
    """Status, data, and what was said on stderr."""
    status = cli.main(["diff", "--json", *map(str, arguments)])
    said = capsys.readouterr()
    return status, json.loads(said.out) if said.out else None, said.err


def refused(capsys, *arguments):
    """What is said of input that cannot be used."""
    status, data, said = compare(capsys, *arguments)
    assert (status, data) == (2, None)
    return said


def test_a_table_for_people(runs, capsys, monkeypatch):
    """A person could not tell from it what grew, by how much, and whether that was too much."""
    monkeypatch.chdir(runs[0].parent)
    monkeypatch.setenv("COLUMNS", "120")
    assert cli.main(["diff", "A", "B"]) == 1
    drawn = "".join(line.rstrip() + "\n" for line in capsys.readouterr().out.splitlines())
    assert drawn == TABLE


def test_plain_data_for_machines(runs, capsys):
    """A program that reads it would find other keys, or numbers that do not add up."""
    status, data, said = compare(capsys, *runs, "--top", 1)
    assert (status, said) == (1, "")
    device = {"rank": 0, "device": "cuda:0", "moment": "at the peak of a step"}
    assert data == {
        "before": {"path": str(runs[0]), "kind": "records", "train_job": "train", "num_ranks": 1, "remarks": []},
        "after": {"path": str(runs[1]), "kind": "records", "train_job": "train", "num_ranks": 1, "remarks": []},
        "book": "peak",
        "matched_by": "rank",
        "threshold_ratio": 0.05,
        "exceeded": True,
        "devices": [
            {
                "before": {**device, "total_bytes": 16 * MIB},
                "after": {**device, "total_bytes": 18 * MIB},
                "grown_bytes": 2 * MIB,
                "grown_ratio": 0.125,
                "exceeded": True,
                "rows": [
                    {
                        "module": "layers.*.attention",
                        "reftype": "activation",
                        "before_bytes": 6 * MIB,
                        "after_bytes": 9 * MIB,
                        "grown_bytes": 3 * MIB,
                    }
                ],
                "others": {
                    "num_rows": 4,
                    "before_bytes": 10 * MIB,
                    "after_bytes": 9 * MIB,
                    "grown_bytes": -MIB,
                },
            }
        ],
        "only_before": [],
        "only_after": [],
    }


@pytest.mark.parametrize(
    ("threshold", "expected"), [("5%", 1), ("12.4%", 1), ("12.5%", 0), ("0.13", 0), ("0%", 1), ("200%", 0)]
)
def test_the_status_is_the_gate(runs, capsys, threshold, expected):
    """A CI job would pass what grew too much, or fail what did not."""
    assert compare(capsys, *runs, "--threshold", threshold)[0] == expected


def test_what_shrank_or_stayed_passes(runs, capsys):
    """A CI job would fail a run that holds less than the one before."""
    assert compare(capsys, runs[0], runs[0])[0] == 0
    assert compare(capsys, runs[1], runs[0], "--threshold", "0%")[0] == 0
    assert cli.main(["diff", str(runs[0]), str(runs[0])]) == 0
    assert "no device grew by more than 5%" in capsys.readouterr().out


@pytest.mark.parametrize("threshold", ["5", "-1%", "x", "1/0", "nan", "inf", "", "1e400%"])
def test_a_threshold_that_makes_no_sense_is_refused(runs, capsys, threshold):
    """A gate of 500% would let everything pass where 5% was meant."""
    with pytest.raises(SystemExit, match="2"):
        cli.main(["diff", *map(str, runs), f"--threshold={threshold}"])
    assert "write it like 5% or 0.05" in capsys.readouterr().err


def test_usage_instead_of_the_peak(runs, capsys):
    """What is alive between steps could not be compared."""
    status, data, _ = compare(capsys, *runs, "--usage")
    assert status == 0
    assert (data["book"], data["devices"][0]["after"]["total_bytes"]) == ("usage", 5 * MIB)


def test_runs_lie_anywhere(runs, capsys, tmp_path):
    """A job's folder, or one record that a colleague sent, could not be compared."""
    for path in (runs[1] / "train", runs[1] / "train" / "rank-0.record"):
        status, data, _ = compare(capsys, runs[0], path)
        assert (status, data["devices"][0]["grown_bytes"]) == (1, 2 * MIB)
    copied = tmp_path / "sent by mail"
    copied.write_bytes((runs[1] / "train" / "rank-0.record").read_bytes())
    assert compare(capsys, copied, runs[0])[1]["devices"][0]["grown_bytes"] == -2 * MIB
    records.leave(tmp_path / "C", record(train_job="other"))
    assert compare(capsys, runs[0], tmp_path / "C" / "other" / "rank-0.record", "--job", "train")[0] == 0


def test_post_mortems(tmp_path, capsys):
    """What a dead attempt held could not be compared, or an older death of the rank be taken for the latest."""
    for number, grown_bytes in enumerate((0, MIB, 3 * MIB)):
        identity = small_records.identity(attempt=f"a{number}")
        clock = small_records.clock(written_at=1_700_000_000.0 + number)
        records.leave(tmp_path, record(grown_bytes=grown_bytes, identity=identity, clock=clock))
    folder = tmp_path / "train" / "post-mortem"
    status, data, _ = compare(capsys, folder / "rank-0.a0.record", folder, "--threshold", "6%")
    assert (status, data["after"]["kind"], data["devices"][0]["grown_bytes"]) == (1, "post-mortem", MIB)
    assert compare(capsys, folder, tmp_path)[1]["devices"][0]["grown_bytes"] == 2 * MIB
    (tmp_path / "train" / "rank-0.record").unlink()
    assert compare(capsys, folder, tmp_path)[1]["devices"][0]["grown_bytes"] == 0


def test_who_ran_out_of_memory_is_compared_at_that_instant(runs, capsys, tmp_path):
    """The growth that killed a rank, in a step that never finished, would not be seen."""
    failure = wire.OutOfMemory(
        number=1,
        device="cuda:0",
        time=1.7e9,
        step=0,
        phase=1,
        module=3,
        reftype=int(RefType.ACTIVATION),
        requested_bytes=MIB,
        held_bytes=40 * MIB,
        holders=wire.pack_cells([wire.Cell(3, RefType.ACTIVATION, 30 * MIB)]),
    )
    empty = small_records.device(step_peak=b"", usage=b"", step_peak_bytes=0, usage_bytes=0)
    dead = record(devices=[empty], clock=small_records.clock(step=0), oom_events=[failure])
    records.leave(tmp_path / "dead", dead)
    status, data, _ = compare(capsys, runs[0], tmp_path / "dead")
    (device,) = data["devices"]
    assert (status, device["after"]["total_bytes"]) == (1, 40 * MIB)
    assert device["after"]["moment"] == "when an allocation failed"
    (row,) = device["rows"]
    assert (row["module"], row["reftype"], row["grown_bytes"]) == ("layers.*.attention", "activation", 24 * MIB)
    assert (device["others"]["before_bytes"], device["others"]["after_bytes"]) == (10 * MIB, 10 * MIB)


def test_a_run_without_a_finished_step_is_no_clean_result(runs, capsys, tmp_path):
    """A job that died at once would pass for one that holds nothing."""
    records.leave(tmp_path / "new", record(clock=small_records.clock(step=0)))
    assert "no step had finished" in refused(capsys, runs[0], tmp_path / "new")
    records.leave(tmp_path / "new", record(rank=1))
    status, data, said = compare(capsys, runs[0], tmp_path / "new")
    assert (status, data["matched_by"], data["exceeded"]) == (2, "highest", False)
    assert "rank 0 is left out: no step had finished" in said


def baselines(path, usual):
    """A file of the baseline of rank 0."""
    level = Level(
        num_bytes=15.5 * MIB,
        spread_bytes=1.0,
        highest_bytes=16.0 * MIB,
        is_wandering=False,
        num_steps=128,
        first_step=16,
        last_step=128,
    )
    one = baseline.Baseline(rank=0, device="cuda:0", level=level, usual=usual)
    path.write_bytes(
        baseline.encode(
            baseline.Baselines(name="main", train_job="train", world_size=2, saved_at=1.7e9, baselines=[one])
        )
    )
    return path


def test_a_baseline_kept_by_name(runs, capsys, tmp_path):
    """A run could not be held against what was usual, or its growers not be named."""
    usual = Composition(parts=[Part("layers.*.attention", "activation", 6 * MIB)], other_bytes=10 * MIB)
    path = baselines(tmp_path / "main.json", usual)
    status, data, _ = compare(capsys, path, runs[1])
    (device,) = data["devices"]
    assert (status, data["before"]["kind"], device["grown_bytes"]) == (1, "baselines", 2 * MIB)
    assert (device["rows"][0]["module"], device["rows"][0]["grown_bytes"]) == ("layers.*.attention", 3 * MIB)
    assert compare(capsys, path, runs[0])[0] == 0
    assert "leave --usage out" in refused(capsys, path, runs[0], "--usage")


def test_a_baseline_of_unknown_composition(runs, capsys, tmp_path):
    """A level whose parts are not known would count as nothing, and every run as growth."""
    path = baselines(tmp_path / "main.json", None)
    assert compare(capsys, path, runs[0])[0] == 0
    assert compare(capsys, path, runs[1])[0] == 1


def test_several_jobs_are_never_mixed(runs, capsys):
    """Ranks of two jobs would be compared as if of one."""
    records.leave(runs[1], record(train_job="other\x1b[31m"))
    said = refused(capsys, *runs)
    assert "holds several jobs, choose one with --job: other\ufffd[31m, train" in said
    assert compare(capsys, *runs, "--job", "train")[0] == 1


def test_two_runs_of_one_name_are_never_mixed(runs, capsys):
    """A folder above two runs would be compared as if it held one."""
    said = refused(capsys, runs[0], runs[0].parent)
    assert said.count("\n") == 1
    shutil.copytree(runs[1] / "train", runs[0] / "copied")
    assert "holds rank 0 of train more than once" in refused(capsys, *runs)
    assert compare(capsys, runs[0] / "train", runs[0] / "copied")[0] == 1


def test_other_devices_cannot_be_compared(runs, capsys, tmp_path):
    """A run on another type of device would pass because nothing of it was compared."""
    records.leave(tmp_path / "cpu", record(devices=[small_records.device(name="cpu")]))
    assert "can be held against" in refused(capsys, runs[0], tmp_path / "cpu")
    both = [small_records.device(name=name) for name in ("cuda:0", "cpu")]
    records.leave(tmp_path / "both", record(devices=both))
    status, data, _ = compare(capsys, runs[0], tmp_path / "both")
    assert (status, [one["device"] for one in data["only_after"]]) == (0, ["cpu"])
    cli.main(["diff", str(runs[0]), str(tmp_path / "both")])
    assert "only in B, not compared: rank 0 cpu, 16.00 MiB" in capsys.readouterr().out


def test_other_numbers_of_ranks(runs, capsys):
    """A run on more ranks could not be compared, or nobody be told which ranks were."""
    records.leave(runs[1], record(rank=1, grown_bytes=4 * MIB))
    status, data, _ = compare(capsys, *runs)
    assert (status, data["matched_by"]) == (1, "highest")
    assert [(one["before"]["rank"], one["after"]["rank"]) for one in data["devices"]] == [(0, 1)]
    cli.main(["diff", *map(str, runs)])
    drawn = capsys.readouterr().out
    assert "the two have not the same ranks" in drawn
    assert "rank 0 cuda:0 of A, rank 1 cuda:0 of B" in drawn
    assert compare(capsys, *runs, "--rank", 0)[1]["matched_by"] == "rank"


def test_one_device_only(runs, capsys):
    """A job's host memory could not be left out of the gate."""
    host = small_records.device(name="cpu")
    grown = msgspec.structs.replace(record(grown_bytes=3 * MIB), devices=[*record(grown_bytes=MIB).devices, host])
    records.leave(runs[0], msgspec.structs.replace(record(), devices=[*record().devices, host]))
    records.leave(runs[1], grown)
    assert len(compare(capsys, *runs)[1]["devices"]) == 2
    (device,) = compare(capsys, *runs, "--device", "cpu")[1]["devices"]
    assert device["grown_bytes"] == 0
    assert "on 'cuda:7'" in refused(capsys, *runs, "--device", "cuda:7")


def test_a_damaged_record_is_no_clean_result(runs, capsys):
    """A rank that could not be read would pass the gate unseen."""
    path = runs[1] / "train" / "rank-3.record"
    path.write_bytes(b"torchmem nonsense" * 9)
    status, data, said = compare(capsys, *runs, "--threshold", "50%")
    assert (status, data["exceeded"]) == (2, False)
    assert "train/rank-3.record: version" in said
    assert compare(capsys, *runs)[0] == 1


@pytest.mark.parametrize("name", ["missing", "empty", "text", "/dev/null", "fifo", "x" * 300])
def test_what_cannot_be_used_is_said(runs, capsys, tmp_path, name):
    """A CI job would pass, hang, or end in a traceback, where a path is wrong."""
    (tmp_path / "empty").mkdir()
    (tmp_path / "text").write_text("{}")
    os.mkfifo(tmp_path / "fifo")
    said = refused(capsys, tmp_path / name, runs[0])
    assert str(tmp_path / name) in said
    assert said.count("\n") == 1


def test_nothing_drives_the_terminal(tmp_path, capsys):
    """A record could move the cursor or clear the screen of who compares it."""
    names = [*small_records.MODULES[:3], "\x1b[2Jevil", "head"]
    records.leave(tmp_path / "A", record(modules=names))
    records.leave(tmp_path / "B", record(modules=names, grown_bytes=MIB))
    cli.main(["diff", str(tmp_path / "A"), str(tmp_path / "B")])
    drawn = capsys.readouterr().out
    assert "\x1b[2J" not in drawn
    assert "evil" in drawn


def test_only_what_pip_install_torchmem_brings_is_needed(runs, tmp_path):
    """In a CI image without the sidecar's libraries, or without torch, comparing would end in an ImportError."""
    missing = ["torch", "bcrypt", "h11", "prometheus_client", "yaml", "google", "grpc", "opentelemetry", "urllib3"]
    program = (
        f"import sys; sys.modules.update(dict.fromkeys({missing!r}))\n"
        "from torchmem import cli\n"
        f"status = cli.main(['diff', {str(baselines(tmp_path / 'x', None))!r}, {str(runs[1])!r}])\n"
        f"assert cli.main(['baseline', 'save', 'x', {str(runs[1])!r}]) == 1\n"
        "sys.exit(status + 40)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False, cwd=tmp_path)
    assert (done.returncode, done.stderr.count("\n")) == (41, 1), done.stderr
