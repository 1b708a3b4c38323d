"""Settings: from keywords, from the environment, refused when unusable."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from torchmem import config
from torchmem.errors import ConfigError


def test_defaults_are_valid(monkeypatch):
    """A job that sets nothing would not start."""
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    settings = config.load({}, {})
    assert settings.train_job == "train"
    assert settings.depth == 2
    assert settings.dir.is_absolute()


def test_keyword_wins_over_environment():
    """A setting in the script would be overridden by one in the environment."""
    environment = {"TORCHMEM_DEPTH": "5", "TORCHMEM_TRAIN_JOB": "from-environment", "TORCHMEM_ENABLED": "off"}
    settings = config.load({"depth": 3}, environment)
    assert (settings.depth, settings.train_job, settings.enabled) == (3, "from-environment", False)


def test_the_launcher_names_the_job(monkeypatch):
    """Two jobs on one node would write one job's records."""
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    monkeypatch.setenv("SLURM_JOB_ID", "42")
    monkeypatch.setenv("SLURM_JOB_NAME", "llama")
    assert config.load({}, {}).train_job == "llama-42"
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "run-7")
    assert config.load({}, {}).train_job == "run-7"


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("depth", "-1"),
        ("depth", "two"),
        ("depth", "1.5"),
        ("publish_interval", "0"),
        ("publish_interval", "nan"),
        ("window", "inf"),
        ("dir", "relative/path"),
        ("train_job", "a\nb"),
        ("enabled", "maybe"),
    ],
)
def test_unusable_values_are_refused_by_name(name, text):
    """A typo in a setting would be ignored, or surface as something else later."""
    with pytest.raises(ConfigError, match=f"TORCHMEM_{name.upper()}=.*give "):
        config.load({}, {f"TORCHMEM_{name.upper()}": text})


@pytest.mark.parametrize(
    ("name", "value"), [("depth", True), ("depth", "3"), ("window", None), ("dir", 5), ("forecast", 5)]
)
def test_wrong_types_are_refused(name, value):
    """A keyword of the wrong type would be taken as something it is not."""
    with pytest.raises(ConfigError, match=name):
        config.load({name: value}, {})


def test_unknown_settings_are_refused():
    """A misspelled setting would be silently ignored."""
    with pytest.raises(ConfigError, match="unknown setting 'dept': the settings are enabled, train_job"):
        config.load({"dept": 3}, {})


def test_a_path_may_be_text():
    """A directory given as text would be refused."""
    assert config.load({"dir": "/tmp"}, {}).dir == Path("/tmp")
    assert config.load({"forecast": "a.json"}, {}).forecast == Path("a.json")
    assert config.load({}, {"TORCHMEM_FORECAST": "b.json"}).forecast == Path("b.json")


def test_no_forecast_may_be_said_aloud():
    """A script that passes its own optional argument on would not start without it."""
    assert config.load({"forecast": None}, {"TORCHMEM_FORECAST": "b.json"}).forecast is None


def test_every_setting_is_documented():
    """A setting would exist that its users cannot find."""
    for field in dataclasses.fields(config.Config):
        assert field.metadata["setting"].help
