"""Shared work: who gets which result, and what happens to it when somebody gives up or the work fails."""

from __future__ import annotations

import asyncio
import gc
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from sidecars import DEADLINE_SECONDS
from torchmem_exporter.serving.flight import SingleFlight


@pytest.fixture
def pool():
    with ThreadPoolExecutor(4) as pool:
        yield pool


def test_a_result_is_shared_while_it_is_made_and_not_kept(pool):
    """A scrape would get figures of an earlier one."""
    numbers = iter(range(100))

    async def ask():
        flight = SingleFlight(pool)
        results = [await asyncio.gather(*(flight.run("a", lambda: next(numbers)) for _ in range(5))) for _ in range(3)]
        assert len(flight) == 0
        return results

    assert asyncio.run(ask()) == [[0] * 5, [1] * 5, [2] * 5]


def test_another_kind_is_made_apart(pool):
    """A client would get what was made for another."""

    async def ask():
        flight = SingleFlight(pool)
        return await asyncio.gather(flight.run("a", lambda: 1), flight.run("b", lambda: 2))

    assert asyncio.run(ask()) == [1, 2]


def test_a_failure_is_everybodys_and_is_not_kept(pool):
    """One failure would go on failing, or leave somebody waiting."""

    async def ask():
        flight = SingleFlight(pool)
        failed = await asyncio.gather(*(flight.run("a", lambda: 1 / 0) for _ in range(3)), return_exceptions=True)
        return failed, await flight.run("a", lambda: 1)

    failed, after = asyncio.run(ask())
    assert [type(error) for error in failed] == [ZeroDivisionError] * 3
    assert after == 1


def test_who_gives_up_takes_nothing_from_the_others(pool, caplog):
    """One client that hangs up would cost the scrape of all that share it, or an error in the log."""
    opened = threading.Event()

    def work():
        assert opened.wait(DEADLINE_SECONDS)
        return "made"

    def fail():
        work()
        raise ValueError

    async def ask():
        flight = SingleFlight(pool)
        impatient = asyncio.ensure_future(flight.run("a", work))
        patient = asyncio.ensure_future(flight.run("a", work))
        alone = asyncio.ensure_future(flight.run("b", fail))
        await asyncio.sleep(0)
        impatient.cancel()
        alone.cancel()
        await asyncio.sleep(0)
        opened.set()
        result = await patient
        await asyncio.gather(*flight._running.values(), return_exceptions=True)
        return result

    assert asyncio.run(ask()) == "made"
    gc.collect()
    assert caplog.text == ""
