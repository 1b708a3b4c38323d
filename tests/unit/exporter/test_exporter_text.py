"""Text is what prometheus_client would have written, and nothing is made twice."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.exposition import generate_latest
from prometheus_client.openmetrics.exposition import generate_latest as generate_openmetrics
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families as parse_text

from records import make_record
from reference_text import Reference
from torchmem_exporter import catalog
from torchmem_exporter.budget import Budget, Level
from torchmem_exporter.labels import clean_label
from torchmem_exporter.points import Block, Series
from torchmem_exporter.reading.lifecycle import State
from torchmem_exporter.reading.reader import Rank, Snapshot
from torchmem_exporter.sampler import Sampler
from torchmem_exporter.text import TextRenderer, negotiate

FORMS = [(False, generate_latest, parse_text), (True, generate_openmetrics, parse_openmetrics)]


def running(record):
    """A running rank."""
    return Rank(f"j/rank-{record.identity.rank}.record", record, State.RUNNING, has_memory=True)


def blocks_of(*ranks, sampler=None):
    """The blocks of running ranks, or of the ranks of records."""
    ranks = tuple(rank if isinstance(rank, Rank) else running(rank) for rank in ranks)
    return (sampler or Sampler(Budget(Level.FULL))).blocks(Snapshot(0.0, ranks, (), {}, ""))


def rendered(blocks, *, is_openmetrics=False, renderer=None):
    """The text of blocks, whole."""
    text = b"".join((renderer or TextRenderer()).render(blocks, is_openmetrics=is_openmetrics)).decode()
    return text + "# EOF\n" if is_openmetrics else text


@pytest.mark.parametrize(("is_openmetrics", "generate", "parse"), FORMS)
def test_text_says_what_the_reference_library_says(is_openmetrics, generate, parse):
    """A series would have another name, help, type, unit, label or value than scrapers are told by others."""
    blocks = blocks_of(make_record(0, 30), make_record(1, 5, train_job='a "job" \\ 100%'))
    expected = list(parse(generate(Reference(blocks)).decode()))
    assert list(parse(rendered(blocks, is_openmetrics=is_openmetrics))) == expected


LABELS = st.text(st.characters(codec="utf-8"), max_size=12).map(clean_label)


@given(st.lists(st.tuples(LABELS, LABELS), min_size=1, max_size=8, unique=True), st.integers(0, 1 << 60))
def test_any_label_survives(pairs, value):
    """A name with a quote, a percent sign or a backslash would break its line or change another's value."""
    labels = tuple(("job", "0", "cpu", module, reftype) for module, reftype in pairs)
    block = Block(("job", "0"), None, (Series(catalog.MODULE_USAGE, labels, [value] * len(labels)),))
    for is_openmetrics, _, parse in FORMS:
        (family,) = parse(rendered((block,), is_openmetrics=is_openmetrics))
        read = [(sample.labels["module"], sample.labels["reftype"]) for sample in family.samples]
        assert sorted(read) == sorted(pairs)
        assert {sample.value for sample in family.samples} == {value}


@given(st.floats(allow_nan=False, allow_infinity=False))
def test_any_number_survives(value):
    """A time would be rounded, or written as no parser reads it."""
    block = Block(("job", "0"), None, (Series(catalog.STEP_TIME, (("job", "0"),), (value,)),))
    (family,) = parse_text(rendered((block,)))
    assert family.samples[0].value == value


def test_whole_bytes_are_written_whole():
    """A byte count past 2^53 would be rounded on its way through a float."""
    num_bytes = (1 << 60) + 1
    block = Block(("job", "0"), None, (Series(catalog.PEAK, (("job", "0", "cpu"),), (num_bytes,)),))
    assert f'torchmem_memory_peak_bytes{{device="cpu",rank="0",train_job="job"}} {num_bytes}\n' in rendered((block,))


def test_an_unchanged_block_is_not_rendered_again():
    """A scrape would cost the same whether anything changed or not."""
    sampler, renderer = Sampler(Budget()), TextRenderer()
    same = running(make_record(0))
    before = list(renderer.render(blocks_of(same, make_record(1), sampler=sampler), is_openmetrics=False))
    changed = blocks_of(same, make_record(1, step=41), sampler=sampler)
    after = list(renderer.render(changed, is_openmetrics=False))
    reused = {id(piece) for piece in before} & {id(piece) for piece in after}
    assert len(reused) >= len(changed[0].series)
    assert rendered(changed) == b"".join(after).decode()


def test_a_rank_that_is_gone_leaves_nothing():
    """The sidecar of a busy node would grow for ever."""
    renderer = TextRenderer()
    list(renderer.render(blocks_of(make_record(0), make_record(1)), is_openmetrics=False))
    assert 'rank="1"' not in rendered(blocks_of(make_record(0)), renderer=renderer)
    assert set(renderer._templates) == set(renderer._lines) == {("llama-pretrain", "0"), ("llama-pretrain",)}


@pytest.mark.parametrize(
    ("accept", "is_openmetrics"),
    [
        ("", False),
        ("text/html", False),
        ("text/plain;version=0.0.4", False),
        ("application/openmetrics-text;version=1.0.0,text/plain;version=0.0.4;q=0.5", True),
        ("application/openmetrics-text;version=x", False),
    ],
)
def test_format_is_the_one_asked_for(accept, is_openmetrics):
    """A scraper would be sent a format that it does not read."""
    assert negotiate(accept).is_openmetrics is is_openmetrics
