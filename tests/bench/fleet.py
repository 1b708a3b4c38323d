"""What fleets of ranks cost: the sidecar, a real Prometheus, a real VictoriaMetrics; and what larger fleets would need.

``python tests/bench/fleet.py [--short] [--soak] [--json] [--update deploy/scale.md]``: ``--short`` measures less and
calculates nothing; ``--soak`` instead scrapes a sidecar over 64 ranks 2,000 times, while ranks come and go;
``--update`` replaces the tables in a page. Everything runs on this machine, at most a few hundred thousand series; what
1,000 and 16,000 ranks need is calculated from that, line by line in ``needs``.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import statistics
import sys
import tempfile
from pathlib import Path

from rich.console import Console
from rich.progress import Progress
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import fleet_costs
from backends import find_program
from fleets import Fleet, soak
from sidecars import running

LEVELS = ("core", "standard", "full")
NODES = ((8, 30), (8, 300), (64, 300))
"""Ranks and modules."""
NUM_SCRAPES, NUM_SHORT_SCRAPES = 7, 3
STORES = (("prometheus", 50), ("prometheus", 200), ("victoria-metrics", 50), ("victoria-metrics", 200))
"""Nodes of 8 ranks each."""
STORE_INTERVAL, STORE_SECONDS, SHORT_STORE_SECONDS = 5, 20, 10
DISK_TICKS = 11

FLEETS = (1_000, 16_000)
SCRAPE_SECONDS = 15
RANKS_OF_NODE = 8
SPARE = 2.0
"""Memory beside what ingestion takes: for queries, for compaction, and for the series of jobs that have just ended."""
SHARD_SERIES = 1_000_000
"""What one of several Prometheus servers is given."""
REMOTE_WRITE = 1.25
"""Memory that remote_write adds, by Prometheus' own page on tuning it."""
MIMIR_SERIES, MIMIR_GB, MIMIR_SAMPLES, MIMIR_REPLICAS, MIMIR_SPARE = 300_000, 2.5, 25_000, 3, 1.5
"""Of Mimir's page on capacity: for an ingester's core and memory, for a distributor's core; copies; extra memory."""
SOAK_RANKS, SOAK_MODULES, SOAK_SCRAPES, SOAK_WARM = 64, 300, 2_000, 300
SOAK_LIMITS = {"max_rss_mb": 150.0, "growth_mb": 4.0}
BEGIN, END = "<!-- measured: begin -->", "<!-- measured: end -->"


def measure(tick, *, is_short):
    """All figures, by part."""
    scrapes = NUM_SHORT_SCRAPES if is_short else NUM_SCRAPES
    figures = {"machine": f"{os.cpu_count()} cores, {platform.machine()}, Python {platform.python_version()}"}
    figures["sidecar"] = []
    for ranks, modules in NODES[:1] if is_short else NODES:
        for level in LEVELS:
            figures["sidecar"].append(fleet_costs.sidecar_costs(ranks, modules, level, scrapes))
            tick()
    figures["stores"] = []
    for kind, nodes in STORES[:1] if is_short else STORES:
        if find_program(kind):
            seconds = SHORT_STORE_SECONDS if is_short else STORE_SECONDS
            figures["stores"].append(fleet_costs.store_costs(kind, nodes, STORE_INTERVAL, seconds, tick))
    if not is_short and len(figures["stores"]) == len(STORES):
        figures["levels"] = [fleet_costs.level_series(level) for level in LEVELS]
        figures["disk"] = fleet_costs.disk_costs(tick)
        figures["needs"] = [needs(figures, ranks, level) for ranks in FLEETS for level in figures["levels"]]
    return figures


def num_ticks(*, is_short):
    """How often ``measure`` tells of progress."""
    stores = 1 if is_short else len(STORES)
    cells = len(LEVELS) * (1 if is_short else len(NODES))
    return cells + stores * (SHORT_STORE_SECONDS if is_short else STORE_SECONDS) + (0 if is_short else DISK_TICKS)


def needs(figures, ranks, level):
    """What a fleet needs at a level, calculated from what was measured."""
    nodes = math.ceil(ranks / RANKS_OF_NODE)
    series = ranks * (level["at_most"] or level["per_rank"]) + nodes * level["per_node"]
    samples = series / SCRAPE_SECONDS
    disk, day = figures["disk"], 86_400 * samples
    prometheus, victoria = (memory(figures["stores"], kind) for kind in ("prometheus", "victoria-metrics"))
    shards = math.ceil(series / SHARD_SERIES)
    in_memory = series * MIMIR_REPLICAS / MIMIR_SERIES
    blocks = 86_400 / fleet_costs.DISK_SECONDS * disk["prometheus_index_bytes_per_series"] * series
    return {
        "ranks": ranks,
        "level": level["level"],
        "series": round(series),
        "samples_per_second": round(samples),
        "prometheus_gb": SPARE * prometheus(series),
        "prometheus_cores": samples * cpu_us(figures["stores"], "prometheus") / 1e6,
        "prometheus_disk_gb_per_day": (day * disk["prometheus_bytes_per_sample"] + blocks) / 1e9,
        "shards": shards,
        "shard_gb": REMOTE_WRITE * SPARE * prometheus(series / shards),
        "victoria_metrics_gb": SPARE * victoria(series),
        "victoria_metrics_disk_gb_per_day": day * disk["victoria_metrics_bytes_per_sample"] / 1e9,
        "mimir_ingester_gb": in_memory * MIMIR_GB * MIMIR_SPARE,
        "mimir_cores": in_memory + samples / MIMIR_SAMPLES,
    }


def memory(stores, kind):
    """GB that a store takes for so many series: a straight line through the two sizes measured."""
    small, large = (store for store in stores if store["store"] == kind)
    per_series = (large["rss_mb"] - small["rss_mb"]) / (large["series"] - small["series"])
    return lambda series: (small["rss_mb"] + per_series * (series - small["series"])) / 1000


def cpu_us(stores, kind):
    """Microseconds of a core for each sample, of the largest store measured: there the fixed part weighs least."""
    return [store for store in stores if store["store"] == kind][-1]["cpu_us_per_sample"]


def tables(figures):
    """The figures as tables: title, and rows by column."""
    found = [
        (f"The sidecar ({figures['machine']})", figures["sidecar"]),
        (f"The stores, scraping every {STORE_INTERVAL} s", figures["stores"]),
    ]
    if "needs" in figures:
        found += [
            (f"Series, at {fleet_costs.MODULES_OF_RANK} modules a rank", figures["levels"]),
            ("On disk, after two hours at 15 s", [figures["disk"]]),
            (
                f"What fleets need of Prometheus, every {SCRAPE_SECONDS} s",
                part(figures["needs"], "prometheus", "shard"),
            ),
            ("What they need of VictoriaMetrics or Mimir", part(figures["needs"], "victoria", "mimir")),
        ]
    return found


def part(rows, *prefixes):
    """The columns that every table of needs has, and those of some stores."""
    kept = ("ranks", "level", "series", "samples", *prefixes)
    return [{name: value for name, value in row.items() if name.startswith(kept)} for row in rows]


def text(value):
    """A figure as a table shows it."""
    if value is None:
        return "no limit"
    if not isinstance(value, float):
        return f"{value:,}" if isinstance(value, int) else str(value)
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def show(figures):
    """Prints the tables."""
    console = Console()
    for title, rows in tables(figures):
        table = Table(title=title, title_justify="left")
        for name in rows[0] if rows else ():
            table.add_column(name.replace("_", " "), justify="right")
        for row in rows:
            table.add_row(*map(text, row.values()))
        console.print(table)


def markdown(figures):
    """The tables for a page."""
    for title, rows in tables(figures):
        yield f"**{title}**\n"
        yield "| " + " | ".join(name.replace("_", " ") for name in rows[0]) + " |"
        yield "|" + " ---: |" * len(rows[0])
        yield from ("| " + " | ".join(map(text, row.values())) + " |" for row in rows)
        yield ""


def update(page, figures):
    """Replaces the tables in a page."""
    head, _, rest = page.read_text().partition(BEGIN)
    _, found, tail = rest.partition(END)
    if not found:
        raise SystemExit(f"{page} has no {BEGIN} and {END}")
    page.write_text(head + BEGIN + "\n\n" + "\n".join(markdown(figures)) + "\n" + END + tail)


def measure_soak(tick):
    """Resident memory of a sidecar over many scrapes, while ranks come and go."""
    with (
        tempfile.TemporaryDirectory() as folder,
        Fleet(Path(folder), SOAK_RANKS, SOAK_MODULES) as fleet,
        running(folder) as sidecar,
    ):
        resident = soak(fleet, sidecar, SOAK_SCRAPES, num_ranks=SOAK_RANKS, advance=tick)
    early, late = (statistics.median(part) for part in (resident[SOAK_WARM : SOAK_WARM + 100], resident[-100:]))
    return {"scrapes": SOAK_SCRAPES, "max_rss_mb": max(resident), "growth_mb": late - early, "rss_mb": resident[::100]}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--short", action="store_true", help="measure less, calculate nothing")
    parser.add_argument("--soak", action="store_true", help="scrape 2,000 times while ranks come and go")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--update", type=Path, metavar="PAGE", help="replace the tables in a page")
    flags = parser.parse_args()
    steps = SOAK_SCRAPES if flags.soak else num_ticks(is_short=flags.short)
    with Progress(console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("soaking" if flags.soak else "measuring", total=steps)
        tick = lambda: progress.advance(task)  # noqa: E731  # shorter than what it would be called
        figures = measure_soak(tick) if flags.soak else measure(tick, is_short=flags.short)
    if flags.json or flags.soak:
        print(json.dumps(figures, indent=2))
    else:
        show(figures)
    if flags.update:
        update(flags.update, figures)
    return int(flags.soak and any(figures[name] > limit for name, limit in SOAK_LIMITS.items()))


if __name__ == "__main__":
    raise SystemExit(main())
