"""Baselines kept by name, to hold later runs against.

A file holds the baselines of all ranks and devices of one run, as JSON, so that it can be kept beside the code.

Invariants: torch-free, and free of the sidecar's other libraries; ``decode`` raises ``BaselineError`` and nothing else,
and what it returns can be judged by: its numbers are such as a job's memory can have; within a version fields are only
added, each with a default.
"""

from __future__ import annotations

from itertools import pairwise

import msgspec

from torchmem.errors import TorchmemError
from torchmem_exporter.drift.composition import Composition
from torchmem_exporter.drift.learning import Level
from torchmem_exporter.drift.sizes import Curve
from torchmem_exporter.labels import clean_label

VERSION = 1
MAX_NUMBER = 1 << 80
"""No number in a file is larger: more than the parts of any record add up to, and safe to reckon with."""


class BaselineError(TorchmemError):
    """A file of baselines cannot be used."""


class Baseline(msgspec.Struct, kw_only=True, frozen=True):
    """What was usual of one device of one rank."""

    rank: int
    device: str
    level: Level
    usual: Composition | None = None
    """What it was made of."""
    mesh: dict[str, int] = {}
    """The rank's role: its coordinate along each dimension of the mesh."""


class Baselines(msgspec.Struct, kw_only=True, frozen=True):
    """What was usual of one run."""

    name: str
    train_job: str
    world_size: int
    saved_at: float
    """Unix seconds."""
    torch_version: str = ""
    torchmem_version: str = ""
    baselines: list[Baseline] = []

    def of(self, rank: int, device: str) -> Baseline | None:
        """That of one device of one rank."""
        return next((one for one in self.baselines if (one.rank, one.device) == (rank, device)), None)


class _File(msgspec.Struct, kw_only=True):
    """What is written: the version can be read whatever the rest looks like."""

    version: int
    run: msgspec.Raw


def encode(run: Baselines) -> bytes:
    """The bytes of a file."""
    file = _File(version=VERSION, run=msgspec.Raw(msgspec.json.encode(run)))
    return msgspec.json.format(msgspec.json.encode(file), indent=1)


def decode(data: bytes) -> Baselines:
    """Reads the bytes of a file.

    Raises:
        BaselineError: it is no such file, or of another version, or holds what no job's memory can be.
    """
    try:
        file = msgspec.json.decode(data, type=_File)
        if file.version != VERSION:
            raise BaselineError(f"baselines of version {file.version}; this release knows {VERSION}: save them anew")
        run = msgspec.json.decode(file.run, type=Baselines)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise BaselineError(f"no file of baselines: {error}") from None
    for one in run.baselines:
        if fault := _fault(one):
            raise BaselineError(f"the baseline of rank {one.rank} {clean_label(one.device)} {fault}: save it anew")
    return run


def _fault(one: Baseline) -> str:
    """What no job's memory can be; empty where there is nothing of the kind."""
    level = one.level
    if not 1 <= level.num_bytes <= MAX_NUMBER:
        return f"has a level of {level.num_bytes:g} bytes"
    if not 0 <= level.spread_bytes <= MAX_NUMBER:
        return f"has a spread of {level.spread_bytes:g} bytes"
    if not 0 <= level.highest_bytes <= MAX_NUMBER:
        return f"has a highest step peak of {level.highest_bytes:g} bytes"
    if level.curve is not None and not _is_curve(level.curve):
        return "has a curve that is none"
    usual = one.usual or Composition()
    if not all(0 <= size <= MAX_NUMBER for size in (usual.other_bytes, *(part.num_bytes for part in usual.parts))):
        return "has a part that holds less than nothing, or more than there is"
    return ""


def _is_curve(curve: Curve) -> bool:
    """Whether it goes through knots, from left to right."""
    if not curve.sizes or len(curve.sizes) != len(curve.num_bytes):
        return False
    bare = [curve.first_slope, curve.last_slope, curve.reference, curve.lowest, curve.highest]
    is_small = all(abs(number) <= MAX_NUMBER for number in [*curve.sizes, *curve.num_bytes, *bare])
    return is_small and all(left < right for left, right in pairwise(curve.sizes))
