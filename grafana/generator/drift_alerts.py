"""Alerts on judgements made in the sidecar: drift, leaks, the end of the memory, the forecast.

Invariant: what is not known yet, as a baseline during warm-up, has no series and so no alert.
"""

from __future__ import annotations

from generator.model import Alert, Check, Runbook, Severity
from generator.query import JOB, Levels, select
from generator.settings import Settings
from torchmem_exporter import catalog


def alerts(settings: Settings) -> tuple[Alert, ...]:
    """All of them."""
    return (peak_drift(settings), leak_suspected(settings), exhaustion_predicted(settings), forecast_missed(settings))


def _growers_check() -> Check:
    excess = select(catalog.MODULE_EXCESS, train_job=JOB)
    return Check(what="Who grew, and for what:", query=f"topk(5, max by (module, reftype) ({excess}) > 0)")


def peak_drift(settings: Settings) -> Alert:
    """Step peaks lie over the baseline."""
    to = Levels(settings)
    ratio, ours = select(catalog.DRIFT_RATIO), to.of_this_job(catalog.DRIFT_RATIO)
    book = Runbook(
        meaning="Steps peak higher than they did when this attempt had warmed up, by more than they vary: the `level` "
        "detector, which compares medians and leaves steps with a checkpoint or an evaluation out.",
        confirm=(
            Check(
                what="How far over the baseline, on which ranks:",
                query=f"topk(8, {select(catalog.DRIFT_RATIO, train_job=JOB)})",
            ),
            Check(what="Since when:", query=f"sum by (rank, device) ({select(catalog.STEP_PEAK, train_job=JOB)})"),
            _growers_check(),
            Check(
                what="The composition of the peak now, on the host of such a rank:",
                command=f"torchmem show --job {JOB}",
            ),
        ),
        act=(
            (
                "`activation` grew on all ranks: look for longer sequences, a larger batch, or activation "
                "checkpointing turned "
                "off by a change of configuration."
            ),
            (
                "`unsharded_gradient` or `unsharded_parameter` grew: look for a `no_sync` left on, or a module no "
                "longer resharded after its forward."
            ),
            "`optimizer_state` grew: parameters were unfrozen, or states are kept in more precision.",
            "It keeps growing: treat it as TorchMemLeakSuspected.",
            "It was meant: restart, or let the baseline be taken anew; each attempt has its own.",
        ),
        false_when=(
            (
                "The input became larger on purpose, as in a curriculum, and the job does not tell its sizes "
                "(`Monitor.step(tokens=...)`)."
            ),
            "The baseline was taken while parts of the model were not in use yet.",
        ),
    )
    return Alert(
        name="TorchMemPeakDrift",
        severity=Severity.WARNING,
        expr=(
            f"max by ({to.job}) (\n"
            f"    {ratio} > {settings.min_drift_ratio}\n"
            f"  and on ({to.device})\n"
            f"    {select(catalog.DRIFTING, detector='level')} == 1\n"
            ")"
        ),
        hold=settings.holds["TorchMemPeakDrift"],
        summary="{{ $labels.train_job }}: step peak {{ $value | humanizePercentage }} over its baseline",
        description="Steps peak higher than after warm-up, by more than they vary.",
        details={"growers": to.growers(), "ranks": to.worst(f"{ours} > 0")},
        settings=("min_drift_ratio",),
        runbook=book,
    )


def leak_suspected(settings: Settings) -> Alert:
    """The bytes that stay between steps keep growing."""
    to = Levels(settings)
    floor = f"{to.of_this_job(catalog.DRIFTING, detector='floor')} == 1"
    rate = f"{to.of_this_job(catalog.GROWTH)} and on (rank, device) {floor}"
    per_second = "rank {{ .Labels.rank }} {{ .Labels.device }} {{ .Value | humanize1024 }}B/s"
    book = Runbook(
        meaning="Bytes alive at the *ends* of steps, where activations are gone, keep growing: the `floor` detector. "
        "Something is kept from step to step.",
        confirm=(
            Check(
                what="Ranks that grow, in bytes a second:",
                query=f"topk(8, {select(catalog.GROWTH, train_job=JOB)} and on (rank, device) "
                f"{select(catalog.DRIFTING, train_job=JOB, detector='floor')} == 1)",
            ),
            Check(
                what="What stays between steps, by purpose:",
                query=f"max by (reftype) ({select(catalog.USAGE, train_job=JOB)})",
            ),
            _growers_check(),
            Check(
                what="Who holds it between steps, on the host of such a rank:",
                command=f"torchmem show --job {JOB} --usage",
            ),
            Check(what="Against a record that was kept earlier:", command="torchmem diff EARLIER.record LATER.record"),
        ),
        act=(
            (
                "`activation` of one module: look for a list or a metric that keeps its outputs; keep `.detach()`ed "
                "copies, "
                "or numbers."
            ),
            "`activation` of `(outside modules)`: the loss, kept with its graph; add up `loss.item()` instead.",
            "`gradient` or `unsharded_gradient`: gradients are not set to none, or `no_sync` was left on.",
            "`optimizer_state`: look for states made for new parameters at each step.",
            "Save a checkpoint before the time that TorchMemExhaustionPredicted names, and restart.",
        ),
        false_when=(
            "A cache is still filling, as of buckets of lengths or of compiled graphs: growth slows down and ends.",
            "Only `cpu` grows on a job with accelerators, and the host has plenty: data-loading caches.",
        ),
    )
    return Alert(
        name="TorchMemLeakSuspected",
        severity=Severity.WARNING,
        expr=(f"count by ({to.job}) (\n  max by ({to.device}) ({select(catalog.DRIFTING, detector='floor')}) == 1\n)"),
        hold=settings.holds["TorchMemLeakSuspected"],
        summary="{{ $labels.train_job }}: memory kept between steps keeps growing on {{ $value }} device(s)",
        description="Bytes alive at the ends of steps have grown in every part of the window.",
        details={
            "growers": to.growers(),
            "ranks": to.listing(f"sort_desc(topk(3, max by (rank, device) ({rate})))", per_second, "gone by now"),
        },
        runbook=book,
    )


def exhaustion_predicted(settings: Settings) -> Alert:
    """At its growth the device will be full soon."""
    to = Levels(settings)
    floor = f"{select(catalog.DRIFTING, detector='floor')} == 1"
    ours = (
        f"{to.of_this_job(catalog.EXHAUSTION)} - time() and on (rank, device) "
        f"{to.of_this_job(catalog.DRIFTING, detector='floor')} == 1"
    )
    soon = "rank {{ .Labels.rank }} {{ .Labels.device }} in {{ .Value | humanizeDuration }}"
    book = Runbook(
        meaning="Memory kept between steps grows, and at the present slope the device is full within the time below. "
        "The job will then fail with an out-of-memory error.",
        confirm=(
            Check(
                what="Seconds left, the worst first:",
                query=f"sort(min by (rank, device) ({select(catalog.EXHAUSTION, train_job=JOB)} - time()))",
            ),
            Check(
                what="Share of the device in use at the peak:",
                query=f'device:torchmem_memory_filled_ratio:max{{train_job="{JOB}"}}',
            ),
            _growers_check(),
            Check(what="Who holds it, on that rank's host:", command=f"torchmem show --job {JOB} --usage"),
        ),
        act=(
            "Save a checkpoint now, while the job lives.",
            "Find who grows: see TorchMemLeakSuspected.",
            "Restart from the checkpoint: a leak begins anew from the baseline, which wins time to repair it.",
        ),
        false_when=(
            (
                "Growth is about to end, as of a cache that is nearly full; the predicted time then moves away with "
                "each scrape."
            ),
        ),
    )
    return Alert(
        name="TorchMemExhaustionPredicted",
        severity=Severity.CRITICAL,
        expr=(
            f"min by ({to.job}) (\n"
            f"    {select(catalog.EXHAUSTION)} - time()\n"
            f"  and on ({to.device})\n"
            f"    {floor}\n"
            f") < {settings.exhaustion_seconds}"
        ),
        hold=settings.holds["TorchMemExhaustionPredicted"],
        summary="{{ $labels.train_job }}: a device is full in {{ $value | humanizeDuration }} at the present growth",
        description="The job fails then, unless the growth ends. Save a checkpoint.",
        details={
            "growers": to.growers(),
            "ranks": to.listing(f"sort(bottomk(3, min by (rank, device) ({ours})))", soon, "gone by now"),
        },
        settings=("exhaustion_seconds",),
        runbook=book,
    )


def forecast_missed(settings: Settings) -> Alert:
    """The job takes more than was forecast."""
    to = Levels(settings)
    book = Runbook(
        meaning="Steps peak higher than was forecast before the job began, so whatever was sized by that "
        "forecast is too "
        "small.",
        confirm=(
            Check(
                what="How far over the forecast:",
                query=f"topk(8, {select(catalog.FORECAST_DRIFT_RATIO, train_job=JOB)})",
            ),
            Check(what="The forecast, in bytes:", query=f"max by (device) ({select(catalog.FORECAST, train_job=JOB)})"),
            Check(what="What the peak is made of:", command=f"torchmem show --job {JOB} --by reftype"),
        ),
        act=(
            (
                "Compare what was forecast with what runs: batch size, sequence length, precision, activation "
                "checkpointing, "
                "sharding degree."
            ),
            "If headroom is left, forecast anew with the configuration that runs.",
            "If not, see TorchMemHeadroomLow.",
        ),
        false_when=(
            "The forecast was made for another configuration, and the job has the memory.",
            "Compiled or fused operations keep other intermediates than the forecast's eager ones.",
            "Checkpoints or evaluations hold more than a training step, and come so often that one is always recent.",
        ),
    )
    return Alert(
        name="TorchMemForecastMissed",
        severity=Severity.WARNING,
        expr=f"max by ({to.job}) ({select(catalog.FORECAST_DRIFT_RATIO)}) > {settings.max_forecast_ratio}",
        hold=settings.holds["TorchMemForecastMissed"],
        summary="{{ $labels.train_job }}: step peak {{ $value | humanizePercentage }} over its forecast",
        description="The job takes more memory than it was sized for.",
        details={"ranks": to.worst(f"{to.of_this_job(catalog.FORECAST_DRIFT_RATIO)} > 0")},
        settings=("max_forecast_ratio",),
        runbook=book,
    )
