"""What ``deploy/`` repeats of ``grafana/`` is what ``make generate`` would write."""

from __future__ import annotations

import pytest

import deploys

deployed = pytest.importorskip("generator.deployed", reason="dashboards are generated with Python 3.11 or newer")


@pytest.mark.parametrize("name", sorted(deployed.files()))
def test_repeated_files_are_as_generated(name):
    """A cluster would get other rules, alerts or dashboards than everybody else: run `make generate`."""
    assert (deploys.DEPLOY / name).read_text() == deployed.files()[name]
    deploys.passed("comparison with grafana/", name)


def test_nothing_is_repeated_that_is_gone():
    """A dashboard that was renamed would stay in the chart under its former name."""
    there = {file for file in deploys.all_files() if file.startswith(f"{deployed.CHART}/files/")}
    assert there == {name for name in deployed.files() if name.startswith(deployed.CHART)}
