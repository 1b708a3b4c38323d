"""How much of a rank is told: the level of detail, and which modules are shown under their own names.

Scrapes over a storage's limit fail whole, so the sidecar keeps each rank within a number of series. A module is shown
whole or not at all; what is not shown is summed as ``__other__``.

Invariants: pure; the choice is sticky: a module once shown stays until one that is hidden holds more than
``CHALLENGE`` times as much, or the shown ones no longer fit.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass

from torchmem.errors import ConfigError
from torchmem.model import folded
from torchmem_exporter.labels import clean_label

OTHER = "__other__"
"""Label of what is summed; no module or reftype is called that."""

CHALLENGE = 2
"""How many times as much a hidden module must hold as the smallest shown one to take its place."""


class Level(enum.Enum):
    """How much is told of a rank, as ``--level`` spells it."""

    CORE = "core"
    """Totals by reftype, no modules."""
    STANDARD = "standard"
    """The largest modules, those that differ only in an index as one."""
    FULL = "full"
    """Every module that the rank tells apart, without a limit."""


MAX_SERIES = {Level.CORE: 75, Level.STANDARD: 250, Level.FULL: None}
"""Series of a rank with one accelerator, or none; each further accelerator may add as many."""

DEFAULT_DEPTH = 2
DEFAULT_TOP_MODULES = 20


@dataclass(frozen=True)
class Budget:
    """What one rank may cost.

    Attributes:
        level: how much is told.
        depth: at ``standard``, how deep modules are told apart, indices not counted; what lies deeper counts for the
            module above it.
        top_modules: at ``standard``, modules shown under their own names, at most.

    Raises:
        ConfigError: a number is not positive.
    """

    level: Level = Level.STANDARD
    depth: int = DEFAULT_DEPTH
    top_modules: int = DEFAULT_TOP_MODULES

    def __post_init__(self) -> None:
        if self.depth < 1:
            raise ConfigError(f"--depth {self.depth}: give at least 1, or --level core for no modules at all")
        if self.top_modules < 1:
            raise ConfigError(f"--top-modules {self.top_modules}: give at least 1, or --level core for no modules")

    def max_series(self, num_devices: int) -> int | None:
        """Series of a rank with so many devices, the CPU among them; None without a limit."""
        per_accelerator = MAX_SERIES[self.level]
        return per_accelerator and per_accelerator * max(1, num_devices - 1)

    def shown_name(self, module: str) -> str:
        """The name under which a module may be shown."""
        return clean_label(module if self.level is Level.FULL else cut(folded(module), self.depth))


def cut(folded_module: str, depth: int) -> str:
    """The module's name down to a depth: ``layers.*.attention.wq`` is cut to ``layers.*.attention`` at 2."""
    kept: list[str] = []
    num_named = 0
    for part in folded_module.split("."):
        num_named += part != "*"
        if num_named > depth:
            break
        kept.append(part)
    return ".".join(kept)


def choose(
    sizes: Mapping[str, int], costs: Mapping[str, int], shown: frozenset[str], *, max_modules: int, max_cost: int
) -> frozenset[str]:
    """The modules to show under their own names.

    Args:
        sizes: bytes that each module holds.
        costs: series that each module would take.
        shown: those shown until now; they stay first choice unless a hidden one has grown far past them.
        max_modules: how many may be shown.
        max_cost: series that all shown ones may take together.
    """
    ranked = sorted(sizes, key=lambda name: (-sizes[name] * (CHALLENGE if name in shown else 1), name))
    chosen: set[str] = set()
    for name in ranked[:max_modules]:
        max_cost -= costs[name]
        if max_cost < 0:
            break
        chosen.add(name)
    return frozenset(chosen)


def is_challenged(sizes: Mapping[str, int], shown: frozenset[str]) -> bool:
    """Whether a hidden module holds more than ``CHALLENGE`` times as much as the smallest shown one."""
    hidden = max((size for name, size in sizes.items() if name not in shown), default=0)
    return bool(shown) and hidden > CHALLENGE * min(sizes.get(name, 0) for name in shown)
