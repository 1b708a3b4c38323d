# ruff: noqa: INP001, T201 (a program, no package; it talks to its user)
"""Makes and keeps the checkout's own virtual environment: ``python3 scripts/environment.py runtime|dev``.

``runtime`` is what the demo needs (torch and torchmem with its exporter), ``dev`` adds what the tests need. A stamp in
the environment holds a digest of what went into it, so a finished environment costs one look and a changed
pyproject.toml or constraints.txt is installed once more.

Invariants: standard library only, and no newer syntax than a too old Python can parse far enough to be told so; an
environment whose making was interrupted is never used (a marker inside it says so) and is made anew; two makes at once
wait for each other; pip's own configuration of the machine stays in force.

Known limits: packages installed into the environment by hand are not noticed, nor is their removal.
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
OLDEST = (3, 10)
REQUIREMENTS = {
    "runtime": ["torch", "--editable", ".[exporter,watch]"],
    "dev": ["torch", "--editable", ".[exporter,watch]", "--group", "dev"],
}
INCLUDES = {"runtime": ("runtime", "dev"), "dev": ("dev",)}
"""For each kind of environment, the stamps that vouch for it."""


class EnvironmentMakingError(Exception):
    """The environment cannot be made; the message is one line and names the fix."""


class VirtualEnvironment:
    """The environment of one checkout.

    Attributes:
        folder: where it is, ``.venv`` of the checkout.
        python: its interpreter.
        incomplete: marker that exists from before the first change until after the last.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self.folder = root / ".venv"
        self.python = self.folder / "bin" / "python"
        self.incomplete = self.folder / "torchmem-incomplete"

    def digest(self) -> str:
        """What the environment is made from; its own place too, because environments cannot be moved."""
        sources = [(self.root / name).read_bytes() for name in ("pyproject.toml", "constraints.txt")]
        sources += [str(self.folder).encode(), repr(REQUIREMENTS).encode()]
        return hashlib.sha256(b"\0".join(sources)).hexdigest()

    def is_ready(self, kind: str) -> bool:
        """Whether everything that ``kind`` needs is installed."""
        if self.incomplete.exists() or not self.python.exists():
            return False
        digest = self.digest()
        stamps = [self.stamp(name) for name in INCLUDES[kind]]
        return any(stamp.is_file() and stamp.read_text() == digest for stamp in stamps)

    def stamp(self, kind: str) -> Path:
        """The file that vouches for a finished installation."""
        return self.folder / ("torchmem-" + kind)

    def make(self, kind: str) -> None:
        """Creates the environment where needed and installs into it.

        Raises:
            EnvironmentMakingError: this Python cannot make environments, or pip failed.
        """
        usable = self.python.exists() and not self.incomplete.exists()
        if not usable:
            self._create()
        self.incomplete.touch()
        self._pip("--upgrade", "pip>=25.1")  # dependency groups
        self._pip("--constraint", "constraints.txt", *REQUIREMENTS[kind])
        self.stamp(kind).write_text(self.digest())
        self.incomplete.unlink()

    def _create(self) -> None:
        if importlib.util.find_spec("ensurepip") is None or importlib.util.find_spec("venv") is None:
            raise EnvironmentMakingError(
                f"{sys.executable} cannot make virtual environments: apt-get install python3-venv (Debian, Ubuntu), "
                "or name another Python: make PYTHON=/path/to/python3"
            )
        if self.folder.exists():
            say("replacing a .venv that is unusable or was left half made")
        self.folder.mkdir(exist_ok=True)
        self.incomplete.touch()
        for entry in self.folder.iterdir():
            if entry != self.incomplete:
                shutil.rmtree(entry) if entry.is_dir() and not entry.is_symlink() else entry.unlink()
        run([sys.executable, "-m", "venv", str(self.folder)], self.root, "python -m venv failed, see above")

    def _pip(self, *arguments: str) -> None:
        quiet = [] if sys.stdout.isatty() else ["--quiet"]
        command = [str(self.python), "-m", "pip", "install", *quiet, *arguments]
        run(command, self.root, "pip failed, see above; the next `make` starts over")


def run(command: list[str], folder: Path, failure: str) -> None:
    """Runs a program to its end.

    Raises:
        EnvironmentMakingError: with the message ``failure`` when it fails.
    """
    environment = {**os.environ, "PYTHONWARNINGS": "ignore"}  # build tools' advice to packagers
    result = subprocess.run(command, cwd=folder, env=environment, check=False)  # noqa: S603 (our own commands)
    if result.returncode != 0:
        raise EnvironmentMakingError(failure)


def say(message: str) -> None:
    """Tells the user, at once."""
    print("environment: " + message, flush=True)


def ensure(root: Path, kind: str) -> None:
    """Makes the environment unless it is ready; one process at a time.

    Raises:
        EnvironmentMakingError: it cannot be made.
    """
    environment = VirtualEnvironment(root)
    if environment.is_ready(kind):
        return
    with (root / "constraints.txt").open("r+b") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not environment.is_ready(kind):
            say(f"making .venv ({kind}): torch and a few small packages; a minute or two, once")
            environment.make(kind)


def main() -> int:
    """The command line; the exit status."""
    if sys.version_info < OLDEST:
        print("environment: Python >= 3.10 is needed: make PYTHON=/path/to/python3", file=sys.stderr)
        return 1
    try:
        ensure(ROOT, sys.argv[1])
    except EnvironmentMakingError as error:
        print(f"environment: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("environment: interrupted; `make` again starts over", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
