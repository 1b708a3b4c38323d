"""The live view's keys, sizes and endings, without a terminal."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from textual.worker import WorkerFailed

import records
import watched
from torchmem.watching.app import WatchApp
from torchmem.watching.look import Watcher
from torchmem.wire import record as wire

DEADLINE_SECONDS = 20.0
SMALL = (80, 24)


@asynccontextmanager
async def viewed(directory, size=SMALL, **changes):
    """The running view and its pilot; a reading every tenth of a second."""
    app = WatchApp(Watcher(directory), **{"interval": 0.1, "top": None, "encoding": "utf-8", **changes})
    async with app.run_test(size=size) as pilot:
        yield app, pilot


def screen(app):
    """The lines on the screen."""
    return [strip.text.rstrip() for strip in app.screen._compositor.render_strips()]


async def shows(app, pilot, *texts):
    """Waits until all the texts are on the screen; returns its lines."""
    deadline = time.monotonic() + DEADLINE_SECONDS
    while not all(text in "\n".join(screen(app)) for text in texts):
        assert time.monotonic() < deadline, "\n".join(screen(app))
        await pilot.pause(0.02)
    return screen(app)


@pytest.fixture
def two_ranks(tmp_path):
    """A directory with two living ranks."""
    with records.living(tmp_path, watched.trained(0, 520), watched.trained(1, 520)):
        yield tmp_path


def test_small_terminal_shows_every_pane(two_ranks):
    """On 80x24 a part of the view would be missing."""

    async def use():
        async with viewed(two_ranks) as (app, pilot):
            lines = await shows(app, pilot, "> 0/8")
            assert [len(lines), max(map(len, lines)) <= 80] == [24, True]
            wanted = [
                "torchmem watch",
                "rank 0/8 cuda:0",
                "level",
                "who holds",
                "more)",
                "grown over",
                "steps 8 to 519",
            ]
            wanted += ["step peak", "step end", "q quit"]
            await shows(app, pilot, *wanted)

    asyncio.run(use())


def test_keys_choose_rank_folding_book_and_order(two_ranks):
    """A key that the footer promises would do nothing."""

    async def use():
        async with viewed(two_ranks) as (app, pilot):
            await shows(app, pilot, "> 0/8", "layers.*.attention", "at the peak of a step")
            await pilot.press("j")
            await shows(app, pilot, "> 1/8", "rank 1/8 cuda:1")
            await pilot.press("k", "down", "up", "u")
            await shows(app, pilot, "> 0/8", "layers.7.attention")
            await pilot.press("p")
            await shows(app, pilot, "at the end of the last step", "usage")
            await pilot.press("s")
            assert app.choice.order.value == "peak"

    asyncio.run(use())


def test_tab_shows_the_next_device(tmp_path):
    """The host's memory of a GPU job could not be seen."""

    async def use():
        async with viewed(tmp_path) as (app, pilot):
            await shows(app, pilot, "rank 0/8 cuda:0")
            await pilot.press("tab")
            await shows(app, pilot, "rank 0/8 cpu")
            await pilot.press("d")
            await shows(app, pilot, "rank 0/8 cuda:0")

    devices = [records.make_device(name=name) for name in ("cpu", "cuda:0")]
    with records.living(tmp_path, records.make_record(0, devices=devices)):
        asyncio.run(use())


def test_help_opens_and_any_key_closes_it_without_doing_more(two_ranks):
    """A user who asks what `leak` means would be left alone, or quit the view by closing the answer."""

    async def use():
        async with viewed(two_ranks) as (app, pilot):
            await shows(app, pilot, "> 0/8")
            await pilot.press("question_mark")
            await shows(app, pilot, "any key closes this", "leak")
            await pilot.press("j")
            await shows(app, pilot, "> 0/8", "q quit")

    asyncio.run(use())


def test_resized_terminal_is_filled(two_ranks):
    """After a resize the view would keep its former size."""

    async def use():
        async with viewed(two_ranks) as (app, pilot):
            await shows(app, pilot, "> 0/8")
            await pilot.resize_terminal(160, 50)
            while not any("who holds" in line and "grown over" in line for line in screen(app)):
                await pilot.pause(0.02)  # until the test's own limit
            assert len(screen(app)) == 50
            await pilot.resize_terminal(10, 3)
            await pilot.resize_terminal(*SMALL)
            assert len(await shows(app, pilot, "steps 8 to 519")) == 24

    asyncio.run(use())


def test_missing_directory_is_waited_for_and_ranks_come_and_go(tmp_path, monkeypatch):
    """A view that was opened before the job would have to be opened again."""
    monkeypatch.chdir(tmp_path)

    async def use():
        async with viewed(Path("later")) as (app, pilot):  # a path of any other length breaks the line elsewhere
            await shows(app, pilot, "does not exist yet")
            with records.living(tmp_path / "later", watched.trained(0, 520)) as (store,):
                await shows(app, pilot, "> 0/8", "1 running")
                store.write(wire.encode(watched.trained(0, 540)))
                await shows(app, pilot, "running  540")
            await shows(app, pilot, "1 crashed", "! rank 0/8: ended without a clean end")
            (tmp_path / "later" / "llama-pretrain" / "rank-0.record").write_bytes(b"garbage")
            await shows(app, pilot, "waiting: no records", "cannot be read: llama-pretrain/rank-0.record: truncated")

    asyncio.run(use())


class Hanging:
    """A watcher whose disk does not answer."""

    def look(self):
        time.sleep(600)


HANGING = """
import sys, threading
sys.path[:0] = sys.argv[1:]
from test_watch_app import Hanging
from torchmem.watching.app import WatchApp

async def quit_soon(pilot):
    await pilot.press("q")

sys.exit(WatchApp(Hanging(), 0.1, None, "ascii").run(headless=True, auto_pilot=quit_soon))
"""


def test_view_ends_while_a_look_hangs():
    """On a dead mount `q` and Ctrl-C would leave the user without a shell until the mount is back."""
    tests = Path(__file__).parents[2]
    line = [sys.executable, "-c", HANGING, str(tests), str(Path(__file__).parent)]
    ended = subprocess.run(line, capture_output=True, text=True, timeout=DEADLINE_SECONDS, check=False)
    assert (ended.returncode, ended.stderr) == (0, "")


def test_reading_that_fails_ends_the_view(tmp_path):
    """A view that has stopped to read would show the past as the present."""

    async def use():
        app = WatchApp(Watcher(tmp_path), 0.1, None, "utf-8")
        async with app.run_test(size=SMALL) as pilot:
            app._watcher.look = lambda: 1 / 0
            while app.is_running:
                await pilot.pause(0.02)  # until the test's own limit

    with pytest.raises(WorkerFailed, match="division by zero"):
        asyncio.run(use())


@pytest.mark.parametrize(
    ("ending", "status"),
    [("q", 0), ("ctrl+c", 130), (signal.SIGTERM, 143), (signal.SIGINT, 130), (signal.SIGHUP, 129)],
)
def test_endings_have_the_status_that_a_shell_expects(two_ranks, ending, status):
    """A script around the view could not tell how it ended, or the view would not end at all."""

    async def use():
        async with viewed(two_ranks) as (app, pilot):
            await shows(app, pilot, "> 0/8")
            if isinstance(ending, str):
                await pilot.press(ending)
            else:
                os.kill(os.getpid(), ending)
            deadline = time.monotonic() + DEADLINE_SECONDS
            while app.is_running and app.return_value is None:
                assert time.monotonic() < deadline
                await asyncio.sleep(0.02)
            return app.return_value

    assert asyncio.run(use()) == status
