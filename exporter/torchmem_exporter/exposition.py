"""One exposition: scan the directory, make the blocks, add what the sidecar says of itself, render.

Invariants: one at a time, so that what is remembered between expositions has one user; the sidecar's own metrics are
no rank's, so its lines follow those of the ranks. The process's own metrics (``process_*``) are prometheus_client's.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence

from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.exposition import generate_latest
from prometheus_client.openmetrics.exposition import generate_latest as generate_openmetrics

from torchmem_exporter import __version__, catalog, own
from torchmem_exporter.budget import Budget
from torchmem_exporter.drift.held import HeldRun
from torchmem_exporter.drift.judge import Judge, Verdict
from torchmem_exporter.points import Block, Series, in_order
from torchmem_exporter.reading.reader import Reader, Snapshot
from torchmem_exporter.sampler import Sampler, versions
from torchmem_exporter.text import TextRenderer

_EOF = b"# EOF\n"


class Exposition:
    """What a sidecar exposes; safe to use from several threads.

    Args:
        reader: of the directory.
        budget: what a rank may cost.
        held: baselines that running jobs are held against.
        timer: seconds.

    Attributes:
        parts: what gives further series about the sidecar itself, asked at each exposition.
    """

    def __init__(
        self,
        reader: Reader,
        budget: Budget,
        timer: Callable[[], float] = time.perf_counter,
        *,
        held: Sequence[HeldRun] = (),
    ) -> None:
        self.reader = reader
        self.parts: list[Callable[[], Iterable[Series]]] = []
        self._judge = Judge(reader.state, held)
        self._sampler = Sampler(budget, self._judge)
        self._timer = timer
        self._renderer = TextRenderer()
        self._own_renderer = TextRenderer()
        self._guard = threading.Lock()
        self._registry = CollectorRegistry()
        ProcessCollector(registry=self._registry)

    def blocks(self, consumer: str | None) -> tuple[Block, ...]:
        """All blocks, the sidecar's own last.

        Args:
            consumer: to whom they go, see ``Reader.scan``.
        """
        with self._guard:
            began = self._timer()
            snapshot = self.reader.scan(consumer)
            blocks = self._sampler.blocks(snapshot)
            return (*blocks, self._own_block(snapshot, self._timer() - began))

    def judged(self) -> tuple[Snapshot, list[Mapping[str, Verdict]]]:
        """What a look at the ranks finds, and what is known of each one's devices; takes nothing from any consumer."""
        with self._guard:
            snapshot = self.reader.scan(None)
            return snapshot, [self._judge.judge(rank) for rank in snapshot.ranks]

    def look(self, *, is_last: bool = False) -> Snapshot:
        """Judges what is new, so that no step is missed between scrapes, and keeps what was learned."""
        with self._guard:
            snapshot = self.reader.scan(None)
            for rank in snapshot.ranks:
                self._judge.judge(rank)
            self._judge.release(snapshot.ranks)
        # The disk may be slow: no scrape waits for it.
        self.reader.save()
        self._judge.save(is_due=is_last, guard=self._guard)
        return snapshot

    def text(self, consumer: str | None, *, is_openmetrics: bool) -> tuple[bytes, ...]:
        """The text of a scrape, in pieces.

        Args:
            consumer: to whom it goes, see ``Reader.scan``.
            is_openmetrics: in which format.
        """
        with self._guard:
            began = self._timer()
            snapshot = self.reader.scan(consumer)
            pieces = [*self._renderer.render(self._sampler.blocks(snapshot), is_openmetrics=is_openmetrics)]
            last = self._own_block(snapshot, self._timer() - began)
            pieces += self._own_renderer.render((last,), is_openmetrics=is_openmetrics)
        if is_openmetrics:
            process = generate_openmetrics(self._registry)  # type: ignore[no-untyped-call]  # typed in part
            return (*pieces, process.removesuffix(_EOF), _EOF)
        return (*pieces, generate_latest(self._registry))

    def _own_block(self, snapshot: Snapshot, seconds: float) -> Block:
        in_use = {*versions(rank.record.identity for rank in snapshot.ranks), (__version__, "")}
        series = [
            own.series(catalog.SNAPSHOT_ERRORS, {(reason,): n for reason, n in sorted(snapshot.num_errors.items())}),
            own.series(catalog.UNBURIED, {(): snapshot.num_unburied}),
            own.series(catalog.STATE_FAILURES, {(): snapshot.num_state_failures}),
            *(one for part in self.parts for one in part()),
            own.series(catalog.BUILD_INFO, dict.fromkeys(sorted(in_use), 1)),
            own.series(catalog.SCRAPE_DURATION, {(): seconds}),
        ]
        return Block((), None, in_order(series))
