"""``scripts/npm.sh``: what it leaves behind, with a stand-in for npm that records how often it is asked."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
LOCKS = sorted([*ROOT.glob("tests/*/package-lock.json"), *ROOT.glob("grafana/*/package-lock.json")])


@pytest.fixture
def checkout(tmp_path):
    """A checkout with the script and a folder with a lock file; an npm first on PATH that ends with $STATUS."""
    for folder in ("scripts", "path", "tests/some"):
        (tmp_path / folder).mkdir(parents=True)
    shutil.copy(ROOT / "scripts" / "npm.sh", tmp_path / "scripts")
    for name in ("package.json", "package-lock.json"):
        (tmp_path / "tests" / "some" / name).write_text("{}")
    (tmp_path / "path" / "npm").write_text('#!/bin/sh\necho asked >>"$SEEN"\nexit "$STATUS"\n')
    (tmp_path / "path" / "npm").chmod(0o755)
    return tmp_path


def run(checkout, status=0):
    """Runs the script; returns its exit status and how often npm was asked so far."""
    seen = checkout / "seen"
    path = f"{checkout / 'path'}:{os.environ['PATH']}"
    environment = {**os.environ, "PATH": path, "SEEN": str(seen), "STATUS": str(status)}
    command = ["bash", "scripts/npm.sh", "tests/some"]
    done = subprocess.run(command, cwd=checkout, env=environment, capture_output=True, text=True, check=False)
    return done.returncode, len(seen.read_text().splitlines())


def test_nothing_is_installed_twice_and_a_new_lock_is_followed(checkout):
    """Each `make tools` would fetch everything again, or an updated lock file change nothing."""
    assert run(checkout) == (0, 1)
    assert run(checkout) == (0, 1)
    (checkout / "tests" / "some" / "package-lock.json").write_text('{"new": 1}')
    assert run(checkout) == (0, 2)


def test_a_failed_installation_is_made_again(checkout):
    """Half an installation would be taken for a whole one."""
    assert run(checkout, status=1) == (1, 1)
    assert not (checkout / "tests" / "some" / "node_modules" / ".installed").exists()
    assert run(checkout) == (0, 2)


@pytest.mark.parametrize("lock", LOCKS, ids=lambda lock: lock.parent.name)
def test_lock_files_hold_digests_and_no_addresses(lock):
    """A checkout would install only where its author did, or something else than its author had."""
    packages = {name: entry for name, entry in json.loads(lock.read_text())["packages"].items() if name}
    assert packages
    assert all(entry["integrity"].startswith("sha512-") for entry in packages.values())
    assert not any("resolved" in entry for entry in packages.values())
