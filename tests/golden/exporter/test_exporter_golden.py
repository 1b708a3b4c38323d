"""The whole output for fixed records, byte for byte: ``TORCHMEM_REGENERATE_GOLDEN=1`` writes it anew."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics

from records import WRITTEN_AT, leave, living, make_record
from sidecars import Clock, application, ask
from torchmem.wire.record import Allocator

FOLDER = Path(__file__).parent
FORMS = {"metrics.txt": "", "metrics.openmetrics.txt": "application/openmetrics-text;version=1.0.0"}
OF_PROCESS = rb"(# \w+ )?process_"


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
    with living(
        tmp_path,
        make_record(0, 4, forecast_bytes=1 << 20),
        on_cpu,
        make_record(0, 1, train_job='a "job" \\ of\nmany words'),
    ):
        yield tmp_path


@pytest.mark.parametrize("name", FORMS)
def test_output_is_byte_for_byte_what_it_was(directory, name):
    """A series would change its name, labels, help or value without anybody having meant it."""
    body = ask(application(directory, Clock(WRITTEN_AT + 1)), accept=FORMS[name]).body
    # The process's own metrics are prometheus_client's, and never twice the same.
    body = b"".join(line for line in body.splitlines(keepends=True) if not re.match(OF_PROCESS, line))
    if os.environ.get("TORCHMEM_REGENERATE_GOLDEN") == "1":
        (FOLDER / name).write_bytes(body)
    assert body == (FOLDER / name).read_bytes()


def test_openmetrics_passes_the_strict_parser():
    """Prometheus would refuse the whole scrape."""
    text = (FOLDER / "metrics.openmetrics.txt").read_text()
    assert len(list(parse_openmetrics(text))) == text.count("# TYPE ")
