"""Recorded series: cheap aggregates for dashboards over many jobs, and what several alerts need.

Invariants: none reads the series by module, of which there are too many to go through at each evaluation. A rank that
is told of twice for a while, as by two sidecars after it has moved, counts once and fails no rule: both sides of every
arithmetic match are aggregated to the labels that are matched on, and sums are of what is unique.
"""

from __future__ import annotations

from generator.model import Recording
from generator.query import Levels, select, select_any
from generator.settings import Settings
from torchmem_exporter import catalog

RANK_INFO = "rank:torchmem_rank_info:max"
RANK_STEP_PEAK = "rank:torchmem_memory_step_peak_bytes:sum"
RANK_SKEW = "rank:torchmem_memory_skew_ratio:median"
DEVICE_FILLED = "device:torchmem_memory_filled_ratio:max"
HOST_FILLED = "host:torchmem_memory_filled_ratio:max"
JOB_FILLED = "job:torchmem_memory_filled_ratio:max"
JOB_STEP_PEAK = "job:torchmem_memory_step_peak_bytes:max"
JOB_STEP_PEAK_SUM = "job:torchmem_memory_step_peak_bytes:sum"
JOB_USAGE = "job_reftype:torchmem_memory_usage_bytes:sum"
JOB_DRIFT = "job:torchmem_memory_drift_ratio:max"
JOB_UP = "job:torchmem_rank_up:sum"
JOB_STEPS = "job:torchmem_steps:rate"
JOB_OVERHEAD = "job:torchmem_overhead_ratio:rate"


def recordings(settings: Settings) -> tuple[Recording, ...]:
    """All recorded series, those that others are made from first."""
    to = Levels(settings)
    return (
        Recording(name=RANK_INFO, expr=_rank_info(to), about="who each living rank is, once; the join for the rest"),
        Recording(name=RANK_STEP_PEAK, expr=_rank_step_peak(to), about="step peak on accelerators; else on the CPU"),
        Recording(
            name=RANK_SKEW, expr=_rank_skew(to), about="step peak over the median of the ranks with the same work"
        ),
        Recording(name=DEVICE_FILLED, expr=_device_filled(to), about="share of an accelerator used at the step peak"),
        Recording(
            name=HOST_FILLED, expr=_host_filled(to), about="share of a host's memory used by a job's ranks there"
        ),
        Recording(
            name=JOB_FILLED, expr=f"max by ({to.job}) ({DEVICE_FILLED} or {HOST_FILLED})", about="the fullest device"
        ),
        Recording(
            name=JOB_STEP_PEAK, expr=f"max by ({to.job}) ({RANK_STEP_PEAK})", about="step peak of the highest rank"
        ),
        Recording(name=JOB_STEP_PEAK_SUM, expr=f"sum by ({to.job}) ({RANK_STEP_PEAK})", about="step peaks, all ranks"),
        Recording(
            name=JOB_USAGE,
            expr=f"sum by ({to.job}, reftype) ({_once(to, select(catalog.USAGE))})",
            about="bytes alive between steps, all ranks and devices, by what they are for",
        ),
        Recording(
            name=JOB_DRIFT,
            expr=f"max by ({to.job}) ({select(catalog.DRIFT_RATIO)})",
            about="step peak over baseline, less one, of the rank that drifts most",
        ),
        Recording(
            name=JOB_UP,
            expr=f"sum by ({to.job}) (max by ({to.rank}) ({select(catalog.RANK_UP)}))",
            about="ranks that live",
        ),
        Recording(
            name=JOB_STEPS,
            expr=f"max by ({to.job}) (rate({select(catalog.STEPS, settings.overhead_window)}))",
            about="steps a second",
        ),
        Recording(name=JOB_OVERHEAD, expr=_overhead(to, settings), about="share of the step time that watching takes"),
    )


def used(to: Levels, **device: str) -> str:
    """Bytes of a device in use at the step peak: by the books, without a name, and outside the allocator."""
    parts = select_any(catalog.STEP_PEAK, catalog.UNATTRIBUTED, catalog.OTHER, **device)
    return f"sum by ({to.device}) (max by (__name__, {to.device}, reftype) ({parts}))"


def _once(to: Levels, by_reftype: str) -> str:
    return f"max by ({to.device}, reftype) ({by_reftype})"


def capacity(level: str, **device: str) -> str:
    """Bytes that a device has, where that is known; by whatever labels."""
    return f"(max by ({level}) ({select(catalog.LIMIT, **device)}) > 0)"


def _rank_info(to: Levels) -> str:
    # A restart may change what a rank is. Of attempts told of at once only one that lives may be joined on, and one
    # only. What else tells series apart is up to the scrape, so it is named by what it is not.
    own = ", ".join(label for label in catalog.RANK_INFO.labels if label not in catalog.RANK)
    return (
        f"topk by ({to.rank}) (1,\n"
        f"  max by ({to.rank}, host, dp, tp, pp) (\n"
        f"    {select(catalog.RANK_INFO)} and ignoring ({own}) {select(catalog.RANK_UP)} == 1\n"
        "  )\n"
        ")"
    )


def _rank_step_peak(to: Levels) -> str:
    accelerators, cpu = (_once(to, select(catalog.STEP_PEAK, device=device)) for device in ("!cpu", "cpu"))
    return f"sum by ({to.rank}) ({accelerators})\nor\nsum by ({to.rank}) ({cpu})"


def _rank_skew(to: Levels) -> str:
    # Ranks that differ in their data only, not in their stage or shard of the model, should take the same.
    peers = f"{to.job}, tp, pp"
    placed = f"{RANK_STEP_PEAK} * on ({to.rank}) group_left (tp, pp) {RANK_INFO}"
    return (
        f"max by ({to.rank}) (\n"
        f"  ({placed})\n"
        f"  / on ({peers}) group_left ()\n"
        f"  (quantile by ({peers}) (0.5, {placed}) > 0)\n"
        ")"
    )


def _device_filled(to: Levels) -> str:
    return f"{used(to, device='!cpu')}\n/\n{capacity(to.device, device='!cpu')}"


def _host_filled(to: Levels) -> str:
    host = f"on ({to.rank}) group_left (host)"
    cpu = {"device": "cpu"}
    return (
        f"sum by ({to.host}) (\n"
        f"  {used(to, **cpu)}\n"
        f"  * {host}\n"
        f"  {RANK_INFO}\n"
        ")\n"
        "/\n"
        f"min by ({to.host}) ({capacity(to.rank, **cpu)} * {host} {RANK_INFO})"
    )


def _overhead(to: Levels, settings: Settings) -> str:
    window = settings.overhead_window
    return (
        f"sum by ({to.job}) (rate({select(catalog.TRACKER_TIME, window)}))\n"
        "/\n"
        f"(sum by ({to.job}) (rate({select(catalog.STEP_TIME, window)})) > 0)"
    )
