"""What the programs in ``bench`` have in common: their arguments, and figures printed with their limits."""

from __future__ import annotations

import argparse
import json
import sys


def arguments(description, short):
    """A parser with the two flags that ``make bench`` and its readers count on.

    Args:
        description: the program's docstring, of which the first line is shown.
        short: what ``--short`` leaves out.
    """
    parser = argparse.ArgumentParser(description=description.splitlines()[0])
    parser.add_argument("--short", action="store_true", help=short)
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")
    return parser


def report(figures, flags, *, at_most=None, at_least=None):
    """Prints figures by name; returns the exit status, 1 when those of a full run exceed a limit.

    Args:
        figures: ints are counts, floats what was measured.
        flags: what the parser of ``arguments`` found.
        at_most: limits by the names of figures.
        at_least: likewise.
    """
    at_most, at_least = at_most or {}, at_least or {}
    if flags.json:
        sys.stdout.write(json.dumps(figures, indent=2) + "\n")
    else:
        limits = {name: f"  (limit {limit:g})" for name, limit in at_most.items()}
        limits |= {name: f"  (at least {limit:g})" for name, limit in at_least.items()}
        for name, value in figures.items():
            number = f"{value:>12,.5g}" if isinstance(value, float) else f"{value:>12,}"
            sys.stdout.write(f"{name:22} {number}{limits.get(name, '')}\n")
    is_missed = any(figures[name] > limit for name, limit in at_most.items())
    is_missed |= any(figures[name] < limit for name, limit in at_least.items())
    return int(not flags.short and is_missed)
