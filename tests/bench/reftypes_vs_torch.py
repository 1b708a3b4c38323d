"""Who holds a step's peak, by torchmem and by torch's FSDPMemTracker: ``python tests/bench/reftypes_vs_torch.py``.

One table per job: bytes by reftype at the peak of a steady step, both totals beside the counting allocator's. Why the
two differ where they do is asserted, difference by difference, in ``tests/integration/test_against_torch.py``.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from rich.console import Console
from rich.table import Table

from jobs.ranks import run_alone
from jobs.reftypes import Compared, compare


def table(title: str, compared: Compared) -> Table:
    """One job's rows; only reftypes that somebody saw."""
    result = Table("reftype", title=title, caption=compared.torch_error or None)
    for column in ("torchmem", "torch", "difference"):
        result.add_column(column, justify="right")
    ours, theirs = compared.ours.peak, compared.torch
    rows = [(reftype, ours.get(reftype, 0), theirs.get(reftype, 0)) for reftype in sorted(ours.keys() | theirs.keys())]
    rows.append(("total", sum(ours.values()), compared.torch_total))
    rows.append(("counting allocator", compared.ours.true_peak, compared.ours.true_peak))
    for reftype, mine, torchs in rows:
        result.add_row(reftype, f"{mine:,}", f"{torchs:,}", f"{mine - torchs:+,}" if mine != torchs else "")
    return result


def main() -> None:
    """Runs every case and prints."""
    parser = argparse.ArgumentParser(description="who holds a step's peak, by torchmem and by FSDPMemTracker")
    parser.add_argument("--short", action="store_true", help="without the four-rank job")
    world_sizes = (2,) if parser.parse_args().short else (2, 4)
    console = Console()
    with tempfile.TemporaryDirectory() as directory:
        for world_size in world_sizes:
            for (variant, size), compared in run_alone(compare, world_size, directory).items():
                console.print(table(f"{variant}, {size}, {world_size} ranks", compared))


if __name__ == "__main__":
    main()
