"""torchmem: which bytes fill each device of a PyTorch training job, why, and whether that is changing.

    import torchmem

    monitor = torchmem.install(model, optimizer)
    ...                                             # train as before
    monitor.close()                                 # or: with torchmem.install(model, optimizer): ...

Public names are loaded on first use; importing the package imports neither torch nor a compiler.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torchmem.errors import BuildError, ConfigError, ForecastError, InstallError, TorchmemError
    from torchmem.forecasting.job import forecast
    from torchmem.model import RefType
    from torchmem.monitor import Monitor, install
    from torchmem.tracker import MemTracker

__all__ = [
    "BuildError",
    "ConfigError",
    "ForecastError",
    "InstallError",
    "MemTracker",
    "Monitor",
    "RefType",
    "TorchmemError",
    "forecast",
    "install",
]

__version__ = "0.1.0"

_HOMES = {
    "forecast": "forecasting.job",
    "install": "monitor",
    "MemTracker": "tracker",
    "Monitor": "monitor",
    "RefType": "model",
}


def __getattr__(name: str) -> object:
    """Imports a public name's home on first use (PEP 562)."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    value: object = getattr(import_module(f"torchmem.{_HOMES.get(name, 'errors')}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])
