"""Building the engine where that is hard: no compiler, a broken one, an interruption, many ranks, a foreign cache."""

from __future__ import annotations

import os
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest

from torchmem.engine import native
from torchmem.errors import BuildError

FAKE_COMPILER = """#!{python}
import os, sys, time
with open({log!r}, "a") as log:
    log.write("x")
time.sleep({seconds})
output = sys.argv[sys.argv.index("-o") + 1]
open(output, "w").write("made")
"""


@pytest.fixture
def cache(tmp_path, monkeypatch):
    folder = tmp_path / "cache"
    monkeypatch.setenv("TORCHMEM_CACHE_DIR", str(folder))
    return folder


def fake_compiler(folder: Path, seconds: float = 0.0) -> tuple[Path, Path]:
    """A compiler that takes its time and counts its calls."""
    path, log = folder / "fake-c++", folder / "calls"
    path.write_text(FAKE_COMPILER.format(python=sys.executable, log=str(log), seconds=seconds))
    path.chmod(0o755)
    return path, log


def leftovers(cache: Path) -> list[str]:
    return sorted(path.name for path in cache.iterdir() if path.name != "build.lock")


def test_no_compiler(cache, monkeypatch):
    """The user would not learn that a compiler is missing, or what to do."""
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(BuildError, match="no C\\+\\+ compiler found: install g\\+\\+"):
        native.build()
    assert leftovers(cache) == []


def test_the_job_goes_on_without_an_engine(tmp_path):
    """A host without a compiler would stop the training job, or say nothing."""
    program = """
import torch, torchmem, warnings
model = torch.nn.Linear(4, 4)
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    monitor = torchmem.install(model)
    model(torch.ones(1, 4)).sum().backward()
    monitor.step()
ours = [str(w.message) for w in caught if "torchmem" in str(w.message)]
record = monitor.snapshot()
monitor.close()
engine = record.labelers[0]
print(len(ours), ours[0])
print(record.identity.engine, record.clock.step, record.devices, engine.up)
"""
    environment = {
        **os.environ,
        "PATH": "/nowhere",
        "CXX": "",
        "TORCHMEM_CACHE_DIR": str(tmp_path / "cache"),
        "TORCHMEM_DIR": str(tmp_path / "records"),
    }
    done = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, timeout=60, check=True
    )
    first, second = done.stdout.splitlines()
    assert first.startswith("1 torchmem counts only one step in 200: no C++ compiler found: install g++")
    assert second == "dispatch 1 [] False"


def test_a_failing_compiler_names_its_reason(cache, tmp_path, monkeypatch):
    """The compiler's own message would be lost, or half a binary stay behind."""
    script = tmp_path / "c++"
    script.write_text(
        "#!/bin/sh\necho 'In file included from x' >&2\necho 'x.h:1: fatal error: no such luck' >&2\nexit 1\n"
    )
    script.chmod(0o755)
    monkeypatch.setenv("CXX", str(script))
    with pytest.raises(BuildError, match="fatal error: no such luck"):
        native.build()
    assert leftovers(cache) == []


def test_a_binary_that_cannot_be_loaded(cache, tmp_path, monkeypatch):
    """A damaged binary in the cache would raise something else than an error that names the fix."""
    monkeypatch.setenv("CXX", str(fake_compiler(tmp_path)[0]))
    with pytest.raises(BuildError, match="cannot be loaded .* delete it and try again"):
        native._load(native.build())
    assert cache.exists()


def test_ranks_of_a_host_build_once(cache, tmp_path):
    """Eight ranks would compile eight times, or load a file that another is still writing."""
    compiler, log = fake_compiler(tmp_path, seconds=0.3)
    program = "from torchmem.engine import native; print(native.build())"
    environment = {**os.environ, "CXX": str(compiler)}
    ranks = [
        subprocess.Popen([sys.executable, "-W", "ignore", "-c", program], env=environment, stdout=subprocess.PIPE)
        for _ in range(3)
    ]
    paths = {rank.communicate(timeout=90)[0] for rank in ranks}
    assert len(paths) == 1
    assert log.read_text() == "x" * (len(native.UNITS) + 1)
    assert len(leftovers(cache)) == 1


def test_an_interrupted_build_leaves_nothing_half_made(cache, tmp_path):
    """A build that was killed would leave a lock or a broken binary in everybody's way."""
    slow, log = fake_compiler(tmp_path, seconds=60)
    program = "from torchmem.engine import native; print(native.build())"
    builder = subprocess.Popen(
        [sys.executable, "-W", "ignore", "-c", program], env={**os.environ, "CXX": str(slow)}, start_new_session=True
    )
    deadline = time.monotonic() + 60
    while not log.exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    os.killpg(builder.pid, signal.SIGKILL)
    builder.wait()
    quick = tmp_path / "quick"
    quick.mkdir()
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", program],
        env={**os.environ, "CXX": str(fake_compiler(quick)[0])},
        capture_output=True,
        timeout=60,
        check=True,
    )
    assert leftovers(cache) == [Path(done.stdout.decode().strip()).name]


def test_a_folder_of_others_is_refused(cache):
    """Another user could place a binary that the training job would load."""
    cache.mkdir()
    cache.chmod(0o777 | stat.S_ISVTX)
    with pytest.raises(BuildError, match="can be written by others"):
        native.build()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can make a folder of root's")
def test_a_folder_of_root_serves_everybody(cache, tmp_path, monkeypatch):
    """An engine that was compiled into an image would be refused by the user that trains in it."""
    monkeypatch.setenv("CXX", str(fake_compiler(tmp_path)[0]))
    built = native.build()
    monkeypatch.setattr(os, "geteuid", lambda: 65534)
    assert native.build() == built


def test_a_folder_without_this_engine_that_cannot_be_written(cache, tmp_path, monkeypatch):
    """In an image that has another torch by now nobody would learn what to do."""
    monkeypatch.setenv("CXX", str(fake_compiler(tmp_path)[0]))
    built = native.build()
    built.unlink()
    monkeypatch.setattr(os, "access", lambda *_, **__: False)
    with pytest.raises(BuildError, match=f"lacks {built.name} and cannot be written: run `torchmem build`"):
        native.build()


def test_an_unwritable_cache(tmp_path, monkeypatch):
    """A read-only home would stop the job instead of naming the setting."""
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("TORCHMEM_CACHE_DIR", str(tmp_path / "file" / "below"))
    with pytest.raises(BuildError, match="set TORCHMEM_CACHE_DIR"):
        native.build()


def test_another_torch_is_refused(monkeypatch):
    """A binary for another minor version would be loaded and misbehave."""
    import torch

    path = native.build()
    monkeypatch.setattr(torch, "__version__", "2.99.0")
    with pytest.raises(BuildError, match="was built for torch"):
        native._load(path)
    monkeypatch.setattr(torch, "__version__", "2.6.0")
    with pytest.raises(BuildError, match="older than 2.11"):
        native.build()
