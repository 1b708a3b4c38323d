"""Alerts on ranks: which are missing, silent, or unlike their peers."""

from __future__ import annotations

from generator.model import Alert, Check, Runbook, Severity
from generator.query import JOB, Levels, select
from generator.recordings import RANK_INFO, RANK_STEP_PEAK
from generator.settings import Settings
from torchmem_exporter import catalog


def alerts(settings: Settings) -> tuple[Alert, ...]:
    """All of them."""
    return (ranks_missing(settings), snapshot_stale(settings), rank_skew(settings))


def ranks_missing(settings: Settings) -> Alert:
    """Fewer ranks live than the job is meant to have, and those that do not have not ended cleanly."""
    to = Levels(settings)
    # Where sidecars disagree, as for a while after an elastic restart, the smallest size counts. A rank that ended
    # cleanly is told of for two scrapes only, so it is remembered; its end must not be older than the job that runs
    # now. Without a single rank the count is no zero but missing.
    size = f"min by ({to.job}) ({select(catalog.WORLD_SIZE)})"
    exited = (
        f"max by ({to.rank}) (last_over_time({select(catalog.RANK_STATE, settings.exit_memory, state='exited')})) == 1"
    )
    crashed = f"{select(catalog.RANK_STATE, state='crashed')} == 1"
    ended_at = f"max by ({to.rank}) (last_over_time({select(catalog.SNAPSHOT_TIMESTAMP, settings.exit_memory)}))"
    began = f"min by ({to.job}) ({select(catalog.START_TIMESTAMP)})"
    book = Runbook(
        meaning="Fewer ranks are alive, or have ended cleanly, than the job is meant to have. Collective "
        "operations of the "
        "others wait for them until they time out.",
        confirm=(
            Check(
                what="Ranks that crashed:", query=f"{select(catalog.RANK_STATE, train_job=JOB, state='crashed')} == 1"
            ),
            Check(what="Where they ran:", query=f"{select(catalog.RANK_INFO, train_job=JOB)}"),
            Check(
                what="Ranks that are told of:", query=f"sum by (train_job) ({select(catalog.RANK_UP, train_job=JOB)})"
            ),
            Check(what="What they left, on their host:", command=f"torchmem post-mortem --job {JOB}"),
        ),
        act=(
            "A rank crashed: its post-mortem says whether memory was the reason; else look at the job's own log.",
            (
                "A rank is not told of at all: is its host up, does a sidecar run there, and is it scraped "
                "(TorchMemExporterDown)?"
            ),
            "A rank never began: did it import torchmem and call `install`, with the same `train_job`?",
        ),
        false_when=(
            (
                "Ranks ended cleanly longer ago than they are remembered, while others go on, as with an evaluation on "
                "rank 0."
            ),
            ("Two Prometheus servers share one sidecar: each may miss one of the two scrapes that show a clean end."),
            "Only some ranks are meant to be watched.",
        ),
    )
    return Alert(
        name="TorchMemRanksMissing",
        severity=Severity.CRITICAL,
        expr=(
            f"{size}\n"
            "-\n"
            "(\n"
            f"    count by ({to.job}) (\n"
            f"        max by ({to.rank}) ({select(catalog.RANK_UP)}) == 1\n"
            "      or\n"
            "        (\n"
            f"            ({ended_at} >= on ({to.job}) group_left () {began})\n"
            f"          and on ({to.rank})\n"
            f"            {exited}\n"
            f"          unless on ({to.rank})\n"
            f"            {crashed}\n"
            "        )\n"
            "    )\n"
            "  or\n"
            f"    0 * {size}\n"
            ")\n"
            "> 0"
        ),
        hold=settings.holds["TorchMemRanksMissing"],
        summary="{{ $labels.train_job }}: {{ $value }} rank(s) missing",
        description="They neither live nor have ended cleanly; the others will wait for them.",
        details={
            "ranks": to.listing(
                f"topk(10, max by (rank) ({to.of_this_job(catalog.RANK_STATE, state='crashed')}) == 1)",
                "rank {{ .Labels.rank }} crashed",
                "none told of as crashed: never begun, or nobody tells",
                by_label="rank",
            ),
        },
        settings=("exit_memory",),
        runbook=book,
    )


def snapshot_stale(settings: Settings) -> Alert:
    """A rank lives and writes no records."""
    to = Levels(settings)
    stale = f"max by ({to.rank}) ({select(catalog.RANK_STATE, state='stale')}) == 1"
    ours = f"topk(10, max by (rank) ({to.of_this_job(catalog.RANK_STATE, state='stale')}) == 1)"
    book = Runbook(
        meaning="A rank's process holds its lock, so it lives, but its record is old (`--stale-after` of the "
        "sidecar, 60 s "
        "unless set). Records are written by a thread of their own, also between steps: the process is stopped, stuck "
        "with the interpreter's lock held, or cannot write. After 10 minutes its memory series are dropped.",
        confirm=(
            Check(
                what="Age of the records, in seconds:",
                query=f"topk(8, time() - {select(catalog.SNAPSHOT_TIMESTAMP, train_job=JOB)})",
            ),
            Check(
                what="Whether steps still finish:",
                query=f"rate({select(catalog.STEPS, '5m', train_job=JOB)})",
            ),
            Check(what="Host and process:", query=select(catalog.RANK_INFO, train_job=JOB)),
            Check(what="What it said last, on its host:", command=f"torchmem show --job {JOB}"),
        ),
        act=(
            (
                "Look at the process: `py-spy dump --pid PID`; state `T` in `ps` is a stopped one, `D` hangs in the "
                "kernel."
            ),
            "Is the file system of the records full? The job's log has one line about it.",
            "If it is hung in a collective, find the rank that is not: its step number is behind.",
        ),
        false_when=(
            "The process was stopped on purpose, as by a debugger or a scheduler that suspends jobs.",
            "The record is unreadable: TorchMemSnapshotRejected fires too.",
        ),
    )
    return Alert(
        name="TorchMemSnapshotStale",
        severity=Severity.WARNING,
        expr=f"count by ({to.job}) ({stale})",
        hold=settings.holds["TorchMemSnapshotStale"],
        summary="{{ $labels.train_job }}: {{ $value }} rank(s) live but tell nothing",
        description="The process is stopped or stuck, or cannot write its record.",
        details={"ranks": to.listing(ours, "rank {{ .Labels.rank }}", "gone by now", by_label="rank")},
        runbook=book,
    )


def rank_skew(settings: Settings) -> Alert:
    """A rank takes more than those that do the same work."""
    to = Levels(settings)
    # Ranks that differ in their data only, not in their stage or shard of the model, should take the same.
    peers = f"{to.job}, tp, pp"
    placed = (
        f"avg_over_time({RANK_STEP_PEAK}[{settings.skew_window}])\n"
        f"    * on ({to.rank}) group_left (tp, pp)\n"
        f"    {RANK_INFO}"
    )
    median = f"quantile by ({peers}) (0.5,\n    {placed}\n  )"
    highest = f"max by ({peers}) (\n    {placed}\n  )"
    ours = f"avg_over_time({to.recorded_of_this_job(RANK_STEP_PEAK)}[{settings.skew_window}])"
    info = to.recorded_of_this_job(RANK_INFO)
    where = f"{ours} * on (rank) group_left (dp, tp, pp) {info}"
    book = Runbook(
        meaning="Within one coordinate of tensor and pipeline parallelism ranks differ in their data only, and "
        "should take "
        "the same memory. One takes clearly more than the median of its peers, averaged over the window. It will be "
        "the first to run out, and holds the others up if it swaps or retries.",
        confirm=(
            Check(
                what="Step peaks beside the ranks' coordinates:",
                query=f'sort_desc({RANK_STEP_PEAK}{{train_job="{JOB}"}} * on (rank) group_left (dp, tp, pp) '
                f'{RANK_INFO}{{train_job="{JOB}"}})',
            ),
            Check(
                what="What differs, by purpose:",
                query=f"max by (reftype) ({select(catalog.STEP_PEAK, train_job=JOB)})"
                f" - min by (reftype) ({select(catalog.STEP_PEAK, train_job=JOB)})",
            ),
            Check(what="The heavy rank on its host:", command=f"torchmem show --job {JOB} --rank N"),
        ),
        act=(
            "`activation` differs: batches are unevenly long; shuffle or pack them across ranks.",
            "`parameter` or `optimizer_state` differs: sharding is uneven, as of one large embedding.",
            "`checkpoint` or `other` differs on rank 0: state is gathered or logged there.",
            "`expert`-like modules differ: routing is unbalanced.",
        ),
        false_when=(
            "The mesh is not known (`dp`, `tp`, `pp` are empty) and the job is a pipeline: stages differ by nature.",
            "Two peers only: their median is their mean, so one must take 1.5 times the other.",
        ),
    )
    return Alert(
        name="TorchMemRankSkew",
        severity=Severity.WARNING,
        expr=(
            f"max by ({to.job}) (\n"
            f"  {highest}\n"
            "  /\n"
            f"  ({median} > 0)\n"
            f"  and\n"
            f"  {highest} - {median} > {settings.min_skew_bytes}\n"
            f") > {settings.max_skew_ratio}"
        ),
        hold=settings.holds["TorchMemRankSkew"],
        summary='{{ $labels.train_job }}: a rank takes {{ $value | printf "%.2f" }} times what its peers do',
        description="Ranks that differ in their data only should take the same memory.",
        details={
            "ranks": to.listing(
                f"sort_desc(topk(3, max by (rank, dp, tp, pp) ({where})))",
                "rank {{ .Labels.rank }} (dp {{ .Labels.dp }}, tp {{ .Labels.tp }}, pp {{ .Labels.pp }})"
                " {{ .Value | humanize1024 }}B",
                "gone by now",
            ),
        },
        settings=("max_skew_ratio", "min_skew_bytes", "skew_window"),
        runbook=book,
    )
