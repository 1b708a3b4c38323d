"""The whole way of a point with real servers: our encoding, an OTLP agent over gRPC and HTTP, VictoriaMetrics."""

from __future__ import annotations

import contextlib

import pytest

import backends
from otlp_receivers import wait_until
from records import make_record
from torchmem_exporter import catalog
from torchmem_exporter.otlp.config import from_environ
from torchmem_exporter.otlp.push import Pusher
from torchmem_exporter.points import Block, Series

pytestmark = pytest.mark.slow

REFTYPES = [f"reftype_{i}" for i in range(11)]
NUM_RANKS, NUM_MODULES = 4, 100
NUM_MODULE_POINTS = NUM_MODULES * len(REFTYPES)


def values(metric):
    """Labels for the points of a metric of one rank, but for the first two."""
    if metric.labels == catalog.MODULE:
        return [("cuda:0", f"layers.{m}.mlp", reftype) for m in range(NUM_MODULES) for reftype in REFTYPES]
    return [tuple(f"{name} of it" for name in metric.labels[2:])]


def rank_block(rank, turn):
    """Every metric that a rank has; each value is found nowhere else in the block."""
    series, value = [], 1000 * turn
    for metric in catalog.METRICS:
        if metric.labels[:2] != catalog.RANK:
            continue
        labels = tuple(("job", str(rank), *rest) for rest in values(metric))
        fraction = 0.5 if metric.unit in ("s", "1") else 0
        series.append(Series(metric, labels, [value + i + fraction for i in range(len(labels))]))
        value += len(labels)
    return Block(("job", str(rank)), make_record(rank, train_job="job").identity, tuple(series))


def other_blocks():
    """The job and the sidecar."""
    job = [Series(m, (("job",),), [8]) for m in catalog.METRICS if m.labels == ("train_job",)]
    own = [m for m in catalog.METRICS if m.labels[:1] != ("train_job",)]
    sidecar = [Series(m, (tuple(f"{name} of it" for name in m.labels),), [0.5]) for m in own]
    return [Block(("job",), None, tuple(job)), Block((), None, tuple(sidecar))]


def expected(blocks):
    """What a store should have: (Prometheus name, labels) -> value."""
    return {
        (series.metric.prometheus_name, tuple(sorted(zip(series.metric.labels, labels, strict=True)))): value
        for block in blocks
        for series in block.series
        for labels, value in zip(series.labels, series.values, strict=True)
    }


def shown(store):
    """What the store has now, by our own labels: those of the resource are left out."""
    config = from_environ({"OTEL_METRICS_EXPORTER": "otlp"})
    blocks = [rank_block(0, 1), *other_blocks()]
    resource = {name.replace(".", "_") for block in blocks for name in config.resources.attributes(block)}
    return store.query(without={*backends.SCRAPED_BY, *resource})


def shown_whoever_says_it(store):
    """What the store has now, where it may have a point both with the attributes of its resource and without."""
    own = sorted({label for metric in catalog.METRICS for label in metric.labels})
    return store.query(f'max by (__name__, {", ".join(own)}) ({{__name__=~"torchmem_.+"}})')


@contextlib.contextmanager
def pushing(endpoint, protocol, collect):
    environ = {
        "OTEL_EXPORTER_OTLP_ENDPOINT": endpoint,
        "OTEL_EXPORTER_OTLP_PROTOCOL": protocol,
        "OTEL_METRIC_EXPORT_INTERVAL": "3000",
    }
    pusher = Pusher(from_environ(environ), collect)
    pusher.start()
    try:
        yield pusher
    finally:
        pusher.close(5)


class Source:
    """What is collected, as a test has it."""

    def __init__(self):
        self.turn = 1
        self.num_ranks = NUM_RANKS

    def __call__(self):
        return [*(rank_block(rank, self.turn) for rank in range(self.num_ranks)), *other_blocks()]


@pytest.mark.parametrize("way", ["grpc", "http/protobuf", "straight"])
def test_every_point_is_in_the_store(way, rotel, victoria_metrics, tmp_path):
    """Points would be lost, folded or renamed on their way, or go on after the rank that they are of."""
    source = Source()
    with contextlib.ExitStack() as stack:
        store = stack.enter_context(backends.victoria_metrics(victoria_metrics, tmp_path))
        if way == "straight":
            endpoint, protocol = store.otlp_url, "http/protobuf"
        else:
            # A batch that the agent splits loses the resource of what is split off.
            batches = "--metrics-batch-max-size=1000000"
            agent = stack.enter_context(backends.rotel(rotel, tmp_path, store.otlp_url, batches))
            endpoint, protocol = f"http://{agent.grpc_address}" if way == "grpc" else agent.url, way
        stack.enter_context(pushing(endpoint, protocol, source))
        for source.turn in (1, 2):
            wanted = expected(source())
            assert {name for name, _ in wanted} == {metric.prometheus_name for metric in catalog.METRICS}
            assert len(wanted) > 3 * NUM_RANKS * NUM_MODULE_POINTS
            wait_until(lambda wanted=wanted: shown(store) == wanted, 45)
        source.num_ranks -= 1
        remaining = expected(source())
        assert len(remaining) < len(wanted)
        wait_until(lambda: shown(store) == remaining, 45)


def test_an_agent_with_its_own_settings_drops_nothing(rotel, victoria_metrics, tmp_path):
    """An agent whose batches are smaller than our requests would drop these whole, and answer that it took them."""
    source = Source()
    with (
        backends.victoria_metrics(victoria_metrics, tmp_path) as store,
        backends.rotel(rotel, tmp_path, store.otlp_url) as agent,
        pushing(agent.url, "http/protobuf", source),
    ):
        wanted = expected(source())
        wait_until(lambda: shown_whoever_says_it(store) == wanted, 45)
        assert "dropping" not in agent.log.read_text()
