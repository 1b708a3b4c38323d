"""No file below ``deploy/`` is unchecked, and the list of checks is the one that is checked in."""

from __future__ import annotations

import pytest

import deploys

TESTS = deploys.ROOT / "tests"


def test_every_file_has_a_tool():
    """A file that nothing checks would be deployed by somebody first."""
    assert [file for file in deploys.all_files() if not deploys.tools(file)] == []


@pytest.mark.parametrize("tool", sorted(deploys.CHECKS))
def test_every_tool_has_a_test(tool):
    """The list would name a check that nobody makes."""
    call = f'passed("{tool}"'
    files = [file for file in TESTS.glob("*/**/test_*.py") if call in file.read_text()]
    assert files, f"no test calls {call}"
    assert deploys.files(tool)


def test_the_list_is_current():
    """People would read a list that is not true any more: run `make generate`."""
    assert deploys.CHECKED.read_text() == deploys.table()
    deploys.passed("comparison with the plan", "CHECKED.md")
