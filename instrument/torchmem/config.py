"""Every setting of the library, validated once: what cannot be used cannot be represented.

A setting is a keyword of ``torchmem.install`` or an environment variable ``TORCHMEM_<NAME>``; the keyword wins.
Invariants: torch-free; all errors are ``ConfigError`` with the variable's name, the value and what is wanted.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, TypeVar

from torchmem.errors import ConfigError
from torchmem.wire.store import default_dir

T = TypeVar("T")

NATIVE, DISPATCH = ENGINES = ("native", "dispatch")


@dataclass(frozen=True)
class Setting:
    """How one setting is documented, read from text and checked."""

    help: str
    parse: Callable[[str], Any]
    valid: Callable[[Any], bool]
    wanted: str


def _flag(text: str) -> bool:
    values = {"1": True, "true": True, "yes": True, "on": True, "0": False, "false": False, "no": False, "off": False}
    return values[text.strip().lower()]


def _at_least(least: float, kinds: tuple[type, ...] = (int, float)) -> Callable[[Any], bool]:
    def valid(value: Any) -> bool:
        return type(value) in kinds and bool(least <= value < float("inf"))

    return valid


def _setting(default: Any, help: str, parse: Callable[[str], Any], valid: Callable[[Any], bool], wanted: str) -> Any:  # noqa: A002  # the field's own name
    metadata = {"setting": Setting(help, parse, valid, wanted)}
    return (
        field(default_factory=default, metadata=metadata)
        if callable(default)
        else field(default=default, metadata=metadata)
    )


def _default_train_job() -> str:
    """The launcher's name for the run, where it gives one."""
    run_id = os.environ.get("TORCHELASTIC_RUN_ID", "")
    if run_id and run_id != "none":
        return run_id
    if job := os.environ.get("SLURM_JOB_ID"):
        return f"{os.environ.get('SLURM_JOB_NAME', 'slurm')}-{job}"
    return "train"


@dataclass(frozen=True, kw_only=True)
class Config:
    """Validated settings of one ``Monitor``."""

    enabled: bool = _setting(
        True,  # noqa: FBT003  # the default
        "`0` turns everything off: `install` then watches nothing",
        _flag,
        lambda v: isinstance(v, bool),
        "a boolean",
    )
    train_job: str = _setting(
        _default_train_job,
        "name of the training job: the `train_job` label, and the folder of its records (default: torchrun's or Slurm's"
        " name of the run, else `train`)",
        str,
        lambda v: isinstance(v, str) and bool(re.fullmatch(r"[^\x00-\x1f\x7f]{1,200}", v)),
        "1 to 200 printable characters",
    )
    dir: Path = _setting(  # noqa: RUF009  # a dataclass field
        default_dir,
        "directory of the records, shared with the sidecar (default: `/dev/shm/torchmem-<uid>`, else the temporary"
        " directory)",
        Path,
        lambda v: isinstance(v, Path) and v.is_absolute(),
        "an absolute path",
    )
    depth: int = _setting(
        2,
        "how deep modules are told apart: components of the name, indices not counted, so that `layers.17.mlp` has"
        " depth 2; deeper modules count for the one that holds them",
        int,
        _at_least(0, (int,)),
        "a whole number, 0 or more",
    )
    engine: str = _setting(
        "native",
        "what counts: `native`, every step, and `dispatch` only where that cannot be built; or `dispatch`, which puts"
        " nothing under torch's allocator and counts one step in `sample_every`",
        str,
        lambda v: v in ENGINES,
        " or ".join(ENGINES),
    )
    sample_every: int = _setting(
        200,
        "with the engine `dispatch`, one step in so many is counted; all ranks must be given the same number",
        int,
        _at_least(2, (int,)),
        "a whole number, 2 or more",
    )
    publish_interval: float = _setting(
        1.0, "seconds between two records", float, _at_least(0.05), "a number of seconds, 0.05 or more"
    )
    window: float = _setting(
        60.0,
        "seconds for which a step's peak stays published; at least two scrape intervals",
        float,
        _at_least(0.1),
        "a number of seconds, 0.1 or more",
    )
    forecast: Path | None = _setting(  # noqa: RUF009  # a dataclass field
        None,
        "a forecast saved by `torchmem forecast --save`, of a job of as many ranks, that step peaks are held against;"
        " one that cannot be used costs a warning, not the job (default: none)",
        Path,
        lambda v: v is None or (isinstance(v, Path) and "\0" not in str(v)),
        "a path",
    )


def load(overrides: Mapping[str, Any], environment: Mapping[str, str] | None = None) -> Config:
    """The settings given as keywords, else by the environment, else the defaults.

    Raises:
        ConfigError: an unknown keyword, or a value that cannot be used.
    """
    environment = os.environ if environment is None else environment
    known = {f.name: f for f in fields(Config)}
    for name in overrides:
        if name not in known:
            raise ConfigError(f"unknown setting {name!r}: the settings are {', '.join(known)}")
    chosen: dict[str, Any] = {}
    for name, f in known.items():
        setting: Setting = f.metadata["setting"]
        variable = f"TORCHMEM_{name.upper()}"
        if name in overrides:
            chosen[name] = _coerced(f.type, overrides[name])
            source = name
        elif environment.get(variable):
            chosen[name] = _parsed(setting, variable, environment[variable])
            source = variable
        else:
            continue
        if not setting.valid(chosen[name]):
            raise ConfigError(f"{source}={overrides.get(name, environment.get(variable))!r}: give {setting.wanted}")
    return Config(**chosen)


def _coerced(kind: Any, value: Any) -> Any:
    return Path(value) if kind.startswith("Path") and isinstance(value, str | os.PathLike) else value


def _parsed(setting: Setting, variable: str, text: str) -> Any:
    try:
        return setting.parse(text)
    except (ValueError, KeyError):
        raise ConfigError(f"{variable}={text!r}: give {setting.wanted}") from None
