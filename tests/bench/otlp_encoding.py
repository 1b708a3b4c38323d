"""What encoding a push costs: our templates against opentelemetry-sdk's collect and encode of the same points.

Eight ranks of 200 modules with 11 reftypes in two metrics. Both sides encode the same values in turn, which change
before every round, and what they make is compared point for point before anything is timed. The first encoding, which
makes the templates, is told apart. Prints a table, or JSON with ``--json``; exits with 1 when a full run
exceeds a limit.
"""

from __future__ import annotations

import os
import statistics
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from opentelemetry.exporter.otlp.proto.common.metrics_encoder import encode_metrics
from opentelemetry.metrics import Observation
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest
from opentelemetry.sdk.metrics import MeterProvider, ObservableGauge
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.sdk.metrics.view import View
from opentelemetry.sdk.resources import Resource

from benchmarks import arguments, report
from torchmem_exporter import catalog
from torchmem_exporter.otlp.encoding import Encoder
from torchmem_exporter.points import Block, Series

METRICS = (catalog.MODULE_STEP_PEAK, catalog.MODULE_ACTIVE_PEAK)
NUM_REFTYPES = 11
LIMITS = {"times_faster": 20.0}


class Workload:
    """Ranks with all modules and reftypes, whose values change with each round."""

    def __init__(self, num_ranks, num_modules):
        modules = [f"layers.{i}.feed_forward" for i in range(num_modules)]
        self.labels = [
            tuple(
                ("llama-7b", str(rank), f"cuda:{rank}", m, f"reftype_{r}") for m in modules for r in range(NUM_REFTYPES)
            )
            for rank in range(num_ranks)
        ]
        self.attributes = [
            [dict(zip(METRICS[0].labels, texts, strict=True)) for texts in labels] for labels in self.labels
        ]
        self.num_points = len(METRICS) * sum(map(len, self.labels))
        self.turn = 0

    def values(self, rank):
        """A value for each point of a rank and metric."""
        base = self.turn << 32 | rank << 24
        return range(base, base + len(self.labels[rank]))

    def blocks(self):
        """The points as the encoder takes them."""
        return [
            Block(("llama-7b", str(rank)), None, tuple(Series(m, labels, self.values(rank)) for m in METRICS))
            for rank, labels in enumerate(self.labels)
        ]

    def observe(self, _options):
        """The points of one metric as the SDK takes them; the attributes are made beforehand."""
        for rank, attributes in enumerate(self.attributes):
            yield from map(Observation, self.values(rank), attributes)


class Sdk:
    """The SDK, with room for all points."""

    def __init__(self, workload):
        self.reader = InMemoryMetricReader()
        view = View(instrument_type=ObservableGauge, aggregation_cardinality_limit=workload.num_points + 1)
        self.provider = MeterProvider([self.reader], Resource({}), views=[view], shutdown_on_exit=False)
        meter = self.provider.get_meter("torchmem")
        for metric in METRICS:
            meter.create_observable_gauge(metric.otel_name, [workload.observe], metric.unit, metric.help)

    def encode(self):
        """One collection as bytes."""
        return [encode_metrics(self.reader.get_metrics_data()).SerializeToString()]


def ours(encoder, workload):
    """One push as bytes."""
    encoder.update(workload.blocks())
    return [request.body for request in encoder.requests(time.time_ns())]


def points(bodies):
    """All points of some messages but for their time: (name, unit, help, attributes) -> value."""
    found = {}
    for body in bodies:
        for resource in ExportMetricsServiceRequest.FromString(body).resource_metrics:
            for metric in resource.scope_metrics[0].metrics:
                for point in metric.gauge.data_points:
                    labels = tuple(sorted((a.key, a.value.string_value) for a in point.attributes))
                    key = (metric.name, metric.unit, metric.description, labels)
                    assert key not in found
                    assert point.time_unix_nano
                    found[key] = point.as_int
    return found


def timed(encode):
    """Seconds that it took, wall clock and the process's."""
    began, used = time.perf_counter(), time.process_time()
    encode()
    return time.perf_counter() - began, time.process_time() - used


def measure(num_ranks, num_modules, num_rounds):
    """All figures, by name."""
    workload = Workload(num_ranks, num_modules)
    sdk, encoder = Sdk(workload), Encoder(lambda block: {"service.instance.id": block.key[1]}, 1)
    first, _ = timed(lambda: ours(encoder, workload))
    bodies = ours(encoder, workload)
    found = points(bodies)
    assert len(found) == workload.num_points
    assert found == points(sdk.encode())
    taken = {"sdk": [], "ours": []}
    for workload.turn in range(1, num_rounds + 1):
        taken["sdk"].append(timed(sdk.encode))
        taken["ours"].extend(timed(lambda: ours(encoder, workload)) for _ in range(3))
    medians = {name: statistics.median(wall for wall, _ in pairs) for name, pairs in taken.items()}
    return {
        "num_points": workload.num_points,
        "num_requests": len(bodies),
        "body_mb": sum(map(len, bodies)) / 1e6,
        "sdk_seconds": medians["sdk"],
        "ours_seconds": medians["ours"],
        "ours_seconds_worst": max(wall for wall, _ in taken["ours"]),
        "ours_cpu_seconds": statistics.median(used for _, used in taken["ours"]),
        "ours_first_seconds": first,
        "times_faster": medians["sdk"] / medians["ours"],
        "num_cores": os.cpu_count(),
    }


def main():
    parser = arguments(__doc__, short="fewer rounds")
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--modules", type=int, default=200)
    flags = parser.parse_args()
    return report(measure(flags.ranks, flags.modules, 3 if flags.short else 15), flags, at_least=LIMITS)


if __name__ == "__main__":
    raise SystemExit(main())
