"""What a scrape of 35,200 series costs: ``python tests/bench/rendering.py [--rounds 20] [--short] [--json]``.

8 ranks of 200 modules and 11 reftypes, two metrics a cell, shown in full. In each round every rank writes a new record;
then, in turn: the scrape after that change (read, judged, sampled, rendered), the rendering alone, the scrape of
unchanged records, packing by gzip, and ``generate_latest`` of prometheus_client for the same points. Medians; the
ratio's interval is that of its rounds. Exits with 1 when a full run exceeds a limit.
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from prometheus_client.exposition import generate_latest
from rich.console import Console
from rich.table import Table

from benchmarks import arguments
from records import cells, living, make_device, make_record, module_names, total
from reference_text import Reference
from torchmem.model import RefType
from torchmem.wire import record as wire
from torchmem_exporter.budget import Budget, Level
from torchmem_exporter.exposition import Exposition
from torchmem_exporter.reading.reader import Reader
from torchmem_exporter.sampler import Sampler
from torchmem_exporter.serving.routes import packed
from torchmem_exporter.text import TextRenderer

NUM_RANKS, NUM_MODULES, NUM_REFTYPES = 8, 200, 11
REFTYPES = tuple(RefType)[1 : 1 + NUM_REFTYPES]
MAX_SCRAPE_SECONDS = 0.030
MIN_RATIO = 20.0


def record(rank, number):
    """A rank's record after so many changes: each amount differs from that of the record before."""
    usage, peak = (cells(REFTYPES, NUM_MODULES, scale, rank + 100 * number)[1:] for scale in (512, 1024))
    books = {"usage": wire.pack_cells(usage), "step_peak": wire.pack_cells(peak), "active_peak": b""}
    device = make_device(rank, 1, **books, usage_bytes=total(usage), step_peak_bytes=total(peak))
    changes = {"written_at": time.time(), "step": number}
    return make_record(rank, 1, modules=module_names(NUM_MODULES), devices=[device], **changes)


def seconds(call):
    """How long a call takes, and what it gives."""
    began = time.perf_counter()
    found = call()
    return time.perf_counter() - began, found


def one_round(exposition, sampler, renderer, directory):
    """Times of everything once, the records having changed before."""
    taken = {}
    taken["scrape after a change"], pieces = seconds(lambda: exposition.text("prometheus", is_openmetrics=False))
    taken["scrape of unchanged records"], _ = seconds(lambda: exposition.text("prometheus", is_openmetrics=False))
    taken["packing by gzip"], _ = seconds(lambda: sum(map(len, packed(pieces))))
    blocks = sampler.blocks(Reader(directory, stale_after=60.0).scan(None))
    taken["rendering"], text = seconds(lambda: list(renderer.render(blocks, is_openmetrics=False)))
    taken["prometheus_client"], _ = seconds(lambda: generate_latest(Reference(blocks)))
    return taken, sum(piece.count(b"\n") for piece in text)


def measure(num_rounds):
    """All figures, by name."""
    rounds = []
    with tempfile.TemporaryDirectory() as folder:
        directory = Path(folder) / "records"
        with living(directory, *(record(rank, 0) for rank in range(NUM_RANKS))) as stores:
            budget = Budget(Level.FULL)
            reader = Reader(directory, stale_after=60.0)
            exposition = Exposition(reader, budget)
            sampler, renderer = Sampler(budget), TextRenderer()
            for number in range(1, num_rounds + 3):
                for rank, store in enumerate(stores):
                    store.write(wire.encode(record(rank, number)))
                rounds.append(one_round(exposition, sampler, renderer, directory))
    times = [taken for taken, _ in rounds[2:]]  # the first rounds make the templates
    ratios = sorted(taken["prometheus_client"] / taken["rendering"] for taken in times)
    return {
        "num_series": NUM_RANKS * NUM_MODULES * NUM_REFTYPES * 2,
        "num_lines": rounds[-1][1],
        "median_seconds": {name: statistics.median(taken[name] for taken in times) for name in times[0]},
        "ratio": statistics.median(ratios),
        "ratio_lowest": ratios[0],
        "ratio_highest": ratios[-1],
    }


def show(console, figures):
    """Prints the table."""
    table = Table("what", "median ms", title=f"{figures['num_series']:,} series by module, 8 ranks")
    for name, taken in figures["median_seconds"].items():
        table.add_row(name, f"{1e3 * taken:.2f}")
    console.print(table)
    console.print(
        f"rendering is {figures['ratio']:.0f} times as fast as prometheus_client"
        f" ({figures['ratio_lowest']:.0f} to {figures['ratio_highest']:.0f}; limit {MIN_RATIO:.0f});"
        f" a scrape after a change may take {1e3 * MAX_SCRAPE_SECONDS:.0f} ms"
    )


def main():
    parser = arguments(__doc__, short="five rounds")
    parser.add_argument("--rounds", type=int, default=20, help="times everything is measured (default: 20)")
    flags = parser.parse_args()
    figures = measure(5 if flags.short else flags.rounds)
    if flags.json:
        print(json.dumps(figures, indent=1))
    else:
        show(Console(), figures)
    slow = figures["median_seconds"]["scrape after a change"] > MAX_SCRAPE_SECONDS
    return int(not flags.short and (slow or figures["ratio"] < MIN_RATIO))


if __name__ == "__main__":
    raise SystemExit(main())
