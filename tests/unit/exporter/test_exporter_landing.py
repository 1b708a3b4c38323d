"""The landing page: small, escaped, and telling what needs attention."""

from __future__ import annotations

from html.parser import HTMLParser
from pathlib import Path

import pytest

from records import WRITTEN_AT, leave, living, make_record
from sidecars import Clock, application, ask
from torchmem_exporter import landing
from torchmem_exporter.reading.lifecycle import State
from torchmem_exporter.reading.reader import Rank, Rejection, Snapshot

HOSTILE = "<script>alert('x')</script>\"&'" * 7


class Cells(HTMLParser):
    """Collects the text of a page's table cells, and its tags."""

    def __init__(self, page):
        super().__init__()
        self.cells, self.tags, self._is_cell = [], [], False
        self.feed(page)

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self._is_cell = tag == "td"
        if tag == "td":
            self.cells.append("")

    def handle_data(self, data):
        if self._is_cell:
            self.cells[-1] += data

    def handle_endtag(self, tag):
        self._is_cell = False


def page_of(*records, rejections=(), problem=""):
    ranks = tuple(Rank("job/rank-0.record", record, State.RUNNING, has_memory=True) for record in records)
    return landing.page(Snapshot(WRITTEN_AT + 9, ranks, tuple(rejections), {}, problem), Path("/dev/shm/job")).decode()


def test_page_tells_of_each_rank(tmp_path):
    """Whoever opens the page would not see which ranks there are."""
    with living(tmp_path, make_record(0), make_record(1)):
        page = ask(application(tmp_path, Clock(WRITTEN_AT + 1)), "/").text
    assert Cells(page).cells[7:12] == ["llama-pretrain", "1", "node-17", "running", "40"]
    assert all(f'href="{path}"' in page for path in ("/metrics", "/healthz", "/readyz"))


def test_page_is_self_contained():
    """The page would fetch something from elsewhere, or be of one colour in the dark."""
    page = page_of(make_record())
    assert "://" not in page
    assert not {"script", "link", "img", "iframe"} & set(Cells(page).tags)
    assert "color-scheme:light dark" in page


def test_page_escapes_what_it_shows():
    """The name of a job could run a script in the operator's browser."""
    page = page_of(make_record(train_job=HOSTILE, host=HOSTILE), rejections=[Rejection(HOSTILE, "magic", HOSTILE)])
    assert "script" not in Cells(page).tags
    assert Cells(page).cells[0].startswith("<script>alert")


@pytest.mark.parametrize("job", ["job", HOSTILE])
def test_page_stays_small(job):
    """A host with many ranks would get a page that takes seconds to load."""
    records = [make_record(i, 1, train_job=job, host=job) for i in range(500)]
    rejections = [Rejection(HOSTILE, "magic", HOSTILE)] * 500
    page = page_of(*records, rejections=rejections)
    assert len(page.encode()) < 20_000
    assert page.count(" more") == 2


def test_what_needs_attention_comes_first(tmp_path):
    """A crashed rank would be cut off below hundreds of healthy ones."""
    leave(tmp_path, make_record(1))
    leave(tmp_path, make_record(2, final=True))
    with living(tmp_path, make_record(0), make_record(3, written_at=1.0)):
        page = ask(application(tmp_path, Clock(WRITTEN_AT + 1)), "/").text
    assert Cells(page).cells[3::7] == ["crashed", "stale", "running", "exited"]


def test_empty_pages_say_why():
    """An empty table would leave open whether there is no job or no access."""
    assert "No rank has left a record" in page_of()
    assert "no access" in page_of(problem="no access")
