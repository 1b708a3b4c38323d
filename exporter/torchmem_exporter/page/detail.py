"""One rank and one of its devices, as the page tells of them.

Invariants: pure; the parts of the treemap add up to the step peak, whatever was summed up for being small; what a
device is not known to have is left out rather than shown as zero.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from torchmem.model import folded
from torchmem.wire.record import Device, Record, filled_share, forecast_drift_ratio
from torchmem_exporter.drift.composition import Composition, Part, composition
from torchmem_exporter.drift.drift import Judgement
from torchmem_exporter.drift.judge import Grower, Verdict
from torchmem_exporter.findings import Finding, findings
from torchmem_exporter.labels import clean_label
from torchmem_exporter.page.choice import Choice
from torchmem_exporter.page.palette import order_of
from torchmem_exporter.page.timeline import Timeline, timeline
from torchmem_exporter.reading.reader import Rank
from torchmem_exporter.words import moment, percent, rate, shown, signed_percent, size, span, until

MAX_PARTS = 90
LEAST_SHARE = 0.001
"""Of the peak; smaller parts are summed."""
MAX_DEVICES = 16
MAX_LABELERS = 24
MAX_REASON = 200
_HOST_MEMORY = "cpu"


class Fact(NamedTuple):
    """A figure with its name."""

    name: str
    value: str
    is_bad: bool = False


class Held(NamedTuple):
    """Bytes of one reftype, held by one module or by several small ones."""

    module: str
    num_bytes: int


class Group(NamedTuple):
    """Bytes of one reftype."""

    reftype: str
    num_bytes: int
    parts: tuple[Held, ...]
    """Largest first; those summed up last."""


class Link(NamedTuple):
    """Something else to look at."""

    text: str
    href: str
    is_current: bool


class Worker(NamedTuple):
    """A labeler."""

    name: str
    is_up: bool
    reason: str


@dataclass(frozen=True)
class Detail:
    """What is said of the chosen rank and device."""

    job: str
    rank: int
    device: str
    """Empty where the rank has none."""
    state: str
    has_ended: bool
    written_at: str
    age: str
    devices: tuple[Link, ...]
    facts: tuple[Fact, ...]
    about: tuple[Fact, ...]
    """Who the rank is."""
    findings: tuple[Finding, ...]
    groups: tuple[Group, ...]
    """Largest first."""
    has_stepped: bool
    peak_bytes: int
    timeline: Timeline
    baseline_bytes: int | None
    limit_bytes: int | None
    growers: tuple[Grower, ...] | None
    """None while they are not known."""
    has_baseline: bool
    labelers: tuple[Worker, ...]


def ordered(devices: Sequence[Device]) -> list[Device]:
    """A rank's devices, accelerators first."""
    return sorted(devices, key=lambda device: device.name == _HOST_MEMORY)


def detail(
    rank: Rank,
    verdicts: Mapping[str, Verdict],
    device: Device | None,
    choice: Choice,
    now: float,
    max_parts: int = MAX_PARTS,
) -> Detail:
    """What is said of a rank.

    Args:
        rank: the chosen one.
        verdicts: of its devices, by name.
        device: the chosen one of them, if it has any.
        choice: of the rank, from which other choices are made.
        now: Unix seconds.
        max_parts: rectangles in the treemap, besides one for what is left of each reftype.
    """
    record, identity = rank.record, rank.record.identity
    verdict = verdicts.get(device.name) if device else None
    judgement = verdict.judgement if verdict else None
    return Detail(
        job=shown(identity.train_job),
        rank=identity.rank,
        device=shown(device.name) if device else "",
        state=rank.state.value,
        has_ended=not rank.state.is_alive,
        written_at=moment(record.clock.written_at),
        age=span(now - record.clock.written_at),
        devices=tuple(_links(record, device, choice)),
        facts=tuple(_facts(rank, device, judgement, now)) if device else (),
        about=tuple(_about(record)),
        findings=tuple(findings(rank, verdicts, now)),
        groups=groups(record, device.step_peak, max_parts) if device else (),
        has_stepped=record.clock.step > 0,
        peak_bytes=device.step_peak_bytes if device else 0,
        timeline=timeline(record, device.name) if device else Timeline((), (), ()),
        baseline_bytes=judgement.baseline_bytes if judgement else None,
        limit_bytes=device.limit_bytes if device else None,
        growers=_shown_growers(verdict),
        has_baseline=judgement is not None and judgement.baseline_bytes is not None,
        labelers=tuple(_labelers(record)),
    )


def _shown_growers(verdict: Verdict | None) -> tuple[Grower, ...] | None:
    if verdict is None or verdict.growers is None:
        return None
    return tuple(Grower(shown(one.module), shown(one.reftype), one.num_bytes) for one in verdict.growers)


def groups(record: Record, book: bytes, max_parts: int = MAX_PARTS) -> tuple[Group, ...]:
    """Who holds the bytes of a book, by reftype; modules that differ only in their indices are one."""
    whole = composition(book, [folded(name) for name in record.modules], record.reftypes)
    least = LEAST_SHARE * whole.total_bytes
    kept = [part for part in whole.parts[:max_parts] if part.num_bytes >= least]
    rest = whole.parts[len(kept) :]
    found = []
    for reftype in {part.reftype for part in whole.parts}:
        parts = [Held(shown(part.module), part.num_bytes) for part in kept if part.reftype == reftype]
        small = [part for part in rest if part.reftype == reftype]
        if small:
            parts.append(Held(f"({len(small)} more)" if parts else _summed(small), _total(small)))
        found.append(Group(reftype, sum(part.num_bytes for part in parts), tuple(parts)))
    return tuple(sorted(found, key=lambda group: (-group.num_bytes, order_of(group.reftype), group.reftype)))


def _summed(parts: Sequence[Part]) -> str:
    return shown(parts[0].module) if len(parts) == 1 else f"({len(parts)} modules)"


def _total(parts: Sequence[Part]) -> int:
    return Composition(parts=list(parts)).total_bytes


def _links(record: Record, chosen: Device | None, choice: Choice) -> Iterator[Link]:
    for device in ordered(record.devices)[:MAX_DEVICES]:
        href = choice.of(choice.job or "", record.identity.rank, clean_label(device.name)).query
        yield Link(shown(device.name), f"/{href}#rank", device is chosen)


def _labelers(record: Record) -> list[Worker]:
    """Those that are down first."""
    found = sorted(record.labelers, key=lambda labeler: labeler.up)[:MAX_LABELERS]
    return [Worker(shown(one.name), one.up, shown(one.reason, MAX_REASON)) for one in found]


# -- figures


def _facts(rank: Rank, device: Device, judgement: Judgement | None, now: float) -> Iterator[Fact]:
    share = filled_share(device)
    yield Fact("Step peak", size(device.step_peak_bytes))
    if device.limit_bytes is not None:
        yield Fact("Device's limit", size(device.limit_bytes))
    if share is not None:
        yield Fact("Filled at the peak", percent(share))
    yield Fact("Peak since start", size(device.peak_bytes))
    yield Fact("At the step's end", size(device.usage_bytes))
    yield Fact("Not in the books", size(device.unattributed_bytes))
    if device.other_bytes is not None:
        yield Fact("Outside the allocator", size(device.other_bytes))
    if judgement is not None:
        yield from _judged(judgement, now, is_alive=rank.state.is_alive)
    yield from _forecast(rank.record, device)
    yield from _allocator(rank, device)
    for operation, num_bytes in sorted(device.checkpoint_peaks.items())[:4]:
        yield Fact(f"Checkpoint {shown(operation)} peak", size(num_bytes))


def _judged(judgement: Judgement, now: float, *, is_alive: bool) -> Iterator[Fact]:
    baseline, ratio = judgement.baseline_bytes, judgement.drift_ratio
    yield Fact("Baseline", "learning" if baseline is None else size(baseline))
    if ratio is not None:
        yield Fact("Drift", signed_percent(ratio), judgement.is_level_drifting)
    growth = judgement.growth_bytes_per_second
    if growth is not None:
        is_leak = judgement.is_floor_growing
        yield Fact("Growth", rate(growth) if is_leak else f"steady ({rate(growth)})", is_leak)
    if judgement.exhausted_at is not None and is_alive and math.isfinite(judgement.exhausted_at):
        yield Fact("Full", until(judgement.exhausted_at - now), is_bad=True)


def _forecast(record: Record, device: Device) -> Iterator[Fact]:
    if device.forecast_bytes is not None:
        missed = forecast_drift_ratio(record, device)
        by = f" ({signed_percent(missed)})" if missed is not None else ""
        yield Fact("Forecast", f"{size(device.forecast_bytes)}{by}")


def _allocator(rank: Rank, device: Device) -> Iterator[Fact]:
    allocator = device.allocator
    if allocator.reserved_bytes:
        yield Fact("Reserved by the allocator", size(allocator.reserved_bytes))
        if allocator.inactive_split_bytes is not None:
            yield Fact("Fragmented", percent(allocator.inactive_split_bytes / allocator.reserved_bytes))
    num_ooms = rank.ooms.get(device.name, allocator.num_ooms)
    num_retries = rank.retries.get(device.name, allocator.num_retries)
    yield Fact("Out of memory", "never" if not num_ooms else f"{num_ooms} times", num_ooms > 0)
    if num_retries:
        yield Fact("Allocation retries", str(num_retries))


def _about(record: Record) -> Iterator[Fact]:
    identity, clock = record.identity, record.clock
    yield Fact("Host", shown(identity.host))
    yield Fact("Process", f"{identity.pid}, rank {identity.rank} of {identity.world_size}")
    if identity.mesh:
        places = sorted(identity.mesh.items())[:4]
        yield Fact("Mesh", ", ".join(f"{shown(name, 20)} {number}" for name, number in places))
    yield Fact("Since", moment(identity.start_time))
    if clock.step_seconds > 0 and clock.step > 0:
        seconds = clock.step_seconds / clock.step
        yield Fact("Time of a step", f"{seconds:.3g} s")
        yield Fact("Watching costs", f"{clock.tracker_seconds / clock.step_seconds:.2%} of it")
    yield Fact("Engine", shown(identity.engine))
    yield Fact(
        "Versions", f"torchmem {shown(identity.torchmem_version, 30)}, torch {shown(identity.torch_version, 30)}"
    )
    yield Fact("Attempt", shown(identity.attempt, 40))
