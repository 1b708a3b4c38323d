"""Settings of the sidecar: what is taken, what is refused, and in which words."""

from __future__ import annotations

from pathlib import Path

import pytest

from torchmem.errors import ConfigError
from torchmem.wire.store import default_dir
from torchmem_exporter.cli import main, parse
from torchmem_exporter.config import ValidatedConfig


@pytest.fixture(autouse=True)
def _no_environment(monkeypatch):
    monkeypatch.delenv("TORCHMEM_DIR", raising=False)


def test_defaults():
    """The sidecar would look elsewhere than where the library writes, or listen where no one looks for it."""
    assert parse([]) == ValidatedConfig(directory=default_dir(), host="127.0.0.1", port=20471, stale_after=60.0)


def test_directory_of_the_flag_then_of_the_environment(tmp_path, monkeypatch):
    """A flag would lose against the environment, or the environment would be ignored."""
    monkeypatch.setenv("TORCHMEM_DIR", str(tmp_path / "environment"))
    monkeypatch.chdir(tmp_path)
    assert parse([]).directory == tmp_path / "environment"
    assert parse(["--dir", "flag"]).directory == tmp_path / "flag"


@pytest.mark.parametrize(
    ("listen", "address"),
    [
        ("127.0.0.1:0", ("127.0.0.1", 0)),
        ("127.3.2.1:80", ("127.3.2.1", 80)),
        ("localhost:9", ("127.0.0.1", 9)),
        ("[::1]:65535", ("::1", 65535)),
    ],
)
def test_loopback_addresses_are_taken(listen, address):
    """An address that only this machine reaches would be refused."""
    config = parse(["--listen", listen])
    assert (config.host, config.port) == address


@pytest.mark.parametrize("listen", ["0.0.0.0:80", "[::]:80", "10.0.0.1:80"])
def test_open_addresses_need_a_plain_word(listen, capsys):
    """Memory figures would be offered to a whole network without anybody having asked for that."""
    assert main(["--listen", listen]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert listen.rpartition(":")[0].strip("[]") in line
    assert "--allow-open-bind" in line
    assert parse(["--listen", listen, "--allow-open-bind"]).port == 80


@pytest.mark.parametrize(
    "listen",
    ["", "127.0.0.1", "127.0.0.1:", "127.0.0.1:x", "127.0.0.1:65536", "::1:80", "a:80", ":80", "[::1:80", "1:²"],
)
def test_bad_addresses_are_refused_in_one_line(listen, capsys):
    """A mistyped address would end in a traceback, or be taken for another."""
    assert main(["--listen", listen, "--allow-open-bind"]) == 2
    assert len(capsys.readouterr().err.splitlines()) == 1


@pytest.mark.parametrize("seconds", ["0", "-1", "nan", "inf", "soon"])
def test_bad_ages_are_refused_in_one_line(seconds, capsys):
    """Every rank would count as stale, or none ever."""
    try:
        status = main([f"--stale-after={seconds}"])
    except SystemExit as end:
        status = end.code
    (line,) = capsys.readouterr().err.splitlines()
    assert (status, "--stale-after" in line) == (2, True)


def test_relative_directories_cannot_be_represented():
    """What is served would depend on where the sidecar happens to run."""
    with pytest.raises(ConfigError, match="absolute"):
        ValidatedConfig(directory=Path("here"), host="127.0.0.1", port=1)


@pytest.mark.parametrize("flag", ["--help", "--version"])
def test_help_and_version(flag, capsys):
    """Whoever asks how to use it would get an error."""
    with pytest.raises(SystemExit) as end:
        parse([flag])
    assert end.value.code == 0
    assert "torchmem-exporter" in capsys.readouterr().out
