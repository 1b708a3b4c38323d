"""Baselines kept by name, to hold later runs against.

A file holds the baselines of all ranks and devices of one run, as JSON, so that it can be kept beside the code.

Invariants: torch-free, and free of the sidecar's other libraries; ``decode`` raises ``BaselineError`` and nothing else;
within a version fields are only added, each with a default.
"""

from __future__ import annotations

import msgspec

from torchmem.errors import TorchmemError
from torchmem_exporter.drift.composition import Composition
from torchmem_exporter.drift.learning import Level

VERSION = 1


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
        BaselineError: it is no such file, or of another version.
    """
    try:
        file = msgspec.json.decode(data, type=_File)
        if file.version != VERSION:
            raise BaselineError(f"baselines of version {file.version}; this release knows {VERSION}: save them anew")
        return msgspec.json.decode(file.run, type=Baselines)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise BaselineError(f"no file of baselines: {error}") from None
