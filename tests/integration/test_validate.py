"""``torchmem validate``, with real processes: the rows are right, and what goes wrong is said and costs itself only."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from statistics import median

import pytest

from jobs import bad_rows
from torchmem import cli
from torchmem.validation import run
from torchmem.validation.outcome import RowOutcome
from torchmem.validation.rows import ROWS, Machine, find

QUICK = ["fsdp2/multi-group/reshard/device/mixed", "ddp/copied", "fsdp1/full-shard/flat", "zoo/experts/plain"]
NOT_HERE = {"plain/two-devices", "fsdp1/offload/flat", "fsdp1/offload/orig"}
"""Rows that need an accelerator; all others run on the CPU."""
LONE = {"ddp/copied": "ok", "fsdp2/multi-group/reshard/device/full": "ok", "fsdp1/full-shard/orig": "skipped"}
"""What becomes of a row on one rank."""
SLOW_ROWS = [pytest.param(row.name, id=row.name) for row in ROWS]
WIDE = ["fsdp2/hybrid/*", "tensor-parallel/*", "fsdp1/hybrid-*", "fsdp2/expert-per-rank"]
PROGRAM = [sys.executable, "-W", "ignore", "-c", "import sys; from torchmem.cli import main; sys.exit(main())"]


def validate(*arguments: str, timeout: float = 170.0) -> subprocess.CompletedProcess[str]:
    """Runs the command in a session of its own."""
    command = [*PROGRAM, "validate", "--device", "cpu", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=timeout, check=False, start_new_session=True)


def document(*arguments: str, timeout: float = 170.0) -> tuple[int, dict]:
    """The exit status and what ``--json`` says."""
    ended = validate("--json", *arguments, timeout=timeout)
    assert ended.stdout, ended.stderr
    return ended.returncode, json.loads(ended.stdout)


@pytest.fixture(scope="module")
def quick() -> tuple[int, dict]:
    """A few rows, one of each kind."""
    return document("--steps", "2", *(f"--only={name}" for name in QUICK))


@pytest.fixture(scope="module")
def lone() -> tuple[int, dict]:
    """Some rows on one rank."""
    return document("--ranks", "1", "--steps", "2", *(f"--only={name}" for name in LONE))


@pytest.fixture(scope="module")
def everything() -> dict[str, dict]:
    """Every row on two ranks, by name."""
    _, found = document(timeout=1100)
    return {row["name"]: row for row in found["rows"]}


@pytest.fixture(scope="module")
def wide() -> dict[str, dict]:
    """The rows that divide their ranks two ways, on four of them."""
    _, found = document("--ranks", "4", *(f"--only={name}" for name in WIDE), timeout=500)
    return {row["name"]: row for row in found["rows"]}


def test_quick_rows_are_right(quick):
    """``torchmem validate`` would find fault with a library that is right, or the library be wrong."""
    status, found = quick
    assert [(row["name"], row["status"], row["problems"]) for row in found["rows"]] == [
        (row.name, "ok", []) for row in find(QUICK)
    ]
    assert (status, found["is_complete"], found["num_by_status"]) == (0, True, {"ok": len(QUICK)})


def test_figures_are_of_real_steps(quick):
    """The figures would be made up: no bytes, no steps, no time."""
    for row in quick[1]["rows"]:
        assert row["true_peak_bytes"] > 1_000_000
        assert sum(row["peak"].values()) == row["peak_bytes"]
        assert abs(row["unattributed_share"]) < 0.001
        assert [len(rank["steps"]) for rank in row["ranks"]] == [4, 4]
        timed = [(rank["bare_seconds"], rank["watched_seconds"]) for rank in row["ranks"]]
        assert all(len(seconds) == 2 and 0 < min(seconds) < row["seconds"] for both in timed for seconds in both)
        assert 0.1 < row["slowdown"] < 10
        assert row["slowdown"] == pytest.approx(median(median(watched) / median(bare) for bare, watched in timed))


def test_environment_is_told(quick):
    """A table that somebody sends could not be compared with another."""
    import torch

    environment = quick[1]["environment"]
    assert (environment["torch"], environment["ranks"], environment["backend"]) == (torch.__version__, 2, "gloo")
    assert environment["device_name"]


def test_one_rank_is_enough(lone):
    """A machine with one device could validate nothing, or would pass rows that need two."""
    status, found = lone
    assert {row["name"]: row["status"] for row in found["rows"]} == LONE
    assert [row["problems"] for row in found["rows"] if row["status"] == "skipped"] == [["needs 2 ranks, there is 1"]]
    assert (status, found["environment"]["ranks"], found["remarks"]) == (0, 1, [])


def test_nothing_but_skipped_rows_is_no_success():
    """A script would take a host on which nothing could be validated for one that passed."""
    ended = validate("--ranks", "1", "--only", "tensor-parallel/*")
    assert (ended.returncode, ended.stderr) == (1, "")
    assert "5 skipped\nnothing was validated: every row was skipped\n" in ended.stdout


@pytest.mark.parametrize(
    ("asked", "num_gpus", "expected"),
    [
        (None, 2, Machine("cuda", 2)),
        (1, 2, Machine("cuda", 1)),
        (8, 2, Machine("cuda", 2, "there are 2 GPUs: 2 of 8 ranks are run")),
        (2, 1, Machine("cuda", 1, "there is one GPU: 1 of 2 ranks are run")),
    ],
)
def test_fewer_ranks_than_asked_for_are_said(monkeypatch, asked, num_gpus, expected):
    """The user would believe that eight ranks were validated on a machine with one GPU."""
    import torch

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: num_gpus)
    assert run.machine("cuda", asked) == expected


class Quiet:
    """Shows nothing."""

    def watching(self, _num_rows):
        return contextlib.nullcontext()

    def begins(self, name):
        pass

    def ended(self, outcome, /):
        pass

    def closes(self, summary):
        pass


@pytest.fixture(scope="module")
def mishaps() -> dict[str, RowOutcome]:
    """What rows that go wrong end as, by name."""
    options = run.Options(Machine("cpu", 2), bad_rows.ROWS, 2, 0.001, table="jobs.bad_rows")
    return {outcome.name: outcome for outcome in run.run(options, Quiet())}


@pytest.mark.slow
def test_a_row_that_raises_costs_itself_only(mishaps):
    """One broken row would end the run, or leave the next row a rank that waits for the last one."""
    assert (mishaps["raises"].status, mishaps["raises"].problems) == ("failed", ["rank 1: ValueError: no such luck"])
    assert "mishap_then_step" in mishaps["raises"].details
    assert mishaps["good-after-raising"].status == "ok"
    assert not run.is_right([mishaps["raises"]])


@pytest.mark.slow
def test_a_row_that_hangs_says_where(mishaps):
    """The run would hang, or the user not learn where."""
    assert mishaps["hangs"].status == "failed"
    (problem,) = mishaps["hangs"].problems
    assert problem.startswith("no end after 6 s: ")
    assert "rank 1 at " in problem
    assert "bad_rows.py:" in problem
    assert mishaps["hangs"].seconds < 30


@pytest.mark.slow
def test_a_row_that_dies_says_how(mishaps):
    """A crash of the process would look like a hang."""
    assert mishaps["dies"].problems == ["rank 1: the process died: SIGKILL"]


@pytest.mark.slow
def test_a_row_that_is_off_is_found(mishaps):
    """Bytes that the books do not know would pass."""
    off = mishaps["off"]
    assert (off.status, off.ratio < 0.95, off.unattributed_share > 0.05) == ("off", True, True)
    assert "peak" in off.problems[0]
    assert not run.is_right([off])


@pytest.mark.slow
def test_rows_that_cannot_run_are_skipped(mishaps):
    """A host that lacks something would fail, or pass for having been validated."""
    assert mishaps["unable"].problems == ["not on this host"]
    assert mishaps["wide"].problems == ["needs 4 ranks, there is 2"]
    assert {mishaps["unable"].status, mishaps["wide"].status} == {"skipped"}
    assert run.is_right([mishaps["unable"], mishaps["wide"], mishaps["good"]])


@pytest.mark.slow
def test_ranks_that_cannot_start_cost_once():
    """Each of a hundred rows would wait again for ranks that never come up, or not say why it was not run."""
    options = run.Options(Machine("cpu", 2), bad_rows.ROWS[:3], 2, 0.001, table="jobs.bad_rows")
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("GLOO_SOCKET_IFNAME", "no-such-interface")
        first, *others = run.run(options, Quiet())
    assert first.status == "failed"
    (problem,) = first.problems
    assert problem.startswith("the ranks cannot be started: rank ")
    assert [(one.status, one.problems, one.seconds < 1) for one in others] == [
        ("failed", [f"not run: {problem}"], True) for _ in others
    ]


def in_session(leader: int) -> list[int]:
    """The processes of a session."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, _, _, session = path.read_text().rpartition(")")[2].split()[:4]
        except (OSError, ValueError):  # it has just ended
            continue
        if int(session) == leader and state != "Z":
            found.append(int(path.parent.name))
    return found


@pytest.fixture
def running():
    """A run whose first row has been shown."""
    command = [*PROGRAM, "validate", "--device", "cpu", "--only", "fsdp2/*"]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    ) as process:
        shown = [process.stdout.readline() for _ in range(2)]
        assert "fsdp2/multi-group" in shown[1], (shown, process.stderr.read())
        assert len(in_session(process.pid)) >= 3
        yield process
        process.kill()


def wait_until_gone(leader: int) -> list[int]:
    deadline = time.monotonic() + 20
    while (left := in_session(leader)) and time.monotonic() < deadline:
        time.sleep(0.05)
    return left


@pytest.mark.slow
def test_interrupt_ends_everything(running):
    """A Ctrl-C would lose the rows so far, end in a traceback or leave processes behind."""
    os.killpg(running.pid, signal.SIGINT)
    out, err = running.communicate(timeout=30)
    assert (running.returncode, err) == (130, "")
    assert "; interrupted" in out
    assert wait_until_gone(running.pid) == []


@pytest.mark.slow
def test_workers_do_not_outlive_their_parent(running):
    """A run that was killed would leave its ranks computing for ever."""
    running.kill()
    running.wait()
    assert wait_until_gone(running.pid) == []


def test_arguments_that_make_no_sense(capsys):
    """A script would take a typo for a passed or a failed validation."""
    for arguments in (["--ranks", "0"], ["--steps", "1"], ["--tolerance", "nan"], ["--device", "tpu"]):
        with pytest.raises(SystemExit) as ended:
            cli.main(["validate", *arguments])
        assert ended.value.code == 2
    assert cli.main(["validate", "--only", "no such row"]) == 2
    assert "no row matches 'no such row'" in capsys.readouterr().err


def test_missing_device_is_said(capsys):
    """The user of a machine whose driver is broken would see a traceback, or validate the CPU unknowingly."""
    import torch

    if torch.cuda.is_available():
        pytest.skip("there is one")
    assert cli.main(["validate", "--device", "cuda"]) == 2
    assert capsys.readouterr().err == "torchmem: torch sees no CUDA device here\n"


def test_rows_can_be_listed(capsys):
    """The user would not know what there is to choose from."""
    assert cli.main(["validate", "--list", "--only", "ddp/*"]) == 0
    assert capsys.readouterr().out.splitlines() == [row.name for row in find(["ddp/*"])]


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("name", SLOW_ROWS)
def test_every_row_is_right(everything, name):
    """A way of training would be counted wrong: its peak, its lasting bytes, or a labeler that gave up."""
    row = everything[name]
    assert row["status"] == ("skipped" if name in NOT_HERE else "ok"), row["problems"]


@pytest.mark.slow
@pytest.mark.parametrize("name", [row.name for row in find(WIDE)])
def test_rows_on_two_dimensions_of_ranks_are_right(wide, name):
    """Hybrid sharding or tensor parallelism would be right only where a dimension has one rank."""
    assert wide[name]["status"] == "ok", wide[name]["problems"]


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_cuda_rows_are_right():
    """The acceptance test of a GPU machine would fail there."""
    ended = subprocess.run([*PROGRAM, "validate", "--device", "cuda"], capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stdout
