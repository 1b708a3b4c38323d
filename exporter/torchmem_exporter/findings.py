"""What a rank's record and the judgement of its devices warn of: the causes of the alerts, without their waiting.

The page and the terminal's live view both show these.

Invariants: pure; the worst first; a finding says in words what is the matter, the same for ranks with the same trouble.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple

from torchmem.wire.record import Device, filled_share, forecast_drift_ratio
from torchmem_exporter.drift.judge import Verdict
from torchmem_exporter.reading.lifecycle import State
from torchmem_exporter.reading.reader import Rank
from torchmem_exporter.words import moment, percent, rate, shown, signed_percent, size, span, until

WORDS = ("crashed", "stale", "oom", "full", "drift", "leak", "forecast", "labeler")
"""The worst first."""
FULL_SHARE = 0.95
"""Of the device's limit, at the step peak."""
MISSED_RATIO = 0.10
"""Of the step peak over its forecast, less one; as in the alert on it."""


class Finding(NamedTuple):
    """Something that is not as it should be."""

    word: str
    """One of ``WORDS``."""
    text: str


def findings(rank: Rank, verdicts: Mapping[str, Verdict], now: float) -> list[Finding]:
    """All of a rank.

    Args:
        rank: as it was read.
        verdicts: by the device's name.
        now: Unix seconds.
    """
    record = rank.record
    found = [*_of_life(rank, now), *_of_failures(rank)]
    for device in record.devices:
        if device.name in verdicts:
            found += _of_device(rank, device, verdicts[device.name], now)
    for labeler in record.labelers:
        if not labeler.up:
            reason = shown(labeler.reason) or "no reason"
            found.append(Finding("labeler", f"{shown(labeler.name)} is disabled: {reason}"))
    return sorted(found, key=lambda one: WORDS.index(one.word))


def is_missed(ratio: float | None) -> bool:
    """Whether a step peak is so far over its forecast, as ``forecast_drift_ratio`` has it, that it is told."""
    return ratio is not None and ratio > MISSED_RATIO


def _of_life(rank: Rank, now: float) -> Iterator[Finding]:
    if rank.state is State.CRASHED:
        yield Finding("crashed", "ended without a clean end; torchmem post-mortem tells who held what")
    elif rank.state is State.STALE:
        yield Finding("stale", f"alive, but wrote nothing for {span(now - rank.record.clock.written_at)}")


def _of_failures(rank: Rank) -> Iterator[Finding]:
    record = rank.record
    num_ooms = sum(rank.ooms.get(device.name, device.allocator.num_ooms) for device in record.devices)
    if record.oom_events:
        last = record.oom_events[-1]
        who = f"{shown(record.modules[last.module])} asked for {size(last.requested_bytes)}"
        what = f"{shown(record.reftypes[last.reftype])} on {shown(last.device)}, which held {size(last.held_bytes)}"
        times = _times(max(num_ooms, last.number))
        yield Finding("oom", f"out of memory {times}, last {moment(last.time)}: {who} of {what}")
    elif num_ooms:
        yield Finding("oom", f"out of memory {_times(num_ooms)}")


def _of_device(rank: Rank, device: Device, verdict: Verdict, now: float) -> Iterator[Finding]:
    name, share, judgement = shown(device.name), filled_share(device), verdict.judgement
    who = _most_grown(verdict)
    if share is not None and share >= FULL_SHARE:
        yield Finding("full", f"{name} is {percent(share)} full at the step peak, of {size(device.limit_bytes or 0)}")
    if judgement.is_level_drifting:
        yield Finding("drift", f"{name} {_shift(judgement.drift_ratio)} baseline{who}")
    if judgement.is_floor_growing:
        growth, end = judgement.growth_bytes_per_second, judgement.exhausted_at
        by = "" if growth is None else f" {rate(growth)}"
        when = f", full {until(end - now)}" if end is not None and rank.state.is_alive else ""
        yield Finding("leak", f"{name} leaks{by}{when}{who}")
    missed = forecast_drift_ratio(rank.record, device)
    if is_missed(missed):
        yield Finding("forecast", f"{name} {_shift(missed)} forecast of {size(device.forecast_bytes or 0)}")


def _most_grown(verdict: Verdict) -> str:
    if not verdict.growers:
        return ""
    first = verdict.growers[0]
    return f": {shown(first.module)} {shown(first.reftype)} +{size(first.num_bytes)}"


def _shift(ratio: float | None) -> str:
    return "is over its" if ratio is None else f"{signed_percent(ratio)} over its"


def _times(num: int) -> str:
    return "once" if num == 1 else f"{num} times"
