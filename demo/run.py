"""The demo: a two-rank FSDP2 training, the sidecar beside it, and Prometheus where it is found.

Run by ``make demo``. Ends by itself after a bounded number of steps, and cleanly on Ctrl-C, SIGTERM or a closed
terminal at any moment. Exit status: 0 all well, 1 something died (its last lines are printed), 128 + N on signal N.

Known limits: everything of a run lives in ``.demo/run-*`` and goes with it, unless something died.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import tempfile
from pathlib import Path

from processes import DemoError, InterruptedDemoError, Supervisor

FOLDER = Path(__file__).resolve().parent.parent / ".demo"


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=positive, default=200, help="number of steps (default: %(default)s)")
    parser.add_argument("--ranks", type=positive, default=2, help="number of ranks (default: %(default)s)")
    return parser.parse_args()


def positive(text: str) -> int:
    """An integer of at least 1.

    Raises:
        ValueError: it is none; argparse tells the user.
    """
    value = int(text)
    if value < 1:
        raise ValueError(text)
    return value


def attempt(supervisor: Supervisor, folder: Path, num_steps: int, num_ranks: int) -> Exception | None:
    """Runs the demo and ends all its processes; what ended it early, if anything did."""
    try:
        from job import Demo  # only now that signals are minded: this takes a while

        Demo(supervisor, folder, num_steps, num_ranks).run()
    except (DemoError, InterruptedDemoError, BrokenPipeError) as error:
        return error
    finally:
        supervisor.stop()
    return None


def conclude(folder: Path, error: Exception | None) -> int:
    """Tells how it ended, once nothing runs any more, and clears up; the exit status."""
    if isinstance(error, DemoError):
        print(f"\n{error}\nThe logs are in {folder}", file=sys.stderr)
        return 1
    shutil.rmtree(folder)
    if isinstance(error, InterruptedDemoError):
        print(f"\nstopped by {error}; nothing is left running", flush=True)
        return 128 + error.signum
    if isinstance(error, BrokenPipeError):
        # Nobody reads on: keep the interpreter's last flush from failing too.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    print("\ndone; nothing is left running")
    return 0


def main() -> int:
    """The command line; the exit status."""
    wanted = arguments()
    supervisor = Supervisor()
    FOLDER.mkdir(exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix="run-", dir=FOLDER))
    return conclude(folder, attempt(supervisor, folder, wanted.steps, wanted.ranks))


if __name__ == "__main__":
    sys.exit(main())
