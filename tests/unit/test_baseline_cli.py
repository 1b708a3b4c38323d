"""``torchmem baseline``: what is usual of a run, kept by name."""

from __future__ import annotations

import io
import json
import sys

import msgspec
import pytest

import records
import small_records
import watched
from torchmem import cli
from torchmem.model import Phase, RefType
from torchmem.wire import record as wire
from torchmem_exporter.drift import baseline
from torchmem_exporter.drift.composition import Composition, Part
from torchmem_exporter.drift.drift import Drift, fingerprint_of
from torchmem_exporter.drift.ring_steps import Step
from torchmem_exporter.reading.state import FILE_NAME, StateFile

MIB = small_records.MIB
USUAL = Composition(parts=[Part("head", "parameter", 9 * MIB)], other_bytes=3 * MIB)

SHOWN = """\
main: job train, world size 2, saved 2023-11-14 22:13:20 UTC, torch 2.13.0, torchmem 0.1.0
  rank 0 cuda:0: usual peak 16.00 MiB (spread 32.77 KiB), highest 16.00 MiB, steps 16 to 127
   module       reftype         bytes    share
  ────────────────────────────────────────────────────────────
   head         parameter    9.00 MiB    75.0%   █████████
   (the rest)                3.00 MiB    25.0%   ███

   total                    12.00 MiB   100.0%   ████████████
"""


def record(rank=0, train_job="train", num_steps=200, attempt="a", phases=None, **changes):
    """A rank whose ring holds so many steps, all alike."""
    identity = small_records.identity(rank=rank, train_job=train_job, attempt=attempt)
    ring = watched.ring(0, [16 * MIB] * num_steps, [5 * MIB] * num_steps, phases=phases)
    return small_records.record(**{"identity": identity, "ring": ring, **changes})


def remember(directory, one, level_bytes, *, usual=USUAL, is_held=False):
    """Leaves the state of a sidecar that has seen the rank before, at another level, learned or kept."""
    drift = Drift()
    drift.begin(one.identity.attempt, fingerprint_of(one.identity))
    drift.feed(Step(number, 1.7e9 + number, 0, level_bytes, 5 * MIB) for number in range(200))
    drift.usual = usual
    if is_held:
        drift.adopt(drift.level, usual)
    drifts = {one.identity.train_job: {str(one.identity.rank): {"cuda:0": drift}}}
    StateFile(directory / FILE_NAME).save("drift", msgspec.msgpack.encode(drifts))


def save(tmp_path, *arguments):
    """Status, and what was saved."""
    path = tmp_path / "out.json"
    path.unlink(missing_ok=True)
    status = cli.main(["baseline", "save", "main", *map(str, arguments), "--output", str(path)])
    return status, baseline.decode(path.read_bytes()) if path.exists() else None


@pytest.fixture
def directory(tmp_path):
    """Where records lie."""
    return tmp_path / "records"


def test_learned_from_the_ring(directory, tmp_path):
    """Without a sidecar no run could be held against a former one."""
    records.leave(directory, record())
    records.leave(directory, record(rank=1))
    status, saved = save(tmp_path, directory)
    assert status == 0
    assert (saved.name, saved.train_job, saved.world_size, saved.torch_version) == ("main", "train", 2, "2.13.0")
    assert [(one.rank, one.device, one.mesh) for one in saved.baselines] == [(n, "cuda:0", {"dp": 1}) for n in (0, 1)]
    one = saved.of(0, "cuda:0")
    assert (one.level.num_bytes, one.usual.total_bytes) == (16 * MIB, 16 * MIB)
    assert one.usual.parts[0] == Part("layers.*.attention", "activation", 6 * MIB)


@pytest.mark.parametrize("below", [".", "train"])
def test_what_a_sidecar_has_learned_is_taken(directory, tmp_path, below):
    """A level learned before the drift would be given up for the one it drifted to."""
    records.leave(directory, record(num_steps=500))
    remember(directory, record(), 12 * MIB)
    status, saved = save(tmp_path, directory / below)
    assert (status, saved.of(0, "cuda:0").level.num_bytes) == (0, 12 * MIB)
    assert saved.of(0, "cuda:0").usual == USUAL


def test_what_a_sidecar_knows_of_a_former_attempt_is_not_taken(directory, tmp_path):
    """The baseline of another configuration would be saved under the run's name."""
    records.leave(directory, record(attempt="b"))
    remember(directory, record(attempt="a"), 12 * MIB)
    assert save(tmp_path, directory)[1].of(0, "cuda:0").level.num_bytes == 16 * MIB


def test_what_a_sidecar_holds_a_run_against_is_not_taken(directory, tmp_path, capsys):
    """A baseline that is saved of each run and held against the next would stay what it was of the first."""
    records.leave(directory, record())
    remember(directory, record(), 12 * MIB, is_held=True)
    one = save(tmp_path, directory)[1].of(0, "cuda:0")
    assert (one.level.num_bytes, one.usual.total_bytes) == (16 * MIB, 16 * MIB)
    records.leave(directory, record(num_steps=100))
    assert save(tmp_path, directory) == (1, None)
    assert "it holds the job against --baseline" in capsys.readouterr().err


def test_a_state_that_cannot_be_used_costs_nothing(directory, tmp_path):
    """Damage to the sidecar's file would keep a run from being saved."""
    records.leave(directory, record())
    StateFile(directory / FILE_NAME).save("drift", b"\x93garbage")
    assert save(tmp_path, directory)[0] == 0
    (directory / FILE_NAME).write_bytes(b"garbage")
    assert save(tmp_path, directory)[0] == 0


def test_what_is_not_known_yet_is_named_and_left_out(directory, tmp_path, capsys):
    """A baseline of warm-up steps would be kept, or a rank be missing without a word."""
    records.leave(directory, record(num_steps=100))
    assert save(tmp_path, directory) == (1, None)
    assert "rank 0 cuda:0 is left out: after 100 ordinary steps" in capsys.readouterr().err
    records.leave(directory, record(rank=1))
    status, saved = save(tmp_path, directory)
    assert (status, [one.rank for one in saved.baselines]) == (0, [1])
    said = capsys.readouterr()
    assert "rank 0 cuda:0 is left out" in said.err
    assert said.out.endswith("1 baselines of 1 of 2 ranks\n")


def test_the_peak_of_a_checkpoint_is_not_usual(directory, tmp_path):
    """What a checkpoint held would be kept as the usual composition."""
    cells = [*small_records.PEAK, wire.Cell(1, RefType.CHECKPOINT, 8 * MIB)]
    device = small_records.device(step_peak=wire.pack_cells(cells), step_peak_bytes=24 * MIB)
    ring = watched.ring(0, [16 * MIB] * 199 + [24 * MIB], [5 * MIB] * 200, phases=[7] * 199 + [7 | Phase.CHECKPOINT])
    records.leave(directory, record(ring=ring, devices=[device]))
    one = save(tmp_path, directory)[1].of(0, "cuda:0")
    assert (one.level.num_bytes, one.usual) == (16 * MIB, None)


def test_saved_and_compared(directory, tmp_path, capsys):
    """The file that is saved could not be given to ``torchmem diff``."""
    records.leave(directory, record())
    assert save(tmp_path, directory)[0] == 0
    assert cli.main(["diff", str(tmp_path / "out.json"), str(directory)]) == 0
    assert "no device grew by more than 5%" in capsys.readouterr().out


def test_the_file_is_named_after_the_baseline(directory, tmp_path, monkeypatch, capsys):
    """Who names no file would not find it, or a name would write outside of the folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TORCHMEM_DIR", str(directory))
    records.leave(directory, record())
    assert cli.main(["baseline", "save", "main"]) == 0
    assert baseline.decode((tmp_path / "main.baseline.json").read_bytes()).name == "main"
    assert capsys.readouterr().out == "main.baseline.json: 1 baselines of 1 of 2 ranks\n"
    assert cli.main(["baseline", "save", "../main"]) == 2
    assert "--output" in capsys.readouterr().err


def test_a_name_that_the_terminal_cannot_show(directory, tmp_path, monkeypatch):
    """A script would take a file that was written for one that was not."""
    out, path = io.BytesIO(), tmp_path / "é.json"
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(out, encoding="ascii"))
    records.leave(directory, record())
    assert cli.main(["baseline", "save", "main", str(directory), "--output", str(path)]) == 0
    assert out.getvalue().endswith(b"?.json: 1 baselines of 1 of 2 ranks\n")
    assert path.exists()


def test_the_directory_may_stand_last(directory, tmp_path, capsys):
    """Who names the file first would be told that the directory is an unrecognized argument."""
    records.leave(directory, record())
    output = str(tmp_path / "out.json")
    assert cli.main(["baseline", "save", "main", "--output", output, str(directory)]) == 0
    assert cli.main(["baseline", "save", "--output", output, "main", str(directory)]) == 0
    assert capsys.readouterr().err == ""


def test_a_file_that_cannot_be_written_is_said(directory, tmp_path, capsys):
    """A full or missing folder would end in a traceback."""
    records.leave(directory, record())
    assert cli.main(["baseline", "save", "x", str(directory), "--output", str(tmp_path / "none" / "x")]) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_one_job_a_file(directory, tmp_path, capsys):
    """Ranks of two jobs would be kept as if of one."""
    records.leave(directory, record())
    records.leave(directory, record(train_job="other"))
    assert save(tmp_path, directory) == (2, None)
    assert "choose one with --job: other, train" in capsys.readouterr().err
    assert save(tmp_path, directory, "--job", "other")[1].train_job == "other"
    assert save(tmp_path, directory, "--job", "none") == (2, None)


def test_shown(tmp_path, capsys, monkeypatch):
    """A person could not tell what a file holds, and of which run."""
    monkeypatch.setenv("COLUMNS", "120")
    level = baseline.Level(
        num_bytes=16.0 * MIB,
        spread_bytes=0.002 * 16 * MIB + 0.5,
        highest_bytes=16.0 * MIB,
        is_wandering=False,
        num_steps=128,
        first_step=16,
        last_step=127,
    )
    run = baseline.Baselines(
        name="main",
        train_job="train",
        world_size=2,
        saved_at=1.7e9,
        torch_version="2.13.0",
        torchmem_version="0.1.0",
        baselines=[baseline.Baseline(rank=0, device="cuda:0", level=level, usual=USUAL)],
    )
    (tmp_path / "x").write_bytes(baseline.encode(run))
    assert cli.main(["baseline", "show", str(tmp_path / "x")]) == 0
    assert "".join(line.rstrip() + "\n" for line in capsys.readouterr().out.splitlines()) == SHOWN
    assert cli.main(["baseline", "show", str(tmp_path / "x"), "--json"]) == 0
    assert msgspec.convert(json.loads(capsys.readouterr().out), baseline.Baselines) == run


@pytest.mark.parametrize("content", [None, b"", b"{}", b'{"version": 9, "run": {}}', b"\xff"])
def test_what_is_no_file_of_baselines_is_said(tmp_path, capsys, content):
    """A wrong path would end in a traceback."""
    path = tmp_path / "x"
    if content is not None:
        path.write_bytes(content)
    assert cli.main(["baseline", "show", str(path)]) == 2
    said = capsys.readouterr().err
    assert str(path) in said
    assert said.count("\n") == 1
