"""What a row showed, and whether that is right: plain figures, judged without torch.

Invariants: torch-free; a row is ``ok`` only if every rank and every watched step was right; all sizes are bytes.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field

from torchmem.model import RefType
from torchmem.validation.books import Composition

OK, OFF, FAILED, SKIPPED = "ok", "off", "failed", "skipped"

_KINDS: dict[str, tuple[RefType, ...]] = {
    "parameter": (RefType.PARAMETER, RefType.SHARDED_PARAMETER, RefType.UNSHARDED_PARAMETER),
    "gradient": (RefType.GRADIENT, RefType.SHARDED_GRADIENT, RefType.UNSHARDED_GRADIENT),
    "optimizer_state": (RefType.OPTIMIZER_STATE,),
    "buffer": (RefType.BUFFER,),
}
"""By kind of tensor: the reftypes that its bytes are booked under when a step ends."""


@dataclass(frozen=True)
class Step:
    """One watched step of one rank."""

    true_peak_bytes: int
    """The most the device held, by the independent count; of the workload alone."""
    true_end_bytes: int
    """The same when the step ended."""
    peak: Composition
    """What the books say was held at the peak."""
    end: Composition
    """What they say was held when the step ended, on all devices."""
    storages: dict[str, int]
    """By kind of tensor: the sum of their distinct storages when the step ended, on all devices."""

    @property
    def peak_bytes(self) -> int:
        """The step's peak, by the books."""
        return sum(self.peak.values())

    @property
    def ratio(self) -> float:
        """The books' peak over the true one."""
        return self.peak_bytes / self.true_peak_bytes if self.true_peak_bytes else 0.0


@dataclass(frozen=True)
class RankOutcome:
    """What one rank showed."""

    steps: list[Step]
    end_bytes: list[int]
    """What the books say the device held when each step ended."""
    bare_seconds: list[float]
    """Duration of each timed step without torchmem."""
    watched_seconds: list[float]
    """The same with it."""
    gradients_in_buckets: bool
    labelers_down: list[str]
    """Labelers that failed, with their reasons."""
    loose_ends: dict[str, int]
    """Counters that should be zero and are not."""

    @property
    def slowdown(self) -> float:
        """Median watched step over median bare step."""
        return statistics.median(self.watched_seconds) / statistics.median(self.bare_seconds)

    @property
    def unattributed_share(self) -> float:
        """The share of what the device held at the end of a step that the books do not know, at worst."""
        shares = [
            (step.true_end_bytes - booked) / step.true_end_bytes
            for step, booked in zip(self.steps, self.end_bytes, strict=True)
            if step.true_end_bytes
        ]
        return max(shares, key=abs, default=0.0)


@dataclass(frozen=True)
class RowOutcome:
    """What a row showed over all ranks; the figures are those of the step whose peak is furthest from the truth."""

    name: str
    status: str
    problems: list[str] = field(default_factory=list)
    """Why it is not ok, a line each."""
    details: str = ""
    """Of a failed row: the traceback, or where each thread was."""
    seconds: float = 0.0
    """How long it took, building it included."""
    peak_bytes: int = 0
    true_peak_bytes: int = 0
    ratio: float = 0.0
    peak: Composition = field(default_factory=dict)
    """Bytes by reftype at the peak."""
    unattributed_share: float = 0.0
    slowdown: float = 0.0
    ranks: list[RankOutcome] = field(default_factory=list)


def judged(name: str, ranks: Sequence[RankOutcome], tolerance: float, seconds: float) -> RowOutcome:
    """The outcome of a row that ran.

    Args:
        name: the row's.
        ranks: what each rank showed.
        tolerance: how far a peak may be from the truth, as a share of it.
        seconds: how long it took.
    """
    problems = [f"rank {number}: {line}" for number, rank in enumerate(ranks) for line in _problems(rank, tolerance)]
    steps = [step for rank in ranks for step in rank.steps]
    worst = max(steps, key=lambda step: (abs(step.ratio - 1), step.true_peak_bytes))
    return RowOutcome(
        name=name,
        status=OFF if problems else OK,
        problems=problems,
        seconds=seconds,
        peak_bytes=worst.peak_bytes,
        true_peak_bytes=worst.true_peak_bytes,
        ratio=worst.ratio,
        peak=worst.peak,
        unattributed_share=max((rank.unattributed_share for rank in ranks), key=abs),
        slowdown=statistics.median(rank.slowdown for rank in ranks),
        ranks=list(ranks),
    )


def _problems(rank: RankOutcome, tolerance: float) -> list[str]:
    """Each kind of fault once, with the step at which it was first seen."""
    found: dict[str, str] = {}
    for number, step in enumerate(rank.steps, 1):
        if abs(step.ratio - 1) > tolerance:
            text = f"step {number}: peak {step.peak_bytes:,} B, truth {step.true_peak_bytes:,} B ({step.ratio:.5f})"
            found.setdefault("peak", text)
        for kind, true_bytes in step.storages.items():
            booked = _booked(step.end, kind, gradients_in_buckets=rank.gradients_in_buckets)
            if booked != true_bytes:
                found.setdefault(kind, f"step {number}: {kind} {booked:,} B, tensors hold {true_bytes:,} B")
    return [
        *found.values(),
        *(f"labeler {line}" for line in rank.labelers_down),
        *(f"{counter} = {number}" for counter, number in rank.loose_ends.items()),
    ]


def _booked(end: Composition, kind: str, *, gradients_in_buckets: bool) -> int:
    reftypes = _KINDS[kind]
    if kind == "gradient" and gradients_in_buckets:
        reftypes = (*reftypes, RefType.GRADIENT_BUCKET)
    return sum(end.get(reftype.label, 0) for reftype in reftypes)
