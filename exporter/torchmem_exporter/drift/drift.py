"""Whether a device's memory drifts: its level against its baseline, and the floor that a leak raises.

A ``Drift`` is fed the steps of one device of one rank as they come, and keeps a bounded state that msgspec can write
down. Steps that hold a checkpoint or an evaluation, and the few after them, are set apart. The level is learned after
warm-up (``learning``); memory drifts when the median of the last blocks of steps is above it by ``LEVEL_SHIFT`` and by
four times the spread of such blocks. The floor (``floor``) finds leaks long before that. What the size of a step's
input explains is taken off first (``sizes``).

Invariants: never raises, whatever the numbers; feeding step by step or in batches of any size is the same; bounded.
A step that was fed already, or is older, or held nothing, is ignored; missed steps are a gap and no error; time is
only used for the length of a typical step, so that a clock that is set changes nothing.

Known limits: a drop is no drift; growth that began before the level was known is only seen by the floor.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

import msgspec

from torchmem.model import Phase
from torchmem.wire.record import Identity
from torchmem_exporter.drift.composition import Composition
from torchmem_exporter.drift.floor import Floor
from torchmem_exporter.drift.learning import BLOCK_STEPS, MAX_SAMPLES, Learning, Level, Sample
from torchmem_exporter.drift.ring_steps import Step
from torchmem_exporter.drift.robust import middle_mean, spread
from torchmem_exporter.drift.sizes import Curve, fit, varies

ATTEMPT, CONFIGURATION, MANUAL = REASONS = ("attempt", "configuration", "manual")
"""Why a baseline is learned anew."""

LEVEL_SHIFT = 0.045
"""Shift that counts, relative: 5%, less what a median of that many steps may be wrong by."""
RETURNED_SHIFT = 0.035
"""A level that drifted is back below this, relative; between the two it stays as it was judged."""
MIN_SPREADS = 4.0
WANDERING_SPREADS = 6.0
"""Likewise of a job whose memory wanders."""
LARGE_SHIFT = 1.5
"""Times the least shift that counts; a smaller one must stand still, as a wandering job's does not."""
STILL_SPREADS = 2.2
"""Most that blocks that stand still differ, in those of the baseline."""
CALM_BLOCKS = 6
"""Blocks in the median of what is held now."""
NOISY_BLOCKS = 12
"""Likewise where blocks differ by more than ``NOISY_SPREAD``."""
NOISY_SPREAD = 0.004
WANDERING_BLOCKS = 32
"""Likewise of a job whose memory wanders."""
HIGHEST_BLOCKS = 32
"""Blocks whose highest step peak counts as the present one."""

MAX_SIZE = float(1 << 62)
"""Of an input, in any unit; from 1 on."""

_APART = int(Phase.CHECKPOINT | Phase.EVAL)
_STEPS_AFTER_APART = 2
_SHARE_WEIGHT = 1 / 256
_USUAL_SHARE = 0.5
"""Where more steps than this hold a checkpoint or an evaluation, that is what the job does."""
_SELDOM_SHARE = 0.1
"""Only where fewer do, those after them are set apart too."""
_PATIENCE_STEPS = 512
"""Ordinary steps after which a composition is taken as the usual one although its total is unusual."""
_NEAR = 1.05
"""How far, as a ratio, the usual composition's total may lie beyond the usual step peaks."""


@dataclass(frozen=True)
class Judgement:
    """What is known of one device.

    Attributes:
        baseline_bytes: usual step peak; None until known.
        drift_ratio: median of the last step peaks, at the usual input size, over the baseline, less 1.
        is_level_drifting: whether that is more than noise and more than 5%.
        growth_bytes_per_second: slope of what is left at steps' ends, robustly; None until known.
        is_floor_growing: whether that has been steady and large enough to be a leak.
        exhausted_at: Unix seconds at which the highest step peak reaches the limit at that slope; None if the floor
            does not grow or there is no limit.
        num_resets: baselines given up, by reason.
    """

    baseline_bytes: int | None
    drift_ratio: float | None
    is_level_drifting: bool
    growth_bytes_per_second: float | None
    is_floor_growing: bool
    exhausted_at: float | None
    num_resets: Mapping[str, int]


class _Block(msgspec.Struct):
    """The steps that will be judged as one."""

    samples: list[Sample] = []
    peaks: list[float] = []
    """At the usual size of the input."""


class Drift(msgspec.Struct, kw_only=True):
    """What is remembered of one device of one rank; written down and read by msgspec."""

    attempt: str = ""
    fingerprint: str = ""
    last_step: int = -1
    last_time: float = 0.0
    """Unix seconds at which that ended."""
    num_resets: dict[str, int] = msgspec.field(default_factory=lambda: dict.fromkeys(REASONS, 0))
    learning: Learning | None = msgspec.field(default_factory=Learning)
    """None when the level is known."""
    level: Level | None = None
    floor: Floor | None = None
    end_curve: Curve | None = None
    """What the size of the input explains of the floor."""
    is_end_by_size: bool = False
    """Whether that curve is by known sizes; else by what is held within a step only, which varies with them."""
    block: _Block = msgspec.field(default_factory=_Block)
    peaks: list[float] = []
    """Medians of the last blocks' step peaks, at the usual size of the input; since the level is known."""
    highest: list[float] = []
    """Highest step peaks of the last blocks."""
    seconds: list[float] = []
    """Seconds a step of the last blocks."""
    is_drifting: bool = False
    is_held: bool = False
    """Whether the level is one that was kept by name, and not learned of these steps."""
    usual: Composition | None = None
    """What the device held when all was as usual."""
    num_waited: int = 0
    """Ordinary steps since the level is known, while ``usual`` is not."""
    apart_share: float = 0.0
    apart_left: int = 0

    # -- whose memory it is

    def begin(self, attempt: str, fingerprint: str) -> None:
        """Says whose steps come next; a new attempt or another configuration is learned anew.

        Args:
            attempt: the process's life as the rank.
            fingerprint: of what the job's memory depends on, see ``fingerprint_of``.
        """
        is_first = not self.attempt
        reason = CONFIGURATION if fingerprint != self.fingerprint else ATTEMPT
        if (attempt, fingerprint) == (self.attempt, self.fingerprint):
            return
        is_same_life = attempt == self.attempt
        self.attempt, self.fingerprint = attempt, fingerprint
        if not is_same_life:
            self.last_step = -1
        if not is_first:
            self.reset(reason)

    def reset(self, reason: str = MANUAL) -> None:
        """Gives the baseline up and learns it anew; counted by the reason."""
        self.num_resets[reason] = self.num_resets.get(reason, 0) + 1
        self._forget()
        self.learning = Learning()

    def adopt(self, level: Level, usual: Composition | None) -> None:
        """Holds the steps to come against a baseline that was kept, instead of learning one; counted as manual."""
        self.reset(MANUAL)
        self.level, self.usual, self.learning, self.is_held = level, usual, None, True
        self.floor = Floor(scale=level.num_bytes)

    def release(self) -> None:
        """Learns the steps' own baseline instead of one that was kept, beginning with those that the ring still has."""
        if self.is_held:
            self.reset(MANUAL)
            self.last_step = -1

    def _forget(self) -> None:
        self.level = self.floor = self.end_curve = self.usual = None
        self.block, self.peaks, self.highest, self.seconds = _Block(), [], [], []
        self.is_drifting, self.is_held, self.num_waited = False, False, 0

    # -- steps

    def feed(self, steps: Iterable[Step]) -> None:
        """Takes the steps that are new, oldest first."""
        for step in steps:
            if step.number > self.last_step:
                self.last_step = step.number
                if math.isfinite(step.ended_at):
                    self.last_time = step.ended_at
                if step.peak_bytes > 0 and not self._sets_apart(step.phases):
                    peak, end = float(step.peak_bytes), float(max(0, step.end_bytes))
                    self._take(Sample(step.number, step.ended_at, peak, end, _known_size(step.size)))

    def _sets_apart(self, phases: int) -> bool:
        """Whether a step is no ordinary one."""
        if phases & _APART:
            self.apart_share += _SHARE_WEIGHT * (1 - self.apart_share)
            self.apart_left = _STEPS_AFTER_APART
            return self.apart_share <= _USUAL_SHARE
        self.apart_share -= _SHARE_WEIGHT * self.apart_share
        self.apart_left = max(-1, self.apart_left - 1)
        return self.apart_left >= 0 and self.apart_share < _SELDOM_SHARE

    def _take(self, sample: Sample) -> None:
        if self.floor is not None:
            self._add_to_block(sample)
        if self.learning is not None:
            if self.learning.add(sample):
                self._learn(self.learning)
        elif self.usual is None:
            self.num_waited += 1

    def _learn(self, learning: Learning) -> None:
        settled = learning.settled()
        if self.floor is None and (settled or learning.num_steps >= MAX_SAMPLES):
            # A job that has not settled until now may be one that leaks from its first step on.
            self._raise_floor(settled or learning.samples[len(learning.samples) // 8 :], learning.stride)
        self.level = learning.level(settled)
        if self.level is not None:
            self.learning = None
            if self.end_curve is not None:  # by now more sizes are known
                self._raise_floor(settled or learning.samples, learning.stride)
            self.block = _Block()

    def _raise_floor(self, samples: list[Sample], stride: int) -> None:
        """Makes the floor of steps of which one in so many was kept."""
        self.is_end_by_size = varies([sample.size for sample in samples])
        self.end_curve = fit([self._end_size(sample) for sample in samples], [sample.end for sample in samples])
        self.floor = Floor(scale=median([sample.peak for sample in samples]))
        size = max(1, BLOCK_STEPS // stride)
        for start in range(0, len(samples) - size + 1, size):
            block = samples[start : start + size]
            self.floor.add(*_floor_of(block, [self._usual_end(sample) for sample in block]))

    # -- blocks

    def _add_to_block(self, sample: Sample) -> None:
        block = self.block
        block.samples.append(sample)
        block.peaks.append(self._usual_peak(sample))
        if len(block.samples) == BLOCK_STEPS:
            self.block = _Block()
            self._judge_block(block)

    def _usual_end(self, sample: Sample) -> float:
        return sample.end - self.end_curve.explained(self._end_size(sample)) if self.end_curve else sample.end

    def _end_size(self, sample: Sample) -> float:
        return sample.size if self.is_end_by_size else sample.peak - sample.end

    def _usual_peak(self, sample: Sample) -> float:
        curve = self.level.curve if self.level is not None else None
        return sample.peak - curve.explained(sample.size) if curve else sample.peak

    def _judge_block(self, block: _Block) -> None:
        first, last = block.samples[0], block.samples[-1]
        _push(self.highest, max(sample.peak for sample in block.samples), HIGHEST_BLOCKS)
        seconds = (last.ended_at - first.ended_at) / (last.number - first.number)
        if math.isfinite(seconds) and seconds > 0:
            _push(self.seconds, seconds, HIGHEST_BLOCKS)
        if self.floor is not None:
            self.floor.add(*_floor_of(block.samples, [self._usual_end(sample) for sample in block.samples]))
        if self.level is not None:
            _push(self.peaks, median(block.peaks), WANDERING_BLOCKS)
            self._judge_level(self.level)

    def _judge_level(self, level: Level) -> None:
        shift = self._shift(level)
        if shift is None:
            return
        spreads = WANDERING_SPREADS if level.is_wandering else MIN_SPREADS
        enough = max(LEVEL_SHIFT * level.num_bytes, spreads * level.spread_bytes)
        if shift > LARGE_SHIFT * enough or (shift > enough and self._stands_still(level)):
            self.is_drifting = True
        elif shift < RETURNED_SHIFT * level.num_bytes:
            self.is_drifting = False

    def _stands_still(self, level: Level) -> bool:
        """Whether the last blocks, and those before them, each keep to one level: a step does, a wandering job not."""
        num_blocks = _num_blocks(level)
        parts = self.peaks[-num_blocks:], self.peaks[:-num_blocks]
        return all(spread(part) <= STILL_SPREADS * level.spread_bytes for part in parts)

    def _shift(self, level: Level) -> float | None:
        """Bytes that are held now above the level; None before enough blocks were seen."""
        num_blocks = _num_blocks(level)
        if len(self.peaks) < num_blocks:
            return None
        return middle_mean(self.peaks[-num_blocks:]) - level.num_bytes

    # -- what it is made of

    @property
    def highest_bytes(self) -> float:
        """Highest step peak of the last blocks of ordinary steps; before there are any, of those learned of."""
        learned = 0.0 if self.level is None else self.level.highest_bytes
        return max([*self.highest, *(sample.peak for sample in self.block.samples)], default=learned)

    def is_ordinary(self, total_bytes: int) -> bool:
        """Whether a step peak of this height may have been that of an ordinary step, and not of one set apart."""
        return total_bytes <= self.highest_bytes

    @property
    def wants_composition(self) -> bool:
        """Whether ``observe`` would take what it is given as the usual composition."""
        return self.level is not None and self.usual is None

    def observe(self, now: Composition) -> None:
        """Takes the composition of the latest step peak as the usual one, if it is wanted and not unusual itself."""
        if self.level is not None and self.usual is None:
            is_near = self.level.num_bytes / _NEAR <= now.total_bytes <= _NEAR * self.level.highest_bytes
            if is_near or self.num_waited >= _PATIENCE_STEPS:
                self.usual = now.cut()

    # -- what is known

    def judge(self, limit_bytes: int | None = None) -> Judgement:
        """What is known by now.

        Args:
            limit_bytes: what torch's allocator may come to hold on the device; None without a limit.
        """
        level, shift = self.level, None
        if level is not None:
            shift = self._shift(level)
        growth = self._growth()
        is_growing = self.floor is not None and self.floor.is_growing
        return Judgement(
            baseline_bytes=None if level is None else round(level.num_bytes),
            drift_ratio=None if level is None or shift is None else shift / level.num_bytes,
            is_level_drifting=self.is_drifting,
            growth_bytes_per_second=growth,
            is_floor_growing=is_growing,
            exhausted_at=self._exhausted_at(growth, limit_bytes) if is_growing else None,
            num_resets=dict(self.num_resets),
        )

    def _growth(self) -> float | None:
        slope = None if self.floor is None else self.floor.slope
        return None if slope is None or not self.seconds else slope / median(self.seconds)

    def _exhausted_at(self, growth: float | None, limit_bytes: int | None) -> float | None:
        if growth is None or growth <= 0 or limit_bytes is None:
            return None
        left = max(0.0, limit_bytes - self.highest_bytes)
        when = self.last_time + left / growth
        return when if math.isfinite(when) else None


def fingerprint_of(identity: Identity) -> str:
    """What a rank's memory depends on and a record tells; another one is another configuration.

    The names of its modules are left out: they may come late, and a job that makes ever new ones must not have its
    baseline reset by that.
    """
    mesh = ",".join(f"{name}={identity.mesh[name]}" for name in sorted(identity.mesh))
    return f"world_size={identity.world_size} engine={identity.engine} mesh={mesh}"


def _known_size(size: float) -> float:
    """A size that can be reckoned with, or 0."""
    return min(float(size), MAX_SIZE) if size >= 1 else 0.0  # what is no number is not at least 1


def _num_blocks(level: Level) -> int:
    """Blocks whose median is what is held now."""
    if level.is_wandering:
        return WANDERING_BLOCKS
    return NOISY_BLOCKS if level.spread_bytes > NOISY_SPREAD * level.num_bytes else CALM_BLOCKS


def _floor_of(samples: Sequence[Sample], ends: Sequence[float]) -> tuple[float, float]:
    """Where a block lies, and what is left at the ends of its lower steps."""
    return (samples[0].number + samples[-1].number) / 2, sorted(ends)[len(ends) // 4]


def _push(values: list[float], value: float, max_values: int) -> None:
    """Appends, and lets go of the oldest."""
    values.append(value)
    if len(values) > max_values:
        del values[0]
