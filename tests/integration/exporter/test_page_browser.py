"""The sidecar's page in a real Chromium: what it costs, how it follows the ranks, who can use it."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import bcrypt
import pytest
from axe_playwright_python.sync_playwright import Axe

from pages import browsing, launched, trained, wait_for
from records import living
from sidecars import running
from torchmem.wire import record as wire

pytestmark = pytest.mark.slow

NUM_RANKS = 64
LOAD_MS = 200
STEP_SECONDS = 2.0
DEADLINE_SECONDS = 60.0
STEP = "document.querySelector('tr[data-k^=\"0 \"]').cells[2].textContent"
RANK = """
import pathlib, sys, time
sys.path.insert(0, sys.argv[1])
import pages, records
with records.living(pathlib.Path(sys.argv[2]), pages.trained(int(sys.argv[3]), 40, written_at=time.time())):
    print("lives", flush=True)
    time.sleep(600)
"""


def fresh(rank=0, step=400, **overrides):
    """A record of this moment."""
    now = time.time()
    return trained(rank, step, written_at=now, start_time=now - step, **overrides)


@pytest.fixture(scope="module")
def node(tmp_path_factory):
    """A sidecar over 64 ranks, whose first judgement of all their steps is done, and the ranks' stores."""
    directory = tmp_path_factory.mktemp("records")
    with living(directory, *(fresh(rank, 40) for rank in range(NUM_RANKS))) as stores, running(directory) as sidecar:
        assert sidecar.ask("/").status == 200
        yield sidecar, stores


@pytest.fixture(scope="module")
def browser(chromium):
    """A Chromium."""
    with launched(chromium) as browser:
        yield browser


@pytest.fixture
def page(browser, node):
    """A Chromium at the page."""
    sidecar, _ = node
    with browsing(browser, color_scheme="dark") as page:
        page.goto(f"http://127.0.0.1:{sidecar.port}/")
        yield page


def test_loads_quickly(page):
    """Whoever opens the page of a large node would wait for it."""
    took, deadline = [], time.monotonic() + DEADLINE_SECONDS
    while not (took and min(took) < LOAD_MS) and time.monotonic() < deadline:
        page.reload()
        entry = page.evaluate("performance.getEntriesByType('navigation')[0].toJSON()")
        took.append(entry["loadEventEnd"] or entry["duration"])
        assert entry["decodedBodySize"] < 100_000
    assert page.locator("table.ranks th[scope=row]").count() == NUM_RANKS
    assert min(took) < LOAD_MS, took


def test_shows_a_new_step(page, node):
    """The page would stand still while the job trains."""
    _, stores = node
    page.evaluate("document.body.dataset.kept = 1")
    took = []
    for step in range(41, 51):
        record = wire.encode(fresh(0, step))
        began = time.monotonic()
        stores[0].write(record)
        wait_for(page, STEP, str(step))
        took.append(time.monotonic() - began)
        if took[-1] < STEP_SECONDS:
            break
    assert min(took) < STEP_SECONDS, took
    assert page.evaluate("document.body.dataset.seconds") == "1"


def test_following_disturbs_nobody(page, node):
    """What one reads or has chosen by keyboard would be lost each second."""
    _, stores = node
    page.locator("summary").first.click()
    page.locator("table.ranks a").nth(20).focus()
    page.evaluate("window.scrollTo(0, 333); document.querySelector('.scroll').scrollTop = 200")
    before = page.evaluate("document.querySelector('.scroll').scrollTop")
    stores[1].write(wire.encode(fresh(1, 77)))
    wait_for(page, STEP.replace('"0 ', '"1 '), "77")
    assert page.evaluate("[scrollY, document.querySelector('.scroll').scrollTop]") == [333, before]
    assert page.evaluate("document.activeElement.textContent") == "rank 20"
    assert page.evaluate("document.querySelector('details').open")


def test_pause_and_follow(page, node):
    """What moves could not be stopped, or not be started again."""
    _, stores = node
    toggle = page.locator("#toggle")
    toggle.click()
    wait_for(page, "document.getElementById('toggle').textContent", "Follow")
    assert "live=off" in page.url
    shown = page.evaluate(STEP)
    stores[0].write(wire.encode(fresh(0, 300)))
    page.wait_for_timeout(2500)
    assert page.evaluate(STEP) == shown
    toggle.click()
    wait_for(page, STEP, "300")


def test_choosing_by_mouse_and_keyboard(page):
    """A rank could not be chosen, or only with a mouse."""
    page.get_by_role("link", name="rank 9", exact=True).first.click()
    wait_for(page, "document.querySelector('#rank').textContent.startsWith('Rank 9 ')")
    assert page.title().startswith("Rank 9 of llama-pretrain")
    assert page.locator("tr[aria-current]").count() == 1
    page.goto(page.url.partition("?")[0])
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.textContent") == "Skip to the ranks"
    page.keyboard.press("Enter")
    for _ in range(8):
        page.keyboard.press("Tab")
        if page.evaluate("document.activeElement.textContent") == "rank 3":
            break
    page.keyboard.press("Enter")
    wait_for(page, "document.querySelector('#rank').textContent.startsWith('Rank 3 ')")
    page.go_back()
    wait_for(page, "document.querySelector('#rank').textContent.startsWith('Rank 0 ')")


def test_fits_any_width(page):
    """The page would have to be scrolled sideways, or labels lie over each other."""
    too_wide = """[...document.querySelectorAll('.treemap g')].filter(g => g.getClientRects().length).flatMap(g => {
        let cell = null, found = [];
        for (const node of g.children) {
            if (node.nodeName === 'rect') cell = node.getBBox();
            else if (getComputedStyle(node).display !== 'none') {
                const box = node.getBBox();
                if (box.x + box.width > cell.x + cell.width || box.y + box.height > cell.y + cell.height + 1)
                    found.push(node.textContent);
            }
        }
        return found;
    })"""
    visible = "[...document.querySelectorAll('.treemap text')].filter(t => t.getClientRects().length).length"
    for width in (360, 768, 1280, 2560):
        page.set_viewport_size({"width": width, "height": 900})
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        assert page.evaluate(too_wide) == []
        assert page.evaluate(visible) >= (10 if width < 700 else 20)


@pytest.mark.parametrize(("scheme", "width"), [("light", 360), ("dark", 1280)])
def test_nothing_shuts_anybody_out(page, scheme, width):
    """The page could not be read with a screen reader, or not for want of contrast."""
    page.emulate_media(color_scheme=scheme)
    page.set_viewport_size({"width": width, "height": 900})
    for details in page.locator("summary").all():
        details.click()
    found = Axe().run(page, options={"resultTypes": ["violations"]}).response["violations"]
    assert [(rule["id"], [node["html"][:160] for node in rule["nodes"][:3]]) for rule in found] == []


def test_dark_and_light_differ(page):
    """Whoever works in the dark would be blinded."""
    grounds = []
    for scheme in ("light", "dark"):
        page.emulate_media(color_scheme=scheme)
        grounds.append(page.evaluate("getComputedStyle(document.body).backgroundColor"))
    assert grounds == ["rgb(255, 255, 255)", "rgb(15, 20, 25)"]


def test_rank_that_dies_while_one_looks(page, node, tmp_path):
    """A crash would be seen only by whoever loads the page anew."""
    directory = node[1][0].path.parents[1]
    tests = Path(__file__).parents[2]
    arguments = [sys.executable, "-c", RANK, str(tests), str(directory), "70"]
    rank = subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True)
    state = "document.querySelector('tr[data-k^=\"70 \"]')?.cells[1].textContent"
    try:
        assert rank.stdout.readline() == "lives\n"
        page.goto(f"{page.url}?job=llama-pretrain&rank=70")
        wait_for(page, state, "running")
        rank.send_signal(signal.SIGKILL)
        wait_for(page, state, "crashed")
    finally:
        rank.kill()
        rank.wait()
        rank.stdout.close()
    assert "1 crashed" in page.locator("[role=status]").text_content()
    assert "ended without a clean end" in page.locator(".warnings").text_content()
    assert "What is shown was last written" in page.locator("main").text_content()


def test_rank_that_comes_back_while_one_looks(browser, tmp_path):
    """A page that was left open would stand still for good once its rank has ended and been scraped away."""
    with (
        living(tmp_path, fresh(1, 40)) as (other,),
        running(tmp_path) as sidecar,
        browsing(browser, bears="404") as page,
    ):
        with living(tmp_path, fresh(0, 40)) as (ended,):
            page.goto(f"http://127.0.0.1:{sidecar.port}/?job=llama-pretrain&rank=0")
            ended.write(wire.encode(fresh(0, 40, final=True)))
        for _ in range(3):
            sidecar.ask()
        wait_for(page, "document.querySelector('#message')?.textContent", "Not here")
        other.write(wire.encode(fresh(1, 99)))
        wait_for(page, STEP.replace('"0 ', '"1 '), "99")
        with living(tmp_path, fresh(0, 7, attempt="next")):
            wait_for(page, "document.querySelector('#rank')?.textContent.startsWith('Rank 0 ')")


def test_without_scripts(browser, node):
    """A browser that runs no scripts would show nothing, or never anything new."""
    sidecar, _ = node
    with browsing(browser, java_script_enabled=False) as page:
        page.goto(f"http://127.0.0.1:{sidecar.port}/?rank=2")
        assert page.locator("#rank").text_content().startswith("Rank 2 ")
        assert page.locator(".treemap rect").count() > 40
        assert page.locator("meta[http-equiv=refresh]").get_attribute("content") == "10"
        page.get_by_role("link", name="Pause").click()
        assert page.locator("meta[http-equiv=refresh]").count() == 0


def test_from_before_the_first_record_to_after_the_end(browser, tmp_path):
    """Whoever looks before the job starts would see nothing of it, and after the end take the old for the present."""
    with running(tmp_path) as sidecar, browsing(browser, bears="ERR_CONNECTION_REFUSED") as page:
        page.goto(f"http://127.0.0.1:{sidecar.port}/")
        assert str(tmp_path) in page.locator("#main").text_content()
        with living(tmp_path, fresh(5)):
            wait_for(page, "document.querySelector('#rank')?.textContent.startsWith('Rank 5 ')")
        sidecar.end()
        wait_for(page, "document.getElementById('news').textContent.includes('does not answer')")


def test_following_is_authenticated(browser, tmp_path):
    """The page would be open to everybody, or stop at its first look behind a password."""
    password = bcrypt.hashpw(b"secret", bcrypt.gensalt(4)).decode()
    config = tmp_path / "web.yml"
    config.write_text(f"basic_auth_users:\n  admin: '{password}'\n")
    who = {"username": "admin", "password": "secret"}
    with (
        living(tmp_path / "records", fresh()) as (store,),
        running(store.path.parents[1], f"--web-config={config}") as sidecar,
    ):
        assert sidecar.ask("/").status == 401
        with browsing(browser, http_credentials=who) as page:
            page.goto(f"http://127.0.0.1:{sidecar.port}/")
            store.write(wire.encode(fresh(0, 401)))
            wait_for(page, STEP, "401")
