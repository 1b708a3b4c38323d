"""Alerts on the watching itself: sidecars, records, labelers, and what it costs."""

from __future__ import annotations

from generator.model import Alert, Check, Runbook, Severity
from generator.query import JOB, SCRAPE_LABELS, UP, Levels, select
from generator.recordings import JOB_OVERHEAD
from generator.settings import Settings
from torchmem_exporter import catalog


def alerts(settings: Settings) -> tuple[Alert, ...]:
    """All of them."""
    return (exporter_down(settings), snapshot_rejected(settings), labeler_down(settings), overhead_high(settings))


def exporter_down(settings: Settings) -> Alert:
    """A sidecar that told of living ranks cannot be scraped."""
    to = Levels(settings)
    target = ", ".join(SCRAPE_LABELS)
    last = f"last_over_time({select(catalog.RANK_UP, settings.exporter_memory)})"
    ours = f"last_over_time({to.of_this_job(catalog.RANK_UP)}[{settings.exporter_memory}])"
    book = Runbook(
        meaning="Prometheus cannot scrape a sidecar that told of living ranks the last time. The job itself may "
        "be fine; "
        "nothing is known about its memory on that host, and no other alert can fire for it.",
        confirm=(
            Check(
                what="Targets that fail:",
                query=f"{UP} == 0 and on ({target}) last_over_time({select(catalog.RANK_UP, '2h', train_job=JOB)})",
            ),
            Check(what="Whether the sidecar answers, on its host:", command="curl -sS http://127.0.0.1:20471/readyz"),
            Check(what="Whether the ranks still write, on that host:", command=f"torchmem show --job {JOB}"),
        ),
        act=(
            "The host is gone: TorchMemRanksMissing follows where other hosts of the job are left.",
            "The sidecar has ended: its log's last line says why; start it again. It loses nothing that records hold.",
            "It answers on its host only: look at the listening address, certificates and credentials of both sides.",
            "The scrape times out or is over `sample_limit`: choose a lower `--level`.",
        ),
        false_when=(
            (
                "The sidecar lives as long as its job, its target is listed statically, and the job has ended since "
                "the last "
                "scrape."
            ),
            "A sidecar that was never scraped, and one that pushes by OTLP, is not covered: `up` says nothing of it.",
        ),
    )
    return Alert(
        name="TorchMemExporterDown",
        severity=Severity.CRITICAL,
        expr=(
            f"count by ({to.job}) (\n"
            f"  count by ({to.job}, {target}) (\n"
            f"      {last} == 1\n"
            f"    and on ({target})\n"
            f"      {UP} == 0\n"
            f"    unless on ({to.rank})\n"
            f"      {select(catalog.RANK_UP)} == 1\n"
            "  )\n"
            ")"
        ),
        hold=settings.holds["TorchMemExporterDown"],
        summary="{{ $labels.train_job }}: {{ $value }} sidecar(s) down",
        description="Nothing is known about the memory of their ranks.",
        details={
            "targets": to.listing(
                f"topk(5, count by ({target}) ({ours} == 1 and on ({target}) {UP} == 0))",
                "{{ .Labels.instance }} ({{ .Value }} ranks)",
                "up by now",
            ),
        },
        settings=("exporter_memory",),
        runbook=book,
    )


def snapshot_rejected(settings: Settings) -> Alert:
    """Records cannot be used."""
    window = settings.rejected_window
    above = [label for label in settings.job_labels if label not in catalog.WORLD_SIZE.labels]
    level = ", ".join([*above, "reason"])
    told = f"sum by (instance) (increase({catalog.SNAPSHOT_ERRORS.prometheus_name}{{reason=%q}}[{window}]))"
    listing = (
        f"{{{{ range $i, $x := query (printf `sort_desc(topk(5, {told} > 0))` $labels.reason) }}}}"
        "{{ if $i }}, {{ end }}{{ .Labels.instance }}{{ else }}gone by now{{ end }}"
    )
    book = Runbook(
        meaning="A sidecar finds files that it cannot use as records, scrape after scrape. The ranks they belong "
        "to are not "
        "told of, or with their last good record; the other ranks are not affected. It is the sidecar that counts, so "
        "the alert names a reason and no job.",
        confirm=(
            Check(
                what="Which sidecars, and why:",
                query=f"sum by (instance, reason) (increase({select(catalog.SNAPSHOT_ERRORS, window)})) > 0",
            ),
            Check(what="Versions in use:", query=f"count by (version) ({select(catalog.BUILD_INFO)})"),
            Check(what="The same files, as the command line reads them:", command="torchmem show"),
        ),
        act=(
            (
                "`version`: ranks and sidecar are of releases whose records differ in their major version: bring both "
                "to the same. Within a major version either may be the newer."
            ),
            (
                "`uid`, `symlink`, `hard_link`, `not_regular`, `open`: something else writes there, or permissions are "
                "wrong. Find out who does."
            ),
            "`truncated`, `checksum`: the file system is full, or broken.",
            "`identity`, `duplicate`: two ranks write under one name; look at how the job sets `train_job` and ranks.",
            (
                "`directory`: the sidecar's directory may not be read, or a job's folder belongs to another user than "
                "the one the sidecar runs as."
            ),
            "`schema`, `books`, `sums`, `values`: keep the file, delete it from the directory, and report it.",
        ),
        false_when=("A leftover of a crashed writer: delete the file.",),
    )
    return Alert(
        name="TorchMemSnapshotRejected",
        severity=Severity.WARNING,
        expr=f"sum by ({level}) (increase({select(catalog.SNAPSHOT_ERRORS, window)})) > 0",
        hold=settings.holds["TorchMemSnapshotRejected"],
        summary="Records are rejected: {{ $labels.reason }}",
        description="The ranks they belong to are not told of, or not as they are now.",
        details={"targets": listing},
        settings=("rejected_window",),
        runbook=book,
    )


def labeler_down(settings: Settings) -> Alert:
    """A part that names memory has failed and is off."""
    to = Levels(settings)
    ours = f"max by (rank) ({to.of_this_job(catalog.LABELER_UP)} == 0)"
    book = Runbook(
        meaning="A part of torchmem that names memory failed in the training process and was switched off; the "
        "training goes "
        "on. What it named counts as `other`, or as what other labelers take it for: totals stay right.",
        confirm=(
            Check(
                what="Which, and on how many ranks:",
                query=f"count by (labeler) ({select(catalog.LABELER_UP, train_job=JOB)} == 0)",
            ),
            Check(
                what="Since when bytes have lost their name:",
                query=f"sum by (rank) ({select(catalog.STEP_PEAK, train_job=JOB, reftype='other')})",
            ),
            Check(what="The reason, in the record:", command=f"torchmem show --job {JOB} --json"),
        ),
        act=(
            "Read the reason; it names the exception. The job's log has its traceback.",
            (
                "Labeler `forecast`: nothing has lost its name; the file that `TORCHMEM_FORECAST` names cannot be "
                "used, and the reason says what to do."
            ),
            "After an upgrade of torch: is this torch among those that `torchmem validate` passes with?",
            "Restart the job to have the labeler back, and report the reason.",
        ),
        false_when=("The job uses none of what the labeler names.",),
    )
    return Alert(
        name="TorchMemLabelerDown",
        severity=Severity.WARNING,
        expr=(
            f"count by ({to.job}, labeler) (\n"
            f"  max by ({to.rank}, labeler) (\n"
            f"    {select(catalog.LABELER_UP)} == 0 and ignoring (labeler) {select(catalog.RANK_UP)} == 1\n"
            "  )\n"
            ")"
        ),
        hold=settings.holds["TorchMemLabelerDown"],
        summary="{{ $labels.train_job }}: labeler {{ $labels.labeler }} is off on {{ $value }} rank(s)",
        description="What it named counts as other; totals stay right.",
        details={
            "ranks": to.listing(f"topk(10, {ours} + 1)", "rank {{ .Labels.rank }}", "gone by now", by_label="rank")
        },
        runbook=book,
    )


def overhead_high(settings: Settings) -> Alert:
    """Watching takes too much of the step time."""
    to = Levels(settings)
    window = settings.overhead_window
    ours = (
        f"sum by (rank) (rate({to.of_this_job(catalog.TRACKER_TIME)}[{window}]))"
        f" / (sum by (rank) (rate({to.of_this_job(catalog.STEP_TIME)}[{window}])) > 0)"
    )
    book = Runbook(
        meaning="torchmem takes more of the training's time than it should: usually under 0.02 of a step.",
        confirm=(
            Check(
                what="The share, by rank:",
                query=f"topk(8, rate({select(catalog.TRACKER_TIME, window, train_job=JOB)})"
                f" / rate({select(catalog.STEP_TIME, window, train_job=JOB)}))",
            ),
            Check(
                what="Seconds a step takes:",
                query=f"rate({select(catalog.STEP_TIME, window, train_job=JOB)})"
                f" / rate({select(catalog.STEPS, window, train_job=JOB)})",
            ),
            Check(what="Which engine counts:", query=f"count by (engine) ({select(catalog.RANK_INFO, train_job=JOB)})"),
        ),
        act=(
            "The `engine` is not `native`: the tap could not be built on that host; see `torchmem build`.",
            "Steps are very short and modules very many: watch fewer levels (`depth` of `install`).",
        ),
        false_when=("A profiler or a debugger slows the whole process down.",),
    )
    return Alert(
        name="TorchMemOverheadHigh",
        severity=Severity.WARNING,
        expr=f"{JOB_OVERHEAD} > {settings.max_overhead_ratio}",
        hold=settings.holds["TorchMemOverheadHigh"],
        summary="{{ $labels.train_job }}: watching takes {{ $value | humanizePercentage }} of the step time",
        description="It should take under two percent.",
        details={
            "ranks": to.listing(
                f"sort_desc(topk(3, {ours}))",
                "rank {{ .Labels.rank }} {{ .Value | humanizePercentage }}",
                "gone by now",
            ),
        },
        settings=("max_overhead_ratio", "overhead_window"),
        runbook=book,
    )
