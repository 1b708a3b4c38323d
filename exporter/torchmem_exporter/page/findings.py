"""What a rank's record and the judgement of its devices warn of: the causes of the alerts, without their waiting.

Invariants: pure; the worst first; a finding says in words what is the matter.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple

from torchmem.wire.record import Device, filled_share, forecast_drift_ratio
from torchmem_exporter.causes import FULL_SHARE, MISSED_RATIO, WORDS
from torchmem_exporter.drift.judge import Verdict
from torchmem_exporter.page.words import percent, rate, shown, signed_percent, size, span, until
from torchmem_exporter.reading.lifecycle import State
from torchmem_exporter.reading.reader import Rank


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
            found.append(
                Finding("labeler", f"{shown(labeler.name)} is disabled: {shown(labeler.reason) or 'no reason'}")
            )
    return sorted(found, key=lambda one: WORDS.index(one.word))


def _of_life(rank: Rank, now: float) -> Iterator[Finding]:
    age = span(now - rank.record.clock.written_at)
    if rank.state is State.CRASHED:
        yield Finding("crashed", f"ended without a clean end; last record {age} ago. torchmem post-mortem tells more")
    elif rank.state is State.STALE:
        yield Finding("stale", f"lives, but wrote nothing for {age}")


def _of_failures(rank: Rank) -> Iterator[Finding]:
    record = rank.record
    num_ooms = sum(rank.ooms.get(device.name, device.allocator.num_ooms) for device in record.devices)
    if record.oom_events:
        last = record.oom_events[-1]
        who = f"{shown(record.modules[last.module])} asked for {size(last.requested_bytes)}"
        what = f"{shown(record.reftypes[last.reftype])}, on {shown(last.device)} that held {size(last.held_bytes)}"
        yield Finding("oom", f"out of memory {_times(max(num_ooms, last.number))}, last when {who} of {what}")
    elif num_ooms:
        yield Finding("oom", f"out of memory {_times(num_ooms)}")


def _of_device(rank: Rank, device: Device, verdict: Verdict, now: float) -> Iterator[Finding]:
    name, share, judgement = shown(device.name), filled_share(device), verdict.judgement
    first = verdict.growers[0] if verdict.growers else None
    who = f"; most grown: {shown(first.module)} {shown(first.reftype)} +{size(first.num_bytes)}" if first else ""
    if share is not None and share >= FULL_SHARE:
        yield Finding("full", f"{name} is {percent(share)} full at the step peak")
    if judgement.is_level_drifting:
        ratio = judgement.drift_ratio
        by = "" if ratio is None else f" {signed_percent(ratio)}"
        yield Finding("drift", f"{name} peaks{by} over its baseline{who}")
    if judgement.is_floor_growing:
        growth, end = judgement.growth_bytes_per_second, judgement.exhausted_at
        by = "" if growth is None else f" by {rate(growth)}"
        when = f", full {until(end - now)}" if end is not None and rank.state.is_alive else ""
        yield Finding("leak", f"{name} leaks{by}{when}{who}")
    missed = forecast_drift_ratio(rank.record, device)
    if missed is not None and missed > MISSED_RATIO:
        yield Finding("forecast", f"{name} peaks {signed_percent(missed)} over what was forecast")


def _times(num: int) -> str:
    return "once" if num == 1 else f"{num} times"
