"""Settings of the sidecar: what is taken, what is refused, and in which words."""

from __future__ import annotations

import dataclasses

import pytest

from torchmem.errors import ConfigError
from torchmem.wire.store import default_dir
from torchmem_exporter.config import ValidatedConfig, validate


def test_defaults():
    """The sidecar would look elsewhere than where the library writes, or listen where no one looks for it."""
    config = validate(environment={})
    assert dataclasses.asdict(config) == {
        "directory": default_dir(),
        "host": "127.0.0.1",
        "port": 20471,
        "stale_after_seconds": 60.0,
    }


def test_directory_of_the_flag_then_of_the_environment(tmp_path):
    """A flag would lose against the environment, or the environment would be ignored."""
    environment = {"TORCHMEM_DIR": str(tmp_path / "environment")}
    assert validate(environment=environment).directory == tmp_path / "environment"
    assert validate(directory=tmp_path / "flag", environment=environment).directory == tmp_path / "flag"


@pytest.mark.parametrize(
    ("listen", "address"),
    [
        ("127.0.0.1:0", ("127.0.0.1", 0)),
        ("127.3.2.1:80", ("127.3.2.1", 80)),
        ("localhost:9", ("localhost", 9)),
        ("[::1]:65535", ("::1", 65535)),
    ],
)
def test_loopback_addresses_are_taken(listen, address):
    """An address that only this machine reaches would be refused."""
    config = validate(listen=listen)
    assert (config.host, config.port) == address


@pytest.mark.parametrize("listen", ["0.0.0.0:80", ":80", "[::]:80", "10.0.0.1:80", "example.org:80"])
def test_open_addresses_need_a_plain_word(listen):
    """Memory figures would be offered to a whole network without anybody having asked for that."""
    with pytest.raises(ConfigError, match="--allow-open-bind") as caught:
        validate(listen=listen)
    assert "\n" not in str(caught.value)
    assert validate(listen=listen, allow_open_bind=True).port == 80


@pytest.mark.parametrize("listen", ["", "127.0.0.1", "127.0.0.1:", "127.0.0.1:x", "127.0.0.1:65536", "::1:80", "a:²"])
def test_bad_addresses_are_refused_by_name(listen):
    """A mistyped address would end in a traceback, or be taken for another."""
    with pytest.raises(ConfigError, match="--listen"):
        validate(listen=listen, allow_open_bind=True)


@pytest.mark.parametrize("seconds", [0.0, -1.0, float("nan"), float("inf")])
def test_bad_ages_are_refused(seconds):
    """Every rank would count as stale, or none ever."""
    with pytest.raises(ConfigError, match="--stale-after"):
        validate(stale_after=seconds)


def test_directory_must_be_one(tmp_path):
    """A file or a link in the directory's place would look like a host without jobs."""
    (tmp_path / "file").write_text("")
    (tmp_path / "link").symlink_to(tmp_path)
    for name in ("file", "link"):
        with pytest.raises(ConfigError, match="--dir"):
            validate(directory=tmp_path / name)


def test_no_config_without_validation(tmp_path):
    """Settings that nobody judged could reach the server."""
    with pytest.raises(TypeError, match="validate"):
        ValidatedConfig(directory=tmp_path, host="0.0.0.0", port=1, stale_after_seconds=-1, proof=None)
