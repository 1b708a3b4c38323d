"""Every test says in one line what would be broken if it failed."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parent.parent
FILES = sorted(TESTS.rglob("*.py"))


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(TESTS)))
def test_each_test_says_in_one_line_what_it_is_for(path):
    """A test that fails in CI would leave its reader guessing what is broken."""
    functions = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.FunctionDef)]
    tests = [function for function in functions if function.name.startswith("test")]
    docstrings = {test.name: ast.get_docstring(test) for test in tests}
    assert [name for name, text in docstrings.items() if not text or "\n" in text] == []
