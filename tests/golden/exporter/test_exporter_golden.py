"""The whole output for fixed records, byte for byte: ``TORCHMEM_REGENERATE_GOLDEN=1`` writes it anew."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.exposition import generate_latest
from prometheus_client.openmetrics.exposition import generate_latest as generate_openmetrics
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics

from records import WRITTEN_AT, leave, living, make_record
from sidecars import Clock, application, ask
from torchmem.wire.record import Allocator
from torchmem_exporter.catalog import Kind, unit_word
from torchmem_exporter.prometheus import render
from torchmem_exporter.reader import Reader
from torchmem_exporter.samples import families

FOLDER = Path(__file__).parent
FORMS = {"metrics.txt": "", "metrics.openmetrics.txt": "application/openmetrics-text;version=1.0.0"}


@pytest.fixture
def directory(tmp_path):
    """A rank on a GPU, one on the CPU, one that crashed, one that ended, and a file that is no record."""
    on_cpu = make_record(
        1,
        2,
        name="cpu",
        model="",
        uuid="",
        limit_bytes=None,
        other_bytes=None,
        allocator=Allocator(),
        checkpoint_peaks={},
        mesh={},
    )
    leave(tmp_path, make_record(2, 2))
    leave(tmp_path, make_record(3, 2, final=True))
    (tmp_path / "llama-pretrain" / "rank-9.record").write_bytes(b"garbage")
    with living(tmp_path, make_record(0, 4), on_cpu, make_record(0, 1, train_job='a "job" \\ of\nmany words')):
        yield tmp_path


@pytest.mark.parametrize("name", FORMS)
def test_output_is_byte_for_byte_what_it_was(directory, name):
    """A series would change its name, labels, help or value without anybody having meant it."""
    body = ask(application(directory, Clock(WRITTEN_AT + 1)), accept=FORMS[name]).body
    if os.environ.get("TORCHMEM_REGENERATE_GOLDEN") == "1":
        (FOLDER / name).write_bytes(body)
    assert body == (FOLDER / name).read_bytes()


@pytest.mark.parametrize(("is_openmetrics", "generate"), [(False, generate_latest), (True, generate_openmetrics)])
def test_output_is_that_of_the_reference_library(directory, is_openmetrics, generate):
    """Our own writer would differ from prometheus_client, which scrapers are tested against."""
    reader = Reader(directory, stale_after=60.0, clock=Clock(WRITTEN_AT + 1))
    found = list(families(reader.scan(is_scrape=True)))
    assert b"".join(render(found, is_openmetrics=is_openmetrics)) == generate(Reference(found))


def test_openmetrics_passes_the_strict_parser():
    """Prometheus would refuse the whole scrape."""
    text = (FOLDER / "metrics.openmetrics.txt").read_text()
    assert len(list(parse_openmetrics(text))) == text.count("# TYPE ")


class Reference:
    """The same families as prometheus_client has them."""

    def __init__(self, found):
        self._families = found

    def collect(self):
        for family in self._families:
            metric = family.metric
            kind = CounterMetricFamily if metric.kind is Kind.COUNTER else GaugeMetricFamily
            name, unit = metric.prometheus_name.removesuffix("_total"), unit_word(metric.unit, metric.kind)
            reference = kind(name, metric.help, labels=metric.labels, unit=unit)
            for labels, value in family.samples:
                reference.add_metric(labels, value)
            yield reference
