"""The vocabulary every other file speaks: reference types, phases, checkpoint operations, owners and their names.

Invariants: imports neither torch nor anything else of torchmem; a member's value is the column the native ledger
books it in, so members are only ever appended; a member's label is what appears as ``reftype`` in every metric.
Source: the design's table of reftypes; display names are those of torch's own trackers.
"""

from __future__ import annotations

import enum
import re
from functools import lru_cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from typing_extensions import Self

OUTSIDE = "(outside modules)"
"""Owner of what was allocated while no watched module was running."""

ROOT = "(root)"
"""Label of the root module, whose own qualified name is empty (an empty label is an absent one in Prometheus)."""

OUTSIDE_OWNER = 0
"""Index of ``OUTSIDE`` in every table of owners; the root module is always 1."""

_INDEX = re.compile(r"(?<![^.])\d+(?![^.])")


@lru_cache(maxsize=1 << 13)
def folded(module: str) -> str:
    """The name of all modules that differ only in their indices: ``layers.17.mlp`` is one of ``layers.*.mlp``."""
    return _INDEX.sub("*", module)


class RefType(enum.IntEnum):
    """What a block of memory is for."""

    display_name: str

    def __new__(cls, value: int, display_name: str) -> Self:
        """A member is its column, with a display name besides."""
        member = int.__new__(cls, value)
        member._value_ = value
        member.display_name = display_name
        return member

    OTHER = 0, "Other"
    PARAMETER = 1, "Parameter"
    BUFFER = 2, "Buffer"
    GRADIENT = 3, "Gradient"
    OPTIMIZER_STATE = 4, "OptState"
    INPUT = 5, "Inputs"
    SHARDED_PARAMETER = 6, "Sharded Param"
    UNSHARDED_PARAMETER = 7, "Unsharded Param"
    SHARDED_GRADIENT = 8, "Sharded Grad"
    UNSHARDED_GRADIENT = 9, "Unsharded Grad"
    ALL_GATHER = 10, "All Gather"
    REDUCE_SCATTER = 11, "Reduce Scatter"
    ALL_REDUCE = 12, "All Reduce"
    GRADIENT_BUCKET = 13, "Gradient Bucket"
    ACTIVATION = 14, "Activation"
    RECOMPUTATION = 15, "Recomputation"
    TEMPORARY = 16, "Temp"
    CHECKPOINT = 17, "Checkpoint"

    @property
    def label(self) -> str:
        """The metric label, lower snake case."""
        return self.name.lower()


REFTYPE_LABELS: tuple[str, ...] = tuple(r.label for r in RefType)
"""Labels in column order."""


class Operation(enum.IntEnum):
    """What was done with a checkpoint."""

    SAVE = 1
    LOAD = 2

    @property
    def label(self) -> str:
        """The metric label, lower case."""
        return self.name.lower()


class Phase(enum.IntFlag):
    """What happened during a step; a step may hold several."""

    OTHER = 0
    FORWARD = 1
    BACKWARD = 2
    OPTIMIZER = 4
    CHECKPOINT = 8
    EVAL = 16
