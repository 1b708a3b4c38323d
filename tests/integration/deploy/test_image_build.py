"""``deploy/image`` built by a real buildah, and what is in it run as a container would."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest

import deploys
import images
from backends import find_tool, free_address, get, running, wait_until
from records import living, make_record
from sidecars import states

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

CONTAINERFILE = deploys.DEPLOY / "image" / "Containerfile"
NAME = "localhost/torchmem-exporter:0.1.0"
MAX_EXTRA_BYTES = 90 << 20
"""What the sidecar and its libraries may add to the base; torch would be hundreds of megabytes."""


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    """An empty store of images, which is gone afterwards: it takes a gigabyte."""
    if os.geteuid() != 0:
        pytest.skip("debootstrap and a chroot need root, which CI has")
    for name in ("buildah", "debootstrap"):
        find_tool(name)
    folder = tmp_path_factory.mktemp("image")
    yield images.Store(folder)
    shutil.rmtree(folder)


@pytest.fixture(scope="module")
def image(store):
    """The image, built from this checkout."""
    base = images.make_base()
    scratch = store.buildah("from", "scratch")
    store.buildah("copy", "--quiet", scratch, base, "/", seconds=300)
    store.buildah("commit", "--quiet", "--rm", scratch, "localhost/base", seconds=300)
    settings = [f"--ignorefile={CONTAINERFILE}.containerignore", "--build-arg=BASE=localhost/base", "--pull=never"]
    settings += ["--format=docker", "--layers=false", f"--tag={NAME}", f"--file={CONTAINERFILE}"]
    settings += images.pip_settings(store.folder)
    store.buildah("bud", *settings, deploys.ROOT, seconds=images.BUILD_SECONDS)
    with images.opened(store, NAME) as found:
        yield found


def run(line):
    """A command to its end."""
    return subprocess.run(line, capture_output=True, text=True, timeout=60, check=False)


def test_serves_records_as_an_ordinary_user_on_a_read_only_root(image, tmp_path):
    """The image would not start under the security settings that clusters demand, or serve nothing."""
    user = int(image.config["User"].partition(":")[0])
    assert user > 0
    folder, address = tmp_path / "records", free_address()
    with living(folder, make_record(train_job="a", written_at=time.time())):
        for path in (folder, *folder.rglob("*")):
            os.chown(path, user, user)
        line = image.command("--dir", "/home", "--listen", address, records=folder)
        with running(line, tmp_path / "log"):
            wait_until(lambda: answers(f"http://{address}/readyz"), "the sidecar")
            assert states(get(f"http://{address}/metrics").decode()) == {"0": "running"}
            status = (process_of(image, user) / "status").read_text()
    assert re.search(r"^Uid:\t(\d+)\t\1\t\1\t\1$", status, re.MULTILINE)[1] == str(user)
    assert re.search(r"^CapEff:\t0+$", status, re.MULTILINE)
    deploys.passed("buildah", *deploys.files("buildah"))


def answers(url):
    try:
        return get(url)
    except OSError:
        return None


def process_of(image, user):
    """Where /proc tells of the container's process."""
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # of others, which end meanwhile
            if folder.stat().st_uid == user and "torchmem-exporter" in (folder / "cmdline").read_text():
                return folder
    raise AssertionError("no such process")


def test_says_its_version_and_has_no_torch(image):
    """The image would be gigabytes, or of another version than its label says."""
    done = run(image.command("--version"))
    assert done.stdout == f"torchmem-exporter {image.config['Labels']['org.opencontainers.image.version']}\n", (
        done.stderr
    )
    done = run(image.command("-c", "import torchmem; import torch", entrypoint=["python"]))
    assert "No module named 'torch'" in done.stderr


def test_nothing_in_it_can_be_written_or_runs_as_its_owner(image):
    """Who gets into the sidecar would find a way to stay, or to become root."""
    done = run(image.command("/opt/torchmem/x", entrypoint=["touch"]))
    assert "Read-only file system" in done.stderr
    modes = {path: path.lstat().st_mode for path in image.root.rglob("*") if not path.is_symlink()}
    assert [path for path, mode in modes.items() if stat.S_ISREG(mode) and mode & (stat.S_ISUID | stat.S_ISGID)] == []
    own = {path for path in modes if path.is_relative_to(image.root / "opt")}
    assert own
    assert [path for path in own if modes[path] & stat.S_IWOTH or path.lstat().st_uid != 0] == []


def test_health_is_what_the_sidecar_says(image, tmp_path):
    """An engine would restart a healthy sidecar, or keep one that hangs."""
    check = image.config["Healthcheck"]["Test"]
    assert check[0] == "CMD"
    assert run(image.command(entrypoint=check[1:])).returncode != 0
    with running(image.command("--dir", "/home", records=tmp_path), tmp_path / "log"):
        wait_until(lambda: run(image.command(entrypoint=check[1:])).returncode == 0, "a healthy sidecar")


def test_size(image, capsys):
    """Each node of a cluster would fetch what nobody needs."""
    base = images.Image(images.make_base(), {}).size_bytes
    with capsys.disabled():
        sys.stdout.write(f"\nimage: {image.size_bytes / 1e6:.0f} MB, of which its base {base / 1e6:.0f} MB\n")
    assert image.size_bytes - base < MAX_EXTRA_BYTES


def test_hadolint_finds_nothing():
    """The file would have a mistake that a tool knows."""
    done = run([Path(sys.executable).with_name("hadolint"), CONTAINERFILE])
    assert done.returncode == 0, done.stdout
    deploys.passed("hadolint", "image/Containerfile")
