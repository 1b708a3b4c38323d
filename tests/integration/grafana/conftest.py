"""The one fleet that all tests of dashboards look at: starting and learning it takes a minute."""

from __future__ import annotations

import contextlib

import pytest

from live_fleet import live_fleet

running = contextlib.ExitStack()


@pytest.fixture(scope="session")
def fleet(prometheus, tmp_path_factory):
    """A fleet of which everything is known that dashboards show, faults included."""
    with running:
        made = running.enter_context(live_fleet(prometheus, tmp_path_factory.mktemp("fleet")))
        made.wait_until_learned()
        made.go_wrong()
        made.wait_until_told()
        yield made


def pytest_runtest_teardown(item):
    """Ends the fleet after the last test that looks at it: it would take the cores from all tests that follow."""
    later = item.session.items[item.session.items.index(item) + 1 :]
    if not any("fleet" in one.fixturenames for one in later):
        running.close()
