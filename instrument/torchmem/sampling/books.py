"""The books of the latest sampled step, read as the native engine's are; nothing until there is one.

Invariants: one sample replaces another whole; devices are in the order of their numbers, whichever was used first;
peaks since the beginning, and counts of events, are over all samples.

Limits: checkpoints and failed allocations are not seen; a step peak stays until the next sample, however long that is.
"""

from __future__ import annotations

from typing import NamedTuple

from torchmem.engine.dispatch_books import EndRow, WindowRow

_NO_COUNTS = dict.fromkeys(
    (
        "num_samples",
        "num_events",
        "num_unknown_frees",
        "num_double_allocations",
        "num_unmatched_pops",
        "num_live_blocks",
        "num_ooms",
    ),
    0,
)
_OF_THE_MOMENT = "num_live_blocks"
_NO_TIMES = dict.fromkeys(("event_nanoseconds", "label_nanoseconds", "num_hook_calls"), 0)
"""The time that samples take is measured as a whole."""


class Sample(NamedTuple):
    """The books of one sampled step, as of the engine's functions of these names."""

    number: int
    phases: int
    rows: list[EndRow]
    window: list[WindowRow]
    counters: dict[str, int]
    failures: dict[str, str]
    """Why a labeler was off, by the name of each; empty where it was not."""


class SampledBooks:
    """The latest sample.

    Attributes:
        last: None until there is one.
    """

    def __init__(self) -> None:
        self.last: Sample | None = None
        self._peaks: dict[int, int] = {}
        self._counts = dict(_NO_COUNTS)

    def take(self, sample: Sample) -> None:
        """Replaces the latest sample."""
        self._counts = {
            name: sample.counters[name] if name == _OF_THE_MOMENT else before + sample.counters.get(name, 0)
            for name, before in self._counts.items()
        }
        self._counts["num_samples"] += 1
        for device, _, _, peak, *_ in sample.window:
            self._peaks[device] = max(peak, self._peaks.get(device, 0))
        window = [
            (device, usage_bytes, step_peak, self._peaks[device], usage, at_peak, active_peak)
            for device, usage_bytes, step_peak, _, usage, at_peak, active_peak in sample.window
        ]
        self.last = sample._replace(rows=sorted(sample.rows), window=sorted(window))

    def end_step(self) -> tuple[int, list[EndRow]]:
        """As the engine's, of the sampled step."""
        return (0, []) if self.last is None else (self.last.phases, self.last.rows)

    def read_window(self) -> list[WindowRow]:
        """As the engine's, as of the sampled step's end."""
        return [] if self.last is None else self.last.window

    def rotate_windows(self) -> None:
        """Nothing: a sample stays until the next."""

    def checkpoint_peaks(self) -> list[tuple[int, int, int]]:
        """None are kept."""
        return []

    def counters(self) -> dict[str, int]:
        """What was counted of events, in all samples."""
        return self._counts | _NO_TIMES

    def ooms(self) -> tuple[list[tuple[int, int]], list[tuple[object, ...]]]:
        """None are seen."""
        return [], []

    def attach_cuda(self) -> str:
        """Why CUDA is not counted: operators are seen on every device."""
        return ""
