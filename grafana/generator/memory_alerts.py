"""Alerts on what fills the devices now: headroom, failures, fragmentation, bytes without a name, checkpoints."""

from __future__ import annotations

from generator.model import Alert, Check, Runbook, Severity
from generator.query import JOB, Levels, select
from generator.recordings import DEVICE_FILLED, HOST_FILLED, JOB_FILLED, capacity
from generator.settings import Settings
from torchmem_exporter import catalog


def alerts(settings: Settings) -> tuple[Alert, ...]:
    """All of them."""
    return (
        headroom_low(settings),
        out_of_memory(settings),
        allocator_retries(settings),
        fragmentation_high(settings),
        unattributed_high(settings),
        checkpoint_peak_high(settings),
    )


def headroom_low(settings: Settings) -> Alert:
    """A device is nearly full at the step peak."""
    to = Levels(settings)
    devices = to.recorded_of_this_job(DEVICE_FILLED)
    hosts = to.recorded_of_this_job(HOST_FILLED)
    host_ratio = "host {{ .Labels.host }} {{ .Value | humanizePercentage }}"
    book = Runbook(
        meaning="At the peak of its steps a device is nearly full: what the books name, what they cannot name, "
        "and what is "
        "used outside torch's allocator, over the capacity. A longer batch or some fragmentation ends in an "
        "out-of-memory error. For the CPU, all ranks of the job on a host count together, against the smaller of the "
        "host's memory and the control group's limit.",
        confirm=(
            Check(what="The fullest devices:", query=f'topk(8, {DEVICE_FILLED}{{train_job="{JOB}"}})'),
            Check(what="The fullest hosts:", query=f'topk(8, {HOST_FILLED}{{train_job="{JOB}"}})'),
            Check(
                what="What the peak is made of:", query=f"max by (reftype) ({select(catalog.STEP_PEAK, train_job=JOB)})"
            ),
            Check(what="Bytes used by others on the device:", query=f"topk(8, {select(catalog.OTHER, train_job=JOB)})"),
            Check(what="By module, on that rank's host:", command=f"torchmem show --job {JOB}"),
        ),
        act=(
            (
                "`activation` dominates: more activation checkpointing, shorter sequences, a smaller batch with "
                "accumulation."
            ),
            "`optimizer_state`, `parameter` or `gradient` dominates: shard over more ranks, or offload.",
            (
                "Much is used by others: look for a second process on the device (`nvidia-smi`) and for communicators "
                "that are no longer used."
            ),
            "It came during the run: see TorchMemPeakDrift.",
        ),
        false_when=(
            (
                "The job always runs like this, its shapes are fixed, and it neither retries nor fails: raise the "
                "threshold."
            ),
        ),
    )
    return Alert(
        name="TorchMemHeadroomLow",
        severity=Severity.CRITICAL,
        expr=f"{JOB_FILLED} > {settings.max_filled_ratio}",
        hold=settings.holds["TorchMemHeadroomLow"],
        summary="{{ $labels.train_job }}: {{ $value | humanizePercentage }} of a device is in use at the step peak",
        description="The next larger batch may not fit.",
        details={
            "ranks": to.worst(devices, "no accelerator"),
            "hosts": to.listing(f"sort_desc(topk(3, {hosts}))", host_ratio, "not known"),
        },
        settings=("max_filled_ratio",),
        runbook=book,
    )


def out_of_memory(settings: Settings) -> Alert:
    """An allocation has failed."""
    to = Levels(settings)
    count = select(catalog.OOMS)
    window, memory = settings.oom_window, settings.oom_memory
    book = Runbook(
        meaning="An allocation failed for lack of memory. Most jobs die of it; the record of the attempt is "
        "kept, with who "
        "held what at that instant.",
        confirm=(
            Check(
                what="Failures by rank and device:",
                query=f"sum by (rank, device) (increase({select(catalog.OOMS, '1h', train_job=JOB)})) > 0",
            ),
            Check(
                what="Who held the memory, and who asked for more, on that rank's host:",
                command=f"torchmem post-mortem --job {JOB} --last 4",
            ),
            Check(
                what="The device before it failed, as a share of its capacity:",
                query=f'max_over_time({DEVICE_FILLED}{{train_job="{JOB}"}}[1h])',
            ),
        ),
        act=(
            (
                "The post-mortem names what was asked for: compare it with what was free. Far more than usual: look "
                "at that "
                "batch."
            ),
            "Reserved but not allocated bytes would have sufficed: see TorchMemFragmentationHigh.",
            "The floor had been growing: see TorchMemLeakSuspected.",
            "It failed in the first steps: the job does not fit; see TorchMemHeadroomLow for what to change.",
        ),
        false_when=(
            "The job probes for its largest batch, catching the error. The counter cannot tell that apart.",
            (
                "Prometheus was down for longer than its memory below, and an attempt began meanwhile on a rank that "
                "had failed long before."
            ),
        ),
    )
    # A counter that is first seen above zero has no increase, yet a job may fail before its first scrape. It is told
    # apart from an old count, which outlives attempts, by the age of the series and of the attempt.
    return Alert(
        name="TorchMemOutOfMemory",
        severity=Severity.CRITICAL,
        expr=(
            f"sum by ({to.job}) (\n"
            f"    increase({select(catalog.OOMS, window)}) > 0\n"
            "  or\n"
            f"    (\n"
            f"        ({count} > 0 unless last_over_time({count}[{memory}] offset {window}))\n"
            f"      and on ({to.rank})\n"
            f"        time() - {select(catalog.START_TIMESTAMP)} < {_seconds(window)}\n"
            "    )\n"
            ")"
        ),
        hold=settings.holds["TorchMemOutOfMemory"],
        summary="{{ $labels.train_job }}: out of memory",
        description=f"Allocations failed within the last {window}.",
        details={
            "ranks": to.listing(
                f"sort_desc(topk(3, max by (rank, device) ({to.of_this_job(catalog.OOMS)} > 0)))",
                "rank {{ .Labels.rank }} {{ .Labels.device }} ({{ .Value }} over all attempts)",
                "gone by now",
            ),
        },
        settings=("oom_window", "oom_memory"),
        runbook=book,
    )


def allocator_retries(settings: Settings) -> Alert:
    """The allocator gives its cache back, again and again."""
    to = Levels(settings)
    window = settings.retries_window
    ours = f"increase({to.of_this_job(catalog.RETRIES)}[{window}])"
    book = Runbook(
        meaning="Allocations succeeded only after the allocator had given its cached blocks back to the device. "
        "Each such "
        "retry synchronises the device and costs milliseconds to seconds; it is the last stop before an "
        "out-of-memory error.",
        confirm=(
            Check(
                what="Retries by rank:",
                query=f"topk(8, sum by (rank) (increase({select(catalog.RETRIES, window, train_job=JOB)})))",
            ),
            Check(what="Reserved bytes:", query=f"max by (rank, device) ({select(catalog.RESERVED, train_job=JOB)})"),
            Check(what="Fragmentation:", query=f"topk(8, {select(catalog.FRAGMENTATION, train_job=JOB)})"),
        ),
        act=(
            "Set `PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True` if fragmentation is high.",
            "Else win headroom: see TorchMemHeadroomLow.",
            "If other processes use the device, end them, or cap them.",
        ),
        false_when=("The job calls `torch.cuda.empty_cache()` or probes for its largest batch.",),
    )
    return Alert(
        name="TorchMemAllocatorRetries",
        severity=Severity.WARNING,
        expr=(
            f"max by ({to.job}) (\n"
            f"  sum by ({to.rank}) (increase({select(catalog.RETRIES, window)}))\n"
            f") > {settings.max_retries}"
        ),
        hold=settings.holds["TorchMemAllocatorRetries"],
        summary='{{ $labels.train_job }}: {{ $value | printf "%.0f" }} retries of the allocator on a rank',
        description=f"Cached blocks had to be given back to make room, within {window}; steps are slow, and the "
        f"job is near failing.",
        details={
            "ranks": to.listing(
                f"sort_desc(topk(3, max by (rank, device) ({ours}) > 0))",
                'rank {{ .Labels.rank }} {{ .Labels.device }} {{ .Value | printf "%.0f" }}',
                "gone by now",
            ),
        },
        settings=("retries_window", "max_retries"),
        runbook=book,
    )


def fragmentation_high(settings: Settings) -> Alert:
    """Much of a nearly full device is free pieces that nobody can use."""
    to = Levels(settings)
    book = Runbook(
        meaning="Much of what the allocator has reserved is free pieces of blocks in use, and little of the "
        "device is left "
        "to reserve: a large allocation may fail although enough bytes are free.",
        confirm=(
            Check(what="The share, by rank:", query=f"topk(8, {select(catalog.FRAGMENTATION, train_job=JOB)})"),
            Check(
                what="Bytes in such pieces:",
                query=f"max by (rank, device) ({select(catalog.INACTIVE_SPLIT, train_job=JOB)})",
            ),
            Check(
                what="Whether allocations already had to be retried:",
                query=f"sum by (rank) (increase({select(catalog.RETRIES, '1h', train_job=JOB)}))",
            ),
        ),
        act=(
            "Set `PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True` and restart.",
            "Where lengths vary, pad to a few lengths, or sort batches so that the longest comes first.",
            "Call `torch.cuda.empty_cache()` after evaluations and checkpoints, not in steps.",
        ),
        false_when=("Shapes are fixed and nothing is retried: the pieces are reused at each step.",),
    )
    return Alert(
        name="TorchMemFragmentationHigh",
        severity=Severity.WARNING,
        expr=(
            f"max by ({to.job}) (\n"
            f"    {select(catalog.FRAGMENTATION)} > {settings.max_fragmentation_ratio}\n"
            f"  and on ({to.device})\n"
            f"    max by ({to.device}) ({select(catalog.RESERVED)}) / {capacity(to.device)} > "
            f"{settings.min_reserved_ratio}\n"
            ")"
        ),
        hold=settings.holds["TorchMemFragmentationHigh"],
        summary="{{ $labels.train_job }}: {{ $value | humanizePercentage }} of the reserved memory is fragments",
        description="Little is left to reserve, so a large allocation may fail although enough bytes are free.",
        details={"ranks": to.worst(to.of_this_job(catalog.FRAGMENTATION))},
        settings=("max_fragmentation_ratio", "min_reserved_ratio"),
        runbook=book,
    )


def unattributed_high(settings: Settings) -> Alert:
    """The books cannot name much of what the allocator holds."""
    to = Levels(settings)
    unnamed = f"max by ({to.device}) ({select(catalog.UNATTRIBUTED)})"
    ours = f"max by (rank, device) ({to.of_this_job(catalog.UNATTRIBUTED)}) > 0"
    book = Runbook(
        meaning="The allocator holds bytes that torchmem has not seen being allocated, so it cannot say whose "
        "they are. The "
        "job is fine; what is told about it is incomplete.",
        confirm=(
            Check(
                what="Bytes without a name:",
                query=f"topk(8, {select(catalog.UNATTRIBUTED, train_job=JOB)})",
            ),
            Check(what="Labelers that are off:", query=f"{select(catalog.LABELER_UP, train_job=JOB)} == 0"),
            Check(what="Which engine counts:", query=f"count by (engine) ({select(catalog.RANK_INFO, train_job=JOB)})"),
            Check(what="The books of that rank:", command=f"torchmem show --job {JOB} --by reftype"),
        ),
        act=(
            "Install torchmem before the model is made: what exists already can only be adopted, not named.",
            "Look for libraries with an allocator of their own, and for CUDA graphs with a private pool.",
            "If the `engine` is not `native`, see `torchmem build`.",
        ),
        false_when=("Many tiny tensors: the allocator rounds each up to 512 bytes, which the books do not.",),
    )
    return Alert(
        name="TorchMemUnattributedHigh",
        severity=Severity.WARNING,
        expr=(
            f"max by ({to.job}) (\n"
            f"    {unnamed} / (max by ({to.device}) ({select(catalog.ALLOCATED)}) > 0)\n"
            f"  and on ({to.device})\n"
            f"    {select(catalog.UNATTRIBUTED)} > {settings.min_unattributed_bytes}\n"
            f") > {settings.max_unattributed_ratio}"
        ),
        hold=settings.holds["TorchMemUnattributedHigh"],
        summary="{{ $labels.train_job }}: {{ $value | humanizePercentage }} of the allocated memory has no name",
        description="torchmem has not seen these bytes being allocated.",
        details={
            "ranks": to.listing(
                f"sort_desc(topk(3, {ours}))",
                "rank {{ .Labels.rank }} {{ .Labels.device }} {{ .Value | humanize1024 }}B",
                "gone by now",
            ),
        },
        settings=("max_unattributed_ratio", "min_unattributed_bytes"),
        runbook=book,
    )


def checkpoint_peak_high(settings: Settings) -> Alert:
    """A checkpoint nearly fills a device."""
    to = Levels(settings)
    operation = f"{to.device}, operation"
    peak = f"max by ({operation}) ({select(catalog.CHECKPOINT_PEAK)})"
    others = f"max by ({to.device}) ({select(catalog.OTHER)})"
    match = f"on ({to.device}) group_left ()"
    ours = f"max by (rank, device, operation) ({to.of_this_job(catalog.CHECKPOINT_PEAK)})"
    book = Runbook(
        meaning="While the latest checkpoint was saved or loaded, a device was nearly full. The next one may end "
        "the job, at "
        "the moment at which it would have been made safe.",
        confirm=(
            Check(
                what="The peak of each operation:",
                query=f"topk(8, {select(catalog.CHECKPOINT_PEAK, train_job=JOB)})",
            ),
            Check(
                what="The peak of steps, to compare:",
                query=f"sum by (rank, device) ({select(catalog.STEP_PEAK, train_job=JOB)})",
            ),
            Check(what="What it is made of, on that rank's host:", command=f"torchmem show --job {JOB} --by reftype"),
        ),
        act=(
            (
                "Save sharded state dicts instead of full ones; a full one gathers the whole model on each rank, or "
                "on rank 0."
            ),
            "Offload while gathering (`cpu_offload=True`), and set gradients to none before it.",
            "With asynchronous saving, the staging copy counts on the CPU: keep it pinned and reused.",
        ),
        false_when=(
            "The checkpoint was loaded once, before the first step, and will not be again.",
            "On the CPU ranks are judged one by one: many that stage at once need more than this says.",
        ),
    )
    return Alert(
        name="TorchMemCheckpointPeakHigh",
        severity=Severity.WARNING,
        expr=(
            f"max by ({to.job}) (\n"
            "  (\n"
            f"      {peak} + {match} {others}\n"
            "    or\n"
            f"      {peak}\n"
            "  )\n"
            f"  / {match}\n"
            f"  {capacity(to.device)}\n"
            f") > {settings.max_checkpoint_ratio}"
        ),
        hold=settings.holds["TorchMemCheckpointPeakHigh"],
        summary="{{ $labels.train_job }}: a checkpoint filled {{ $value | humanizePercentage }} of a device",
        description="The next one may not fit.",
        details={
            "ranks": to.listing(
                f"sort_desc(topk(3, {ours}))",
                "rank {{ .Labels.rank }} {{ .Labels.device }} {{ .Labels.operation }} {{ .Value | humanize1024 }}B",
                "gone by now",
            ),
        },
        settings=("max_checkpoint_ratio",),
        runbook=book,
    )


def _seconds(duration: str) -> int:
    """Seconds of a duration of one unit."""
    return int(duration[:-1]) * {"s": 1, "m": 60, "h": 3600, "d": 86400}[duration[-1]]
