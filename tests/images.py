"""A real container image, built where there is no registry and no container engine, and run as one would run it.

The base is what debootstrap's first stage unpacks, with Python unpacked beside it: nothing in it is configured, which
takes most of debootstrap's time and which Python does not need. Kept in ``.tools``.

Known limits: needs root, Debian and its package sources; the image's processes share this machine's network.
"""

from __future__ import annotations

import configparser
import contextlib
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from backends import TOOLS, find_program

CACHE = TOOLS.parent.parent
BASE_PACKAGES = "python3,python3-venv"
UNNEEDED = ("debootstrap", "var/cache/apt/archives", "var/lib/apt/lists", "usr/share/doc", "usr/share/locale")
BUILD_SECONDS = 600


@dataclass
class Store:
    """Where buildah keeps images and what it makes them from.

    Attributes:
        folder: a folder of the test's own.
    """

    folder: Path

    def buildah(self, *arguments, seconds=60):
        """What buildah prints.

        Raises:
            RuntimeError: it failed; with the end of what it said.
        """
        policy = self.folder / "policy.json"
        policy.write_text('{"default": [{"type": "insecureAcceptAnything"}]}')
        registries = self.folder / "registries.conf"
        registries.write_text("")
        environment = {
            **{name: value for name, value in os.environ.items() if not name.startswith("PIP_")},
            "BUILDAH_ISOLATION": "chroot",
            "CONTAINERS_REGISTRIES_CONF": str(registries),
        }
        options = ["--root", self.folder / "storage", "--runroot", self.folder / "run", "--storage-driver", "vfs"]
        if arguments[0] in {"bud", "commit", "from"}:
            options += ["--signature-policy", policy]
        line = [*self._with_libraries(), find_program("buildah"), arguments[0], *options, *arguments[1:]]
        done = subprocess.run(
            list(map(str, line)), env=environment, capture_output=True, text=True, timeout=seconds, check=False
        )
        if done.returncode:
            raise RuntimeError("\n".join((done.stdout + done.stderr).splitlines()[-15:]))
        return done.stdout.strip()

    def _with_libraries(self):
        """What comes before buildah's name, which starts itself anew with no environment but must find its libraries.

        Unpacked rather than installed, these are in no cache of the machine's linker: it gets a private one.
        """
        folders = sorted((CACHE / "packages" / "buildah").glob("**/*-linux-gnu"))
        if Path(find_program("buildah")).parent != TOOLS:
            return []
        cache = self.folder / "ld.so.cache"
        if not cache.exists():
            configuration = self.folder / "ld.so.conf"
            configuration.write_text("".join(f"{folder}\n" for folder in folders) + "include /etc/ld.so.conf\n")
            line = [shutil.which("ldconfig") or "/sbin/ldconfig", "-X", "-C", cache, "-f", configuration]
            subprocess.run(line, check=True, capture_output=True, timeout=60)
        return ["unshare", "--mount", "sh", "-c", 'mount --bind "$0" /etc/ld.so.cache && exec "$@"', cache]


def make_base():
    """The folder of a Debian with Python, made at the first call.

    Raises:
        RuntimeError: debootstrap failed; with the end of what it said.
    """
    release = platform.freedesktop_os_release()["VERSION_CODENAME"]
    finished = CACHE / f"image-base-{release}"
    if finished.is_dir():
        return finished
    mirror = _mirror(release)
    CACHE.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=CACHE, prefix="image-base-partial-") as partial:
        folder = Path(partial) / "base"
        scripts = CACHE / "packages" / "buildah" / "usr" / "share" / "debootstrap"
        environment = {**os.environ, **({"DEBOOTSTRAP_DIR": str(scripts)} if scripts.is_dir() else {})}
        line = [find_program("debootstrap"), "--foreign", "--variant=minbase", f"--include={BASE_PACKAGES}"]
        line += [release, folder, mirror]
        done = subprocess.run(line, env=environment, capture_output=True, text=True, timeout=BUILD_SECONDS, check=False)
        if done.returncode:
            raise RuntimeError("\n".join((done.stdout + done.stderr).splitlines()[-15:]))
        for package in sorted((folder / "var/cache/apt/archives").glob("*.deb")):
            subprocess.run(["dpkg-deb", "--extract", package, folder], check=True, timeout=60)
        for name in UNNEEDED:
            shutil.rmtree(folder / name, ignore_errors=True)
        for name in ("passwd", "group"):  # else made when the package is configured
            shutil.copy(folder / f"usr/share/base-passwd/{name}.master", folder / "etc" / name)
        folder.rename(finished)
    return finished


def _mirror(release):
    """Where this machine's package sources have a release; asks them nothing."""
    line = ["apt-get", "update", "--print-uris"]
    said = subprocess.run(line, capture_output=True, text=True, timeout=60, check=True).stdout
    return re.search(rf"^'(\S+)/dists/{release}/InRelease'", said, re.MULTILINE)[1]


def pip_settings(folder):
    """This machine's configuration of pip for a build.

    Args:
        folder: where to put the file.

    Returns:
        The options that mount it, and the files that it names, in the places where pip looks for them.
    """
    line = [sys.executable, "-m", "pip", "config", "list"]
    listed = subprocess.run(line, capture_output=True, text=True, timeout=60, check=True).stdout
    parser = configparser.RawConfigParser()
    parser.add_section("global")
    places = set()
    for name, _, value in (row.partition("=") for row in listed.splitlines()):
        text = value.strip("'\"").replace("\\n", " ")
        parser.set("global", name.removeprefix(":env:.").rpartition(".")[2], text)
        places |= {Path(word.removeprefix("file://")) for word in text.split() if word.startswith(("/", "file:///"))}
    with (folder / "pip.conf").open("w") as file:
        parser.write(file)
    # An index of files links to what lies beside it.
    places = {place.parent if place.name == "simple" else place for place in places}
    mounts = {Path("/etc/pip.conf"): folder / "pip.conf", **{place: place for place in places if place.exists()}}
    return [f"--volume={source}:{target}:ro" for target, source in mounts.items()]


@dataclass
class Image:
    """A built image.

    Attributes:
        root: its file system.
        config: its configuration, in Docker's words.
        size_bytes: what its files hold.
    """

    root: Path
    config: dict

    @property
    def size_bytes(self):
        files = (path.lstat() for path in self.root.rglob("*"))
        return sum({(status.st_dev, status.st_ino): status.st_size for status in files}.values())

    def command(self, *arguments, entrypoint=None, records=None):
        """The command line of a container: the image's user and environment, nothing writable, no new privileges.

        Args:
            arguments: of the entry point.
            entrypoint: instead of the image's.
            records: a folder to be found at /home.
        """
        user, _, group = self.config["User"].partition(":")
        script = 'mount --bind "$1" "$1" && mount -o remount,bind,ro "$1" && mount --rbind /dev "$1/dev" &&'
        script += ' mount -t proc proc "$1/proc" && { [ -z "$2" ] || mount --bind "$2" "$1/home"; } &&'
        script += ' root=$1 && shift 2 && exec chroot "$root" "$@"'
        drop = [
            "setpriv",
            f"--reuid={user}",
            f"--regid={group}",
            "--clear-groups",
            "--no-new-privs",
            "--bounding-set=-all",
        ]
        run = ["env", "-i", *self.config["Env"], *(entrypoint or self.config["Entrypoint"]), *arguments]
        # setpriv is of the image's base too, and exec() keeps the process the one that was started.
        return ["unshare", "--mount", "sh", "-c", script, "sh", str(self.root), str(records or ""), *drop, *run]


@contextlib.contextmanager
def opened(store, name):
    """An image with its files in reach."""
    container = store.buildah("from", "--pull=never", name)
    try:
        config = json.loads(store.buildah("inspect", "--type=image", name))["Docker"]["config"]
        yield Image(Path(store.buildah("mount", container)), config)
    finally:
        store.buildah("rm", container)
