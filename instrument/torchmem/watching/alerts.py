"""What the reading of a rank warns of, judged here and now: the same causes as the sidecar's alerts, without waiting.

Invariants: torch-free and pure; text from a record is stripped of what could drive a terminal.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from torchmem.postmortem_show import moment
from torchmem.show import binary
from torchmem.watching.look import DeviceLook, RankLook
from torchmem.wire.ranks import printable, span
from torchmem.wire.record import filled_share
from torchmem_exporter.causes import FULL_SHARE, MISSED_RATIO

LONG_SECONDS = 365 * 86400.0


class Alert(NamedTuple):
    """Something that is not as it should be."""

    word: str
    """One of ``WORDS``."""
    text: str
    """What is the matter, in a line."""


def alerts(rank: RankLook, now: float) -> list[Alert]:
    """All of a rank, the worst first.

    Args:
        rank: as it was read.
        now: Unix seconds.
    """
    found = [*_of_life(rank, now), *_of_failures(rank)]
    for one in rank.devices:
        found += _of_device(one, now)
    record = rank.view.record
    found += (
        Alert("labeler", f"{_own(one.name)} is disabled: {_own(one.reason)}") for one in record.labelers if not one.up
    )
    return found


def _of_life(rank: RankLook, now: float) -> Iterator[Alert]:
    if rank.view.state == "crashed":
        yield Alert("crashed", "ended without a clean end; `torchmem post-mortem` tells who held what")
    elif rank.view.state == "stale":
        yield Alert("stale", f"alive, but wrote nothing for {span(now - rank.view.record.clock.written_at)}")


def _of_failures(rank: RankLook) -> Iterator[Alert]:
    record = rank.view.record
    num_ooms = sum(device.allocator.num_ooms for device in record.devices)
    if record.oom_events:
        last = record.oom_events[-1]
        asked = f"{_own(record.modules[last.module])} asked for {binary(last.requested_bytes)}"
        asked += f" ({_own(record.reftypes[last.reftype])}) on {_own(last.device)}"
        yield Alert("oom", f"out of memory {max(num_ooms, last.number)} times, last {moment(last.time)}: {asked}")
    elif num_ooms:
        yield Alert("oom", f"out of memory {num_ooms} times")


def _of_device(one: DeviceLook, now: float) -> Iterator[Alert]:
    device, judgement = one.device, one.verdict.judgement
    name, share = _own(device.name), filled_share(device)
    if share is not None and share >= FULL_SHARE:
        yield Alert("full", f"{name} is {share:.0%} full at the step peak, of {binary(device.limit_bytes or 0)}")
    who = _who(one)
    if judgement.is_level_drifting:
        yield Alert("drift", f"{name} {_shift(judgement.drift_ratio)} baseline{who}")
    if judgement.is_floor_growing:
        growth = judgement.growth_bytes_per_second
        by = "" if growth is None else f" {rate(growth)}"
        yield Alert("leak", f"{name} leaks{by}{_end(judgement.exhausted_at, now)}{who}")
    if is_missed(one):
        forecast = binary(device.forecast_bytes or 0)
        yield Alert("forecast", f"{name} {_shift(one.forecast_drift_ratio)} forecast of {forecast}")


def is_missed(one: DeviceLook) -> bool:
    """Whether a device holds more than was forecast, by more than ``MISSED_RATIO``."""
    return one.forecast_drift_ratio is not None and one.forecast_drift_ratio > MISSED_RATIO


def _shift(drift_ratio: float | None) -> str:
    return f"{drift_ratio:+.1%} over its" if drift_ratio is not None else "is over its"


def _who(one: DeviceLook) -> str:
    growers = one.verdict.growers
    return f": {_own(growers[0].module)} {_own(growers[0].reftype)} +{binary(growers[0].num_bytes)}" if growers else ""


def _end(exhausted_at: float | None, now: float) -> str:
    """When the limit is reached, in words."""
    if exhausted_at is None:
        return ""
    left = exhausted_at - now
    if left > LONG_SECONDS:
        return ", full in over a year"
    return f", full in {span(left)}" if left > 0 else ", full about now"


def rate(bytes_per_second: float) -> str:
    """A finite growth in a unit that suits it: by the hour where a second's would be less than a KiB."""
    if abs(bytes_per_second) >= 1024:  # noqa: PLR2004  # a KiB
        return f"{binary(round(bytes_per_second))}/s"
    return f"{binary(round(bytes_per_second * 3600))}/h"


def _own(text: str) -> str:
    return printable(text)
