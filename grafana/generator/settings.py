"""The one place to adjust: every threshold and window of the rules, and where the runbooks are.

Invariant: a duration is in Prometheus' notation (``15m``); a ratio is of 1.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any


def _setting(default: Any, about: str) -> Any:
    return field(default=default, metadata={"about": about})


HOLDS = {
    "TorchMemPeakDrift": "5m",
    "TorchMemLeakSuspected": "5m",
    "TorchMemExhaustionPredicted": "5m",
    "TorchMemForecastMissed": "15m",
    "TorchMemHeadroomLow": "10m",
    "TorchMemOutOfMemory": "",
    "TorchMemAllocatorRetries": "10m",
    "TorchMemFragmentationHigh": "30m",
    "TorchMemUnattributedHigh": "15m",
    "TorchMemCheckpointPeakHigh": "5m",
    "TorchMemRanksMissing": "5m",
    "TorchMemSnapshotStale": "5m",
    "TorchMemRankSkew": "30m",
    "TorchMemExporterDown": "5m",
    "TorchMemSnapshotRejected": "15m",
    "TorchMemLabelerDown": "5m",
    "TorchMemOverheadHigh": "15m",
}
"""By alert how long its expression must hold before it fires; empty for at once."""


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What the rules are made with; the runbooks quote the values and what is said of them here."""

    job_labels: tuple[str, ...] = _setting(
        ("train_job",), "labels that tell jobs apart; add `cluster` or `namespace` where names repeat over those"
    )
    runbook_base: str = _setting("grafana/runbooks", "what `runbook_url` begins with")
    holds: Mapping[str, str] = field(
        default_factory=lambda: dict(HOLDS), metadata={"about": "by alert how long its expression must hold"}
    )

    min_drift_ratio: float = _setting(
        0.03, "step peak over baseline, less one; below what the detector itself asks for, so that its verdict counts"
    )
    exhaustion_seconds: int = _setting(4 * 3600, "how far ahead the end of the memory is announced, in seconds")
    max_filled_ratio: float = _setting(0.95, "share of the device's capacity that the step peak may fill")
    max_checkpoint_ratio: float = _setting(0.95, "share of the device's capacity that a checkpoint may fill")
    oom_window: str = _setting("15m", "how long a failed allocation is told")
    oom_memory: str = _setting("1h", "how far before that a counter is looked for, to tell an old count from a new one")
    retries_window: str = _setting("30m", "over which retries are counted")
    max_retries: int = _setting(5, "retries of a rank in that window")
    max_fragmentation_ratio: float = _setting(0.30, "share of the reserved bytes that may be inactive splits")
    min_reserved_ratio: float = _setting(0.80, "share of the device that must be reserved for that to matter")
    max_skew_ratio: float = _setting(1.20, "a rank's step peak over the median of its peers")
    min_skew_bytes: int = _setting(512 << 20, "bytes over that median below which no one cares")
    skew_window: str = _setting("30m", "over which a rank's step peak is averaged before ranks are compared")
    max_forecast_ratio: float = _setting(0.10, "step peak over its forecast, less one")
    max_unattributed_ratio: float = _setting(0.10, "share of the allocated bytes that may lack a name")
    min_unattributed_bytes: int = _setting(512 << 20, "bytes without a name below which no one cares")
    max_overhead_ratio: float = _setting(0.05, "share of the step time that watching may take")
    overhead_window: str = _setting("10m", "over which that share is taken")
    exit_memory: str = _setting("1h", "how long a rank that ended cleanly counts as accounted for")
    exporter_memory: str = _setting("2h", "how long a silent sidecar is known by the ranks it last told of")
    rejected_window: str = _setting("10m", "over which rejected records are counted")

    def about(self, name: str) -> str:
        """What a setting means."""
        return next(str(one.metadata["about"]) for one in fields(self) if one.name == name)


DEFAULTS = Settings()
