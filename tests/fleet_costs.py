"""What a fleet costs the sidecar and the stores behind it: the measurements of ``tests/bench/fleet.py``.

A store is given many targets that are all one sidecar, told apart by a label; so the machine need not run hundreds.
What two hours of a rank take on disk is measured on a block that is made from as many scrapes as two hours have.
"""

from __future__ import annotations

import contextlib
import gzip
import json
import statistics
import subprocess
import tempfile
import time
import urllib.request
from pathlib import Path

import backends
from fleets import GZIP, MEGA, Fleet, cpu_seconds, folder_bytes, resident_mb
from sidecars import running
from torchmem_exporter.budget import MAX_SERIES, Level

RANKS_OF_NODE, MODULES_OF_RANK = 8, 120
DISK_RANKS, DISK_SECONDS, DISK_INTERVAL = 2, 7200, 15
SETTLE_SECONDS = 120.0


@contextlib.contextmanager
def node(num_ranks, num_modules, level):
    """A node: its ranks and its sidecar."""
    with (
        tempfile.TemporaryDirectory() as folder,
        Fleet(Path(folder), num_ranks, num_modules) as fleet,
        running(folder, "--level", level) as sidecar,
    ):
        yield fleet, sidecar


def num_series(text):
    """Series of a scrape."""
    return sum(not line.startswith("#") for line in text.splitlines())


def sidecar_costs(num_ranks, num_modules, level, num_scrapes):
    """Costs of scrapes, as Prometheus asks for them, with all records rewritten before each, and with none."""
    with node(num_ranks, num_modules, level) as (fleet, sidecar):
        pid = sidecar.process.pid
        sidecar.ask(headers=GZIP)  # the first one decodes and names everything
        changed, unchanged = [], []
        used = 0.0
        for _ in range(num_scrapes):
            fleet.work()
            before = cpu_seconds(pid)
            changed.append(_timed(sidecar)[0])
            used += cpu_seconds(pid) - before
            seconds, reply = _timed(sidecar)
            unchanged.append(seconds)
        text = gzip.decompress(reply.body)
        return {
            "ranks": num_ranks,
            "modules": num_modules,
            "level": level,
            "series": num_series(text.decode()),
            "body_mb": len(text) / MEGA,
            "gzip_mb": len(reply.body) / MEGA,
            "changed_ms": 1000 * statistics.median(changed),
            "unchanged_ms": 1000 * statistics.median(unchanged),
            "cpu_ms": 1000 * used / num_scrapes,
            "rss_mb": resident_mb(pid)[0],
        }


def _timed(sidecar):
    began = time.perf_counter()
    reply = sidecar.ask(headers=GZIP)
    return time.perf_counter() - began, reply


def level_series(level):
    """Series of one rank at a level, the most that a rank may have, and those that a node adds for itself."""
    numbers = []
    for num_ranks in (1, RANKS_OF_NODE):
        with node(num_ranks, MODULES_OF_RANK, level) as (_, sidecar):
            numbers.append(num_series(sidecar.ask().text))
    per_rank = (numbers[1] - numbers[0]) / (RANKS_OF_NODE - 1)
    at_most = MAX_SERIES[Level(level)]
    return {"level": level, "per_rank": per_rank, "at_most": at_most, "per_node": numbers[0] - per_rank}


def store_costs(kind, num_nodes, interval, seconds, tick):
    """Costs of a store that scrapes as many nodes, once all their series are there.

    Args:
        kind: ``prometheus`` or ``victoria-metrics``.
        num_nodes: of 8 ranks each, at the standard level.
        interval: seconds from scrape to scrape.
        seconds: for how long it is watched.
        tick: called about once a second.
    """
    start = _STORES[kind]
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        fleet, sidecar = stack.enter_context(node(RANKS_OF_NODE, MODULES_OF_RANK, "standard"))
        stack.enter_context(fleet.working())
        per_node = num_series(sidecar.ask().text)
        store = stack.enter_context(start(folder, nodes_config(sidecar.port, num_nodes, interval)))
        wanted = per_node * num_nodes
        backends.wait_until(lambda: store.num_series() >= 0.99 * wanted, "the first scrapes", SETTLE_SECONDS, 0.5)
        before, began = (store.num_samples(), cpu_seconds(store.process.pid)), time.monotonic()
        resident = []  # goes up and down with garbage collection: the highest is what must be there
        while time.monotonic() < began + seconds:
            time.sleep(1)
            resident.append(resident_mb(store.process.pid)[0])
            tick()
        took = time.monotonic() - began
        num_samples = store.num_samples() - before[0]
        used = cpu_seconds(store.process.pid) - before[1]
        return {
            "store": kind,
            "nodes": num_nodes,
            "series": store.num_series(),
            "samples_per_second": num_samples / took,
            "cpu_cores": used / took,
            "cpu_us_per_sample": 1e6 * used / num_samples,
            "rss_mb": max(resident),
        }


def nodes_config(port, num_nodes, interval):
    """A scrape configuration of many nodes that are all one sidecar."""
    config = backends.scrape_config(interval=f"{interval}s")
    address = [f"127.0.0.1:{port}"]
    nodes = [{"targets": address, "labels": {"node": f"node-{number}"}} for number in range(num_nodes)]
    config["scrape_configs"][0]["static_configs"] = nodes
    return config


class _Prometheus(backends.Server):
    def num_series(self):
        return int(self.total("prometheus_tsdb_head_series"))

    def num_samples(self):
        return self.total("prometheus_tsdb_head_samples_appended_total")


class _VictoriaMetrics(backends.VictoriaMetrics):
    def num_series(self):
        return int(self.metrics()["vm_cache_entries", (("type", "storage/hour_metric_ids"),)])

    def num_samples(self):
        return self.total("vm_rows_added_to_storage_total")


@contextlib.contextmanager
def _prometheus(folder, config):
    with backends.prometheus(backends.find_program("prometheus"), folder, config) as server:
        yield _Prometheus(server.process, server.address, server.log)


@contextlib.contextmanager
def _victoria_metrics(folder, config):
    """VictoriaMetrics scrapes by itself."""
    file = folder / "scrape.yml"
    file.write_text(json.dumps(config))
    flags = [f"-promscrape.config={file}", "-search.maxUniqueTimeseries=10000000"]
    with backends.victoria_metrics(backends.find_program("victoria-metrics"), folder, *flags) as server:
        yield _VictoriaMetrics(server.process, server.address, server.log)


_STORES = {"prometheus": _prometheus, "victoria-metrics": _victoria_metrics}


def disk_costs(tick):
    """Bytes on disk of two hours of two ranks, scraped every 15 seconds, in Prometheus and in VictoriaMetrics."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        samples = folder / "samples.txt"
        num_lines = write_history(samples, tick)
        index, chunks = _block(folder, samples)
        tick()
        stored = _imported(folder, samples)
    number = DISK_SECONDS // DISK_INTERVAL
    return {
        "samples": num_lines,
        "series": num_lines // number,
        "prometheus_bytes_per_sample": chunks / num_lines,
        "prometheus_index_bytes_per_series": index * number / num_lines,
        "victoria_metrics_bytes_per_sample": stored / num_lines,
    }


def write_history(path, tick):
    """Writes what two hours of scrapes would have seen, with their timestamps, as OpenMetrics; returns the samples."""
    number, num_lines = DISK_SECONDS // DISK_INTERVAL, 0
    now = time.time() // DISK_SECONDS * DISK_SECONDS - DISK_SECONDS
    with node(DISK_RANKS, MODULES_OF_RANK, "standard") as (fleet, sidecar), path.open("w") as file:
        for scrape in range(number):
            fleet.work()
            for line in sidecar.ask().text.splitlines():
                if not line.startswith("#"):
                    file.write(f"{line} {now + scrape * DISK_INTERVAL:.0f}\n")
                    num_lines += 1
            if scrape % 48 == 0:
                tick()
        file.write("# EOF\n")
    return num_lines


def _block(folder, samples):
    """Sizes of the index and the chunks of a block that Prometheus' own tool makes."""
    tool = backends.find_program("promtool")
    line = [tool, "tsdb", "create-blocks-from", "openmetrics", str(samples), str(folder / "blocks")]
    subprocess.run(line, check=True, stdout=subprocess.DEVNULL, stdin=subprocess.DEVNULL, timeout=120)
    blocks = [block for block in (folder / "blocks").iterdir() if block.is_dir()]
    return sum((b / "index").stat().st_size for b in blocks), sum(folder_bytes(b / "chunks") for b in blocks)


def _imported(folder, samples):
    """Bytes that VictoriaMetrics takes for the same samples, once merged."""
    milliseconds = folder / "milliseconds.txt"
    with samples.open() as source, milliseconds.open("w") as target:
        target.writelines(line.rstrip("\n") + "000\n" for line in source if not line.startswith("#"))
    with backends.victoria_metrics(backends.find_program("victoria-metrics"), folder) as store:
        with milliseconds.open("rb") as body:
            size = {"Content-Length": str(milliseconds.stat().st_size)}
            request = urllib.request.Request(f"{store.url}/api/v1/import/prometheus", data=body, headers=size)
            urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request, timeout=60).close()
        for action in ("force_flush", "force_merge"):
            backends.get(f"{store.url}/internal/{action}")
        seen = []

        def is_merged():
            """Merging goes on behind: its result is what stays the same for a while."""
            seen.append(store.total("vm_data_size_bytes"))
            return seen[-4:] == [seen[-1]] * 4

        backends.wait_until(is_merged, "merging", 60, 0.5)
        return seen[-1]
