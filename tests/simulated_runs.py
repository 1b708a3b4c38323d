"""Simulated training jobs: the step peaks and step ends of one device, benign ones and ones that drift.

A seed gives the same run of a kind for ever. All runs have a first step without optimizer state, and half of them
checkpoints, in steps that say so. A drift is relative to the peak before it.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from torchmem.model import Phase
from torchmem_exporter.drift.ring_steps import Step

NUM_STEPS = 4000
GIB = 1 << 30

BENIGN = (
    "flat",
    "noise",
    "varying lengths",
    "varying lengths, size unknown",
    "autocorrelated lengths",
    "autocorrelated lengths, size unknown",
    "garbage-collection sawtooth",
    "warm-up",
    "evaluation dips",
    "saturating fragmentation",
)
DRIFTING = (
    "step of 5%",
    "step of 6 to 30%",
    "leak of 0.03 to 0.1% a step",
    "leak of 0.01% a step",
    "leak of 0.002 to 0.008% a step",
    "leak of 0.01% under varying lengths",
    "leak of 0.01% under autocorrelated lengths, size unknown",
)


class Run(NamedTuple):
    """One device's memory, step by step."""

    steps: list[Step]
    onset: int | None
    """Step at which the drift begins."""
    speed: float
    """Growth a step, relative; 0 of a step change."""


class _Job:
    """The parts of a run, in bytes; added to by what happens in it."""

    def __init__(self, seed, kind):
        self.rng = np.random.default_rng([seed, *kind.encode()])
        self.t = np.arange(NUM_STEPS)
        self.level = self.rng.uniform(4, 70) * GIB
        floor = self.rng.uniform(0.25, 0.8)
        self.end = np.full(NUM_STEPS, floor * self.level)
        self.peak = np.full(NUM_STEPS, self.level)
        self.activations = (1 - floor) * self.level
        self.phases = np.full(NUM_STEPS, int(Phase.FORWARD | Phase.BACKWARD | Phase.OPTIMIZER))
        self.size = np.zeros(NUM_STEPS)

    def both(self, change):
        """Adds to peaks and ends alike."""
        self.peak = self.peak + change
        self.end = self.end + change

    def noise(self):
        """The peaks' and the ends' own."""
        self.peak += self.level * self.rng.choice([0.001, 0.005, 0.01, 0.02, 0.03]) * self.rng.normal(size=NUM_STEPS)
        self.end += self.end * self.rng.choice([0, 0.0005, 0.002, 0.005]) * self.rng.normal(size=NUM_STEPS)

    def some_noise(self):
        """Noise in three runs of four: allocators that give every step the same have none."""
        if self.rng.random() < 0.75:
            self.noise()

    def lengths(self, tau, *, is_known):
        """Inputs of varying lengths, which follow one another for some steps; more than linear in half of the runs."""
        latent = autocorrelated(self.rng, tau)
        length = 2048 * (1 + self.rng.uniform(0.05, 0.3) * latent)
        length = np.clip(64 * np.round(length / 64), 512, 4096)
        bend = self.rng.choice([0, 0.4])
        relative = length / 2048
        held = self.activations * ((1 - bend) * relative + bend * relative**2 - 1)
        self.peak += held
        self.end += self.rng.uniform(0, 0.05) * held
        if is_known:
            self.size = length * self.rng.choice([1, 8])

    def checkpoints(self):
        """Steps that hold copies of the parameters, and say so."""
        every = self.rng.integers(150, 1000)
        for start in range(int(every), NUM_STEPS, int(every)):
            self.peak[start] += self.rng.uniform(0.05, 0.4) * self.level
            self.phases[start] |= Phase.CHECKPOINT

    def run(self, onset=None, speed=0.0):
        """The finished run."""
        if self.rng.random() < 0.5:
            self.checkpoints()
        self.both(np.where(self.t == 0, -self.rng.uniform(0.1, 0.2) * self.level, 0))
        unit = self.rng.choice([512, 2 << 20])
        peak = (unit * np.round(self.peak / unit)).astype(np.int64).tolist()
        end = (unit * np.round(np.minimum(self.end, self.peak) / unit)).astype(np.int64).tolist()
        seconds = self.rng.uniform(0.5, 4) * np.exp(0.1 * self.rng.normal(size=NUM_STEPS))
        ended = (1.7e9 + np.cumsum(seconds)).tolist()
        rows = zip(self.t.tolist(), ended, self.phases.tolist(), peak, end, self.size.tolist(), strict=True)
        return Run([Step(*row) for row in rows], onset, speed)


def autocorrelated(rng, tau):
    """Values of mean 0 and deviation 1 that keep to what they were for about so many steps."""
    keep = math.exp(-1 / tau) if tau else 0.0
    shocks = rng.normal(size=NUM_STEPS) * math.sqrt(1 - keep * keep)
    values, value = np.empty(NUM_STEPS), rng.normal()
    for i, shock in enumerate(shocks):
        value = keep * value + shock
        values[i] = value
    return values


def simulate(kind, seed):
    """The run of a kind with a seed."""
    job = _Job(seed, kind)
    if kind in BENIGN:
        _BENIGN_PARTS[kind](job)
        return job.run()
    onset = int(job.rng.integers(600, 1500))
    since = np.clip(job.t - onset, 0, None)
    if kind.startswith("step"):
        job.some_noise()
        change = job.level * np.where(since > 0, 0.05 if kind == "step of 5%" else job.rng.uniform(0.06, 0.3), 0)
        if job.rng.random() < 0.5:
            job.both(change)
        else:
            job.peak += change
        return job.run(onset)
    if "autocorrelated" in kind:
        job.lengths(job.rng.uniform(20, 200), is_known=False)
    elif "varying" in kind:
        job.lengths(job.rng.choice([0, 50]), is_known=True)
    job.some_noise()
    speeds = {"0.03": (3e-4, 1e-3), "0.01": (1e-4, 1e-4), "0.00": (2e-5, 8e-5)}
    speed = job.rng.uniform(*speeds[kind.removeprefix("leak of ")[:4]])
    if job.rng.random() < 0.5:
        job.both(job.level * speed * since)
    else:  # now and then a block that is kept, as large as many steps' worth
        every = int(job.rng.integers(1, 10))
        job.both(job.level * speed * every * (since // every))
    return job.run(onset, speed)


def _noise(job):
    job.noise()


def _lengths(*, is_slow, is_known):
    def add(job):
        job.lengths(job.rng.uniform(20, 200) if is_slow else 0, is_known=is_known)
        job.some_noise()

    return add


def _sawtooth(job):
    """What cycles of references hold until the collector runs, at about every so many steps."""
    job.some_noise()
    period, height = np.exp(job.rng.uniform(math.log(20), math.log(1500))), job.rng.uniform(0.005, 0.03)
    held, start = np.zeros(NUM_STEPS), -int(job.rng.uniform(0, period))
    while start < NUM_STEPS:
        length = max(2, int(period * job.rng.uniform(0.8, 1.2)))
        inside = np.arange(max(0, start), min(NUM_STEPS, start + length))
        held[inside] = height * (inside - start) / (1.2 * period)
        start += length
    job.both(job.level * held)


def _warm_up(job):
    """Memory that is first used late: little by little, at once after some steps, or more at first than ever after."""
    job.some_noise()
    missing = job.rng.uniform(0.05, 0.5) * job.level
    shape = job.rng.integers(3)
    if shape == 0:
        job.both(-missing * np.exp(-job.t / job.rng.uniform(2, 150)) * np.minimum(1, job.end / job.level))
    elif shape == 1:
        job.both(np.where(job.t < job.rng.integers(1, 60), -min(missing, 0.2 * job.level), 0))
    else:
        job.peak += np.where(job.t < job.rng.integers(1, 30), missing, 0)


def _evaluation(job):
    """Stretches of steps that hold less, of which half of the jobs do not say so, or more, and say so."""
    job.some_noise()
    every, length = int(job.rng.integers(200, 1500)), int(job.rng.integers(3, 60))
    is_inside = (job.t + int(job.rng.integers(every))) % every < length
    says_so = job.rng.random() < 0.5
    change = job.rng.uniform(-0.2, 0.15 if says_so else -0.03) * job.level
    job.both(np.where(is_inside, change, 0))
    if says_so:
        job.phases[is_inside] |= Phase.EVAL


def _fragmentation(job):
    """Workspaces and fragments that pile up, ever more slowly."""
    job.some_noise()
    since = np.clip(job.t - job.rng.integers(0, 1000), 0, None)
    job.both(job.level * job.rng.uniform(0.01, 0.04) * (1 - np.exp(-since / job.rng.uniform(100, 2500))))


_BENIGN_PARTS = {
    "flat": lambda job: None,
    "noise": _noise,
    "varying lengths": _lengths(is_slow=False, is_known=True),
    "varying lengths, size unknown": _lengths(is_slow=False, is_known=False),
    "autocorrelated lengths": _lengths(is_slow=True, is_known=True),
    "autocorrelated lengths, size unknown": _lengths(is_slow=True, is_known=False),
    "garbage-collection sawtooth": _sawtooth,
    "warm-up": _warm_up,
    "evaluation dips": _evaluation,
    "saturating fragmentation": _fragmentation,
}
