"""The same points as ``prometheus_client`` has them, to render with that library and compare."""

from __future__ import annotations

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

from torchmem_exporter import catalog
from torchmem_exporter.catalog import Kind, unit_word


class Reference:
    """A collector of the points of blocks."""

    def __init__(self, blocks):
        self._blocks = blocks

    def collect(self):
        for metric in catalog.METRICS:
            found = [series for block in self._blocks for series in block.series if series.metric is metric]
            if not found:
                continue
            kind = CounterMetricFamily if metric.kind is Kind.COUNTER else GaugeMetricFamily
            name, unit = metric.prometheus_name.removesuffix("_total"), unit_word(metric.unit, metric.kind)
            reference = kind(name, metric.help, labels=metric.labels, unit=unit)
            for series in found:
                for labels, value in zip(series.labels, series.values, strict=True):
                    reference.add_metric(labels, value)
            yield reference
