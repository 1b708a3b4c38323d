"""Forecasts against runs: every row of ``torchmem validate`` that can run on fake tensors.

Each row is run on two ranks on the CPU under the native engine, and forecast. The measured peak is the lowest of the
steady steps of rank 0, because gloo's threads let go of their last buffers when they come to it. A row is right where
the forecast peak is within 1% of the measured one and each reference type within 2% of its own bytes (or 0.1% of the
peak). What cannot be forecast, or is not within that, is explained by name, or the program ends with status 1.

    python tests/bench/forecast_accuracy.py [--short] [--only PATTERN] [--out FILE]
"""

from __future__ import annotations

import argparse
import contextlib
import fnmatch
import io
import json
import logging
import sys
import tempfile
import warnings
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch

import torchmem
from torchmem.engine import native
from torchmem.validation import rows, witness
from torchmem.validation.worker import RowError, Team
from torchmem.validation.workloads import Place

PEAK_TOLERANCE = 0.01
REFTYPE_TOLERANCE = 0.02
REFTYPE_FLOOR = 0.001
NUM_STEPS = 6
SHORT = ("fsdp2/multi-group/reshard/device/full", "fsdp2/hybrid/mixed", "ddp/copied", "zoo/nested/fsdp1")

_SAVING = "saving writes the values of tensors, which fake ones do not have"
_GLOO = "gloo copies the input of a reduce-scatter, which NCCL does not"

EXPLAINED = {
    "compiled/*": "compiled computation is forecast as it runs eagerly",
    "zoo/experts/*": "the number of tokens of an expert depends on their values",
    "state-dict/plain": _SAVING,
    "state-dict/ddp": _SAVING,
    "state-dict/fsdp1/rank0-only/*": _SAVING,
    "state-dict/fsdp1/local/*": _SAVING,
    "state-dict/fsdp2/*": _SAVING,
    "fsdp2/multi-group/keep/*/mixed": _GLOO,
    "zoo/partly-frozen/fsdp2": _GLOO,
    "tensor-parallel/fsdp2/checkpointing": "checkpointing keeps the state of the CPU's generator: 5,056 bytes a call",
}
"""By pattern, the first that fits: why a row cannot be forecast, or is off."""


@dataclass
class Result:
    """One row, compared."""

    row: str
    status: str
    measured_bytes: int = 0
    forecast_bytes: int = 0
    ratio: float = 0.0
    reftypes: dict[str, list[int]] = field(default_factory=dict)
    why: str = ""


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--short", action="store_true", help="four rows")
    parser.add_argument("--only", action="append", default=[], help="rows, as of `torchmem validate`")
    parser.add_argument("--out", type=Path, help="write the results there, as JSON")
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.disable(logging.ERROR)
    torch.set_num_threads(1)
    native.build()
    witness.build()
    results = []
    print(f"{'row':<46}{'measured':>11}{'forecast':>11}{'ratio':>8}  ")
    with Team(2, "cpu") as team:
        for row in rows.find(SHORT if arguments.short else arguments.only):
            result = compare(row, team)
            results.append(result)
            show(result)
    numbers = {
        status: sum(r.status == status for r in results) for status in ("right", "explained", "WRONG", "skipped")
    }
    print(", ".join(f"{count} {status}" for status, count in numbers.items()))
    if arguments.out:
        arguments.out.write_text(json.dumps([asdict(result) for result in results], indent=1) + "\n")
    return 1 if numbers["WRONG"] else 0


def compare(row, team):
    """Runs the row, forecasts it, and compares the two."""
    if reason := row.reason_to_skip(rows.Machine("cpu", 2)):
        return Result(row.name, "skipped", why=reason)
    why = next((why for pattern, why in EXPLAINED.items() if fnmatch.fnmatchcase(row.name, pattern)), "")
    try:
        (ours,) = forecast(row).ranks[0].devices
    except torchmem.ForecastError as error:
        return Result(row.name, "explained" if why else "WRONG", why=why or str(error))
    try:
        steps = team.run(row.name, NUM_STEPS, row.seconds)[0].steps
    except RowError as error:
        return Result(row.name, "WRONG", why=str(error))
    return judge(row, ours.steps[-1], min(steps[1:NUM_STEPS], key=lambda step: step.peak_bytes), why)


def judge(row, ours, measured, why):
    """How far the forecast is from what was measured."""
    ratio = ours.peak_bytes / measured.peak_bytes
    held = {
        reftype: [measured.peak.get(reftype, 0), ours.by_reftype.get(reftype, 0)]
        for reftype in {*measured.peak, *ours.by_reftype}
    }
    floor = REFTYPE_FLOOR * measured.peak_bytes
    off = {
        name: pair for name, pair in held.items() if abs(pair[1] - pair[0]) > max(floor, REFTYPE_TOLERANCE * pair[0])
    }
    right = abs(ratio - 1) <= PEAK_TOLERANCE and not off
    status = "right" if right else "explained" if why else "WRONG"
    return Result(row.name, status, measured.peak_bytes, ours.peak_bytes, ratio, off, "" if right else why)


def forecast(row):
    """The row's forecast for rank 0 of 2."""

    def build(rank, world_size):
        place = Place(rank, world_size, torch.device("cpu"), Path(tempfile.mkdtemp()))
        workload = row.build(place)
        return workload.model, workload.optimizer, workload.step

    with contextlib.redirect_stderr(io.StringIO()), contextlib.redirect_stdout(io.StringIO()):  # FSDP1 prints stacks
        return torchmem.forecast(build, world_size=2)


def show(result):
    figures = (
        f"{result.measured_bytes:>11,}{result.forecast_bytes:>11,}{result.ratio:>8.4f}" if result.ratio else " " * 30
    )
    print(f"{result.row:<46}{figures}  {result.status}{': ' if result.why else ''}{result.why}", flush=True)
    for reftype, (measured, ours) in sorted(result.reftypes.items()):
        print(f"{'':<46}{measured:>11,}{ours:>11,}          {reftype}")


if __name__ == "__main__":
    sys.exit(main())
