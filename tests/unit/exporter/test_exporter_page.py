"""The page at ``/``: what it says of the ranks, what it asks of a browser, and what looking costs."""

from __future__ import annotations

import base64
import gzip
import hashlib
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import msgspec
import pytest

from pages import MODULES, trained
from records import WRITTEN_AT, leave, living, make_device, make_record
from sidecars import Clock, application, ask, states
from torchmem.wire import record as wire
from torchmem_exporter.page.render import MAX_PAGE_BYTES

HOSTILE = "<script>alert('x')</script>\"&'{{7*7}}\u202e\n" * 7


class Page(HTMLParser):
    """A page's tags with their attributes, and the text of each table's rows."""

    def __init__(self, html):
        super().__init__()
        self.html, self.tags, self.rows, self.text = html, [], [], ""
        self._is_cell = self._is_code = False
        self.feed(html)

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        self._is_code = tag in ("style", "script")
        if tag == "tr":
            self.rows.append([])
        self._is_cell = tag in ("td", "th") or (self._is_cell and tag in ("a", "span", "svg", "rect", "b"))
        if tag in ("td", "th"):
            self.rows[-1].append("")

    def handle_data(self, data):
        if not self._is_code:
            self.text += data
        if self._is_cell:
            self.rows[-1][-1] += data.strip("\n")

    def handle_endtag(self, tag):
        if tag in ("table", "caption"):
            self._is_cell = False
        self._is_code = False

    def ranks(self):
        """The rows of the table of ranks."""
        return [row for row in self.rows if len(row) == 10 and row[0].startswith("rank")]

    def hrefs(self):
        return [attrs["href"] for tag, attrs in self.tags if tag == "a"]


def page_of(directory, query="", now=WRITTEN_AT + 9):
    reply = ask(application(directory, Clock(now)), f"/{query}")
    assert reply.headers["Content-Type"] == "text/html; charset=utf-8"
    return reply.status, Page(reply.text)


def test_page_tells_of_each_rank(tmp_path):
    """Whoever opens the page would not see which ranks there are, and how full their devices."""
    with living(tmp_path, make_record(0), make_record(1, limit_bytes=200_000_000, other_bytes=0)):
        status, page = page_of(tmp_path)
    assert (status, len(page.ranks())) == (200, 2)
    assert page.ranks()[1] == ["rank 1", "running", "40", " 91.2%", "173.9 MiB", "190.7 MiB", "", "", "labeler", "9 s"]
    assert {"/metrics", "/healthz", "/readyz", "/?job=llama-pretrain&rank=1#rank"} <= set(page.hrefs())


def test_page_tells_of_the_chosen_device(tmp_path):
    """What fills a device would be told of another rank's."""
    two = [make_device(0, name="cpu"), make_device(0, num_modules=30, name="cuda:0")]
    with living(tmp_path, make_record(0), make_record(1, 30, devices=two)):
        _, first = page_of(tmp_path)
        _, accelerator = page_of(tmp_path, "?rank=1")
        _, host = page_of(tmp_path, "?job=llama-pretrain&rank=1&device=cpu")
    assert "Rank 0 of llama-pretrain" in first.text
    assert "/?job=llama-pretrain&rank=1&device=cpu#rank" in accelerator.hrefs()
    books = [page.text.partition("What held ")[2].partition(" at the step peak")[0] for page in (accelerator, host)]
    assert books == ["855.3 MiB", "173.9 MiB"]


def test_table_beside_the_treemap_adds_up(tmp_path):
    """The table would say something else than the picture, or than the total above it."""
    record = trained(0)
    with living(tmp_path, record):
        _, page = page_of(tmp_path)
    rows = [row for row in page.rows if row[-1].endswith("%") and len(row) in (3, 4)]
    rects = re.findall(r"<rect[^>]*><title>([^<]*)</title>", page.html.partition('class="treemap narrow"')[0])
    assert len(rows) == len(rects) > 50
    assert abs(sum(float(row[-1].strip("<%")) for row in rows) - 100) < 4


@pytest.mark.parametrize(
    ("query", "status", "said"),
    [
        ("?job=nobody", 404, "There is no job nobody here"),
        ("?rank=7", 404, "Job llama-pretrain has no rank 7 here"),
        ("?rank=0&device=cuda%3A9", 404, "Rank 0 of job llama-pretrain has no device cuda:9"),
        ("?rank=-1", 400, "rank is a whole number"),
        ("?rank=%D9%A3", 400, "rank is a whole number"),
        ("?rank=1e3", 400, "rank is a whole number"),
        ("?rank=" + "9" * 5000, 400, "rank is a whole number"),
        ("?rank=1&rank=2", 400, "rank is given 2 times"),
        ("?live=maybe", 400, "live is on or off"),
        ("?" + "&".join(f"f{i}=1" for i in range(99)), 400, "a query has at most"),
        ("?job=%00%ff%3Cscript%3E", 404, "<script>"),
        ("?utm=1", 200, "Rank 0 of llama-pretrain"),
    ],
)
def test_wrong_choices_are_told(tmp_path, query, status, said):
    """A wrong address would give an error nobody understands, or another rank than was asked for."""
    with living(tmp_path, make_record(0)):
        answered, page = page_of(tmp_path, query)
    assert (answered, said in page.text, len(page.ranks())) == (status, True, 1)


def test_page_of_a_rank_that_is_gone_goes_on_unless_it_is_paused(tmp_path):
    """An open page would stand still for good when its rank ends, though the next attempt runs."""
    with living(tmp_path, make_record(0)):
        _, gone = page_of(tmp_path, "?rank=7")
        _, paused = page_of(tmp_path, "?rank=7&live=off")
    assert ("body", {"data-seconds": "1"}) in gone.tags
    assert ("body", {}) in paused.tags
    assert ["http-equiv" in page.html for page in (gone, paused)] == [True, False]
    assert ["/?rank=7&live=off" in gone.hrefs(), "/?rank=7" in paused.hrefs()] == [True, True]


def test_page_is_self_contained(tmp_path):
    """The page would fetch something from elsewhere, or run what is not its own."""
    with living(tmp_path, make_record(0)):
        reply = ask(application(tmp_path, Clock(WRITTEN_AT)), "/")
    page = Page(reply.text)
    fetched = [
        attrs.get("href") or attrs.get("src") for tag, attrs in page.tags if tag in ("link", "img", "script", "use")
    ]
    assert [url for url in fetched if url and not url.startswith(("data:", "#"))] == []
    assert not [attrs for _, attrs in page.tags if "style" in attrs or any(name.startswith("on") for name in attrs)]
    policy = dict(part.split(" ", 1) for part in reply.headers["Content-Security-Policy"].split("; "))
    assert policy["default-src"] == policy["base-uri"] == policy["form-action"] == policy["frame-ancestors"] == "'none'"
    for kind in ("style", "script"):
        (text,) = re.findall(f"<{kind}>(.*?)</{kind}>", reply.text, re.DOTALL)
        assert policy[f"{kind}-src"] == f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def hostile(rank=0):
    """A record whose every text is out to harm."""
    labelers = [wire.Labeler(name=HOSTILE, up=False, reason=HOSTILE)]
    record = trained(rank, train_job=HOSTILE, host=HOSTILE, engine=HOSTILE, labelers=labelers, name=HOSTILE)
    oom = wire.OutOfMemory(
        number=1, device=HOSTILE, time=1e300, step=9, phase=2, module=1, reftype=1, requested_bytes=1, held_bytes=9
    )
    return msgspec.structs.replace(
        record,
        modules=[f"{HOSTILE}{i}" for i in range(len(MODULES))],
        reftypes=[f"{HOSTILE}{i}" for i in range(len(record.reftypes))],
        oom_events=[oom],
    )


def test_hostile_texts_stay_texts(tmp_path):
    """The name of a module could run a script in the operator's browser, or turn the text around it about."""
    with living(tmp_path, make_record(0)):
        _, tame = page_of(tmp_path)
    with living(tmp_path / "hostile", hostile()):
        _, page = page_of(tmp_path / "hostile")
    assert {tag for tag, _ in page.tags} <= {tag for tag, _ in tame.tags}
    assert sum(tag == "script" for tag, _ in page.tags) == 1
    assert "{{7*7}}" in page.text
    assert "\u202e" not in page.html
    assert "crashed" not in page.text


@pytest.mark.parametrize("make", [trained, hostile])
def test_page_stays_small(tmp_path, make):
    """A node with many ranks would get a page that takes seconds to load."""
    records = [make(i) for i in range(64)]
    for i in range(40):
        (tmp_path / "job").mkdir(exist_ok=True)
        (tmp_path / "job" / f"rank-{900 + i}.record").write_bytes(b"garbage")
    with living(tmp_path, *records):
        reply = ask(application(tmp_path, Clock(WRITTEN_AT)), "/", accept_encoding="gzip")
    body = gzip.decompress(reply.body)
    assert len(body) < MAX_PAGE_BYTES
    assert len(reply.body) < MAX_PAGE_BYTES / 4
    assert "And 28 more." in body.decode()


def test_ranks_that_do_not_fit_are_the_healthy_ones(tmp_path):
    """A crashed rank would be missing below hundreds of healthy ones."""
    leave(tmp_path, make_record(300))
    with living(tmp_path, *(make_record(i, 1, labelers=[]) for i in range(200))):
        _, page = page_of(tmp_path)
        _, other = page_of(tmp_path, "?rank=150")
    assert "rank 150" in [row[0] for row in other.ranks()]
    assert len(page.ranks()) == 64
    assert page.ranks()[-1][:2] == ["rank 300", "crashed"]
    assert "And 137 more" in page.text


def test_states_are_words(tmp_path):
    """A rank's state would be told by colour alone, or the last record of a dead one be taken for the present."""
    leave(tmp_path, make_record(1))
    leave(tmp_path, make_record(2, final=True))
    with living(tmp_path, make_record(0), make_record(3, written_at=WRITTEN_AT - 100)):
        _, page = page_of(tmp_path)
        _, dead = page_of(tmp_path, "?rank=1")
    assert [row[1] for row in page.ranks()] == ["running", "crashed", "exited", "stale"]
    assert "1 crashed, 1 stale, 1 running, 1 exited" in page.text
    assert "What is shown was last written 9 s ago" in dead.text
    assert "What is shown was last written" not in page.text
    assert "What held 173.9 MiB" in dead.text


def test_looking_uses_nothing_up(tmp_path):
    """Whoever looks at the page would keep a clean end from Prometheus."""
    leave(tmp_path, make_record(0, final=True))
    app = application(tmp_path, Clock(WRITTEN_AT + 1))
    for _ in range(5):
        assert "exited" in ask(app, "/").text
    assert [states(ask(app).text) for _ in range(3)] == [{"0": "exited"}, {"0": "exited"}, {}]


def test_empty_page_helps(tmp_path):
    """An empty page would leave open where records are looked for, and how a job comes to leave any."""
    for directory in (tmp_path, tmp_path / "missing"):
        status, page = page_of(directory)
        assert (status, str(directory) in page.text) == (200, True)
        assert "torchmem.install(model, optimizer)" in page.text
    assert "does not exist (yet)" in page.text


def test_broken_records_are_told(tmp_path):
    """A record that cannot be read would be missing without a word."""
    (tmp_path / "job").mkdir()
    (tmp_path / "job" / "rank-0.record").write_bytes(b"garbage of more than a header")
    _, page = page_of(tmp_path)
    assert ["job/rank-0.record", "magic", "not a torchmem record"] in page.rows


def test_rank_without_devices_or_steps_is_shown(tmp_path):
    """A rank that has not finished a step yet would cost the whole page."""
    empty = make_device(0, step_peak=b"", usage=b"", step_peak_bytes=0, usage_bytes=0)
    with living(tmp_path, make_record(0, devices=[]), make_record(1, devices=[empty], step=0, ring=wire.Ring())):
        assert "counts no device" in page_of(tmp_path)[1].text
        assert "no step has finished" in page_of(tmp_path, "?rank=1")[1].text


def test_device_without_use_is_no_missing_step(tmp_path):
    """A device that holds nothing after many steps would be waited for."""
    unused = make_device(0, step_peak=b"", usage=b"", step_peak_bytes=0, usage_bytes=0)
    with living(tmp_path, make_record(0, devices=[unused], step=40)):
        _, page = page_of(tmp_path)
    assert "Nothing is held on this device at the step peak." in page.text
    assert "no step has finished" not in page.text


def test_jobs_whose_names_are_shown_alike_are_told_apart(tmp_path):
    """The script would put the rows of one job in the place of the other's."""
    names = ["llama-70b-pretraining-run-2026-" + letter * 40 + "-with-warmup-and-decay-3e-4-end" for letter in "ab"]
    with living(tmp_path, *(make_record(0, train_job=name) for name in names)):
        _, page = page_of(tmp_path)
    for tag in ("tr", "tbody"):
        keys = [attrs["data-k"] for name, attrs in page.tags if name == tag and attrs.get("data-k")]
        assert len(set(keys)) == len(keys) == 2


EMPTY = {"usage": b"", "step_peak": b"", "active_peak": b"", "usage_bytes": 0, "step_peak_bytes": 0}
RING_OF_NOTHING = wire.Ring(
    steps=bytes(8),
    ended_at=bytes(8),
    phases=bytes(8),
    devices=[wire.RingDevice(name="cuda:0", step_peak=b"", step_end=b"")],
)


@pytest.mark.parametrize(
    "overrides",
    [
        {"reftypes": [], "devices": [make_device(0, **EMPTY)], "ring": RING_OF_NOTHING},
        {
            "limit_bytes": (1 << 63) - 1,
            "other_bytes": (1 << 63) - 1,
            "unattributed_bytes": -(1 << 63),
            "peak_bytes": -5,
        },
        {"limit_bytes": -1, "world_size": -4, "step": 0, "step_seconds": 0.0},
        {"written_at": 1e308, "start_time": 1e307},
        {"allocator": wire.Allocator(reserved_bytes=-1, inactive_split_bytes=5)},
        {"mesh": {HOSTILE: -1}},
    ],
    ids=["no reftypes", "extremes", "negative", "beyond all calendars", "allocator", "mesh"],
)
def test_odd_numbers_cost_nobody_the_page(tmp_path, overrides):
    """One rank's nonsense would keep the page and the scrape of all ranks from everybody."""
    with living(tmp_path, make_record(0, **overrides), make_record(1)):
        status, page = page_of(tmp_path, "?rank=0")
        assert ask(application(tmp_path, Clock(WRITTEN_AT))).status == 200
    assert (status, len(page.ranks())) == (200, 2)


def test_what_grew_is_named(tmp_path):
    """Who makes a device's peak drift would not be seen without another server."""

    def record(step):
        return trained(0, step, leak_from=460, leak_mib=150, written_at=WRITTEN_AT)

    with living(tmp_path, record(60)) as (store,):
        app = application(tmp_path, Clock(WRITTEN_AT))
        for step in range(80, 601, 20):
            store.write(wire.encode(record(step)))
            page = Page(ask(app, "/").text)
    assert "drift rank 0: cuda:0 +" in page.text
    assert page.ranks()[0][6].startswith("+")
    assert any("attention.wo" in row[0] and row[1] == "activation" for row in page.rows if len(row) == 3)
    assert "baseline" in page.text


def test_nobody_who_does_not_look_pays_for_the_page(tmp_path):
    """Each sidecar would keep a template engine in memory that it never uses."""
    program = (
        "import sys, torchmem_exporter.cli, torchmem_exporter.exposition, torchmem_exporter.serving.server;"
        "assert not [n for n in sys.modules if n.split('.')[0] == 'jinja2' or n.startswith('torchmem_exporter.page')]"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_paused_page_stays_paused(tmp_path):
    """Whoever stops the page from changing would be followed by it to the next rank."""
    with living(tmp_path, make_record(0)):
        _, page = page_of(tmp_path, "?live=off")
    assert "http-equiv" not in page.html
    assert all("live=off" in href for href in page.hrefs() if "rank=" in href)
    assert "/" in page.hrefs()


def test_files_of_the_page_end_as_they_should():
    """A tag left open in the template would be mended by each browser in its own way."""
    template = (Path(__file__).parents[3] / "exporter" / "torchmem_exporter" / "page" / "page.html").read_text()
    for tag in ("section", "figure", "details", "div", "ul", "dl", "table", "nav", "svg", "main", "header", "footer"):
        assert len(re.findall(f"<{tag}[ >{{]", template)) == template.count(f"</{tag}>"), tag
