"""The command line of ``torchmem baseline``: what is usual of a run, kept by name to hold later runs against.

What a sidecar over the directory has learned is taken, and brought up to date with the records; where there is none, or
where it holds the job against a baseline that was kept, one is learned from the steps that the records' rings hold.

Invariants: importing this imports no torch, nor anything of the sidecar; a rank and device whose baseline is not known
yet is named and left out; the file is replaced whole.

Known limits: what the peak was made of is taken from the record when the sidecar did not note it; a record whose
latest peak was that of a checkpoint or an evaluation leaves it unknown.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torchmem.command_line import add_directory, complain, print_drawn, print_json, print_line, records_dir

if TYPE_CHECKING:
    from rich.console import Console

    from torchmem.show import Holders
    from torchmem.wire.record import Record
    from torchmem_exporter.drift.baseline import Baselines
    from torchmem_exporter.drift.composition import Composition
    from torchmem_exporter.drift.drift import Drift
    from torchmem_exporter.drift.judge import Drifts

UNKNOWN, UNUSABLE = 1, 2
NUM_PARTS = 5

_PLAIN_NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,127}")


def add_parser(commands: Any) -> None:
    """Adds the command to the parser of ``torchmem``."""
    help_text = "keep what is usual of a run by name, to compare later runs with"
    parser = commands.add_parser("baseline", help=help_text, description=f"{help_text.capitalize()}.")
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    help_text = "write what is usual of a job's ranks to a file"
    save = actions.add_parser("save", help=help_text, description=f"{help_text.capitalize()}.")
    save.add_argument("name", metavar="NAME", help="what to call it")
    directory = add_directory(save)
    # With nargs="?" argparse would take it as left out where an option follows NAME.
    directory.nargs, directory.required, directory.metavar = None, False, "[DIR]"
    save.add_argument("--job", metavar="J", help="only this training job")
    save.add_argument("--output", metavar="FILE", type=Path, help="where to (default: NAME.baseline.json, here)")
    help_text = "show a file of baselines"
    show = actions.add_parser("show", help=help_text, description=f"{help_text.capitalize()}.")
    show.add_argument("file", metavar="FILE", type=Path, help="that `torchmem baseline save` wrote")
    show.add_argument("--json", action="store_true", help="all of it as JSON")


def run(arguments: argparse.Namespace) -> int:
    """Saves or shows, and returns the status: 0, 1 where no baseline is known yet, 2 for input that cannot be used."""
    from torchmem.diff_input import UnusableError, read_baselines

    try:
        if arguments.action == "save":
            return _save(arguments)
        found = read_baselines(arguments.file)
    except UnusableError as error:
        complain(str(error))
        return UNUSABLE
    if arguments.json:
        import msgspec

        print_json(msgspec.to_builtins(found))
    else:
        print_drawn(lambda console: _draw(console, found))
    return 0


def _save(arguments: argparse.Namespace) -> int:
    from torchmem.diff_input import read_records
    from torchmem_exporter.drift.baseline import encode

    if arguments.output is None and not _PLAIN_NAME.fullmatch(arguments.name):
        complain(f"{arguments.name!r} makes no plain file name: say where to write with --output")
        return UNUSABLE
    output = arguments.output or Path(f"{arguments.name}.baseline.json")
    directory = records_dir(arguments.directory)
    found = read_records(directory, arguments.job)
    for line in found.unreadable:
        complain(line)
    saved, unknown = collect(arguments.name, found.records, learned_in(directory))
    for line in unknown:
        complain(line)
    if not saved.baselines:
        return UNKNOWN
    try:
        _write(output, encode(saved))
    except OSError as error:
        complain(f"cannot write {output}: {error.strerror}")
        return UNUSABLE
    ranks = len({one.rank for one in saved.baselines})
    print_line(f"{output}: {len(saved.baselines)} baselines of {ranks} of {saved.world_size} ranks")
    return 0


def learned_in(directory: Path) -> Drifts:
    """What a sidecar over the directory, or the one that the job's folder lies in, has learned; empty without one."""
    from torchmem_exporter.drift.judge import learned
    from torchmem_exporter.reading.state import StateFile, state_path

    return learned(StateFile(state_path(directory)))


def collect(name: str, records: list[Record], learned: Drifts) -> tuple[Baselines, list[str]]:
    """The baselines of one job, and a line for each that is not known yet.

    Args:
        name: what to call them.
        records: of one job, at least one.
        learned: what a sidecar has learned; brought up to date with the records.
    """
    from torchmem.wire.ranks import printable
    from torchmem_exporter.drift.baseline import Baseline, Baselines
    from torchmem_exporter.drift.judge import learn
    from torchmem_exporter.labels import clean_label

    baselines, unknown = [], []
    for record in records:
        identity = record.identity
        drifts = learned.get(clean_label(identity.train_job), {}).get(str(identity.rank), {})
        held = {device for device, drift in drifts.items() if drift.is_held}
        for device, drift in learn(record, drifts, held=()).items():
            if drift.level is None:
                reason = _why_unknown(drift, was_held=device in held)
                unknown.append(f"rank {identity.rank} {printable(device)} is left out: {reason}")
                continue
            baselines.append(
                Baseline(
                    rank=identity.rank, device=device, level=drift.level, usual=drift.usual, mesh=dict(identity.mesh)
                )
            )
    first = records[0].identity
    return Baselines(
        name=name,
        train_job=first.train_job,
        world_size=first.world_size,
        saved_at=time.time(),
        torch_version=first.torch_version,
        torchmem_version=first.torchmem_version,
        baselines=baselines,
    ), unknown


def _why_unknown(drift: Drift, *, was_held: bool) -> str:
    num_steps = drift.learning.num_steps if drift.learning else 0
    reason = f"after {num_steps} ordinary steps its baseline is not known yet"
    if was_held:
        reason += " (no more are in its record, and the sidecar has learned none: it holds the job against --baseline)"
    return reason


def _write(path: Path, data: bytes) -> None:
    """Replaces the file whole, so that a full disk leaves the former one."""
    fd, temporary = tempfile.mkstemp(dir=path.absolute().parent, prefix=f".{path.name}.")
    try:
        with open(fd, "wb") as file:  # noqa: PTH123  # a descriptor
            file.write(data)
        umask = os.umask(0)
        os.umask(umask)
        Path(temporary).chmod(0o666 & ~umask)
        Path(temporary).replace(path)
    except BaseException:
        with contextlib.suppress(OSError):
            Path(temporary).unlink()
        raise


def _draw(console: Console, found: Baselines) -> None:
    from rich.padding import Padding
    from rich.text import Text

    from torchmem import show
    from torchmem.postmortem_show import moment
    from torchmem.wire.ranks import printable

    job = f"{printable(found.name)}: job {printable(found.train_job)}, world size {found.world_size}"
    versions = f"torch {printable(found.torch_version)}, torchmem {printable(found.torchmem_version)}"
    console.print(Text(f"{job}, saved {moment(found.saved_at)}, {versions}", "bold"))
    for one in found.baselines:
        level = one.level
        usual, spread, highest = (
            show.binary(round(size)) for size in (level.num_bytes, level.spread_bytes, level.highest_bytes)
        )
        wandering = ", wandering" if level.is_wandering else ""
        name = f"rank {one.rank} {printable(one.device)}"
        steps = f"steps {level.first_step} to {level.last_step}{wandering}"
        console.print(Text(f"  {name}: usual peak {usual} (spread {spread}), highest {highest}, {steps}"))
        if one.usual is not None:
            console.print(
                Padding.indent(show.table(_holders(one.usual), show.By.BOTH, console.encoding, console.width), 2)
            )


def _holders(usual: Composition) -> Holders:
    from torchmem.show import Holder, Holders

    parts = usual.parts
    rest = sum(part.num_bytes for part in parts[NUM_PARTS:]) + usual.other_bytes
    return Holders(
        shown=[Holder(part.module, part.reftype, part.num_bytes) for part in parts[:NUM_PARTS]],
        num_others=None if usual.other_bytes else len(parts[NUM_PARTS:]),
        others_bytes=rest,
        total_bytes=usual.total_bytes,
    )
