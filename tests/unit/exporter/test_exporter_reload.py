"""Values that follow their files."""

from __future__ import annotations

import pytest

from torchmem.errors import ConfigError
from torchmem_exporter.serving.reload import RETRY_SECONDS, Loaded, Reloaded


class Loader:
    """Reads a file that names a second one; counts how often."""

    def __init__(self):
        self.num_loads = 0

    def __call__(self, path, _in_force):
        self.num_loads += 1
        second = path.with_name(path.read_text())
        if not second.exists():
            raise ConfigError(f"{second} is missing")
        return Loaded(second.read_text(), (path, second))


@pytest.fixture
def first(tmp_path):
    (tmp_path / "a").write_text("in a")
    path = tmp_path / "first"
    path.write_text("a")
    return path


def test_nothing_is_read_while_nothing_changes(first):
    """Each request would cost the reading of every file."""
    loader = Loader()
    reloaded = Reloaded(first, loader)
    num_loads = loader.num_loads
    assert [reloaded.current() for _ in range(5)] == ["in a"] * 5
    assert loader.num_loads == num_loads


def test_every_file_is_followed(first, tmp_path):
    """A renewed certificate would not be served until the file that names it changed too."""
    reloaded = Reloaded(first, Loader())
    (tmp_path / "a").write_text("renewed")
    assert reloaded.current() == "renewed"
    (tmp_path / "b").write_text("in b")
    first.write_text("b")
    assert reloaded.current() == "in b"
    (tmp_path / "b").write_text("renewed b")
    assert (reloaded.current(), reloaded.num_reloads) == ("renewed b", 3)


def test_links_are_followed(first, tmp_path):
    """Kubernetes renews a mounted secret by changing a link."""
    (tmp_path / "a").unlink()
    for name in ("old", "new"):
        (tmp_path / name).write_text(name)
    (tmp_path / "a").symlink_to("old")
    reloaded = Reloaded(first, Loader())
    (tmp_path / "link").symlink_to("new")
    (tmp_path / "link").rename(tmp_path / "a")
    assert reloaded.current() == "new"


def test_the_last_good_one_stays_until_there_is_a_better(first, tmp_path, caplog):
    """A mistake in a file would end the service, or be forgotten once what it lacked is there."""
    now = [0.0]
    loader = Loader()
    reloaded = Reloaded(first, loader, clock=lambda: now[0])
    first.write_text("later")
    for _ in range(3):
        assert reloaded.current() == "in a"
    now[0] += RETRY_SECONDS
    assert reloaded.current() == "in a"
    assert (reloaded.num_failures, caplog.text.count("cannot be used")) == (1, 1)
    (tmp_path / "later").write_text("there")  # of which nothing was known
    assert reloaded.current() == "in a"
    now[0] += RETRY_SECONDS
    assert (reloaded.current(), reloaded.num_reloads) == ("there", 1)


def test_a_change_during_the_reading_is_seen(first, tmp_path):
    """A certificate replaced at the wrong moment would be served in its old form for ever."""

    class Interrupted(Loader):
        def __call__(self, path, in_force):
            loaded = super().__call__(path, in_force)
            if self.num_loads < 4:
                (tmp_path / "a").write_text(f"version {self.num_loads}")
            return loaded

    reloaded = Reloaded(first, Interrupted())
    assert [reloaded.current() for _ in range(3)][-1] == "version 3"


def test_what_cannot_be_read_at_first_is_no_value(first):
    """A sidecar would start without the protection that was asked for."""
    first.write_text("nowhere")
    with pytest.raises(ConfigError, match="missing"):
        Reloaded(first, Loader())
