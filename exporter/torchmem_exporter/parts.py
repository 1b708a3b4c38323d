"""From a rank's books to series by module and reftype, within the rank's budget.

Each cell of a book is added to one point. Which one is decided when the cell is first seen, and remembered for the
life of the attempt, so that a scrape only adds up.

Invariants: the points of a book add up to the book, exactly, and by reftype to the reftype's total, whatever is folded
or hidden; a combination that has ever held bytes stays, at 0, until modules are chosen anew; one that never did is left
out; the number of points stays within the allowance. A module's active peak is no part of a sum: of the modules that
one point stands for, the one with the highest is shown.

Known limits: where an allowance does not hold even the totals by reftype and the modules as one, no module is shown,
and the smallest reftypes are summed as ``__other__`` too; at least one point a device and book remains.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from torchmem.wire.record import MODULE_MASK, REFTYPE_SHIFT, Record, cell_columns
from torchmem_exporter import catalog
from torchmem_exporter.budget import OTHER, Budget, Level, choose, is_challenged
from torchmem_exporter.catalog import Metric
from torchmem_exporter.labels import clean_label
from torchmem_exporter.points import Series

_TOTALS = {catalog.MODULE_USAGE: catalog.USAGE, catalog.MODULE_STEP_PEAK: catalog.STEP_PEAK}
"""The metric that sums one over its modules."""

_METRICS = (
    catalog.MODULE_USAGE,
    catalog.MODULE_STEP_PEAK,
    catalog.MODULE_ACTIVE_PEAK,
    catalog.USAGE,
    catalog.STEP_PEAK,
)


class _Book(NamedTuple):
    """One book of one device: its cells' keys, see ``cell_columns``, and the bytes in each."""

    metric: Metric
    device: str
    keys: list[int]
    amounts: list[int]


_Place = tuple[Metric, str, int]
"""Metric, device's label and reftype: of all modules as one."""


@dataclass
class _Points:
    """The points of one metric."""

    labels: list[tuple[str, ...]] = field(default_factory=list)
    of_label: dict[tuple[str, ...], int] = field(default_factory=dict)
    of_cell: dict[str, dict[int, int]] = field(default_factory=dict)
    """By device and key (of a total: reftype index), the point's position."""
    frozen: tuple[tuple[str, ...], ...] = ()

    def place(self, device: str, key: int, labels: tuple[str, ...]) -> None:
        """Decides which point a cell goes to."""
        position = self.of_label.setdefault(labels, len(self.labels))
        if position == len(self.labels):
            self.labels.append(labels)
        self.of_cell.setdefault(device, {})[key] = position


class RankParts:
    """What one attempt of a rank shows of its books.

    Args:
        budget: what the rank may cost.
        prefix: values of the labels that say which rank it is.

    Attributes:
        num_hidden: modules that have held bytes and are not shown under their own names.
    """

    def __init__(self, budget: Budget, prefix: tuple[str, ...]) -> None:
        self.num_hidden = 0
        self._budget = budget
        self._prefix = prefix
        self._modules: list[str] = []
        self._reftypes: list[str] = []
        self._names: list[str] = []
        """By module: under which name it may be shown."""
        self._reftype_names: list[str] = []
        self._shares_names = False
        self._alike: list[list[int]] = []
        """Modules by the label that they share."""
        self._held: set[str] = set()
        """Names under which anything was ever held."""
        self._cells: dict[tuple[Metric, str], set[int]] = {}
        """By metric and device: all that ever held bytes."""
        self._shows_modules = budget.level is not Level.CORE
        self._shown: frozenset[str] | None = None
        """Names of the modules that are shown; None: all."""
        self._shown_reftypes: frozenset[int] | None = None
        self._points: dict[Metric, _Points] = {}
        self._allowance = math.inf
        """The last one."""

    def series(self, record: Record, num_others: int) -> list[Series]:
        """The record's books as series.

        Args:
            record: of this attempt.
            num_others: series that the budget must hold besides.
        """
        if record.modules != self._modules or record.reftypes != self._reftypes:
            self._take_names(record)
        books = list(_books(record))
        limit = self._budget.max_series(len(record.devices))
        allowance = None if limit is None else max(0, limit - num_others)
        is_new = self._note(books)
        if is_new and (allowance is None or not self._has_too_many_modules()):  # else they are chosen first
            self._place()
        if allowance is not None:
            # What is told besides may become more, when the rank begins to drift.
            may_be_over = is_new or allowance < self._allowance
            self._allowance = allowance
            if (may_be_over and self._is_over(allowance)) or self._is_challenged(books):
                self._choose(books, allowance)
                self._place()
        return list(self._filled(books))

    # -- what is remembered

    def _take_names(self, record: Record) -> None:
        """Learns what the record's indices mean, and forgets what was known under others."""
        self._modules, self._reftypes = record.modules, record.reftypes
        self._names = [self._budget.shown_name(name) for name in record.modules]
        self._reftype_names = [clean_label(name) for name in record.reftypes]
        self._shares_names = len(set(self._names)) < len(self._names)
        self._shows_modules = self._budget.level is not Level.CORE
        self._shown = self._shown_reftypes = None
        self._held = set()
        self._cells.clear()
        self._place()

    def _note(self, books: Iterable[_Book]) -> bool:
        """Remembers what holds bytes; returns whether anything does for the first time."""
        is_new = False
        for book in books:
            known = self._cells.setdefault((book.metric, book.device), set())
            if not known.issuperset(book.keys):
                known.update(book.keys)
                self._held.update(self._names[key & MODULE_MASK] for key in book.keys)
                is_new = True
        return is_new

    # -- which point a cell goes to

    def _place(self) -> None:
        """Decides for all that ever held bytes, as things are shown now."""
        self._points = {metric: _Points() for metric in _METRICS}
        modules = [self._module_label(index) for index in range(len(self._names))]
        reftypes = [self._reftype_label(index) for index in range(len(self._reftype_names))]
        for (metric, device), cells in self._cells.items():
            prefix = (*self._prefix, clean_label(device))
            keys = sorted(cells, key=lambda key: (key & MODULE_MASK, key))
            if self._shows_modules:
                for key in keys:
                    labels = (*prefix, modules[key & MODULE_MASK], reftypes[key >> REFTYPE_SHIFT])
                    self._points[metric].place(device, key, labels)
            if metric in _TOTALS:
                for reftype in dict.fromkeys(key >> REFTYPE_SHIFT for key in keys):
                    self._points[_TOTALS[metric]].place(device, reftype, (*prefix, reftypes[reftype]))
        for points in self._points.values():
            points.frozen = tuple(points.labels)
        by_label: dict[str, list[int]] = {}
        for index, label in enumerate(modules):
            by_label.setdefault(label, []).append(index)
        self._alike = list(by_label.values())
        held = {key & MODULE_MASK for cells in self._cells.values() for key in cells}
        self.num_hidden = sum(not self._is_shown(index) for index in held)

    def _is_shown(self, module: int) -> bool:
        """Whether a module is shown under its own name."""
        return self._shows_modules and self._module_label(module) == clean_label(self._modules[module])

    def _module_label(self, module: int) -> str:
        name = self._names[module]
        return name if self._shown is None or name in self._shown else OTHER

    def _reftype_label(self, reftype: int) -> str:
        is_shown = self._shown_reftypes is None or reftype in self._shown_reftypes
        return self._reftype_names[reftype] if is_shown else OTHER

    # -- what is shown

    def _num_points(self) -> int:
        return sum(len(points.labels) for points in self._points.values())

    def _is_over(self, allowance: int) -> bool:
        return self._has_too_many_modules() or self._num_points() > allowance

    def _has_too_many_modules(self) -> bool:
        num_shown = len(self._held if self._shown is None else self._held & self._shown)
        return self._shows_modules and num_shown > self._budget.top_modules

    def _is_challenged(self, books: Iterable[_Book]) -> bool:
        return self._shown is not None and is_challenged(self._sizes(books), self._shown)

    def _choose(self, books: Sequence[_Book], allowance: int) -> None:
        """Chooses modules, or no modules and fewer reftypes, so that all points fit."""
        before, self._shown = self._shown or frozenset(), frozenset()
        self._shown_reftypes = None
        places = self._places()
        points = {(metric, device, self._reftype_names[reftype]) for metric, device, reftype in places}
        num_totals = sum(metric in _TOTALS for metric, _, _ in points)
        room = allowance - num_totals - len(points)  # past what there is with all modules as one
        self._shows_modules = self._budget.level is not Level.CORE and room >= 0
        if self._shows_modules:
            limits = {"max_modules": self._budget.top_modules, "max_cost": room}
            self._shown = choose(self._sizes(books), self._costs(), before, **limits)
        elif num_totals > allowance:
            self._choose_reftypes(books, places, allowance)

    def _places(self) -> list[_Place]:
        """Where anything ever held bytes."""
        return [
            (metric, clean_label(device), reftype)
            for (metric, device), cells in self._cells.items()
            for reftype in {key >> REFTYPE_SHIFT for key in cells}
        ]

    def _choose_reftypes(self, books: Sequence[_Book], places: Sequence[_Place], allowance: int) -> None:
        held = {reftype: 0 for _, _, reftype in places}
        for book in books:
            for key, amount in zip(book.keys, book.amounts, strict=True):
                held[key >> REFTYPE_SHIFT] += amount
        totals: dict[int, list[tuple[Metric, str]]] = {reftype: [] for reftype in held}
        for metric, device, reftype in places:
            if metric in _TOTALS:
                totals[reftype].append((metric, device))
        names = self._reftype_names
        points = Counter((*total, names[reftype]) for reftype, where in totals.items() for total in where)
        kept = sorted(held, key=lambda reftype: (-held[reftype], reftype))
        while len(points) > allowance and kept:
            dropped = kept.pop()
            for metric, device in totals[dropped]:
                points[metric, device, OTHER] += 1
                points[metric, device, names[dropped]] -= 1
            points = +points  # without those that no reftype is left of
        self._shown_reftypes = frozenset(kept)

    def _sizes(self, books: Iterable[_Book]) -> dict[str, int]:
        """Of each name that ever held bytes the most that it holds in one book, in bytes."""
        sizes = dict.fromkeys(self._held, 0)
        for book in books:
            if book.metric in _TOTALS:
                for name, num_bytes in _by_name(book, self._names).items():
                    sizes[name] = max(sizes[name], num_bytes)
        return sizes

    def _costs(self) -> dict[str, int]:
        """Of each name that ever held bytes the points that it takes."""
        costs: Counter[str] = Counter()
        for cells in self._cells.values():
            points = {(self._names[key & MODULE_MASK], key >> REFTYPE_SHIFT) for key in cells}
            costs.update(name for name, _ in points)
        return costs

    # -- what a scrape does

    def _filled(self, books: Iterable[_Book]) -> Iterator[Series]:
        """The points with the books' bytes."""
        values = {metric: [0] * len(points.labels) for metric, points in self._points.items()}
        for book in books:
            if self._shows_modules:
                shown = book
                if book.metric is catalog.MODULE_ACTIVE_PEAK and (self._shares_names or self._shown is not None):
                    shown = self._highest(book)
                where = self._points[book.metric].of_cell.get(book.device, {})
                _add_up(shown.keys, shown.amounts, where, values[book.metric])
            if book.metric in _TOTALS:
                sums = [0] * len(self._reftypes)
                for key, amount in zip(book.keys, book.amounts, strict=True):
                    sums[key >> REFTYPE_SHIFT] += amount
                total = _TOTALS[book.metric]
                where = self._points[total].of_cell.get(book.device, {})
                _add_up(where, [sums[reftype] for reftype in where], where, values[total])
        for metric in _METRICS:
            if values[metric]:
                yield Series(metric, self._points[metric].frozen, values[metric])

    def _highest(self, book: _Book) -> _Book:
        """The cells of those modules that hold the most among all that share their label."""
        held = [0] * len(self._names)
        for key, amount in zip(book.keys, book.amounts, strict=True):
            held[key & MODULE_MASK] += amount
        is_highest = bytearray(len(held))
        for modules in self._alike:
            is_highest[max(modules, key=held.__getitem__)] = True
        cells = [cell for cell in zip(book.keys, book.amounts, strict=True) if is_highest[cell[0] & MODULE_MASK]]
        return book._replace(keys=[key for key, _ in cells], amounts=[amount for _, amount in cells])


def _books(record: Record) -> Iterator[_Book]:
    for device in record.devices:
        yield _Book(catalog.MODULE_USAGE, device.name, *cell_columns(device.usage))
        yield _Book(catalog.MODULE_STEP_PEAK, device.name, *cell_columns(device.step_peak))
        yield _Book(catalog.MODULE_ACTIVE_PEAK, device.name, *cell_columns(device.active_peak))


def _by_name(book: _Book, names: Sequence[str]) -> dict[str, int]:
    held: dict[str, int] = {}
    for key, amount in zip(book.keys, book.amounts, strict=True):
        name = names[key & MODULE_MASK]
        held[name] = held.get(name, 0) + amount
    return held


def _add_up(keys: Collection[int], amounts: Collection[int], where: dict[int, int], values: list[int]) -> None:
    for key, amount in zip(keys, amounts, strict=True):
        values[where[key]] += amount
