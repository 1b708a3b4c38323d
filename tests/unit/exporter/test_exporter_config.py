"""Settings of the sidecar: what is taken, what is refused, and in which words."""

from __future__ import annotations

import itertools
import math
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


BAD_TIMES = [("--stale-after", "0"), *itertools.product(["--stale-after", "--keep-days"], ["-1", "nan", "inf", "soon"])]


@pytest.mark.parametrize(("option", "time"), BAD_TIMES)
def test_bad_times_are_refused_in_one_line(option, time, capsys):
    """Every rank would count as stale, or none ever; what ended would go at once, or nobody know when."""
    try:
        status = main([f"{option}={time}"])
    except SystemExit as end:
        status = end.code
    (line,) = capsys.readouterr().err.splitlines()
    assert (status, option in line) == (2, True)


def test_zero_days_keep_everything():
    """Whoever wants to keep all records would lose them all."""
    assert parse(["--keep-days", "0"]).keep_seconds == math.inf
    assert parse([]).keep_seconds == 14 * 86400


def test_relative_directories_cannot_be_represented():
    """What is served would depend on where the sidecar happens to run."""
    with pytest.raises(ConfigError, match="absolute"):
        ValidatedConfig(directory=Path("here"), host="127.0.0.1", port=1)


@pytest.mark.parametrize("has_token", [False, True])
def test_open_addresses_say_what_is_missing(has_token, tmp_path, capsys):
    """Whoever has protected half would not learn which half is missing."""
    (tmp_path / "token").write_text("a-token\n")
    flags = ["--bearer-token-file", str(tmp_path / "token")] if has_token else []
    assert main(["--listen", "10.0.0.1:80", *flags]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert ("has no TLS" if has_token else "has neither TLS nor authentication") in line


def test_half_protected_files_say_what_is_missing(tmp_path, capsys):
    """A web-config file would be taken for protection whatever it says."""
    (tmp_path / "web.yml").write_text("http_server_config: {}\n")
    assert main(["--listen", "10.0.0.1:80", "--web-config", str(tmp_path / "web.yml")]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "has neither TLS nor authentication" in line


@pytest.mark.parametrize("flag", ["--web-config", "--bearer-token-file"])
def test_missing_files_are_one_line(flag, tmp_path, capsys):
    """The sidecar would start without the protection that was asked for, or end in a traceback."""
    assert main([flag, str(tmp_path / "nowhere")]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert flag in line
    assert "No such file" in line


@pytest.mark.parametrize("flags", [["--log-level", "loud"], ["--log-format", "xml"], ["--unknown"], ["--listen"]])
def test_bad_flags_are_refused_in_one_line(flags, capsys):
    """A mistyped flag would be answered with a page of usage."""
    with pytest.raises(SystemExit) as end:
        main(flags)
    (line,) = capsys.readouterr().err.splitlines()
    assert (end.value.code, flags[0] in line) == (2, True)


@pytest.mark.parametrize("setting", [{"log_format": "xml"}, {"log_level": "loud"}, {"host": "0.0.0.0"}, {"port": -1}])
def test_bad_settings_cannot_be_represented(setting):
    """Code that makes a config of its own could run what the command line refuses."""
    with pytest.raises(ConfigError):
        ValidatedConfig(**{"directory": Path("/records"), "host": "127.0.0.1", "port": 1, **setting})


@pytest.mark.parametrize("flag", ["--help", "--version"])
def test_help_and_version(flag, capsys):
    """Whoever asks how to use it would get an error."""
    with pytest.raises(SystemExit) as end:
        parse([flag])
    assert end.value.code == 0
    assert "torchmem-exporter" in capsys.readouterr().out
