"""The checkout's own environment, made with pip and venv replaced by a record of what they were asked."""

from __future__ import annotations

import importlib.util
import shutil
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent


@pytest.fixture
def environment():
    """The module under test; scripts are programs, not packages."""
    spec = importlib.util.spec_from_file_location("environment", ROOT / "scripts" / "environment.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def checkout(tmp_path):
    """A folder with what the environment is made from."""
    root = tmp_path / "checkout"
    root.mkdir()
    (root / "pyproject.toml").write_text("[project]\n")
    (root / "constraints.txt").write_text("torch==2.13.0\n")
    return root


@pytest.fixture
def commands(environment, monkeypatch):
    """The programs that were run; making an environment makes its interpreter."""
    commands = []

    def run(command, folder, failure):
        commands.append(command)
        if "venv" in command:
            (folder / ".venv" / "bin").mkdir()
            (folder / ".venv" / "bin" / "python").touch()

    monkeypatch.setattr(environment, "run", run)
    return commands


def num_made(commands):
    """How often an environment was made from nothing."""
    return sum("venv" in command for command in commands)


def test_a_finished_environment_is_not_made_again(environment, checkout, commands):
    """Each ``make`` would wait for pip."""
    environment.ensure(checkout, "dev")
    num_commands = len(commands)
    environment.ensure(checkout, "dev")
    environment.ensure(checkout, "runtime")
    assert num_commands == 3
    assert len(commands) == num_commands


def test_runtime_does_not_vouch_for_dev(environment, checkout, commands):
    """``make test`` after ``make demo`` would find no pytest."""
    environment.ensure(checkout, "runtime")
    environment.ensure(checkout, "dev")
    assert "dev" in commands[-1]
    assert num_made(commands) == 1


@pytest.mark.parametrize("name", ["pyproject.toml", "constraints.txt"])
def test_a_changed_source_is_installed_once_more(environment, checkout, commands, name):
    """A new dependency or pin would be missing until somebody removed ``.venv``."""
    environment.ensure(checkout, "dev")
    num_commands = len(commands)
    (checkout / name).write_text("changed")
    environment.ensure(checkout, "dev")
    environment.ensure(checkout, "dev")
    assert len(commands) == num_commands + 2
    assert num_made(commands) == 1


def test_an_interrupted_making_starts_over(environment, checkout, commands, monkeypatch):
    """A half-installed torch would be taken for a whole one, and every later ``make`` would fail."""
    whole = environment.run

    def interrupted(command, folder, failure):
        whole(command, folder, failure)
        if "torch" in command:
            raise KeyboardInterrupt

    monkeypatch.setattr(environment, "run", interrupted)
    with pytest.raises(KeyboardInterrupt):
        environment.ensure(checkout, "runtime")
    leftover = checkout / ".venv" / "half-made"
    leftover.touch()
    monkeypatch.setattr(environment, "run", whole)
    environment.ensure(checkout, "runtime")
    assert num_made(commands) == 2
    assert not leftover.exists()


def test_a_moved_checkout_gets_its_own_environment(environment, checkout, commands):
    """A copied checkout would run the sources of the one that it was copied from."""
    environment.ensure(checkout, "runtime")
    copy = checkout.with_name("copy")
    shutil.copytree(checkout, copy)
    assert not environment.VirtualEnvironment(copy).is_ready("runtime")


def test_an_environment_of_the_users_own_is_kept(environment, checkout, commands):
    """A ``.venv`` that the user had made would be deleted."""
    (checkout / ".venv" / "bin").mkdir(parents=True)
    (checkout / ".venv" / "bin" / "python").touch()
    (checkout / ".venv" / "mine").touch()
    environment.ensure(checkout, "runtime")
    assert num_made(commands) == 0
    assert (checkout / ".venv" / "mine").exists()


def test_a_vanished_interpreter_is_replaced(environment, checkout, commands):
    """An upgrade of the system's Python would leave the checkout with a dangling interpreter."""
    environment.ensure(checkout, "runtime")
    (checkout / ".venv" / "bin" / "python").unlink()
    environment.ensure(checkout, "runtime")
    assert num_made(commands) == 2


def test_a_python_that_cannot_make_environments_says_what_to_install(environment, checkout, commands, monkeypatch):
    """Debian without python3-venv would end in a traceback."""
    monkeypatch.setattr(environment.importlib.util, "find_spec", lambda _name: None)
    with pytest.raises(environment.EnvironmentMakingError, match=r"apt-get install python3-venv"):
        environment.ensure(checkout, "runtime")
    assert commands == []
    assert not (checkout / ".venv").exists()
