"""What is usual of a job's memory: its level, found in the steps after warm-up.

A bounded sample of the ordinary steps is kept. At times it is asked whether memory has settled (optimizer state,
caches and workspaces are allocated lazily), and whether it stays where it is or wanders, as under lengths that follow
one another. A level that stays is known after 128 to 256 steps; one that wanders after 2,048, with a spread to match.

Invariants: at most ``MAX_SAMPLES`` steps are kept; what is learned depends on the steps alone, not on how they were
handed over.

Known limits: a job that grows from its first step on never settles: its level is that of the later half of 2,048
steps. A single change within the first few blocks after warm-up is taken for a part of it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import median, pstdev

import msgspec

from torchmem_exporter.drift.robust import block_medians, median_error, slope, smoothness, spread, step_spread
from torchmem_exporter.drift.sizes import Curve, fit, varies

BLOCK_STEPS = 16
"""Steps that are judged as one, by their median."""
MAX_SAMPLES = 512
MIN_STEPS = 128
USUAL_STEPS = 256
"""Before so many a level is only known if it is calm."""
NOISY_STEPS = 512
"""After so many a level that does not wander is known however noisy it is."""
MAX_STEPS = 2048

_CHECK_EVERY = 32
_CHECK_FACTOR = 1.125
_MIN_BLOCKS = 5
_SETTLED_GROWTH = 0.01
"""Most that a settled job grows from the first to the last of the blocks looked at, relative."""
_CALM_RANGE = 0.005
"""Blocks that differ by less, relative, are enough early."""
_LEVEL_ERROR = 0.0017
"""Standard error, relative, with which a level is known."""
_NEGLIGIBLE = 0.0025
"""A deviation of the blocks below this, relative, is no wandering."""
_LEAST_SPREAD = 0.002
"""No level is known better than this, relative."""
_NOISE_SLACK = 1.1
"""How many times as much as their noise the blocks may differ in a job that does not wander."""
_WANDERING = 2.0
"""How many times as much as white noise would explain the blocks of a wandering job differ."""
_PERHAPS_WANDERING = 1.5
"""Likewise if they differ little from one to the next, or if the job has been seen to wander before."""
_SMOOTH = 0.75
"""Mean square of the change from one block to the next, in twice their variance, below which that is little."""


class Level(msgspec.Struct, kw_only=True, frozen=True):
    """What is usual of a device's step peaks."""

    num_bytes: float
    """Median, at the usual size of the input."""
    spread_bytes: float
    """Standard deviation, robustly, of medians of ``BLOCK_STEPS`` steps."""
    highest_bytes: float
    """Highest step peak among those it was learned from."""
    is_wandering: bool
    num_steps: int
    """Ordinary steps that were seen until it was known, those of the warm-up among them."""
    first_step: int
    last_step: int
    curve: Curve | None = None
    """What the size of the input explains."""


class Sample(msgspec.Struct, array_like=True, frozen=True):
    """An ordinary step, as numbers that can be reckoned with."""

    number: int
    ended_at: float
    peak: float
    end: float
    size: float


class Learning(msgspec.Struct):
    """The steps seen until the level is known."""

    samples: list[Sample] = []
    stride: int = 1
    """One step in so many is kept."""
    num_steps: int = 0
    next_check: int = MIN_STEPS
    has_wandered: bool = False

    def add(self, sample: Sample) -> bool:
        """Takes a step; returns whether it is time to look whether the level is known."""
        if self.num_steps % self.stride == 0:
            self.samples.append(sample)
        self.num_steps += 1
        if len(self.samples) > MAX_SAMPLES:
            self.samples = self.samples[::2]
            self.stride *= 2
        if self.num_steps < self.next_check:
            return False
        step = max(_CHECK_EVERY, int(self.num_steps * (_CHECK_FACTOR - 1)))
        self.next_check = min(self.num_steps + step, max(MAX_STEPS, self.num_steps + 1))
        return True

    def settled(self) -> list[Sample]:
        """The steps after warm-up; none when that is not over."""
        columns = [sample.peak for sample in self.samples], [sample.end for sample in self.samples]
        blocks = [block_medians(column, BLOCK_STEPS) for column in columns]
        noises = [median_error(step_spread(column), BLOCK_STEPS) for column in columns]
        num_blocks = len(blocks[0])
        latest = min(max(num_blocks // 2, num_blocks - 2 * _MIN_BLOCKS), num_blocks - _MIN_BLOCKS)
        for start in range(1, latest + 1):
            if all(_is_settled(each[start:], noise) for each, noise in zip(blocks, noises, strict=True)):
                return self.samples[start * BLOCK_STEPS :]
        return []

    def level(self, settled: Sequence[Sample]) -> Level | None:
        """The level, if it is known.

        Args:
            settled: what ``settled`` returned just now.
        """
        is_late = self.num_steps >= MAX_STEPS
        if not settled and not is_late:
            return None
        samples = settled or self.samples[len(self.samples) // 2 :]
        sizes = [sample.size for sample in samples]
        curve = fit(sizes, [sample.peak for sample in samples])
        peaks = [sample.peak - curve.explained(sample.size) if curve else sample.peak for sample in samples]
        middle = max(1.0, median(peaks))
        blocks = block_medians(peaks, BLOCK_STEPS)
        noise = median_error(step_spread(peaks), BLOCK_STEPS)
        is_wandering = self._wanders(blocks, noise, _NEGLIGIBLE * middle) or not settled
        if varies(sizes):
            noise_of_sizes = median_error(step_spread(sizes), BLOCK_STEPS)
            is_wandering |= self._wanders(block_medians(sizes, BLOCK_STEPS), noise_of_sizes, 0.0)
        if not is_late and is_wandering:
            self.has_wandered = True
            # Looked at often enough, every wandering job stands still for once.
            self.next_check = min(2 * self.num_steps, MAX_STEPS)
            return None
        if not is_late and not self._is_enough(blocks, median_error(step_spread(peaks), len(peaks))):
            return None
        return Level(
            num_bytes=middle,
            spread_bytes=max(_block_spread(blocks, noise, is_wandering=is_wandering), _LEAST_SPREAD * middle),
            highest_bytes=max(sample.peak for sample in samples),
            is_wandering=is_wandering,
            num_steps=self.num_steps,
            first_step=samples[0].number,
            last_step=samples[-1].number,
            curve=curve,
        )

    def _wanders(self, blocks: Sequence[float], noise: float, negligible: float) -> bool:
        """Whether the blocks differ by more than noise explains, and not only here and there."""
        found = pstdev(blocks)  # not the robust one: half of the steps may be of one size
        if found <= max(_PERHAPS_WANDERING * noise, negligible):
            return False
        return self.has_wandered or found > _WANDERING * noise or smoothness(blocks) < _SMOOTH

    def _is_enough(self, blocks: Sequence[float], error: float) -> bool:
        """Whether a level that does not wander is known from these blocks, their median being so far wrong."""
        middle = abs(median(blocks))
        is_calm = max(blocks) - min(blocks) < _CALM_RANGE * middle and len({s.size for s in self.samples}) == 1
        if not is_calm and self.num_steps < USUAL_STEPS:
            return False
        return error <= _LEVEL_ERROR * middle or self.num_steps >= NOISY_STEPS


def _block_spread(blocks: Sequence[float], noise: float, *, is_wandering: bool) -> float:
    """How much blocks differ; where only noise does it, a few blocks tell less than the steps in them."""
    if is_wandering:
        return max(pstdev(blocks), noise)
    return min(max(spread(blocks), noise), max(_NOISE_SLACK * noise, _NEGLIGIBLE * abs(median(blocks))))


def _is_settled(blocks: Sequence[float], noise: float) -> bool:
    """Whether the blocks grow or shrink no more than a settled job's may."""
    num_blocks = len(blocks)
    growth = slope(range(num_blocks), blocks) * (num_blocks - 1)
    return abs(growth) <= max(_SETTLED_GROWTH * abs(median(blocks)), 3 * noise * math.sqrt(12 / num_blocks))
